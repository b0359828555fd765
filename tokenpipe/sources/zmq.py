"""FastDeploy's zmq path (FD_USE_GET_SAVE_OUTPUT_V1=1): its worker pushes, our reader pulls
(cuda_ops/stream_source.hpp).

A message is a pickle. It is read by an interpreter of our own (cuda_ops/pickle.hpp), which imports
and calls nothing.
"""

from __future__ import annotations

import logging
import os
import time

import zmq

from tokenpipe import _native
from tokenpipe.segment import Segment
from tokenpipe.socket_file import remove_stale

_log = logging.getLogger("tokenpipe.sources.zmq")

_WARN_EVERY_S = 30.0
_PRIVATE = 0o177  # umask: the socket is its owner's alone


class ZmqSource:
    """Reader's end of the socket. A successor's first step says that there is a gap."""

    def __init__(self, segment: Segment) -> None:
        config = segment.config
        limit = config.zmq_max_message_bytes
        self._reader = _native.StreamReader(segment.source, segment.core, limit)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limit)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._bind(config.zmq_socket)
        self._num_refused: dict[str, int] = {}
        self._warned: dict[str, float] = {}

    def _bind(self, path: str) -> None:
        remove_stale(path)  # binding would take a live reader's name from it
        former = os.umask(_PRIVATE)
        try:
            self._socket.bind(f"ipc://{path}")
        finally:
            os.umask(former)

    def get_output(self, producer: _native.Producer, timeout_s: float) -> bool:
        """Fills the claimed slot with the next step; False when no message came in time."""
        if not self._reader.has_step:
            self._receive(timeout_s)
        if not self._reader.has_step:
            return False
        self._reader.fill(producer)
        return True

    def release(self) -> None:
        """A message that was received is gone from the socket: there is nothing to let go of."""

    def _receive(self, timeout_s: float) -> None:
        self._reader.set_waiting(True)
        has_message = self._socket.poll(round(timeout_s * 1000))
        self._reader.set_waiting(False)
        if not has_message:
            return
        refused = self._reader.read(self._socket.recv(copy=False).buffer)
        if refused is not None:
            self._note(*refused)

    def _note(self, reason: str, words: str) -> None:
        """Every refusal is counted with its step; of each reason the first ones are told."""
        self._num_refused[reason] = self._num_refused.get(reason, 0) + 1
        now = time.monotonic()
        if now - self._warned.get(reason, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned[reason] = now
            count = self._num_refused[reason]
            _log.error("a message was refused (%s, %d so far): %s", reason, count, words)
