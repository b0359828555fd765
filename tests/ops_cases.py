"""What the ops on FastDeploy's queue send, receive and refuse: run by test_ops.py in a process of
its own, with limits that carry the long messages, for each face (numpy arrays, Paddle operators).

Every message is packed here by `struct` from the wire's table and compared byte for byte, or sent
raw.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastdeploy_peer import Worker, custom_ftok, free_queue_id, ftok

from support import wait_until
from tokenpipe.errors import OpArgumentError, QueueError

PLAIN, TOPK, SPECULATE, SPECULATE_TOPK = 2056, 88072, 7176, 530448
MSGMAX = int(Path("/proc/sys/kernel/msgmax").read_text())
long_messages = pytest.mark.skipif(
    MSGMAX < SPECULATE_TOPK, reason=f"kernel.msgmax is {MSGMAX}, a message has {SPECULATE_TOPK}"
)
KEYS = {"g1": ftok, "g2": ftok, "g3": custom_ftok, "g4": custom_ftok}


# --- the faces: how a test calls an op


class NumpyFace:
    def __init__(self) -> None:
        from tokenpipe.ops import sysv

        self.ops: Any = sysv

    def tensor(self, values: Any, dtype: str = "int64") -> Any:
        return np.array(values, dtype)

    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        return np.asarray(tensor)


class PaddleFace(NumpyFace):
    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle's own
            import paddle

            import tokenpipe.ops.paddle
        paddle.set_device("cpu")  # a plugin's device would be the default
        self.paddle, self.ops = paddle, tokenpipe.ops.paddle

    def tensor(self, values: Any, dtype: str = "int64") -> Any:
        return self.paddle.to_tensor(np.array(values, dtype))


class DeviceFace(PaddleFace):
    """Tensors on the device of paddle_device.cpp."""

    def tensor(self, values: Any, dtype: str = "int64") -> Any:
        place = self.paddle.CustomPlace("late", 0)
        return self.paddle.to_tensor(np.array(values, dtype), place=place)


FACES = {"numpy": NumpyFace, "paddle": PaddleFace}


@pytest.fixture(scope="session", params=FACES)
def face(request: pytest.FixtureRequest) -> NumpyFace:
    return FACES[request.param]()


class Wires:
    """Private queues, whose ids the environment gives to the ops."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.workers: list[Worker] = []

    def new(self, generation: str = "g3", folder: str = "/dev/shm") -> Worker:
        queue_id = free_queue_id(folder)
        self.patch.setenv("INFERENCE_MSG_QUEUE_ID", str(queue_id))
        self.patch.setenv("TOKENPIPE_SYSV_GENERATION", generation)
        return self.worker(KEYS[generation](folder, queue_id))

    def worker(self, key: int) -> Worker:
        self.workers.append(Worker(key))
        return self.workers[-1]


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Wires]:
    monkeypatch.chdir(tmp_path)  # where the keys of two ops come from
    made = Wires(monkeypatch)
    yield made
    for worker in made.workers:
        worker.remove()


# --- golden messages


def packed(size: int, *columns: tuple[int, str, Any]) -> bytes:
    """A payload of zeros with (offset, struct's letter, values) in it."""
    payload = bytearray(size)
    for offset, letter, values in columns:
        values = np.asarray(values).ravel().tolist()
        struct.pack_into(f"<{len(values)}{letter}", payload, offset, *values)
    return bytes(payload)


def plain(tokens: Any, word: int = 1) -> bytes:
    return packed(PLAIN, (0, "i", [word, len(tokens)]), (8, "i", tokens))


def topk(tokens: Any, scores: Any, ranks: Any, head: int, word: int = 1) -> bytes:
    """`tokens` and `scores` as they lie in the message, at its stride."""
    return packed(
        TOPK,
        *((0, "i", [word, head]), (8, "i", tokens)),
        *((43016, "f", scores), (86024, "i", ranks)),
    )


def speculate(counts: Any, tokens: Any, word: int = 1) -> bytes:
    head = [word, len(counts)]
    return packed(SPECULATE, (0, "i", head), (8, "i", counts), (1032, "i", tokens))


def speculate_topk(
    counts: Any, rows: Any, flag: int = 3, word: int = 1, size: int = SPECULATE_TOPK
) -> bytes:
    """`rows`: per row its list of (tokens, scores, rank), of each token with candidates or not."""
    columns: list[tuple[int, str, Any]] = [
        (0, "i", [word, flag, len(counts)]),
        (12, "i", counts),
    ]
    for i, row in enumerate(rows):
        at = 2060 + 1032 * i
        for j, (tokens, scores, rank) in enumerate(row):
            columns.append((at + 84 * j, "i", tokens))
            columns.append((at + 504 + 84 * j, "f", scores))
            columns.append((at + 1008 + 4 * j, "i", [rank]))
    return packed(size, *columns)


def candidates(n: int, width: int, seed: int = 0) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 150_000, (n, width))
    scores = random.normal(size=(n, width)).astype(np.float32)
    return ids, scores, random.integers(0, 150_000, n)


def padded(ids: Any, fill: Any) -> Any:
    return np.pad(ids, [(0, 0), (0, 21 - ids.shape[1])], constant_values=fill)


# --- plain


@pytest.mark.parametrize("generation", KEYS)
def test_save_output_sends_what_the_table_says(
    face: NumpyFace, wires: Wires, generation: str
) -> None:
    worker = wires.new(generation)
    wires.patch.setenv("INFERENCE_MSG_ID", "7")
    marks = face.tensor([[0], [1], [0], [0], [1]], "int32")
    tokens = [[11], [12], [-1], [-3]]
    given = face.tensor(tokens)
    face.ops.save_output(given, face.tensor([True], "bool"), marks, 0, False)
    assert worker.receive() == plain([11, -9, -1, -3], 7)
    face.ops.save_output(given, face.tensor([False], "bool"), marks, 0, True)
    assert worker.receive() == plain([11, -9, -1, -3], -7)
    assert face.array(given).tolist() == tokens


def test_nothing_of_a_larger_batch_is_sent_with_a_smaller_one(
    face: NumpyFace, wires: Wires
) -> None:
    worker = wires.new()
    marks, has_work = face.tensor([0] * 512, "int32"), face.tensor([True], "bool")
    for n in (512, 1, 0):
        tokens = np.arange(n).reshape(n, 1) + 5
        face.ops.save_output(face.tensor(tokens), has_work, marks, 0, False)
        assert worker.receive() == plain(tokens)


