"""Objects made in C++ for a whole batch: those of the oracle, and nothing shared between them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from object_oracle import CheckedMaker, at_token, spelled

import tokenpipe as tp
from tokenpipe import _native
from tokenpipe.commands import FinishReason
from tokenpipe.config import PipelineConfig
from tokenpipe.layout import FINAL
from tokenpipe.outputs import Drafts, OutputBatch, _OwnBatch
from tokenpipe.records import STAMPS, LogprobsLists, RequestMetrics

NAMES = [name for name in RequestMetrics.__slots__ if name != "speculate_metrics"]
POOLING, GAP = 8, 64  # TP_STEP_POOLING, TP_STEP_GAP
TARGET = 3

int32s = st.integers(-(2**31), 2**31 - 1)
uint32s = st.integers(0, 2**32 - 1)
float32s = st.floats(width=32)
stamps = st.one_of(st.none(), st.just(0), st.just(0.0), st.integers(1, 2**40), st.floats(1, 2e9))
metrics_of = st.builds(
    lambda values: RequestMetrics(**dict(zip(NAMES, values, strict=True))),
    st.lists(stamps, min_size=len(NAMES), max_size=len(NAMES)),
)
pieces = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.builds(lambda a, b, c: LogprobsLists([[a]], [[b]], [c]), int32s, float32s, int32s),
    ),
    max_size=2,
)


@st.composite
def requests(draw: st.DrawFn) -> tp.Request:
    made = tp.Request(
        draw(st.text(max_size=5)),
        prompt_token_ids=[1] * draw(st.integers(0, 300)),
        num_emitted_tokens=draw(st.sampled_from([0, 0, 7])),
        prompt=draw(st.sampled_from([None, "text", [{"role": "user"}]])),
        num_cached_tokens=draw(st.integers(0, 2**40)),
        multimodal_inputs=draw(
            st.sampled_from(
                [None, {}, {"num_input_image_tokens": 3}, {"num_input_video_tokens": 4}]
            )
        ),
        ic_req_data=draw(st.sampled_from([None, "data"])),
        trace_carrier=draw(st.sampled_from([None, {"root_span": "7"}])),
        metrics=draw(metrics_of),
    )
    made._prompt_pieces = draw(pieces)
    return made


def ragged(draw: st.DrawFn, n: int, most: int) -> np.ndarray[Any, Any]:
    counts = draw(st.lists(st.integers(0, most), min_size=n, max_size=n))
    return np.cumsum([0, *counts]).astype(np.uint32)


def column(draw: st.DrawFn, of: st.SearchStrategy[Any], n: int, dtype: Any) -> Any:
    return np.array(draw(st.lists(of, min_size=n, max_size=n)), dtype)


def own_batch(draw: st.DrawFn, held: list[tp.Request], make: Any, pooling: bool) -> OutputBatch:
    """A batch of any content that the columns can have."""
    n = len(held)
    offsets = np.zeros(n + 1, np.uint32) if pooling else ragged(draw, n, 3)
    m, width = int(offsets[-1]), draw(st.integers(0, 4))
    shown = 0 if pooling else width
    reasons = column(draw, st.sampled_from([0, 0, *range(1, 7)]), n, np.uint8)
    ended = reasons.nonzero()[0]
    finals = np.zeros(len(ended), FINAL)
    finals["index"] = ended
    finals["spec_steps"] = column(draw, st.integers(0, 9), len(ended), np.uint32)
    finals["heads"][:, 0] = finals["spec_steps"]
    has_drafts = draw(st.booleans())
    drafts = ragged(draw, n, 2) if has_drafts else np.zeros(0, np.uint32)
    num_drafts = int(drafts[-1]) if has_drafts else 0
    saved = draw(st.sampled_from([0, 10**15 + 1]))
    if num_drafts:  # only a prefill's first token, which ends its request here, has drafts
        drafts[1:] = np.cumsum(np.where(reasons == FinishReason.STOP, np.diff(drafts), 0))
        num_drafts = int(drafts[-1])
    return _OwnBatch(
        lambda i: held[i],
        number=0,
        step=0,
        source_sequence=0,
        saved_ns=saved,
        published_ns=0,
        committed_ns=10**15 + 7,
        decoder=0,
        num_rows=n,
        num_tokens=m,
        width=width,
        num_finals=len(ended),
        num_drafts=num_drafts,
        num_firsts=0,
        message_flag=TARGET,
        has_slot=draw(st.booleans()),
        flags=(POOLING if pooling else 0) | draw(st.sampled_from([0, GAP])),
        drafts=None,
        _make=make,
        row=column(draw, uint32s, n, np.uint32),
        generation=np.ones(n, np.uint32),
        send_idx=column(draw, st.one_of(st.integers(0, 2), uint32s), n, np.uint32),
        token_offsets=offsets,
        finish_reason=reasons,
        first_token_ns=column(draw, st.sampled_from([0, 1, 10**15, 2**64 - 1]), n, np.uint64),
        token_ids=column(draw, int32s, m, np.int32),
        topk_ids=column(draw, int32s, m * shown, np.int32).reshape(m, shown),
        topk_logprobs=column(draw, float32s, m * shown, np.float32).reshape(m, shown),
        ranks=column(draw, int32s, m if shown else 0, np.int32),
        vectors=column(draw, float32s, n * width if pooling else 0, np.float32).reshape(
            (n, width) if pooling else (0, 0)
        ),
        draft_offsets=drafts if num_drafts else np.zeros(0, np.uint32),
        draft_token_ids=column(draw, int32s, num_drafts, np.int32),
        finals=finals,
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[OutputBatch, CheckedMaker]:
    spec = {"speculative_method": "mtp", "num_speculative_tokens": 2, "max_draft_tokens": 3}
    config = PipelineConfig(
        role=draw(st.sampled_from(["mixed", "decode", "prefill"])),
        **draw(st.sampled_from([{}, spec])),
    )
    maker = CheckedMaker(config, draw(st.sampled_from([0, 10**18 + 3, -5])))
    held = draw(st.lists(requests(), min_size=1, max_size=4))
    pooling = draw(st.integers(0, 4)) == 0
    batch = own_batch(draw, held, maker.make, pooling)
    if not pooling and draw(st.booleans()):
        others = own_batch(draw, draw(st.lists(requests(), min_size=1, max_size=3)), None, False)
        if others.width:
            at = st.integers(-1, len(others) - 1)
            batch.drafts = Drafts(others, column(draw, at, len(batch), np.int64))
    return batch, maker


def mutable_parts(value: Any) -> Iterator[Any]:
    """Every list, tuple and record below a value."""
    if isinstance(value, (list, tuple)):
        yield value
        for item in value:
            yield from mutable_parts(item)
    elif hasattr(value, "__slots__"):
        yield value
        for name in value.__slots__:
            yield from mutable_parts(getattr(value, name))


@settings(deadline=None)
@given(batches())
def test_objects_are_the_oracle_s(case: tuple[OutputBatch, CheckedMaker]) -> None:
    batch, _ = case  # whose make() compares
    held = batch.requests
    pending = [bool(r._prompt_pieces) for r in held]
    outputs = batch.objects()
    assert len(outputs) == len(batch)
    for had, request, output in zip(pending, held, outputs, strict=True):
        if isinstance(output, tp.RequestOutput):
            assert (output.prompt_logprobs is not None) == had
            assert not request._prompt_pieces, "they come once"


@settings(deadline=None)
@given(batches())
def test_no_two_objects_share_what_can_be_changed(case: tuple[OutputBatch, CheckedMaker]) -> None:
    batch, _ = case
    for request in batch.requests:  # the caller's own values are handed on as they are
        request.prompt = request.trace_carrier = None
    outputs = [*batch.objects(), *batch.objects()]
    parts = [part for part in mutable_parts(outputs) if part != ()]
    assert len({id(part) for part in parts}) == len(parts)


@settings(deadline=None)
@given(metrics_of, st.floats(0, 2e9), st.one_of(st.none(), st.floats(0, 2e9)))
def test_stamps_are_the_oracle_s(metrics: RequestMetrics, now: float, first: float | None) -> None:
    before = spelled(metrics)
    assert spelled(metrics.at_token(now, first)) == spelled(at_token(metrics, now, first))
    assert spelled(metrics) == before


def test_stamps_are_of_metrics_with_all_their_fields() -> None:
    for other in (None, object(), type("Open", (RequestMetrics,), {})()):
        with pytest.raises(TypeError, match="must be a"):
            STAMPS.at_token(other, 1.0, None)  # type: ignore[type-var]
    metrics = RequestMetrics()
    del metrics.arrival_time
    with pytest.raises(AttributeError, match="arrival_time"):
        metrics.at_token(1.0, None)
    for cls in (Exception, list, type("Open", (RequestMetrics,), {})):
        with pytest.raises(TypeError, match="more than __slots__"):
            _native.Stamps(cls)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("row", np.zeros(1, np.int64)),
        ("token_ids", np.zeros(4, np.int32)[::2]),
        ("send_idx", np.zeros(3, np.uint32)),
        ("token_offsets", np.array([0, 2, 3], np.uint32)),
        ("token_offsets", np.array([0, 2, 1], np.uint32)),
        ("token_offsets", np.array([0, 1], np.uint32)),
        ("topk_logprobs", np.zeros((2, 2), np.float32)),
        ("ranks", np.zeros(1, np.int32)),
    ],
)
def test_columns_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    maker = CheckedMaker(PipelineConfig(), 0)
    batch = a_batch([tp.Request("a"), tp.Request("b")], maker)
    assert len(batch.objects()) == 2
    setattr(batch, name, value)
    with pytest.raises((TypeError, ValueError, IndexError)):
        super(CheckedMaker, maker).make(batch)


def a_batch(held: list[tp.Request], maker: CheckedMaker, width: int = 3) -> OutputBatch:
    """A step of one token a row."""
    n = len(held)
    return _OwnBatch(
        lambda i: held[i],
        **dict.fromkeys(("number", "step", "source_sequence", "published_ns", "decoder"), 0),
        **dict.fromkeys(("num_finals", "num_drafts", "num_firsts", "flags"), 0),
        saved_ns=5,
        committed_ns=6,
        num_rows=n,
        num_tokens=n,
        width=width,
        message_flag=TARGET,
        has_slot=True,
        drafts=None,
        _make=maker.make,
        row=np.arange(n, dtype=np.uint32),
        generation=np.ones(n, np.uint32),
        send_idx=np.zeros(n, np.uint32),
        token_offsets=np.arange(n + 1, dtype=np.uint32),
        finish_reason=np.zeros(n, np.uint8),
        first_token_ns=np.full(n, 5, np.uint64),
        token_ids=np.arange(1000, 1000 + n, dtype=np.int32),
        topk_ids=np.arange(1000, 1000 + n * width, dtype=np.int32).reshape(n, width),
        topk_logprobs=-np.arange(n * width, dtype=np.float32).reshape(n, width) / 7,
        ranks=np.arange(1000, 1000 + n, dtype=np.int32),
    )


def test_an_output_that_goes_on_is_not_looked_through_by_the_collector() -> None:
    (output,) = a_batch([tp.Request("a", prompt="text")], CheckedMaker(PipelineConfig(), 0))
    assert isinstance(output, tp.RequestOutput)
    completion = output.outputs
    assert completion.top_logprobs is not None
    parts = [output, completion, output.metrics, output.prompt_token_ids, completion.token_ids]
    parts += [completion.draft_token_ids, completion.top_logprobs, *completion.top_logprobs]
    assert [gc.is_tracked(part) for part in parts] == [False] * len(parts)


@pytest.mark.parametrize("field", ["prompt", "ic_req_data"])
def test_what_the_caller_gave_may_refer_back_to_its_output(field: str) -> None:
    given: list[Any] = []
    request = tp.Request("a")
    setattr(request, field, given)
    (output,) = a_batch([request], CheckedMaker(PipelineConfig(), 0))
    assert gc.is_tracked(output)


def test_a_last_output_is_looked_through() -> None:
    """Its trace_carrier is the caller's."""
    batch = a_batch([tp.Request("a"), tp.Request("b")], CheckedMaker(PipelineConfig(), 0))
    batch.finish_reason[1] = FinishReason.STOP
    batch.num_finals, batch.finals = 1, np.zeros(1, FINAL)
    batch.finals["index"] = 1
    assert [gc.is_tracked(output) for output in batch] == [False, True]


