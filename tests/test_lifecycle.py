"""Life cycles over real processes: preempt and resume, grow, hand-over, clear, warm-up."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import signal
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from fake_engine import token_of

import tokenpipe as tp
from support import wait_until

ROWS, BLOCKS, DEPTH = 8, 32, 3
EOS = 2
OPERATIONS = (
    *("submit", "submit", "step", "step", "step", "step", "abort", "preempt", "preempt"),
    *("resume", "resume", "grow", "obey", "obey", "read", "clear"),
)


class PositionedEngine:
    """An engine that says each token's position, so that what it sends again is known as such."""

    def __init__(self, writer: tp.EngineWriter) -> None:
        self.writer = writer
        self.batch: dict[int, tuple[int, int]] = {}
        """row -> (generation, position of the next token)"""
        self.let_go: dict[tuple[int, int], int] = {}
        """(row, generation) -> position, of preempted requests."""

    def run(self, admission: tp.Admission, position: int = 0) -> None:
        """Takes a request into the batch."""
        self.batch[admission.row] = (admission.generation, position)

    def go_on(self, admission: tp.Admission, back: int = 0) -> None:
        """Runs a resumed request again, the last `back` positions once more."""
        position = self.let_go.pop((admission.row, admission.generation))
        self.run(admission, max(0, position - back))

    def step(self, end: int | None = None, depth: int = 1) -> None:
        """Saves a step of up to `depth` tokens a row; row `end` samples an end token."""
        rows = sorted(self.batch)
        begins = [self.batch[r] for r in rows]
        tokens = np.array(
            [
                [EOS if r == end else token_of(r, g, p + j) for j in range(depth)]
                for r, (g, p) in zip(rows, begins, strict=True)
            ],
            np.int64,
        ).reshape(len(rows), depth)
        step = self.writer.begin_step([g for g, _ in begins], rows=rows)
        positions = np.array([p for _, p in begins], np.int32)
        if depth == 1:
            self.writer.save_output(tokens[:, 0].copy(), step=step, positions=positions)
        else:
            accepted = np.full(len(rows), depth, np.int32)
            self.writer.speculate_save_output(tokens, accepted, step=step, positions=positions)
        for r, (g, p) in zip(rows, begins, strict=True):
            self.batch[r] = (g, p + depth)

    def obey(self) -> list[tp.ControlEvent]:
        """Acts on what poll_control says, and acknowledges aborts and preemptions in one step."""
        events = self.writer.poll_control()
        told: dict[int, int] = {}
        for event in events:
            running = self.batch.get(event.row)
            if running is not None and running[0] == event.generation:
                del self.batch[event.row]
                if event.kind == "preempt":
                    self.let_go[event.row, event.generation] = running[1]
            if event.kind != "finished":
                told[event.row] = event.generation
        if told:
            self.writer.save_output(
                np.zeros(len(told), np.int64),
                generations=np.array(list(told.values()), np.int32),
                rows=np.array(list(told), np.int32),
                states=np.full(len(told), 3, np.uint8),
            )
        return events


