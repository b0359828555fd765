"""The native source: the engine's writer fills steps of the source segment
(cuda_ops/output_ops.hpp)."""

from __future__ import annotations

from tokenpipe import _native
from tokenpipe.segment import Segment


class ShmSource:
    """Reader's end of the source segment. A successor skips what is in the ring already."""

    def __init__(self, segment: Segment) -> None:
        spin_s = segment.config.spin_us / 1e6
        self._reader = _native.SourceReader(segment.source, segment.core, spin_s)

    def get_output(self, producer: _native.Producer, timeout_s: float) -> bool:
        """Copies the oldest step into the claimed slot; False when none came in time."""
        return self._reader.get_output(producer, timeout_s)

    def release(self) -> None:
        """Hands the step back to the writer; call after the slot is published."""
        self._reader.release()
