"""Builds tokenpipe._native out of cuda_ops/; the rest of the package is in pyproject.toml.

Switches of the build, from the environment: TOKENPIPE_DEBUG=1 (-O0 -g) and
TOKENPIPE_SANITIZE=address|thread, whose extension loads only under LD_PRELOAD of that runtime.
"""

from __future__ import annotations

import os
from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

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

setup(
    ext_modules=[
        Pybind11Extension(  # adds -fvisibility=hidden
            "tokenpipe._native",
            ["cuda_ops/module.cpp"],
            depends=sorted(glob("cuda_ops/*.h") + glob("cuda_ops/*.hpp")),
            cxx_std=20,
            # Python's own flags carry -DNDEBUG; a broken promise of ours must stop the process.
            undef_macros=["NDEBUG"],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ]
)
