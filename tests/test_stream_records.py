"""cuda_ops/stream_records.hpp: what the rows of a message become in the steps of the ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import InProcess
from stand_ins import (
    DecoderState,
    LogprobsTensors,
    StreamTransferData,
    Tensor,
    candidates,
    pickled,
    record,
)

import tokenpipe as tp
from tokenpipe import _native
from tokenpipe.layout import STEP

ROWS, TOP, DRAFTS, FLOATS = 8, 4, 3, 6
ACCEPT, POSITIONS, POOLING, PROMPT = 1, 2, 8, 16
EVERY = 4 | 32  # NOT_NEED_STOP, UNSTAMPED
MESSAGE_END = 128
TOKEN, NONE, RECOVERY, ACKNOWLEDGED, REFUSED = 0, 1, 2, 3, 255
BAD_ROWS, BAD_WIDTH, BAD_MESSAGE = 1, 2, 7
COLUMNS = {
    "rows": np.uint32,
    "generations": np.uint32,
    "states": np.uint8,
    "positions": np.int32,
    "accept_num": np.int32,
    "tokens": np.int32,
    "topk_ids": np.int32,
    "logprobs": np.float32,
    "ranks": np.int32,
}


@dataclass
class Step:
    """A slot's header and columns; `flags` without MESSAGE_END and those that every step has."""

    is_end: bool
    flags: int
    message_flag: int
    width: int
    bad: int
    columns: dict[str, list[Any]]

    def __getattr__(self, name: str) -> list[Any]:
        try:
            return self.columns[name]
        except KeyError:
            raise AttributeError(name) from None


class Harness:
    """A pipeline in this process, and what its reader would put into the ring."""

    def __init__(self, **sizes: int) -> None:
        defaults = {
            "max_num_seqs": ROWS,
            "top_logprobs": TOP,
            "max_draft_tokens": DRAFTS,
            "max_pooling_floats": FLOATS,
            "num_decoders": 2,
        }
        self.pipe = InProcess(tp.PipelineConfig(**(defaults | sizes)))  # type: ignore[arg-type]
        self.records = _native.StreamReader(
            self.pipe.segment.source, self.pipe.segment.core, 1 << 24
        )

    def steps(self, message: bytes) -> list[Step]:
        """What the message gives; it must be a good one."""
        refused = self.records.read(message)
        assert refused is None, refused
        return self.taken()

    def refusal(self, things: list[Any]) -> tuple[str, str, list[Step]]:
        """Why the message is refused, and the step that says so."""
        refused = self.records.read(pickled(things))
        assert refused is not None
        return (*refused, self.taken())

    def taken(self) -> list[Step]:
        """Takes every step there is."""
        found = []
        while self.records.has_step:
            assert self.pipe.producer.claim(0.0)
            self.records.fill(self.pipe.producer)
            found.append(self._step_in_hand())
        return found

    def _step_in_hand(self) -> Step:
        plan, memory = self.pipe.config.plan(), self.pipe.segment.core_memory
        place = self.pipe.producer.cursor % self.pipe.config.ring_slots
        begin = plan["slots"] + place * plan["slot_bytes"]
        head = np.frombuffer(memory, STEP, 1, begin)[0]
        n, m, width = (int(head[name]) for name in ("num_rows", "num_tokens", "width"))
        flags = int(head["flags"])
        assert flags & EVERY == EVERY
        at = _native.step_columns(n, m, width, flags)
        assert int(head["body_bytes"]) == at["end"] - STEP.itemsize
        assert int(head["source_sequence"]) == self.pipe.producer.cursor
        assert at["end"] <= plan["slot_bytes"]
        has_tokens = not flags & POOLING
        counts = dict.fromkeys(("rows", "generations", "states"), n)
        counts["positions"] = n if flags & POSITIONS else 0
        counts["accept_num"] = n if flags & ACCEPT else 0
        counts["tokens"] = m * has_tokens
        counts["topk_ids"] = m * width * has_tokens
        counts["logprobs"] = m * width
        counts["ranks"] = m * bool(width) * has_tokens
        columns = {
            name: np.frombuffer(memory, dtype, counts[name], begin + at[name]).tolist()
            for name, dtype in COLUMNS.items()
        }
        is_end = bool(flags & MESSAGE_END)
        flags &= ~(EVERY | MESSAGE_END)
        return Step(is_end, flags, int(head["message_flag"]), width, int(head["bad"]), columns)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    harness = Harness()
    with harness.pipe:
        yield harness