class House:
    """A pipeline that several tests use in turn, with its engine and the first tokens handed on."""

    def __init__(self, **more: Any) -> None:
        self.sent: list[tuple[Mapping[str, Any], tp.RequestOutput]] = []
        self.sink: Callable[[str], None] | None = None
        config = tp.PipelineConfig(
            name="t" + secrets.token_hex(8),
            max_num_seqs=ROWS,
            top_logprobs=0,
            max_draft_tokens=DEPTH,
            num_decoders=2,
            num_blocks=BLOCKS,
            heartbeat_interval_s=0.02,
            **{"abort_timeout_s": 600, "prefill_timeout_s": 600, **more},
        )
        self.pipe = tp.Pipeline(config, on_first_token=self._take_first)
        self.engine = PositionedEngine(self.pipe.engine_writer())

    def _take_first(self, info: Mapping[str, Any], outputs: list[tp.RequestOutput]) -> None:
        self.sent += [(info, output) for output in outputs]
        if self.sink is not None:
            self.sink(outputs[0].request_id)

    def begin(self, name: str, **more: Any) -> tp.Admission:
        """Submits a request and runs it in the engine."""
        admission = self.submit(name, **more)
        self.engine.run(admission, more.get("num_emitted_tokens", 0))
        return admission

    def submit(self, name: str, timeout_s: float = 20.0, **more: Any) -> tp.Admission:
        """Submits a request."""
        request = tp.Request(name, **{"prompt_token_ids": [1], "eos_token_ids": [EOS], **more})
        return self.pipe.submit(request, timeout_s=timeout_s)

    def read(self) -> list[tp.RequestOutput]:
        """Returns all that is saved by now."""
        self.pipe.sync(timeout_s=20)
        return [o for batch in self.pipe.batches(timeout_s=0) for o in batch]

    def read_until_final(self, name: str) -> list[tp.RequestOutput]:
        """Returns what comes until a request has its final."""
        outputs: list[tp.RequestOutput] = []

        def is_there() -> bool:
            outputs.extend(o for batch in self.pipe.batches(timeout_s=0) for o in batch)
            return any(o.finished and o.request_id == name for o in outputs)

        wait_until(is_there)
        return outputs

    def live(self) -> int:
        """Returns how many rows are given out."""
        return int(self.pipe.status()["rows"]["live"])

    def expect_live(self, count: int) -> None:
        """Waits until so many rows are given out, as /status says."""
        wait_until(lambda: self.live() == count, describe=self.pipe.status)

    def counter(self, name: str) -> int:
        """Returns a counter's value."""
        return int(self.pipe.status()["counters"][name])

    def clean(self) -> None:
        """Ends what a test left running, and checks that all is back (I1, I3)."""
        self.sink = None
        self.pipe.abort()

        def is_empty() -> bool:
            self.engine.obey()
            self.read()
            return self.live() == 0

        wait_until(is_empty, describe=self.pipe.status)
        self.engine.batch.clear()
        self.engine.let_go.clear()
        self.sent.clear()
        status = self.pipe.status()
        dropped = sum(v for n, v in status["counters"].items() if n.startswith("dropped_"))
        delivered = status["counters"]["tokens_delivered"]
        assert status["source"]["tokens_saved"] == delivered + dropped
        assert status["blocks"]["free"] == BLOCKS
        assert status["waiting_submits"] == 0
        assert wait_until(lambda: self.pipe.health()["state"] == "idle")

    def close(self) -> None:
        """Stops it."""
        self.engine.writer.close()
        self.pipe.close()


def _house(**more: Any) -> Iterator[House]:
    house = House(**more)
    try:
        yield house
    finally:
        house.close()


@pytest.fixture(scope="module")
def mixed_house() -> Iterator[House]:
    yield from _house()


@pytest.fixture(scope="module")
def decode_house() -> Iterator[House]:
    yield from _house(role="decode")


@pytest.fixture(scope="module")
def prefill_house() -> Iterator[House]:
    yield from _house(role="prefill")


@pytest.fixture(scope="module")
def hasty_house() -> Iterator[House]:
    yield from _house(role="prefill", abort_timeout_s=0.2, prefill_timeout_s=0.2)


@pytest.fixture
def mixed(mixed_house: House) -> Iterator[House]:
    yield mixed_house
    mixed_house.clean()


@pytest.fixture
def decode(decode_house: House) -> Iterator[House]:
    yield decode_house
    decode_house.clean()


@pytest.fixture
def prefill(prefill_house: House) -> Iterator[House]:
    yield prefill_house
    prefill_house.clean()


@pytest.fixture
def hasty(hasty_house: House) -> Iterator[House]:
    yield hasty_house
    hasty_house.clean()


def tokens_of(outputs: list[tp.RequestOutput], name: str) -> list[int]:
    return [t for o in outputs if o.request_id == name for t in o.outputs.token_ids]


def expected(admission: tp.Admission, count: int) -> list[int]:
    return [token_of(admission.row, admission.generation, p) for p in range(count)]


# ---------------------------------------------------------------- preempt, resume, abort, grow


