"""FastDeploy's engine as the plugin sees it: classes, managers and modules by their descriptions
(shared/spec/token-processor.md), so that nothing of FastDeploy is needed to drive the plugin.

`installed()` puts them where an import of `fastdeploy` finds them.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

BLOCKS = 1000


class LogprobsLists(NamedTuple):
    """fastdeploy.worker.output.LogprobsLists"""

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


class LogprobsTensors(NamedTuple):
    """fastdeploy.worker.output.LogprobsTensors"""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any


@dataclass
class PoolingOutput:
    """The vector of a pooling request."""

    data: list[Any]


@dataclass
class PoolingRequestOutput:
    """The output of a pooling request; the defaults are FastDeploy's, commas and all."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool
    metrics: Any = (None,)
    error_code: Any = (200,)
    error_msg: Any = (None,)


@dataclass
class SpeculateMetrics:
    """How a request's drafts did."""

    accepted_tokens: int
    rejected_tokens: int
    accept_ratio: float
    average_accept_length: float
    accepted_tokens_per_head: list[int]
    accept_ratio_per_head: list[float]


@dataclass(slots=True)
class RequestMetrics:
    """A request's stamps, with the methods that set those of the token processor."""

    arrival_time: float | None = None
    preprocess_start_time: float | None = None
    preprocess_end_time: float | None = None
    engine_get_req_time: float | None = None
    inference_start_time: float | None = None
    decode_inference_start_time: float | None = None
    wait_for_sending_cache_time: float | None = None
    send_request_output_to_decode_time: float | None = None
    decode_recv_second_token_time: float | None = None
    engine_recv_first_token_time: float | None = None
    engine_recv_latest_token_time: float | None = None
    llm_engine_recv_latest_token_timestamp: float | None = None
    llm_engine_recv_req_timestamp: float | None = None
    llm_engine_send_req_to_engine_timestamp: float | None = None
    model_execute_time: float | None = None
    model_forward_time: float | None = None
    request_start_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None
    preprocess_cost_time: float | None = None
    gpu_cache_token_num: int = 0
    cpu_cache_token_num: int = 0
    preempted_count: int = 0
    speculate_metrics: SpeculateMetrics | None = None

    def record_recv_token(self, t: float | None = None) -> None:
        """A token has come."""
        now = time.time() if t is None else t
        self.engine_recv_latest_token_time = now
        self.llm_engine_recv_latest_token_timestamp = now
        self.model_execute_time = now - (self.arrival_time or now)
        if self.inference_start_time:
            self.model_forward_time = now - self.inference_start_time

    def record_recv_first_token(self) -> None:
        """The first one."""
        now = time.time()
        self.record_recv_token(now)
        self.engine_recv_first_token_time = now

    def record_decode_recv_second_token(self) -> None:
        """The second one, the first of a decode instance."""
        now = time.time()
        self.record_recv_token(now)
        self.decode_recv_second_token_time = now

    def cal_cost_time(self) -> None:
        """What follows from the stamps."""
        if self.engine_recv_first_token_time and self.inference_start_time:
            self.first_token_time = self.engine_recv_first_token_time - self.inference_start_time
        if self.inference_start_time and self.preprocess_end_time:
            self.time_in_queue = self.inference_start_time - self.preprocess_end_time
        if self.preprocess_end_time and self.preprocess_start_time:
            self.preprocess_cost_time = self.preprocess_end_time - self.preprocess_start_time
        self.request_start_time = self.arrival_time
        self.llm_engine_recv_req_timestamp = self.engine_get_req_time
        self.llm_engine_send_req_to_engine_timestamp = self.inference_start_time

    def get_inference_start_time(self, is_decode: bool) -> float | None:
        """When this instance began to run it."""
        return self.decode_inference_start_time if is_decode else self.inference_start_time