@pytest.mark.parametrize("generation", KEYS)
def test_get_output_reads_what_the_table_says(
    face: NumpyFace, wires: Wires, generation: str
) -> None:
    worker = wires.new(generation)
    out = face.tensor(np.full((514, 1), 2))
    for get in (face.ops.get_output, face.ops.get_output_ep):
        worker.send(packed(PLAIN, (0, "i", [-1, 3, 21, -9, 23, 77])))
        get(out, 0, True)
        assert face.array(out).ravel().tolist() == [-1, 3, 21, -9, 23] + [2] * 509
        get(out, 0, False)  # and nothing behind the two words is touched
        assert face.array(out).ravel().tolist() == [-2, 0, 21, -9, 23] + [2] * 509
        out = face.tensor(np.full((514, 1), 2))


def test_a_rank_above_0_neither_sends_nor_receives_but_for_get_output_ep(
    face: NumpyFace, wires: Wires
) -> None:
    worker = wires.new()
    has_work, marks = face.tensor([True], "bool"), face.tensor([0], "int32")
    face.ops.save_output(face.tensor([[1]]), has_work, marks, 1, True)
    assert worker.receive() is None
    worker.send(plain([5]))
    out = face.tensor(np.full((514, 1), 2))
    face.ops.get_output(out, 1, True)
    assert face.array(out).ravel()[:3].tolist() == [-2, 0, 2]
    face.ops.get_output_ep(out, 3, True)
    assert face.array(out).ravel()[:3].tolist() == [1, 1, 5]


# --- with candidates


@long_messages
@pytest.mark.parametrize("generation", KEYS)
@pytest.mark.parametrize("width", [1, 5, 21])
def test_save_output_topk_sends_what_the_table_says(
    face: NumpyFace, wires: Wires, generation: str, width: int
) -> None:
    worker = wires.new(generation)
    ids, scores, ranks = candidates(3, width)
    x = ids[:, :1] + 1
    face.ops.save_output_topk(
        *(face.tensor(x), face.tensor(ids), face.tensor(scores, "float32"), face.tensor(ranks)),
        *(face.tensor([True], "bool"), face.tensor([0, 0, 1, 0], "int32"), 0),
    )
    tokens = np.hstack([x, ids[:, 1:]])
    head = 3
    if generation == "g4":
        head |= width << 16
    else:
        tokens, scores = padded(tokens, -1), padded(scores, 0.0)
    tokens[2] = -9
    assert worker.receive() == topk(tokens, scores, ranks, head)


@long_messages
@pytest.mark.parametrize(("generation", "k"), [("g1", 20), ("g3", 20), ("g3", 4), ("g4", 20)])
def test_get_output_topk_reads_what_the_table_says(
    face: NumpyFace, wires: Wires, generation: str, k: int
) -> None:
    worker = wires.new(generation)
    stride = 6 if generation == "g4" else 21
    head = 4 | 6 << 16 if generation == "g4" else 4
    ids, scores, ranks = candidates(4, stride)
    out = face.tensor(np.full((10754, 1), 2))
    out_scores = face.tensor(np.full((10752, 1), 2), "float32")
    out_ranks = face.tensor(np.full(512, 2))
    worker.send(topk(ids, scores, ranks, head))
    face.ops.get_output_topk(out, out_scores, out_ranks, k, 9, True)
    columns = stride if generation == "g4" else k + 1
    expected, expected_scores = np.full((512, 21), 2).ravel(), np.full(10752, 2, np.float32)
    for i in range(4):
        expected[i * stride : i * stride + columns] = ids[i, :columns]
        expected_scores[i * stride : i * stride + columns] = scores[i, :columns]
    assert face.array(out).ravel().tolist() == [1, head, *expected]
    assert face.array(out_scores).ravel().tolist() == expected_scores.tolist()
    assert face.array(out_ranks).tolist() == [*ranks, *[2] * 508]


# --- speculative


@pytest.mark.parametrize("generation", KEYS)
@pytest.mark.parametrize("depth", [2, 6, 8])
def test_speculate_save_output_sends_what_the_table_says(
    face: NumpyFace, wires: Wires, generation: str, depth: int, tmp_path: Path
) -> None:
    worker = wires.new(generation, str(tmp_path))
    tokens = np.arange(5 * depth).reshape(5, depth) + 100
    inputs = (
        face.tensor(tokens),
        face.tensor([2, 1, 0, -3, 2], "int32"),
        face.tensor([True], "bool"),
        face.tensor([3, 9, 9, 9, 9], "int32"),  # row 0 is in its prompt
        face.tensor([4, 4, 4, 4, 4]),
        face.tensor([0, 0, 0, 0, 1, 0], "int32"),
    )
    kept = np.zeros((5, 6), np.int64)
    kept[:, : min(depth, 6)] = tokens[:, :6]
    for skip, first in ((True, 0), (False, 2)):
        face.ops.speculate_save_output(*inputs, 0, False, skip)
        assert worker.receive() == speculate([first, 1, 0, -3, -9], kept)


def test_mtp_save_first_token_sends_two_tokens_of_rows_at_their_first_step(
    face: NumpyFace, wires: Wires, tmp_path: Path
) -> None:
    worker = wires.new("g3", str(tmp_path))
    full = face.tensor(np.full((256, 6), 9)), face.tensor([6] * 256, "int32")
    rest = face.tensor([9] * 256, "int32"), face.tensor([4] * 256)
    has_work, marks = face.tensor([True], "bool"), face.tensor([0] * 256, "int32")
    face.ops.speculate_save_output(*full, has_work, *rest, marks, 0, False, False)
    worker.receive()
    drafts = face.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])
    lengths = face.tensor([9, 9, 9, 1], "int32"), face.tensor([4, 4, 4, 4])
    steps = face.tensor([0, 1, 2, 1])
    face.ops.mtp_save_first_token(drafts, has_work, *lengths, steps, 0, False, True)
    tokens = np.zeros((4, 6), int)
    tokens[1, :2] = 4, 5
    assert worker.receive() == speculate([0, 2, 0, 0], tokens)
    face.ops.mtp_save_first_token(drafts, has_work, *lengths, steps, 0, False, False)
    tokens[3, :2] = 10, 11
    assert worker.receive() == speculate([0, 2, 0, 2], tokens)


