"""Messages of FastDeploy's queue become steps: every variant and generation, against a slow reading
of the same bytes, and each malformed one refused by its reason (output-ops.md sections 1 to 3)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import fastdeploy_peer as peer
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenpipe as tp
from tokenpipe import _native, layout
from tokenpipe.config import SYSV_OPS
from tokenpipe.segment import Segment
from tokenpipe.sources.sysv import queue_key

TOKEN, NONE, RECOVERY, ACKNOWLEDGED = 0, 1, 2, 3
ROWS, BYTES, FLAGS = 1, 4, 5  # TP_BAD_*
MESSAGE_END = 128  # TP_STEP_MESSAGE_END
unhurried = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Bench:
    """A reader's end without a reader's process: one message in, one slot out."""

    def __init__(self, config: tp.PipelineConfig) -> None:
        self.config = config
        self.segment = Segment.create(config)
        self.worker = peer.Worker(queue_key(config))
        self.producer = _native.Producer(self.segment.core, 0.0)
        self.book = _native.Book(self.segment.core, self.segment.source)
        _native.set_queue(self.segment.source, queue_key(config), self.queue.id, False, 0, 0)
        self.reader = self.open_reader()
        self.decoder = _native.Decoder(self.segment.core, 0, 0.0)

    @property
    def queue(self) -> _native.Queue:
        return _native.Queue(queue_key(self.config))

    def open_reader(self) -> _native.SysvReader:
        """A reader, or the successor of one."""
        config = self.config
        generation = int(config.sysv_generation[1:])
        key = queue_key(config)
        core, source = self.segment.core, self.segment.source
        return _native.SysvReader(source, core, config.sysv_variant, generation, key, 10.0)

    def receive(self) -> dict[str, Any] | None:
        """Publishes what one receive gives, as plain columns; None when it gives no step."""
        assert self.producer.claim(0.0)
        if not self.reader.get_output(self.producer, 0.0):
            return None
        sequence = self.producer.cursor
        self.producer.publish()
        step = self.step(sequence)
        self.decoder.run(64, 0.0)
        return step

    def step(self, sequence: int) -> dict[str, Any]:
        plan = self.config.plan()
        memory = self.segment.core_memory
        at = plan["slots"] + (sequence % self.config.ring_slots) * plan["slot_bytes"]
        head = np.frombuffer(memory, layout.STEP, 1, at)[0]
        n, m, width, flags = (int(head[k]) for k in ("num_rows", "num_tokens", "width", "flags"))
        columns = _native.step_columns(n, m, width, flags)

        def column(name: str, dtype: Any, *shape: int) -> Any:
            count = int(np.prod(shape))
            return np.frombuffer(memory, dtype, count, at + columns[name]).reshape(shape).tolist()

        has_accept = bool(flags & 1)
        return {
            "bad": int(head["bad"]),
            "message_flag": int(head["message_flag"]),
            "sequences": (int(head["sequence"]), int(head["source_sequence"])),
            "flags": flags,
            "saved_tokens": int(head["saved_tokens"]),
            "rows": column("rows", np.uint32, n),
            "states": column("states", np.uint8, n),
            "accept": column("accept_num", np.int32, n) if has_accept else None,
            "tokens": column("tokens", np.int32, m),
            "ids": column("topk_ids", np.int32, m, width),
            "logprobs": column("logprobs", np.float32, m, width),
            "ranks": column("ranks", np.int32, m) if width else [],
        }

    def close(self) -> None:
        self.worker.remove()
        self.segment.close()


@contextlib.contextmanager
def bench(op: str, **more: Any) -> Iterator[Bench]:
    speculative = {"max_draft_tokens": 6} if op.startswith("speculate") else {}
    made = Bench(
        tp.PipelineConfig(
            **{
                "max_num_seqs": 16,
                "num_decoders": 1,
                "ring_slots": 4,
                "source": "sysv",
                "sysv_op": op,
                "sysv_folder": "/dev/shm",
                "sysv_queue_id": peer.free_queue_id(),
                **speculative,
                **more,
            }
        )
    )
    try:
        yield made
    finally:
        made.close()


def state_of(value: int) -> int:
    if value >= 0:
        return TOKEN
    return {-9: ACKNOWLEDGED, -3: RECOVERY}.get(value, NONE)


TOKENS = st.lists(
    st.integers(0, 2**31 - 1) | st.sampled_from([-1, -2, -3, -4, -9]), min_size=0, max_size=16
)


# --- the four variants


@unhurried
@given(st.lists(TOKENS, min_size=1, max_size=6), st.sampled_from([1, -1, 7]))
def test_plain_messages(batches: list[list[int]], sign: int) -> None:
    with bench("get_output") as b:
        saved = 0
        for number, tokens in enumerate(batches):
            assert b.worker.send(peer.plain(tokens, sign=sign, stale=77))
            step = b.receive()
            assert step is not None
            saved += sum(t >= 0 for t in tokens)
            assert step["bad"] == 0
            assert step["sequences"] == (number, number)
            assert step["tokens"] == tokens
            assert step["states"] == [state_of(t) for t in tokens]
            assert step["rows"] == list(range(len(tokens)))
            assert step["flags"] == 32 | MESSAGE_END | (4 if sign > 0 else 0)
            assert step["saved_tokens"] == saved == _native.saved_tokens(b.segment.source)
        assert b.receive() is None


@pytest.mark.parametrize(("generation", "width"), [("g3", 21), ("g2", 5), ("g4", 21), ("g4", 4)])
@pytest.mark.parametrize("wanted", [20, 2, 0])
def test_topk_messages(queue_limits: Any, generation: str, width: int, wanted: int) -> None:
    rng = np.random.default_rng(width + wanted)
    ids = rng.integers(0, 150_000, (7, width))
    ids[3, 0], ids[5, 0] = -9, -3
    scores = rng.standard_normal((7, width)).astype(np.float32)
    ranks = rng.integers(0, 1000, 7)
    packed = generation == "g4"
    with bench("get_output_topk", sysv_generation=generation, top_logprobs=wanted) as b:
        b.worker.send(peer.topk(ids, scores, list(ranks), packed=packed))
        step = b.receive()
    assert step is not None
    assert step["bad"] == 0
    sent_ids, sent_scores = np.full((7, 21), -1), np.zeros((7, 21), np.float32)
    sent_ids[:, :width], sent_scores[:, :width] = ids, scores
    sent_ids[3] = -9
    columns = min(wanted + 1, width if packed else 21)
    assert step["tokens"] == ids[:, 0].tolist()
    assert step["ids"] == sent_ids[:, :columns].tolist()
    assert step["logprobs"] == sent_scores[:, :columns].tolist()
    assert step["ranks"] == ranks.tolist()
    assert step["states"] == [state_of(t) for t in ids[:, 0]]


COUNTS = [3, 0, -9, 6, -3, 1, -1, 7, 2]


def test_speculative_messages() -> None:
    tokens = np.arange(9 * 6).reshape(9, 6) + 1000
    with bench("speculate_get_output") as b:
        b.worker.send(peer.speculate(tokens, COUNTS))
        step = b.receive()
    check_accepted(step, tokens)


def check_accepted(step: dict[str, Any] | None, tokens: Any) -> list[tuple[int, int]]:
    """Checks counts, states and tokens of COUNTS; returns (row, position) of each token."""
    assert step is not None
    assert step["bad"] == 0
    # A count of 7 cannot be: it is handed on for the decoder to end that row, without its tokens.
    assert step["accept"] == [max(c, 0) for c in COUNTS]
    assert step["states"] == [TOKEN if c > 0 else state_of(c) if c else NONE for c in COUNTS]
    taken = [(i, j) for i, c in enumerate(COUNTS) if 0 < c <= 6 for j in range(c)]
    assert step["tokens"] == [int(tokens[at]) for at in taken]
    return taken


@pytest.mark.parametrize(("generation", "width"), [("g3", 21), ("g4", 21), ("g4", 3)])
@pytest.mark.parametrize("flag", [3, 4])
@pytest.mark.parametrize("tail", [True, False])
def test_speculative_topk_messages(
    queue_limits: Any, generation: str, width: int, flag: int, tail: bool
) -> None:
    rng = np.random.default_rng(width)
    ids = rng.integers(0, 150_000, (9, 6, width))
    scores = rng.standard_normal((9, 6, width)).astype(np.float32)
    ranks = rng.integers(0, 1000, (9, 6))
    packed = generation == "g4"
    with bench("speculate_get_output_topk", sysv_generation=generation, top_logprobs=4) as b:
        message = peer.speculate_topk(
            ids, scores, ranks, COUNTS, flag=flag, packed=packed, tail=tail
        )
        b.worker.send(message)
        step = b.receive()
    assert step is not None
    assert step["message_flag"] == flag
    assert bool(step["flags"] & MESSAGE_END) == (flag == 3)
    taken = check_accepted(step, ids[:, :, 0])
    columns = min(5, width)
    assert step["ids"] == [ids[at][:columns].tolist() for at in taken]
    assert step["logprobs"] == [scores[at][:columns].tolist() for at in taken]
    assert step["ranks"] == [int(ranks[at]) for at in taken]
    assert step["saved_tokens"] == (len(taken) if flag == 3 else 0)


# --- what is refused


def words(first: int, second: int, *rest: int) -> bytes:
    return struct.pack(f"{2 + len(rest)}i", first, second, *rest)


@pytest.mark.parametrize(
    ("message", "mtype", "reason"),
    [
        (peer.plain([1])[:-4], 1, BYTES),
        (peer.plain([1])[:8], 1, BYTES),
        (b"", 1, BYTES),
        (peer.plain([1]) + b"\0" * 4, 1, BYTES),
        (peer.plain([1]) + b"\0" * 3000, 1, BYTES),
        (peer.plain([1]), 2, FLAGS),
        (peer.plain([1]), 2**61, FLAGS),
        (words(1, 17) + peer.plain([])[8:], 1, ROWS),
        (words(1, 513) + peer.plain([])[8:], 1, ROWS),
        (words(1, -1) + peer.plain([])[8:], 1, ROWS),
        (words(1, -(2**31)) + peer.plain([])[8:], 1, ROWS),
        (words(1, 2**31 - 1) + peer.plain([])[8:], 1, ROWS),
    ],
)
def test_a_bad_message_is_refused_by_its_reason_and_the_next_is_right(
    message: bytes, mtype: int, reason: int
) -> None:
    with bench("get_output") as b:
        b.worker.send(message, mtype)
        b.worker.send(peer.plain([5, 6]))
        refused, good = b.receive(), b.receive()
        assert refused is not None
        assert (refused["bad"], refused["rows"], refused["tokens"]) == (reason, [], [])
        assert good is not None
        assert (good["bad"], good["tokens"], good["saved_tokens"]) == (0, [5, 6], 2)
        assert b.receive() is None


@pytest.mark.parametrize(
    ("generation", "head", "reason"),
    [
        ("g3", 2 | 21 << 16, FLAGS),  # packed, by a g4 sender
        ("g4", 2, FLAGS),  # not packed, by a g3 sender
        ("g4", 2 | 22 << 16, FLAGS),
        ("g4", 17 | 21 << 16, ROWS),
        ("g3", -2, FLAGS),
    ],
)
def test_a_header_that_contradicts_the_generation_is_refused(
    queue_limits: Any, generation: str, head: int, reason: int
) -> None:
    message = peer.topk(np.ones((2, 3)), np.ones((2, 3)), [1, 1])
    with bench("get_output_topk", sysv_generation=generation) as b:
        b.worker.send(words(1, head) + message[8:])
        step = b.receive()
        assert step is not None
        assert step["bad"] == reason


@pytest.mark.parametrize(
    ("generation", "head", "rows", "reason"),
    [
        ("g3", 3 | 21 << 8, 1, FLAGS),
        ("g3", 5, 1, FLAGS),
        ("g3", 0, 1, FLAGS),
        ("g4", 3, 1, FLAGS),
        ("g4", 3 | 22 << 8, 1, FLAGS),
        ("g3", 3, 513, ROWS),
        ("g3", 3, -1, ROWS),
    ],
)
def test_a_bad_header_of_a_speculative_topk_message_is_refused(
    queue_limits: Any, generation: str, head: int, rows: int, reason: int
) -> None:
    message = peer.speculate_topk(np.ones((1, 2, 3)), np.ones((1, 2, 3)), np.ones((1, 2)), [2])
    with bench("speculate_get_output_topk", sysv_generation=generation) as b:
        b.worker.send(words(1, head, rows) + message[12:])
        step = b.receive()
        assert step is not None
        assert step["bad"] == reason


def test_a_message_of_a_narrower_variant_is_a_misfit_too() -> None:
    with bench("speculate_get_output") as b:
        b.worker.send(peer.plain([7]))
        b.worker.send(peer.speculate([[7]], [1]))
        refused, good = b.receive(), b.receive()
        assert refused is not None
        assert refused["bad"] == BYTES
        assert b.reader.num_misfits == 1
        assert good is not None
        assert good["tokens"] == [7]


def test_a_message_of_a_wider_variant_is_taken_off_the_head(queue_limits: Any) -> None:
    """FastDeploy's own reader spins on E2BIG for ever."""
    with bench("get_output") as b:
        b.worker.send(peer.topk(np.ones((2, 21)), np.ones((2, 21)), [1, 1]))
        b.worker.send(peer.plain([7]))
        refused, good = b.receive(), b.receive()
        assert refused is not None
        assert refused["bad"] == BYTES
        assert b.reader.num_misfits == 1
        assert good is not None
        assert good["tokens"] == [7]


