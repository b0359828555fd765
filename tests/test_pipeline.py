"""The whole pipeline over real processes: what a client gets is what the engine saved."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, token_of

import tokenpipe as tp
from support import wait_until

ROWS = 8


each_split = pytest.mark.parametrize("num_decoders", [1, 2, 3], ids=lambda n: f"{n}-decoders")


@pytest.fixture
def num_decoders() -> int:
    return 2


@pytest.fixture
def pipe(num_decoders: int, unique_name: str) -> Iterator[tp.Pipeline]:
    config = tp.PipelineConfig(
        name=unique_name,
        max_num_seqs=ROWS,
        top_logprobs=4,
        num_decoders=num_decoders,
        ring_slots=8,
        output_slots=8,
        source_slots=4,
        num_blocks=32,
        block_size=64,
        abort_timeout_s=600,
    )
    with tp.Pipeline(config) as pipe:
        yield pipe
        check_all_is_free(pipe)


def check_all_is_free(pipe: tp.Pipeline) -> None:
    """Invariants I1 and I3: what was saved is delivered or counted, what was given out is back."""
    status = pipe.status()
    counters = status["counters"]
    dropped = sum(v for name, v in counters.items() if name.startswith("dropped_"))
    assert counters["tokens_seen"] == counters["tokens_delivered"] + dropped
    if not status["rows"]["live"]:
        assert status["blocks"]["free"] == status["blocks"]["of"]


def request(name: str, **more: Any) -> tp.Request:
    return tp.Request(name, **{"prompt_token_ids": [1], "eos_token_ids": [2], **more})


def read_all(pipe: tp.Pipeline, timeout_s: float = 0.0, **kwargs: Any) -> list[tp.RequestOutput]:
    outputs: list[tp.RequestOutput] = []
    for batch in pipe.batches(timeout_s=timeout_s, **kwargs):
        outputs.extend(batch)
    return outputs


def by_request(outputs: list[tp.RequestOutput]) -> dict[str, list[tp.RequestOutput]]:
    found: dict[str, list[tp.RequestOutput]] = defaultdict(list)
    for output in outputs:
        found[output.request_id].append(output)
    return found


def tokens_of(outputs: list[tp.RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.outputs.token_ids]


@each_split
def test_every_token_arrives_once_in_order_by_value(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    admissions = {f"r{i}": pipe.submit(request(f"r{i}", max_tokens=5 + i)) for i in range(ROWS)}
    for admission in admissions.values():
        engine.run(admission)
    outputs: list[tp.RequestOutput] = []
    for _ in range(5 + ROWS):
        engine.step()
        engine.obey()
        pipe.sync()
        outputs += read_all(pipe)
    for name, got in by_request(outputs).items():
        a = admissions[name]
        expected = [token_of(a.row, a.generation, p) for p in range(5 + a.row)]
        assert tokens_of(got) == expected, name
        assert [o.outputs.send_idx for o in got] == list(range(len(expected)))
        assert [o.finished for o in got] == [False] * (len(got) - 1) + [True]
        assert got[-1].finish_reason == "length"
    wait_until(lambda: pipe.status()["rows"]["live"] == 0)
    engine.writer.close()


def test_candidates_arrive_bit_for_bit(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS, width=5)
    for i in range(ROWS):
        engine.run(pipe.submit(request(f"r{i}", max_tokens=3)))
    for width in (5, 1, 3):  # the width may change from step to step
        engine.width = width
        engine.step()
        pipe.sync()
        seen = 0
        for batch in pipe.batches(timeout_s=0):
            tokens = np.array(
                [
                    token_of(int(r), 1, int(s))
                    for r, s in zip(batch.row, batch.send_idx, strict=True)
                ]
            )
            assert (batch.token_ids == tokens).all()
            assert (batch.topk_ids == tokens[:, None] + np.arange(width)).all()
            expected = -(tokens[:, None] % 97 + np.arange(width)).astype(np.float32)
            assert batch.topk_logprobs.tobytes() == expected.tobytes()
            assert (batch.ranks == tokens % 50 + 1).all()
            seen += len(batch)
        assert seen == ROWS
    engine.writer.close()


def test_an_end_token_ends_the_request_and_frees_its_row(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    first = pipe.submit(request("a", eos_token_ids=[7, 9], num_blocks=3))
    assert len(set(first.block_ids)) == 3
    engine.run(first)
    engine.end_at[first.row] = (2, 9)
    for _ in range(4):  # the engine hears of the end one step too late
        engine.step()
    pipe.sync()
    outputs = read_all(pipe)
    assert tokens_of(outputs) == [token_of(first.row, 1, 0), token_of(first.row, 1, 1), 9]
    assert outputs[-1].finish_reason == "stop"
    assert pipe.status()["counters"]["dropped_finished"] == 1
    assert pipe.status()["rows"]["live"] == 0
    assert [(e.row, e.generation, e.kind) for e in engine.obey()] == [(first.row, 1, "finished")]
    engine.writer.close()


@each_split
def test_a_token_of_the_former_request_never_reaches_its_successor(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    old = pipe.submit(request("old", max_tokens=1), row=3)
    in_flight = engine.writer.begin_step(np.full(ROWS, old.generation))
    engine.run(old)
    engine.step()
    pipe.sync()
    new = pipe.submit(request("new"), row=3)
    assert new.generation == old.generation + 1
    engine.writer.save_output(np.full(ROWS, 55), step=in_flight)  # composed before old's end
    engine.drop(3)
    engine.step()  # a padded row
    engine.run(new)
    engine.step()
    pipe.sync()
    got = by_request(read_all(pipe))
    assert tokens_of(got["old"]) == [token_of(3, 1, 0)]
    assert tokens_of(got["new"]) == [token_of(3, 2, 0)]
    counters = pipe.status()["counters"]
    assert counters["dropped_stale"] == 1
    engine.writer.close()


def test_an_abort_gives_its_final_at_once_and_the_row_at_the_acknowledgement(
    pipe: tp.Pipeline,
) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    a = pipe.submit(request("a", num_blocks=4))
    b = pipe.submit(request("b"))
    engine.run(a)
    engine.run(b)
    engine.step()
    pipe.sync()
    read_all(pipe)
    assert pipe.abort(["a", "nobody"]) == {"a": True, "nobody": False}
    [final] = wait_until(lambda: read_all(pipe))
    assert (final.request_id, final.finish_reason, final.finished) == ("a", "abort", True)
    assert final.outputs.token_ids == []
    assert (final.error_code, final.error_msg) == (200, "Aborted")
    engine.step()  # still running in the engine: dropped, and the other goes on
    pipe.sync()
    assert tokens_of(read_all(pipe)) == [token_of(b.row, 1, 1)]
    assert pipe.status()["rows"]["live"] == 2
    assert pipe.status()["blocks"]["free"] == 32 - 4 - 1
    assert [e.kind for e in engine.obey()] == ["abort"]
    pipe.sync()
    assert pipe.status()["rows"]["live"] == 1
    assert pipe.status()["blocks"]["free"] == 31
    pipe.abort("b")
    engine.obey()
    pipe.sync()
    engine.writer.close()


@each_split
def test_tokens_saved_before_an_abort_are_delivered(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    a = pipe.submit(request("a"))
    engine.run(a)
    for _ in range(4):
        engine.step()
    pipe.abort("a")
    engine.step()
    outputs: list[tp.RequestOutput] = []
    wait_until(lambda: (outputs.extend(read_all(pipe)), outputs and outputs[-1].finished)[1])
    assert tokens_of(outputs) == [token_of(a.row, 1, p) for p in range(4)]
    engine.obey()
    pipe.sync()
    engine.writer.close()


def test_a_recovery_row_ends_with_the_text_of_the_seed(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    a = pipe.submit(request("a"))
    engine.run(a)
    states = np.zeros(ROWS, np.uint8)
    states[a.row] = 2
    engine.step(states)
    pipe.sync()
    [final] = read_all(pipe)
    assert final.finish_reason == "recovery"
    assert final.error_msg == "Recover is not supported, the result is incomplete!"
    assert final.outputs.token_ids == []
    engine.writer.close()


@each_split
def test_by_step_gives_whole_steps_in_row_order(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS, width=2)
    for i in range(ROWS):
        engine.run(pipe.submit(request(f"r{i}", max_tokens=3)))
    for _ in range(3):
        engine.step()
        engine.obey()
    pipe.sync()
    steps = []
    for batch in pipe.batches(timeout_s=0, by_step=True):
        assert batch.row.tolist() == list(range(ROWS))
        assert batch.request_ids == [f"r{i}" for i in range(ROWS)]
        assert (batch.topk_ids[:, 1] == batch.token_ids + 1).all()
        steps.append(batch.step)
    assert steps == [0, 1, 2]
    engine.writer.close()


def test_by_step_does_not_hold_back_an_abort(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    engine.run(pipe.submit(request("a")))
    pipe.abort("a")
    outputs = wait_until(lambda: read_all(pipe, by_step=True))
    assert outputs[0].finish_reason == "abort"
    engine.obey()
    pipe.sync()
    engine.writer.close()


def test_requests_wait_for_a_row_first_come_first_served(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    for i in range(ROWS):
        engine.run(pipe.submit(request(f"r{i}", max_tokens=1 + i)))
    with pytest.raises(tp.NoFreeRowError, match=r"'late'.*8 rows") as refused:
        pipe.submit(request("late"), timeout_s=0)
    assert refused.value.request_id == "late"
    admitted: list[tp.Admission] = []
    threads = []
    for i in range(3):
        name = f"w{i}"
        thread = threading.Thread(target=lambda n=name: admitted.append(pipe.submit(request(n))))
        thread.start()
        threads.append(thread)
        wait_until(lambda i=i: pipe.status()["waiting_submits"] == i + 1)
    for i in range(3):
        engine.step()
        engine.obey()
        pipe.sync()
        read_all(pipe)
        wait_until(lambda i=i: len(admitted) == i + 1)
    for thread in threads:
        thread.join()
    assert [a.request_id for a in admitted] == ["w0", "w1", "w2"]
    assert [a.row for a in admitted] == [0, 1, 2]
    engine.writer.close()


def test_a_wanted_row_waits_for_its_former_request(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    engine.run(pipe.submit(request("a", max_tokens=1), row=5))
    with pytest.raises(tp.RowBusyError, match="row 5"):
        pipe.submit(request("b"), row=5, timeout_s=0)
    engine.step()
    assert pipe.submit(request("b"), row=5).generation == 2
    engine.writer.close()


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(pipe: tp.Pipeline) -> None:
    with pytest.raises(tp.NotEnoughBlocksError, match=r"33 blocks wanted, the pool has 32"):
        pipe.submit(request("a", num_blocks=33))
    with pytest.raises(tp.NotEnoughBlocksError, match=r"33 blocks wanted"):
        pipe.submit(request("a", prompt_token_ids=[1] * (32 * 64 + 1)))
    with pytest.raises(tp.InvalidRequestError, match=r"row = 8.*0 to max_num_seqs - 1 = 7"):
        pipe.submit(request("a"), row=8)
    with pytest.raises(tp.InvalidRequestError, match="prompt_token_ids"):
        pipe.submit(tp.Request("a"))
    with pytest.raises(tp.InvalidRequestError, match=r"129 bytes, at most 128"):
        pipe.submit(request("x" * 129))
    with pytest.raises(tp.InvalidRequestError, match=r"17 ids, max_eos_ids is 16"):
        pipe.submit(request("a", eos_token_ids=list(range(17))))
    assert pipe.submit(request("a", num_blocks=32)).block_ids


def test_an_id_is_free_again_once_its_final_is_out(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    engine.run(pipe.submit(request("same", max_tokens=1)))
    with pytest.raises(tp.DuplicateRequestError, match="'same'"):
        pipe.submit(request("same"))
    engine.step()
    [final] = wait_until(lambda: read_all(pipe))
    assert final.finished
    again = pipe.submit(request("same", max_tokens=1))
    assert again.request_id == "same"
    pipe.abort("same")
    wait_until(lambda: read_all(pipe))
    pipe.submit(request("same"))  # its former row still waits for the acknowledgement
    engine.writer.close()


def test_an_abort_reaches_a_request_that_waits_for_a_row(pipe: tp.Pipeline) -> None:
    for i in range(ROWS):
        pipe.submit(request(f"r{i}"))
    errors: list[Exception] = []

    def submit() -> None:
        try:
            pipe.submit(request("waiting"))
        except tp.TokenpipeError as e:
            errors.append(e)

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: pipe.status()["waiting_submits"] == 1)
    assert pipe.abort("waiting") == {"waiting": True}
    thread.join()
    assert isinstance(errors[0], tp.RequestAbortedError)
    assert pipe.status()["waiting_submits"] == 0


@each_split
def test_a_full_ring_holds_the_engine_back_and_loses_nothing(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    a = pipe.submit(request("a", max_tokens=100))
    engine.run(a)
    thread = threading.Thread(target=lambda: [engine.step() for _ in range(100)])
    thread.start()
    # 8 frames + 8 slots + 4 steps of the source: the engine stands long before 100.
    wait_until(lambda: pipe.status()["source"]["occupancy"] == 4)
    wait_until(lambda: pipe.status()["ring"]["occupancy"] == 8)
    wait_until(lambda: any(r.get("unread_frames") == 8 for r in pipe.status()["roles"].values()))
    with pytest.raises(tp.SyncTimeoutError, match="client") as stuck:
        pipe.sync(timeout_s=0)
    assert stuck.value.stage == "client"
    assert thread.is_alive()
    outputs: list[tp.RequestOutput] = []
    for batch in pipe.batches(timeout_s=20):
        outputs.extend(batch)
        if batch.num_finals:
            break
    thread.join()
    assert tokens_of(outputs) == [token_of(a.row, 1, p) for p in range(100)]
    assert pipe.status()["source"]["blocked_s"] > 0
    engine.writer.close()


def test_streams_give_each_request_its_own_outputs(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS)
    stop = threading.Event()

    def run_engine() -> None:
        while not stop.is_set():
            if engine.generation.any():
                engine.step()
            for event in engine.obey():
                assert event.kind in ("finished", "abort")
            stop.wait(0.001)

    async def read(name: str, limit: int) -> list[int]:
        adm = await pipe.submit_async(request(name, max_tokens=limit))
        engine.run(adm)
        got = []
        async for output in pipe.stream(name):
            got += output.outputs.token_ids
        assert got == [token_of(adm.row, adm.generation, p) for p in range(limit)], name
        return got

    async def abandon() -> None:
        engine.run(await pipe.submit_async(request("left", max_tokens=100000)))
        stream = pipe.stream("left")
        async for _output in stream:
            break
        await stream.aclose()

    async def main() -> None:
        lengths = await asyncio.gather(*(read(f"r{i}", 3 + i) for i in range(12)), abandon())
        assert [len(g) for g in lengths[:12] if g is not None] == [3 + i for i in range(12)]

    thread = threading.Thread(target=run_engine)
    thread.start()
    try:
        asyncio.run(main())
        # An abandoned stream aborts its request, so all rows come back.
        wait_until(lambda: pipe.status()["rows"]["live"] == 0, describe=pipe.status)
    finally:
        stop.set()
        thread.join()
    with pytest.raises(tp.DeliveryModeError, match="streams"):
        pipe.batches()
    engine.writer.close()


def test_a_second_stream_of_a_request_is_refused_and_harms_nobody(pipe: tp.Pipeline) -> None:
    async def main() -> None:
        with pipe.engine_writer() as engine:
            adm = await pipe.submit_async(request("a", max_tokens=3))
            first = pipe.stream("a")
            reading = asyncio.create_task(anext(first))
            await asyncio.sleep(0)  # it has begun
            with pytest.raises(tp.StreamTakenError, match="'a'"):
                await anext(pipe.stream("a"))
            for token in (5, 6, 7):
                engine.save_output(
                    [token], step=engine.begin_step([adm.generation], rows=[adm.row])
                )
            got = (await reading).outputs.token_ids
            async for output in first:
                got = got + output.outputs.token_ids
            assert got == [5, 6, 7]

    asyncio.run(main())


@pytest.mark.parametrize("limit", [float("nan"), "1", None])
def test_a_time_limit_that_is_no_number_is_named(pipe: tp.Pipeline, limit: Any) -> None:
    with pytest.raises(tp.TimeLimitError, match="timeout_s"):
        pipe.drain(limit)


def test_an_endless_time_limit_waits(pipe: tp.Pipeline) -> None:
    for row in range(ROWS):
        pipe.submit(request(f"r{row}"))
    found: list[tp.Admission] = []
    thread = threading.Thread(
        target=lambda: found.append(pipe.submit(request("late"), timeout_s=float("inf")))
    )
    thread.start()
    wait_until(lambda: pipe.status()["waiting_submits"] == 1, describe=pipe.status)
    with pipe.engine_writer() as engine:
        engine.save_output([2], step=engine.begin_step([1], rows=[3]))
        thread.join(20)
    assert [adm.row for adm in found] == [3]


def test_a_closed_handle_and_a_closed_writer_say_so(unique_name: str) -> None:
    with tp.Pipeline(tp.PipelineConfig(name=unique_name, max_num_seqs=2)) as pipe:
        writer = pipe.engine_writer()
        writer.close()
        for call in (writer.poll_control, lambda: writer.beat(busy=True)):
            with pytest.raises(tp.PipelineGoneError, match="closed"):
                call()
        with pytest.raises(tp.PipelineGoneError, match="closed"):
            writer.begin_step([1])
    for call in (pipe.status, pipe.health, pipe.sync):
        with pytest.raises(tp.PipelineGoneError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_ids", [2.5]),
        ("eos_token_ids", "ab"),
        ("eos_token_ids", 2),
        ("max_tokens", 1.5),
        ("max_tokens", 2**40),
        ("prompt_token_ids", None),
        ("num_blocks", "3"),
        ("request_id", "\ud800"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(field: str, value: Any) -> None:
    bad = request("a")
    setattr(bad, field, value)
    with pytest.raises(tp.InvalidRequestError) as caught:
        bad.check(tp.PipelineConfig())
    assert caught.value.field == field


def test_an_id_that_cannot_be_is_answered_as_unknown(pipe: tp.Pipeline) -> None:
    assert pipe.abort(["x" * 5000, "\ud800"]) == {"x" * 5000: False, "\ud800": False}
    with pytest.raises(tp.InvalidRequestError, match="num_blocks"):
        pipe.grow("a", 2.5)  # type: ignore[arg-type]


def test_a_handle_delivers_one_way_only(pipe: tp.Pipeline) -> None:
    read_all(pipe)

    async def first() -> None:
        async for _ in pipe.stream("a"):
            pass

    with pytest.raises(tp.DeliveryModeError, match="batches"):
        asyncio.run(first())


def test_echoed_fields_come_back(pipe: tp.Pipeline) -> None:
    engine = FakeEngine(pipe.engine_writer(), ROWS, width=3)
    engine.run(
        pipe.submit(
            tp.Request(
                "a",
                prompt_token_ids=[1, 2, 3],
                max_tokens=3,
                prompt=[{"role": "user"}],
                num_cached_tokens=2,
                multimodal_inputs={"num_input_image_tokens": 4, "num_input_video_tokens": 5},
                ic_req_data={"x": 1},
                trace_carrier={"root": "r"},
            )
        )
    )
    for _ in range(3):
        engine.step()
    pipe.sync()
    first, second, last = read_all(pipe)
    assert (first.prompt, second.prompt) == ([{"role": "user"}], None)
    assert [o.outputs.send_idx for o in (first, second, last)] == [0, 1, 2]
    assert last.finish_reason == "length"
    assert (first.prompt_token_ids_len, first.num_cached_tokens) == (3, 2)
    assert (first.num_input_image_tokens, first.num_input_video_tokens) == (4, 5)
    assert (first.ic_req_data, first.trace_carrier) == ({"x": 1}, None)
    assert last.trace_carrier == {"root": "r"}
    token = token_of(0, 1, 0)
    assert first.outputs.token_ids == [token]
    assert first.outputs.top_logprobs == (
        [[token, token + 1, token + 2]],
        [[-float(token % 97 + i) for i in range(3)]],
        [token % 50 + 1],
    )
    assert first.outputs.logprob == -float(token % 97)
    assert type(first.outputs.token_ids[0]) is int
    assert type(first.outputs.logprob) is float
    engine.writer.close()


def test_the_next_client_gets_the_batch_in_hand_again(unique_name: str) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=2, num_decoders=1)
    with tp.Pipeline(config) as owner:
        engine = FakeEngine(owner.engine_writer(), 2)
        engine.run(owner.submit(request("a", max_tokens=4)))
        engine.run(owner.submit(request("b", max_tokens=2)))
        for _ in range(3):
            engine.step()
        owner.sync()
        batches = owner.batches(timeout_s=0)
        first = next(batches)
        assert first.number == 0
        first.release()
        in_hand = next(batches)
        assert in_hand.number == 1
        with pytest.raises(tp.PartyExistsError, match="client"):
            tp.Pipeline.attach(unique_name)
        owner._segment.close()  # as the kernel would at this client's death: its lock is free
        with tp.Pipeline.attach(unique_name) as successor:
            again = list(successor.batches(timeout_s=0))
            assert [b.number for b in again] == [1, 2]
        engine.writer.close()
