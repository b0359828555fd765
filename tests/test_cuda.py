"""The CUDA output ops on a machine without a GPU: the kernel's CPU form behind the fake driver.

What a save on the device leaves in a slot is compared with an oracle in numpy and, byte for byte,
with what the CPU's save ops leave there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import ROOT, FakeCuda, OnCuda
from hypothesis import given
from hypothesis import strategies as st
from steps import INT32, OPS, expected_columns, laid_out, num_tokens, random_batch
from test_writer import Stage, in_one_segment

import tokenpipe as tp
from support import wait_until
from tokenpipe import _native, cli, cuda
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import CudaError, SyncTimeoutError
from tokenpipe.ops import sysv
from tokenpipe.ops.shm import ShmOps
from tokenpipe.segment import Segment

Array = np.ndarray[Any, Any]

ROWS, TOP, SLOTS, DEPTH, FLOATS = 40, 6, 4, 5, 9  # rows: five blocks of the kernel
NOT_NEED_STOP, WAIT_INPUT, WATCHDOG_S = 4, 1, 30
ILLEGAL_ADDRESS = 700


@pytest.fixture
def segment(unique_name: str) -> Iterator[Segment]:
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
    with Segment.create(config) as made:
        yield made


@pytest.fixture
def stage(fake: FakeCuda, segment: Segment) -> Iterator[Stage]:
    made = Stage(segment)
    with made.engine:
        yield made


@pytest.fixture
def stream(fake: FakeCuda) -> int:
    return fake.make_stream()


# --- what is saved arrives


def place(array: Array, layout: str, bfloat16: bool) -> OnCuda:
    """A tensor on the fake device."""
    return OnCuda(laid_out(array, layout, lambda made: made), bfloat16=bfloat16)


@pytest.mark.parametrize("op", OPS)
@in_one_segment
@given(seed=st.integers(0, 2**32), order=st.integers(0, 200))
def test_the_device_packs_what_the_oracle_and_the_cpu_pack(
    op: str, stage: Stage, fake: FakeCuda, stream: int, seed: int, order: int
) -> None:
    batch = random_batch(op, np.random.default_rng(seed), stage.segment.config.sizes())
    fake.set_order(order)
    stage.take_all()
    getattr(stage.engine, op)(**batch.on_cpu())
    from_cpu = stage.step()
    stage.take_all()
    getattr(stage.engine, op)(**batch.on_gpu(place), stream=stream)
    stage.engine.flush()
    found, expected = stage.step(), expected_columns(batch)
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column, name)
    assert found["source_sequence"] == from_cpu["source_sequence"] + 1
    assert found["saved_tokens"] - from_cpu["saved_tokens"] == num_tokens(batch, expected)
    for name in set(found) - {"source_sequence", "saved_tokens", "saved_ns"}:
        of_cpu, of_device = np.asarray(from_cpu[name]), np.asarray(found[name])
        assert of_device.tobytes() == of_cpu.tobytes(), f"{name}, byte for byte"


@pytest.mark.parametrize("with_topk", [False, True])
@in_one_segment
@given(seed=st.integers(0, 2**32), order=st.integers(0, 200))
def test_first_tokens_are_packed_on_the_device_as_the_cpu_s_op_composes_them(
    with_topk: bool, stage: Stage, fake: FakeCuda, stream: int, seed: int, order: int
) -> None:
    random = np.random.default_rng(seed)
    n, width = int(random.integers(ROWS, endpoint=True)), int(random.integers(1, TOP + 1))
    depth = int(random.integers(2, DEPTH, endpoint=True))
    given = {"tokens": random.integers(0, INT32, (n, depth))}
    op = stage.engine.mtp_save_first_token
    if with_topk:
        op = stage.engine.mtp_save_first_token_with_topk
        given |= {
            "token_num": random.integers(0, depth, n),
            "topk_ids": random.integers(0, INT32, (n, width)),
            "logprobs": random.standard_normal((n, width), np.float32),
            "ranks": random.integers(0, INT32, n),
        }
    else:
        given["step_idx"] = random.integers(-1, 4, n)
    columns = {
        "generations": random.integers(0, 3, n),
        "rows": random.permutation(ROWS)[:n],
        "states": random.integers(0, 4, n).astype(np.uint8),
    }
    fake.set_order(order)
    stage.take_all()
    op(**given, **columns)
    from_cpu = stage.step()
    stage.take_all()
    on_device = {
        name: place(array, str(random.choice(["contiguous", "every second", "transposed"])), False)
        for name, array in given.items()
    }
    op(**on_device, **columns, stream=stream)
    stage.engine.flush()
    found = stage.step()
    for name in set(found) - {"source_sequence", "saved_tokens", "saved_ns"}:
        of_cpu, of_device = np.asarray(from_cpu[name]), np.asarray(found[name])
        assert of_device.tobytes() == of_cpu.tobytes(), f"{name}, byte for byte"
    saved = [step["saved_tokens"] for step in (from_cpu, found)]
    assert saved[1] - saved[0] == found["num_tokens"]


@pytest.mark.parametrize("width", [0, 3])
@in_one_segment
@given(seed=st.integers(0, 2**32), order=st.integers(0, 200))
def test_fastdeploy_s_values_are_packed_on_the_device_as_its_ops_on_the_cpu_save_them(
    width: int, stage: Stage, fake: FakeCuda, stream: int, seed: int, order: int
) -> None:
    random = np.random.default_rng(seed)
    n = int(random.integers(ROWS, endpoint=True))
    x = random.choice([7, INT32, -1, -2, -3, -9], (n, 1))
    candidates = (
        random.integers(0, INT32, (n, width)),
        random.standard_normal((n, width), np.float32),
        random.integers(0, INT32, n),
    )
    marks = random.integers(0, 2, (ROWS, 1)).astype(np.int32) if random.integers(2) else None
    ops = ShmOps(stage.engine)
    step = ops.begin_step(random.integers(0, 3, n), random.permutation(ROWS)[:n])
    op, more = (ops.save_output_topk, candidates) if width else (ops.save_output, ())
    fake.set_order(order)
    found = []
    for where in (lambda array: array, OnCuda):
        stage.take_all()
        op(where(x), *(where(a) for a in more), True, marks, step=step, stream=stream)
        stage.engine.flush()
        found.append(stage.step())
    from_cpu, from_device = found
    for name in set(from_device) - {"source_sequence", "saved_tokens", "saved_ns"}:
        of_cpu, of_device = np.asarray(from_cpu[name]), np.asarray(from_device[name])
        assert of_device.tobytes() == of_cpu.tobytes(), f"{name}, byte for byte"


def test_first_tokens_that_cannot_be_are_told_by_their_element(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    tokens, ids = np.full((9, 3), 7), np.full((9, 2), 5)
    scores, num = np.zeros((9, 2), np.float32), np.ones(9, int)
    for change, told in (
        ((tokens, (8, 1), BIG), r"tokens holds 2147483648 \(element 25\)"),
        ((ids, (8, 1), BIG), r"topk_ids holds 2147483648 \(element 49\)"),
        ((num, 8, 3), r"accept_num holds 3 \(element 8\)"),
        ((num, 8, INT32), r"accept_num holds 2147483647 \(element 8\)"),
    ):
        array, at, bad = change
        good, array[at] = array[at], bad
        given = [OnCuda(a) for a in (tokens, num, ids, scores, num)]
        stage.engine.mtp_save_first_token_with_topk(
            *given, generations=np.ones(9, int), stream=stream
        )
        with pytest.raises(tp.OpArgumentError, match=told):
            stage.engine.flush()
        array[at] = good
        stage.take_all()
    with pytest.raises(tp.OpArgumentError, match=r"topk_ids is int64\[9, 1, 2\]"):
        stage.engine.mtp_save_first_token_with_topk(
            *(OnCuda(a) for a in (tokens, num, ids[:, None], scores, num)),
            generations=np.ones(9, int),
            stream=stream,
        )


def test_padding_columns_and_rows_behind_the_accepted_are_left_out(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    """Tensors of the full size, as an engine keeps them, of which a step uses a part."""
    tokens = np.full((ROWS, DEPTH), -1)
    ids, logprobs = np.full((ROWS, DEPTH, 21), -7), np.full((ROWS, DEPTH, 21), np.nan, np.float32)
    ranks = np.full((ROWS, DEPTH), -1)
    accept = np.array([2, 0, 1])
    for row, count in enumerate(accept):
        tokens[row, :count] = np.arange(count) + 10 * row
        ids[row, :count, :3] = np.arange(3)
        logprobs[row, :count, :3] = -row
        ranks[row, :count] = row
    stage.engine.speculate_save_output_topk(
        OnCuda(tokens[:3]),
        OnCuda(accept),
        OnCuda(ids[:3, :, :3]),
        OnCuda(logprobs[:3, :, :3]),
        OnCuda(ranks[:3]),
        generations=np.ones(3, int),
        stream=stream,
    )
    stage.engine.flush()
    step = stage.step()
    assert step["tokens"].tolist() == [0, 1, 20]
    assert step["topk_ids"].tolist() == [[0, 1, 2]] * 3
    assert step["logprobs"].tolist() == [[0.0] * 3, [0.0] * 3, [-2.0] * 3]
    assert step["ranks"].tolist() == [0, 0, 2]


def test_rows_without_a_token_may_hold_anything_negative(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    """A preempted row, one of a prefill chunk that is not the last, and a padded one."""
    states, generations = np.array([3, 1, 0, 0], np.uint8), np.array([1, 1, 0, 1])
    stage.engine.save_output(
        OnCuda(np.array([-9, -1, -5, 7])),
        generations=generations,
        states=OnCuda(states),
        stream=stream,
    )
    stage.engine.flush()
    step = stage.step()
    assert step["tokens"].tolist() == [-9, -1, -5, 7]
    assert step["states"].tolist() == states.tolist()
    assert step["saved_tokens"] == 2, "the padded row counts, as it does on the CPU"


def test_steps_of_both_forms_are_numbered_and_added_up(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    tokens, total = np.arange(9), 0
    for number in range(3 * SLOTS):
        stage.take_all()
        on_device = number % 3 != 1
        stage.engine.save_output(
            OnCuda(tokens) if on_device else tokens,
            generations=np.ones(9, int),
            stream=stream if on_device else None,
        )
        stage.engine.flush()
        total += 9
        step = stage.step()
        assert (step["source_sequence"], step["saved_tokens"]) == (number, total)
    assert _native.saved_tokens(stage.segment.source) == total


def test_the_largest_step_fits(fake: FakeCuda, stream: int, unique_name: str) -> None:
    n, depth, width = 600, 16, 21
    config = PipelineConfig(
        name=unique_name,
        max_num_seqs=n,
        top_logprobs=width - 1,
        num_decoders=1,
        ring_slots=2,
        source_slots=2,
        max_draft_tokens=depth,
    )
    with Segment.create(config) as segment:
        stage = Stage(segment)
        with stage.engine as engine:
            random = np.random.default_rng(5)
            ids = random.integers(0, INT32, (n, depth, width))
            logprobs = random.standard_normal((n, depth, width), np.float32)
            engine.speculate_save_output_topk(
                OnCuda(ids[:, :, 0].copy()),
                OnCuda(np.full(n, depth)),
                OnCuda(ids),
                OnCuda(logprobs),
                OnCuda(ids[:, :, 1].copy()),
                generations=np.ones(n, int),
                stream=stream,
            )
            engine.flush()
            step = stage.step()
    assert step["num_tokens"] == n * depth
    np.testing.assert_array_equal(step["topk_ids"], ids.reshape(-1, width))
    np.testing.assert_array_equal(step["logprobs"], logprobs.reshape(-1, width))
    np.testing.assert_array_equal(step["ranks"], ids[:, :, 1].reshape(-1))


# --- nothing waits, and all is in order


def test_a_save_returns_before_the_gpu_has_got_there(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    ones, kept = np.ones(3, int), [np.full(3, token) for token in range(SLOTS)]
    with fake.held():
        for tokens in kept:
            stage.engine.save_output(OnCuda(tokens), generations=ones, stream=stream)
        assert (stage.engine.num_steps, stage.published) == (SLOTS, 0)
        with pytest.raises(SyncTimeoutError):
            stage.engine.flush(timeout_s=0.0)
    stage.engine.flush()
    assert stage.published == SLOTS
    assert [int(stage.step(i)["tokens"][0]) for i in range(SLOTS)] == list(range(SLOTS))


def test_a_step_is_stamped_when_it_exists(stage: Stage, fake: FakeCuda, stream: int) -> None:
    with fake.held():
        stage.engine.save_output(
            OnCuda(np.ones(1, int)), generations=np.ones(1, int), stream=stream
        )
        called = _native.now_ns()
    stage.engine.flush()
    assert stage.step()["saved_ns"] >= called


def test_saves_in_several_streams_keep_their_order(stage: Stage, fake: FakeCuda) -> None:
    streams = [fake.make_stream() for _ in range(3)]
    kept = [np.full(2, token) for token in range(SLOTS)]
    with fake.held():
        for token, tokens in enumerate(kept):
            stage.engine.save_output(
                OnCuda(tokens),
                generations=np.ones(2, int),
                stream=streams[(2 - token) % 3],
            )
    stage.engine.flush()
    assert [int(stage.step(i)["tokens"][0]) for i in range(SLOTS)] == list(range(SLOTS))


def test_a_save_on_the_cpu_waits_for_those_before_it(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    ones, kept = np.ones(2, int), np.full(2, 7)

    def save_on_cpu() -> None:
        stage.engine.save_output(np.full(2, 8), generations=ones)

    with fake.held():
        stage.engine.save_output(OnCuda(kept), generations=ones, stream=stream)
        thread = threading.Thread(target=save_on_cpu)
        thread.start()
        assert stage.published == 0
    thread.join(WATCHDOG_S)
    assert [int(stage.step(i)["tokens"][0]) for i in range(2)] == [7, 8]


@pytest.mark.parametrize("by_stream", [False, True])
def test_who_publishes_decides_whether_a_sleeping_reader_is_woken(
    fake: FakeCuda, segment: Segment, stream: int, by_stream: bool
) -> None:
    engine = tp.EngineWriter.attach(segment.name, publish_by_stream=by_stream)
    stage = Stage.__new__(Stage)
    stage.segment, stage.plan, stage.engine = segment, segment.config.plan(), engine
    producer = _native.Producer(segment.core, 0.0)
    reader = _native.SourceReader(segment.source, segment.core, 0.0)
    assert producer.claim(0.0)
    done = threading.Event()

    def read() -> None:
        while not reader.get_output(producer, WATCHDOG_S):
            pass
        done.set()

    with engine:
        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: stage.head["reader_bell"]["waiting"] == WAIT_INPUT)
        engine.save_output(OnCuda(np.arange(3)), generations=np.ones(3, int), stream=stream)
        engine.flush()
        assert stage.published == 1
        assert int(stage.head["reader_bell"]["bell"]) == (0 if by_stream else 1)
        engine.save_output(np.arange(3), generations=np.ones(3, int))  # wakes it in any case
        thread.join(WATCHDOG_S)
    assert done.is_set()


def test_a_full_ring_holds_the_save_until_the_reader_has_taken_a_step(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    def save(token: int) -> None:
        stage.engine.save_output(
            OnCuda(np.full(1, token)), generations=np.ones(1, int), stream=stream
        )

    for token in range(SLOTS):
        save(token)
    stage.engine.flush()
    thread = threading.Thread(target=save, args=(SLOTS,))
    thread.start()
    wait_until(lambda: stage.head["writer_bell"]["waiting"] != 0)
    assert stage.published == SLOTS
    stage.take_all()
    thread.join(WATCHDOG_S)
    stage.engine.flush()
    assert stage.step()["tokens"].tolist() == [SLOTS]


# --- graphs


@pytest.mark.parametrize("by_stream", [False, True])
def test_a_captured_save_is_replayed_with_the_rows_of_each_step(
    fake: FakeCuda, segment: Segment, stream: int, by_stream: bool
) -> None:
    with tp.EngineWriter.attach(segment.name, publish_by_stream=by_stream) as engine:
        stage = Stage.__new__(Stage)
        stage.segment, stage.plan, stage.engine = segment, segment.config.plan(), engine
        tokens, states = np.zeros(12, np.int64), np.zeros(12, np.int32)
        ids = np.zeros((12, 3), np.int64)
        logprobs = np.zeros((12, 3), np.float16)
        given = [OnCuda(a) for a in (tokens, ids, logprobs, tokens)]
        warm_up = np.ones(12, int)
        engine.save_output_topk(*given, generations=warm_up, states=OnCuda(states), stream=stream)
        engine.flush()
        with fake.capture(stream):
            engine.save_output_topk(
                *given, generations=warm_up, states=OnCuda(states), stream=stream
            )
        assert (stage.published, engine.num_steps) == (1, 1), "a capture runs nothing"
        stage.take_all()
        for number in range(1, 2 * SLOTS):
            generations = np.arange(12 - number) + number
            rows = np.random.default_rng(number).permutation(ROWS)[: len(generations)]
            with fake.held():  # the scheduler may be ahead of the GPU
                engine.begin_step(generations, rows, replay_in=stream)
                tokens[:], states[:] = number, 0
                states[2] = 3
                ids[:] = tokens[:, None] + [0, 1, 2]
                fake.replay(stream)
            engine.flush()
            step = stage.step()
            assert step["source_sequence"] == number
            assert step["tokens"].tolist() == [number] * len(generations)
            assert step["rows"].tolist() == rows.tolist()
            assert step["generations"].tolist() == generations.tolist()
            assert step["states"][:3].tolist() == [0, 0, 3]
            np.testing.assert_array_equal(step["topk_ids"], ids[: len(generations)])
            stage.take_all()
        engine.save_output(OnCuda(np.full(2, 99)), generations=np.ones(2, int), stream=stream)
        engine.flush()
        assert stage.step()["tokens"].tolist() == [99, 99]


def test_replays_may_be_ahead_of_the_gpu(stage: Stage, fake: FakeCuda, stream: int) -> None:
    tokens = np.arange(5)
    stage.engine.save_output(OnCuda(tokens), generations=np.ones(5, int), stream=stream)
    stage.engine.flush()
    stage.take_all()
    with fake.capture(stream):
        stage.engine.save_output(OnCuda(tokens), generations=np.ones(5, int), stream=stream)
    with fake.held():
        for generation in range(2, 2 + SLOTS):
            stage.engine.begin_step(np.full(5, generation), replay_in=stream)
            fake.replay(stream)
    stage.engine.flush()
    found = [int(stage.step(i)["generations"][0]) for i in range(1, 1 + SLOTS)]
    assert found == list(range(2, 2 + SLOTS))


def test_a_capture_survives_whatever_else_a_writer_does_meanwhile(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    """In the mode in which PyTorch captures, CUDA ends a capture at an allocation or a query of any
    thread."""
    other, ones = fake.make_stream(), np.ones(2, int)

    def save_and_flush() -> None:
        stage.engine.save_output(OnCuda(np.full(2, 5)), generations=ones, stream=other)
        stage.engine.flush()
        stage.engine.save_output(np.full(2, 6), generations=ones)

    with fake.capture(stream):
        stage.engine.save_output(OnCuda(np.full(2, 7)), generations=ones, stream=stream)
        thread = threading.Thread(target=save_and_flush)
        thread.start()
        thread.join(WATCHDOG_S)
    stage.engine.begin_step(ones, replay_in=stream)
    fake.replay(stream)
    stage.engine.flush()
    assert [int(stage.step(i)["tokens"][0]) for i in range(3)] == [5, 6, 7]


@pytest.mark.parametrize("by_stream", [False, True])
def test_no_step_is_published_before_it_is_there(
    fake: FakeCuda, segment: Segment, stream: int, by_stream: bool
) -> None:
    """Saves and replays in turn, in two streams, one thing at a time."""
    other, n = fake.make_stream(), 3
    with tp.EngineWriter.attach(segment.name, publish_by_stream=by_stream) as engine:
        stage = Stage.__new__(Stage)
        stage.segment, stage.plan, stage.engine = segment, segment.config.plan(), engine
        tokens = [np.full(n, token) for token in range(SLOTS)]
        engine.save_output(OnCuda(tokens[0]), generations=np.ones(n, int), stream=stream)
        engine.flush()
        stage.take_all()
        for captured in (stream, other):
            with fake.capture(captured):
                engine.save_output(OnCuda(tokens[3]), generations=np.ones(n, int), stream=captured)
        for first, second in ((stream, stream), (stream, other), (other, stream)):
            begun = stage.published
            with fake.held():
                for number, in_stream in enumerate((first, second)):
                    saved = OnCuda(tokens[number])
                    engine.save_output(saved, generations=np.ones(n, int), stream=in_stream)
                    engine.begin_step(np.full(n, 2), replay_in=second)
                    fake.replay(second)
                seen = begun
                while seen < begun + 4:
                    fake.run(1)
                    assert seen <= stage.published
                    seen = stage.published
                    for number in range(begun, seen):
                        step = stage.step(number)
                        assert step["source_sequence"] == number
                        wanted = 3 if (number - begun) % 2 else (number - begun) // 2
                        assert step["tokens"].tolist() == [wanted] * n
            engine.flush()
            stage.take_all()


def test_a_replay_of_fewer_rows_than_were_begun_is_reported(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    tokens = OnCuda(np.arange(4))
    stage.engine.save_output(tokens, generations=np.ones(4, int), stream=stream)
    with fake.capture(stream):
        stage.engine.save_output(tokens, generations=np.ones(4, int), stream=stream)
    stage.engine.begin_step(np.ones(5, int), replay_in=stream)
    fake.replay(stream)
    with pytest.raises(tp.OpArgumentError, match="of as many rows or more"):
        stage.engine.flush()
    assert stage.step()["num_rows"] == 0


def test_a_replay_of_more_rows_than_there_are_is_refused(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    stage.engine.save_output(OnCuda(np.arange(4)), generations=np.ones(4, int), stream=stream)
    with pytest.raises(tp.OpArgumentError, match="41 rows, max_num_seqs is 40"):
        stage.engine.begin_step(np.ones(ROWS + 1, int), replay_in=stream)
    assert stage.engine.num_steps == 1


def test_a_step_that_is_begun_and_not_replayed_is_reported(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    tokens = OnCuda(np.arange(4))
    stage.engine.save_output(tokens, generations=np.ones(4, int), stream=stream)
    stage.engine.begin_step(np.ones(4, int), replay_in=stream)
    stage.engine.save_output(tokens, generations=np.ones(4, int), stream=stream)
    with pytest.raises(tp.OpArgumentError, match="begun last"):
        stage.engine.flush(timeout_s=1.0)
    fake.replay(stream)  # (nothing was captured)
    with fake.capture(stream):
        stage.engine.save_output(tokens, generations=np.ones(4, int), stream=stream)
    fake.replay(stream)
    with pytest.raises(tp.OpArgumentError, match="begun last"):
        stage.engine.flush()


def test_states_on_the_cpu_are_not_captured(stage: Stage, fake: FakeCuda, stream: int) -> None:
    with fake.capture(stream), pytest.raises(tp.OpArgumentError, match="states lies on the CPU"):
        stage.engine.save_output(
            OnCuda(np.arange(2)),
            generations=np.ones(2, int),
            states=np.zeros(2, np.uint8),
            stream=stream,
        )


def test_a_replay_needs_a_captured_save(stage: Stage, fake: FakeCuda, stream: int) -> None:
    with pytest.raises(tp.OpArgumentError, match="was captured yet"):
        stage.engine.begin_step(np.ones(2, int), replay_in=stream)


# --- bad values

BIG = 2**31
BAD_VALUES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tokens", {"tokens": np.array([1] * 30 + [BIG])}),
    ("tokens", {"tokens": np.array([1] * 30 + [-1])}),
    ("tokens", {"tokens": np.array([1] * 30 + [2**63], np.uint64)}),
    ("tokens", {"tokens": np.array([1] * 30 + [BIG], np.uint32)}),
    ("rows", {"rows": np.array([*range(30), ROWS])}),
    ("rows", {"rows": np.array([*range(30), -1])}),
    ("rows", {"rows": np.array([*range(30), -BIG - 1])}),
    ("generations", {"generations": np.array([1] * 30 + [-1])}),
    ("generations", {"generations": np.array([1] * 30 + [BIG])}),
    ("states", {"states": np.array([0] * 30 + [4], np.uint8)}),
    ("states", {"states": np.array([0] * 30 + [-1])}),
    ("states", {"states": np.array([0] * 30 + [BIG])}),
    ("positions", {"positions": np.array([0] * 30 + [BIG])}),
    ("accept_num", {"accept_num": np.array([1] * 30 + [DEPTH + 1])}),
    ("accept_num", {"accept_num": np.array([1] * 30 + [-1])}),
    ("accept_num", {"accept_num": np.array([1] * 30 + [2**40])}),
    ("topk_ids", {"topk_ids": np.full((31, 2), BIG)}),
    ("ranks", {"ranks": np.array([1] * 30 + [-BIG - 1])}),
)


@pytest.mark.parametrize("bad", range(len(BAD_VALUES)))
def test_a_bad_value_empties_the_step_and_is_reported_as_the_cpu_reports_it(
    bad: int, stage: Stage, fake: FakeCuda, stream: int
) -> None:
    argument, change = BAD_VALUES[bad]
    given: dict[str, Any] = {
        "tokens": np.arange(31),
        "generations": np.ones(31, int),
        "topk_ids": np.zeros((31, 2), int),
        "logprobs": np.zeros((31, 2), np.float32),
        "ranks": np.zeros(31, int),
    }
    given |= change
    op = stage.engine.save_output_topk
    if argument == "accept_num":
        op = stage.engine.speculate_save_output_topk
        for name in ("tokens", "topk_ids", "logprobs", "ranks"):
            given[name] = np.repeat(given[name][:, None], DEPTH, axis=1)
        given["accept_tokens"] = given.pop("tokens")
    with pytest.raises(tp.OpArgumentError) as on_cpu:
        op(**given)
    assert on_cpu.value.argument == argument
    op(**{name: OnCuda(array) for name, array in given.items()}, stream=stream)
    with pytest.raises(tp.OpArgumentError) as on_device:
        stage.engine.flush()
    assert on_device.value.argument == argument
    is_outside = "outside int32" in str(on_cpu.value)
    assert ("outside int32" in str(on_device.value)) == is_outside
    value = change[argument].flat[-1]
    assert f"holds {value} (element" in str(on_device.value)
    step = stage.step()
    assert (step["num_rows"], step["num_tokens"], step["width"], step["body_bytes"]) == (0, 0, 0, 0)
    stage.engine.flush()  # told once
    stage.engine.save_output(OnCuda(np.arange(2)), generations=np.ones(2, int), stream=stream)
    stage.engine.flush()
    assert (stage.step()["tokens"].tolist(), stage.step()["saved_tokens"]) == ([0, 1], 2)


@pytest.mark.parametrize("order", [0, 1, 2, 77])
def test_of_several_bad_values_the_first_is_reported_whatever_the_order(
    stage: Stage, fake: FakeCuda, stream: int, order: int
) -> None:
    fake.set_order(order)
    tokens, states = np.arange(40), np.zeros(40, int)
    tokens[[3, 20, 39]] = -7, -8, -9
    states[[5, 30]] = 4, 5
    for columns, told in (
        ({"states": OnCuda(np.zeros(40, int))}, r"tokens holds -7 \(element 3\)"),
        ({"states": OnCuda(states)}, r"states holds 4 \(element 5\)"),
    ):
        stage.engine.save_output(
            OnCuda(tokens), generations=np.ones(40, int), stream=stream, **columns
        )
        with pytest.raises(tp.OpArgumentError, match=told):
            stage.engine.flush()


def test_a_bad_value_is_told_by_the_next_save_which_saves_nothing(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    def save(token: int) -> None:
        stage.engine.save_output(
            OnCuda(np.full(1, token)), generations=np.ones(1, int), stream=stream
        )

    save(-5)
    wait_until(lambda: stage.published == 1)
    with pytest.raises(tp.OpArgumentError, match="step 0"):
        save(6)
    assert stage.engine.num_steps == 1
    save(6)
    stage.engine.flush()
    assert stage.step()["tokens"].tolist() == [6]


def test_host_columns_are_refused_at_once(stage: Stage, fake: FakeCuda, stream: int) -> None:
    for name, value in (
        ("rows", np.array([ROWS])),
        ("generations", np.array([-1])),
        ("states", np.array([9], np.uint8)),
        ("positions", np.array([BIG])),
    ):
        with pytest.raises(tp.OpArgumentError) as refused:
            stage.engine.save_output(
                OnCuda(np.ones(1, int)),
                **{"generations": np.ones(1, int), name: value},
                stream=stream,
            )
        assert refused.value.argument == name
    assert stage.engine.num_steps == 0


def test_where_tensors_lie_is_checked(stage: Stage, fake: FakeCuda, stream: int) -> None:
    ones = np.ones(2, int)
    fake.set_devices(2)

    def refused(text: str, tokens: Any, **more: Any) -> None:
        with pytest.raises(tp.OpArgumentError, match=text):
            stage.engine.save_output(tokens, **{"generations": ones, "stream": stream, **more})

    refused("give stream=", OnCuda(ones), stream=None)
    refused("stream is a str", OnCuda(ones), stream="0")
    refused("states lies on CUDA device 0, must be on the CPU", ones, states=OnCuda(ones))
    refused(
        "states lies on CUDA device 1, must be on CUDA device 0",
        OnCuda(ones),
        states=OnCuda(ones, 1),
    )
    refused("tokens lies on CUDA device 1, this writer is on device 0", OnCuda(ones, 1))
    with pytest.raises(tp.OpArgumentError, match="ranks lies on the CPU"):
        stage.engine.save_output_topk(
            OnCuda(ones),
            OnCuda(ones[:, None]),
            OnCuda(ones[:, None].astype(np.float32)),
            ones,
            generations=ones,
            stream=stream,
        )
    assert stage.published == 0


def test_ops_that_take_tensors_on_the_cpu_alone_say_so(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    ids, scores = np.ones((2, 2), int), np.ones((2, 2), np.float32)
    ones, has_work = np.ones(2, int), np.array([True])
    on_device, text = OnCuda(ones), "lies on CUDA device 0, must be on the CPU: copy it there first"
    ops, step = ShmOps(stage.engine), stage.engine.begin_step(ones)
    for name, call in (
        (
            "tokens",
            lambda: stage.engine.save_prompt_logprobs(0, 1, on_device, ids, scores, ones),
        ),
        (
            "ranks",
            lambda: stage.engine.save_prompt_logprobs(0, 1, ones, ids, scores, on_device),
        ),
        ("preempted_idx", lambda: ops.save_output(ones, has_work, on_device, step=step)),
        ("not_need_stop", lambda: ops.save_output(ones, OnCuda(has_work), step=step)),
        (
            "topk_ids",
            lambda: ops.save_output_topk(ones, OnCuda(ids), scores, ones, True, step=step),
        ),
        ("x", lambda: sysv.save_output(on_device, True)),
        ("x", lambda: sysv.get_output(on_device)),
    ):
        with pytest.raises(tp.OpArgumentError, match=f"{name} {text}") as refused:
            call()
        assert refused.value.argument == name
    with pytest.raises(tp.OpArgumentError, match="step_idx lies on CUDA device 0, must be on the"):
        stage.engine.mtp_save_first_token(ids, on_device, step=step)
    assert stage.published == 0


def test_shapes_and_dtypes_are_refused_as_on_the_cpu(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    ones = np.ones(2, int)
    with pytest.raises(tp.OpArgumentError, match=r"tokens is float64\[2\]"):
        stage.engine.save_output(OnCuda(np.ones(2)), generations=ones, stream=stream)
    with pytest.raises(tp.OpArgumentError, match="tokens has 41 rows, max_num_seqs is 40"):
        stage.engine.save_output(
            OnCuda(np.ones(ROWS + 1, int)), generations=np.ones(ROWS + 1, int), stream=stream
        )


def test_a_stream_may_be_an_object_of_a_framework(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    class TorchStream:
        cuda_stream = stream

    class CupyStream:
        ptr = stream

    class PaddleStream:  # paddle.device.Stream; paddle.device.cuda.current_stream() is as PyTorch's
        stream_base = TorchStream()

    class ProtocolStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream

    others = (PaddleStream(), ProtocolStream())
    for given_stream in (TorchStream(), CupyStream(), *others, stream, 0):
        stage.engine.save_output(
            OnCuda(np.ones(1, int)), generations=np.ones(1, int), stream=given_stream
        )
        stage.engine.flush()
        stage.take_all()
    assert stage.published == 6
    with pytest.raises(tp.OpArgumentError, match="stream is a str"):
        stage.engine.save_output(OnCuda(np.ones(1, int)), generations=np.ones(1, int), stream="0")


def test_a_tensor_of_paddle_s_is_taken_without_its_wait(
    stage: Stage, fake: FakeCuda, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor(OnCuda):
        place = SimpleNamespace(is_gpu_place=lambda: True, gpu_device_id=lambda: 0)
        value = None

        def __dlpack__(self, *, stream: int | None = None) -> Any:
            raise AssertionError("before Paddle 3.3 this waits for the current stream")

    Tensor.__module__ = "paddle"
    dlpack = SimpleNamespace(to_dlpack=lambda tensor: OnCuda.__dlpack__(tensor, stream=-1))
    for name in ("paddle", "paddle.utils"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "paddle.utils.dlpack", dlpack)
    ones, ops = np.ones(2, int), ShmOps(stage.engine)
    stage.engine.save_output(Tensor(np.array([3, 4])), generations=ones, stream=stream)
    step = stage.engine.begin_step(ones)
    ops.save_output(Tensor(np.array([[5], [-9]])), True, step=step, stream=stream)
    stage.engine.mtp_save_first_token(
        Tensor(np.array([[6, 7], [8, 9]])), Tensor(np.array([1, 0])), step=step, stream=stream
    )
    stage.engine.flush()
    found = [stage.step(number)["tokens"].tolist() for number in range(3)]
    assert found == [[3, 4], [5, -9], [6, 7]]


# --- a driver that fails


def scenario(stage: Stage, streams: list[int], number: int) -> None:
    """One writer's life: opens the device, and saves a step in each of the streams."""
    with tp.EngineWriter.attach(stage.segment.name) as engine:
        for token, stream in enumerate(streams):
            stage.take_all()
            engine.save_output(
                OnCuda(np.full(9, token + number)), generations=np.ones(9, int), stream=stream
            )
        engine.flush()


