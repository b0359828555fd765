"""Rows that just go on, made in C++ in one call: what the processor makes one by one."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fastdeploy_standins as fd
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenpipe as tp
from tokenpipe.commands import ACKNOWLEDGED, SILENT, FinishReason
from tokenpipe.fastdeploy import processor as module
from tokenpipe.fastdeploy.conversion import Columns
from tokenpipe.fastdeploy.going_on import GoingOn
from tokenpipe.fastdeploy.processor import TokenProcessor
from tokenpipe.layout import FINAL
from tokenpipe.outputs import OutputBatch, _OwnBatch

ROWS = 6
NOW = 1e9


class Pipe:
    """A pipeline without processes: every row is admitted as its next life."""

    name, health_url = "none", "nowhere"

    def __init__(self, config: tp.PipelineConfig) -> None:
        self.config = config
        self.lives = [0] * config.max_num_seqs
        self.asked: list[tuple[str, str]] = []

    def submit(self, request: tp.Request, row: int, **_how: Any) -> tp.Admission:
        self.lives[row] += 1
        return tp.Admission(request.request_id, row, self.lives[row])

    def abort(self, request_id: str) -> None:
        self.asked.append(("abort", request_id))

    def let_go(self, admission: tp.Admission) -> None:
        self.asked.append(("let go", admission.request_id))

    def drain(self, _timeout_s: float) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""


@dataclasses.dataclass
class DictMetrics(fd.RequestMetrics):
    """Stamps of a class that has a __dict__."""


class SlottedOutput:
    """FastDeploy's output as a class with __slots__."""

    __slots__ = [*vars(fd.RequestOutput("", outputs=None))]

    def __init__(self, **fields: Any) -> None:
        for name, value in vars(fd.RequestOutput(**fields)).items():
            setattr(self, name, value)


class NoisyOutput(fd.RequestOutput):
    """An output with something of its own, of which a copy would not be one."""

    count = 0

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        NoisyOutput.count += 1
        self.number = NoisyOutput.count


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Pipeline", Pipe)
    monkeypatch.setattr(time, "time", lambda: NOW)


class Side:
    """A processor and its engine, driven without a pipeline."""

    def __init__(self, fastdeploy: fd.FastDeploy, role: str, in_one_call: bool) -> None:
        self.fastdeploy = fastdeploy
        self.sink = fd.Scheduler()
        cfg = fd.config(role=role, num_rows=ROWS, logprob=True)
        self.processor = TokenProcessor(cfg, self.sink, fd.Queue(), None)
        if not in_one_call:
            self.processor._going_on._maker = None
        self.manager = fd.ResourceManagerV1(ROWS, fastdeploy.calls, role)
        self.processor.set_resource_manager(self.manager)
        self.decoded: list[int] = []
        logger = SimpleNamespace(on_decode_tokens=self.decoded.append)
        self.processor.set_scheduler_metrics_logger(logger)

    def take(self, task: fd.Request, row: int, before: int) -> None:
        self.manager.give(row, task)
        if before:
            self.processor.tokens_counter[task.request_id] = before

    def told(self) -> Any:
        """All that outputs, tasks, metrics and the manager have come to."""
        metrics = self.fastdeploy.metrics
        known = {n: (m.value, sorted(m.observed)) for n, m in sorted(vars(metrics).items()) if m}
        return (
            [[fields(o) for o in outputs] for outputs in self.sink.put],
            {i: fields(t) for i, t in self.manager.requests.items()},
            dict(self.processor.tokens_counter),
            known,
            sorted(map(str, self.fastdeploy.calls.made)),
            (self.processor.num_unadmitted_rows, self.processor.num_dropped_rows),
            self.decoded,
            self.processor._pipe.asked,
        )


