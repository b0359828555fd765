"""Builds tokenpipe._native and tokenpipe._ops out of cuda_ops/, and puts the sources of the Paddle
operators into the package (they are compiled where Paddle is: tokenpipe/ops/build.py). The rest of
the package is in pyproject.toml.

Where nvcc is on the PATH, the kernels are compiled too, into tokenpipe/_kernels.fatbin; the module
loads them through the driver, so it is the same module with and without.

Switches of the build, from the environment: TOKENPIPE_DEBUG=1 (-O0 -g);
TOKENPIPE_SANITIZE=address|thread, whose extension loads only under LD_PRELOAD of that runtime;
TOKENPIPE_CUDA=0 (no kernels) and TOKENPIPE_CUDA_ARCHITECTURES="80 90" (for these GPUs, and as PTX
for all that are newer than the first).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

COMMON_ARCHITECTURES = ("80", "86", "89", "90", "100", "120")

compile_args = ["-O3", "-Wall", "-Wextra"]
link_args: list[str] = []

if os.environ.get("TOKENPIPE_DEBUG", "0") not in ("", "0"):
    compile_args += ["-O0", "-g"]

sanitizer = os.environ.get("TOKENPIPE_SANITIZE", "")
if sanitizer not in ("", "address", "thread"):
    raise SystemExit(f"TOKENPIPE_SANITIZE is {sanitizer!r}: it may be address or thread")
if sanitizer:
    compile_args += ["-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}"]
    link_args += [f"-fsanitize={sanitizer}"]

headers = sorted(glob("cuda_ops/*.h") + glob("cuda_ops/*.hpp"))


class BuildPy(build_py):
    """Adds what the Paddle operators are compiled from; a checkout has it beside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "tokenpipe", "ops", "cuda_ops")
            folder.mkdir(parents=True, exist_ok=True)
            for path in [*headers, "cuda_ops/paddle_ops.cc"]:
                shutil.copy(path, folder)


class BuildExt(build_ext):
    """Builds the module, and the kernels where there is an nvcc."""

    def run(self) -> None:
        super().run()
        folder = os.path.dirname(self.get_ext_fullpath("tokenpipe._native"))
        kernels = os.path.join(folder, "_kernels.fatbin")
        nvcc = shutil.which("nvcc")
        if nvcc is None or os.environ.get("TOKENPIPE_CUDA") == "0":
            if os.path.exists(kernels):  # of an earlier build: it may be of another layout
                os.remove(kernels)
            print("no kernels for GPUs: " + ("TOKENPIPE_CUDA=0" if nvcc else "no nvcc"))
            return
        targets = architectures(nvcc)
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in targets]
        codes.append(f"-gencode=arch=compute_{targets[0]},code=compute_{targets[0]}")
        flags = ["-std=c++20", "-Icuda_ops", "-fatbin", "--threads=0"]
        command = [nvcc, *flags, *codes, "cuda_ops/pack.cu", "-o", kernels]
        print(" ".join(command))
        if subprocess.call(command):
            raise SystemExit("nvcc failed; TOKENPIPE_CUDA=0 builds without kernels for GPUs")


def architectures(nvcc: str) -> list[str]:
    """Returns those to compile for, the oldest first."""
    given = os.environ.get("TOKENPIPE_CUDA_ARCHITECTURES", "").split()
    if given:
        if not all(a.isdecimal() for a in given):
            raise SystemExit(f"TOKENPIPE_CUDA_ARCHITECTURES is {given}: numbers, as in '80 90'")
        return sorted(given, key=int)
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return [a for a in COMMON_ARCHITECTURES if f"compute_{a}" in known.stdout.split()]


setup(
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
    ext_modules=[
        Pybind11Extension(  # adds -fvisibility=hidden
            "tokenpipe._native",
            ["cuda_ops/module.cpp"],
            depends=headers + sorted(glob("cuda_ops/*.cu")),
            cxx_std=20,
            # Python's own flags carry -DNDEBUG; a broken promise of ours must stop the process.
            undef_macros=["NDEBUG"],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            libraries=["dl"],
        ),
        Extension(  # no module of Python's: a library with a C face
            "tokenpipe._ops",
            ["cuda_ops/tokenpipe_ops.cpp"],
            depends=headers,
            language="c++",
            undef_macros=["NDEBUG"],
            extra_compile_args=["-std=c++20", "-fvisibility=hidden", *compile_args],
            extra_link_args=link_args,
        ),
    ],
)
