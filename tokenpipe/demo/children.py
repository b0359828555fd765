"""The demo's child processes: started, awaited, ended on every path; and a watch over the roles."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from tokenpipe.demo.errors import ChildExitedError, DemoError

READY_POLL_S = 0.1


class Child:
    """A process with JSON lines on stdout; as a context manager it never outlives its block."""

    def __init__(
        self,
        role: str,
        command: Sequence[str],
        *,
        stderr: IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        grace_s: float,
        ends_at_eof: bool = False,
    ) -> None:
        """`ends_at_eof`: leaving the block closes its stdin, and sends no SIGTERM."""
        self.role = role
        self._grace_s, self._ends_at_eof = grace_s, ends_at_eof
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=pass_fds,
            text=True,
            encoding="utf-8",
            # Ctrl-C at the terminal is for the launcher alone, which ends the others in order.
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # It reads on after the ready line, so that a child never blocks in a full pipe.
        threading.Thread(target=self._read_stdout, name=f"{role}-stdout", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Returns the ready line. Raises ChildExitedError, or DemoError when none comes in time."""
        line = self._first_line(time.monotonic() + timeout_s)
        if line is None:
            raise DemoError(
                f"start {self.role} (pid {self.pid}): no ready line within {timeout_s:.0f} s"
            )
        try:
            ready = json.loads(line)
        except json.JSONDecodeError:
            ready = None
        if not isinstance(ready, dict) or ready.get("event") != "ready":
            raise DemoError(
                f"start {self.role} (pid {self.pid}): ready line expected, got {line!r}"
            )
        return ready

    def _first_line(self, deadline_s: float) -> str | None:
        """None at the deadline. Raises ChildExitedError."""
        while time.monotonic() < deadline_s:
            # Looked at first: what it wrote before its end is still read below. An end-of-file
            # would not do, since the roles of an ended coordinator can hold its stdout open.
            exit_code = self.process.poll()
            try:
                return self._lines.get(timeout=READY_POLL_S)
            except queue.Empty:
                if exit_code is not None:
                    raise ChildExitedError(self.role, self.pid, exit_code) from None
        return None

    def send(self, line: str) -> None:
        """Writes a line to its stdin. Raises ChildExitedError."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ChildExitedError(self.role, self.pid, self._end()) from None

    def close_stdin(self) -> None:
        """Gives the process its end-of-file."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            return  # what it did not take; it has exited, which whoever waits for it will see

    def finish(self) -> int:
        """Closes stdin and waits; returns the exit code, -9 if killed after its grace."""
        self.close_stdin()
        return self._end(terminate=False)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code, -9 if killed after its grace."""
        return self._end()

    def _end(self, terminate: bool = True) -> int:
        try:
            if terminate:
                self.process.terminate()
            return self.process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        except BaseException:
            # A second Ctrl-C: no more grace.
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None and not self._ends_at_eof:
            self.terminate()
        self.finish()


class RoleWatch:
    """Notices at once when a process ends, also one that is not our child. Holds a pidfd each."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._poll = select.poll()
        self._roles: dict[int, tuple[str, int]] = {}
        self._gone: list[tuple[str, int]] = []
        for role, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone.append((role, pid))
                continue
            self._roles[descriptor] = (role, pid)
            self._poll.register(descriptor, select.POLLIN)

    def exited(self) -> list[tuple[str, int]]:
        """Returns (role, pid) of the processes that have ended since the last call."""
        gone, self._gone = self._gone, []
        for descriptor, _ in self._poll.poll(0) if self._roles else ():
            gone.append(self._roles.pop(descriptor))
            self._poll.unregister(descriptor)
            os.close(descriptor)
        return gone

    def __enter__(self) -> RoleWatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._roles:
            os.close(descriptor)
        self._roles.clear()
