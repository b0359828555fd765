"""EngineWriter: the engine worker's end. It maps the source segment and nothing else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpipe import _native
from tokenpipe.commands import Control
from tokenpipe.errors import OpArgumentError, PartyExistsError, PipelineGoneError
from tokenpipe.layout import SOURCE
from tokenpipe.segment import LOCK_COORDINATOR, LOCK_WRITER, Segment, start_time

_WAIT_S = 0.2
_GONE_AFTER_S = 10.0
"""A coordinator that is being replaced holds no lock for a moment; this is no such moment."""


@dataclass(frozen=True)
class Step:
    """One composed batch: which life of which row each of its rows runs for."""

    generations: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32] | None


@dataclass(frozen=True)
class ControlEvent:
    """Something the engine's scheduler must act on; `kind` is abort, preempt or finished."""

    row: int
    generation: int
    kind: str


class EngineWriter:
    """Saves steps and hears of aborts and ends. One per pipeline; thread-safe.

    Saving blocks while the pipeline lives and its ring is full (counted as backpressure) and raises
    PipelineGoneError when it is gone. Nothing else blocks.
    """

    def __init__(self, segment: Segment, spin_us: float = 1.0) -> None:
        self._segment = segment
        if not segment.lock(LOCK_WRITER):
            pid = int(np.frombuffer(segment.source_memory, SOURCE, 1)[0]["writer_pid"])
            segment.close()
            raise PartyExistsError(segment.name, "engine writer", pid)
        self._writer = _native.Writer(segment.source, spin_us / 1e6)
        self._lock = threading.Lock()
        _native.announce_writer(segment.source, os.getpid(), start_time(os.getpid()) or 0)

    @classmethod
    def attach(cls, name: str, timeout_s: float = 10.0) -> EngineWriter:
        """Maps the source segment of pipeline `name`, waiting for it.

        Raises SegmentMissingError, LayoutMismatchError, PartyExistsError (pid of the writer it
        has).
        """
        return cls(Segment.attach_source(name, timeout_s))

    def begin_step(self, generations: Sequence[int] | npt.NDArray[Any], rows: Any = None) -> Step:
        """Returns the stamp of a batch that the scheduler has just composed.

        `generations` [n]: of the Admission that runs in each batch row, 0 for a padded row. `rows`
        [n]: the pipeline's row of each; default 0 to n-1. A copy is kept: the step may be saved
        when the scheduler's book has moved on (DESIGN section 5).
        """
        # int32 here, so that a save need not convert; the op checks the values again.
        stamp = np.array(generations, np.int32)
        where = None if rows is None else np.array(rows, np.int32)
        if where is not None and where.shape != stamp.shape:
            raise OpArgumentError(
                "rows", f"rows has shape {where.shape}, generations {stamp.shape}"
            )
        if stamp.ndim != 1:
            raise OpArgumentError(
                "generations", f"generations has shape {stamp.shape}, must be [n]"
            )
        self._writer.note(where, stamp, len(stamp))
        return Step(stamp, where)

    def save_output(
        self,
        tokens: Any,
        *,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
    ) -> None:
        """Saves one token per row.

        `tokens` int64 or int32 [n], numpy or any CPU tensor with DLPack, without a copy. `step` (or
        `generations` and `rows`) tells whose they are. `states` uint8 [n]: 0 token, 1 none, 2
        recovery, 3 abort or preemption acknowledged. `positions` [n]: index of the token in its
        request, -1 unknown. Raises OpArgumentError (argument) with nothing saved,
        PipelineGoneError.
        """
        self._save(step, generations, rows, tokens, states, positions, not_need_stop)

    def save_output_topk(
        self,
        tokens: Any,
        topk_ids: Any,
        logprobs: Any,
        ranks: Any,
        *,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
    ) -> None:
        """Saves one token per row with its candidates.

        `topk_ids` int64 or int32 [n, T], `logprobs` float32, float16 or bfloat16 [n, T], `ranks`
        [n]; column 0 is the sampled token, T is 1 to top_logprobs + 1 and may differ from step to
        step. Else as save_output.
        """
        self._save(
            step,
            generations,
            rows,
            tokens,
            states,
            positions,
            not_need_stop,
            topk_ids=_tensor(topk_ids),
            logprobs=_tensor(logprobs),
            ranks=_tensor(ranks),
        )

    def _save(
        self,
        step: Step | None,
        generations: Any,
        rows: Any,
        tokens: Any,
        states: Any,
        positions: Any,
        not_need_stop: bool,
        **candidates: Any,
    ) -> None:
        if step is not None:
            generations, rows = step.generations, step.rows
        elif generations is None:
            raise OpArgumentError("step", "give step= of begin_step(), or generations=")
        with self._lock:
            self._wait_for_space()
            self._writer.save(
                _tensor(tokens),
                generations,
                rows,
                _tensor(states),
                _tensor(positions),
                not_need_stop=not_need_stop,
                **candidates,
            )

    def _wait_for_space(self) -> None:
        if self._writer.is_gone:
            raise PipelineGoneError(self._segment.name, "it has stopped")
        alone_since: float | None = None
        while not self._writer.wait_for_space(_WAIT_S):
            if self._writer.is_gone:
                raise PipelineGoneError(self._segment.name, "it has stopped")
            if self._segment.is_locked(LOCK_COORDINATOR):
                alone_since = None
                continue
            now = time.monotonic()
            alone_since = now if alone_since is None else alone_since
            if now - alone_since > _GONE_AFTER_S:
                raise PipelineGoneError(self._segment.name, "its coordinator has died")

    def poll_control(self) -> list[ControlEvent]:
        """Returns what has been decided about rows since the last call; each thing once.

        abort: stop the row, then save it once with state 3. preempt: the same, it will be resumed.
        finished: the row has ended, run it no more.
        """
        with self._lock:
            return list(_events(self._writer.poll()))

    def beat(self, *, busy: bool) -> None:
        """Says that the engine works without saving (a long prefill): `busy` until the next
        save."""
        self._writer.beat(busy)

    @property
    def num_steps(self) -> int:
        """Steps saved so far, by this and former writers."""
        return self._writer.published

    def close(self) -> None:
        """Lets go of the segment; another writer may attach then."""
        self._segment.close()

    def __enter__(self) -> EngineWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _events(found: list[tuple[int, int, int]]) -> Iterator[ControlEvent]:
    for row, generation, bits in found:
        for bit in Control:
            if bits & bit:
                yield ControlEvent(row, generation, bit.name.lower())


def _tensor(value: Any) -> Any:
    """Older Paddle has no __dlpack__, only a function that makes the capsule."""
    if value is None or hasattr(value, "__dlpack__") or not hasattr(value, "value"):
        return value
    if not type(value).__module__.startswith("paddle"):
        return value
    from paddle.utils.dlpack import to_dlpack  # type: ignore[import-not-found, unused-ignore]

    return _Capsule(to_dlpack(value))


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self) -> Any:
        return self._capsule
