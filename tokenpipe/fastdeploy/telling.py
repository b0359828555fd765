"""What FastDeploy's logs and traces hear of a request: first token, end, what went wrong."""

from __future__ import annotations

from typing import Any

from tokenpipe.fastdeploy.host import Host

_LINE = (
    ("Request", "request_id"),
    ("InputToken", "input_tokens"),
    ("CachedDetail", "cached_detail"),
    ("OutputToken", "output_tokens"),
    ("TokenRatio", "token_ratio"),
    ("TTFT", "ttft"),
    ("TTFT_S", "ttft_s"),
    ("E2E", "e2e_time"),
    ("IsPrefill", "is_prefill"),
    ("RecoveryStop", "recovery_stop"),
    ("PreemptedCount", "preempted_count"),
)
"""Of the finish line: each name in the text, and the field that stands behind it."""
_TEMPLATE = ", ".join(f"{name}={{{key}}}" for name, key in _LINE)


def _ns(wall_s: float | None) -> int:
    return int((wall_s or 0) * 1e9)


def _two(seconds: float | None) -> str:
    """FastDeploy's own line has 0 for what is unknown."""
    return f"{seconds or 0:.2f}"


class Telling:
    """Writes to FastDeploy's request log, its trace log and its spans."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def thread_begins(self) -> None:
        """Names the processor's thread for the spans."""
        self._host.tracing.trace_set_thread_info("Token Processor")

    def stage(self, text: str, **fields: Any) -> None:
        """Writes a line of the level STAGES."""
        self._host.log_request(self._host.levels.STAGES, message=text, **fields)

    def first_token(self, task: Any, now: float) -> None:
        """Tells of a request's first output."""
        host = self._host
        user = getattr(task, "user", "")
        host.trace_print(host.events.FIRST_TOKEN_GENERATED, task.request_id, user)
        host.trace_print(host.events.DECODE_START, task.request_id, user)
        self.stage("task:{request_id} has its first token", request_id=task.request_id)
        rid = self._open(task)
        host.tracing.trace_report_span(
            name=host.tracing.TraceSpanName.PREFILL,
            rid=rid,
            start_time_ns=_ns(task.metrics.inference_start_time),
            end_time_ns=_ns(now),
            thread_finish_flag=False,
        )

    def _open(self, task: Any) -> str:
        """Opens the request's trace context in this thread, under the key that the rest of
        FastDeploy has for it, and only where a span follows: nothing stays open."""
        rid: str = task.request_id.split("_")[0]
        start = task.metrics.inference_start_time
        self._host.tracing.trace_set_proc_propagate_context(rid, task.trace_carrier, _ns(start))
        return rid

    def end_of_span(self, task: Any, now: float) -> Any:
        """Closes the request's span; returns the carrier for its last output."""
        tracing, rid = self._host.tracing, self._open(task)
        carrier = tracing.trace_get_proc_propagate_context(rid=rid)
        tracing.trace_report_span(
            name=tracing.TraceSpanName.DECODE,
            rid=rid,
            start_time_ns=_ns(task.metrics.inference_start_time),
            end_time_ns=_ns(now),
            thread_finish_flag=True,
        )
        return carrier

    def completion(self, task: Any) -> None:
        """Tells of a request that ended with a result, not on a prefill instance."""
        host = self._host
        user = getattr(task, "user", "")
        host.trace_print(host.events.INFERENCE_END, task.request_id, user)
        host.trace_print(host.events.POSTPROCESSING_START, task.request_id, user)

    def finish_line(
        self,
        task: Any,
        *,
        num_tokens: int,
        token_ratio: float | None,
        e2e_s: float | None,
        is_prefill: bool,
        is_recovery: bool,
    ) -> None:
        """Writes the line that every request ends with."""
        stamps = task.metrics
        gpu = getattr(stamps, "gpu_cache_token_num", 0)
        cpu = getattr(stamps, "cpu_cache_token_num", 0)
        first = stamps.first_token_time or 0
        detail = f'{{"CachedToken": {gpu + cpu}, "GPU": {gpu}, "CPU": {cpu}}}'
        self._host.log_request(
            self._host.levels.LIFECYCLE,
            message=_TEMPLATE,
            request_id=task.request_id,
            input_tokens=task.prompt_token_ids_len,
            cached_detail=detail,
            output_tokens=num_tokens,
            token_ratio=_two(token_ratio),
            ttft=_two(first),
            ttft_s=_two(first + (stamps.time_in_queue or 0)),
            e2e_time=_two(e2e_s),
            is_prefill=is_prefill,
            recovery_stop=is_recovery,
            preempted_count=getattr(stamps, "preempted_count", 0),
        )

    def speculation(self, task: Any, found: Any, head_ratios: list[float]) -> None:
        """Writes how well a request's drafts were accepted, and each head of all requests."""
        self._host.spec_logger.info(
            "req_id: %s, accept_ratio: %s, average_accept_length: %s, accepted_tokens: %s, "
            "rejected_tokens: %s, accepted_tokens_per_head: %s, accept_ratio_per_head: %s; "
            "all requests, single head accept ratio: %s",
            *(task.request_id, found.accept_ratio, found.average_accept_length),
            *(found.accepted_tokens, found.rejected_tokens, found.accepted_tokens_per_head),
            *(found.accept_ratio_per_head, head_ratios),
        )
