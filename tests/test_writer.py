"""EngineWriter: what is saved arrives value for value; what is wrong is refused and not saved."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from steps import read_step

import tokenpipe as tp
from support import wait_until
from tokenpipe import _native, layout
from tokenpipe import writer as writer_module
from tokenpipe.commands import Control
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import ExitCode
from tokenpipe.segment import (
    LOCK_CLIENT,
    LOCK_DECODER,
    LOCK_READER,
    LOCK_WRITER,
    Segment,
    sweep,
)

Array = np.ndarray[Any, Any]

ROWS, TOP, SLOTS, DEPTH, FLOATS = 8, 4, 4, 3, 6
INT32 = 2**31 - 1
ACCEPT, POSITIONS, NOT_NEED_STOP, POOLING, PROMPT = 1, 2, 4, 8, 16
WAIT_SPACE = 2
WATCHDOG_S = 30

in_one_segment = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Stage:
    """A segment without roles: what was saved is read through numpy, steps are taken on demand."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.plan = segment.config.plan()
        self.book = _native.Book(segment.core, segment.source)
        self.engine = tp.EngineWriter.attach(segment.name)

    @property
    def head(self) -> Any:
        return np.frombuffer(self.segment.source_memory, layout.SOURCE, 1)[0]

    @property
    def published(self) -> int:
        return int(self.head["published"])

    def step(self, number: int = -1) -> dict[str, Any]:
        """A step, the last one unless told: its head's fields and its columns."""
        return read_step(self.segment, self.published - 1 if number < 0 else number)

    def take_all(self) -> None:
        """Does what reader and decoder do, so that the source ring is empty again."""
        producer = _native.Producer(self.segment.core, 0.0)
        reader = _native.SourceReader(self.segment.source, self.segment.core, 0.0)
        decoder = _native.Decoder(self.segment.core, 0, 0.0)
        while reader.next < self.published:
            assert producer.claim(0.0)
            assert reader.get_output(producer, 0.0)
            producer.publish()
            reader.release()
            decoder.run(1, 0.0)

    def save(self, tokens: Any, **more: Any) -> dict[str, Any]:
        self.take_all()
        self.engine.save_output(tokens, **more)
        return self.step()

    def save_topk(self, tokens: Any, ids: Any, logprobs: Any, ranks: Any) -> dict[str, Any]:
        self.take_all()
        stamps = np.ones(len(ranks), np.int32)
        self.engine.save_output_topk(tokens, ids, logprobs, ranks, generations=stamps)
        return self.step()


@pytest.fixture
def stage(unique_name: str) -> Iterator[Stage]:
    config = PipelineConfig(
        name=unique_name,
        max_num_seqs=ROWS,
        top_logprobs=TOP - 1,
        num_decoders=1,
        ring_slots=2,
        source_slots=SLOTS,
        max_draft_tokens=DEPTH,
        max_pooling_floats=FLOATS,
    )
    with Segment.create(config) as segment:
        made = Stage(segment)
        with made.engine:
            yield made


class OnlyDlpack:
    """A tensor that numpy's own protocols do not reach, as another framework's is."""

    def __init__(self, array: Array, device: tuple[int, int] | None = None) -> None:
        self._array, self._device = array, device

    def __dlpack__(self, **_: object) -> Any:
        return self._array.__dlpack__()


def strided(array: Array, how: str) -> Array:
    """The same values with other strides."""
    if how == "every second":
        wide = np.repeat(array, 2, axis=-1)
        return wide[..., ::2]
    if how == "backwards":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    if how == "transposed":
        return np.asfortranarray(array)
    if how == "read-only":
        made = array.copy()
        made.flags.writeable = False
        return made
    if how == "inside":
        padded = np.zeros([n + 2 for n in array.shape], array.dtype)
        inner = padded[tuple(slice(1, n + 1) for n in array.shape)]
        inner[...] = array
        return inner
    assert how == "contiguous"
    return np.ascontiguousarray(array)


STRIDES = ("contiguous", "every second", "backwards", "transposed", "read-only", "inside")
IDS = st.integers(0, INT32)
INT_DTYPES = (np.int32, np.int64, np.uint32, np.uint64)
FLOAT_DTYPES = (np.float32, np.float16)


# --- what is saved arrives


@in_one_segment
@given(st.data())
def test_tokens_of_any_integer_dtype_and_stride_arrive(stage: Stage, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, ROWS))
    dtype, how = data.draw(st.sampled_from(INT_DTYPES)), data.draw(st.sampled_from(STRIDES))
    tokens = data.draw(hnp.arrays(dtype, n, elements=IDS))
    stamps = data.draw(hnp.arrays(np.int32, n, elements=st.integers(1, INT32)))
    step = stage.save(strided(tokens, how), generations=strided(stamps, how))
    assert step["tokens"].tolist() == tokens.tolist()
    assert step["generations"].tolist() == stamps.tolist()
    assert step["rows"].tolist() == list(range(n))
    assert step["states"].tolist() == [0] * n
    assert (step["num_rows"], step["num_tokens"], step["width"]) == (n, n, 0)
    assert step["flags"] == NOT_NEED_STOP
    assert (step["bad"], step["message_flag"]) == (0, 3)


@in_one_segment
@given(st.data())
def test_candidates_of_any_dtype_and_stride_arrive(stage: Stage, data: st.DataObject) -> None:
    n, width = data.draw(st.integers(1, ROWS)), data.draw(st.integers(1, TOP))
    int_dtype = st.sampled_from(INT_DTYPES)
    float_dtype = data.draw(st.sampled_from(FLOAT_DTYPES))
    how = [data.draw(st.sampled_from(STRIDES)) for _ in range(4)]
    tokens = data.draw(hnp.arrays(data.draw(int_dtype), n, elements=IDS))
    ids = data.draw(hnp.arrays(data.draw(int_dtype), (n, width), elements=IDS))
    logprobs = data.draw(hnp.arrays(float_dtype, (n, width)))  # any bits: NaN, -inf, subnormal
    ranks = data.draw(hnp.arrays(data.draw(int_dtype), n, elements=IDS))
    step = stage.save_topk(
        strided(tokens, how[0]),
        strided(ids, how[1]),
        strided(logprobs, how[2]),
        strided(ranks, how[3]),
    )
    assert step["tokens"].tolist() == tokens.tolist()
    assert step["topk_ids"].tolist() == ids.tolist()
    np.testing.assert_array_equal(step["logprobs"], logprobs.astype(np.float32))
    if float_dtype is np.float32:
        assert step["logprobs"].tobytes() == logprobs.tobytes(), "bit for bit"
    assert step["ranks"].tolist() == ranks.tolist()
    assert (step["width"], step["num_tokens"]) == (width, n)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_one_value_outside_int32_is_seen_wherever_it_stands(stage: Stage, dtype: Any) -> None:
    """The copy of a whole column looks at several values at once."""
    info = np.iinfo(dtype)
    inside = [v for v in (-(2**31), -1, 0, 7, 2**31 - 1) if v >= info.min]
    beside = {-(2**63), -(2**32), -(2**31) - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1}
    ids = np.resize(np.array(inside, dtype), (ROWS, TOP))
    tokens, logprobs = np.ones(ROWS, np.int64), np.zeros((ROWS, TOP), np.float32)
    assert stage.save_topk(tokens, ids, logprobs, tokens)["topk_ids"].tolist() == ids.tolist()
    for value in sorted(v for v in beside if info.min <= v <= info.max):
        for place in range(ids.size):
            wrong = ids.copy()
            wrong.flat[place] = value
            with pytest.raises(tp.OpArgumentError, match=f"topk_ids holds {value},"):
                stage.save_topk(tokens, wrong, logprobs, tokens)


