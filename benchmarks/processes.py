"""The processes of a benchmark: the engine is started here; CPU and memory of all are read here."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

import tokenpipe as tp

_ENGINE = Path(__file__).with_name("engine.py")
_END_S = 30.0


class Engine:
    """An engine process (engine.py); leaving the `with` ends it."""

    def __init__(self, name: str, mode: str, steps: int, rows: int, **flags: Any) -> None:
        command = [sys.executable, str(_ENGINE), f"--name={name}", f"--mode={mode}"]
        command += [f"--steps={steps}", f"--rows={rows}"]
        for flag, value in flags.items():
            if value is True:
                command.append(f"--{flag}")
            elif value:
                command.append(f"--{flag}={value}")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._facts: dict[str, Any] | None = None

    def admit(self, admissions: list[tp.Admission]) -> None:
        """Tells the engine's scheduler which request runs in which row; one that has ended is told
        nothing."""
        pairs = np.array([(a.row, a.generation) for a in admissions], np.uint32)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(pairs.tobytes())

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def facts(self) -> dict[str, Any]:
        """Returns its last line. Blocks until it has ended; raises RuntimeError when it failed."""
        if self._facts is None:
            assert self._process.stdout is not None
            line = self._process.stdout.read()
            if self._process.wait(_END_S) != 0:
                raise RuntimeError(f"the engine process ended with {self._process.returncode}")
            self._facts = json.loads(line)
        return self._facts

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_running and kind is not None:
            self._process.kill()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                end.close()
        self._process.wait(_END_S)


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Returns CPU seconds so far of each role, and of this process as 'client'."""
    used = {role: time.clock_gettime(_cpu_clock(pid)) for role, pid in pids.items()}
    used["client"] = time.process_time()
    return used


def _cpu_clock(pid: int) -> int:
    """The clock that clock_getcpuclockid(3) names: in nanoseconds, where /proc counts in 10 ms."""
    return (~pid << 3) | 2


def resident_mb(pids: Mapping[str, int]) -> dict[str, float]:
    """Returns the resident memory of each role, the shared pages that it has touched included."""
    return {r: round(psutil.Process(p).memory_info().rss / 1e6, 1) for r, p in pids.items()}
