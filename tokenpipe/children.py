"""The coordinator's child processes: spawn, watch, reap, stop.

Roles are started as `sys.executable -m tokenpipe ...`: no fork (CUDA does not survive it) and no
multiprocessing (it imports the user's main module again).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_log = logging.getLogger("tokenpipe.children")


@dataclass
class Child:
    """One role's process."""

    role: str
    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid


@dataclass(frozen=True)
class Exited:
    """A role whose process has ended."""

    role: str
    pid: int
    how: str


def how_it_ended(returncode: int) -> str:
    """Returns the end of a process in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"


class Children:
    """Starts the roles and stops them on the way out: TERM, grace, KILL."""

    def __init__(self, name: str, log_level: str) -> None:
        self._name = name
        self._log_level = log_level
        self._children: dict[str, Child] = {}

    def spawn(self, role: str) -> Child:
        """Starts one role's process."""
        command = [sys.executable, "-m", "tokenpipe", "role", role, "--name", self._name]
        process = subprocess.Popen(
            [*command, "--log-level", self._log_level],
            stdin=subprocess.DEVNULL,
            # The ready line alone goes to stdout; what a role prints is for the operator.
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        child = Child(role, process, os.pidfd_open(process.pid))
        self._children[role] = child
        _log.debug("started %s as pid %d", role, process.pid)
        return child

    @property
    def pids(self) -> dict[str, int]:
        """Pid of each role that runs."""
        return {child.role: child.pid for child in self._children.values()}

    @property
    def pidfds(self) -> list[int]:
        """Descriptors that become readable when a role dies."""
        return [child.pidfd for child in self._children.values()]

    def reap(self) -> list[Exited]:
        """Collects the roles that have ended since the last call."""
        exited = []
        for child in list(self._children.values()):
            returncode = child.process.poll()
            if returncode is None:
                continue
            del self._children[child.role]
            os.close(child.pidfd)
            exited.append(Exited(child.role, child.pid, how_it_ended(returncode)))
        return exited

    def stop(self, grace_s: float = 2.0) -> None:
        """Ends every role: TERM, then KILL for those that are still there after the grace."""
        for child in self._children.values():
            child.process.terminate()
        deadline = time.monotonic() + grace_s
        for child in self._children.values():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("%s (pid %d) did not stop: killed", child.role, child.pid)
                child.process.kill()
                child.process.wait()
            os.close(child.pidfd)
        self._children.clear()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Watch:
    """A thread that rings when a role dies or the owner's pipe ends, so that the coordinator, which
    sleeps on its bell in shared memory, notices at once."""

    def __init__(self, pidfds: list[int], owner_fd: int | None, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._owner_fd = owner_fd
        self.owner_is_gone = False
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        self._poll.register(self._wake_read, select.POLLIN)
        for fd in pidfds:
            self._poll.register(fd, select.POLLIN)
        if owner_fd is not None:
            self._poll.register(owner_fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="tokenpipe-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for fd, _events in self._poll.poll():
                if fd == self._wake_read:
                    return
                if fd == self._owner_fd:
                    # Nothing is ever written: readable means that every writing end is closed.
                    self.owner_is_gone = True
                self._poll.unregister(fd)
                self._ring()

    def close(self) -> None:
        """Ends the thread."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
