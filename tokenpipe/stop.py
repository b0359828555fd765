"""Signals: handlers that only set a flag, restored on the way out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether somebody asked this process to stop. Set by a signal or by request()."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Asks the loop that looks at `requested` to end."""
        self.requested = True


@contextmanager
def stop_on_signals(*, ignore_interrupt: bool = False) -> Iterator[Stop]:
    """Lets SIGTERM and SIGINT set the flag of the Stop it yields; main thread only.

    `ignore_interrupt`: Ctrl-C reaches every process of a terminal's group, but it is the
    coordinator that decides when a role ends. What the program that started us has blocked or
    ignored is inherited: without SIGTERM we could not be stopped, and with SIGCHLD ignored no one
    could say how a role ended.
    """
    stop = Stop()

    def set_flag(signum: int, frame: FrameType | None) -> None:
        stop.requested = True

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, set_flag),
        signal.SIGINT: signal.signal(
            signal.SIGINT, signal.SIG_IGN if ignore_interrupt else set_flag
        ),
        signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL),
    }
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    try:
        yield stop
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for signum, handler in before.items():
            signal.signal(signum, handler)