@in_one_segment
@given(st.data())
def test_a_tensor_with_dlpack_alone_arrives(stage: Stage, data: st.DataObject) -> None:
    n, width = data.draw(st.integers(1, ROWS)), data.draw(st.integers(1, TOP))
    how = data.draw(st.sampled_from([h for h in STRIDES if h != "read-only"]))
    tokens = data.draw(hnp.arrays(np.int64, n, elements=IDS))
    ids = data.draw(hnp.arrays(np.int32, (n, width), elements=IDS))
    logprobs = data.draw(hnp.arrays(data.draw(st.sampled_from(FLOAT_DTYPES)), (n, width)))
    step = stage.save_topk(
        OnlyDlpack(strided(tokens, how)),
        OnlyDlpack(strided(ids, how)),
        OnlyDlpack(strided(logprobs, how)),
        np.arange(n),
    )
    assert step["tokens"].tolist() == tokens.tolist()
    assert step["topk_ids"].tolist() == ids.tolist()
    np.testing.assert_array_equal(step["logprobs"], logprobs.astype(np.float32))


@in_one_segment
@given(st.data())
def test_rows_states_and_positions_arrive(stage: Stage, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, ROWS))
    rows = np.array(data.draw(st.permutations(range(ROWS))))[:n]
    states = data.draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 3)))
    positions = data.draw(hnp.arrays(np.int64, n, elements=st.integers(-1, INT32)))
    stamps = data.draw(hnp.arrays(np.int32, n, elements=st.integers(0, 9)))
    tokens = np.where((stamps == 0) | (states != 0), -3, 5)  # no token is looked at there
    more = data.draw(st.booleans())
    step = stage.save(
        tokens,
        step=stage.engine.begin_step(stamps, rows),
        states=states.astype(data.draw(st.sampled_from([np.uint8, np.int32, np.int64]))),
        positions=positions,
        not_need_stop=more,
    )
    assert step["rows"].tolist() == rows.tolist()
    assert step["generations"].tolist() == stamps.tolist()
    assert step["states"].tolist() == states.tolist()
    assert step["positions"].tolist() == positions.tolist()
    assert step["tokens"].tolist() == tokens.tolist()
    assert step["flags"] == POSITIONS + NOT_NEED_STOP * more


def test_every_half_arrives_as_the_float_that_it_is(stage: Stage) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for begin in range(0, 2**16, ROWS * TOP):
        block = halves[begin : begin + ROWS * TOP].reshape(ROWS, TOP)
        ids = np.zeros((ROWS, TOP), np.int32)
        saved = stage.save_topk(ids[:, 0], ids, block, ids[:, 0])["logprobs"]
        np.testing.assert_array_equal(saved, block.astype(np.float32))
        assert (np.signbit(saved) == np.signbit(block)).all()


def test_steps_are_numbered_stamped_and_added_up(stage: Stage) -> None:
    last = 0
    for number in range(2 * SLOTS):
        states = np.array([0, 1, 0, 3], np.uint8)
        step = stage.save(np.arange(4), generations=np.ones(4, int), states=states)
        assert step["source_sequence"] == number
        assert step["saved_tokens"] == 2 * (number + 1), "rows without a token do not count"
        assert last < step["saved_ns"] <= _native.now_ns()
        last = step["saved_ns"]
        assert stage.engine.num_steps == stage.published == number + 1
    assert _native.saved_tokens(stage.segment.source) == 4 * SLOTS


def test_a_step_keeps_the_generations_of_its_moment(stage: Stage) -> None:
    book = np.array([3, 5])
    step = stage.engine.begin_step(book)
    book[:] = 9  # the scheduler goes on before the step is saved
    assert stage.save(np.array([1, 2]), step=step)["generations"].tolist() == [3, 5]


def test_the_next_writer_goes_on_where_the_last_one_stopped(stage: Stage) -> None:
    stage.save(np.array([1, 2]), generations=np.ones(2, int))
    stage.engine.close()
    with tp.EngineWriter.attach(stage.segment.name) as successor:
        successor.save_output(np.array([3]), generations=np.ones(1, int))
        step = stage.step()
        assert (successor.num_steps, step["source_sequence"], step["saved_tokens"]) == (2, 1, 3)
        assert int(stage.head["writer_epoch"]) == 2


@pytest.mark.parametrize("how", ["contiguous", "transposed", "every second"])
def test_torch_tensors_arrive(stage: Stage, how: str) -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(ROWS * TOP).reshape(ROWS, TOP) + 7
    ids = torch.from_numpy(array.copy())
    if how == "transposed":
        ids = ids.T.contiguous().T
    elif how == "every second":
        ids = ids.repeat_interleave(2, 1)[:, ::2]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logprobs = (-ids / 3).to(dtype)
        step = stage.save_topk(ids[:, 0], ids, logprobs, ids[:, 1].to(torch.int32))
        assert step["tokens"].tolist() == array[:, 0].tolist()
        assert step["topk_ids"].tolist() == array.tolist()
        assert step["logprobs"].tolist() == logprobs.to(torch.float32).tolist()
        assert step["ranks"].tolist() == array[:, 1].tolist()


