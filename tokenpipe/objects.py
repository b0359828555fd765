"""Batches to objects: plain ints and floats, float32 widened exactly."""

from __future__ import annotations

from tokenpipe import _native
from tokenpipe.commands import ACKNOWLEDGED, SILENT, FinishReason
from tokenpipe.config import PipelineConfig
from tokenpipe.outputs import OutputBatch
from tokenpipe.records import (
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
_REASONS = {
    **{int(reason): reason for reason in FinishReason},
    **dict.fromkeys((ACKNOWLEDGED, SILENT), FinishReason.NONE),
}
"""By value: a look-up where the class would be called for every row."""
_WITH_A_RESULT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.RECOVERY)
_WITH_TOKENS = (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH)


class ObjectMaker:
    """Makes the objects of a batch; knows the configuration and the wall clock's offset."""

    def __init__(self, config: PipelineConfig, wall_offset_ns: int) -> None:
        self._role = config.role
        self._num_drafts = config.num_speculative_tokens
        self._is_speculative = config.speculative_method != "none"
        self._offset_ns = wall_offset_ns

    def wall_s(self, stamp_ns: int) -> float:
        """Returns a CLOCK_MONOTONIC stamp as seconds since the epoch."""
        return (stamp_ns + self._offset_ns) / 1e9

    def make(self, batch: OutputBatch) -> list[AnyOutput]:
        """Returns an object per row; prompt logprobs come with the next output of their request."""
        if batch.kind == "prompt":
            return []
        rows, send_idx = batch.row.tolist(), batch.send_idx.tolist()
        offsets, reasons = batch.token_offsets.tolist(), batch.finish_reason.tolist()
        tokens, firsts = batch.token_ids.tolist(), batch.first_token_ns.tolist()
        is_pooling = batch.kind == "pooling"
        candidates = None if is_pooling or not batch.width else _lists(batch)
        drafts = batch.draft_token_ids.tolist() if batch.num_drafts else None
        draft_offsets = batch.draft_offsets.tolist() if batch.num_drafts else []
        now = self._now(batch)
        made: list[AnyOutput] = []
        for i, request in enumerate(batch.requests):
            reason = _REASONS[reasons[i]]
            metrics = self._metrics(request, now, firsts[i], send_idx[i], reason)
            if is_pooling and reason is FinishReason.STOP:
                made.append(self._pooling(batch, i, request, metrics))
                continue
            begin, end = offsets[i], offsets[i + 1]
            output = CompletionOutput(rows[i], send_idx[i], tokens[begin:end])
            if candidates is not None and end > begin:
                ids, logprobs, ranks = candidates
                output.top_logprobs = LogprobsLists(
                    ids[begin:end], logprobs[begin:end], ranks[begin:end]
                )
                output.logprob = logprobs[end - 1][0]
            if drafts is not None:
                output.draft_token_ids = drafts[draft_offsets[i] : draft_offsets[i + 1]]
            if batch.drafts is not None:
                output.draft_top_logprobs = batch.drafts.of(i)
            if self._is_speculative and reason in _WITH_A_RESULT:
                metrics.speculate_metrics = self._speculation(batch, i)
            made.append(self._request_output(batch, request, output, metrics, reason))
        return made

    def _pooling(
        self, batch: OutputBatch, i: int, request: Request, metrics: RequestMetrics
    ) -> PoolingRequestOutput:
        return PoolingRequestOutput(
            request_id=request.request_id,
            outputs=PoolingOutput(batch.vectors[i].tolist()),
            prompt_token_ids=list(request.prompt_token_ids),
            metrics=metrics,
        )

    def _request_output(
        self,
        batch: OutputBatch,
        request: Request,
        output: CompletionOutput,
        metrics: RequestMetrics,
        reason: FinishReason,
    ) -> RequestOutput:
        made = _native.copy_slots(_GOES_ON)  # a quarter of what its constructor costs
        made.request_id, made.outputs, made.metrics = request.request_id, output, metrics
        made.output_type = batch.message_flag
        made.prompt_token_ids = []
        made.prompt_token_ids_len = len(request.prompt_token_ids)
        made.prompt_logprobs = request.take_prompt_logprobs()
        made.num_cached_tokens = request.num_cached_tokens
        made.ic_req_data = request.ic_req_data
        if output.send_idx == 0 and batch.has_slot:
            made.prompt = request.prompt
        if media := request.multimodal_inputs:
            made.num_input_image_tokens = media.get("num_input_image_tokens", 0)
            made.num_input_video_tokens = media.get("num_input_video_tokens", 0)
        if reason is not FinishReason.NONE:
            made.finished, made.finish_reason = True, reason.name.lower()
            made.error_code, made.error_msg = ERRORS.get(reason, (200, None))
            if batch.is_gap and reason is FinishReason.ERROR:
                made.error_msg = GAP_TEXT
            made.trace_carrier = request.trace_carrier
        return made

    def metrics(self, batch: OutputBatch, i: int, request: Request) -> RequestMetrics:
        """Returns the request's metrics as they stand after row i of the batch."""
        reason = _REASONS[int(batch.finish_reason[i])]
        first_ns, send_idx = int(batch.first_token_ns[i]), int(batch.send_idx[i])
        return self._metrics(request, self._now(batch), first_ns, send_idx, reason)

    def _now(self, batch: OutputBatch) -> float:
        return self.wall_s(batch.saved_ns or batch.committed_ns)

    def _metrics(
        self, request: Request, now: float, first_ns: int, send_idx: int, reason: FinishReason
    ) -> RequestMetrics:
        if self._role == "decode" and send_idx == 1 and reason in _WITH_TOKENS:
            request.metrics.decode_recv_second_token_time = now
        # An instance that only goes on has its first token's stamp from the one that began.
        is_own = first_ns and request.num_emitted_tokens == 0
        return request.metrics.at_token(now, self.wall_s(first_ns) if is_own else None)

    def _speculation(self, batch: OutputBatch, i: int) -> SpeculateMetrics | None:
        for final in batch.finals:
            if int(final["index"]) == i:
                heads = final["heads"].tolist()
                return SpeculateMetrics.of(heads, int(final["spec_steps"]), self._num_drafts)
        return None


def _lists(batch: OutputBatch) -> tuple[list[list[int]], list[list[float]], list[int]]:
    return batch.topk_ids.tolist(), batch.topk_logprobs.tolist(), batch.ranks.tolist()
