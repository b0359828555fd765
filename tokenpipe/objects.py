"""Batches to objects: plain ints and floats, float32 widened exactly."""

from __future__ import annotations

from tokenpipe.commands import FinishReason
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
_ERRORS: dict[FinishReason, tuple[int, str | None]] = {
    FinishReason.ABORT: (200, "Aborted"),
    FinishReason.RECOVERY: (200, RECOVERY_TEXT),
    FinishReason.ERROR: (500, "the request ended by an error of the pipeline or the engine"),
    FinishReason.SHUTDOWN: (503, "the pipeline was shut down"),
}


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
        tokens = batch.token_ids.tolist()
        is_pooling = batch.kind == "pooling"
        candidates = None if is_pooling or not batch.width else _lists(batch)
        drafts = batch.draft_token_ids.tolist() if batch.num_drafts else None
        draft_offsets = batch.draft_offsets.tolist() if batch.num_drafts else []
        made: list[AnyOutput] = []
        for i, request in enumerate(batch.requests):
            reason = FinishReason(reasons[i])
            if is_pooling and reason is FinishReason.STOP:
                made.append(self._pooling(batch, i, request))
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
            made.append(self._request_output(batch, i, request, output, reason))
        return made

    def _pooling(self, batch: OutputBatch, i: int, request: Request) -> PoolingRequestOutput:
        return PoolingRequestOutput(
            request_id=request.request_id,
            outputs=PoolingOutput(batch.vectors[i].tolist()),
            prompt_token_ids=list(request.prompt_token_ids),
            metrics=self.metrics(batch, i, request),
        )

    def _request_output(
        self,
        batch: OutputBatch,
        i: int,
        request: Request,
        output: CompletionOutput,
        reason: FinishReason,
    ) -> RequestOutput:
        is_finished = reason is not FinishReason.NONE
        code, text = _ERRORS.get(reason, (200, None))
        if batch.is_gap and reason is FinishReason.ERROR:
            text = GAP_TEXT
        media = request.multimodal_inputs or {}
        metrics = self.metrics(batch, i, request)
        if self._is_speculative and reason in _WITH_A_RESULT:
            metrics.speculate_metrics = self._speculation(batch, i)
        return RequestOutput(
            request_id=request.request_id,
            outputs=output,
            finished=is_finished,
            finish_reason=reason.name.lower() if is_finished else None,
            output_type=batch.message_flag,
            prompt=request.prompt if output.send_idx == 0 and batch.has_slot else None,
            prompt_token_ids_len=len(request.prompt_token_ids),
            prompt_logprobs=request.take_prompt_logprobs(),
            metrics=metrics,
            num_cached_tokens=request.num_cached_tokens,
            num_input_image_tokens=media.get("num_input_image_tokens", 0),
            num_input_video_tokens=media.get("num_input_video_tokens", 0),
            error_code=code,
            error_msg=text,
            ic_req_data=request.ic_req_data,
            trace_carrier=request.trace_carrier if is_finished else None,
        )

    def metrics(self, batch: OutputBatch, i: int, request: Request) -> RequestMetrics:
        """Returns the request's metrics as they stand after row i of the batch."""
        first_ns = int(batch.first_token_ns[i])
        now_ns = batch.saved_ns or batch.committed_ns
        has_token = FinishReason(int(batch.finish_reason[i])) in _WITH_TOKENS
        if self._role == "decode" and int(batch.send_idx[i]) == 1 and has_token:
            request.metrics.decode_recv_second_token_time = self.wall_s(now_ns)
        # An instance that only goes on has its first token's stamp from the one that began.
        is_own = first_ns and request.num_emitted_tokens == 0
        return request.metrics.at_token(
            self.wall_s(now_ns), self.wall_s(first_ns) if is_own else None
        )

    def _speculation(self, batch: OutputBatch, i: int) -> SpeculateMetrics | None:
        for final in batch.finals:
            if int(final["index"]) == i:
                heads = final["heads"].tolist()
                return SpeculateMetrics.of(heads, int(final["spec_steps"]), self._num_drafts)
        return None


def _lists(batch: OutputBatch) -> tuple[list[list[int]], list[list[float]], list[int]]:
    return batch.topk_ids.tolist(), batch.topk_logprobs.tolist(), batch.ranks.tolist()
