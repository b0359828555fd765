"""What the system must allow a coordinator, looked at before it starts anything."""

from __future__ import annotations

import os
import resource

from tokenpipe.errors import LimitError

_FIXED = 18
"""Segments, locks, queue, endpoint, watch, and what a spawn or a /status opens for a moment."""
_PER_ROLE = 2
_MIN_CONNECTIONS, MAX_CONNECTIONS = 8, 128


def allowed_connections(num_roles: int) -> int:
    """Returns how many HTTP connections may be open at once, so that enough file descriptors are
    left to replace a role. Raises LimitError when there are too few to start."""
    opened = len(os.listdir("/proc/self/fd"))
    own = opened + _FIXED + _PER_ROLE * num_roles
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    if own + _MIN_CONNECTIONS > limit:
        raise LimitError("file descriptors", own + _MIN_CONNECTIONS, limit, "ulimit -n")
    return min(limit - own, MAX_CONNECTIONS)


def memory_limit(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Returns the bytes of memory that our cgroups allow, shared memory included; None: no limit.

    Who reserves more is not refused by the kernel but killed, without a word (B13).
    """
    found = []
    try:
        with open(own) as f:
            groups = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        return None
    for _, controllers, path in groups:
        if not controllers:
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = os.path.join(root, "memory"), "memory.limit_in_bytes"
        else:
            continue
        # The groups above ours count too; a container may see its own group as the root.
        parts = ["", *filter(None, path.split("/"))]
        for part in parts:
            folder = os.path.join(folder, part)
            found.append(_limit_in(os.path.join(folder, name)))
    return min((limit for limit in found if limit is not None), default=None)


def _limit_in(path: str) -> int | None:
    try:
        with open(path) as f:
            return int(f.read())
    except (OSError, ValueError):  # no such group in our view; "max"
        return None