def test_speculate_get_output_reads_all_words(
    face: NumpyFace, wires: Wires, tmp_path: Path
) -> None:
    worker = wires.new("g3", str(tmp_path))
    out = face.tensor(np.full(1794, 2))
    counts, tokens = [3, 0, -9, -3, 6], np.arange(30).reshape(5, 6) + 40
    message = speculate(counts, tokens, -1)
    worker.send(message)
    face.ops.speculate_get_output(out, 0, True, False)
    assert face.array(out).tolist() == list(struct.unpack("<1794i", message))
    worker.send(message)
    face.ops.speculate_get_output(out, 2, True, False)
    assert face.array(out)[:4].tolist() == [-2, 0, 3, 0]
    face.ops.speculate_get_output(out, 2, True, True)
    assert face.array(out)[:4].tolist() == [-1, 5, 3, 0]


@pytest.mark.parametrize(
    ("generation", "each", "is_sent"),
    [("g1", True, True), ("g1", False, False), ("g3", True, False), ("g4", False, False)],
)
def test_which_ranks_save_speculative_output(
    face: NumpyFace, wires: Wires, generation: str, each: bool, is_sent: bool, tmp_path: Path
) -> None:
    worker = wires.new(generation, str(tmp_path))
    has_work, one = face.tensor([True], "bool"), face.tensor([1], "int32")
    tokens, prompt, marks = face.tensor([[7, 8]]), face.tensor([0]), face.tensor([0], "int32")
    face.ops.speculate_save_output(tokens, one, has_work, one, prompt, marks, 2, each, True)
    assert (worker.receive() is not None) == is_sent
    # This one asks save_each_rank in every generation.
    step = face.tensor([1])
    face.ops.mtp_save_first_token(tokens, has_work, one, prompt, step, 2, each, True)
    assert (worker.receive() is not None) == each


# --- speculative with candidates

EMPTY = [-1] * 20


def speculate_topk_inputs(face: NumpyFace, sampled: Any, width: int, marks: Any) -> Any:
    ids, scores, ranks = candidates(9, width)
    return (ids, scores, ranks), (
        face.tensor(sampled),
        face.tensor(ids),
        face.tensor(scores, "float32"),
        face.tensor(ranks),
        face.tensor([3, 0, 2, 1], "int32"),
        face.tensor([0, 3, 3, 5, 6], "int32"),
        face.tensor([True], "bool"),
        face.tensor([9, 9, 9, 1], "int32"),  # row 3 is in its prompt
        face.tensor([4, 4, 4, 4]),
        face.tensor(marks, "int32"),
    )


def token_row(token: int, made: Any, at: int, width: int) -> Any:
    ids, scores, ranks = made
    tokens = [token, *ids[at, 1:], *[-1] * (21 - width)]
    return tokens, [*scores[at], *[0.0] * (21 - width)], ranks[at]


@long_messages
@pytest.mark.parametrize("generation", KEYS)
@pytest.mark.parametrize("width", [1, 6, 21])
@pytest.mark.parametrize("flag", [3, 4])
def test_speculate_save_output_topk_sends_what_the_table_says(
    face: NumpyFace, wires: Wires, generation: str, width: int, flag: int
) -> None:
    worker = wires.new(generation)
    sampled = np.arange(24).reshape(4, 6) + 500
    made, inputs = speculate_topk_inputs(face, sampled, width, [0, 0, 1, 0, 0])
    face.ops.speculate_save_output_topk(*inputs, flag, 0, False)
    is_flat = generation in ("g1", "g2")
    rows = [
        [token_row(500 + j, made, j, width) for j in range(3)],
        [],
        # Preempted: its body is sent all the same.
        [token_row((503 if is_flat else 512) + j, made, 3 + j, width) for j in range(2)],
    ]
    head = flag | width << 8 if generation == "g4" else flag
    assert worker.receive() == speculate_topk([3, 0, -9, 0], rows, head)


@long_messages
@pytest.mark.parametrize("generation", ["g3", "g4"])
def test_mtp_save_first_token_with_topk_sends_candidates_of_the_first_token_alone(
    face: NumpyFace, wires: Wires, generation: str
) -> None:
    worker = wires.new(generation)
    sampled = np.arange(24).reshape(4, 6) + 500
    made, inputs = speculate_topk_inputs(face, sampled, 5, [0, 0, 0, 0])
    face.ops.mtp_save_first_token_with_topk(*inputs, 3, 0, False)
    bare = [0.0] * 21
    rows = [
        [token_row(500, made, 0, 5), *(([501 + j, *EMPTY], bare, 0) for j in range(3))],
        [],
        [token_row(512, made, 3, 5), *(([513 + j, *EMPTY], bare, 0) for j in range(2))],
    ]
    head = 3 | 5 << 8 if generation == "g4" else 3
    assert worker.receive() == speculate_topk([4, 0, 3, 0], rows, head)
    face.ops.mtp_save_first_token_with_topk(*inputs, 3, 1, False)
    assert worker.receive() is None
    face.ops.mtp_save_first_token_with_topk(*inputs, 3, 1, True)
    assert worker.receive() is not None


@long_messages
@pytest.mark.parametrize(("generation", "k"), [("g1", 20), ("g3", 4), ("g4", 20)])
@pytest.mark.parametrize("size", [SPECULATE_TOPK, SPECULATE_TOPK - 4])
def test_speculate_get_output_topk_reads_what_the_table_says(
    face: NumpyFace, wires: Wires, generation: str, k: int, size: int
) -> None:
    worker = wires.new(generation)
    made = candidates(6, 21)
    rows = [[token_row(500 + j, made, j, 21) for j in range(4)], [], [token_row(9, made, 5, 21)]]
    head, columns = (4 | 6 << 8, 6) if generation == "g4" else (4, k + 1)
    worker.send(speculate_topk([2, 0, 1], rows, head, -1, size))
    out = face.tensor(np.full((65027, 1), 2))
    out_scores = face.tensor(np.full((64512, 1), 2), "float32")
    out_ranks = face.tensor(np.full(3072, 2))
    face.ops.speculate_get_output_topk(out, out_scores, out_ranks, k, 5, True)
    expected, ranks = np.full((512, 6, 21), 2), np.full((512, 6), 2)
    scores = np.full((512, 6, 21), 2, np.float32)
    for i, n in ((0, 2), (2, 1)):
        for j in range(n):
            tokens, values, ranks[i, j] = rows[i][j]
            expected[i, j, :columns], scores[i, j, :columns] = tokens[:columns], values[:columns]
    words = [-1, head, 3, 2, 0, 1, *[2] * 509]
    assert face.array(out).ravel().tolist() == [*words, *expected.ravel()]
    assert face.array(out_scores).ravel().tolist() == scores.ravel().tolist()
    assert face.array(out_ranks).tolist() == ranks.ravel().tolist()
    face.ops.speculate_get_output_topk(out, out_scores, out_ranks, k, 5, False)
    assert face.array(out).ravel()[:4].tolist() == [-2, 0, 0, 2]


