"""Joins the logprobs of drafts to the target outputs they belong to, by (request, position)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tokenpipe.outputs import Drafts, OutputBatch


@dataclass
class _Held:
    target: OutputBatch
    until: float
    behind: list[OutputBatch] = field(default_factory=list)
    """What came after it and is no step: ends of aborted requests."""


class DraftJoin:
    """Holds a target batch until its drafts come, the next target does, or `wait_s` is over.

    A target is always delivered, and in order: a batch that finishes every row it holds, or has no
    tokens, waits for nothing; drafts without a target are counted and dropped (faults F17 to F19).
    Batches are kept apart by decoder, since each decoder's frames are in order by themselves.
    """

    def __init__(
        self,
        take: Callable[[float], OutputBatch | None],
        wait_s: float,
        count_unmatched: Callable[[int], None],
        *,
        whole_steps: bool,
    ) -> None:
        self._take = take
        self._whole_steps = whole_steps
        self._wait_s = wait_s
        self._held: dict[int, _Held] = {}
        self._ready: deque[OutputBatch] = deque()
        self._count_unmatched = count_unmatched
        self.num_targets_without_drafts = 0

    def next(self, wait_s: float) -> OutputBatch | None:
        """Returns the next batch that may go out, None when there is none within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            if self._ready:
                return self._ready.popleft()
            now = time.monotonic()
            soonest = min([deadline, *(held.until for held in self._held.values())])
            batch = self._take(max(0.0, soonest - now))
            if batch is not None:
                self._sort(batch)  # what is there already is joined, however late it is
                continue
            now = time.monotonic()
            overdue = [k for k, held in self._held.items() if held.until <= now]
            if overdue:
                self._let_go(overdue[0])
                continue
            if now >= deadline:
                return None

    def flush(self) -> OutputBatch | None:
        """Returns a held batch without waiting any longer, None when there is none."""
        if self._held and not self._ready:
            self._let_go(next(iter(self._held)))
        return self._ready.popleft() if self._ready else None

    def _sort(self, batch: OutputBatch) -> None:
        decoder = 0 if self._whole_steps else batch.decoder
        held = self._held.get(decoder)
        if batch.kind == "prompt":  # of a request's prompt, not of its outputs: no order to keep
            self._ready.append(batch)
            return
        if batch.kind == "draft":
            if held is None:
                self._count_unmatched(batch.num_rows)
                batch.release()
                return
            del self._held[decoder]
            self._ready += [self._joined(held.target, batch), *held.behind]
            return
        if held is not None and not batch.has_slot:
            held.behind.append(batch)  # an abort's final comes after its request's tokens
            return
        if held is not None:
            self._let_go(decoder)
        if batch.kind == "tokens" and batch.num_tokens and batch.num_finals < batch.num_rows:
            self._held[decoder] = _Held(batch, time.monotonic() + self._wait_s)
        else:
            self._ready.append(batch)

    def _let_go(self, decoder: int) -> None:
        self.num_targets_without_drafts += 1
        held = self._held.pop(decoder)
        self._ready += [held.target, *held.behind]

    def _joined(self, target: OutputBatch, drafts: OutputBatch) -> OutputBatch:
        own = drafts.copy()
        wanted = _keys(target)
        found = {key: j for j, key in enumerate(_keys(own))}
        row_of = np.array([found.get(key, -1) for key in wanted], np.int64)
        self._count_unmatched(len(found) - int((row_of >= 0).sum()))
        target.drafts = Drafts(own, row_of)
        drafts.release()
        return target


def _keys(batch: OutputBatch) -> list[tuple[int, int, int]]:
    return list(
        zip(batch.row.tolist(), batch.generation.tolist(), batch.send_idx.tolist(), strict=True)
    )
