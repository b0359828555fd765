"""What FastDeploy's own metrics are told of outputs, in the engine's process.

The names, and when each is told, are FastDeploy's (shared/spec/token-processor.md sections 3
and 5). A step is told as a whole where the metric allows it. What the manager sets by itself is
left to it (fault F42), and what follows from a stamp that is missing is not told (F41).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tokenpipe.fastdeploy.host import Host

_HEADS = 16


class Figures:
    """FastDeploy's main_process_metrics, or nothing where they cannot be imported."""

    def __init__(self, host: Host, method: Any, num_drafts: int) -> None:
        self._host = host
        self._metrics = host.metrics
        self._method = method
        self._method_name = str(getattr(method, "value", method)).lower()
        self._num_drafts = num_drafts
        self._heads = np.zeros(_HEADS, np.int64)
        self._told = {"accepted": 0, "emitted": 0}
        self._num_drafted = 0
        self._num_emitted_at_most = 0

    def first_token(self, task: Any, now: float) -> None:
        """Tells of a request's first output."""
        if self._metrics is None:
            return
        stamps = task.metrics
        _observe(self._metrics.time_to_first_token, stamps.arrival_time, now)
        _observe(
            self._metrics.request_queue_time,
            stamps.preprocess_end_time,
            stamps.inference_start_time,
        )
        _observe(self._metrics.request_prefill_time, stamps.inference_start_time, now)

    def step(self, gaps: Sequence[float], counts: Sequence[int], num_tokens: int) -> None:
        """Tells of one step: `gaps` are the seconds per token of rows that had one before, each of
        `counts` tokens; `num_tokens` are those of all rows."""
        if self._metrics is None or not num_tokens:
            return
        self._metrics.generation_tokens_total.inc(num_tokens)
        if gaps:
            observe_all(self._metrics.time_per_output_token, gaps, counts)

    def end(self, task: Any, now: float, num_tokens: int, start: float | None) -> float | None:
        """Tells of the end of any request; returns its tokens per second, None while unknown."""
        if not start or now <= start:
            return None
        ratio = num_tokens / (now - start)
        if self._metrics is not None:
            self._metrics.request_token_ratio.observe(ratio)
        return ratio

    def completion(self, task: Any, now: float, num_tokens: int) -> None:
        """Tells of a request that ended with a result here, not on a decode instance."""
        if self._metrics is None:
            return
        stamps = task.metrics
        _observe(self._metrics.request_decode_time, stamps.engine_recv_first_token_time, now)
        _observe(self._metrics.request_inference_time, stamps.inference_start_time, now)
        self._metrics.request_generation_tokens.observe(num_tokens)
        self._metrics.request_success_total.inc()

    def recycled(self, manager: Any) -> None:
        """Sets the gauges that the manager does not set by itself."""
        if self._metrics is None:
            return
        available = int(manager.available_batch())
        self._metrics.available_batch_size.set(available)
        if self._host.is_v1:
            return
        self._metrics.num_requests_running.dec(1)
        self._metrics.batch_size.set(manager.max_num_seqs - available)
        blocks = {b for task in manager.tasks_list if task for b in task.block_tables}
        self._metrics.available_gpu_block_num.set(manager.total_block_number() - len(blocks))

    def accepted(self, counts: Any) -> None:
        """Tells of a speculative step: the emitted tokens of each row that had some."""
        if self._metrics is None or not self._method or not len(counts):
            return
        metrics = self._metrics
        if not hasattr(metrics, "spec_decode_draft_acceptance_rate"):
            metrics._init_speculative_metrics(self._method, self._num_drafts)
        with_head = len(counts) - np.searchsorted(np.sort(counts), np.arange(_HEADS), side="right")
        self._heads += with_head
        accepted, emitted = int(self._heads[1:].sum()), int(self._heads.sum())
        self._set_total("accepted", metrics.spec_decode_num_accepted_tokens_total, accepted)
        self._set_total("emitted", metrics.spec_decode_num_emitted_tokens_total, emitted)
        if self._method_name == "ngram":
            metrics.spec_decode_draft_acceptance_rate.set(accepted / emitted)
        if self._method_name == "mtp":
            self._tell_of_mtp(len(counts), accepted, emitted)

    def _tell_of_mtp(self, num_rows: int, accepted: int, emitted: int) -> None:
        metrics, n = self._metrics, self._num_drafts
        self._num_drafted += num_rows * n
        self._num_emitted_at_most += num_rows * (n + 1)
        metrics.spec_decode_draft_acceptance_rate.set(accepted / self._num_drafted)
        metrics.spec_decode_efficiency.set(emitted / self._num_emitted_at_most)
        metrics.spec_decode_num_draft_tokens_total.inc(num_rows * n)
        gauges = metrics.spec_decode_draft_single_head_acceptance_rate
        for gauge, ratio in zip(gauges, self.head_ratios(), strict=False):
            gauge.set(ratio)

    def head_ratios(self) -> list[float]:
        """Returns for each draft head how often it was accepted after the one before it."""
        heads = self._heads[: self._num_drafts + 1].tolist()
        return [b / a if a else 0.0 for a, b in pairwise(heads)]

    def _set_total(self, name: str, metric: Any, value: int) -> None:
        """A Counter in some versions, which has no set(), and a Gauge in others (fault F34)."""
        if hasattr(metric, "set"):
            metric.set(value)
        else:
            metric.inc(value - self._told[name])
        self._told[name] = value


def _observe(histogram: Any, begin: float | None, end: float | None) -> None:
    if begin and end:
        histogram.observe(end - begin)


def observe_all(histogram: Any, values: Sequence[float], counts: Sequence[int]) -> None:
    """Observes `values[i]` `counts[i]` times.

    A histogram of prometheus_client is told bucket by bucket, which costs a step what one value
    costs; what does not look like one is told each value.
    """
    bounds = getattr(histogram, "_upper_bounds", None)
    buckets, total = getattr(histogram, "_buckets", None), getattr(histogram, "_sum", None)
    if not bounds or not buckets or total is None:
        for value, count in zip(values, counts, strict=True):
            for _ in range(count):
                histogram.observe(value)
        return
    weights = np.asarray(counts)
    found = np.bincount(np.searchsorted(bounds, values), weights, len(buckets))
    for k in found.nonzero()[0].tolist():
        buckets[k].inc(int(found[k]))
    total.inc(float(np.dot(values, weights)))