@pytest.mark.parametrize("depth", [1, DEPTH])
@pytest.mark.parametrize("back", [0, 1, 4, 100])
@pytest.mark.parametrize("in_flight", [0, 1, 3])
def test_a_preempted_request_gives_the_output_of_one_that_was_not(
    mixed: House, in_flight: int, back: int, depth: int
) -> None:
    limit = 12 * depth - 1  # with drafts the last step is cut
    a = mixed.begin("a", max_tokens=limit)
    other = mixed.begin("other", max_tokens=limit)
    for _ in range(5):
        mixed.engine.step(depth=depth)
    assert mixed.pipe.preempt("a") == {"a": True}
    for _ in range(in_flight):  # composed before the engine hears of it
        mixed.engine.step(depth=depth)
    assert [e.kind for e in mixed.engine.obey()] == ["preempt"]
    mixed.engine.step(depth=depth)  # without it
    mixed.pipe.resume("a", timeout_s=20)
    mixed.engine.go_on(a, back)
    outputs = []
    while mixed.engine.batch:
        mixed.engine.step(depth=depth)
        outputs += mixed.read()
        mixed.engine.obey()
    for admission in (a, other):
        own = [o for o in outputs if o.request_id == admission.request_id]
        assert tokens_of(own, admission.request_id) == expected(admission, limit)
        at = 0
        for output in own:
            assert output.outputs.send_idx == at
            at += len(output.outputs.token_ids)
        assert [o.finish_reason for o in own if o.finished] == ["length"]


def test_a_position_left_out_ends_the_request_with_an_error(mixed: House) -> None:
    a = mixed.begin("a")
    mixed.engine.step()
    mixed.engine.run(a, 2)
    mixed.engine.step()
    outputs = mixed.read()
    assert tokens_of(outputs, "a") == expected(a, 1)
    assert (outputs[-1].finish_reason, outputs[-1].error_code) == ("error", 500)


def test_an_abort_of_a_preempted_request_gives_its_row_back_at_once(mixed: House) -> None:
    mixed.begin("a", num_blocks=3)
    mixed.engine.step()
    mixed.pipe.preempt("a")
    mixed.engine.obey()
    mixed.read()
    mixed.expect_live(1)
    mixed.pipe.abort("a")
    [final] = [o for o in mixed.read_until_final("a") if o.finished]
    assert final.finish_reason == "abort"
    mixed.expect_live(0)  # and the engine has not polled again
    assert len(mixed.submit("b", num_blocks=BLOCKS, timeout_s=0).block_ids) == BLOCKS


def test_an_abort_while_the_engine_is_asked_to_preempt_needs_one_acknowledgement(
    mixed: House,
) -> None:
    mixed.begin("a")
    mixed.pipe.preempt("a")
    mixed.pipe.abort("a")
    mixed.read_until_final("a")
    mixed.expect_live(1)
    before = mixed.counter("acknowledgements")
    assert {"abort", "preempt"} <= {e.kind for e in mixed.engine.obey()}
    mixed.expect_live(0)
    assert mixed.counter("acknowledgements") == before + 1


def test_resume_waits_for_the_acknowledgement(mixed: House) -> None:
    a = mixed.begin("a")
    mixed.pipe.preempt("a")
    with pytest.raises(tp.NotAcknowledgedError, match="'a'"):
        mixed.pipe.resume("a", timeout_s=0)
    thread = threading.Thread(target=mixed.pipe.resume, args=("a",))
    thread.start()
    mixed.engine.obey()
    thread.join(20)
    assert not thread.is_alive()
    mixed.engine.go_on(a)
    mixed.engine.step()
    assert tokens_of(mixed.read(), "a") == expected(a, 1)


def test_unknown_and_ended_requests_are_answered(mixed: House) -> None:
    mixed.begin("a", max_tokens=1)
    mixed.engine.step()
    mixed.read()
    for name in ("a", "nobody", "_0", "\u00e9"):
        assert mixed.pipe.abort(name) == {name: False}
        assert mixed.pipe.preempt(name) == {name: False}
        assert mixed.pipe.prefill_done(name) is False
        with pytest.raises(tp.UnknownRequestError):
            mixed.pipe.resume(name, timeout_s=0)
        with pytest.raises(tp.UnknownRequestError):
            mixed.pipe.grow(name, 1, timeout_s=0)
    assert mixed.pipe.abort([]) == mixed.pipe.preempt() == {}


