"""Compiles cuda_ops/paddle_ops.cc against the installed Paddle: once for each Paddle, compiler and
version of the sources, into a folder of the user's own.

`python -c 'import tokenpipe.ops.paddle'` does it ahead of time, in a container's image for
instance.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenpipe.errors import OpsBuildError

_log = logging.getLogger("tokenpipe.ops.build")

_SOURCE = "paddle_ops.cc"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


def paddle_library(version: str, includes: Sequence[Path], link: Sequence[str]) -> Path:
    """Returns the library of the operators, which it compiles when the cache has none for this
    Paddle.

    `version` tells this Paddle from every other; `includes` and `link` are what the compiler needs
    of it. The cache is TOKENPIPE_CACHE_DIR, or tokenpipe in XDG_CACHE_HOME, or ~/.cache/tokenpipe.
    Blocks while another process compiles the same. Raises OpsBuildError.
    """
    compiler = _compiler()
    sources = _sources()
    command = [*compiler, *_FLAGS, f"-I{sources}"]
    for folder in includes:
        command += ["-isystem", str(folder)]
    command += [str(sources / _SOURCE), *link]
    folder = _own_folder()
    target = folder / f"paddle_ops-{_digest(version, compiler, command, sources)}.so"
    if not target.exists():
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():  # nobody has compiled it while we waited
                _compile(command, target)
    return target


def _compile(command: Sequence[str], target: Path) -> None:
    _log.info("compiling the Paddle operators into %s, which takes some ten seconds", target)
    part = target.with_suffix(".part")  # ours alone: the lock is held
    whole = [*command, "-o", str(part)]
    done = subprocess.run(whole, capture_output=True, text=True)
    if done.returncode != 0:
        part.unlink(missing_ok=True)
        said = "\n".join((done.stderr or done.stdout).splitlines()[:20])
        raise OpsBuildError(f"{shlex.join(whole)} failed ({done.returncode}):\n{said}")
    part.rename(target)  # whole or not at all


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "g++")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise OpsBuildError(
            f"no C++ compiler: {command[0]!r} is not there. Install g++ 12 or newer or set CXX"
        )
    return command


def _sources() -> Path:
    """cuda_ops/ of the checkout, or its copy in the installed package."""
    here = Path(__file__).parent
    for folder in (here / "cuda_ops", here.parents[1] / "cuda_ops"):
        if (folder / _SOURCE).exists():
            return folder
    raise OpsBuildError(f"{_SOURCE} is not in this installation of tokenpipe: install it again")


def _digest(version: str, compiler: Sequence[str], command: Sequence[str], sources: Path) -> str:
    asked = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    if asked.returncode != 0:
        raise OpsBuildError(f"{shlex.join(compiler)} --version failed: {asked.stderr.strip()}")
    digest = hashlib.sha256("\0".join((version, asked.stdout, *command)).encode())
    for path in sorted(sources.iterdir()):
        if path.suffix in (".h", ".hpp", ".cc"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _own_folder() -> Path:
    """Only this user may write where a library is loaded from."""
    try:
        if given := os.environ.get("TOKENPIPE_CACHE_DIR"):
            folder = Path(given)
        else:
            caches = os.environ.get("XDG_CACHE_HOME")
            folder = (Path(caches) if caches else Path.home() / ".cache") / "tokenpipe"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        about = folder.stat()
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError) as error:  # no home
        raise OpsBuildError(
            f"no folder for the compiled operators: {error}; name one in TOKENPIPE_CACHE_DIR"
        ) from error
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise OpsBuildError(
            f"{folder} belongs to user {about.st_uid} with mode {about.st_mode & 0o777:o}: others "
            "could put a library there; name a folder of your own in TOKENPIPE_CACHE_DIR"
        )
    if not is_writable:
        raise OpsBuildError(f"{folder} cannot be written; name another in TOKENPIPE_CACHE_DIR")
    return folder