def test_paddle_tensors_arrive(stage: Stage) -> None:
    paddle = pytest.importorskip("paddle")
    array = np.arange(ROWS * TOP).reshape(ROWS, TOP) + 7
    ids = paddle.to_tensor(array, place=paddle.CPUPlace())
    for dtype in ("float32", "float16", "bfloat16"):
        logprobs = (-ids.astype("float32") / 3).astype(dtype)
        step = stage.save_topk(ids[:, 0], ids, logprobs, ids[:, 1].astype("int32"))
        assert step["tokens"].tolist() == array[:, 0].tolist()
        assert step["topk_ids"].tolist() == array.tolist()
        assert step["logprobs"].tolist() == logprobs.astype("float32").numpy().tolist()
        assert step["ranks"].tolist() == array[:, 1].tolist()


@in_one_segment
@given(st.data())
def test_accepted_tokens_arrive_packed_with_their_candidates(
    stage: Stage, data: st.DataObject
) -> None:
    n, depth = data.draw(st.integers(1, ROWS)), data.draw(st.integers(1, DEPTH))
    width, flag = data.draw(st.integers(0, TOP)), data.draw(st.sampled_from([3, 4]))
    how = [data.draw(st.sampled_from(STRIDES)) for _ in range(4)]
    accept = data.draw(hnp.arrays(np.int32, n, elements=st.integers(0, depth)))
    states = data.draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 3)))
    tokens = data.draw(hnp.arrays(data.draw(st.sampled_from(INT_DTYPES)), (n, depth), elements=IDS))
    ids = data.draw(hnp.arrays(np.int64, (n, depth, width), elements=IDS))
    logprobs = data.draw(hnp.arrays(data.draw(st.sampled_from(FLOAT_DTYPES)), (n, depth, width)))
    ranks = data.draw(hnp.arrays(np.int64, (n, depth), elements=IDS))
    stage.take_all()
    before = _native.saved_tokens(stage.segment.source) if stage.published else 0
    common: dict[str, Any] = {"generations": np.ones(n, int), "states": states}
    if width:
        tables = [strided(a, h) for a, h in zip((ids, logprobs, ranks), how[1:], strict=True)]
        given_tokens = strided(tokens, how[0])
        stage.engine.speculate_save_output_topk(
            given_tokens, accept, *tables, message_flag=flag, **common
        )
    else:
        stage.engine.speculate_save_output(strided(tokens, how[0]), accept, **common)
        flag = 3
    step = stage.step()
    counts = np.where(states == 0, accept, 0)
    keep = np.arange(depth) < counts[:, None]
    assert step["accept_num"].tolist() == counts.tolist()
    assert (step["num_tokens"], step["width"]) == (counts.sum(), width)
    assert (step["flags"], step["message_flag"]) == (ACCEPT + NOT_NEED_STOP, flag)
    assert step["tokens"].tolist() == tokens[keep].tolist()
    assert step["topk_ids"].tolist() == ids[keep].tolist()
    np.testing.assert_array_equal(step["logprobs"], logprobs[keep].astype(np.float32))
    assert not width or step["ranks"].tolist() == ranks[keep].tolist()
    assert step["saved_tokens"] - before == (counts.sum() if flag == 3 else 0)


def test_first_tokens_of_a_prefill_step_arrive(stage: Stage) -> None:
    tokens = np.array([[5, 6, 0], [7, 8, 0], [9, 1, 0]])
    stamps: dict[str, Any] = {"generations": np.ones(3, int), "rows": np.array([4, 0, 2])}
    stage.engine.mtp_save_first_token(tokens, np.array([1, 2, 1]), **stamps)
    step = stage.step()
    assert step["accept_num"].tolist() == [2, 0, 2]
    assert step["tokens"].tolist() == [5, 6, 9, 1]
    assert step["rows"].tolist() == [4, 0, 2]
    ids, logs = np.arange(6).reshape(3, 2), np.arange(6, dtype=np.float32).reshape(3, 2) / -3
    stage.engine.mtp_save_first_token_with_topk(
        tokens, np.array([1, 0, 2]), ids, logs, np.array([3, 4, 5]), **stamps
    )
    step = stage.step()
    assert step["accept_num"].tolist() == [2, 0, 3]
    assert step["tokens"].tolist() == [5, 6, 9, 1, 0]
    assert step["topk_ids"].tolist() == [[0, 1], [6, -1], [4, 5], [1, -1], [0, -1]]
    none = [0.0, 0.0]
    assert step["logprobs"].tolist() == [logs[0].tolist(), none, logs[2].tolist(), none, none]
    assert step["ranks"].tolist() == [3, 0, 5, 0, 0]


@in_one_segment
@given(st.data())
def test_vectors_of_any_dtype_and_stride_arrive(stage: Stage, data: st.DataObject) -> None:
    n, floats = data.draw(st.integers(1, ROWS)), data.draw(st.integers(1, FLOATS))
    vectors = data.draw(hnp.arrays(data.draw(st.sampled_from(FLOAT_DTYPES)), (n, floats)))
    states = data.draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 3)))
    rows = np.array(data.draw(st.permutations(range(ROWS))))[:n]
    stage.take_all()
    before = stage.engine._writer.saved_tokens
    stamp = stage.engine.begin_step(np.arange(n) + 1, rows)
    how = data.draw(st.sampled_from(STRIDES))
    stage.engine.save_pooling(strided(vectors, how), step=stamp, states=states)
    step = stage.step()
    np.testing.assert_array_equal(step["logprobs"], vectors.astype(np.float32))
    assert step["rows"].tolist() == rows.tolist()
    assert step["generations"].tolist() == list(range(1, n + 1))
    assert step["states"].tolist() == states.tolist()
    assert (step["num_rows"], step["num_tokens"], step["width"]) == (n, n, floats)
    assert step["flags"] & (POOLING + ACCEPT + PROMPT) == POOLING
    assert step["saved_tokens"] == before, "a vector is no token"


