"""Counts the garbage collections of the processes of a benchmark; garbage.py puts it on their path.

Python imports this name at its start. The count lies in a file of the process's own, 8 bytes."""

import gc
import mmap
import os
import struct
from typing import Any

_folder = os.environ.get("TOKENPIPE_BENCH_GC_FOLDER", "")

if _folder:
    _path = os.path.join(_folder, str(os.getpid()))
    with open(_path, "w+b") as _file:
        _file.truncate(8)
        _memory = mmap.mmap(_file.fileno(), 8)

    def _count(phase: str, _info: dict[str, Any]) -> None:
        if phase == "stop":
            _memory[:] = struct.pack("<Q", struct.unpack("<Q", _memory)[0] + 1)

    gc.callbacks.append(_count)