# --- what is refused, and what it says

Arguments = Callable[[NumpyFace], tuple[Any, ...]]


def plain_arguments(face: NumpyFace, n: int = 4, tokens: Any = None, **changes: Any) -> Any:
    given = {
        "x": face.tensor(np.zeros((n, 1)) if tokens is None else tokens),
        "not_need_stop": face.tensor([True], "bool"),
        "preempted_idx": face.tensor([0] * n, "int32"),
    }
    return (*(given | changes).values(), 0, False)


def topk_arguments(face: NumpyFace, width: int = 4, **changes: Any) -> Any:
    given = {
        "x": face.tensor(np.zeros((2, 1))),
        "topk_ids": face.tensor(np.zeros((2, width))),
        "logprob_scores": face.tensor(np.zeros((2, width)), "float32"),
        "ranks": face.tensor([0, 0]),
        "not_need_stop": face.tensor([True], "bool"),
        "preempted_idx": face.tensor([0, 0], "int32"),
    }
    return (*(given | changes).values(), 0)


def speculate_arguments(face: NumpyFace, n: int = 2, depth: int = 6, **changes: Any) -> Any:
    given = {
        "accept_tokens": face.tensor(np.zeros((n, depth))),
        "accept_num": face.tensor([1] * n, "int32"),
        "not_need_stop": face.tensor([True], "bool"),
        "seq_lens_decoder": face.tensor([1] * n, "int32"),
        "prompt_lens": face.tensor([1] * n),
        "preempted_idx": face.tensor([0] * n, "int32"),
    }
    return (*(given | changes).values(), 0, False, False)


def speculate_topk_arguments(face: NumpyFace, flag: int = 3, **changes: Any) -> Any:
    given = {
        "sampled_token_ids": face.tensor(np.zeros((2, 6))),
        "logprob_token_ids": face.tensor(np.zeros((4, 5))),
        "logprob_scores": face.tensor(np.zeros((4, 5)), "float32"),
        "logprob_ranks": face.tensor([0] * 4),
        "token_num_per_batch": face.tensor([2, 2], "int32"),
        "cu_batch_token_offset": face.tensor([0, 2], "int32"),
        "not_need_stop": face.tensor([True], "bool"),
        "seq_lens_decoder": face.tensor([1, 1], "int32"),
        "prompt_lens": face.tensor([1, 1]),
        "preempted_idx": face.tensor([0, 0], "int32"),
    }
    return (*(given | changes).values(), flag, 0, False)


REFUSED_SAVES: tuple[tuple[str, Arguments, str, tuple[str, ...]], ...] = (
    ("save_output", lambda f: plain_arguments(f, 513), "x", ("513", "512")),
    (
        *("save_output", lambda f: plain_arguments(f, x=f.tensor([[1]] * 4, "float32"))),
        *("x", ("float32", "int64")),
    ),
    (
        *("save_output", lambda f: plain_arguments(f, tokens=[[0], [2**31], [0], [0]])),
        *("x", ("x[1]", "2147483648", "int32")),
    ),
    (
        *("save_output", lambda f: plain_arguments(f, tokens=[[0, 1]] * 4)),
        *("x", ("2 columns", "1")),
    ),
    (
        *("save_output", lambda f: plain_arguments(f, preempted_idx=f.tensor([0] * 3, "int32"))),
        *("preempted_idx", ("3", "at least 4")),
    ),
    (
        *("save_output", lambda f: plain_arguments(f, preempted_idx=f.tensor([0] * 4))),
        *("preempted_idx", ("int64", "int32")),
    ),
    (
        *("save_output", lambda f: plain_arguments(f, not_need_stop=f.tensor([1]))),
        *("not_need_stop", ("int64", "bool")),
    ),
    ("save_output_topk", lambda f: topk_arguments(f, 22), "topk_ids", ("22", "21")),
    (
        *("save_output_topk", lambda f: topk_arguments(f, ranks=f.tensor([1]))),
        *("ranks", ("1 elements", "2")),
    ),
    (
        "save_output_topk",
        lambda f: topk_arguments(f, logprob_scores=f.tensor([[0] * 3] * 2, "float32")),
        *("logprob_scores", ("3 columns", "4")),
    ),
    (
        *(
            "save_output_topk",
            lambda f: topk_arguments(f, topk_ids=f.tensor([[0, 0, 2**40, 0]] * 2)),
        ),
        *("topk_ids", ("topk_ids[2]", str(2**40))),
    ),
    (
        *("speculate_save_output", lambda f: speculate_arguments(f, 257)),
        *("accept_tokens", ("257", "256")),
    ),
    (
        "speculate_save_output",
        lambda f: speculate_arguments(f, 2, 8, accept_num=f.tensor([1, 7], "int32")),
        *("accept_num", ("accept_num[1]", "7", "6")),
    ),
    (
        "speculate_save_output",
        lambda f: speculate_arguments(f, 2, 3, accept_num=f.tensor([4, 1], "int32")),
        *("accept_num", ("accept_num[0]", "4", "3")),
    ),
    (
        "speculate_save_output",
        lambda f: speculate_arguments(f, accept_num=f.tensor([1, -4], "int32")),
        *("accept_num", ("-4",)),
    ),
    (
        *("speculate_save_output", lambda f: speculate_arguments(f, prompt_lens=f.tensor([1]))),
        *("prompt_lens", ("1 elements", "2")),
    ),
    (
        *("speculate_save_output_topk", lambda f: speculate_topk_arguments(f, 5)),
        *("message_flag", ("5", "3", "4")),
    ),
    (
        "speculate_save_output_topk",
        lambda f: speculate_topk_arguments(f, token_num_per_batch=f.tensor([7, 0], "int32")),
        *("token_num_per_batch", ("7", "6")),
    ),
    (
        "mtp_save_first_token_with_topk",
        lambda f: speculate_topk_arguments(f, token_num_per_batch=f.tensor([0, 6], "int32")),
        *("token_num_per_batch", ("6", "0 to 5")),
    ),
    (
        "speculate_save_output_topk",
        lambda f: speculate_topk_arguments(f, cu_batch_token_offset=f.tensor([0, 3], "int32")),
        *("cu_batch_token_offset", ("3", "2 tokens", "4 rows")),
    ),
    (
        "speculate_save_output_topk",
        lambda f: speculate_topk_arguments(f, cu_batch_token_offset=f.tensor([-1, 2], "int32")),
        *("cu_batch_token_offset", ("-1",)),
    ),
    (
        "speculate_save_output_topk",
        lambda f: speculate_topk_arguments(f, sampled_token_ids=f.tensor([[0], [0]])),
        *("token_num_per_batch", ("2 elements", "1 a row")),
    ),
)


