"""Compiles a file of benchmarks/native/ into build/benchmarks/, when its sources are newer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[1]
_SOURCES = _ROOT / "benchmarks" / "native"
_BUILT = _ROOT / "build" / "benchmarks"
_FLAGS = ("-std=c++20", "-O3", "-UNDEBUG", "-Wall", "-Wextra", "-pthread")
"""As setup.py builds the product, but for the optimisation that a Python brings along."""


def compiler() -> str:
    """Returns the compiler that builds, as `CXX` or the default names it."""
    return os.environ.get("CXX", "g++")


def program(name: str, *flags: str) -> Path:
    """Builds NAME.cpp as a program and returns its path. Raises CalledProcessError."""
    return _build(name, _BUILT / name, *flags)


def module(name: str) -> ModuleType:
    """Builds NAME.cpp as a module of Python and imports it. Raises CalledProcessError, and
    ImportError where pybind11 is missing."""
    import pybind11

    includes = (pybind11.get_include(), sysconfig.get_path("include"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    flags = ("-shared", "-fPIC", "-fvisibility=hidden", *(f"-I{i}" for i in includes))
    built = _build(name, _BUILT / f"{name}{suffix}", *flags)
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _build(name: str, target: Path, *flags: str) -> Path:
    source = _SOURCES / f"{name}.cpp"
    headers = [*(_ROOT / "cuda_ops").glob("*.h*"), *_SOURCES.glob("*.hpp")]
    newest = max(path.stat().st_mtime for path in (source, *headers))
    if not target.exists() or target.stat().st_mtime < newest:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        command = [compiler(), *_FLAGS, f"-I{_ROOT / 'cuda_ops'}", *flags, str(source)]
        subprocess.run([*command, "-o", str(fresh)], check=True)
        fresh.rename(target)  # at once: two benchmarks may build at the same time
    return target
