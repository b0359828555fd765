"""The values of a replay: each is a hash of (row, generation, position, column).

Engine and client compute them apart from each other, so the client can check every token,
candidate, logprob bit and rank of a run of any length, and nobody stores the run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WIDTH = 21
"""Columns of a top-20 step: the sampled token and 20 candidates."""
ROW, GENERATION, COLUMN = np.uint32(2654435761), np.uint32(3266489917), np.uint32(668265263)
POSITION = np.uint32(2246822519)
_FIRST_ID = np.uint32(16)  # ids below are never produced, so an end token of 2 never comes
_MINUS_ONE = np.uint32(0xBF800000)  # sign and exponent of -1.0: all logprobs lie in (-2, -1]
_COLUMNS = np.arange(WIDTH, dtype=np.uint32) * COLUMN


def hashes(rows: Array, generations: Array, positions: Array) -> Array:
    """Returns uint32 [n], of uint32 [n] each."""
    return rows * ROW + generations * GENERATION + positions * POSITION


def token_ids(h: Array) -> Array:
    """Returns the tokens of hashes `h`, int32 of the same shape: 20 bits each."""
    return ((h >> 12) + _FIRST_ID).view(np.int32)


def columns(h: Array) -> Array:
    """Returns the hashes of all candidates, [n, WIDTH] of [n]; column 0 is the token's own."""
    every: Array = h[:, None] + _COLUMNS
    return every


def logprob_bits(h: Array) -> Array:
    """Returns float32 logprobs as their bits, uint32: every bit of the mantissa is used."""
    return (h >> 9) | _MINUS_ONE


def ranks(h: Array) -> Array:
    """Returns the ranks of hashes `h`, int32 of the same shape."""
    return ((h >> 20) + np.uint32(1)).view(np.int32)
