"""FastDeploy's worker on its zmq path: a PUSH socket that pickles."""

from __future__ import annotations

from typing import Any

import zmq
from stand_ins import pickled


class Worker:
    """The sending end of the socket file at `path`."""

    def __init__(self, path: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDTIMEO, 20_000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 1)
        self._socket.connect(f"ipc://{path}")

    def send(self, *rows: Any) -> None:
        """Sends one message, a record a row."""
        self.send_bytes(pickled(list(rows)))

    def send_bytes(self, message: bytes) -> None:
        """Sends what may be no message."""
        self._socket.send(message)

    def close(self) -> None:
        """Ends the connection; what is not sent yet is lost."""
        self._context.destroy()
