"""The objects that come out: one per request and step, with FastDeploy's field names and plain
values."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from tokenpipe import _native


class LogprobsLists(NamedTuple):
    """Candidates of each token: one row of T columns per token, column 0 the sampled one."""

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


@dataclass(slots=True)
class SpeculateMetrics:
    """How well a request's drafts were accepted. Head 0 is the target model's own token."""

    accepted_tokens: int
    rejected_tokens: int
    accept_ratio: float
    average_accept_length: float
    accepted_tokens_per_head: list[int]
    accept_ratio_per_head: list[float]

    @classmethod
    def of(cls, heads: list[int], steps: int, num_speculative_tokens: int) -> SpeculateMetrics:
        """Returns the figures of a request that emitted `heads[j]` tokens of head j in `steps`
        steps (shared/spec/token-processor.md section 5; ratio 0 where nothing was accepted,
        F16).
        """
        n, accepted = num_speculative_tokens, sum(heads)
        ratios = [b / a if a else 0 for a, b in pairwise(heads)]
        return cls(
            accepted_tokens=accepted,
            rejected_tokens=steps * (n + 1) - accepted,
            accept_ratio=1 - steps / accepted if accepted else 0.0,
            average_accept_length=accepted / steps if steps else 0.0,
            accepted_tokens_per_head=heads[: n + 1],
            accept_ratio_per_head=ratios[:n],
        )


@dataclass(slots=True)
class RequestMetrics:
    """Stamps of a request in seconds since the epoch, None while unknown, and what follows from
    them.

    Those up to `decode_inference_start_time` are the caller's; the others are filled in with each
    output (shared/spec/token-processor.md section 2.5).
    """

    arrival_time: float | None = None
    preprocess_start_time: float | None = None
    preprocess_end_time: float | None = None
    scheduler_recv_req_time: float | None = None
    engine_get_req_time: float | None = None
    ask_decode_resource_start_time: float | None = None
    ask_decode_resource_finish_time: float | None = None
    add_req_to_resource_manager_time: float | None = None
    inference_start_time: float | None = None
    wait_for_sending_cache_time: float | None = None
    send_request_output_to_decode_time: float | None = None
    decode_recv_req_time: float | None = None
    decode_preallocate_req_time: float | None = None
    decode_recv_first_token_time: float | None = None
    decode_inference_start_time: float | None = None
    decode_recv_second_token_time: float | None = None
    engine_recv_first_token_time: float | None = None
    engine_recv_latest_token_time: float | None = None
    llm_engine_recv_latest_token_timestamp: float | None = None
    llm_engine_recv_req_timestamp: float | None = None
    llm_engine_send_req_to_engine_timestamp: float | None = None
    request_start_time: float | None = None
    model_execute_time: float | None = None
    model_forward_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None
    preprocess_cost_time: float | None = None
    gpu_cache_token_num: int = 0
    cpu_cache_token_num: int = 0
    preempted_count: int = 0
    speculate_metrics: SpeculateMetrics | None = None

    def __post_init__(self) -> None:
        if self.arrival_time is None:
            self.arrival_time = time.time()

    def inference_start(self, role: str) -> float | None:
        """Returns when this instance began to run the request."""
        return self.decode_inference_start_time if role == "decode" else self.inference_start_time

    def at_token(self, now: float, first: float | None) -> RequestMetrics:
        """Returns a copy as it stands when a token came at `now`, the first one at `first`.

        It costs no call of Python (cuda_ops/python_outputs.hpp), since every output has one.
        """
        return STAMPS.at_token(self, now, first)


STAMPS = _native.Stamps(RequestMetrics)
"""Knows where the fields of a RequestMetrics lie."""


@dataclass(slots=True)
class CompletionOutput:
    """The tokens of one output. `index` is the row."""

    index: int
    send_idx: int
    token_ids: list[int]
    logprob: float | None = None
    top_logprobs: LogprobsLists | None = None
    draft_top_logprobs: LogprobsLists | None = None
    draft_token_ids: list[int] = field(default_factory=list)
    decode_type: int = 0
    logprobs: Any = None
    text: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


@dataclass(slots=True)
class RequestOutput:
    """One request's part of one step.

    The garbage collector does not look through an output that goes on, nor through its parts: an
    object that is put into one must not lead back to it, or both stay.
    """

    request_id: str
    outputs: CompletionOutput
    finished: bool
    finish_reason: str | None = None
    output_type: int = 3
    prompt: Any = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_token_ids_len: int = 0
    prompt_logprobs: LogprobsLists | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    num_input_image_tokens: int = 0
    num_input_video_tokens: int = 0
    error_code: int = 200
    error_msg: str | None = None
    ic_req_data: Any = None
    trace_carrier: dict[str, str] | None = None


@dataclass(slots=True)
class PoolingOutput:
    """The vector of a pooling request."""

    data: list[float]


@dataclass(slots=True)
class PoolingRequestOutput:
    """The one output of a pooling request."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    finish_reason: str | None = "stop"
    metrics: RequestMetrics | None = None
    error_code: int = 200
    error_msg: str | None = None


AnyOutput = RequestOutput | PoolingRequestOutput