# --- tokens


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("numpy", [1, 2])
def test_a_token_a_row(harness: Harness, protocol: int, numpy: int) -> None:
    (step,) = harness.steps(pickled([record(3, 30), record(0, 7)], protocol, numpy))
    assert (step.flags, step.message_flag, step.width, step.bad) == (0, 3, 0, 0)
    assert (step.rows, step.tokens) == ([3, 0], [30, 7])
    assert step.states == [TOKEN, TOKEN]


def test_negative_tokens_say_what_a_row_has_instead(harness: Harness) -> None:
    codes = [-9, -3, -1, -2, -4]
    (step,) = harness.steps(pickled([record(i, code) for i, code in enumerate([*codes, 8])]))
    assert step.states == [ACKNOWLEDGED, RECOVERY, NONE, NONE, NONE, TOKEN]
    assert step.tokens == [0, 0, 0, 0, 0, 8]


def test_the_last_token_speaks_for_the_row(harness: Harness) -> None:
    (step,) = harness.steps(pickled([record(0, [5, -9]), record(1, [5, 6])]))
    assert (step.flags, step.states) == (ACCEPT, [ACKNOWLEDGED, TOKEN])
    assert (step.accept_num, step.tokens) == ([0, 2], [5, 6])


def test_candidates_of_any_configured_width(harness: Harness) -> None:
    wide = candidates([[5, 4, 3, 2, 1]], [[0.0, -1, -2, -3, -np.inf]], [1])
    idle = record(1, -1, logprobs=candidates([[0] * 5], [[0] * 5], [0]))
    (step,) = harness.steps(pickled([record(2, 5, logprobs=wide), idle]))
    assert (step.width, step.tokens) == (5, [5, 0])
    assert step.topk_ids == [5, 4, 3, 2, 1, *[-1] * 5]
    assert step.logprobs == [0.0, -1, -2, -3, -np.inf, *[0.0] * 5]
    assert step.ranks == [1, 0]


