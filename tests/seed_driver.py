"""Drives FastDeploy's token processor ("the seed") by hand, one message at a time.

The seed and the stand-ins for what it imports from FastDeploy are loaded at run time from the
folder `shared` beside the repository, or from where TOKENPIPE_SHARED says; nothing of them is
copied here. Paddle and zmq are stood in for here: a tensor is a numpy array.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

ENVIRONMENT = "TOKENPIPE_SHARED"
WHY_SKIPPED = f"the seed is not there: no ../shared/seed, and {ENVIRONMENT} names no other place"
_PLACES = ("fastdeploy", "paddle", "zmq", "seed_token_processor", "seed_standins")
_OPS = "get_output get_output_ep get_output_topk speculate_get_output speculate_get_output_topk"
_SPECULATIVE = (
    "draft_acceptance_rate num_accepted_tokens_total num_emitted_tokens_total efficiency "
    "num_draft_tokens_total"
)
_TARGET = 3


@dataclass(frozen=True)
class Settings:
    """What a processor is made for."""

    mode: str = "plain"
    """plain, topk, spec or spec+topk."""
    role: str = "mixed"
    v1: bool = True
    adapter: bool = False
    method: str = "mtp"
    num_speculative_tokens: int = 5
    draft_logprob: bool = False
    num_rows: int = 4
    release_after: int = 0
    """Messages that still come before the scheduler takes back a row that ended (V1)."""

    @property
    def is_speculative(self) -> bool:
        return self.mode.startswith("spec")

    @property
    def has_logprobs(self) -> bool:
        return self.mode.endswith("topk")


@dataclass(frozen=True)
class Asked:
    """A request as both sides are told of it."""

    eos: tuple[int, ...] = (2,)
    prompt_len: int = 3
    prompt: Any = None
    num_cached: int = 0
    media: dict[str, int] | None = None
    ic_req_data: Any = None
    carrier: dict[str, str] | None = None
    chunks: int | None = None
    is_disaggregated: bool = False
    emitted: int = 0
    stamps: dict[str, float] = field(default_factory=dict)


@dataclass
class Fed:
    """What one message led to."""

    built: list[Any] | None
    """What was made of its rows, before postprocess() held or lost any; None: an error."""
    put: list[list[Any]]
    """What put_results() got, a list per call."""


class Recorded:
    """One metric: what was observed, or where it stands."""

    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def inc(self, by: float = 1) -> None:
        self.value += by

    def dec(self, by: float = 1) -> None:
        self.value -= by

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.observed.append(value)


class _Tensor(np.ndarray):
    """As much of a CPU tensor as the seed uses."""

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)


class _NoMessage(BaseException):
    """Leaves the seed's endless loop, whose own handler takes every Exception."""


class Seed:
    """The loaded seed: its module and the stand-ins it sees."""

    def __init__(
        self,
        shared: Path,
        ops: dict[str, Any] | None = None,
        prom: str = "off",
        cheap_repr: bool = True,
    ) -> None:
        """`ops`: what receives, instead of a SeedProcessor's messages; `prom`, `cheap_repr`: how
        real the stand-ins' metrics and debug strings are."""
        text = next(iter(sorted((shared / "seed").glob("*.txt"))))
        self.turn: SeedProcessor | None = None
        with _imports({}) as modules:
            raises = logging.raiseExceptions
            _stand_in("paddle", full=_full, device=SimpleNamespace(set_device=lambda _name: None))
            _stand_in("zmq", PULL=7)
            standins = _load("seed_standins", shared / "bench" / "standins.py")
            standins.install(prom=prom, cheap_repr=cheap_repr)
            logging.raiseExceptions = raises
            every = {**dict.fromkeys(_OPS.split(), self._receive), **(ops or {})}
            standins._mod("fastdeploy.model_executor.ops.gpu", **every)
            self.module = standins.load_seed(str(text))
            self.standins = standins
        self.modules = modules
        self._plain_metrics = self.module.main_process_metrics
        self._carriers: dict[str, Any] = {}
        self.module.tracing.trace_set_proc_propagate_context = self._note_carrier
        self.module.tracing.trace_get_proc_propagate_context = self._carrier_of

    def _note_carrier(self, rid: str, carrier: Any, _start_ns: int = 0) -> None:
        self._carriers[rid] = carrier

    def _carrier_of(self, rid: str) -> Any:
        return self._carriers.get(rid)

    def _receive(self, *tensors: Any) -> None:
        assert self.turn is not None
        self.turn.receive()

    def metrics(self) -> SimpleNamespace:
        """Returns metrics that note what they are told, under the stand-ins' names."""
        names = [n for n in vars(self._plain_metrics) if not n.startswith("_")]
        metrics = SimpleNamespace(**{name: Recorded() for name in names})
        metrics._init_speculative_metrics = _InitSpeculative(metrics)
        return metrics


