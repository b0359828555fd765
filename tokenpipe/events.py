"""What happens to a request, for traces and logs: handed to a callback of the handle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenpipe.commands import FinishReason
from tokenpipe.objects import ObjectMaker
from tokenpipe.outputs import OutputBatch
from tokenpipe.requests import Request

_WITH_A_RESULT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.RECOVERY)


@dataclass(frozen=True)
class RequestEvent:
    """One event. `name` is FIRST_TOKEN_GENERATED, DECODE_START, INFERENCE_END, POSTPROCESSING_START
    (FastDeploy's trace events, in this order) or FINISHED, whose `fields` are those of FastDeploy's
    finish log line (shared/spec/token-processor.md section 3)."""

    name: str
    request_id: str
    user: str
    stage: str
    time_s: float
    """Seconds since the epoch."""
    fields: dict[str, Any] = field(default_factory=dict)


_STAGES = {
    "FIRST_TOKEN_GENERATED": "PREFILL",
    "DECODE_START": "DECODE",
    "INFERENCE_END": "DECODE",
    "POSTPROCESSING_START": "POSTPROCESSING",
    "FINISHED": "POSTPROCESSING",
}


def events_of(batch: OutputBatch, maker: ObjectMaker, role: str) -> Iterator[RequestEvent]:
    """Yields the events of the requests that begin or end in a batch."""
    if not batch.num_firsts and not batch.num_finals:
        return
    now = maker.wall_s(batch.saved_ns or batch.committed_ns)

    def event(name: str, request: Request, **fields: Any) -> RequestEvent:
        return RequestEvent(name, request.request_id, request.user, _STAGES[name], now, fields)

    if batch.num_firsts:
        for i in _beginning(batch):
            request = batch.requests[i]
            yield event("FIRST_TOKEN_GENERATED", request)
            yield event("DECODE_START", request)
    for final in batch.finals:
        i = int(final["index"])
        request, reason = batch.requests[i], FinishReason(int(batch.finish_reason[i]))
        is_prefill = role == "prefill" and request.disaggregate_info is not None
        if reason in _WITH_A_RESULT and not is_prefill:
            yield event("INFERENCE_END", request)
            yield event("POSTPROCESSING_START", request)
        yield event("FINISHED", request, **_line(batch, i, request, maker, now, role, final))


def _beginning(batch: OutputBatch) -> list[int]:
    is_first = (batch.first_token_ns == batch.saved_ns) & (batch.send_idx == 0)
    return [int(i) for i in is_first.nonzero()[0]]


def _line(
    batch: OutputBatch,
    i: int,
    request: Request,
    maker: ObjectMaker,
    now: float,
    role: str,
    final: Any,
) -> dict[str, Any]:
    reason = FinishReason(int(batch.finish_reason[i]))
    metrics = maker.metrics(batch, i, request)
    start = metrics.inference_start(role)
    e2e = now - start if start else None
    tokens = int(final["num_tokens"])
    first, queued = metrics.first_token_time, metrics.time_in_queue
    gpu, cpu = metrics.gpu_cache_token_num, metrics.cpu_cache_token_num
    return {
        "Request": request.request_id,
        "InputToken": len(request.prompt_token_ids),
        "CachedDetail": {"CachedToken": gpu + cpu, "GPU": gpu, "CPU": cpu},
        "OutputToken": tokens,
        "TokenRatio": tokens / e2e if e2e else None,
        "TTFT": first,
        "TTFT_S": first + queued if first is not None and queued is not None else None,
        "E2E": e2e,
        "IsPrefill": role == "prefill" and request.disaggregate_info is not None,
        "RecoveryStop": reason is FinishReason.RECOVERY,
        "PreemptedCount": metrics.preempted_count,
        "FinishReason": reason.name.lower(),
    }