@pytest.mark.parametrize("fails", [False, True])
def test_objects_are_freed_with_everything_in_them(fails: bool) -> None:
    """Nothing is held, and nothing let go of that is somebody else's, also where a batch is
    refused at its last row."""
    maker = CheckedMaker(PipelineConfig(), 0)
    values = [object() for _ in range(6)]
    held = [
        tp.Request(
            f"request {i}",
            prompt=values[0],
            ic_req_data=values[1],
            multimodal_inputs={
                "num_input_image_tokens": values[2],
                "num_input_video_tokens": values[3],
            },
            metrics=RequestMetrics(preempted_count=values[4], arrival_time=1.5),  # type: ignore[arg-type]
        )
        for i in range(30)
    ]
    batch = a_batch(held, maker)
    if fails:
        batch.token_offsets = np.array([*range(30), 99], np.uint32)
    values += [r.request_id for r in held] + [r.metrics for r in held] + [True, 200, LogprobsLists]

    def make() -> None:
        try:
            super(CheckedMaker, maker).make(batch)
        except IndexError:
            assert fails

    def state() -> list[int]:
        return [sys.getrefcount(value) for value in values]

    for _ in range(200):  # also fills what Python keeps for the next objects
        make()
    refs, none, blocks = state(), sys.getrefcount(None), sys.getallocatedblocks()
    for _ in range(200):
        make()
    assert state() == refs
    assert abs(sys.getrefcount(None) - none) < 100
    assert sys.getallocatedblocks() - blocks < 100, "some of 200 batches' objects"
