"""Batches to objects: plain ints and floats, float32 widened exactly."""

from __future__ import annotations

from typing import Any

from tokenpipe import _native
from tokenpipe.commands import FinishReason
from tokenpipe.config import PipelineConfig
from tokenpipe.outputs import Drafts, OutputBatch
from tokenpipe.records import (
    STAMPS,
    AnyOutput,
    CompletionOutput,
    LogprobsLists,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    SpeculateMetrics,
)
from tokenpipe.requests import Request

RECOVERY_TEXT = "Recover is not supported, the result is incomplete!"
GAP_TEXT = "source_gap: the reader was replaced, and outputs may have been lost with it"
ERRORS: dict[FinishReason, tuple[int, str | None]] = {
    FinishReason.ABORT: (200, "Aborted"),
    FinishReason.RECOVERY: (200, RECOVERY_TEXT),
    FinishReason.ERROR: (500, "the request ended by an error of the pipeline or the engine"),
    FinishReason.SHUTDOWN: (503, "the pipeline was shut down"),
}
_GOES_ON = RequestOutput("", CompletionOutput(0, 0, []), finished=False)
"""What every output begins as; what differs from it is set."""
_WITH_A_RESULT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.RECOVERY)
_WITH_TOKENS = (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH)


class ObjectMaker:
    """Makes the objects of a batch; knows the configuration and the wall clock's offset.

    What every row has is made in C++ (cuda_ops/python_outputs.hpp); what only the end of a request
    has is added here.
    """

    def __init__(self, config: PipelineConfig, wall_offset_ns: int) -> None:
        self._is_decode = config.role == "decode"
        self._num_drafts = config.num_speculative_tokens
        self._is_speculative = config.speculative_method != "none"
        self._offset_ns = wall_offset_ns
        self._native = _native.OutputMaker(
            _GOES_ON, _GOES_ON.outputs, STAMPS, LogprobsLists, self._is_decode
        )

    def wall_s(self, stamp_ns: int) -> float:
        """Returns a CLOCK_MONOTONIC stamp as seconds since the epoch."""
        return (stamp_ns + self._offset_ns) / 1e9

    def make(self, batch: OutputBatch) -> list[AnyOutput]:
        """Returns an object per row; prompt logprobs come with the next output of their request."""
        kind = batch.kind
        if kind == "prompt":
            return []
        outputs = self._native.make(
            batch.requests,
            (
                batch.row,
                batch.send_idx,
                batch.token_offsets,
                batch.finish_reason,
                batch.first_token_ns,
                batch.token_ids,
            ),
            candidates_of(batch) if batch.width and kind != "pooling" else None,
            _drafts(batch.drafts),
            self._now(batch),
            batch.message_flag,
            batch.has_slot,
            self._offset_ns,
        )
        made: list[AnyOutput] = [*outputs]
        if batch.num_finals:
            for i in batch.finals["index"].tolist():
                made[i] = self._ended(batch, i, outputs[i])
        return made

    def _ended(self, batch: OutputBatch, i: int, output: RequestOutput) -> AnyOutput:
        """Returns the output of row i, with which its request ends."""
        request, reason = batch.requests[i], FinishReason(int(batch.finish_reason[i]))
        if batch.kind == "pooling" and reason is FinishReason.STOP:
            return PoolingRequestOutput(
                request_id=request.request_id,
                outputs=PoolingOutput(batch.vectors[i].tolist()),
                prompt_token_ids=list(request.prompt_token_ids),
                metrics=output.metrics,
            )
        output.finished, output.finish_reason = True, reason.name.lower()
        output.error_code, output.error_msg = ERRORS.get(reason, (200, None))
        if batch.is_gap and reason is FinishReason.ERROR:
            output.error_msg = GAP_TEXT
        output.trace_carrier = request.trace_carrier
        if batch.num_drafts:
            begin, end = batch.draft_offsets[i : i + 2].tolist()
            output.outputs.draft_token_ids = batch.draft_token_ids[begin:end].tolist()
        if self._is_speculative and reason in _WITH_A_RESULT:
            assert output.metrics is not None
            output.metrics.speculate_metrics = self._speculation(batch, i)
        return output

    def metrics(self, batch: OutputBatch, i: int, request: Request) -> RequestMetrics:
        """Returns the request's metrics as they stand after row i of the batch."""
        now, reason = self._now(batch), int(batch.finish_reason[i])
        if self._is_decode and int(batch.send_idx[i]) == 1 and reason in _WITH_TOKENS:
            request.metrics.decode_recv_second_token_time = now
        first_ns = int(batch.first_token_ns[i])
        # An instance that only goes on has its first token's stamp from the one that began.
        is_own = first_ns and request.num_emitted_tokens == 0
        return request.metrics.at_token(now, self.wall_s(first_ns) if is_own else None)

    def _now(self, batch: OutputBatch) -> float:
        return self.wall_s(batch.saved_ns or batch.committed_ns)

    def _speculation(self, batch: OutputBatch, i: int) -> SpeculateMetrics | None:
        for final in batch.finals:
            if int(final["index"]) == i:
                heads = final["heads"].tolist()
                return SpeculateMetrics.of(heads, int(final["spec_steps"]), self._num_drafts)
        return None


def candidates_of(batch: OutputBatch) -> tuple[Any, ...]:
    """Returns the columns that tell a step's candidates."""
    return batch.token_offsets, batch.topk_ids, batch.topk_logprobs, batch.ranks


def _drafts(drafts: Drafts | None) -> tuple[tuple[Any, ...], Any] | None:
    if drafts is None or not drafts.batch.width:  # a frame of nobody's drafts has no columns
        return None
    return candidates_of(drafts.batch), drafts.row_of
