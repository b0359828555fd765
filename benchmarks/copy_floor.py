"""What the copies alone cost: the bytes of a step's hops at the speed of memcpy, measured here."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from modes import Shape

_SLOTS = 64
_SAMPLES, _SECONDS = 5, 0.02


def memcpy_bytes_per_s(size: int) -> float:
    """Returns the speed of copies of `size` bytes into the slots of a ring in turn."""
    source, slots = np.ones(size, np.uint8), np.zeros((_SLOTS, size), np.uint8)
    speeds = []
    for _ in range(_SAMPLES):
        np.copyto(slots, source)  # the first lap of all takes the pages
        laps, begun = 0, time.perf_counter()
        while (took := time.perf_counter() - begun) < _SECONDS:
            np.copyto(slots, source)
            laps += 1
        speeds.append(laps * _SLOTS * size / took)
    return median(speeds)


def tokens_per_s(shape: Shape, rows: int) -> float:
    """Returns the speed of a pipeline that did nothing but copy, one hop after another."""
    hops = shape.hop_bytes(rows)
    tokens = shape.tokens_per_row(2 * shape.depth) * rows / (2 * shape.depth)
    return tokens * memcpy_bytes_per_s(hops // 3) / hops
