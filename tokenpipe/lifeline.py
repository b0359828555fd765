"""How a role learns that its coordinator is gone."""

from __future__ import annotations

import time

from tokenpipe.segment import LOCK_COORDINATOR, Segment

_LOOK_S = 0.25


class Lifeline:
    """Looks now and then whether the coordinator's lock is held.

    A role outlives its coordinator by `orphan_grace_s`, so that a successor can adopt it. A lock,
    not the parent's pid: it also tells when the parent was a thread, or died before we looked.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._grace_s = segment.config.orphan_grace_s
        self.patience_s = min(segment.config.heartbeat_interval_s, max(_LOOK_S, self._grace_s / 2))
        """A role sleeps so long at most: who sleeps longer would outlive the grace."""
        self._next_look = 0.0
        self._alone_since: float | None = None

    def is_cut(self) -> bool:
        """Returns whether the coordinator has been gone for longer than the grace."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        if self._segment.is_locked(LOCK_COORDINATOR):
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        return now - self._alone_since >= self._grace_s