def error_of(act: Callable[[], None]) -> CudaError | None:
    try:
        act()
    except CudaError as error:
        return error
    return None


@pytest.mark.parametrize(
    "occurrences",
    [
        pytest.param(lambda count: sorted({1, count}), id="first and last"),
        pytest.param(lambda count: range(1, count + 1), id="all", marks=pytest.mark.full),
    ],
)
def test_every_failure_of_every_call_is_raised_and_leaves_nothing(
    fake: FakeCuda, segment: Segment, occurrences: Callable[[int], Iterable[int]]
) -> None:
    streams = [fake.make_stream(), fake.make_stream()]
    stage = Stage(segment)
    stage.engine.close()
    fake.take_log()
    scenario(stage, streams, 0)
    calls = [name for name in fake.take_log() if name != "cuGetErrorName"]
    places = [(name, nth) for name in sorted(set(calls)) for nth in occurrences(calls.count(name))]
    assert {name for name, _ in places} >= {
        *("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData"),
        *("cuMemHostRegister", "cuMemHostAlloc", "cuMemAlloc", "cuStreamCreate", "cuEventCreate"),
        *(
            "cuMemcpyHtoDAsync",
            "cuStreamSynchronize",
            "cuLaunchKernel",
            "cuEventRecord",
            "cuStreamWaitEvent",
        ),
        *("cuMemcpyDtoHAsync", "cuLaunchHostFunc", "cuStreamQuery", "cuCtxSynchronize"),
        *("cuStreamDestroy", "cuEventDestroy", "cuMemFree", "cuMemFreeHost"),
        *("cuMemHostUnregister", "cuModuleUnload", "cuDevicePrimaryCtxRelease"),
    }
    for name, nth in places:
        if name == "cuCtxPopCurrent" and nth < calls.count(name):
            continue  # it restores the caller's context; nothing is done about its answer
        fake.fail(name, nth)
        error = error_of(lambda: scenario(stage, streams, 100))
        if error is None:  # how often the writer asks the GPU depends on how fast that is
            assert nth > 1, name
            assert name in ("cuStreamQuery", "cuCtxPushCurrent", "cuCtxPopCurrent"), (name, nth)
        else:
            assert error.code == 719, (name, nth)
            if error.call not in ("cuCtxSynchronize", "the release of the device"):
                assert error.call == name, (name, nth)
                assert fake.held_things == 0, (name, nth)
        fake.fail("", 0)
        fake.forget()
        scenario(stage, streams, 7)  # the next writer finds everything in order
        assert stage.step()["tokens"].tolist() == [8] * 9


