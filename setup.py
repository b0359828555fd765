"""Builds tokenpipe._native and tokenpipe._ops out of cuda_ops/, and puts the sources of the Paddle
operators into the package (they are compiled where Paddle is: tokenpipe/ops/build.py). The rest of
the package is in pyproject.toml.

Switches of the build, from the environment: TOKENPIPE_DEBUG=1 (-O0 -g) and
TOKENPIPE_SANITIZE=address|thread, whose extension loads only under LD_PRELOAD of that runtime.
"""

from __future__ import annotations

import os
import shutil
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

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


setup(
    cmdclass={"build_py": BuildPy},
    ext_modules=[
        Pybind11Extension(  # adds -fvisibility=hidden
            "tokenpipe._native",
            ["cuda_ops/module.cpp"],
            depends=headers,
            cxx_std=20,
            # Python's own flags carry -DNDEBUG; a broken promise of ours must stop the process.
            undef_macros=["NDEBUG"],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
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