def test_a_running_request_grows(mixed: House) -> None:
    a = mixed.begin("a", num_blocks=2)
    b = mixed.begin("b", num_blocks=BLOCKS - 7)
    more = mixed.pipe.grow("a", 3, timeout_s=0)
    assert len({*a.block_ids, *b.block_ids, *more}) == BLOCKS - 2
    wait_until(lambda: mixed.pipe.status()["blocks"]["free"] == 2)
    with pytest.raises(tp.NoFreeBlocksError, match="3 blocks did not come free"):
        mixed.pipe.grow("a", 3, timeout_s=0)
    with pytest.raises(tp.NotEnoughBlocksError, match=f"{BLOCKS} blocks wanted"):
        mixed.pipe.grow("a", BLOCKS, timeout_s=None)
    with pytest.raises(tp.InvalidRequestError, match="num_blocks = 0"):
        mixed.pipe.grow("a", 0)
    got: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: got.append(mixed.pipe.grow("a", 4)))
    thread.start()
    mixed.engine.step(end=b.row)
    mixed.read()
    thread.join(20)
    assert len({*a.block_ids, *more, *got[0]}) == 9


# ---------------------------------------------------------------- decode and prefill instances


def test_a_decode_instance_shields_a_preempted_row(decode: House) -> None:
    a = decode.begin("a", max_tokens=6)
    before = decode.counter("dropped_shielded")
    decode.engine.step()
    decode.pipe.preempt("a")
    decode.engine.step()  # in flight: not delivered
    decode.engine.step()
    outputs = decode.read()
    assert tokens_of(outputs, "a") == expected(a, 1)
    assert decode.counter("dropped_shielded") == before + 2
    decode.engine.obey()
    decode.pipe.resume("a", timeout_s=20)
    decode.engine.go_on(a, back=2)  # what was not delivered is computed again
    while decode.engine.batch:
        decode.engine.step()
        outputs += decode.read()
        decode.engine.obey()
    assert tokens_of(outputs, "a") == expected(a, 6)


def test_a_decode_instance_stamps_the_second_token(decode: House) -> None:
    decode.begin("a", num_emitted_tokens=1)
    for _ in range(3):
        decode.engine.step()
    second, third, fourth = decode.read()
    assert [o.outputs.send_idx for o in (second, third, fourth)] == [1, 2, 3]
    assert second.metrics is not None
    assert third.metrics is not None
    stamp = second.metrics.decode_recv_second_token_time
    assert stamp == second.metrics.engine_recv_latest_token_time
    assert third.metrics.decode_recv_second_token_time == stamp


def test_a_parked_row_stops_no_other(prefill: House) -> None:
    a = prefill.begin("a", disaggregate_info={"to": "d1"}, num_blocks=2)
    b = prefill.begin("b", max_tokens=30)  # runs here to its end
    outputs = []
    for _ in range(30):
        prefill.engine.step()
        outputs += prefill.read()
        prefill.engine.obey()
    assert tokens_of(outputs, "b") == expected(b, 30)
    assert tokens_of(outputs, "a") == expected(a, 1)
    prefill.expect_live(1)
    assert prefill.sent == []
    assert prefill.pipe.prefill_done("a") is True
    [(info, first)] = prefill.sent
    assert info == {"to": "d1"}
    assert (first.request_id, first.error_code, first.error_msg) == ("a", 200, None)
    assert first.outputs.token_ids == expected(a, 1)
    assert first.metrics is not None
    assert first.metrics.send_request_output_to_decode_time is not None
    prefill.expect_live(0)
    assert prefill.pipe.prefill_done("a") is False


@pytest.mark.parametrize("is_before", [True, False], ids=["before-the-read", "after-the-read"])
@pytest.mark.parametrize("status", ["finished", "send cache"])
def test_prefill_done_meets_the_first_token(prefill: House, status: str, is_before: bool) -> None:
    prefill.begin("a", disaggregate_info={})
    if is_before:
        prefill.pipe.prefill_done("a", status)
    prefill.engine.step()
    prefill.read()
    if not is_before:
        prefill.pipe.prefill_done("a", status)
    [(_, first)] = prefill.sent
    failed = (501, f"a failed to {status}")
    assert (first.error_code, first.error_msg) == ((200, None) if status == "finished" else failed)
    prefill.expect_live(0)