@unhurried
@given(st.data())
def test_any_bytes_are_a_step_or_refused(data: st.DataObject) -> None:
    """Whatever stands in a message of the right length, its step holds only what it may."""
    with bench("speculate_get_output") as b:
        message = bytearray(peer.speculate(np.arange(12).reshape(2, 6), [2, 3]))
        for _ in range(data.draw(st.integers(1, 8))):
            at = 4 * data.draw(st.integers(0, len(message) // 4 - 1))
            message[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
        b.worker.send(bytes(message))
        step = b.receive()
        assert step is not None
        if step["bad"]:
            assert step["rows"] == []
        else:
            assert len(step["rows"]) <= 16
            assert len(step["tokens"]) == sum(c for c in step["accept"] if c <= 6)
        b.worker.send(peer.speculate(np.array([[4, 5]]), [2]))
        after = b.receive()
        assert after is not None
        assert after["tokens"] == [4, 5]


# --- barriers and successors


def test_a_barrier_tells_where_the_queue_was() -> None:
    with bench("get_output") as b:
        b.worker.send(peer.plain([1]))
        number = b.book.send_barrier()
        b.worker.send(peer.plain([2]))
        assert not b.book.has_passed(number)
        assert b.receive() is not None
        assert b.receive() is None  # the barrier
        assert b.book.has_passed(number)
        assert b.book.barrier_cursor() == 1
        assert b.receive() is not None


def test_a_barrier_fits_a_queue_that_is_full() -> None:
    with bench("get_output") as b:
        while b.worker.send(peer.plain([1]), wait=False):
            pass
        assert b.book.send_barrier() == 1


def test_a_barrier_that_nobody_has_sent_moves_nothing() -> None:
    with bench("get_output") as b:
        b.worker.send(b"", (1 << 62) + 5)
        assert b.receive() is None
        assert not b.book.has_passed(5)
        b.worker.send(peer.plain([3]))
        assert b.receive() is not None


def in_hand(b: Bench, length: int | None = None) -> None:
    """Leaves the next message in the claimed slot, as a reader that is killed at once does."""
    assert b.producer.claim(0.0)
    assert b.reader.get_output(b.producer, 0.0)


@pytest.mark.parametrize("count", [1, 3, 9])  # the slot is new, and used before
def test_a_successor_publishes_the_message_in_hand_once(count: int) -> None:
    with bench("get_output") as b:
        for i in range(count - 1):
            b.worker.send(peer.plain([i]))
            b.receive()
        b.worker.send(peer.plain([70]))
        b.worker.send(peer.plain([71]))
        in_hand(b)
        b.reader = b.open_reader()
        b.producer = _native.Producer(b.segment.core, 0.0)
        first, second = b.receive(), b.receive()
        assert first is not None
        assert second is not None
        assert (first["tokens"], second["tokens"]) == ([70], [71])
        assert second["saved_tokens"] == count + 1
        assert b.receive() is None


def test_a_successor_of_a_reader_that_had_received_nothing_repeats_nothing() -> None:
    """The slot holds an older message, four sequences back."""
    with bench("get_output") as b:
        for i in range(4):
            b.worker.send(peer.plain([i]))
            b.receive()
        assert b.producer.claim(0.0)
        assert not b.reader.get_output(b.producer, 0.0)
        b.reader = b.open_reader()
        assert b.receive() is None


@pytest.mark.parametrize("message", [b"", peer.plain([1])[:-4], peer.plain([1]) + b"\1" * 8])
def test_a_successor_refuses_a_message_of_another_length_too(message: bytes) -> None:
    with bench("get_output") as b:
        b.worker.send(message)
        in_hand(b)
        b.reader = b.open_reader()
        b.producer = _native.Producer(b.segment.core, 0.0)
        step = b.receive()
        assert step is not None
        assert step["bad"] == BYTES


# --- keys


@pytest.mark.parametrize("folder", ["/dev/shm", "/tmp"])
@pytest.mark.parametrize("queue_id", [1, 8000, 8256, 2**20 - 1])
def test_keys_are_those_of_both_generations_of_senders(folder: str, queue_id: int) -> None:
    assert _native.queue_key(folder, queue_id, 1) == peer.ftok(folder, queue_id)
    assert _native.queue_key(folder, queue_id, 2) == peer.ftok(folder, queue_id)
    assert _native.queue_key(folder, queue_id, 3) == peer.custom_ftok(folder, queue_id)
    assert _native.queue_key(folder, queue_id, 4) == peer.custom_ftok(folder, queue_id)


def test_a_folder_that_is_not_there_gives_no_key() -> None:
    """FastDeploy's own falls back to the key -1, where all such processes meet."""
    with pytest.raises(tp.QueueError, match=r"/nowhere.*No such file") as caught:
        _native.queue_key("/nowhere", 1, 3)
    assert caught.value.errno == 2


def test_the_messages_have_the_lengths_of_the_wire() -> None:
    assert {op: _native.payload_bytes(v) for op, v in SYSV_OPS.items()} == peer.BYTES


def test_a_reader_that_finds_another_queue_says_so_before_all_else() -> None:
    """Whoever runs has a hole, and barriers that were on their way will not come."""
    with bench("get_output") as b:
        b.worker.send(peer.plain([1]))
        lost = b.book.send_barrier()
        b.worker.remove()
        assert b.book.send_barrier() == 0, "no room: the queue is not there"
        b.worker = peer.Worker(queue_key(b.config))
        b.worker.send(peer.plain([2]))
        b.reader = b.open_reader()
        assert b.book.has_passed(lost)
        b.reader = (
            b.open_reader()
        )  # one that dies before it has said it is followed by one that does
        gap, step = b.receive(), b.receive()
        assert gap is not None
        assert step is not None
        assert (gap["flags"], gap["rows"], gap["bad"]) == (32 | 64, [], 0)
        assert (step["flags"], step["tokens"]) == (32 | 4 | MESSAGE_END, [2])


def test_a_barrier_s_type_with_a_payload_is_a_refused_message() -> None:
    with bench("get_output") as b:
        b.worker.send(peer.plain([1]), 1 << 62)
        step = b.receive()
        assert step is not None
        assert step["bad"] == FLAGS


def test_a_queue_that_is_gone_is_an_error_with_its_number() -> None:
    with bench("get_output") as b:
        b.worker.remove()
        assert b.producer.claim(0.0)
        with pytest.raises(tp.QueueError, match="receive from the queue of key 0x"):
            b.reader.get_output(b.producer, 0.0)