def fields(value: Any) -> Any:
    """A value with everything in it, as plain data that tells types apart."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [fields(item) for item in value]
    if isinstance(value, dict):
        return {name: fields(item) for name, item in value.items()}
    names = [*getattr(value, "__dict__", ())] or [*getattr(type(value), "__slots__", ())]
    if not names:
        return type(value).__name__, value
    return type(value).__name__, {name: fields(getattr(value, name)) for name in names}


def a_batch(rows: list[dict[str, Any]], width: int, kind: int) -> OutputBatch:
    """A step of these rows."""
    n, counts = len(rows), [r["count"] for r in rows]
    m = sum(counts)
    ended = [i for i, r in enumerate(rows) if 0 < r["reason"] < ACKNOWLEDGED]
    finals = np.zeros(len(ended), FINAL)
    finals["index"] = ended
    ids = np.arange(m * width, dtype=np.int32).reshape(m, width)
    return _OwnBatch(
        lambda _i: tp.Request("not asked for"),
        **dict.fromkeys(("number", "step", "source_sequence", "published_ns", "decoder"), 0),
        **dict.fromkeys(("num_drafts", "num_firsts", "flags"), 0),
        saved_ns=5,
        committed_ns=6,
        num_rows=n,
        num_tokens=m,
        num_finals=len(ended),
        finals=finals,
        width=width,
        message_flag=kind,
        has_slot=True,
        drafts=None,
        _make=None,
        row=np.array([r["row"] for r in rows], np.uint32),
        generation=np.array([r["generation"] for r in rows], np.uint32),
        send_idx=np.zeros(n, np.uint32),
        token_offsets=np.cumsum([0, *counts]).astype(np.uint32),
        finish_reason=np.array([r["reason"] for r in rows], np.uint8),
        first_token_ns=np.full(n, 5, np.uint64),
        token_ids=np.arange(300, 300 + m, dtype=np.int32) * 1000,
        topk_ids=ids,
        topk_logprobs=-ids.astype(np.float32) / 7,
        ranks=np.arange(m if width else 0, dtype=np.int32) + 400,
    )


maybe = st.booleans
counts = st.integers(0, 3)
reasons = st.sampled_from([*[0] * 20, *map(int, FinishReason), ACKNOWLEDGED, SILENT])


def tasks() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "before": st.sampled_from([0, 1, 2, 7]),
            "metrics": st.sampled_from([fd.RequestMetrics, DictMetrics]),
            "fields": st.fixed_dictionaries(
                {
                    "prefill_chunk_info": st.sampled_from([*[None] * 5, [3, 3]]),
                    "multimodal_inputs": st.sampled_from(
                        [None, None, {}, {"num_input_image_tokens": 4}]
                    ),
                    "ic_req_data": st.sampled_from([None, "data", {"a": 1}]),
                    "messages": st.sampled_from([None, "hello"]),
                    "num_cached_tokens": st.sampled_from([0, 300]),
                    "need_prefill_tokens": st.sampled_from([None, 3]),
                    "num_computed_tokens": st.sampled_from([0, 3]),
                },
                optional={"last_token_time": st.sampled_from([None, NOW - 0.5, 7])},
            ),
            "mark": st.sampled_from([*[""] * 9, "stopped", "aborted", "over"]),
        }
    )


@st.composite
def steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows = draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS).map(sorted))
    made = []
    for row in rows:
        reason = draw(reasons)
        count = draw(counts) if reason < ACKNOWLEDGED else 0
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            count = max(count, 1)
        generation = draw(st.sampled_from([1, 1, 1, 2]))
        made.append({"row": row, "reason": reason, "count": count, "generation": generation})
    return made


@pytest.mark.parametrize("output", [fd.RequestOutput, SlottedOutput, NoisyOutput])
@given(
    role=st.sampled_from(["mixed", "decode"]),
    held=st.lists(st.one_of(tasks(), st.none()), min_size=ROWS, max_size=ROWS),
    told=st.lists(
        st.tuples(steps(), st.integers(0, 3), st.sampled_from([3, 4])), min_size=1, max_size=3
    ),
)
@settings(max_examples=60, deadline=None)
def test_in_one_call_or_one_by_one_is_the_same(
    output: Any, role: str, held: list[Any], told: list[Any]
) -> None:
    found = []
    for in_one_call in (True, False):
        with pytest.MonkeyPatch.context() as patch, fd.installed() as fastdeploy:
            patch.setattr(sys.modules["fastdeploy.engine.request"], "RequestOutput", output)
            NoisyOutput.count = 0
            side = Side(fastdeploy, role, in_one_call)
            made_at_start = NoisyOutput.count
            for row, about in enumerate(held):
                if about is not None:
                    fill(side, row, copy.deepcopy(about))
            for rows, width, kind in told:
                side.processor._handle(a_batch(rows, width, kind))
            for outputs in side.sink.put:
                for o in outputs:
                    if isinstance(o, NoisyOutput):
                        o.number -= made_at_start
            found.append(side.told())
    assert found[0] == found[1]


def fill(side: Side, row: int, about: dict[str, Any]) -> None:
    task = fd.Request(f"r{row}", **about["fields"])
    stamps = {f.name: getattr(task.metrics, f.name) for f in dataclasses.fields(task.metrics)}
    task.metrics = about["metrics"](**stamps)
    side.take(task, row, about["before"])
    if about["mark"] == "stopped":
        side.manager.stop_flags[row] = True
    elif about["mark"] == "aborted":
        side.manager.abort(task.request_id)
    elif about["mark"] == "over":
        life = side.processor._rows.current[row]
        assert life is not None
        life.is_over = True


@pytest.fixture
def side() -> Iterator[Side]:
    """A row that goes on with a slotted metrics, and one whose class cannot be copied."""
    with fd.installed() as fastdeploy:
        yield Side(fastdeploy, "mixed", True)


def going_on(row: int, count: int = 1) -> dict[str, Any]:
    return {"row": row, "reason": 0, "count": count, "generation": 1}


def made_in_one_call(side: Side, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    processor = side.processor
    return processor._going_on.make(
        Columns(a_batch(rows, 2, 3)),
        processor._rows.current,
        side.manager,
        frozenset(),
        processor.tokens_counter,
        NOW,
        True,
    )


def test_it_is_all_but_special_rows_that_are_made_in_one_call(side: Side) -> None:
    """Else the comparison above would compare Python with itself."""
    for row, before in enumerate([2, 0, 5]):
        side.take(fd.Request(f"r{row}"), row, before)
    outputs, left, broken, *_ = made_in_one_call(side, [going_on(i) for i in range(3)])
    assert [o and o.request_id for o in outputs] == ["r0", None, "r2"]
    assert (left, broken) == ([1], [])


def test_the_second_token_of_a_decode_instance_is_special() -> None:
    with fd.installed() as fastdeploy:
        side = Side(fastdeploy, "decode", True)
        for row in range(2):
            side.take(fd.Request(f"r{row}"), row, 1 + row)
        assert made_in_one_call(side, [going_on(0), going_on(1)])[1] == [0]


def test_such_an_output_is_not_looked_through_by_the_collector(side: Side) -> None:
    side.take(fd.Request("plain"), 0, 2)
    side.take(fd.Request("with data", ic_req_data={}), 1, 2)
    plain, with_data = made_in_one_call(side, [going_on(0), going_on(1)])[0]
    parts = [plain, vars(plain), plain.outputs, plain.metrics, plain.outputs.top_logprobs]
    assert [gc.is_tracked(part) for part in parts] == [False] * len(parts)
    assert gc.is_tracked(with_data)
    plain.ic_req_data = [plain]
    assert gc.is_tracked(vars(plain))


def test_no_two_outputs_share_a_list(side: Side) -> None:
    for row in range(2):
        side.take(fd.Request(f"r{row}"), row, 2)
    a, b = made_in_one_call(side, [going_on(0), going_on(1)])[0]
    for name in ("token_ids", "draft_token_ids"):
        assert getattr(a.outputs, name) is not getattr(b.outputs, name)
    assert a.prompt_token_ids is not b.prompt_token_ids
    assert a.metrics is not side.manager.requests["r0"].metrics


def test_a_row_that_cannot_be_made_costs_no_other_row(side: Side) -> None:
    for row in range(3):
        side.take(fd.Request(f"r{row}"), row, 2)
    side.manager.requests["r1"].output_token_ids = None  # type: ignore[assignment]
    side.processor._handle(a_batch([going_on(i) for i in range(3)], 0, 3))
    (outputs,) = side.sink.put
    assert [(o.request_id, o.error_code) for o in outputs] == [
        ("r0", 200),
        ("r1", 500),
        ("r2", 200),
    ]
    assert side.processor._pipe.asked == [("abort", "r1")]


def test_columns_that_do_not_fit_together_are_refused(side: Side) -> None:
    side.take(fd.Request("r0"), 0, 2)
    batch = a_batch([going_on(0)], 0, 3)
    batch.finish_reason = np.zeros(2, np.uint8)
    with pytest.raises(ValueError, match="different sizes"):
        side.processor._handle(batch)
    batch = a_batch([going_on(0)], 0, 3)
    batch.token_offsets = np.array([0, 9], np.uint32)
    side.processor._handle(batch)
    (outputs,) = side.sink.put
    assert [(o.request_id, o.error_code) for o in outputs] == [("r0", 500)]


def test_a_list_of_tokens_that_has_its_own_ways_is_asked_for_them(side: Side) -> None:
    class Doubling(list[int]):
        def extend(self, tokens: Any) -> None:
            super().extend(2 * token for token in tokens)

    side.take(fd.Request("r0", output_token_ids=Doubling()), 0, 2)
    made_in_one_call(side, [going_on(0, 2)])
    assert side.manager.requests["r0"].output_token_ids == [600_000, 602_000]


def _like_an_output(**own: Any) -> type[Any]:
    """A class as FastDeploy's output, with something of its own."""
    about = {"__init__": fd.RequestOutput.__init__, **own}
    return type("Own", (), about)