def test_rows_of_another_width_come_in_a_step_of_their_own(harness: Harness) -> None:
    one = candidates([[5]], [[0.5]], [1])
    steps = harness.steps(pickled([record(0, 5, logprobs=one), record(1, -1), record(2, 6)]))
    assert [(s.rows, s.width) for s in steps] == [([0, 1], 1), ([2], 0)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_candidates_come_in_the_samplers_dtype(harness: Harness, dtype: str) -> None:
    values = np.array([[0.5, -2.0]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    array = bits if dtype == "bfloat16" else values.astype(dtype)
    logprobs = LogprobsTensors(
        Tensor(np.array([[3, 2]], np.int32), "int32"),
        Tensor(array, dtype, "gpu:0"),
        np.array([[1]], np.int64),  # plain arrays are as good, and ranks may be a column
    )
    (step,) = harness.steps(pickled([record(0, 3, logprobs=logprobs)]))
    assert (step.logprobs, step.topk_ids, step.ranks) == ([0.5, -2.0], [3, 2], [1])


def test_arrays_in_fortrans_order_are_turned(harness: Harness) -> None:
    ids = np.asfortranarray(np.array([[1, 2], [3, 4]], np.int64))
    logprobs = LogprobsTensors(ids, np.asfortranarray(ids / 2), np.array([1, 1]))
    for protocol in (4, 5):
        body = pickled([record(0, [1, 3], logprobs=logprobs)], protocol)
        (step,) = harness.steps(body)
        assert (step.topk_ids, step.logprobs) == ([1, 2, 3, 4], [0.5, 1, 1.5, 2])


# --- speculation, as newer versions send it


def speculative(row: int, count: int, given: list[int], **fields: Any) -> StreamTransferData:
    array = np.array(given, np.int64)
    return record(
        row,
        given or None,
        accept_tokens=array,
        accept_num=np.array([count], np.int32),
        speculative_decoding=True,
        **({"output_type": 3} | fields),
    )


def test_accepted_tokens(harness: Harness) -> None:
    rows = [speculative(0, 3, [10, 20, 30]), speculative(1, 1, [42]), speculative(2, 0, [])]
    rows += [speculative(3, -9, [7]), speculative(4, -3, []), speculative(5, -1, [])]
    (step,) = harness.steps(pickled(rows))
    assert (step.flags, step.tokens) == (ACCEPT, [10, 20, 30, 42])
    assert step.accept_num == [3, 1, 0, 0, 0, 0]
    assert step.states == [TOKEN, TOKEN, NONE, ACKNOWLEDGED, RECOVERY, NONE]


def test_one_accepted_token_is_a_speculative_step_too(harness: Harness) -> None:
    (step,) = harness.steps(pickled([speculative(0, 1, [4, 0, 0])]))
    assert (step.flags, step.accept_num, step.tokens) == (ACCEPT, [1], [4])


def test_targets_come_before_drafts(harness: Harness) -> None:
    two = candidates([[4, 1], [5, 2]], [[0.0, -1], [-2, -3]], [1, 2])
    one = candidates([[9]], [[0.5]], [1])
    rows = [
        speculative(1, 2, [4, 5], output_type=4, logprobs=two),
        speculative(2, 3, [1, 1, 1], output_type=4, logprobs=one),  # fewer logprobs than tokens
        speculative(3, 2, [1, 1], output_type=4),  # none
        speculative(4, -9, [], output_type=4),
        speculative(1, 2, [4, 5]),
    ]
    target, draft, narrow = harness.steps(pickled(rows))
    assert (target.message_flag, target.rows, target.tokens) == (3, [1], [4, 5])
    assert (draft.message_flag, draft.flags, draft.rows) == (4, ACCEPT, [1])
    assert (draft.topk_ids, draft.ranks) == ([4, 1, 5, 2], [1, 2])
    assert (narrow.rows, narrow.accept_num, narrow.topk_ids) == ([2], [1], [9])
    assert [step.is_end for step in (target, draft, narrow)] == [True, False, False]


# --- pooling and prompts


def test_vectors(harness: Harness) -> None:
    rows = [record(5, pooler_output=np.array(v, np.float16)) for v in ([1, 2], [3, 4])]
    rows.append(record(1, 7, pooler_output=np.ones((1, 6), np.float32)))
    pair, wide = harness.steps(pickled(rows))
    assert (pair.flags, pair.width, pair.logprobs) == (POOLING, 2, [1, 2, 3, 4])
    assert (wide.rows, wide.width, wide.logprobs) == ([1], 6, [1] * 6)
    assert (pair.is_end, wide.is_end) == (False, True)


def test_prompt_logprobs_come_before_the_token_in_pieces(harness: Harness) -> None:
    count = 3 * ROWS // 2 * DRAFTS  # more than a step holds
    ids = np.arange(2 * count).reshape(count, 2)
    prompt = candidates(ids, ids / 8, np.arange(count))
    *pieces, tokens = harness.steps(pickled([record(6, 1), record(4, 2, prompt_logprobs=prompt)]))
    assert [p.flags for p in pieces] == [PROMPT | ACCEPT | POSITIONS] * len(pieces)
    assert len(pieces) == 3
    assert [x for p in pieces for x in p.topk_ids] == ids.ravel().tolist()
    assert [x for p in pieces for x in p.logprobs] == (ids / 8).ravel().tolist()
    assert [x for p in pieces for x in p.tokens] == ids[:, 0].tolist()
    assert [x for p in pieces for x in p.ranks] == list(range(count))
    assert [p.rows for p in pieces] == [[4]] * 3
    begin = 0
    for piece in pieces:
        assert piece.positions == [begin]
        begin += piece.accept_num[0]
    assert (begin, tokens.rows, tokens.tokens) == (count, [6, 4], [1, 2])
    assert [step.is_end for step in (*pieces, tokens)] == [False] * 3 + [True]


# --- any rows at all


@settings(max_examples=100, deadline=None)
@given(data=st.data(), protocol=st.sampled_from([4, 5]), numpy=st.sampled_from([1, 2]))
def test_every_row_comes_out_as_it_went_in(
    harness: Harness, data: st.DataObject, protocol: int, numpy: int
) -> None:
    rows = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1))
    width = data.draw(st.integers(0, TOP + 1))
    sent, expected = [], {}
    for row in rows:
        tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=DRAFTS))
        shape = (len(tokens), width)
        ids = np.full(shape, row) + np.arange(width)
        scores = np.full(shape, row / 8) - np.arange(len(tokens))[:, None]
        ranks = np.arange(len(tokens))
        fields = {"logprobs": candidates(ids, scores, ranks)} if width else {}
        sent.append(record(row, tokens, **fields))
        expected[row] = (tokens, ids.ravel().tolist(), scores.ravel().tolist())
    (step,) = harness.steps(pickled(sent, protocol, numpy))
    counts = step.accept_num or [1] * len(rows)
    found, at = {}, 0
    for row, count in zip(step.rows, counts, strict=True):
        cells = slice(at * width, (at + count) * width)
        found[row] = (step.tokens[at : at + count], step.topk_ids[cells], step.logprobs[cells])
        at += count
    assert found == expected


