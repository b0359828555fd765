"""The engine's ring on its GPU, opened here through CUDA IPC (cuda_ops/cuda_reader.hpp): the reader
fetches each step from there, so that the engine's process copies nothing."""

from __future__ import annotations

from tokenpipe import _native
from tokenpipe.config import cuda_library
from tokenpipe.cuda import driver
from tokenpipe.segment import Segment


class CudaIpcSource:
    """Reader's end of the source segment and of the ring that its writer exports.

    The ring is opened with the first step that lies there, and closed when its writer closes, has a
    successor or dies. Steps that the engine saved from the CPU come as with shm.
    """

    def __init__(self, segment: Segment) -> None:
        self._reader = _native.CudaSourceReader(
            segment.source,
            segment.core,
            driver(cuda_library()),
            segment.source_fd,
            segment.config.spin_us / 1e6,
        )

    def get_output(self, producer: _native.Producer, timeout_s: float) -> bool:
        """Copies the oldest step into the claimed slot; False when none came in time.

        Raises CudaError when the writer's ring is not one that this process can open: of another
        layout or size, or on a GPU that it does not see.
        """
        return self._reader.get_output(producer, timeout_s)

    def release(self) -> None:
        """Hands the step back to the writer; call after the slot is published."""
        self._reader.release()
