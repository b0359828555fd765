"""What a forked copy of this process must not keep: descriptors by which others see that we live.

A lock on a segment and the owner's pipe last until their last copy is closed. A copy in a forked
child would let a dead process look alive for as long as that child runs.
"""

from __future__ import annotations

import os
import threading

guard = threading.RLock()
"""Held while a descriptor is made and marked, so that no fork comes between."""
_ours: set[int] = set()


def mark(fd: int) -> int:
    """Lets a fork close the descriptor in the child; returns it."""
    _ours.add(fd)
    return fd


def close(fd: int) -> None:
    """Closes a marked descriptor; one that a fork has closed already is left alone."""
    with guard:
        if fd in _ours:
            _ours.remove(fd)
            os.close(fd)


def _in_child() -> None:
    for fd in _ours:
        os.close(fd)
    _ours.clear()
    guard.release()


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