class _InitSpeculative:
    """Adds the metrics that the seed makes at the first speculative step."""

    def __init__(self, metrics: SimpleNamespace) -> None:
        self._metrics = metrics

    def __call__(self, _method: str, count: int) -> None:
        for name in _SPECULATIVE.split():
            setattr(self._metrics, f"spec_decode_{name}", Recorded())
        heads = [Recorded() for _ in range(count)]
        self._metrics.spec_decode_draft_single_head_acceptance_rate = heads


def find_seed(**how: Any) -> Seed | None:
    """Loads the seed, as Seed() does; None where it is not there."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    for place in (os.environ.get(ENVIRONMENT), beside):
        if place and list((Path(place) / "seed").glob("*.txt")):
            return Seed(Path(place), **how)
    return None


class ResourceManager:
    """The engine's book of rows, as far as the seed looks into it (token-processor.md 1 and 4)."""

    def __init__(self, settings: Settings) -> None:
        n = settings.num_rows
        self.max_num_seqs = n
        self.stop_flags = [True] * n
        self.tasks_list: list[Any] = [None] * n
        self.requests: dict[str, Any] = {}
        self.req_dict: dict[str, int] = {}
        self.to_be_rescheduled_request_id_set: set[str] = set()
        self.to_be_aborted_req_id_set: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self._releases: list[tuple[int, str]] = []
        self._release_after = settings.release_after
        self._drops_preempted = settings.role == "decode"

    def give(self, row: int, request: Any) -> None:
        request.idx = row
        self.tasks_list[row], self.stop_flags[row] = request, False
        self.requests[request.request_id], self.req_dict[request.request_id] = request, row

    def finish_requests_async(self, request_id: str) -> None:
        self.calls.append(("finish", request_id))
        self._releases.append((self._release_after, request_id))
        if not self._release_after:
            self.end_message()

    def end_message(self) -> None:
        """Does the releases whose time has come."""
        due = [request_id for left, request_id in self._releases if left <= 0]
        self._releases = [(left - 1, r) for left, r in self._releases if left > 0]
        for request_id in due:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """Frees the request's row, if it still has it."""
        self.to_be_aborted_req_id_set.discard(request_id)
        self.to_be_rescheduled_request_id_set.discard(request_id)
        request = self.requests.pop(request_id, None)
        row = self.req_dict.pop(request_id, None)
        if row is not None and self.tasks_list[row] is request:
            self.tasks_list[row], self.stop_flags[row] = None, True

    def recycle_abort_task(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))
        self.release(request_id)

    def reschedule_preempt_task(self, request_id: str) -> None:
        self.calls.append(("reschedule", request_id))
        self.to_be_rescheduled_request_id_set.discard(request_id)
        if self._drops_preempted:
            self.release(request_id)

    def cache_output_tokens(self, request: Any) -> None:
        self.calls.append(("cache", request.request_id))

    def _recycle_block_tables(self, request: Any) -> None:
        self.calls.append(("blocks", request.request_id))
        self.requests.pop(request.request_id, None)

    def get_finished_req(self) -> list[tuple[str, str]]:
        return [(request_id, "finished") for request_id in self.requests]

    def total_block_number(self) -> int:
        return 1000

    def available_batch(self) -> int:
        return sum(self.stop_flags)

    def info(self) -> str:
        return ""