@pytest.mark.parametrize(
    ("op", "arguments", "argument", "said"),
    REFUSED_SAVES,
    ids=[f"{op}-{argument}-{k}" for k, (op, _, argument, _) in enumerate(REFUSED_SAVES)],
)
def test_a_save_refuses_what_the_message_cannot_carry(
    face: NumpyFace,
    wires: Wires,
    op: str,
    arguments: Arguments,
    argument: str,
    said: tuple[str, ...],
    tmp_path: Path,
) -> None:
    is_here = op == "speculate_save_output"
    worker = wires.new("g3", str(tmp_path) if is_here else "/dev/shm")
    with pytest.raises(OpArgumentError) as caught:
        getattr(face.ops, op)(*arguments(face))
    assert caught.value.argument == argument
    assert [word for word in said if word not in str(caught.value)] == [], str(caught.value)
    assert worker.receive() is None, "something was sent"


REFUSED_GETS: tuple[tuple[str, Arguments, str, tuple[str, ...]], ...] = (
    ("get_output", lambda f: (f.tensor(np.zeros(513)), 0, False), "x", ("513", "514")),
    ("get_output", lambda f: (f.tensor(np.zeros(514), "int32"), 0, False), "x", ("int32",)),
    ("get_output_ep", lambda f: (f.tensor(np.zeros(514), "float32"), 0, False), "x", ("float32",)),
    (
        "get_output_topk",
        lambda f: (
            *(f.tensor(np.zeros(10754)), f.tensor(np.zeros(10752), "float32")),
            *(f.tensor(np.zeros(512)), 21, 0, False),
        ),
        *("k", ("21", "20")),
    ),
    (
        "get_output_topk",
        lambda f: (
            *(f.tensor(np.zeros(10754)), f.tensor(np.zeros(10000), "float32")),
            *(f.tensor(np.zeros(512)), 20, 0, False),
        ),
        *("scores", ("10000", "10752")),
    ),
    (
        *("speculate_get_output", lambda f: (f.tensor(np.zeros(1793)), 0, False, False)),
        *("x", ("1793", "1794")),
    ),
    (
        "speculate_get_output_topk",
        lambda f: (
            *(f.tensor(np.zeros(65027)), f.tensor(np.zeros(64512), "float32")),
            *(f.tensor(np.zeros(3071)), 20, 0, False),
        ),
        *("output_ranks", ("3071", "3072")),
    ),
)


@pytest.mark.parametrize(
    ("op", "arguments", "argument", "said"),
    REFUSED_GETS,
    ids=[f"{op}-{argument}-{k}" for k, (op, _, argument, _) in enumerate(REFUSED_GETS)],
)
def test_a_get_refuses_its_tensors_before_it_takes_a_message(
    face: NumpyFace,
    wires: Wires,
    op: str,
    arguments: Arguments,
    argument: str,
    said: tuple[str, ...],
    tmp_path: Path,
) -> None:
    worker = wires.new("g3", str(tmp_path) if op == "speculate_get_output" else "/dev/shm")
    worker.send(plain([1]))
    with pytest.raises(OpArgumentError) as caught:
        getattr(face.ops, op)(*arguments(face))
    assert caught.value.argument == argument
    assert [word for word in said if word not in str(caught.value)] == [], str(caught.value)
    assert worker.receive() == plain([1])


def outputs_of(face: NumpyFace, op: str) -> tuple[Any, ...]:
    """The tensors of a get and its attributes, without waiting."""
    if op == "get_output_topk":
        sizes, attributes = (10754, 10752, 512), (20, 0, False)
    elif op == "speculate_get_output_topk":
        sizes, attributes = (65027, 64512, 3072), (20, 0, False)
    elif op == "speculate_get_output":
        return face.tensor(np.full(1794, 2)), 0, False, False
    else:
        return face.tensor(np.full(514, 2)), 0, False
    kinds = ("int64", "float32", "int64")
    made = [face.tensor(np.full(n, 2), kind) for n, kind in zip(sizes, kinds, strict=True)]
    return (*made, *attributes)


BAD_MESSAGES: tuple[tuple[str, str, bytes, tuple[str, ...]], ...] = (
    ("get_output", "g3", bytes(SPECULATE), ("7176", "2056")),
    ("get_output", "g3", bytes(2052), ("2052", "2056")),
    ("get_output", "g3", b"", ("0 bytes",)),
    ("get_output", "g3", packed(PLAIN, (0, "i", [1, 513])), ("513", "512")),
    ("get_output_ep", "g3", packed(PLAIN, (0, "i", [1, -1])), ("-1",)),
    ("get_output", "g3", bytes(SPECULATE_TOPK), ("530448", "2056")),
    ("get_output", "g3", bytes(600_000), ("more than", "2056")),
    ("speculate_get_output", "g3", packed(SPECULATE, (0, "i", [1, 257])), ("257", "256")),
    ("speculate_get_output", "g3", packed(SPECULATE, (0, "i", [1, 2, 1, 7])), ("row 1", "7", "6")),
    ("speculate_get_output", "g3", bytes(PLAIN), ("2056", "7176")),
    ("get_output_topk", "g3", bytes(PLAIN), ("2056", "88072")),
    ("get_output_topk", "g3", packed(TOPK, (0, "i", [1, 513])), ("513", "512")),
    ("get_output_topk", "g3", packed(TOPK, (0, "i", [1, -5])), ("-5", "512")),
    ("get_output_topk", "g3", packed(TOPK, (0, "i", [1, 3 | 5 << 16])), ("5 columns", "g4", "g3")),
    ("get_output_topk", "g4", packed(TOPK, (0, "i", [1, 3])), ("0 columns", "g4")),
    ("get_output_topk", "g4", packed(TOPK, (0, "i", [1, 3 | 22 << 16])), ("22 columns", "21")),
    ("speculate_get_output_topk", "g3", bytes(TOPK), ("88072", "530448")),
    ("speculate_get_output_topk", "g3", speculate_topk([0], [], 5), ("flag 5",)),
    ("speculate_get_output_topk", "g3", speculate_topk([7], []), ("row 0", "7", "6")),
    ("speculate_get_output_topk", "g3", packed(SPECULATE_TOPK, (0, "i", [1, 3, 513])), ("513",)),
    ("speculate_get_output_topk", "g3", speculate_topk([0], [], 3 | 6 << 8), ("6 columns", "g3")),
    ("speculate_get_output_topk", "g4", speculate_topk([0], [], 3), ("0 columns",)),
)


