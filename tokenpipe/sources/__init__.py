"""Ways in: one module per source that the reader can drain."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from tokenpipe import _native
from tokenpipe.errors import ConfigError, SocketTakenError
from tokenpipe.segment import Identity, Segment, live_configs
from tokenpipe.socket_file import remove_stale
from tokenpipe.sources.cuda_ipc import CudaIpcSource
from tokenpipe.sources.shm import ShmSource
from tokenpipe.sources.sysv import SysvSource, prepared_queue


class Source(Protocol):
    """The reader's end of a source."""

    def get_output(self, producer: _native.Producer, timeout_s: float) -> bool:
        """Fills the claimed slot with the next step; False when none came in time."""

    def release(self) -> None:
        """Lets go of the step; called after the slot is published."""


def open_source(segment: Segment) -> Source:
    """Returns the reader's end of the configured source. Raises QueueError, SocketTakenError,
    ConfigError without pyzmq, CudaError."""
    if segment.config.source == "sysv":
        return SysvSource(segment)
    if segment.config.source == "zmq":
        try:
            from tokenpipe.sources.zmq import ZmqSource
        except ModuleNotFoundError as error:
            why = "needs pyzmq: pip install 'tokenpipe[zmq]'"
            raise ConfigError("source", "zmq", why) from error
        return ZmqSource(segment)
    if segment.config.source == "cuda-ipc":
        return CudaIpcSource(segment)
    return ShmSource(segment)


@contextmanager
def prepared_source(segment: Segment) -> Iterator[None]:
    """What the coordinator does about a source before its reader starts, and after it has ended.

    Raises QueueError, QueueLimitError, QueueTakenError, SocketTakenError.
    """
    if segment.config.source == "sysv":
        with prepared_queue(segment):
            yield
    elif segment.config.source == "zmq":
        with prepared_socket(segment):
            yield
    else:
        yield


@contextmanager
def prepared_socket(segment: Segment) -> Iterator[None]:
    """Sees that the reader can bind the socket file, and removes the file afterwards."""
    path = segment.config.zmq_socket
    own = Identity.own()
    for config, start, pid in live_configs():
        is_same = config.source == "zmq" and config.zmq_socket == path
        # Of two that start at once one stays.
        if is_same and config.name != segment.name and (start, pid) <= (own.start, own.pid):
            raise SocketTakenError(path)
    if not segment.is_adopted:  # else our own reader listens there
        remove_stale(path)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