@pytest.mark.parametrize("count", [1, ROWS * DEPTH, ROWS * DEPTH + 5, 3 * ROWS * DEPTH])
def test_prompt_logprobs_arrive_in_as_many_steps_as_they_need(stage: Stage, count: int) -> None:
    tokens, ids = np.arange(count) + 7, np.arange(count * TOP).reshape(count, TOP)
    logprobs = (ids / -3).astype(np.float32)
    most = ROWS * DEPTH
    for at, number in ((n * most, n) for n in range(-(-count // most))):
        if number == 0:
            ranks = np.arange(count)
            stage.engine.save_prompt_logprobs(5, 3, tokens, ids, logprobs, ranks, begin=11)
            assert stage.published == -(-count // most)
        slots = stage.segment.config.source_slots
        assert stage.published <= slots
        step = stage.step(number)
        part = slice(at, min(at + most, count))
        assert (step["rows"].tolist(), step["generations"].tolist()) == ([5], [3])
        assert step["positions"].tolist() == [11 + at]
        assert step["accept_num"].tolist() == [part.stop - at]
        assert step["tokens"].tolist() == tokens[part].tolist()
        assert step["topk_ids"].tolist() == ids[part].tolist()
        assert step["logprobs"].tolist() == logprobs[part].tolist()
        assert step["ranks"].tolist() == ranks[part].tolist()
        assert step["flags"] & PROMPT
        assert step["saved_tokens"] == 0, "a prompt's token is none of the output"


@pytest.mark.parametrize(
    "name",
    [
        *("tokens", "generations", "rows", "states", "positions"),
        *("topk_ids", "ranks", "logprobs"),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_is_an_array(stage: Stage, name: str, kind: Callable[[Any], Any]) -> None:
    call = topk(rows=np.array([3, 1]), states=np.zeros(2, int), positions=np.array([4, 5]))
    stage.engine.save_output_topk(**call)
    wanted = stage.step()
    stage.engine.save_output_topk(**{**call, name: kind(call[name].tolist())})
    found = stage.step()
    assert np.array_equal(found[name], wanted[name])
    assert found["body_bytes"] == wanted["body_bytes"]


def test_a_list_of_vectors_is_an_array(stage: Stage) -> None:
    stage.engine.save_pooling([[0.5, -1.0]], generations=[1])
    assert stage.step()["logprobs"].tolist() == [[0.5, -1.0]]


def test_an_empty_list_is_an_empty_step(stage: Stage) -> None:
    stage.engine.save_output([], step=stage.engine.begin_step([]))
    assert stage.step()["num_rows"] == 0


# --- what is wrong is refused, and nothing of it is saved

ONE = np.ones(2, np.int64)
PAIR = np.ones((2, TOP), np.int64)
LOGS = np.zeros((2, TOP), np.float32)


def plain(**changed: Any) -> dict[str, Any]:
    return {"tokens": ONE, "generations": ONE, **changed}


def topk(**changed: Any) -> dict[str, Any]:
    good = {"tokens": ONE, "topk_ids": PAIR, "logprobs": LOGS, "ranks": ONE, "generations": ONE}
    return {**good, **changed}


def at(index: int, value: int, dtype: Any = np.int64) -> Array:
    array = np.ones(2, dtype)
    array[index] = value
    return array


def in_table(value: int) -> Array:
    table = PAIR.copy()
    table[1, 2] = value
    return table


# name: (argument at fault, the call, what the text must name)
BAD: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "too many rows": (
        "tokens",
        plain(tokens=np.ones(ROWS + 1, int), generations=np.ones(ROWS + 1, int)),
        (f"{ROWS + 1} rows", f"max_num_seqs is {ROWS}"),
    ),
    "no tokens": ("tokens", plain(tokens=None), ("is None",)),
    "tokens of two dimensions": ("tokens", plain(tokens=PAIR), ("int64[2, 4]", "[rows]")),
    "tokens of no dimension": ("tokens", plain(tokens=np.array(1)), ("0 dimensions",)),
    "tokens of four": ("tokens", plain(tokens=np.ones((1, 1, 1, 1), int)), ("4 dimensions",)),
    "float tokens": ("tokens", plain(tokens=ONE * 1.5), ("float64[2]", "int32 or int64 [2]")),
    "int16 tokens": ("tokens", plain(tokens=ONE.astype(np.int16)), ("int16", "int32 or int64")),
    "bool tokens": ("tokens", plain(tokens=ONE > 0), ("'?'", "int32 or int64")),
    "object tokens": ("tokens", plain(tokens=ONE.astype(object)), ("int32 or int64",)),
    "complex tokens": ("tokens", plain(tokens=ONE * 1j), ("int32 or int64",)),
    "tokens of another byte order": (
        "tokens",
        plain(tokens=ONE.astype(">i8")),
        ("'>", "int32 or int64"),
    ),
    "dates for tokens": (
        "tokens",
        plain(tokens=np.array(["2020", "2021"], "datetime64[D]")),
        ("tokens",),
    ),
    "a list of floats": ("tokens", plain(tokens=[1.5, 2]), ("float64[2]", "int32 or int64")),
    "a list too long": ("states", plain(states=[0, 0, 0]), ("int64[3]", "[2]")),
    "a list of texts": ("tokens", plain(tokens=["1", "2"]), ("tokens", "int32 or int64")),
    "a list of huge numbers": ("tokens", plain(tokens=[1, 2**70]), ("tokens", "int32 or int64")),
    "a dict for tokens": ("tokens", plain(tokens={1: 2}), ("dict", "DLPack")),
    "a number for tokens": ("tokens", plain(tokens=5), ("int", "DLPack")),
    "DLPack of floats": ("tokens", plain(tokens=OnlyDlpack(ONE * 1.5)), ("float64[2]",)),
    "a negative token": (
        "tokens",
        plain(tokens=at(1, -3)),
        ("row 1", "-3", "0 or more", "states="),
    ),
    "a token above int32": ("tokens", plain(tokens=at(1, 2**31)), (str(2**31), "int32")),
    "a token below int32": (
        "tokens",
        plain(tokens=at(0, -(2**31) - 1)),
        (str(-(2**31) - 1), "int32"),
    ),
    "a huge unsigned token": (
        "tokens",
        plain(tokens=at(0, 2**64 - 1, np.uint64)),
        (str(2**64 - 1), "int32"),
    ),
    "generations of another length": (
        "generations",
        plain(generations=np.ones(3, int)),
        ("int64[3]", "[2]"),
    ),
    "no generations": ("step", {"tokens": ONE}, ("begin_step()", "generations=")),
    "float generations": ("generations", plain(generations=ONE * 1.0), ("float64[2]", "int32")),
    "a negative generation": (
        "generations",
        plain(generations=at(1, -1)),
        ("[1]", "-1", "0 (padded)"),
    ),
    "a generation above int32": (
        "generations",
        plain(generations=at(0, 2**32 + 1)),
        (str(2**32 + 1), "int32"),
    ),
    "a row above the last": (
        "rows",
        plain(rows=at(1, ROWS)),
        (f"rows[1] is {ROWS}", f"max_num_seqs - 1 = {ROWS - 1}"),
    ),
    "a negative row": ("rows", plain(rows=at(0, -1)), ("rows[0] is -1", "0 to")),
    "a row above int32": ("rows", plain(rows=at(0, 2**32)), (str(2**32), "int32")),
    "rows of another length": ("rows", plain(rows=np.arange(3)), ("int64[3]", "[2]")),
    "an unknown state": ("states", plain(states=at(1, 4)), ("states[1] is 4", "0 to 3")),
    "a negative state": ("states", plain(states=at(0, -1)), ("states[0] is -1", "0 to 3")),
    "a huge state": ("states", plain(states=at(0, 2**32)), (str(2**32), "0 to 3")),
    "states of another length": (
        "states",
        plain(states=np.zeros(1, np.uint8)),
        ("uint8[1]", "[2]"),
    ),
    "float states": ("states", plain(states=np.zeros(2)), ("float64[2]", "uint8")),
    "a position above int32": ("positions", plain(positions=at(0, 2**31)), (str(2**31), "int32")),
    "positions of another length": (
        "positions",
        plain(positions=np.zeros(3, int)),
        ("int64[3]", "[2]"),
    ),
    "too many candidates": (
        "topk_ids",
        topk(topk_ids=np.ones((2, TOP + 1), int), logprobs=np.zeros((2, TOP + 1), np.float32)),
        (f"{TOP + 1} columns", f"top_logprobs + 1 = {TOP}"),
    ),
    "no candidates": (
        "topk_ids",
        topk(topk_ids=np.ones((2, 0), int), logprobs=np.zeros((2, 0), np.float32)),
        ("0 columns", f"{TOP}"),
    ),
    "flat candidates": ("topk_ids", topk(topk_ids=ONE), ("int64[2]", "2 dimensions")),
    "candidates missing": ("topk_ids", topk(topk_ids=None), ("2 dimensions",)),
    "candidates of other rows": (
        "topk_ids",
        topk(topk_ids=np.ones((3, TOP), int)),
        ("int64[3, 4]", "[2, 4]"),
    ),
    "float candidates": (
        "topk_ids",
        topk(topk_ids=PAIR * 1.0),
        ("float64[2, 4]", "int32 or int64"),
    ),
    "a candidate above int32": ("topk_ids", topk(topk_ids=in_table(2**40)), (str(2**40), "int32")),
    "logprobs missing": ("logprobs", topk(logprobs=None), ("float32",)),
    "double logprobs": (
        "logprobs",
        topk(logprobs=LOGS.astype(np.float64)),
        ("float64[2, 4]", "float32, float16 or bfloat16 [2, 4]"),
    ),
    "whole logprobs": ("logprobs", topk(logprobs=PAIR), ("int64[2, 4]", "float32")),
    "logprobs of fewer columns": (
        "logprobs",
        topk(logprobs=LOGS[:, :2]),
        ("float32[2, 2]", "[2, 4]"),
    ),
    "ranks missing": ("ranks", topk(ranks=None), ("int32",)),
    "ranks of another length": ("ranks", topk(ranks=np.ones(3, int)), ("int64[3]", "[2]")),
    "float ranks": ("ranks", topk(ranks=ONE * 1.0), ("float64[2]", "int32")),
    "a rank above int32": ("ranks", topk(ranks=at(1, 2**33)), (str(2**33), "int32")),
    "fractions of a number": (
        "tokens",
        plain(tokens=np.zeros(3, "i4,i2")["f0"][:2]),
        ("stride", "6 bytes"),
    ),
}


CUBE = np.ones((2, DEPTH, TOP), np.int64)
PAIRS = np.ones((2, DEPTH), np.int64)
PROMPT_TOPK = {"tokens": ONE, "topk_ids": PAIR, "logprobs": LOGS, "ranks": ONE}


def speculative(**changed: Any) -> dict[str, Any]:
    return {
        **{"accept_tokens": PAIRS, "accept_num": ONE, "topk_ids": CUBE, "ranks": PAIRS},
        **{"logprobs": CUBE.astype(np.float32), "generations": ONE, **changed},
    }


def first(**changed: Any) -> dict[str, Any]:
    return {"tokens": PAIRS, "step_idx": ONE, "generations": ONE, **changed}


def first_topk(**changed: Any) -> dict[str, Any]:
    return {
        **{"tokens": PAIRS, "token_num": ONE, "topk_ids": PAIR, "logprobs": LOGS},
        **{"ranks": ONE, "generations": ONE, **changed},
    }


def prompt(**changed: Any) -> dict[str, Any]:
    return {"row": 0, "generation": 1, **PROMPT_TOPK, **changed}


def pooling(**changed: Any) -> dict[str, Any]:
    return {"vectors": LOGS, "generations": ONE, **changed}


def wrong(op: str, argument: str, call: dict[str, Any], *named: str) -> Any:
    about = next(iter(named), "")
    return pytest.param(op, argument, call, named, id=f"{op}: {argument} {about}")


SPECULATE, TOPK, FIRST = (
    "speculate_save_output",
    "speculate_save_output_topk",
    "mtp_save_first_token_with_topk",
)


@pytest.mark.parametrize(
    ("op", "argument", "call", "named"),
    [
        wrong(TOPK, "tokens", speculative(accept_tokens=ONE), "int64[2]", "draft tokens"),
        wrong(
            TOPK,
            "tokens",
            speculative(accept_tokens=np.ones((2, DEPTH + 1), int)),
            f"{DEPTH + 1} columns",
            f"max_draft_tokens is {DEPTH}",
        ),
        wrong(TOPK, "accept_num", speculative(accept_num=at(1, DEPTH + 1)), "accept_num[1] is 4"),
        wrong(TOPK, "accept_num", speculative(accept_num=at(0, -1)), "accept_num[0] is -1"),
        wrong(TOPK, "accept_num", speculative(accept_num=np.ones(3, int)), "int64[3]", "[2]"),
        wrong(TOPK, "topk_ids", speculative(topk_ids=PAIRS), "3 dimensions"),
        wrong(TOPK, "logprobs", speculative(logprobs=CUBE), "int64[2, 3, 4]", "float32"),
        wrong(TOPK, "ranks", speculative(ranks=ONE), "int64[2]", "[2, 3]"),
        wrong(TOPK, "message_flag", speculative(message_flag=5), "5", "3 (target)", "4 (draft)"),
        wrong(TOPK, "tokens", speculative(accept_tokens=-PAIRS), "-1", "0 or more"),
        wrong(
            SPECULATE,
            "accept_num",
            {"accept_tokens": ONE, "accept_num": None, "generations": ONE},
        ),
        wrong(FIRST, "topk_ids", first_topk(topk_ids=PAIR + 0.5), "float64"),
        wrong(FIRST, "topk_ids", first_topk(topk_ids=PAIR[:1]), "[1, 4]"),
        wrong(FIRST, "logprobs", first_topk(logprobs=LOGS.view(np.int32)), "int"),
        wrong(FIRST, "ranks", first_topk(ranks=ONE + 0.5), "float64"),
        wrong(FIRST, "tokens", first_topk(tokens=ONE), "int64[2]"),
        wrong(FIRST, "token_num", first_topk(token_num=np.ones(3, int)), "int64[3]", "[2]"),
        wrong(FIRST, "accept_num", first_topk(token_num=at(0, DEPTH)), f"is {DEPTH + 1}"),
        wrong(FIRST, "topk_ids", first_topk(topk_ids=at(0, 1)), "int64[2]"),
        wrong(FIRST, "tokens", first_topk(tokens=PAIRS * 2**33), str(2**33)),
        wrong("mtp_save_first_token", "tokens", first(tokens=ONE), "int64[2]"),
        wrong("mtp_save_first_token", "step_idx", first(step_idx=np.ones(3, int)), "[2]"),
        wrong("mtp_save_first_token", "step_idx", first(step_idx=None)),
        wrong(
            "save_pooling",
            "vectors",
            pooling(vectors=np.zeros((2, FLOATS + 1), np.float32)),
            f"{FLOATS + 1} floats",
            f"max_pooling_floats is {FLOATS}",
        ),
        wrong(
            "save_pooling",
            "vectors",
            pooling(vectors=np.zeros((ROWS + 1, 2), np.float32)),
            f"{ROWS + 1} rows",
        ),
        wrong("save_pooling", "vectors", pooling(vectors=LOGS[0]), "float32[4]", "[rows, floats]"),
        wrong("save_pooling", "vectors", pooling(vectors=LOGS * np.float64(1)), "float64[2, 4]"),
        wrong("save_pooling", "vectors", pooling(vectors=None)),
        wrong("save_pooling", "generations", pooling(generations=np.ones(3, int)), "int64[3]"),
        wrong("save_pooling", "states", pooling(states=at(0, 7)), "states[0] is 7"),
        wrong("save_pooling", "rows", pooling(rows=at(0, ROWS)), f"rows[0] is {ROWS}"),
        wrong("save_prompt_logprobs", "rows", prompt(row=ROWS), f"rows[0] is {ROWS}"),
        wrong("save_prompt_logprobs", "rows", prompt(row=-1), "rows[0] is -1"),
        wrong("save_prompt_logprobs", "generations", prompt(generation=-1), "-1"),
        wrong("save_prompt_logprobs", "generations", prompt(generation=2**31)),
        wrong("save_prompt_logprobs", "begin", prompt(begin=-1), "begin is -1"),
        wrong("save_prompt_logprobs", "begin", prompt(begin=2**31)),
        wrong(
            "save_prompt_logprobs",
            "tokens",
            prompt(tokens=PAIR[:, :1]),
            "int64[2, 1]",
            "1 dimension",
        ),
        wrong("save_prompt_logprobs", "topk_ids", prompt(topk_ids=ONE), "int64[2]"),
        wrong("save_prompt_logprobs", "topk_ids", prompt(topk_ids=None)),
        wrong("save_prompt_logprobs", "logprobs", prompt(logprobs=PAIR), "int64[2, 4]"),
        wrong("save_prompt_logprobs", "ranks", prompt(ranks=np.ones(3, int)[:1]), "[1]", "[2]"),
        wrong(
            "save_prompt_logprobs",
            "topk_ids",
            prompt(topk_ids=np.ones((2, TOP + 1), int)),
            f"{TOP + 1} columns",
        ),
        wrong("save_output", "tokens", plain(tokens=[[1], [2, 3]])),
    ],
)
def test_a_bad_argument_of_any_op_is_named_and_nothing_is_saved(
    stage: Stage, op: str, argument: str, call: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(tp.OpArgumentError) as caught:
        getattr(stage.engine, op)(**call)
    text = str(caught.value)
    assert caught.value.argument == argument, text
    assert [fact for fact in named if fact not in text] == [], text
    assert stage.published == 0


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named_and_nothing_is_saved(stage: Stage, name: str) -> None:
    argument, call, named = BAD[name]
    before = stage.save(np.array([11, 12]), generations=ONE)
    save: Callable[..., None] = (
        stage.engine.save_output_topk if "topk_ids" in call else stage.engine.save_output
    )
    with pytest.raises(tp.OpArgumentError) as caught:
        save(**call)
    error = caught.value
    assert error.argument == argument
    assert isinstance(error, ValueError)
    text = str(error)
    assert [fact for fact in named if fact not in text] == [], text
    assert stage.published == before["source_sequence"] + 1
    kept = stage.step()
    assert all(np.array_equal(kept[field], before[field]) for field in before)
    after = stage.save(np.array([21, 22]), generations=ONE)
    assert after["tokens"].tolist() == [21, 22]
    assert after["source_sequence"] == before["source_sequence"] + 1
    assert after["saved_tokens"] == before["saved_tokens"] + 2


@pytest.mark.parametrize(
    ("argument", "generations", "rows"),
    [
        ("generations", np.array([1, 2**32 + 1]), None),
        ("generations", [1, 2**31], None),
        ("generations", np.array([1.5, 2]), None),
        ("generations", [1, -1], None),
        ("generations", [[1, 2]], None),
        ("rows", [1, 2], [0]),
        ("rows", [1, 2], np.array([0, 2**32])),
        ("rows", [1, 2], [0, 0.5]),
        ("rows", [1, 1], [3, 3]),
        ("rows", [1, 2, 3], [3, 0, 3]),
    ],
)
def test_a_stamp_is_not_bent_into_another(
    stage: Stage, argument: str, generations: Any, rows: Any
) -> None:
    with pytest.raises(tp.OpArgumentError) as caught:
        stage.engine.begin_step(generations, rows)
    assert caught.value.argument == argument


def test_padded_rows_may_share_a_place(stage: Stage) -> None:
    step = stage.engine.begin_step([0, 7, 0], rows=[1, 1, 1])
    assert stage.save(np.array([4, 5, 6]), step=step)["tokens"].tolist() == [4, 5, 6]


@pytest.mark.parametrize("step", [5, [1, 1], (ONE, None), "step"])
def test_what_is_no_step_is_named(stage: Stage, step: Any) -> None:
    for save in (stage.engine.save_output, stage.engine.save_pooling):
        with pytest.raises(tp.OpArgumentError, match=r"step is .*begin_step\(\)") as caught:
            save(ONE, step=step)
        assert caught.value.argument == "step"
    assert stage.published == 0


def test_a_refused_stamp_does_not_change_what_is_known_of_a_row(stage: Stage) -> None:
    engine, book = stage.engine, stage.book
    book.open_control(0, 1)
    engine.begin_step([1])
    with pytest.raises(tp.OpArgumentError):
        stage.save(ONE[:1], step=engine.begin_step([-1]))
    book.open_control(0, 2)
    assert engine.poll_control() == [tp.ControlEvent(0, 1, "finished")]


def test_a_tensor_on_a_device_that_is_no_gpu_of_ours_is_refused(stage: Stage) -> None:
    class Elsewhere(OnlyDlpack):
        def __dlpack__(self, **_: object) -> Any:
            capsule = super().__dlpack__()
            import ctypes

            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            device = get(capsule, b"dltensor") + 8  # DLTensor.device.device_type
            ctypes.c_int32.from_address(device).value = 4  # kDLOpenCL
            return capsule

    with pytest.raises(tp.OpArgumentError, match=r"tokens lies on DLPack device type 4") as caught:
        stage.save(Elsewhere(np.ones(2, np.int64)), generations=ONE)
    assert caught.value.argument == "tokens"


@pytest.mark.parametrize(
    "tokens", [np.ones((1, 1, 1, 1), int), np.array(1), np.zeros(3, "i4,i2")["f0"], ONE * 1.5, PAIR]
)
def test_a_refused_array_is_let_go(stage: Stage, tokens: Array) -> None:
    before = sys.getrefcount(tokens)
    for _ in range(5):
        with pytest.raises(tp.OpArgumentError):
            stage.save(tokens, generations=ONE)
    assert sys.getrefcount(tokens) == before


def test_a_saved_array_is_let_go(stage: Stage) -> None:
    tokens = np.array([1, 2])
    only = OnlyDlpack(tokens)
    before = sys.getrefcount(tokens)
    for _ in range(5):
        stage.save(tokens, generations=ONE)
        stage.save(only, generations=ONE)
    assert sys.getrefcount(tokens) == before


# --- one writer, and a pipeline that lives


def test_a_second_writer_is_refused_with_the_first_one_s_pid(stage: Stage) -> None:
    with pytest.raises(tp.PartyExistsError, match=f"pid {os.getpid()} is its") as caught:
        tp.EngineWriter.attach(stage.segment.name)
    error = caught.value
    assert (error.name, error.party, error.pid) == (
        stage.segment.name,
        "engine writer",
        os.getpid(),
    )
    assert error.exit_code == ExitCode.NAME_TAKEN
    assert stage.save(ONE, generations=ONE)["tokens"].tolist() == [1, 1], "the first goes on"


def test_a_killed_writer_makes_room_for_the_next(unique_name: str) -> None:
    config = PipelineConfig(name=unique_name, max_num_seqs=2, num_decoders=1, ring_slots=2)
    code = (
        "import sys, tokenpipe as tp; w = tp.EngineWriter.attach(sys.argv[1]); "
        "print('here', flush=True); sys.stdin.read()"
    )
    with Segment.create(config) as segment:
        command = [sys.executable, "-c", code, unique_name]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "here\n"
            with pytest.raises(tp.PartyExistsError) as caught:
                tp.EngineWriter.attach(unique_name)
            assert caught.value.pid == other.pid
            assert segment.is_locked(LOCK_WRITER)
            other.kill()
        with pytest.raises(tp.PartyExistsError, match="it died, and its requests") as caught:
            tp.EngineWriter.attach(unique_name, 0.0)
        assert caught.value.pid == other.pid
        _native.announce_writer(segment.source, 0, 0)  # the coordinator has ended its requests
        tp.EngineWriter.attach(unique_name).close()


def test_a_closed_writer_saves_nothing(stage: Stage) -> None:
    stage.engine.close()
    with tp.EngineWriter.attach(stage.segment.name) as successor:
        with pytest.raises(tp.TokenpipeError):
            stage.engine.save_output(ONE, generations=ONE)
        successor.save_output(ONE * 7, generations=ONE)
        assert stage.step()["tokens"].tolist() == [7, 7]
        assert stage.published == 1


def test_a_writer_of_a_pipeline_that_is_gone_is_told(stage: Stage) -> None:
    stage.book.set_gone()
    with pytest.raises(tp.PipelineGoneError, match="stopped") as caught:
        stage.engine.save_output(ONE, generations=ONE)
    assert caught.value.name == stage.segment.name
    assert stage.published == 0


class Saving:
    """Saves in a thread, since a full ring blocks."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: int(stage.head["writer_bell"]["waiting"]) == WAIT_SPACE)

    def _run(self) -> None:
        try:
            self._stage.engine.save_output(np.array([99]), generations=np.array([1]))
        except Exception as e:
            self.error = e

    @property
    def is_blocked(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive(), "the save still blocks"


def fill(stage: Stage) -> None:
    for number in range(SLOTS):
        stage.engine.save_output(np.array([number]), generations=np.array([1]))


def test_a_save_blocks_while_the_ring_is_full_and_then_goes_on(stage: Stage) -> None:
    fill(stage)
    saving = Saving(stage)
    assert saving.is_blocked
    assert stage.published == SLOTS, "a full ring is not written over"
    stage.take_all()
    saving.end()
    assert saving.error is None
    assert stage.step()["tokens"].tolist() == [99]
    assert (stage.published, stage.engine.num_steps) == (SLOTS + 1, SLOTS + 1)
    assert int(stage.head["blocked_ns"]) > 0, "backpressure is counted"
    assert int(stage.head["writer_bell"]["waiting"]) == 0


def test_a_blocked_save_ends_when_the_pipeline_does(stage: Stage) -> None:
    fill(stage)
    saving = Saving(stage)
    stage.book.set_gone()
    saving.end()
    assert isinstance(saving.error, tp.PipelineGoneError)
    assert stage.published == SLOTS


def test_a_blocked_save_ends_when_the_coordinator_has_died(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_GONE_AFTER_S", 600.0)  # nobody is there to wait for
    fill(stage)
    saving = Saving(stage)
    assert saving.is_blocked, "while the coordinator lives, the ring is only full"
    stage.segment.close()  # its lock goes, and it has said nothing
    saving.end()
    assert isinstance(saving.error, tp.PipelineGoneError)
    assert "coordinator" in saving.error.reason


def test_a_blocked_save_waits_for_those_who_may_go_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles wait for a new coordinator; an owner makes one. When the last of them is gone, it
    ends."""
    monkeypatch.setattr(writer_module, "_GONE_AFTER_S", 600.0)
    looks: list[int] = []
    real = Segment.is_locked
    monkeypatch.setattr(
        Segment, "is_locked", lambda self, byte: looks.append(byte) or real(self, byte)
    )
    others = {
        party: Segment.attach(stage.segment.name)
        for party in (LOCK_READER, LOCK_DECODER, LOCK_CLIENT)
    }
    assert all(other.lock(party) for party, other in others.items())
    stage.book.set_owned(True, 3.0)
    fill(stage)
    saving = Saving(stage)
    for mapping in (stage.segment._core, stage.segment._source):
        mapping.close()  # the coordinator is killed: its files stay
    for party, other in others.items():
        looks.clear()
        wait_until(lambda party=party: looks.count(party) >= 2)
        assert saving.is_blocked
        other.close()
    saving.end()
    assert isinstance(saving.error, tp.PipelineGoneError)
    stage.engine.close()
    sweep(stage.segment.name)  # or a pipeline that starts on this machine has: nothing may stay


def test_beat_tells_that_the_engine_is_busy_until_the_next_save(stage: Stage) -> None:
    stage.engine.beat(busy=True)
    beaten = int(stage.head["beat_ns"])
    assert int(stage.head["busy"]) == 1
    assert 0 < beaten <= _native.now_ns()
    stage.save(ONE, generations=ONE)
    assert int(stage.head["busy"]) == 0
    assert int(stage.head["beat_ns"]) >= beaten


# --- what the scheduler hears


def told(stage: Stage) -> list[tuple[int, int, str]]:
    return [(e.row, e.generation, e.kind) for e in stage.engine.poll_control()]


def test_each_thing_is_told_once(stage: Stage) -> None:
    book = stage.book
    assert told(stage) == []
    book.open_control(2, 1)
    assert told(stage) == [], "an admission is the client's news, not ours"
    book.control(2, 1, Control.ABORT)
    assert told(stage) == [(2, 1, "abort")]
    assert told(stage) == []
    book.control(2, 1, Control.ABORT)
    assert told(stage) == [], "it was told already"
    book.control(2, 1, Control.FINISHED)
    book.open_control(5, 4)
    book.control(5, 4, Control.PREEMPT)
    assert told(stage) == [(2, 1, "finished"), (5, 4, "preempt")]
    assert told(stage) == []


def test_a_second_preemption_of_one_life_is_told_again(stage: Stage) -> None:
    book = stage.book
    book.open_control(2, 7)
    for number in range(3):
        book.preempt(2, 7, number, False)
        assert told(stage) == [(2, 7, "preempt")]
        assert told(stage) == []
        if number == 1:
            book.resume(2, 7, 0)
            assert told(stage) == [], "the scheduler asked for it"
    book.resume(2, 7, 0)
    book.preempt(2, 7, 3, False)
    book.control(2, 7, Control.ABORT)
    assert told(stage) == [(2, 7, "abort"), (2, 7, "preempt")]
    book.preempt(2, 6, 0, False)
    assert told(stage) == [], "of another life"


def test_several_things_of_a_row_are_told_at_once(stage: Stage) -> None:
    stage.book.open_control(0, 3)
    stage.book.control(0, 3, Control.ABORT | Control.FINISHED)
    assert told(stage) == [(0, 3, "abort"), (0, 3, "finished")]


def test_a_decision_about_another_life_of_the_row_is_not_taken_for_this_one(stage: Stage) -> None:
    stage.book.open_control(0, 2)
    stage.book.control(0, 1, Control.ABORT)
    assert told(stage) == []
    stage.book.open_control(0, 1)  # an older life does not come back
    stage.book.control(0, 2, Control.ABORT)
    assert told(stage) == [(0, 2, "abort")]


@pytest.mark.parametrize("stamp", ["begin_step", "generations"])
@pytest.mark.parametrize("polls_first", [False, True])
def test_a_row_admitted_again_before_the_poll_has_still_finished(
    stage: Stage, stamp: str, polls_first: bool
) -> None:
    book, engine = stage.book, stage.engine
    book.open_control(1, 1)
    if stamp == "begin_step":
        step = engine.begin_step([1], [1])
        stage.save(np.array([5]), step=step)
    else:
        stage.save(np.array([5]), generations=np.array([1]), rows=np.array([1]))
    if polls_first:
        assert told(stage) == []
    book.control(1, 1, Control.FINISHED)
    book.open_control(1, 2)
    book.control(1, 2, Control.ABORT)
    assert told(stage) == [(1, 1, "finished"), (1, 2, "abort")]
    assert told(stage) == []


def test_a_life_whose_end_was_told_does_not_end_again(stage: Stage) -> None:
    book = stage.book
    book.open_control(1, 1)
    stage.engine.begin_step([1], [1])
    book.control(1, 1, Control.FINISHED)
    assert told(stage) == [(1, 1, "finished")]
    book.open_control(1, 2)
    assert told(stage) == []
    stage.engine.begin_step([2], [1])
    book.control(1, 2, Control.FINISHED)
    for generation in range(3, 6):  # lives that the scheduler has never run
        book.open_control(1, generation)
    assert told(stage) == [(1, 2, "finished")]


def test_a_step_composed_late_does_not_bring_an_old_life_back(stage: Stage) -> None:
    book, engine = stage.book, stage.engine
    book.open_control(0, 1)
    engine.begin_step([1])
    book.control(0, 1, Control.FINISHED)
    book.open_control(0, 2)
    assert told(stage) == [(0, 1, "finished")]
    engine.begin_step([1])  # the scheduler has not acted on it yet
    book.control(0, 2, Control.FINISHED)
    assert told(stage) == [(0, 2, "finished")]


def test_a_new_writer_hears_what_still_stands(stage: Stage) -> None:
    stage.book.open_control(3, 1)
    stage.book.control(3, 1, Control.ABORT)
    assert told(stage) == [(3, 1, "abort")]
    stage.engine.close()
    with tp.EngineWriter.attach(stage.segment.name) as successor:
        assert successor.poll_control() == [tp.ControlEvent(3, 1, "abort")]
