"""Functions in forked processes that begin together; each returns a value, or all are ended."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

Gate = Callable[[], None]
Work = Callable[[Gate], Any]
"""Sets up what it needs, calls the gate, which returns when everybody has, and does its part."""

_PIPE_BYTES = 1 << 16
"""A pipe takes so much in one write; no value is longer."""


class StalledError(Exception):
    """A run did not end in time, or a process of it failed; the message says which."""


def together(works: Sequence[Work], timeout_s: float) -> list[Any]:
    """Runs each function in a process of its own and returns their values in order.

    Raises StalledError, with every process ended, when one fails or the time is up.
    """
    deadline = time.monotonic() + timeout_s
    arrived, go = os.pipe(), os.pipe()
    results, pids = [], []
    try:
        for work in works:
            result = os.pipe()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _child(work, arrived[1], go[0], result[1])
            os.close(result[1])
            results.append(result[0])
            pids.append(pid)
        for _ in works:
            _read(arrived[0], 1, deadline, "setting up")
        os.write(go[1], b"g" * len(works))
        return [pickle.loads(_read(end, _PIPE_BYTES, deadline, "running")) for end in results]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # one that has returned its value has nothing left to do
            os.waitpid(pid, 0)
        for end in (*arrived, *go, *results):
            os.close(end)


def _child(work: Work, arrived: int, go: int, result: int) -> None:
    code = 1
    try:

        def gate() -> None:
            os.write(arrived, b"a")
            os.read(go, 1)

        os.write(result, pickle.dumps(work(gate)))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _read(end: int, most: int, deadline: float, while_: str) -> bytes:
    """Returns up to `most` bytes of what a child has written."""
    ready, _, _ = select.select([end], [], [], max(0.0, deadline - time.monotonic()))
    data = os.read(end, most) if ready else b""
    if not data:
        raise StalledError(f"{'a process failed' if ready else 'time is up'} while {while_}")
    return data
