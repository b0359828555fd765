"""The fake CUDA driver (fake_cuda.cpp) as the tests steer it, and tensors on its device."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CUDA = 2  # DLPack's number of the device type
BFLOAT = 4  # DLPack's code of the dtype

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class FakeCuda:
    """One process's fake driver; `library` is what the product loads in place of libcuda."""

    def __init__(self, library: Path) -> None:
        self.library = str(library)
        self._native = ctypes.CDLL(self.library)
        for name in ("fake_stream", "fake_log"):
            getattr(self._native, name).restype = ctypes.c_void_p

    @classmethod
    def build(cls, folder: Path) -> FakeCuda:
        """Compiles it; the product loads it as it would load the driver."""
        library = folder / "libfake_cuda.so"
        flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(
            [
                *("g++", *flags, "-UNDEBUG", "-pthread", "-Icuda_ops"),
                *("-o", str(library), "tests/fake_cuda.cpp"),
            ],
            cwd=ROOT,
            check=True,
        )
        return cls(library)

    def make_stream(self) -> int:
        return int(self._native.fake_stream())

    def fail(self, call: str, nth: int, code: int = 719) -> None:
        """The nth coming call of that name fails."""
        self._native.fake_fail(call.encode(), nth, code)

    def break_all(self, code: int) -> None:
        """Every call fails and no stream goes on; 0 ends that."""
        self._native.fake_break(code)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No stream goes on."""
        self._native.fake_hold(1)
        try:
            yield
        finally:
            self._native.fake_hold(0)

    def run(self, count: int) -> None:
        """Lets held streams do so many things more, or all they can."""
        self._native.fake_run(count)

    @contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        self._native.fake_begin_capture(ctypes.c_void_p(stream))
        try:
            yield
        finally:
            is_good = self._native.fake_end_capture(ctypes.c_void_p(stream))
        assert is_good, "a call that is unsafe during a capture has ended it"

    def replay(self, stream: int) -> None:
        self._native.fake_replay(ctypes.c_void_p(stream))

    def set_order(self, seed: int) -> None:
        """In which order the kernel's blocks and threads run."""
        self._native.fake_set_order(seed)

    def set_devices(self, count: int) -> None:
        self._native.fake_set_devices(count)

    def set_uuid(self, uuid: bytes) -> None:
        self._native.fake_set_uuid(uuid)

    @property
    def held_things(self) -> int:
        """Contexts, modules, streams, memory, events and handles that nobody has released."""
        return int(self._native.fake_held())

    def take_log(self) -> list[str]:
        """The calls since the last time."""
        return ctypes.string_at(self._native.fake_log()).decode().split()

    def forget(self) -> None:
        """Forgets what a failing release has left."""
        self._native.fake_forget()

    def reset(self) -> None:
        self.break_all(0)
        self.fail("", 0)
        self._native.fake_hold(0)
        self.set_order(0)
        self.set_devices(1)
        self.set_uuid(b"fake device 000")
        self.take_log()
        OnCuda.kept.clear()


class OnCuda:
    """An array as a tensor on a CUDA device, which the fake driver's memory is.

    Its memory stays its own until the test is over, as that of a tensor must until the GPU is done.
    """

    kept: ClassVar[list[np.ndarray[Any, Any]]] = []

    def __init__(
        self, array: np.ndarray[Any, Any], device: int = 0, bfloat16: bool = False
    ) -> None:
        self.array, self._device, self._is_bfloat16 = array, device, bfloat16
        self.kept.append(array)

    def __len__(self) -> int:
        return len(self.array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        assert stream == -1, "nobody has told the driver to let one stream wait for another"
        capsule = self.array.__dlpack__()
        tensor = _capsule_pointer(capsule, b"dltensor")
        place = ctypes.cast(tensor + 8, ctypes.POINTER(ctypes.c_int32))
        place[0], place[1] = CUDA, self._device
        if self._is_bfloat16:
            ctypes.cast(tensor + 20, ctypes.POINTER(ctypes.c_uint8))[0] = BFLOAT
        return capsule
