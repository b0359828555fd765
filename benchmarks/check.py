"""What the client of a replay holds against every batch: each token once, in order, and right."""

from __future__ import annotations

from collections import deque

import numpy as np
import pattern

import tokenpipe as tp


class Counter:
    """Counts tokens and makes every column's view, and looks no further: for speed alone."""

    def __init__(self, mode: str, num_rows: int) -> None:
        self.mode = mode
        self.tokens = self.lost = self.duplicated = self.wrong = 0
        self.limits = np.zeros(num_rows, np.int64)  # tokens that a row's request will have
        self.positions = np.zeros(num_rows, np.int64)  # tokens of it that have come
        self.generations = np.zeros(num_rows, np.uint32)  # 0: no request
        self._next: list[deque[tuple[int, int]]] = [deque() for _ in range(num_rows)]

    def begin(self, admission: tp.Admission, limit: int) -> None:
        """Notes a new request of `limit` tokens.

        A row is given out again when its final is committed: the client may have that to read yet.
        """
        self._next[admission.row].append((admission.generation, limit))
        if self.generations[admission.row] == 0:
            self._go_on(admission.row)

    def _go_on(self, row: int) -> None:
        self.positions[row] = self.limits[row] = self.generations[row] = 0
        if self._next[row]:
            self.generations[row], self.limits[row] = self._next[row].popleft()

    def take(self, batch: tp.OutputBatch) -> None:
        """Counts a batch."""
        self.tokens += batch.num_tokens
        columns = [batch.row, batch.generation, batch.send_idx, batch.token_ids]
        if batch.width:
            columns += [batch.topk_ids, batch.topk_logprobs, batch.ranks]

    def end(self, row: int) -> None:
        """Notes that the row's request has had its final."""
        self._go_on(row)

    def close(self, generations: list[int], positions: list[int]) -> None:
        """Counts what is missing at the end of requests that still ran, by the engine's book."""


class ObjectCounter(Counter):
    """Counts tokens by making an object of every output."""

    def take(self, batch: tp.OutputBatch) -> None:
        """Counts a batch."""
        self.tokens += sum(len(output.outputs.token_ids) for output in batch)


class Checker(Counter):
    """As Counter, and compares every value."""

    def take(self, batch: tp.OutputBatch) -> None:
        """Checks a batch: order by send_idx, then the values that follow from it."""
        self.tokens += batch.num_tokens
        rows, generations, at = batch.row, batch.generation, batch.send_idx
        if batch.num_tokens != batch.num_rows:  # ends without a token
            has_token = np.diff(batch.token_offsets) == 1
            rows, generations, at = rows[has_token], generations[has_token], at[has_token]
        self._check_order(rows, generations, at)
        h = pattern.hashes(rows, generations, at)
        bad = batch.token_ids != pattern.token_ids(h)
        if batch.width:
            bad |= self._bad_candidates(batch, h)
        if (self.mode == "topk") != bool(batch.width) and batch.num_tokens:
            bad |= True
        if bad.any():
            self.wrong += int(bad.sum())

    def _check_order(
        self, rows: pattern.Array, generations: pattern.Array, at: pattern.Array
    ) -> None:
        ahead = at - self.positions[rows]
        if ahead.any():
            self.lost += int(ahead[ahead > 0].sum())
            self.duplicated += int((ahead < 0).sum())
        self.positions[rows] = at + np.uint32(1)
        if (generations != self.generations[rows]).any():
            self.wrong += int((generations != self.generations[rows]).sum())

    @staticmethod
    def _bad_candidates(batch: tp.OutputBatch, h: pattern.Array) -> pattern.Array:
        """Says of each token whether an id, a logprob bit or the rank is another than saved."""
        if batch.width != pattern.WIDTH:
            return np.ones(batch.num_tokens, bool)
        every = pattern.columns(h)
        bad = batch.topk_ids != pattern.token_ids(every)
        bad |= batch.topk_logprobs.view(np.uint32) != pattern.logprob_bits(every)
        wrong_rank: pattern.Array = batch.ranks != pattern.ranks(h)
        if not bad.any():
            return wrong_rank
        wrong_rank |= bad.any(axis=1)
        return wrong_rank

    def end(self, row: int) -> None:
        """Counts what a request that has had its final lacks."""
        self.lost += int(self.limits[row] - self.positions[row])
        super().end(row)

    def close(self, generations: list[int], positions: list[int]) -> None:
        """Counts what is missing at the end of requests that still ran, by the engine's book."""
        ran = (np.array(generations) == self.generations) & (self.generations != 0)
        saved = np.minimum(np.array(positions), self.limits)
        missing = (saved - self.positions)[ran]
        self.lost += int(missing[missing > 0].sum())
        self.duplicated += int(-missing[missing < 0].sum())