def test_a_sink_that_raises_costs_no_row_and_no_other_token(
    prefill: House, caplog: pytest.LogCaptureFixture
) -> None:
    def sink(request_id: str) -> None:
        raise RuntimeError(f"connector of {request_id}")

    prefill.sink = sink
    for name in ("a", "b"):
        prefill.begin(name, disaggregate_info={})
    prefill.pipe.prefill_done("a")
    prefill.engine.step()
    assert sorted(o.request_id for o in prefill.read()) == ["a", "b"]
    prefill.pipe.prefill_done("b")
    assert sorted(o.request_id for _, o in prefill.sent) == ["a", "b"]
    prefill.expect_live(0)
    assert "connector of a" in caplog.text


def test_an_abort_of_a_prefill_request_forgets_its_hand_over(prefill: House) -> None:
    prefill.begin("a", disaggregate_info={})
    prefill.pipe.abort("a")
    prefill.read_until_final("a")
    assert prefill.pipe.prefill_done("a") is False
    assert prefill.sent == []
    handover = prefill.pipe._handover
    assert not any((handover._places, handover._parked, handover._answers))


def test_a_hand_over_that_never_comes_is_given_up(hasty: House) -> None:
    hasty.begin("a", disaggregate_info={})
    hasty.engine.step()
    hasty.read()
    wait_until(lambda: hasty.read() or hasty.sent)
    [(_, first)] = hasty.sent
    assert (first.error_code, first.error_msg) == (501, "a failed to answer in time")
    hasty.expect_live(0)
    assert hasty.pipe.prefill_done("a") is False


def test_an_abort_that_is_never_acknowledged_is_given_up(hasty: House) -> None:
    for i in range(ROWS):
        hasty.begin(f"a{i}", num_blocks=4)
    hasty.pipe.abort()
    hasty.expect_live(0)  # the engine is silent
    for i in range(ROWS):
        hasty.submit(f"b{i}", num_blocks=4, timeout_s=0)
    hasty.engine.obey()  # the late acknowledgements are for former lives
    hasty.read()
    hasty.expect_live(ROWS)


def test_a_preemption_that_is_never_acknowledged_ends_with_an_error(hasty: House) -> None:
    hasty.begin("a")
    hasty.pipe.preempt("a")
    [final] = [o for o in hasty.read_until_final("a") if o.finished]
    assert (final.finish_reason, final.error_code) == ("error", 500)
    hasty.expect_live(0)


# ---------------------------------------------------------------- chunks, clear, warm-up


def test_only_the_last_chunk_of_a_prefill_gives_a_token(mixed: House) -> None:
    before = mixed.counter("dropped_chunk")
    a = mixed.begin("a", prefill_chunk_info=[4, 4, 2])
    for _ in range(2):
        mixed.engine.step()
        assert mixed.read() == []
    assert mixed.counter("dropped_chunk") == before + 2
    mixed.engine.run(a)
    mixed.engine.step()
    [first] = mixed.read()
    assert first.outputs.token_ids == expected(a, 1)
    assert first.outputs.send_idx == 0


def test_clear_ends_everything_with_an_error_record(mixed: House) -> None:
    names = [f"r{i}" for i in range(ROWS)]
    admissions = [mixed.begin(name) for name in names]
    mixed.engine.step()
    mixed.pipe.preempt("r0")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            mixed.submit("late")
        except tp.TokenpipeError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: mixed.pipe.status()["waiting_submits"] == 1)
    mixed.pipe.clear()
    thread.join(20)
    assert isinstance(errors[0], tp.RequestAbortedError)
    outputs: list[tp.RequestOutput] = []
    wait_until(lambda: (outputs.extend(mixed.read()), sum(o.finished for o in outputs) == ROWS)[1])
    for a in admissions:
        assert tokens_of(outputs, a.request_id) == expected(a, 1)  # saved before: delivered
    finals = [o for o in outputs if o.finished]
    assert sorted(o.request_id for o in finals) == names
    assert {(o.finish_reason, o.error_code) for o in finals} == {("error", 500)}
    mixed.expect_live(ROWS)
    mixed.engine.obey()
    mixed.read()
    mixed.expect_live(0)
    mixed.submit("r0", timeout_s=0)  # the ids are free again


