"""Numpy dtypes of the shared bytes, measured by the compiler from cuda_ops/layout.h.

Only users of numpy import this module; the reader and the decoders do not.
"""

from __future__ import annotations

from enum import IntEnum

from tokenpipe import _native

DTYPES = _native.dtypes()
HEADER, ROLE, COMMIT, COUNTERS = (DTYPES[n] for n in ("HEADER", "ROLE", "COMMIT", "COUNTERS"))
CONSUMER, DECODER, CLIENT = (DTYPES[n] for n in ("CONSUMER", "DECODER", "CLIENT"))
FRAME, FINAL, STEP, SOURCE, RING = (DTYPES[n] for n in ("FRAME", "FINAL", "STEP", "SOURCE", "RING"))


class PipelineState(IntEnum):
    """TP_STATE_*: what the pipeline as a whole is doing."""

    STARTING = 0
    IDLE = 1
    RUNNING = 2
    DEGRADED = 3
    DRAINING = 4
    STALLED = 5
    FAILED = 6
    STOPPED = 7