@pytest.mark.parametrize(
    ("op", "generation", "message", "said"),
    [
        pytest.param(
            *case, marks=[long_messages] if len(case[2]) > 8192 else [], id=f"{k}-{case[0]}"
        )
        for k, case in enumerate(BAD_MESSAGES)
    ],
)
def test_a_message_that_is_not_the_ops_is_taken_off_and_named(
    face: NumpyFace,
    wires: Wires,
    op: str,
    generation: str,
    message: bytes,
    said: tuple[str, ...],
    tmp_path: Path,
) -> None:
    is_here = op == "speculate_get_output"
    worker = wires.new(generation, str(tmp_path) if is_here else "/dev/shm")
    worker.send(message)
    given = outputs_of(face, op)
    with pytest.raises(QueueError) as caught:
        getattr(face.ops, op)(*given)
    assert caught.value.errno == errno.EBADMSG
    assert [word for word in said if word not in str(caught.value)] == [], str(caught.value)
    assert face.array(given[0]).ravel()[:2].tolist() == [-2, 0]
    assert worker.receive() is None, "it stands in the way of all that come after it"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *itertools.product(["INFERENCE_MSG_ID"], ["2", "0", "-1", "x", "", "1 ", "4294967297"]),
        *itertools.product(["INFERENCE_MSG_QUEUE_ID"], ["-1", "x", "1048576", "9" * 30]),
        ("TOKENPIPE_SYSV_GENERATION", "g5"),
    ],
)
def test_a_variable_that_cannot_be_is_refused_by_its_name(
    face: NumpyFace, wires: Wires, variable: str, value: str
) -> None:
    wires.new()
    wires.patch.setenv(variable, value)
    with pytest.raises(OpArgumentError) as caught:
        face.ops.save_output(*plain_arguments(face))
    assert caught.value.argument == variable
    assert value in str(caught.value)


def test_a_folder_that_is_not_there_is_an_error(face: NumpyFace, wires: Wires) -> None:
    wires.new()
    wires.patch.setenv("TOKENPIPE_SYSV_FOLDER", "nowhere")
    with pytest.raises(QueueError) as caught:
        face.ops.save_output(*plain_arguments(face))
    assert caught.value.errno == errno.ENOENT
    assert "nowhere" in str(caught.value)


# --- the queue


def test_no_key_or_queue_is_remembered(face: NumpyFace, wires: Wires) -> None:
    for _ in range(2):
        worker = wires.new()
        face.ops.save_output(*plain_arguments(face))
        assert worker.receive() == plain([0] * 4)
        worker.remove()
        face.ops.save_output(*plain_arguments(face))
        again = wires.worker(worker.key)
        assert again.receive() == plain([0] * 4)


def test_a_queue_that_can_never_hold_the_message_is_refused_at_once(
    face: NumpyFace, wires: Wires
) -> None:
    worker = wires.new()
    from tokenpipe import _native

    _native.Queue(worker.key).raise_to(2000)
    with pytest.raises(QueueError) as caught:
        face.ops.save_output(*plain_arguments(face))
    assert caught.value.errno == errno.EMSGSIZE
    for said in ("2056", "2000", "kernel.msgmax", "kernel.msgmnb", "Nothing was sent"):
        assert said in str(caught.value)


def fill(worker: Worker) -> int:
    return sum(1 for _ in iter(lambda: worker.send(plain([1]), wait=False), False))


def test_a_save_waits_while_the_queue_is_full_and_loses_nothing(
    face: NumpyFace, wires: Wires
) -> None:
    worker = wires.new()
    waiting = fill(worker)
    saver = threading.Thread(target=face.ops.save_output, args=plain_arguments(face))
    saver.start()
    found = [wait_until(worker.receive) for _ in range(waiting + 1)]
    saver.join()
    assert found == [plain([1])] * waiting + [plain([0] * 4)]


def test_a_signal_does_not_lose_what_waits_to_be_sent(face: NumpyFace, wires: Wires) -> None:
    worker = wires.new()
    waiting = fill(worker)
    found: list[bytes | None] = []
    is_sent = threading.Event()

    def on_signal(*_: object) -> None:
        found.append(worker.receive())

    def keep_signalling() -> None:
        while not is_sent.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, on_signal)
    thread = threading.Thread(target=keep_signalling)
    try:
        thread.start()
        face.ops.save_output(*plain_arguments(face))
        is_sent.set()
        thread.join()
    finally:
        is_sent.set()
        signal.signal(signal.SIGUSR1, before)
    found += iter(worker.receive, None)
    assert [m for m in found if m] == [plain([1])] * waiting + [plain([0] * 4)]


def test_a_removed_queue_ends_a_wait_with_the_reason(face: NumpyFace, wires: Wires) -> None:
    worker = wires.new()
    caught: list[Exception] = []

    def get() -> None:
        try:
            face.ops.get_output(*outputs_of(face, "get_output")[:2], True)
        except QueueError as error:
            caught.append(error)

    getter = threading.Thread(target=get)
    getter.start()
    while getter.is_alive():  # until it has come to wait
        wires.worker(worker.key).remove()
        getter.join(0.01)
    (error,) = caught
    assert error.errno in (errno.EIDRM, errno.EINVAL)
    assert f"{worker.key & 0xFFFFFFFF:#010x}" in str(error)


def test_threads_do_not_meet_in_a_message(face: NumpyFace, wires: Wires) -> None:
    worker = wires.new()
    num_threads, each = 4, 50

    def save(k: int) -> None:
        tokens = face.tensor(np.full((50 * (k + 1), 1), k + 1))
        marks, has_work = face.tensor([0] * 512, "int32"), face.tensor([True], "bool")
        for _ in range(each):
            face.ops.save_output(tokens, has_work, marks, 0, False)

    threads = [threading.Thread(target=save, args=(k,)) for k in range(num_threads)]
    for thread in threads:
        thread.start()
    found = [wait_until(worker.receive) for _ in range(num_threads * each)]
    for thread in threads:
        thread.join()
    expected = [plain([k + 1] * 50 * (k + 1)) for k in range(num_threads)]
    assert [found.count(message) for message in expected] == [each] * num_threads