@pytest.mark.parametrize("end", ["length", "abort"])
def test_of_a_warm_up_request_only_the_end_is_told(mixed: House, end: str) -> None:
    before = mixed.counter("dropped_warm_up")
    delivered = mixed.counter("tokens_delivered")
    mixed.begin("warm", warm_up=True, max_tokens=4 if end == "length" else None)
    for _ in range(4):
        mixed.engine.step()
    outputs = mixed.read()
    assert mixed.counter("dropped_warm_up") == before + 4
    assert mixed.counter("tokens_delivered") == delivered
    if end == "abort":
        assert outputs == []
        assert mixed.pipe.abort("warm") == {"warm": True}
        outputs = mixed.read_until_final("warm")
    [final] = outputs
    assert (final.finish_reason, final.outputs.token_ids) == (end, [])


def _request_metrics(pipe: tp.Pipeline) -> dict[str, float]:
    """The ends with a result, and how many observations each histogram of requests has."""
    with urllib.request.urlopen(pipe.health_url.removesuffix("/health") + "/metrics") as answer:
        text = answer.read().decode()
    kept = re.findall(r"^(tokenpipe_completions_total|fastdeploy:\S+_count) (\S+)$", text, re.M)
    return {name: float(value) for name, value in kept if "saved_to" not in name}


@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_warm_up_request_is_no_completion_and_in_no_histogram(mixed: House, end: str) -> None:
    def run(name: str, **more: Any) -> None:
        now = time.time()
        metrics = tp.RequestMetrics(
            arrival_time=now - 3, preprocess_end_time=now - 2, inference_start_time=now - 1
        )
        more["metrics"] = metrics
        a = mixed.begin(name, max_tokens=3 if end == "length" else None, **more)
        for position in range(3):
            mixed.engine.step(end=a.row if end == "stop" and position == 2 else None)
        [final] = [o for o in mixed.read() if o.finished]
        assert final.finish_reason == end
        mixed.engine.obey()

    before = _request_metrics(mixed.pipe)
    assert len(before) == 9
    run("warm", warm_up=True)
    assert _request_metrics(mixed.pipe) == before
    run("real")
    after = _request_metrics(mixed.pipe)
    assert after["tokenpipe_completions_total"] == before["tokenpipe_completions_total"] + 1
    assert [n for n in before if after[n] <= before[n]] == []  # the comparison says something


# ---------------------------------------------------------------- who is blamed


@pytest.mark.parametrize(
    "left", [pytest.param("parked", marks=pytest.mark.full), "preempted", "ended"]
)
def test_the_engine_is_not_blamed_when_no_row_that_is_left_runs(left: str) -> None:
    with contextlib.closing(House(role="prefill", stall_timeout_s=0.4)) as house:
        house.begin("a", disaggregate_info={})
        wait_until(lambda: house.pipe.health()["role"] == "engine", describe=house.pipe.health)
        match left:
            case "parked":
                house.engine.step()
                assert house.read()[-1].finish_reason == "stop"  # and nobody says prefill_done
            case "preempted":
                house.pipe.preempt("a")
                house.engine.obey()
            case "ended":
                house.pipe.abort("a")  # and the engine never acknowledges
                house.read_until_final("a")

        def verdict() -> tuple[str, str | None]:
            health = house.pipe.health()
            return health["state"], health["role"]

        def turns() -> int:
            return int(house.pipe.status()["roles"]["reader"]["turns"])

        wait_until(lambda: verdict() == ("running", None), describe=house.pipe.health)
        seen: Counter[tuple[str, str | None]] = Counter()
        begun = turns()
        while turns() <= begun + 50:  # at least 1 s, more than twice the limit
            seen[verdict()] += 1
        assert set(seen) == {("running", None)}
        assert house.live() == 1
        with urllib.request.urlopen(house.pipe.health_url) as answer:
            assert answer.status == 200


# ---------------------------------------------------------------- anything, in any order


@pytest.mark.parametrize("seed", [1])
def test_random_operations_over_real_processes(mixed: House, seed: int) -> None:
    _run_at_random(mixed, seed, 200)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
def test_random_operations_over_real_processes_many_times(mixed: House, seed: int) -> None:
    _run_at_random(mixed, seed, 1500)