def test_a_fault_of_the_gpu_is_told_by_every_call_that_follows(
    fake: FakeCuda, segment: Segment, stream: int
) -> None:
    stage = Stage(segment)

    def save() -> None:
        stage.engine.save_output(
            OnCuda(np.ones(1, int)), generations=np.ones(1, int), stream=stream
        )

    save()
    stage.engine.flush()
    with fake.held():
        save()
    fake.break_all(ILLEGAL_ADDRESS)
    for call in (stage.engine.flush, save, save):
        with pytest.raises(CudaError) as raised:
            call()
        assert raised.value.code == ILLEGAL_ADDRESS
    with pytest.raises(CudaError):
        stage.engine.close()
    fake.break_all(0)
    fake.forget()
    with tp.EngineWriter.attach(segment.name) as successor:
        stage.engine = successor
        save()
        successor.flush()
        assert stage.step()["tokens"].tolist() == [1]


def test_a_writer_that_waits_for_space_hears_of_a_fault(
    stage: Stage, fake: FakeCuda, stream: int
) -> None:
    def save() -> None:
        stage.engine.save_output(
            OnCuda(np.ones(1, int)), generations=np.ones(1, int), stream=stream
        )

    raised: list[CudaError | None] = []
    for _ in range(SLOTS):
        save()
    thread = threading.Thread(target=lambda: raised.append(error_of(save)))
    thread.start()
    wait_until(lambda: stage.head["writer_bell"]["waiting"] != 0)
    fake.break_all(ILLEGAL_ADDRESS)
    thread.join(WATCHDOG_S)
    assert raised[0] is not None
    assert raised[0].code == ILLEGAL_ADDRESS
    fake.break_all(0)  # the fixture closes the writer


