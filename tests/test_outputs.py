"""OutputBatch and its objects, over frames that a real decoder has written, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_oracle import CheckedMaker

import tokenpipe as tp
from support import wait_until
from tokenpipe import _native, layout
from tokenpipe.commands import CommandKind, FinishReason, ReplyStatus
from tokenpipe.config import PipelineConfig
from tokenpipe.objects import RECOVERY_TEXT
from tokenpipe.outputs import OutputBatch, finals_without_step, merged
from tokenpipe.records import LogprobsLists
from tokenpipe.segment import Segment

Array = np.ndarray[Any, Any]

ROWS, TOP = 6, 3
EOS = 2
NONE, TOKEN_NONE, RECOVERY, ACKNOWLEDGED = 0, 1, 2, 3
WAIT_INPUT = 1
WATCHDOG_S = 20.0

in_one_segment = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Line:
    """The whole way, by hand: every role is an object of this process, every move is a call."""

    def __init__(self, segment: Segment) -> None:
        core, source = segment.core, segment.source
        self.segment, self.config = segment, segment.config
        self.engine = tp.EngineWriter.attach(segment.name)
        self.producer = _native.Producer(core, 0.0)
        self.reader = _native.SourceReader(source, core, 0.0)
        self.decoders = [_native.Decoder(core, k, 0.0) for k in range(self.config.num_decoders)]
        self.client = _native.Client(core, 0.0)
        self.book = _native.Book(core, source)
        self.memory = memoryview(segment.core_memory).toreadonly()
        self.maker = CheckedMaker(self.config, 0)
        self.released: list[int] = []
        self.requests: dict[tuple[int, int], tp.Request] = {}
        self._generations = [0] * self.config.max_num_seqs

    def submit(self, request: tp.Request, row: int) -> int:
        """Admits the request to the row; returns its generation."""
        self._generations[row] += 1
        generation = self._generations[row]
        self.client.post(
            0,
            CommandKind.SUBMIT,
            id=request.request_id,
            eos=list(request.eos_token_ids),
            max_tokens=request.max_tokens or 0,
            num_emitted=request.num_emitted_tokens,
            prompt_tokens=len(request.prompt_token_ids),
        )
        assert [slot for _, slot in self.book.posted()] == [0]
        self.book.admit(0, row, generation, [])
        self.book.reply(0, ReplyStatus.OK, row, generation)
        assert self.client.wait_for_reply(0, WATCHDOG_S)
        assert self.client.reply(0) == (ReplyStatus.OK, row, generation, 0, [])
        self.client.free(0)
        self.requests[row, generation] = request
        return generation

    def decode(self) -> None:
        """Moves what has been saved through the reader and all decoders."""
        while self.reader.next < self.engine.num_steps:
            assert self.producer.claim(0.0)
            assert self.reader.get_output(self.producer, 0.0)
            self.producer.publish()
            self.reader.release()
        for decoder in self.decoders:
            while decoder.run(1, 0.001):
                pass

    def batches(self) -> list[OutputBatch]:
        """Every frame that waits, in the order in which a client gets them."""
        found = []
        while (head := self.client.poll(0.0)) is not None:
            found.append(self.batch(*head))
        return found

    def batch(self, decoder: int, offset: int) -> OutputBatch:
        def resolve(batch: OutputBatch, i: int) -> tp.Request:
            return self.requests[int(batch.row[i]), int(batch.generation[i])]

        def release() -> None:
            self.released.append(decoder)
            self.client.release(decoder)

        def resolve_all(batch: OutputBatch) -> list[tp.Request]:
            return [resolve(batch, i) for i in range(len(batch))]

        id_bytes = self.config.max_request_id_bytes
        made = OutputBatch(self.memory, offset, id_bytes, self.maker.make, resolve, resolve_all)
        made._release = release
        return made

    def step(self, tokens: list[int], rows: list[int], **more: Any) -> list[OutputBatch]:
        """Saves one step and returns its frames."""
        stamp = self.engine.begin_step([self._generations[row] for row in rows], rows)
        self.engine.save_output(np.array(tokens, np.int64), step=stamp, **more)
        self.decode()
        return self.batches()

    def step_topk(
        self, tokens: list[int], rows: list[int], width: int = TOP + 1, **more: Any
    ) -> list[OutputBatch]:
        stamp = self.engine.begin_step([self._generations[row] for row in rows], rows)
        ids, logprobs, ranks = candidates(tokens, width)
        self.engine.save_output_topk(
            np.array(tokens, np.int64), ids, logprobs, ranks, step=stamp, **more
        )
        self.decode()
        return self.batches()

    def close(self) -> None:
        self.engine.close()


def candidates(tokens: list[int], width: int) -> tuple[Array, Array, Array]:
    """Ids, logprobs and ranks that follow from the tokens; no logprob is a round number."""
    column = np.array(tokens, np.int64)[:, None]
    ids = column + 1000 * np.arange(width)
    logprobs = (-0.1 * (column + 1) - np.arange(width) / 3).astype(np.float32)
    return ids, logprobs, np.array(tokens) % 7 + 1


@pytest.fixture
def line(unique_name: str) -> Iterator[Line]:
    with Segment.create(config_of(unique_name, 1)) as segment:
        made = Line(segment)
        yield made
        made.close()


@pytest.fixture
def two(unique_name: str) -> Iterator[Line]:
    with Segment.create(config_of(unique_name, 2)) as segment:
        made = Line(segment)
        yield made
        made.close()


def config_of(name: str, num_decoders: int) -> PipelineConfig:
    return PipelineConfig(
        name=name,
        max_num_seqs=ROWS,
        top_logprobs=TOP,
        num_decoders=num_decoders,
        ring_slots=4,
        output_slots=64,
        source_slots=4,
        max_request_id_bytes=32,
    )


def request(name: str, **more: Any) -> tp.Request:
    return tp.Request(name, **{"prompt_token_ids": [1, 2, 3], "eos_token_ids": [EOS], **more})


def columns(batch: OutputBatch) -> dict[str, Any]:
    names = "row generation send_idx token_offsets finish_reason token_ids topk_ids topk_logprobs"
    more = "logprobs ranks first_token_ns draft_token_ids vectors"
    return {n: getattr(batch, n).tolist() for n in [*names.split(), *more.split()]}


# --- columns


def test_a_batch_has_its_step_in_columns(line: Line) -> None:
    for row in range(3):
        line.submit(request(f"r{row}"), row)
    before = _native.now_ns()
    (batch,) = line.step_topk([10, 11, 12], [0, 1, 2])
    ids, logprobs, ranks = candidates([10, 11, 12], TOP + 1)
    expected = {
        "row": (np.uint32, [0, 1, 2]),
        "generation": (np.uint32, [1, 1, 1]),
        "send_idx": (np.uint32, [0, 0, 0]),
        "token_offsets": (np.uint32, [0, 1, 2, 3]),
        "finish_reason": (np.uint8, [0, 0, 0]),
        "token_ids": (np.int32, [10, 11, 12]),
        "topk_ids": (np.int32, ids.tolist()),
        "topk_logprobs": (np.float32, logprobs.tolist()),
        "logprobs": (np.float32, logprobs[:, 0].tolist()),
        "ranks": (np.int32, ranks.tolist()),
        "first_token_ns": (np.uint64, [batch.saved_ns] * 3),
        "draft_offsets": (np.uint32, []),
        "draft_token_ids": (np.int32, []),
    }
    for name, (dtype, values) in expected.items():
        column = getattr(batch, name)
        assert (column.dtype, column.tolist()) == (dtype, values), name
        assert not column.flags.writeable, "shared memory is not the caller's to write"
    assert (batch.num_rows, batch.num_tokens, batch.width, batch.num_finals) == (3, 3, TOP + 1, 0)
    assert len(batch) == 3
    assert (batch.number, batch.step, batch.source_sequence, batch.decoder) == (0, 0, 0, 0)
    assert (batch.message_flag, batch.kind, batch.num_drafts, batch.num_firsts) == (
        *(3, "tokens"),
        *(0, 3),
    )
    assert (batch.has_slot, batch.step_rows) == (True, 3)
    assert before <= batch.saved_ns <= batch.published_ns <= batch.committed_ns <= _native.now_ns()
    assert batch.request_ids == ["r0", "r1", "r2"]


def test_steps_are_counted_and_positions_go_on(line: Line) -> None:
    line.submit(request("a"), 4)
    line.submit(request("b", num_emitted_tokens=7), 1)
    for number in range(5):
        (batch,) = line.step([100 + number, 200 + number], [4, 1])
        assert (batch.number, batch.step, batch.source_sequence) == (number, number, number)
        assert batch.send_idx.tolist() == [number, 7 + number]
        assert batch.token_ids.tolist() == [100 + number, 200 + number]
        batch.release()


def test_a_plain_step_has_no_candidates(line: Line) -> None:
    line.submit(request("a"), 0)
    (batch,) = line.step([9], [0])
    assert batch.width == 0
    assert batch.topk_ids.shape == batch.topk_logprobs.shape == (1, 0)
    assert batch.logprobs.shape == batch.ranks.shape == (0,)


def test_a_row_without_a_token_has_no_output(line: Line) -> None:
    line.submit(request("a"), 0)
    line.submit(request("b"), 1)
    (batch,) = line.step([5, 6], [0, 1], states=np.array([TOKEN_NONE, NONE], np.uint8))
    assert batch.request_ids == ["b"]
    assert line.step([5, 6], [0, 1], states=np.full(2, TOKEN_NONE, np.uint8)) == []


@in_one_segment
@given(st.data())
def test_any_step_comes_out_as_it_went_in(line: Line, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
    width = data.draw(st.integers(0, TOP + 1))
    tokens = data.draw(st.lists(st.integers(10, 10**6), min_size=len(rows), max_size=len(rows)))
    for row in rows:
        line.submit(request(f"{row}.{line._generations[row]}", max_tokens=1), row)
    (batch,) = line.step_topk(tokens, rows, width) if width else line.step(tokens, rows)
    found = columns(batch)
    assert found["row"] == rows
    assert found["token_ids"] == tokens
    assert found["finish_reason"] == [FinishReason.LENGTH] * len(rows)
    if width:
        ids, logprobs, ranks = candidates(tokens, width)
        assert found["topk_ids"] == ids.tolist()
        assert found["topk_logprobs"] == logprobs.tolist()
        assert found["ranks"] == ranks.tolist()
    assert batch.num_finals == len(rows)
    batch.release()


# --- finals


def test_a_final_carries_the_facts_of_its_request(line: Line) -> None:
    name = "caf\u00e9/7 " + "x" * 20  # opaque, in UTF-8
    line.submit(request("other"), 0)
    line.submit(request(name, prompt_token_ids=[1] * 9), 3)
    begun = _native.now_ns()
    (first,) = line.step([10, 11], [0, 3])
    (last,) = line.step([12, EOS], [0, 3])
    assert (first.num_finals, last.num_finals) == (0, 1)
    final = last.finals[0]
    assert last.final_id(0) == name
    assert int(final["index"]) == 1
    assert last.row[int(final["index"])] == 3
    assert (int(final["num_tokens"]), int(final["prompt_tokens"])) == (2, 9)
    assert int(final["arrival_ns"]) < begun
    assert int(final["first_token_ns"]) == first.saved_ns
    assert int(final["last_token_ns"]) == last.saved_ns
    assert last.finish_reason.tolist() == [FinishReason.NONE, FinishReason.STOP]


@pytest.mark.parametrize(
    ("reason", "error_code", "error_msg"),
    [
        (FinishReason.STOP, 200, None),
        (FinishReason.LENGTH, 200, None),
        (FinishReason.ABORT, 200, "Aborted"),
        (FinishReason.RECOVERY, 200, RECOVERY_TEXT),
        (FinishReason.ERROR, 500, "the request ended by an error of the pipeline or the engine"),
        (FinishReason.SHUTDOWN, 503, "the pipeline was shut down"),
    ],
)
def test_every_way_to_end_has_its_name_and_its_code(
    line: Line, reason: FinishReason, error_code: int, error_msg: str | None
) -> None:
    generation = line.submit(request("a", max_tokens=2), 0)
    (first,) = line.step([10], [0])
    assert [o.finished for o in first] == [False]
    if reason is FinishReason.STOP:
        (batch,) = line.step([EOS], [0])
    elif reason is FinishReason.LENGTH:
        (batch,) = line.step([11], [0])
    elif reason is FinishReason.RECOVERY:
        (batch,) = line.step([0], [0], states=np.array([RECOVERY], np.uint8))
    else:
        line.book.mark(0, generation, reason)
        line.decode()
        (batch,) = line.batches()
    has_token = reason in (FinishReason.STOP, FinishReason.LENGTH)
    (output,) = batch
    assert (output.finished, output.finish_reason) == (True, reason.name.lower())
    assert (output.error_code, output.error_msg) == (error_code, error_msg)
    assert len(output.outputs.token_ids) == has_token
    assert output.outputs.send_idx == 1
    assert batch.has_slot == (has_token or reason is FinishReason.RECOVERY)
    assert (batch.num_finals, batch.final_id(0)) == (1, "a")
    assert line.step([12], [0]) == [], "nothing comes after the final"


# --- objects


def test_objects_hold_plain_ints_and_exactly_widened_floats(line: Line) -> None:
    line.submit(request("a"), 2)
    line.submit(request("b"), 5)
    (batch,) = line.step_topk([10, 33], [2, 5])
    ids, logprobs, ranks = candidates([10, 33], TOP + 1)
    for i, output in enumerate(batch):
        made = output.outputs
        assert (made.index, made.send_idx, made.token_ids) == ([2, 5][i], 0, [[10], [33]][i])
        assert made.top_logprobs == LogprobsLists(
            ids[i : i + 1].tolist(), logprobs[i : i + 1].astype(float).tolist(), [int(ranks[i])]
        )
        assert made.logprob == float(logprobs[i, 0])
        top = made.top_logprobs
        assert top is not None
        plain = [made.index, made.send_idx, *made.token_ids, *top.logprob_token_ids[0]]
        plain += top.sampled_token_ranks
        assert {type(value) for value in plain} == {int}
        assert {type(value) for value in [made.logprob, *top.logprobs[0]]} == {float}
        assert np.float32(made.logprob) == logprobs[i, 0], "widened, not rounded"
        assert type(output.finished) is bool


def test_an_object_echoes_its_request(line: Line) -> None:
    messages, carrier, data = [{"role": "user"}], {"root_span": "7"}, object()
    line.submit(
        request(
            "a",
            prompt=messages,
            num_cached_tokens=2,
            ic_req_data=data,
            trace_carrier=carrier,
            multimodal_inputs={"num_input_image_tokens": 5, "num_input_video_tokens": 6},
        ),
        0,
    )
    line.submit(request("b", num_emitted_tokens=4, prompt="again"), 1)
    (first,) = line.step([10, 20], [0, 1])
    (second,) = line.step([11, 21], [0, 1])
    a, b = first.objects()
    assert (a.request_id, b.request_id) == ("a", "b")
    assert a.prompt is messages
    assert b.prompt is None, "its first output was elsewhere"
    assert [o.prompt for o in second] == [None, None], "only the first output carries it"
    assert a.ic_req_data is data
    assert a.trace_carrier is None, "only the last output carries it"
    (last,) = line.step([EOS], [0])
    assert last.objects()[0].trace_carrier is carrier
    assert (a.num_cached_tokens, a.num_input_image_tokens, a.num_input_video_tokens) == (2, 5, 6)
    assert (b.num_cached_tokens, b.num_input_image_tokens, b.num_input_video_tokens) == (0, 0, 0)
    assert (a.prompt_token_ids, a.prompt_token_ids_len, a.output_type) == ([], 3, 3)
    assert (a.error_code, a.error_msg, a.finish_reason) == (200, None, None)
    assert (a.outputs.logprob, a.outputs.top_logprobs, a.outputs.draft_token_ids) == (
        None,
        None,
        [],
    )


def test_objects_share_nothing_that_can_be_changed(line: Line) -> None:
    line.submit(request("a"), 0)
    line.submit(request("b"), 1)
    (batch,) = line.step([7, 8], [0, 1])
    one, other = batch.objects()
    assert isinstance(one, tp.RequestOutput)
    assert isinstance(other, tp.RequestOutput)
    one.prompt_token_ids.append(1)
    one.outputs.draft_token_ids.append(1)
    assert one.metrics is not None
    one.metrics.preempted_count = 5
    assert other.prompt_token_ids == []
    assert other.outputs.draft_token_ids == []
    assert other.metrics is not None
    assert other.metrics.preempted_count == 0


def test_a_final_without_a_token_has_no_logprobs(line: Line) -> None:
    line.submit(request("a"), 0)
    line.submit(request("b"), 1)
    states = np.array([RECOVERY, NONE], np.uint8)
    (batch,) = line.step_topk([0, 9], [0, 1], states=states)
    a, b = batch
    assert (a.finish_reason, a.outputs.token_ids, a.outputs.top_logprobs) == ("recovery", [], None)
    assert b.outputs.top_logprobs is not None
    assert b.outputs.token_ids == [9]


# --- release


def test_a_frame_is_given_back_once(line: Line) -> None:
    line.submit(request("a"), 0)
    batches = [b for n in range(3) for b in line.step([10 + n], [0])]
    client = np.frombuffer(line.segment.core_memory, layout.CLIENT, 1, line.config.plan()["client"])
    for n, batch in enumerate(batches):
        assert int(client[0]["output"][0]["released"]) == n
        batch.release()
        batch.release()
    assert line.released == [0, 0, 0]
    assert int(client[0]["output"][0]["released"]) == 3


def test_a_frame_in_hand_is_not_written_over(line: Line) -> None:
    line.submit(request("a"), 0)
    slots = line.config.output_slots
    held = [b for n in range(slots) for b in line.step([100 + n], [0])]
    assert len(held) == slots
    assert line.step([999], [0]) == [], "the output ring is full"
    assert [int(b.token_ids[0]) for b in held] == list(range(100, 100 + slots))
    held[0].release()
    line.decode()
    (late,) = line.batches()
    assert (late.token_ids.tolist(), late.number) == ([999], slots)
    assert late._offset == held[0]._offset, "it took the place that was given back"


def test_a_client_that_sleeps_is_woken_by_a_frame(line: Line) -> None:
    line.submit(request("a"), 0)
    found: list[Any] = []
    client = np.frombuffer(line.segment.core_memory, layout.CLIENT, 1, line.config.plan()["client"])
    thread = threading.Thread(
        target=lambda: found.append(line.client.poll(10 * WATCHDOG_S)), daemon=True
    )
    thread.start()
    wait_until(lambda: int(client[0]["bell"]["waiting"]) == WAIT_INPUT)
    stamp = line.engine.begin_step([1], [0])
    line.engine.save_output(np.array([10]), step=stamp)
    line.decode()
    thread.join(WATCHDOG_S)
    assert not thread.is_alive(), "the client sleeps on beside a frame"
    assert line.batch(*found[0]).token_ids.tolist() == [10]


# --- copies and whole steps


def test_a_copy_outlives_its_frame(line: Line) -> None:
    line.submit(request("a"), 4)
    line.submit(request("b"), 1)
    (batch,) = line.step_topk([10, EOS], [4, 1])
    kept, before = batch.copy(), columns(batch)
    objects = batch.objects()
    batch.release()
    for n in range(line.config.output_slots):  # its place is written over
        for other in line.step_topk([500 + n], [4]):
            other.release()
    assert columns(kept) == before, "a copy has the same rows in the same order"
    assert kept.objects() == objects
    assert kept.row.flags.owndata or kept.row.base is not None
    assert not any(np.shares_memory(getattr(kept, n), line.memory) for n in ("row", "token_ids"))
    kept.release()  # it holds nothing
    assert len(line.released) == line.config.output_slots + 1


def test_a_copy_has_the_head_and_the_finals_of_its_frame(line: Line) -> None:
    line.submit(request("a"), 3)
    line.submit(request("b"), 0)
    line.submit(request("c"), 1)
    (batch,) = line.step_topk([EOS, 10, EOS], [3, 0, 1])
    kept = batch.copy()
    heads = "number step source_sequence saved_ns published_ns committed_ns decoder num_rows"
    for name in [*heads.split(), "num_tokens", "width", "num_finals", "message_flag", "has_slot"]:
        assert getattr(kept, name) == getattr(batch, name), name
    for f in range(batch.num_finals):
        whose = kept.request_ids[int(kept.finals[f]["index"])]
        assert kept.final_id(f) == whose
        assert kept.finish_reason[int(kept.finals[f]["index"])] == FinishReason.STOP
    assert sorted(kept.final_id(f) for f in range(2)) == ["a", "c"]


def test_a_whole_step_is_in_row_order_with_everything_of_its_rows(two: Line) -> None:
    rows = [5, 0, 3, 4, 1]
    for row in rows:
        two.submit(request(f"r{row}", prompt_token_ids=[1] * (row + 1)), row)
    tokens = [50, 2, 30, 40, 2]  # rows 0 and 1 end
    parts = two.step_topk(tokens, rows)
    assert [p.decoder for p in parts] == [0, 1]
    assert [p.row.tolist() for p in parts] == [[0, 4], [5, 3, 1]]
    whole = merged(parts)
    by_row = dict(zip(rows, tokens, strict=True))
    in_order = sorted(rows)
    ids, logprobs, ranks = candidates([by_row[row] for row in in_order], TOP + 1)
    stop = int(FinishReason.STOP)
    assert columns(whole) == {
        "row": in_order,
        "generation": [1] * 5,
        "send_idx": [0] * 5,
        "token_offsets": list(range(6)),
        "finish_reason": [stop, stop, 0, 0, 0],
        "token_ids": [by_row[row] for row in in_order],
        "topk_ids": ids.tolist(),
        "topk_logprobs": logprobs.tolist(),
        "logprobs": logprobs[:, 0].tolist(),
        "ranks": ranks.tolist(),
        "first_token_ns": [whole.saved_ns] * 5,
        "draft_token_ids": [],
        "vectors": [],
    }
    assert whole.num_firsts == 5
    assert whole.request_ids == [f"r{row}" for row in in_order]
    assert (whole.num_rows, whole.num_tokens, whole.num_finals) == (5, 5, 2)
    assert whole.finals["index"].tolist() == [0, 1]
    assert [whole.final_id(f) for f in range(2)] == ["r0", "r1"]
    assert whole.finals["prompt_tokens"].tolist() == [1, 2]
    assert whole.committed_ns == max(p.committed_ns for p in parts)
    assert whole.step == parts[0].step
    alone = {o.request_id: o for part in parts for o in part}
    assert {o.request_id: o for o in whole} == alone


def test_a_whole_step_keeps_rows_without_tokens(two: Line) -> None:
    for row in range(4):
        two.submit(request(f"r{row}"), row)
    states = np.array([RECOVERY, NONE, NONE, RECOVERY], np.uint8)
    for width in (0, TOP + 1):
        parts = (
            two.step_topk([0, 11, 12, 0], [3, 1, 0, 2], states=states)
            if width
            else two.step([0, 11, 12, 0], [3, 1, 0, 2], states=states)
        )
        whole = merged(parts)
        assert whole.width == width
        assert whole.row.tolist() == ([0, 1, 2, 3] if width == 0 else [0, 1])
        assert whole.token_ids.tolist() == [12, 11]
        if width:
            assert whole.topk_ids.shape == whole.topk_logprobs.shape == (2, width)
        assert len(whole.ranks) == (2 if width else 0)
        outputs = {o.request_id: o.outputs.token_ids for o in whole}
        ended: dict[str, list[int]] = {"r2": [], "r3": []} if width == 0 else {}
        assert outputs == {"r0": [12], "r1": [11], **ended}


def test_a_whole_plain_step_has_a_row_of_no_candidates_per_token(two: Line) -> None:
    for row in range(4):
        two.submit(request(f"r{row}"), row)
    whole = merged(two.step([10, 11, 12, 13], [0, 1, 2, 3]))
    assert whole.topk_ids.shape == whole.topk_logprobs.shape == (4, 0)


def test_a_whole_step_of_ends_alone_has_no_tokens(two: Line) -> None:
    for row in range(4):
        two.submit(request(f"r{row}"), row)
        two.book.mark(row, 1, FinishReason.ABORT)
    two.decode()
    parts = two.batches()
    whole = merged(parts)
    assert whole.row.tolist() == [0, 1, 2, 3]
    assert whole.token_ids.tolist() == []
    assert whole.token_offsets.tolist() == [0] * 5
    assert whole.topk_ids.shape == (0, 0)
    assert not whole.has_slot
    assert [o.finish_reason for o in whole] == ["abort"] * 4
    assert [whole.final_id(f) for f in range(4)] == ["r0", "r1", "r2", "r3"]


@in_one_segment
@given(st.data())
def test_any_whole_step_has_what_its_parts_have(two: Line, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
    states = data.draw(st.lists(st.sampled_from([NONE, RECOVERY]), min_size=ROWS, max_size=ROWS))
    tokens = [10 + row for row in rows]
    for row in rows:
        two.submit(request(f"{row}.{two._generations[row]}", max_tokens=1), row)
    width = data.draw(st.sampled_from([0, 1, TOP + 1]))
    more = {"states": np.array([states[row] for row in rows], np.uint8)}
    parts = two.step_topk(tokens, rows, width, **more) if width else two.step(tokens, rows, **more)
    whole = merged(parts)
    assert whole.row.tolist() == sorted(rows)
    assert {o.request_id: o for o in whole} == {o.request_id: o for p in parts for o in p}
    assert [whole.final_id(f) for f in range(whole.num_finals)] == whole.request_ids
    for part in parts:
        part.release()


def test_the_handle_s_own_finals_read_like_all_others() -> None:
    ended = [(3, 2, request("a")), (0, 9, request("b"))]
    maker = CheckedMaker(PipelineConfig(), 0)
    batch = finals_without_step(ended, [(5, 70, 90), (0, 0, 0)], FinishReason.SHUTDOWN, maker.make)
    assert columns(batch) == {
        "row": [3, 0],
        "generation": [2, 9],
        "send_idx": [5, 0],
        "token_offsets": [0, 0, 0],
        "finish_reason": [FinishReason.SHUTDOWN] * 2,
        "token_ids": [],
        "topk_ids": [],
        "topk_logprobs": [],
        "logprobs": [],
        "ranks": [],
        "first_token_ns": [70, 0],
        "draft_token_ids": [],
        "vectors": [],
    }
    assert batch.finals["num_tokens"].tolist() == [5, 0]
    assert batch.finals["last_token_ns"].tolist() == [90, 0]
    assert [o.finish_reason for o in batch] == ["shutdown", "shutdown"]
    assert [o.error_code for o in batch] == [503, 503]
    assert [batch.final_id(f) for f in range(2)] == batch.request_ids == ["a", "b"]
    assert not batch.has_slot
    assert [o.request_id for o in batch.copy()] == ["a", "b"]
    batch.release()