class SeedProcessor:
    """One token processor of the seed, with its resource manager and its sink."""

    def __init__(self, seed: Seed, settings: Settings) -> None:
        self.seed, self.settings = seed, settings
        self.manager = ResourceManager(settings)
        self.metrics = seed.metrics()
        self.put: list[list[Any]] = []
        self.first_tokens: list[Any] = []
        self._built: list[Any] | None = None
        self._message: Message | None = None
        methods = seed.standins.SpecMethod
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                method=methods(settings.method) if settings.is_speculative else None,
                num_speculative_tokens=settings.num_speculative_tokens,
                enable_draft_logprob=settings.draft_logprob,
            ),
            model_config=SimpleNamespace(enable_logprob=settings.has_logprobs),
            parallel_config=SimpleNamespace(
                local_data_parallel_id=0,
                data_parallel_size=1,
                enable_expert_parallel=False,
                local_engine_worker_queue_port=0,
            ),
            scheduler_config=SimpleNamespace(splitwise_role=settings.role, name="local"),
            cache_config=SimpleNamespace(enable_prefix_caching=True, enable_output_caching=True),
        )
        with self._turn():
            self.inner = seed.module.TokenProcessor(config, None, None, None)
        self.inner._finalizer.detach()  # it would keep every processor until the end (F33)
        self._bind()

    def _bind(self) -> None:
        inner = self.inner
        inner.cached_generated_tokens = SimpleNamespace(put_results=self.put.append)
        inner.engine_worker_queue = self.manager
        inner.split_connector = SimpleNamespace(
            send_first_token=lambda _info, results: self.first_tokens.extend(results)
        )
        inner.resource_manager = self.manager
        inner.postprocess = self._postprocess

    def _postprocess(self, results: list[Any], mtype: int = _TARGET) -> None:
        self._built = list(results)
        type(self.inner).postprocess(self.inner, results, mtype)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Lets the seed's module globals be this processor's."""
        s, seed = self.settings, self.seed
        module = seed.module
        module.envs = SimpleNamespace(
            FD_USE_GET_SAVE_OUTPUT_V1=False,
            FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT=120,
            ENABLE_V1_KVCACHE_SCHEDULER=int(s.v1),
            ENABLE_V1_KVCACHE_MANAGER=0,
            FD_ENABLE_INTERNAL_ADAPTER=int(s.adapter),
            FD_DEBUG=0,
        )
        module.main_process_metrics = self.metrics
        seed.turn = self
        with _imports(seed.modules):
            yield

    def fork(self) -> SeedProcessor:
        """Returns a processor that goes on from here, without a trace in this one."""
        other = copy.copy(self)
        other.inner = copy.copy(self.inner)
        names = (
            *("tokens_counter", "prefill_result_status", "_batch_result_buffer"),
            *("total_step_per_request", "accept_token_num_per_head_per_request"),
            "accept_token_num_per_head",
        )
        state = {name: getattr(self.inner, name) for name in names}
        memo: dict[int, Any] = {}
        for name, value in copy.deepcopy(state, memo).items():
            setattr(other.inner, name, value)
        other.manager = copy.deepcopy(self.manager, memo)
        other.metrics = copy.deepcopy(self.metrics, memo)
        other.put, other.first_tokens = [], []
        other._bind()
        return other

    def admit(self, row: int, request_id: str, asked: Asked) -> None:
        """Gives the request the row."""
        standins = self.seed.standins
        request = standins.Request(request_id, asked.prompt_len, list(asked.eos), [], time.time())
        request.messages = copy.deepcopy(asked.prompt)
        request.num_cached_tokens = asked.num_cached
        request.multimodal_inputs = asked.media
        request.ic_req_data = asked.ic_req_data
        request.trace_carrier = asked.carrier
        request.metrics = standins.RequestMetrics(**asked.stamps)
        if asked.chunks is not None:
            request.prefill_chunk_info = [1] * asked.chunks
        if asked.is_disaggregated:
            request.disaggregate_info = {"role": self.settings.role}
        if asked.emitted:
            self.inner.tokens_counter[request_id] = asked.emitted
        self.manager.give(row, request)

    def retire(self, request_id: str) -> None:
        """Takes a request away whose end the seed missed."""
        self.manager.release(request_id)
        self.inner.tokens_counter.pop(request_id, None)
        self.inner.total_step_per_request.pop(request_id, None)
        self.inner.accept_token_num_per_head_per_request.pop(request_id, None)

    def accepted(self, request_id: str) -> int:
        """Returns how many accepted tokens the seed has counted for the request."""
        return sum(self.inner.accept_token_num_per_head_per_request.get(request_id, ()))

    def feed(self, message: Message, stopped: set[int] | frozenset[int] = frozenset()) -> Fed:
        """Lets the seed's own loop take one message; the rows in `stopped` have their flag set."""
        flags = self.manager.stop_flags
        free = [row for row in stopped if row < len(flags) and not flags[row]]
        for row in free:
            flags[row] = True
        self._message, self._built, before = message, None, len(self.put)
        with self._turn(), contextlib.suppress(_NoMessage):
            self.inner.process_sampling_results()
        for row in free:
            flags[row] = False
        self.manager.end_message()
        return Fed(self._built, self.put[before:])

    def receive(self) -> None:
        """The receive op: copies the message into the processor's tensors."""
        message, self._message = self._message, None
        if message is None:
            raise _NoMessage
        inner = self.inner
        for at, values in message.tokens:
            inner.output_tokens.reshape(-1)[at : at + values.size] = values.reshape(-1)
        if message.scores is not None:
            inner.output_scores.reshape(-1)[: message.scores.size] = message.scores.reshape(-1)
            inner.output_ranks.reshape(-1)[: message.ranks.size] = message.ranks.reshape(-1)


@dataclass
class Message:
    """The content of a message: pieces of the token tensor by their place, scores and ranks."""

    tokens: list[tuple[int, np.ndarray[Any, Any]]]
    scores: Any = None
    ranks: Any = None


def _full(shape: list[int], fill_value: float, dtype: str) -> _Tensor:
    return np.full(shape, fill_value, dtype).view(_Tensor)


def _stand_in(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _imports(ours: dict[str, ModuleType]) -> Iterator[dict[str, ModuleType]]:
    """Lets the stand-ins be what an import finds; yields those that are there in the end."""
    kept = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in _PLACES}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(ours)
    found: dict[str, ModuleType] = {}
    try:
        yield found
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] in _PLACES]:
            found[name] = sys.modules.pop(name)
        sys.modules.update(kept)
