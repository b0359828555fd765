"""The file of a Unix socket: whether it is somebody's, and away with it when it is nobody's."""

from __future__ import annotations

import os
import socket
import stat

from tokenpipe.errors import SocketTakenError


def remove_stale(path: str) -> None:
    """Removes a socket file that a dead process has left; none is as good.

    Raises SocketTakenError (path) when a live one listens there, and for what is no socket.
    """
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
        if not is_socket or _is_listened_to(path):
            raise SocketTakenError(path)
        os.unlink(path)
    except FileNotFoundError:
        return


def _is_listened_to(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # and too busy to answer
    return True