@dataclass(slots=True)
class CompletionOutput:
    """The tokens of one output."""

    index: int
    send_idx: int
    token_ids: list[int]
    decode_type: int = 0
    logprob: float | None = None
    top_logprobs: LogprobsLists | None = None
    draft_top_logprobs: LogprobsLists | None = None
    logprobs: Any = None
    draft_token_ids: list[int] | None = None
    text: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class RequestOutput:
    """One output; its constructor turns None into an empty list of prompt tokens."""

    def __init__(
        self,
        request_id: str,
        prompt: Any = None,
        prompt_token_ids: list[int] | None = None,
        prompt_logprobs: Any = None,
        outputs: CompletionOutput | None = None,
        finished: bool = False,
        metrics: RequestMetrics | None = None,
        num_cached_tokens: int = 0,
        num_input_image_tokens: int = 0,
        num_input_video_tokens: int = 0,
        error_code: int = 200,
        error_msg: str | None = None,
        output_type: int = 3,
        ic_req_data: Any = None,
        prompt_token_ids_len: int = 0,
        trace_carrier: Any = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = [] if prompt_token_ids is None else prompt_token_ids
        self.prompt_token_ids_len = prompt_token_ids_len
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.num_cached_tokens = num_cached_tokens
        self.num_input_image_tokens = num_input_image_tokens
        self.num_input_video_tokens = num_input_video_tokens
        self.error_code = error_code
        self.error_msg = error_msg
        self.output_type = output_type
        self.ic_req_data = ic_req_data
        self.trace_carrier = trace_carrier


class Request:
    """A task."""

    def __init__(self, request_id: str, eos_token_ids: list[int] | None = None, **fields: Any):
        self.request_id = request_id
        self.eos_token_ids = [2] if eos_token_ids is None else eos_token_ids
        self.prompt_token_ids = [1, 1, 1]
        self.prompt_token_ids_len = 3
        self.messages: Any = None
        self.num_cached_tokens = 0
        self.multimodal_inputs: dict[str, int] | None = None
        self.ic_req_data: Any = None
        self.trace_carrier: Any = None
        self.disaggregate_info: dict[str, Any] | None = None
        self.prefill_chunk_info: list[int] | None = None
        self.need_prefill_tokens: int | None = 3
        self.num_computed_tokens = 0
        self.pooling_params = None
        self.output_token_ids: list[int] = []
        self.block_tables = [1, 2]
        self.idx: int | None = None
        self.user = "somebody"
        now = time.time()
        self.metrics = RequestMetrics(
            arrival_time=now - 0.3,
            preprocess_start_time=now - 0.25,
            preprocess_end_time=now - 0.2,
            engine_get_req_time=now - 0.15,
            inference_start_time=now - 0.1,
            decode_inference_start_time=now - 0.05,
        )
        self.__dict__.update(fields)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return getattr(self, name, default)


class Recorded:
    """One metric that notes what it is told; it has no set() where it is a counter."""

    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def inc(self, by: float = 1) -> None:
        """Adds."""
        self.value += by

    def dec(self, by: float = 1) -> None:
        """Takes away."""
        self.value -= by

    def observe(self, value: float) -> None:
        """Notes one value."""
        self.observed.append(value)


class RecordedGauge(Recorded):
    """A metric that can be set."""

    def set(self, value: float) -> None:
        """Sets."""
        self.value = value


class Metrics:
    """main_process_metrics: histograms, counters, gauges; those of speculation are made late."""

    def __init__(self) -> None:
        counters = "time_to_first_token request_queue_time request_prefill_time "
        counters += "time_per_output_token generation_tokens_total request_token_ratio "
        counters += "request_decode_time request_inference_time request_generation_tokens "
        for name in (counters + "request_success_total").split():
            setattr(self, name, Recorded())
        gauges = "num_requests_running available_gpu_block_num batch_size available_batch_size"
        for name in gauges.split():
            setattr(self, name, RecordedGauge())
        self.speculative: tuple[Any, int] | None = None

    def _init_speculative_metrics(self, method: Any, count: int) -> None:
        self.speculative = (method, count)
        for name in ("num_accepted_tokens_total", "num_emitted_tokens_total"):
            setattr(self, f"spec_decode_{name}", Recorded())
        self.spec_decode_num_draft_tokens_total = Recorded()
        self.spec_decode_draft_acceptance_rate = RecordedGauge()
        self.spec_decode_efficiency = RecordedGauge()
        self.spec_decode_draft_single_head_acceptance_rate = [RecordedGauge() for _ in range(count)]


@dataclass
class Calls:
    """What managers, connectors, logs and traces were asked, in order."""

    made: list[tuple[Any, ...]] = field(default_factory=list)

    def note(self, *call: Any) -> None:
        """Notes one."""
        self.made.append(call)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """Returns the calls of these names, in order."""
        return [call for call in self.made if call[0] in names]


class ResourceManager:
    """The V0 manager: the token processor gives rows back."""

    def __init__(self, num_rows: int, calls: Calls) -> None:
        self.calls = calls
        self.max_num_seqs = num_rows
        self.stop_flags = [True] * num_rows
        self.tasks_list: list[Any] = [None] * num_rows
        self.req_dict: dict[str, int] = {}

    def give(self, row: int, request: Request) -> None:
        """Gives a request a row."""
        request.idx = row
        self.tasks_list[row] = request
        self.stop_flags[row] = False
        self.req_dict[request.request_id] = row

    def _recycle_block_tables(self, request: Request) -> None:
        row = self.req_dict[request.request_id]
        is_free = self.stop_flags[row]
        self.calls.note("blocks", request.request_id, "free" if is_free else "held")

    def total_block_number(self) -> int:
        """Blocks in all."""
        return BLOCKS

    def available_batch(self) -> int:
        """Rows that nobody has."""
        return sum(self.stop_flags)

    def info(self) -> str:
        """A line for the log."""
        return "info"


class ResourceManagerV1(ResourceManager):
    """The V1 manager: its lock does not nest, and rows come back in a thread of its own."""

    def __init__(self, num_rows: int, calls: Calls, role: str = "mixed") -> None:
        super().__init__(num_rows, calls)
        self.role = role
        self.lock = threading.Lock()
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.to_be_rescheduled_request_id_set: set[str] = set()
        self.to_be_aborted_req_id_set: set[str] = set()
        self.cleared = 0

    def give(self, row: int, request: Request) -> None:
        with self.lock:
            self.requests[request.request_id] = request
            super().give(row, request)

    def finish_requests_async(self, request_id: str) -> None:
        """Gives a row back, a while later."""
        self.calls.note("finish", request_id)
        threading.Thread(target=self._finish, args=(request_id,)).start()

    def _finish(self, request_id: str) -> None:
        with self.lock:
            request = self.requests.pop(request_id, None)
            if request is None or request.idx is None:
                return
            self.tasks_list[request.idx] = None
            self.stop_flags[request.idx] = True
            self.req_dict.pop(request_id, None)
            self.to_be_rescheduled_request_id_set.discard(request_id)

    def abort(self, request_id: str) -> None:
        """What the scheduler does when a client has gone: the worker is told."""
        with self.lock:
            self.to_be_aborted_req_id_set.add(request_id)

    def recycle_abort_task(self, request_id: str) -> None:
        """The worker has let go of an aborted request."""
        self.calls.note("abort", request_id)
        with self.lock:
            if request_id in self.to_be_aborted_req_id_set and request_id in self.requests:
                request = self.requests.pop(request_id)
                assert request.idx is not None
                self.tasks_list[request.idx] = None
                self.stop_flags[request.idx] = True
                self.req_dict.pop(request_id, None)
                self.to_be_aborted_req_id_set.discard(request_id)

    def preempt(self, request_id: str) -> None:
        """What the scheduler does when blocks run out; a decode instance gives up the request."""
        with self.lock:
            self.to_be_rescheduled_request_id_set.add(request_id)
            if self.role == "decode":
                request = self.requests.pop(request_id)
                assert request.idx is not None
                self.tasks_list[request.idx] = None
                self.stop_flags[request.idx] = True
                self.req_dict.pop(request_id, None)

    def reschedule_preempt_task(self, request_id: str) -> None:
        """The worker has let go of a preempted request."""
        self.calls.note("reschedule", request_id)
        with self.lock:
            if request_id in self.to_be_rescheduled_request_id_set and request_id in self.requests:
                self.waiting.append(self.requests[request_id])
                self.to_be_rescheduled_request_id_set.remove(request_id)

    def cache_output_tokens(self, request: Request) -> None:
        """Keeps the cache of a request's output."""
        with self.lock:
            row = self.req_dict[request.request_id]
            self.calls.note("cache", request.request_id, "free" if self.stop_flags[row] else "held")

    def clear_data(self) -> None:
        """Forgets what waits."""
        self.cleared += 1
        self.waiting.clear()
        self.to_be_rescheduled_request_id_set.clear()


class Scheduler:
    """The sink. `failures`: so many of the next calls raise."""

    def __init__(self) -> None:
        self.put: list[list[Any]] = []
        self.failures = 0
        self._changed = threading.Condition()

    def put_results(self, results: list[Any]) -> None:
        """Takes the outputs of one step."""
        with self._changed:
            if self.failures:
                self.failures -= 1
                raise OSError("the sink fails")
            self.put.append(list(results))
            self._changed.notify_all()

    def outputs(self) -> list[Any]:
        """All outputs so far."""
        with self._changed:
            return [result for results in self.put for result in results]


class Queue:
    """The engine worker queue, as far as the cache sender's answers."""

    def __init__(self) -> None:
        self.answers: deque[tuple[str, str]] = deque()

    def get_finished_req(self) -> list[tuple[str, str]]:
        """Returns what has been answered since the last call."""
        found = []
        while self.answers:
            found.append(self.answers.popleft())
        return found


class SpecMethod(str, enum.Enum):
    """fastdeploy.spec_decode.SpecMethod"""

    MTP = "mtp"
    NGRAM = "ngram"


def config(
    *,
    role: str = "mixed",
    num_rows: int = 4,
    logprob: bool = False,
    method: SpecMethod | None = None,
    num_drafts: int = 5,
    draft_logprob: bool = False,
    max_logprobs: int = 20,
    runner_type: str = "generate",
) -> Any:
    """FastDeploy's `cfg`."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method, num_speculative_tokens=num_drafts, enable_draft_logprob=draft_logprob
        ),
        model_config=SimpleNamespace(
            enable_logprob=logprob, max_logprobs=max_logprobs, runner_type=runner_type
        ),
        parallel_config=SimpleNamespace(
            local_data_parallel_id=0,
            data_parallel_size=1,
            enable_expert_parallel=False,
            local_engine_worker_queue_port=0,
        ),
        scheduler_config=SimpleNamespace(splitwise_role=role, name="local", max_num_seqs=num_rows),
        cache_config=SimpleNamespace(enable_prefix_caching=True, enable_output_caching=True),
    )


@dataclass
class FastDeploy:
    """The installed modules: what may be set, and what they were told."""

    calls: Calls = field(default_factory=Calls)
    metrics: Metrics = field(default_factory=Metrics)
    envs: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            FD_USE_GET_SAVE_OUTPUT_V1=False,
            FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT=120,
            ENABLE_V1_KVCACHE_SCHEDULER=1,
            ENABLE_V1_KVCACHE_MANAGER=0,
            FD_ENABLE_INTERNAL_ADAPTER=0,
        )
    )

    def modules(self) -> dict[str, dict[str, Any]]:
        """The modules and what is in them."""
        note = self.calls.note
        tracing = {
            "trace_set_thread_info": lambda label: note("thread", label),
            "trace_set_proc_propagate_context": lambda rid, carrier, ns=0: note("open", rid),
            "trace_get_proc_propagate_context": lambda rid: {"root_span": rid},
            "trace_report_span": lambda **f: note("span", f["name"], f["thread_finish_flag"]),
            "TraceSpanName": SimpleNamespace(PREFILL="prefill", DECODE="decode"),
        }
        names = ("FIRST_TOKEN_GENERATED", "DECODE_START", "INFERENCE_END", "POSTPROCESSING_START")
        logger = logging.getLogger("fastdeploy stand-in")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        return {
            "fastdeploy": {},
            "fastdeploy.envs": vars(self.envs),
            "fastdeploy.engine": {},
            "fastdeploy.engine.request": {
                "RequestOutput": RequestOutput,
                "CompletionOutput": CompletionOutput,
                "SpeculateMetrics": SpeculateMetrics,
                "PoolingOutput": PoolingOutput,
                "PoolingRequestOutput": PoolingRequestOutput,
            },
            "fastdeploy.worker": {},
            "fastdeploy.worker.output": {
                "LogprobsLists": LogprobsLists,
                "LogprobsTensors": LogprobsTensors,
            },
            "fastdeploy.metrics": {},
            "fastdeploy.metrics.metrics": {"main_process_metrics": self.metrics},
            "fastdeploy.metrics.trace": tracing,
            "fastdeploy.trace": {},
            "fastdeploy.trace.constants": {
                "LoggingEventName": SimpleNamespace(**{n: n for n in names})
            },
            "fastdeploy.trace.trace_logger": {
                "print": lambda event, request_id, user: note("event", event, request_id, user)
            },
            "fastdeploy.logger": {},
            "fastdeploy.logger.request_logger": {
                "RequestLogLevel": SimpleNamespace(LIFECYCLE=0, STAGES=1),
                "log_request": lambda level, message, **fields: note(
                    "log", level, message.format(**fields)
                ),
            },
            "fastdeploy.utils": {"llm_logger": logger, "spec_logger": logger},
        }


@contextlib.contextmanager
def installed() -> Iterator[FastDeploy]:
    """Lets the stand-ins be what an import of fastdeploy finds."""
    fastdeploy = FastDeploy()
    kept = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "fastdeploy"}
    for name in kept:
        del sys.modules[name]
    for name, content in fastdeploy.modules().items():
        module = ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
    envs = sys.modules["fastdeploy.envs"]
    fastdeploy.envs = envs  # type: ignore[assignment]  # what is set there is seen
    try:
        yield fastdeploy
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "fastdeploy"]:
            del sys.modules[name]
        sys.modules.update(kept)
