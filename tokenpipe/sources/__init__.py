"""Ways in: one module per source that the reader can drain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tokenpipe import _native
from tokenpipe.segment import Segment
from tokenpipe.sources.shm import ShmSource
from tokenpipe.sources.sysv import SysvSource, prepared_queue


class Source(Protocol):
    """The reader's end of a source."""

    def get_output(self, producer: _native.Producer, timeout_s: float) -> bool:
        """Fills the claimed slot with the next step; False when none came in time."""

    def release(self) -> None:
        """Lets go of the step; called after the slot is published."""


def open_source(segment: Segment) -> Source:
    """Returns the reader's end of the configured source. Raises QueueError."""
    if segment.config.source == "sysv":
        return SysvSource(segment)
    return ShmSource(segment)


@contextmanager
def prepared_source(segment: Segment) -> Iterator[None]:
    """What the coordinator does about a source before its reader starts, and after it has ended.

    Raises QueueError, QueueLimitError, QueueTakenError.
    """
    if segment.config.source == "sysv":
        with prepared_queue(segment):
            yield
    else:
        yield
