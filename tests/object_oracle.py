"""The objects of a batch in plain Python, field by field: what those made in C++ must equal.

Written for reading, not for speed. It changes nothing: what an object takes from its request (the
prompt's logprobs, which come once; the second token's stamp) is taken from a copy of it.
"""

from __future__ import annotations

import copy
from typing import Any

import tokenpipe as tp
from tokenpipe.commands import ACKNOWLEDGED, SILENT, FinishReason
from tokenpipe.config import PipelineConfig
from tokenpipe.objects import GAP_TEXT, RECOVERY_TEXT, ObjectMaker
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

_ERRORS = {
    FinishReason.ABORT: (200, "Aborted"),
    FinishReason.RECOVERY: (200, RECOVERY_TEXT),
    FinishReason.ERROR: (500, "the request ended by an error of the pipeline or the engine"),
    FinishReason.SHUTDOWN: (503, "the pipeline was shut down"),
}
_WITH_A_RESULT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.RECOVERY)
_WITH_TOKENS = (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH)


def kept(request: tp.Request) -> tp.Request:
    """A copy of a request of which making an output may take something."""
    own = copy.copy(request)
    own.metrics = copy.copy(request.metrics)
    own._prompt_pieces = list(request._prompt_pieces)
    return own


def objects_of(batch: OutputBatch, config: PipelineConfig, offset_ns: int) -> list[AnyOutput]:
    """The objects of a batch, before its own are made."""
    if batch.kind == "prompt":
        return []
    return [_object(batch, i, kept(r), config, offset_ns) for i, r in enumerate(batch.requests)]


def at_token(of: RequestMetrics, now: float, first: float | None) -> RequestMetrics:
    """The metrics of a request when a token came at `now`, the first one at `first`."""
    m = copy.copy(of)
    m.engine_recv_latest_token_time = m.llm_engine_recv_latest_token_timestamp = now
    if first is not None:
        m.engine_recv_first_token_time = first
    if m.arrival_time is not None:
        m.model_execute_time = now - m.arrival_time
    if m.inference_start_time:
        m.model_forward_time = now - m.inference_start_time
    for cost, begin, end in (
        ("first_token_time", m.inference_start_time, m.engine_recv_first_token_time),
        ("time_in_queue", m.preprocess_end_time, m.inference_start_time),
        ("preprocess_cost_time", m.preprocess_start_time, m.preprocess_end_time),
    ):
        if begin and end:
            setattr(m, cost, end - begin)
    m.request_start_time = m.arrival_time
    m.llm_engine_recv_req_timestamp = m.engine_get_req_time
    m.llm_engine_send_req_to_engine_timestamp = m.inference_start_time
    return m


def _object(
    batch: OutputBatch, i: int, request: tp.Request, config: PipelineConfig, offset_ns: int
) -> AnyOutput:
    value = int(batch.finish_reason[i])  # a row that was let go of has not ended
    reason = FinishReason.NONE if value in (ACKNOWLEDGED, SILENT) else FinishReason(value)
    row, send_idx = int(batch.row[i]), int(batch.send_idx[i])
    now = ((batch.saved_ns or batch.committed_ns) + offset_ns) / 1e9
    first_ns = int(batch.first_token_ns[i])
    if config.role == "decode" and send_idx == 1 and reason in _WITH_TOKENS:
        request.metrics.decode_recv_second_token_time = now
    is_own = first_ns and request.num_emitted_tokens == 0
    metrics = at_token(request.metrics, now, (first_ns + offset_ns) / 1e9 if is_own else None)
    if batch.kind == "pooling" and reason is FinishReason.STOP:
        data, prompt = batch.vectors[i].tolist(), list(request.prompt_token_ids)
        return PoolingRequestOutput(
            request.request_id, PoolingOutput(data), prompt, True, "stop", metrics
        )
    part = slice(int(batch.token_offsets[i]), int(batch.token_offsets[i + 1]))
    completion = CompletionOutput(row, send_idx, batch.token_ids[part].tolist())
    if batch.kind != "pooling" and batch.width and part.stop > part.start:
        completion.top_logprobs = LogprobsLists(
            batch.topk_ids[part].tolist(),
            batch.topk_logprobs[part].tolist(),
            batch.ranks[part].tolist(),
        )
        completion.logprob = completion.top_logprobs.logprobs[-1][0]
    if batch.num_drafts:
        begin, end = batch.draft_offsets[i : i + 2].tolist()
        completion.draft_token_ids = batch.draft_token_ids[begin:end].tolist()
    if batch.drafts is not None:
        completion.draft_top_logprobs = batch.drafts.of(i)
    if config.speculative_method != "none" and reason in _WITH_A_RESULT:
        (final,) = (f for f in batch.finals if f["index"] == i)
        metrics.speculate_metrics = SpeculateMetrics.of(
            final["heads"].tolist(), int(final["spec_steps"]), config.num_speculative_tokens
        )
    media = request.multimodal_inputs or {}
    output = RequestOutput(
        request_id=request.request_id,
        outputs=completion,
        finished=False,
        output_type=batch.message_flag,
        prompt=request.prompt if send_idx == 0 and batch.has_slot else None,
        prompt_token_ids_len=len(request.prompt_token_ids),
        prompt_logprobs=request.take_prompt_logprobs(),
        metrics=metrics,
        num_cached_tokens=request.num_cached_tokens,
        num_input_image_tokens=media.get("num_input_image_tokens", 0),
        num_input_video_tokens=media.get("num_input_video_tokens", 0),
        ic_req_data=request.ic_req_data,
    )
    if reason is not FinishReason.NONE:
        output.finished, output.finish_reason = True, reason.name.lower()
        output.error_code, output.error_msg = _ERRORS.get(reason, (200, None))
        if batch.is_gap and reason is FinishReason.ERROR:
            output.error_msg = GAP_TEXT
        output.trace_carrier = request.trace_carrier
    return output


def spelled(value: Any) -> Any:
    """A value with the type of each part of it: 1, 1.0 and True equal each other, and so do zeros;
    here they are told apart, and NaN equals itself."""
    if isinstance(value, (list, tuple)):
        return type(value), [spelled(item) for item in value]
    if hasattr(value, "__slots__"):
        return type(value), [(name, spelled(getattr(value, name))) for name in value.__slots__]
    return type(value), repr(value) if isinstance(value, float) else value


class CheckedMaker(ObjectMaker):
    """Makes objects as a pipeline does, and holds each batch's against the oracle's."""

    def __init__(self, config: PipelineConfig, wall_offset_ns: int) -> None:
        super().__init__(config, wall_offset_ns)
        self._config, self._offset = config, wall_offset_ns

    def make(self, batch: OutputBatch) -> list[AnyOutput]:
        expected = objects_of(batch, self._config, self._offset)
        made = super().make(batch)
        assert spelled(made) == spelled(expected)
        return made