# --- what was chosen, and why


def test_without_kernels_a_save_says_so(
    stage: Stage, fake: FakeCuda, stream: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda, "KERNELS", tmp_path / "none")
    with pytest.raises(CudaError, match="built without nvcc"):
        stage.engine.save_output(
            OnCuda(np.ones(1, int)), generations=np.ones(1, int), stream=stream
        )
    assert stage.save(np.array([3]), generations=np.ones(1, int))["tokens"].tolist() == [3]


def test_without_a_driver_a_save_says_so(
    stage: Stage, fake: FakeCuda, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENPIPE_CUDA_LIBRARY", "libno_such_driver.so")
    with pytest.raises(CudaError, match="cannot open shared object file"):
        stage.engine.save_output(
            OnCuda(np.ones(1, int)), generations=np.ones(1, int), stream=stream
        )


def ops(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["ops", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_ops_says_what_was_chosen_and_why(
    fake: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ops(capsys) == {
        "form": "cuda",
        "why": f"{fake.library} serves CUDA 13.0, the kernels load",
        "devices": ["fake device"],
    }
    assert cli.main(["ops"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "output ops: cuda, for tensors on a GPU and on the CPU",
        f"because:    {fake.library} serves CUDA 13.0, the kernels load",
        "device 0:   fake device",
    ]
    fake.fail("cuModuleLoadData", 1, 209)
    assert ops(capsys)["why"] == "cuModuleLoadData failed: FAKE_ERROR (209)"
    fake.set_devices(0)
    assert "knows of no device" in ops(capsys)["why"]
    fake.set_devices(1)
    monkeypatch.setattr(cuda, "KERNELS", tmp_path / "none")
    found = ops(capsys)
    assert (found["form"], found["devices"]) == ("cpu", ["fake device"])
    assert "built without nvcc" in found["why"]
    library = tmp_path / "libempty.so"
    subprocess.run(["g++", "-shared", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    monkeypatch.setenv("TOKENPIPE_CUDA_LIBRARY", str(library))
    assert "has no cuInit" in ops(capsys)["why"]


# --- the kernels compile


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "cuda_ops").glob("*.cu")))
def test_nvcc_compiles_it_without_a_word_and_without_spills(name: str, tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++20", "-arch=sm_90", "-Icuda_ops", "-Xptxas", "-v", "-c"]
    done = subprocess.run(
        [*command, f"cuda_ops/{name}", "-o", str(tmp_path / "out.o")],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    said = done.stdout + done.stderr
    assert "warning" not in said, said
    told = [line for line in said.splitlines() if "spill" in line]
    assert len(told) == (name == "pack.cu"), said
    for line in told:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in line, said


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_build_ext_compiles_the_kernels_where_nvcc_is(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)]
    built = subprocess.run(
        [*command, "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        env={**os.environ, "TOKENPIPE_CUDA_ARCHITECTURES": "90", "TOKENPIPE_DEBUG": "1"},
        text=True,
        capture_output=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    image = (tmp_path / "tokenpipe" / cuda.KERNELS.name).read_bytes()
    assert b"tp_pack" in image
    assert list((tmp_path / "tokenpipe").glob("_native.*.so"))


@pytest.mark.full  # 13 s and more: it builds and runs what the tests above do, once more
def test_the_gpu_check_runs_dry_without_a_gpu() -> None:
    """All of it but the GPU: build of the fake, values, pipelines, and the table of times."""
    done = subprocess.run(
        ["scripts/gpu_check", "--dry-run"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("values: 18 steps right") for line in lines) == 2
    assert sum(line.startswith("pipeline: 50 tokens right") for line in lines) == 2
    assert lines[-1] == "gpu_check: dry run passed; nothing ran on a GPU"
    table = done.stderr.split("DRY RUN with a fake driver: these are no times of a GPU")[1]
    assert len(table.split("coordinator[")[0].strip().splitlines()) == 1 + 27


STAND_INS = {
    "nvidia-smi": "echo 9.0",
    "python3.12": "exit 1",  # one without the framework
    "python3": """
case $1 in
setup.py) echo "built for $TOKENPIPE_CUDA_ARCHITECTURES" && exit ;;
benchmarks/gpu.py) set -- "$@" --rounds 1 --fake "$TOKENPIPE_CUDA_LIBRARY" ;;
esac
case " $* " in *" $FAILING "*) exit 3 ;; esac
exec "$REAL" "$@"
""",
    "compute-sanitizer": """
echo "$*"
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
""",
}


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("failing", ["nothing", "times"])
def test_the_gpu_check_goes_on_when_a_part_fails(
    failing: str, built_fake: FakeCuda, tmp_path: Path
) -> None:
    """The script's way on a GPU, with stand-ins for what it calls; the fake plays the GPU."""
    for package in ("torch", "setuptools", "pybind11"):  # looked for, not used
        (tmp_path / f"{package}.py").write_text("")
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["scripts/gpu_check"],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHON"},
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "REAL": sys.executable,
            "FAILING": failing,
            "TOKENPIPE_CUDA_LIBRARY": built_fake.library,
        },
        text=True,
        capture_output=True,
        timeout=180,
    )
    said = done.stdout.splitlines()
    assert "built for 90" in said, done.stdout + done.stderr
    assert sum(line.startswith("values:") for line in said) == 6, "and under both sanitizers"
    assert sum(line.startswith("pipeline: 50 tokens right") for line in said) == 2
    assert any("--tool racecheck" in line and "kns=tp_pack" in line for line in said)
    is_right = failing == "nothing"
    assert done.returncode == (0 if is_right else 1)
    last = "gpu_check: passed on a GPU" if is_right else "gpu_check: failed on a GPU: times"
    assert said[-1] == last
