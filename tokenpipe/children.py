"""Processes: spawn, adopt, watch, reap, kill, stop.

Roles are started as `sys.executable -m tokenpipe ...`: no fork (CUDA does not survive it) and no
multiprocessing (it imports the user's main module again).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tokenpipe.errors import ConfigError, ExitCode, PipelineStartError
from tokenpipe.segment import start_time

_log = logging.getLogger("tokenpipe.children")


@dataclass
class Child:
    """One role's process: ours by birth, or adopted from a coordinator that died."""

    role: str
    pid: int
    pidfd: int
    process: subprocess.Popen[bytes] | None
    words_fd: int | None
    """Where an error that ends it comes from; None for an adopted one, who tells nobody."""

    def poll(self) -> int | None:
        """Returns the exit code once the process has ended (-SIGKILL for an adopted one, whose code
        nobody can ask for), None before."""
        if self.process is not None:
            return self.process.poll()
        readable, _, _ = select.select([self.pidfd], [], [], 0)
        return -signal.SIGKILL if readable else None

    def send(self, signum: signal.Signals) -> None:
        """Sends a signal; to a process that has ended, nothing."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            return

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end of the process; False when it has not come in time."""
        readable, _, _ = select.select([self.pidfd], [], [], max(0.0, timeout_s))
        if readable and self.process is not None:
            self.process.wait()
        return bool(readable)

    def last_words(self) -> str:
        """Returns the error that ended the process, once it has; "" when it has told of none."""
        if self.words_fd is None:
            return ""
        readable, _, _ = select.select([self.words_fd], [], [], 0)
        return os.read(self.words_fd, 4096).decode(errors="replace") if readable else ""

    def close(self) -> None:
        """Lets go of a process that has ended."""
        os.close(self.pidfd)
        if self.words_fd is not None:
            os.close(self.words_fd)


class Peer:
    """A process that is not ours. Whether it lives is asked of a pidfd, so that neither a zombie
    nor another process of the same pid passes for it."""

    def __init__(self, pid: int, start: int) -> None:
        self.pid, self.start = pid, start
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        if start_time(pid) != start:
            self.close()

    def is_alive(self) -> bool:
        """Whether the process that began at `start` runs."""
        if self._pidfd < 0:
            return False
        readable, _, _ = select.select([self._pidfd], [], [], 0)
        return not readable

    def close(self) -> None:
        """Forgets it."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


@dataclass(frozen=True)
class Exited:
    """A role whose process has ended."""

    role: str
    pid: int
    code: int
    how: str


def how_it_ended(returncode: int) -> str:
    """Returns the end of a process in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"


def parent_fd(expected_pid: int) -> int:
    """Returns a descriptor that becomes readable when the process that started us ends.

    `expected_pid`: who that was, 0 for whoever is our parent by now. Raises ConfigError when it is
    outside of our pid namespace, PipelineStartError when it has ended already.
    """
    pid = os.getppid()
    if pid == 0:
        why = "the parent is outside of this pid namespace"
        raise ConfigError("exit_with_parent", True, why)
    if expected_pid in (0, pid):
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            if os.getppid() == pid:  # so the number is still the parent's
                return fd
            os.close(fd)
    raise PipelineStartError(
        f"start: the parent (pid {expected_pid or pid}) has ended already", ExitCode.FAILED
    )


class Watch:
    """A thread that rings when a process dies or the owner is gone, so that the coordinator, which
    sleeps on its bell in shared memory, notices at once.

    `owner_fds`: a pipe to which nobody writes, so that readable means "every writing end is
    closed"; the pidfd of a parent.
    """

    def __init__(self, ring: Callable[[], None], owner_fds: Sequence[int]) -> None:
        self._ring = ring
        self._owner_fds = owner_fds
        self.owner_is_gone = False
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = os.pipe()
        self.add(self._wake_read)
        for fd in owner_fds:
            self.add(fd)
        self._thread = threading.Thread(target=self._run, name="tokenpipe-watch", daemon=True)
        self._thread.start()

    def add(self, fd: int) -> None:
        """Watches a descriptor until it becomes readable once."""
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _run(self) -> None:
        while True:
            for fd, _events in self._epoll.poll():
                if fd == self._wake_read:
                    return
                if fd in self._owner_fds:
                    self.owner_is_gone = True
                self._ring()

    def close(self) -> None:
        """Ends the thread."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._epoll.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)


@dataclass
class Children:
    """The roles' processes, stopped on the way out: TERM, grace, KILL."""

    name: str
    log_level: str
    watch: Watch | None = None
    _children: dict[str, Child] = field(default_factory=dict)

    def spawn(self, role: str, epoch: int) -> Child:
        """Starts one role's process; `epoch` counts its lives."""
        command = [sys.executable, "-m", "tokenpipe", "role", role, "--name", self.name]
        words_fd, role_words_fd = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    *(*command, f"--epoch={epoch}", "--log-level", self.log_level),
                    f"--words-fd={role_words_fd}",
                ],
                pass_fds=(role_words_fd,),
                stdin=subprocess.DEVNULL,
                # The ready line alone goes to stdout; what a role prints is for the operator.
                stdout=sys.stderr.fileno(),
                start_new_session=True,
            )
            pidfd = os.pidfd_open(process.pid)
        except BaseException:
            os.close(words_fd)
            raise
        finally:
            os.close(role_words_fd)
        return self._keep(Child(role, process.pid, pidfd, process, words_fd))

    def adopt(self, role: str, pid: int, start: int) -> bool:
        """Takes over the process that a former coordinator has started; False when it is gone."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        if start_time(pid) != start:  # asked once the pidfd holds it: another has the pid by now
            os.close(pidfd)
            return False
        self._keep(Child(role, pid, pidfd, None, None))
        return True

    def _keep(self, child: Child) -> Child:
        self._children[child.role] = child
        if self.watch is not None:
            self.watch.add(child.pidfd)
        return child

    def reap(self) -> list[Exited]:
        """Collects the roles that have ended since the last call."""
        exited = []
        for child in list(self._children.values()):
            code = child.poll()
            if code is None:
                continue
            del self._children[child.role]
            words, how = child.last_words(), how_it_ended(code)
            child.close()
            exited.append(Exited(child.role, child.pid, code, f"{how}: {words}" if words else how))
        if os.getpid() == 1:
            self._reap_strangers()
        return exited

    def _reap_strangers(self) -> None:
        """Collects orphans: as PID 1 of a container we are given those of everybody."""
        ours = {child.pid for child in self._children.values()}
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            while (found := os.waitid(os.P_ALL, 0, look)) and found.si_pid not in ours:
                os.waitpid(found.si_pid, 0)

    def kill(self, role: str) -> None:
        """Ends a role that does not answer; reap() tells when it is dead."""
        self._children[role].send(signal.SIGKILL)

    def stop(self, grace_s: float = 2.0) -> None:
        """Ends every role: TERM, then KILL for those that are still there after the grace."""
        for child in self._children.values():
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for child in self._children.values():
            if not child.wait(deadline - time.monotonic()):
                _log.warning("%s (pid %d) did not stop: killed", child.role, child.pid)
                child.send(signal.SIGKILL)
                child.wait(grace_s)
            child.close()
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