# --- what contradicts the configuration or itself

WIDE = candidates([[1] * 6], [[0] * 6], [1])
INTS = LogprobsTensors(np.ones((1, 1), int), np.ones((1, 1), int), np.ones(1, int))


def nameless(bad: StreamTransferData) -> StreamTransferData:
    """Gives a field a number for a name."""
    vars(bad)[7] = vars(bad).pop("tokens")  # type: ignore[index]
    return bad


def test_candidates_wider_than_configured_name_both_numbers(harness: Harness) -> None:
    rows = [record(0, 1), record(2, 1, logprobs=WIDE), record(3, -1), record(4, -9)]
    reason, words, (step,) = harness.refusal(rows)
    assert (reason, step.bad) == ("width", BAD_WIDTH)
    assert "6 columns, must be 1 to top_logprobs + 1 = 5" in words
    # The rows that had a token end with an error; the others say what they say.
    assert (step.rows, step.states) == ([0, 2, 3, 4], [REFUSED, REFUSED, NONE, ACKNOWLEDGED])


@pytest.mark.parametrize(
    ("what", "bad", "reason", "words"),
    [
        ("a row too high", record(8, 1), "row", "batch_id is 8, must be 0 to max_num_seqs - 1 = 7"),
        ("a row below 0", record(-1, 1), "row", "batch_id is -1"),
        ("no row", record(None, 1), "type", "batch_id is None"),
        ("two rows", record(np.array([1, 2]), 1), "record", "batch_id has 2 numbers"),
        ("a row that is a float", record(1.0, 1), "type", "batch_id is a float"),
        ("too many tokens", record(1, [1] * 4), "row", "4 tokens, max_draft_tokens is 3"),
        ("no tokens", record(1), "type", "tokens is None"),
        ("tokens that are floats", record(1, np.zeros(1)), "type", "tokens is of another"),
        ("a list of tokens", record(1, accept_tokens=[1]), "type", "accept_tokens is a list"),
        ("a token outside int32", record(1, 2**31), "record", "2147483648"),
        ("a token of uint64", record(1, np.array([2**40, 1], np.uint64)), "record", "int32"),
        ("more accepted than sent", speculative(1, 3, [1]), "record", "accept_num is 3"),
        ("an unknown output type", speculative(1, 1, [1], output_type=5), "record", "is 5"),
        ("no decoder state", record(1, 1, decoder_state=None), "type", "decoder_state is None"),
        ("an unknown field", record(1, 1, secret=1), "record", "'secret'"),
        ("a field that is no text", nameless(record(1, 1)), "type", "a field's name is an int"),
        (
            "logprobs that are an array",
            record(1, 1, logprobs=np.ones(2)),
            "type",
            "LogprobsTensors",
        ),
        (
            "too few logprobs",
            record(1, [1, 2], logprobs=candidates([[1]], [[0]], [1])),
            "record",
            "logprobs of 1",
        ),
        (
            "shapes that differ",
            record(1, 1, logprobs=candidates([[1]], [[0, 1]], [1])),
            "record",
            "shapes",
        ),
        (
            "ranks that are missing",
            record(1, 1, logprobs=candidates([[1]], [[0]], [])),
            "record",
            "shapes",
        ),
        (
            "logprobs of one dimension",
            record(1, 1, logprobs=candidates([1], [0], [1])),
            "record",
            "shapes",
        ),
        (
            "logprobs without columns",
            record(1, 1, logprobs=candidates([[]], [[]], [1])),
            "width",
            "0 columns",
        ),
        ("logprobs that are ints", record(1, 1, logprobs=INTS), "type", "floats"),
        (
            "wide prompt logprobs",
            record(1, 1, prompt_logprobs=WIDE),
            "width",
            "prompt_logprobs has 6",
        ),
        (
            "a large vector",
            record(1, pooler_output=np.ones(7)),
            "width",
            "7 floats, must be 1 to max_pooling_floats = 6",
        ),
        ("an empty vector", record(1, pooler_output=np.ones(0)), "width", "0 floats"),
        ("a vector of ints", record(1, pooler_output=np.ones(2, int)), "type", "floats"),
    ],
)
def test_a_record_that_cannot_be_is_refused(
    harness: Harness, what: str, bad: Any, reason: str, words: str
) -> None:
    found, said, (step,) = harness.refusal([record(0, 1), bad])
    assert (found, words in said) == (reason, True), f"{what}: {found}: {said}"
    expected = {"row": BAD_ROWS, "width": BAD_WIDTH}.get(reason, BAD_MESSAGE)
    assert step.bad == expected
    assert step.rows[0] == 0, "the rows that can be told end"
    assert step.states[0] == REFUSED


def test_more_records_than_rows_can_have_are_refused(harness: Harness) -> None:
    reason, words, (step,) = harness.refusal([record(0, 1)] * (2 * ROWS + 1))
    assert (reason, step.rows) == ("row", [])
    assert "17 records, the limit is twice max_num_seqs = 16" in words


def test_one_prompt_cannot_be_named_by_many_records(harness: Harness) -> None:
    prompt = candidates(np.ones((64, 5)), np.ones((64, 5)), np.ones(64))
    same = [record(i, 1, prompt_logprobs=prompt) for i in range(ROWS)]
    reason, words, _ = harness.refusal(same)
    assert (reason, "prompt_logprobs add up" in words) == ("limit", True)


def test_steps_that_were_not_taken_are_forgotten(harness: Harness) -> None:
    assert harness.records.read(pickled([record(0, 1)])) is None
    assert [s.tokens for s in harness.steps(pickled([record(0, 2)]))] == [[2]]


def test_every_state_is_of_text_tokens(harness: Harness) -> None:
    for state in DecoderState:
        (step,) = harness.steps(pickled([record(0, 5, decoder_state=state)]))
        assert step.tokens == [5]
