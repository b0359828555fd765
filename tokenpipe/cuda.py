"""Which form of the output ops this process can use, CUDA's or the CPU's alone, and why.

The driver is loaded when it is first needed, never at import: a launcher that forks must not have
touched it, and most processes have no use for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenpipe import _native
from tokenpipe.config import cuda_library
from tokenpipe.errors import CudaError, OpArgumentError

KERNELS = Path(__file__).with_name("_kernels.fatbin")
"""What setup.py has compiled out of cuda_ops/pack.cu, where there was an nvcc."""


DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 2, 13
"""Device types of DLPack: memory of a GPU, and managed memory."""


def device_of(tensor: Any) -> int | None:
    """Returns the CUDA device that a tensor lies on; None on the CPU."""
    is_array = type(tensor).__module__ == "numpy"  # which this module does not load
    if is_array or not hasattr(tensor, "__dlpack_device__"):
        return None
    kind, ordinal = tensor.__dlpack_device__()
    return int(ordinal) if int(kind) in (DLPACK_CUDA, _DLPACK_CUDA_MANAGED) else None


def refuse_on_device(name: str, tensor: Any, instead: str) -> None:
    """Raises OpArgumentError for a tensor on a GPU, where an op takes those on the CPU alone."""
    device = device_of(tensor)
    if device is not None:
        where = f"{name} lies on CUDA device {device}, must be on the CPU"
        raise OpArgumentError(name, f"{where}: {instead}")


@dataclass(frozen=True)
class Choice:
    """What was chosen: `form` is cuda or cpu; `devices` are the names of the GPUs, by ordinal."""

    form: str
    why: str
    devices: tuple[str, ...]


@cache
def driver(library: str) -> _native.CudaDriver:
    """Returns the table of the driver's calls. Raises CudaError when it is not there."""
    return _native.CudaDriver(library)


def kernels() -> bytes:
    """Returns the compiled kernels. Raises CudaError when this build has none."""
    try:
        return KERNELS.read_bytes()
    except FileNotFoundError:
        raise CudaError(
            "the kernels",
            0,
            f"{KERNELS.name} is not there: the package was built without nvcc; with nvcc on the "
            "PATH, build it again",
        ) from None


def choose() -> Choice:
    """Looks at the driver, its devices and the kernels, and says what a save can use."""
    devices: tuple[str, ...] = ()
    library = cuda_library()
    try:
        loaded = driver(library)
        devices = tuple(loaded.devices())
        if not devices:
            return Choice("cpu", f"{library} knows of no device", devices)
        image = kernels()
        for ordinal in range(len(devices)):
            loaded.check_kernels(ordinal, image)
    except CudaError as error:
        return Choice("cpu", str(error), devices)
    major, minor = loaded.version()
    return Choice("cuda", f"{library} serves CUDA {major}.{minor}, the kernels load", devices)
