"""What several test files share: waiting for a condition, and finding what a test left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

MARK_NAME = "TOKENPIPE_TEST_MARK"
SEGMENT_PREFIX = "tokenpipe."
SHM = Path("/dev/shm")
LEFTOVER_WATCHDOG_S = 10.0
IPC_RMID = 0  # <sys/ipc.h>
CLONE_NEWIPC = 0x08000000  # <sched.h>

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    timeout_s: float = 20,
    describe: Callable[[], object] | None = None,
) -> T:
    """Returns the first true value of predicate(); after timeout_s fails with what describe() says.

    The time limit is a watchdog for a test that hangs, never a claim about speed.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            found = f": {describe()}" if describe is not None else f"; last value {value!r}"
            raise AssertionError(f"not true within {timeout_s} s{found}")
        select.select([], [], [], pause_s)
        pause_s = min(2 * pause_s, 0.05)


@dataclass(frozen=True)
class Leftovers:
    """What is there that a test may have left: segments, processes, System V queues."""

    segments: frozenset[str]
    processes: frozenset[psutil.Process]
    queues: frozenset[tuple[int, int]]  # (key, msqid)

    @classmethod
    def now(cls) -> Leftovers:
        """Looks at the machine. Processes are ours by descent or, once orphaned, by the mark."""
        segments = frozenset(name for name in os.listdir(SHM) if name.startswith(SEGMENT_PREFIX))
        return cls(segments, frozenset(_our_processes()), frozenset(_queues()))

    def since(self, before: Leftovers) -> Leftovers:
        """Returns what is new since `before`, less what another test run of this machine holds."""
        return Leftovers(
            frozenset(n for n in self.segments - before.segments if not _is_mapped_elsewhere(n)),
            self.processes - before.processes,
            frozenset(q for q in self.queues - before.queues if not _is_used_elsewhere(q)),
        )

    def __bool__(self) -> bool:
        return bool(self.segments or self.processes or self.queues)

    def __str__(self) -> str:
        lines = [f"segment {SHM / name}" for name in sorted(self.segments)]
        lines += [f"process {_describe(process)}" for process in self.processes]
        lines += [f"System V queue key {key:#x} msqid {msqid}" for key, msqid in self.queues]
        return "\n".join(lines)

    def remove(self) -> None:
        """Kills, unlinks and removes, so that the next test starts clean."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes, timeout=LEFTOVER_WATCHDOG_S)
        for name in self.segments:
            (SHM / name).unlink(missing_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        for _, msqid in self.queues:
            libc.msgctl(msqid, IPC_RMID, None)


@contextlib.contextmanager
def leaves_nothing(what: str) -> Iterator[None]:
    """Fails when the block leaves a segment, a process or a queue; gives late enders some time."""
    before = Leftovers.now()
    yield
    try:
        wait_until(lambda: not Leftovers.now().since(before), LEFTOVER_WATCHDOG_S)
    except AssertionError:
        left = Leftovers.now().since(before)
        message = f"{what} left behind:\n{left}"
        left.remove()
        if left:
            raise AssertionError(message) from None


def enter_own_ipc_namespace() -> str:
    """Gives this thread, and what it starts, System V queues and limits of its own.

    Returns "" or, where that is not allowed, the reason in words.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWIPC) != 0:
        return f"no private IPC namespace here: {os.strerror(ctypes.get_errno())}"
    return ""


def _our_processes() -> Iterator[psutil.Process]:
    me = psutil.Process()
    yield from me.children(recursive=True)
    if MARK_NAME not in os.environ:
        return
    mark = f"{MARK_NAME}={os.environ[MARK_NAME]}".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if pid != me.pid and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield psutil.Process(pid)


def _is_ours(pid: int) -> bool:
    return pid == os.getpid() or pid in {process.pid for process in _our_processes()}


def _is_mapped_elsewhere(name: str) -> bool:
    try:
        inode = str((SHM / name).stat().st_ino)
    except FileNotFoundError:
        return False
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            # By inode: the creator mapped the file before it had a name, and maps show it so.
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            maps = any(inode == line.split()[4] for line in lines if str(SHM) in line)
            if maps and not _is_ours(pid):
                return True
    return False


def _queues() -> Iterator[tuple[int, int]]:
    for row in _queue_rows():
        if int(row["cuid"]) == os.getuid():
            yield int(row["key"]), int(row["msqid"])


def _queue_rows() -> list[dict[str, str]]:
    try:
        lines = Path("/proc/sysvipc/msg").read_text().splitlines()
    except FileNotFoundError:  # a kernel without System V
        return []
    names = lines[0].split()
    return [dict(zip(names, line.split(), strict=True)) for line in lines[1:]]


def _is_used_elsewhere(queue: tuple[int, int]) -> bool:
    for row in _queue_rows():
        if (int(row["key"]), int(row["msqid"])) == queue:
            users = [int(row["lspid"]), int(row["lrpid"])]
            return any(psutil.pid_exists(pid) and not _is_ours(pid) for pid in users if pid)
    return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except psutil.ZombieProcess:
        return f"{process.pid} {process.name()}, which has exited and was not waited for"
    except psutil.NoSuchProcess:
        return f"{process.pid}, gone by now"