# --- of one face alone


def test_a_wire_says_where_without_the_environment(wires: Wires) -> None:
    from tokenpipe.ops import sysv

    there = wires.new()
    queue_id = free_queue_id("/")
    worker = wires.worker(custom_ftok("/", queue_id))
    wire = sysv.Wire(queue_id, "g4", "/", 5)
    sysv.save_output(np.array([[3]]), True, wire=wire)
    assert worker.receive() == plain([3], 5)
    out = np.full(514, 2)
    worker.send(plain([4]))
    sysv.get_output(out, wire=wire)
    assert out[:3].tolist() == [1, 1, 4]
    assert there.receive() is None
    for bad, argument in (
        (sysv.Wire(generation="g0"), "generation"),
        (sysv.Wire(queue_id=2**20), "queue_id"),
        (sysv.Wire(queue_id=2**40), "queue_id"),
        (sysv.Wire(message_id=2), "message_id"),
    ):
        with pytest.raises(OpArgumentError) as caught:
            sysv.save_output(np.array([[3]]), True, wire=bad)
        assert caught.value.argument == argument


def test_arrays_that_cannot_be_written_are_refused(wires: Wires) -> None:
    from tokenpipe.ops import sysv

    wires.new()
    frozen = np.full(514, 2)
    frozen.flags.writeable = False
    strided = np.full(1028, 2)[::2]
    for x in (frozen, strided, [1] * 514):
        with pytest.raises(OpArgumentError, match="x"):
            sysv.get_output(x, 0, False)


def test_an_array_of_no_dtype_of_an_op_is_refused(wires: Wires) -> None:
    from tokenpipe.ops import sysv

    wires.new()
    for dtype in (np.float64, np.uint8, np.dtype(np.int64).newbyteorder()):
        with pytest.raises(OpArgumentError, match=r"x is .*, must be one of int32, int64, float32"):
            sysv.save_output(np.zeros((1, 1), dtype), True)


def test_strided_arrays_are_sent_as_they_look(wires: Wires) -> None:
    from tokenpipe.ops import sysv

    worker = wires.new()
    sysv.save_output(np.arange(12)[::3], True)
    assert worker.receive() == plain([0, 3, 6, 9])


@pytest.fixture(scope="session")
def paddle_face() -> PaddleFace:
    return PaddleFace()


ON_A_DEVICE: tuple[tuple[Callable[..., None], dict[str, Any]], ...] = (
    (test_save_output_sends_what_the_table_says, {"generation": "g3"}),
    (test_save_output_topk_sends_what_the_table_says, {"generation": "g3", "width": 5}),
    (test_speculate_save_output_sends_what_the_table_says, {"generation": "g3", "depth": 6}),
    (test_mtp_save_first_token_sends_two_tokens_of_rows_at_their_first_step, {}),
    (
        test_speculate_save_output_topk_sends_what_the_table_says,
        {"generation": "g3", "width": 21, "flag": 3},
    ),
    (
        test_mtp_save_first_token_with_topk_sends_candidates_of_the_first_token_alone,
        {"generation": "g3"},
    ),
)


class TestPaddleOnADevice:
    """A real device of Paddle's, though one of memory, whose copies come when they are waited for
    in their stream: what a GPU's tensors go through."""

    @long_messages
    @pytest.mark.parametrize("case", range(len(ON_A_DEVICE)))
    def test_a_save_copies_tensors_on_a_device_and_waits_for_them(
        self, case: int, wires: Wires, tmp_path: Path
    ) -> None:
        save, given = ON_A_DEVICE[case]
        if "tmp_path" in save.__annotations__:
            given = {**given, "tmp_path": tmp_path}
        save(DeviceFace(), wires, **given)

    def test_the_copies_go_through_the_device_s_current_stream(self, wires: Wires) -> None:
        face = DeviceFace()
        (library,) = Path(os.environ["CUSTOM_DEVICE_ROOT"]).glob("*.so")
        device, worker = ctypes.CDLL(str(library)), wires.new()
        begun = device.late_blocking_copies()
        face.ops.save_output(*plain_arguments(face, tokens=[[1], [2], [3], [4]]))
        assert worker.receive() == plain([1, 2, 3, 4])
        assert device.late_blocking_copies() == begun, "the default stream waits for no other"

    def test_a_get_refuses_a_tensor_on_a_device(self, wires: Wires) -> None:
        face, worker = DeviceFace(), wires.new()
        worker.send(plain([1]))
        with pytest.raises(OpArgumentError, match=r"x is written in place.* on the CPU"):
            face.ops.get_output(face.tensor(np.full(514, 2)), 0, False)
        assert worker.receive() == plain([1])