def _run_at_random(house: House, seed: int, count: int) -> None:
    rng = random.Random(seed)
    lives: dict[str, tuple[tp.Admission, int | None]] = {}
    got: dict[str, list[int]] = defaultdict(list)
    finals: dict[str, str] = {}
    preempted: set[str] = set()
    held: dict[str, set[int]] = {}
    refusals = (
        tp.NoFreeRowError,
        tp.NoFreeBlocksError,
        tp.NotAcknowledgedError,
        tp.UnknownRequestError,
        tp.NotEnoughBlocksError,
    )

    def read(outputs: list[tp.RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in finals
            got[name] += output.outputs.token_ids
            if output.finished:
                finals[name] = str(output.finish_reason)
                held.pop(name, None)

    def submit(number: int) -> None:
        name = f"{seed}-{number}"
        limit = rng.choice([None, 1, 5, 20])
        a = house.begin(name, timeout_s=0, max_tokens=limit, num_blocks=rng.randrange(6))
        lives[name] = (a, limit)
        held[name] = set(a.block_ids)

    def resume(name: str) -> None:
        if name in preempted:
            house.pipe.resume(name, timeout_s=0)
            preempted.discard(name)
            house.engine.go_on(lives[name][0], rng.randrange(4))

    def act(number: int) -> None:
        name = rng.choice([*lives, "nobody"])
        what = rng.choice(OPERATIONS)
        if what == "submit":
            submit(number)
        elif what == "step" and house.engine.batch:
            house.engine.step()
        elif what == "abort":
            house.pipe.abort(name)
        elif what == "preempt":
            house.pipe.preempt(name)
        elif what == "resume":
            resume(name)
        elif what == "grow":
            held.setdefault(name, set()).update(house.pipe.grow(name, 2, timeout_s=0))
        elif what == "obey":
            house.engine.obey()
            preempted.update(
                n for n, (a, _) in lives.items() if (a.row, a.generation) in house.engine.let_go
            )
        elif what == "read":
            read(house.read())
        elif what == "clear" and rng.random() < 0.2:
            house.pipe.clear()

    for number in range(count):
        try:
            act(number)
        except refusals:
            continue
        finally:
            if house.engine.writer.num_steps % 8 == 0:
                read(house.read())
    house.pipe.abort()

    def all_have_ended() -> bool:
        read(house.read())
        house.engine.obey()
        return len(finals) == len(lives)

    wait_until(all_have_ended)
    for name, (a, limit) in lives.items():
        assert got[name] == expected(a, len(got[name])), name
        if finals[name] == "length":
            assert len(got[name]) == limit
    assert len(lives) > count // 20


def test_an_id_is_taken_until_its_first_token_is_answered(prefill: House) -> None:
    prefill.begin("a", disaggregate_info={"to": 1})
    prefill.engine.step()
    assert prefill.read_until_final("a")
    with pytest.raises(tp.DuplicateRequestError):
        prefill.submit("a")
    assert prefill.pipe.prefill_done("a") is True
    [(_info, output)] = prefill.sent
    assert output.error_code == 200


def test_a_first_token_that_nobody_can_answer_any_more_is_handed_on_as_failed() -> None:
    house = House(role="prefill")
    try:
        house.begin("a", disaggregate_info={"to": 1})
        house.engine.step()
        assert house.read_until_final("a")
        assert house.sent == []
    finally:
        house.engine.writer.close()
        house.pipe.close()
    [(_info, output)] = house.sent
    assert output.error_code == 501
    assert output.outputs.token_ids


def test_finals_of_a_pipeline_that_is_lost_know_how_far_their_requests_were(
    unique_name: str,
) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=4, max_restarts=0, num_decoders=1)
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as engine:
        adm = pipe.submit(tp.Request("a", [1]))
        pipe.submit(tp.Request("late", [1], num_emitted_tokens=5))
        for token in (7, 8, 9):
            engine.save_output([token], step=engine.begin_step([adm.generation], rows=[adm.row]))
        pipe.sync(timeout_s=20)
        assert sum(batch.num_tokens for batch in pipe.batches(timeout_s=0)) == 3
        for name, pid in pipe.pids.items():
            if name != "coordinator":
                os.kill(pid, signal.SIGKILL)
        ends = {}
        for batch in pipe.batches(timeout_s=20):
            for i, name in enumerate(batch.request_ids):
                ends[name] = int(batch.send_idx[i]), bool(batch.first_token_ns[i])
        assert ends == {"a": (3, True), "late": (5, False)}
