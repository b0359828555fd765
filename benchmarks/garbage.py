"""Garbage collections of every process of a pipeline, counted by gc.callbacks in each."""

from __future__ import annotations

import gc
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_HOOK = Path(__file__).with_name("gc_watch")
_FOLDER = "TOKENPIPE_BENCH_GC_FOLDER"


class Watch:
    """Processes that start within the `with` count their collections; so does this one."""

    def __enter__(self) -> Watch:
        self._folder = Path(tempfile.mkdtemp(prefix="tokenpipe-bench-"))
        self._own = 0
        self._before = {name: os.environ.get(name) for name in ("PYTHONPATH", _FOLDER)}
        path = [str(_HOOK), *filter(None, [self._before["PYTHONPATH"]])]
        os.environ.update({"PYTHONPATH": os.pathsep.join(path), _FOLDER: str(self._folder)})
        gc.callbacks.append(self._count)
        return self

    def _count(self, phase: str, _info: dict[str, Any]) -> None:
        self._own += phase == "stop"

    def counts(self, pids: Mapping[str, int]) -> dict[str, int]:
        """Returns the collections so far of each role, and of this process as 'client'."""
        found = {role: self._of(pid) for role, pid in pids.items()}
        found["client"] = self._own
        return found

    def _of(self, pid: int) -> int:
        return int(struct.unpack("<Q", (self._folder / str(pid)).read_bytes())[0])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._count)
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(self._folder)
