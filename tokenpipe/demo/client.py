"""The demo's client: submits the requests from a thread, collects what comes back, measures.

One Client runs once. What is delivered is kept as log records, for the comparison at the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tokenpipe as tp
from tokenpipe.demo.engine import Add
from tokenpipe.demo.errors import DemoError
from tokenpipe.demo.jobs import Job
from tokenpipe.demo.lines import View
from tokenpipe.demo.log import LOG_DTYPE, Records, make_records

# How long one reading pass or one wait for a row lasts before the loop looks at the rest.
PASS_S = 0.1
# After a break: the finals with an error are still to come.
LAST_PASS_S = 1.0
# With requests open and nothing coming, the demo gives up; the pipeline itself reports a stall
# sooner.
STALL_S = 60.0


class Client:
    """The one client of the demo's pipeline; `run` is called once, from the main thread."""

    def __init__(
        self,
        pipe: Any,
        jobs: Sequence[Job],
        eos_token_ids: list[int],
        send_to_engine: Callable[[str], None],
        view: View,
    ) -> None:
        self._pipe, self._view = pipe, view
        self.jobs, self._eos_token_ids = jobs, eos_token_ids
        self._send_to_engine = send_to_engine
        self._by_id = {job.request_id: job for job in jobs}
        self._num_open = len(jobs)
        self._records: list[Records] = []
        self.latencies_ns: list[int] = []
        self.num_tokens = 0
        self._started_ns = self._last_token_ns = time.monotonic_ns()
        self._stop_submitting = threading.Event()
        self._submit_error: tp.TokenpipeError | None = None

    @property
    def num_finished(self) -> int:
        """Requests that have their final."""
        return len(self.jobs) - self._num_open

    @property
    def duration_s(self) -> float:
        """From the first submit to the last token."""
        return (self._last_token_ns - self._started_ns) / 1e9

    def records(self) -> Records:
        """Everything delivered, in the order of delivery."""
        return np.concatenate([np.empty(0, LOG_DTYPE), *self._records])

    def run(self, is_broken: Callable[[], bool]) -> None:
        """Returns when every request has its final, or when `is_broken` says that none will come.

        `is_broken` is asked between batches. What was delivered before an error is kept.
        """
        self._started_ns = self._last_token_ns = time.monotonic_ns()
        submitter = threading.Thread(target=self._submit_all, name="submit", daemon=True)
        submitter.start()
        try:
            self._collect(lambda: self._submit_error is not None or is_broken())
        finally:
            self._stop_submitting.set()
            submitter.join()
        if self._submit_error is not None:
            raise self._submit_error

    def _submit_all(self) -> None:
        try:
            for job in self.jobs:
                if not self._submit(job):
                    return
        except tp.TokenpipeError as error:
            self._submit_error = error

    def _submit(self, job: Job) -> bool:
        request = tp.Request(
            job.request_id,
            prompt_token_ids=job.prompt_token_ids,
            eos_token_ids=self._eos_token_ids,
            max_tokens=job.max_tokens,
        )
        while not self._stop_submitting.is_set():
            try:
                admission = self._pipe.submit(request, timeout_s=PASS_S)
            except tp.NoFreeRowError:
                continue  # all rows are taken: look whether to stop, wait on
            add = Add(
                job.number,
                job.request_id,
                admission.row,
                admission.generation,
                job.prompt_token_ids,
                job.max_tokens,
            )
            job.is_submitted = True
            self._send_to_engine(add.to_line())
            return True
        return False

    def _collect(self, is_broken: Callable[[], bool]) -> None:
        last_batch_s = time.monotonic()
        while self._num_open and not is_broken():
            for batch in self._pipe.batches(timeout_s=PASS_S):
                last_batch_s = time.monotonic()
                self._take(batch)
                if is_broken():
                    break
            if time.monotonic() - last_batch_s > STALL_S:
                raise DemoError(
                    f"read outputs: nothing came for {STALL_S:.0f} s, "
                    f"with {self._num_open} of {len(self.jobs)} requests open"
                )
        # What would come now has come twice, or belongs to a break.
        for batch in self._pipe.batches(timeout_s=LAST_PASS_S if self._num_open else PASS_S):
            self._take(batch)

    def _take(self, batch: Any) -> None:
        now_ns = time.monotonic_ns()
        offsets = batch.token_offsets.tolist()
        if offsets[-1]:
            self.latencies_ns.append(now_ns - int(batch.saved_ns))
            self._last_token_ns = now_ns
            self.num_tokens += offsets[-1]
            self._keep(batch)
        tokens, logprobs = batch.token_ids.tolist(), batch.logprobs.tolist()
        ranks, reasons = batch.ranks.tolist(), batch.finish_reason.tolist()
        for index, request_id in enumerate(batch.request_ids):
            job = self._by_id[request_id]
            part = slice(offsets[index], offsets[index + 1])
            job.token_ids += tokens[part]
            job.logprobs += logprobs[part]
            job.ranks += ranks[part]
            job.stream.push(tokens[part])
            if reasons[index] and job.finish_reason is None:
                job.finish_reason = tp.FinishReason(reasons[index]).name.lower()
                self._num_open -= 1
                self._view.finished(job)

    def _keep(self, batch: Any) -> None:
        """Copies the batch's tokens as log records; its columns are gone when it is released."""
        counts = np.diff(batch.token_offsets.astype(np.int64))
        numbers = np.array([self._by_id[name].number for name in batch.request_ids])
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._records.append(
            make_records(
                np.repeat(numbers, counts),
                np.repeat(batch.send_idx, counts) + within,
                batch.token_ids,
                batch.topk_ids,
                batch.topk_logprobs,
                batch.ranks,
            )
        )