class TestPaddle:
    def test_a_get_writes_through_a_tensor_over_an_array(
        self, paddle_face: PaddleFace, wires: Wires
    ) -> None:
        from tokenpipe.ops import sysv

        worker = wires.new()
        arena = np.full(1028, 2)
        tensor = paddle_face.paddle.utils.dlpack.from_dlpack(arena[514:])
        for get, token in ((paddle_face.ops.get_output, 6), (sysv.get_output, 8)):
            worker.send(plain([token]))
            get(tensor, 0, True)
            assert arena[512:518].tolist() == [2, 2, 1, 1, token, 2]

    def test_the_results_are_the_tensors_that_were_given(
        self, paddle_face: PaddleFace, wires: Wires
    ) -> None:
        worker = wires.new()
        x, *rest = plain_arguments(paddle_face)
        assert paddle_face.ops.save_output(x, *rest).data_ptr() == x.data_ptr()
        worker.receive()
        for op in ("get_output", "get_output_topk", "speculate_get_output_topk"):
            given = outputs_of(paddle_face, op)
            got = getattr(paddle_face.ops, op)(*given)
            for made, gotten in zip(given, got if isinstance(got, list) else [got], strict=False):
                assert gotten.data_ptr() == made.data_ptr()
        arguments = speculate_topk_arguments(paddle_face)
        assert paddle_face.ops.speculate_save_output_topk(*arguments[:-2], 1, False) is None

    def test_a_strided_output_is_refused(self, paddle_face: PaddleFace, wires: Wires) -> None:
        worker = wires.new()
        worker.send(plain([1]))
        whole = paddle_face.tensor(np.full(1028, 2))
        with pytest.raises(OpArgumentError, match="contiguous"):
            paddle_face.ops.get_output(whole[::2], 0, False)
        assert worker.receive() == plain([1])

    def test_dynamic_ops_take_the_id_of_the_call_unless_the_environment_has_one(
        self, paddle_face: PaddleFace, wires: Wires, tmp_path: Path
    ) -> None:
        ops = paddle_face.ops
        x, has_work, marks, *_ = plain_arguments(paddle_face)
        speculative = speculate_arguments(paddle_face)[:6]
        first = paddle_face.tensor([1, 1])
        out, out_spec = paddle_face.tensor(np.full(514, 2)), paddle_face.tensor(np.full(1794, 2))
        for is_set in (False, True):
            there = wires.new()
            here = wires.worker(
                custom_ftok(str(tmp_path), int(os.environ["INFERENCE_MSG_QUEUE_ID"]))
            )
            queue_id = int(os.environ["INFERENCE_MSG_QUEUE_ID"])
            if not is_set:
                wires.patch.delenv("INFERENCE_MSG_QUEUE_ID")
            named = 77 if is_set else queue_id
            ops.save_output_dynamic(x, has_work, marks, 0, named, False)
            assert there.receive() == plain([0] * 4)
            tokens, _, _, lengths, prompts, _ = speculative
            ops.speculate_save_output_dynamic(*speculative, 0, named, False, False)
            assert here.receive() == speculate([1, 1], [])
            ops.mtp_save_first_token_dynamic(
                *(tokens, has_work, lengths, prompts, first), *(0, named, False, False)
            )
            assert here.receive() == speculate([2, 2], [])
            for get in (ops.get_output_dynamic, ops.get_output_ep_dynamic):
                there.send(plain([9]))
                get(out, 0, False, named)
                assert out[:3].tolist() == [1, 1, 9]
            here.send(speculate([1], [[4]]))
            ops.speculate_get_output_dynamic(out_spec, 0, False, named, False)
            assert out_spec[:3].tolist() == [1, 1, 1]

    def test_the_operators_are_registered_as_fastdeploys_are(self, paddle_face: PaddleFace) -> None:
        from paddle.utils.cpp_extension import parse_op_info

        for name, (inputs, attributes, outputs) in OPERATORS.items():
            found = parse_op_info(f"static_op_{name}")
            expected = inputs.split(), attributes.split(), outputs.split()
            assert tuple(map(list, found)) == expected, name

    def test_another_process_gets_what_is_saved_and_hears_of_a_removed_queue(
        self, paddle_face: PaddleFace, wires: Wires
    ) -> None:
        worker = wires.new()
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", GETTER], stdout=subprocess.PIPE, text=True
        )
        with child, child.stdout or sys.stdin as said:
            assert said.readline() == "ready\n"
            paddle_face.ops.save_output(*plain_arguments(paddle_face, tokens=[[1], [2], [3], [4]]))
            assert said.readline() == "[1, 4, 1, 2, 3, 4]\n"
            while child.poll() is None:
                wires.worker(worker.key).remove()
                try:
                    child.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
            assert int(said.readline()) in (errno.EIDRM, errno.EINVAL)


GETTER = """
import paddle
from tokenpipe.errors import QueueError
from tokenpipe.ops.paddle import get_output
paddle.set_device("cpu")
out = paddle.full([514, 1], 2, "int64")
print("ready", flush=True)
get_output(out, 0, True)
print(out[:6].flatten().tolist(), flush=True)
try:
    get_output(out, 0, True)
except QueueError as error:
    print(error.errno, flush=True)
"""

SPECULATIVE = "seq_lens_decoder prompt_lens preempted_idx"
WITH_TOPK = (
    "sampled_token_ids logprob_token_ids logprob_scores logprob_ranks token_num_per_batch "
    f"cu_batch_token_offset not_need_stop {SPECULATIVE}"
)
OPERATORS = {
    "save_output": ("x not_need_stop preempted_idx", "rank_id save_each_rank", "x_out"),
    "save_output_dynamic": (
        *("x not_need_stop preempted_idx", "rank_id msg_queue_id save_each_rank", "x_out"),
    ),
    "get_output": ("x", "rank_id wait_flag", "x_out"),
    "get_output_dynamic": ("x", "rank_id wait_flag msg_queue_id", "x_out"),
    "get_output_ep": ("x", "rank_id wait_flag", "x_out"),
    "get_output_ep_dynamic": ("x", "rank_id wait_flag msg_queue_id", "x_out"),
    "save_output_topk": (
        *("x topk_ids logprob_scores ranks not_need_stop preempted_idx", "rank_id", "x_out"),
    ),
    "get_output_topk": ("x scores ranks", "k rank_id wait_flag", "x_out scores_out ranks_out"),
    "speculate_save_output": (
        f"accept_tokens accept_num not_need_stop {SPECULATIVE}",
        *("rank_id save_each_rank skip_prefill", "x_out"),
    ),
    "speculate_save_output_dynamic": (
        f"accept_tokens accept_num not_need_stop {SPECULATIVE}",
        *("rank_id msg_queue_id save_each_rank skip_prefill", "x_out"),
    ),
    "mtp_save_first_token": (
        "x not_need_stop seq_lens_decoder prompt_lens step_idx",
        *("rank_id save_each_rank skip_chunk_prefill", "x_out"),
    ),
    "mtp_save_first_token_dynamic": (
        "x not_need_stop seq_lens_decoder prompt_lens step_idx",
        *("rank_id msg_queue_id save_each_rank skip_chunk_prefill", "x_out"),
    ),
    "speculate_get_output": ("x", "rank_id wait_flag get_each_rank", "x_out"),
    "speculate_get_output_dynamic": ("x", "rank_id wait_flag msg_queue_id get_each_rank", "x_out"),
    "speculate_save_output_topk": (WITH_TOPK, "message_flag rank_id save_each_rank", ""),
    "mtp_save_first_token_with_topk": (WITH_TOPK, "message_flag rank_id save_each_rank", ""),
    "speculate_get_output_topk": (
        *("output_tokens output_scores output_ranks", "real_k rank_id wait_flag"),
        "output_tokens_out output_scores_out output_ranks_out",
    ),
}