def _with_a_count(self: Any, **given: Any) -> None:
    fd.RequestOutput.__init__(self, **given)
    self.count = len(given["outputs"].token_ids)


@dataclasses.dataclass(slots=True)
class CountingCompletion:
    """A completion that counts its tokens."""

    index: int
    send_idx: int
    token_ids: list[int]
    draft_token_ids: list[int]
    logprob: Any = None
    top_logprobs: Any = None
    count: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.token_ids)


OWN_CACHED = property(lambda o: vars(o)["_n"], lambda o, n: vars(o).update(_n=n))


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("RequestOutput", NoisyOutput, "NoisyOutput.number is another one in each output"),
        ("RequestOutput", _like_an_output(__init__=_with_a_count), "Own.count is another one"),
        (
            "RequestOutput",
            _like_an_output(num_cached_tokens=OWN_CACHED),
            "Own.num_cached_tokens is",
        ),
        (
            "RequestOutput",
            _like_an_output(__setattr__=lambda o, n, v: vars(o).update({n: v})),
            "Own has a __setattr__",
        ),
        ("CompletionOutput", CountingCompletion, "CountingCompletion.count is another one"),
    ],
)
def test_a_class_of_another_kind_is_made_one_by_one(
    name: str,
    kind: type[Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fd.installed():
        monkeypatch.setattr(sys.modules["fastdeploy.engine.request"], name, kind)
        caplog.set_level("INFO", "tokenpipe.fastdeploy")
        assert GoingOn(module.Host(), False)._maker is None
    assert f"outputs are made one by one: {why}" in caplog.text
