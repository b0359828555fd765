"""cuda_ops/pickle.hpp: what may be in a message of the zmq path, and what is refused by name.

Python's own pickle is used in these tests only, to make messages and to compare with.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from inprocess import InProcess
from stand_ins import (
    OUTPUT,
    PADDLE,
    RECORDS,
    DecoderState,
    LogprobsTensors,
    StreamTransferData,
    Tensor,
    candidates,
    pickled,
    record,
    unpickled,
)

import tokenpipe as tp
from tokenpipe import _native

MAX_BYTES = 1 << 20
ROWS, TOP, DRAFTS, FLOATS = 8, 4, 3, 8
DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
FLOAT_DTYPES = ("f2", "f4", "f8")

PROTO, STOP, MARK, NONE, EMPTY_TUPLE = b"\x80\x04", b".", b"(", b"N", b")"
EMPTY_LIST, EMPTY_DICT, APPEND, MEMOIZE, REDUCE, NEWOBJ = b"]", b"}", b"a", b"\x94", b"R", b"\x81"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


RECORD, STATE = name(RECORDS, "StreamTransferData"), name(RECORDS, "DecoderState")
RECONSTRUCT = name("numpy._core.multiarray", "_reconstruct")
GETATTR, DTYPE = name("builtins", "getattr"), name("numpy", "dtype")


def message(body: bytes) -> bytes:
    return PROTO + body + STOP


@pytest.fixture(scope="module")
def pipe() -> Iterator[InProcess]:
    config = tp.PipelineConfig(
        max_num_seqs=ROWS, top_logprobs=TOP, max_draft_tokens=DRAFTS, max_pooling_floats=FLOATS
    )
    with InProcess(config) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def records(pipe: InProcess) -> _native.StreamReader:
    return _native.StreamReader(pipe.segment.source, pipe.segment.core, MAX_BYTES)


def refusal(records: _native.StreamReader, body: bytes) -> tuple[str, str]:
    """Why the message is refused; it must be, and the next good one must be read."""
    refused = records.read(body)
    assert refused is not None
    assert records.read(pickled([record(0, 7)])) is None
    return refused


def a_row(**fields: Any) -> list[StreamTransferData]:
    return [record(1, 5, **fields)]


def masked(thing: Any) -> bytes:
    """A message with `thing` in a field that is read and not used."""
    return pickled(a_row(sampling_mask=thing))


# --- what is read


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("numpy", [1, 2])
def test_every_integer_dtype_is_read(
    records: _native.StreamReader, protocol: int, numpy: int
) -> None:
    for dtype, order in itertools.product(DTYPES, "<>"):
        array = np.array([1, 0, 1], np.dtype(dtype).newbyteorder(order))
        good = [StreamTransferData(DecoderState.TEXT, 1, array)]
        assert records.read(pickled(good, protocol, numpy)) is None, (dtype, order)


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("numpy", [1, 2])
def test_every_float_dtype_order_and_shape_is_read(
    records: _native.StreamReader, protocol: int, numpy: int
) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (6,), (2, 3), (3, 2))
    for dtype, order, shape in itertools.product(FLOAT_DTYPES, "<>", shapes):
        array = np.zeros(shape, np.dtype(dtype).newbyteorder(order))
        for ordered in (array, np.asfortranarray(array)):
            good = [record(1, pooler_output=ordered)]
            assert records.read(pickled(good, protocol, numpy)) is None, (dtype, order, shape)


@pytest.mark.parametrize("state", list(DecoderState))
def test_every_decoder_state_is_read_in_both_spellings(
    records: _native.StreamReader, state: DecoderState
) -> None:
    row = [record(1, 5, decoder_state=state)]
    by_value = pickled(row)
    assert records.read(by_value) is None
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(enum, "TEXT").
    spelt = text(state.value)
    assert by_value.count(spelt) == 1
    call = STATE + text(state.name) + b"\x86" + REDUCE
    empty_record = RECORD + EMPTY_TUPLE + NEWOBJ
    fields = MARK + text("decoder_state") + GETATTR + call
    fields += text("batch_id") + b"K\x01" + text("accept_num") + b"K\x00"
    fields += text("tokens") + array_of_int64(b"") + b"u"
    by_name = message(EMPTY_LIST + empty_record + EMPTY_DICT + fields + b"ba")
    assert records.read(by_name) is None


def frame(size: int) -> bytes:
    return b"\x95" + struct.pack("<Q", size)


def array_of_int64(data: bytes, size: int | None = None) -> bytes:
    """_frombuffer(data, dtype("i8"), (size,), "C"), by hand."""
    dtype = DTYPE + text("i8") + b"\x89\x88\x87" + REDUCE
    dtype += MARK + b"K\x03" + text("<") + NONE * 3 + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    size = len(data) // 8 if size is None else size
    call = b"C" + bytes([len(data)]) + data + dtype
    call += b"J" + struct.pack("<i", size) + b"\x85" + text("C")
    return name("numpy._core.numeric", "_frombuffer") + MARK + call + b"t" + REDUCE


def test_the_envelope_of_fastdeploys_servers_is_opened(records: _native.StreamReader) -> None:
    envelope = {"__meta": {"send_ts": 1.5}, "data": a_row()}
    assert records.read(pickled(envelope)) is None
    assert refusal(records, pickled({"data": a_row()}))[0] == "type"


def test_lists_longer_than_one_append_are_read(records: _native.StreamReader) -> None:
    many = [record(i % ROWS, -1) for i in range(2 * ROWS)]
    assert records.read(pickled(many)) is None


@settings(max_examples=150, deadline=None)
@given(
    array=hnp.arrays(
        hnp.floating_dtypes(sizes=(16, 32, 64), endianness="?"),
        hnp.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=2),
        elements=st.floats(-100, 100, width=16),
    ),
    protocol=st.sampled_from([4, 5]),
    is_fortran=st.booleans(),
    numpy=st.sampled_from([1, 2]),
)
def test_what_is_read_is_what_pickle_reads(
    pipe: InProcess,
    records: _native.StreamReader,
    array: np.ndarray,
    protocol: int,
    is_fortran: bool,
    numpy: int,
) -> None:
    if is_fortran:
        array = np.asfortranarray(array)
    body = pickled([record(2, pooler_output=array)], protocol, numpy)
    (theirs,) = unpickled(body)
    assert records.read(body) is None
    assert pipe.producer.claim(0.0)
    records.fill(pipe.producer)
    at = pipe.config.plan()["slots"] + _native.step_columns(1, 1, array.size, 8)["logprobs"]
    ours = np.frombuffer(pipe.segment.core_memory, np.float32, array.size, at)
    np.testing.assert_array_equal(ours, theirs.pooler_output.astype(np.float32).ravel())


# --- what is refused, each by its reason


class Evil:
    """Runs a command when it is unpickled by Python's own unpickler."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo never",)


class Hostile(list):  # type: ignore[type-arg]
    """A list subclass."""


@pytest.mark.parametrize(
    ("what", "body", "reason", "words"),
    [
        ("os.system", pickled([Evil()]), "name", "posix.system"),
        ("os.system in a field", masked(Evil()), "name", "posix.system"),
        ("eval", message(name("builtins", "eval") + text("1") + b"\x85R"), "name", "eval"),
        ("a dotted name", message(name("numpy", "ndarray.__class__")), "name", "__class__"),
        ("a known name elsewhere", message(name("evil", "ndarray")), "name", "evil.ndarray"),
        ("a list subclass", pickled(Hostile()), "name", "Hostile"),
        ("a set", pickled({1}), "opcode", "143"),
        ("GLOBAL", message(b"cos\nsystem\n(tR"), "opcode", "99"),
        ("INST", message(b"(ios\nsystem\n"), "opcode", "105"),
        ("OBJ", message(b"(" + name("numpy", "ndarray") + b"o"), "opcode", "111"),
        ("EXT1", message(b"\x82\x01"), "opcode", "130"),
        ("EXT4", message(b"\x84\x01\x00\x00\x00"), "opcode", "132"),
        ("PERSID", message(b"Pid\n"), "opcode", "80"),
        ("BINPERSID", message(NONE + b"Q"), "opcode", "81"),
        ("NEWOBJ_EX", message(RECORD + b")}\x92"), "opcode", "146"),
        ("NEXT_BUFFER", message(b"\x97"), "opcode", "151"),
        ("READONLY_BUFFER", message(b"\x98"), "opcode", "152"),
        ("LONG4", message(b"\x8b\xff\xff\xff\x7f"), "opcode", "139"),
        ("BINBYTES8", message(b"\x8e" + b"\xff" * 8), "opcode", "142"),
        ("a LONG of 255 bytes", message(b"\x8a\xff" + b"\x01" * 255), "limit", "255"),
        ("a LONG of 9 bytes", pickled(a_row(accept_num=1 << 70)), "limit", "9 bytes"),
        ("a giant BINBYTES", message(b"B\xff\xff\xff\xff"), "truncated", "4294967295"),
        ("a giant BYTEARRAY8", message(b"\x96" + b"\xff" * 8), "truncated", str(2**64 - 1)),
        ("a giant FRAME", message(b"\x95" + b"\xff" * 8), "truncated", str(2**64 - 1)),
        ("a frame in a frame", message(frame(20) + frame(0) + b"N" * 11), "truncated", "frame"),
        ("a cut argument", PROTO + b"K", "truncated", "1 bytes are wanted at byte 3, 0 are"),
        ("an argument across a frame's end", message(frame(1) + b"K\x01"), "truncated", "0 are"),
        ("bytes behind the end", pickled([]) + b"N", "truncated", "1 bytes follow"),
        ("deep lists", message(b"]" * 5000), "limit", "stack"),
        ("deep marks", message(b"(" * 17), "limit", "marks"),
        ("a memo bomb", message(b"N" + MEMOIZE * 20000), "limit", "memo"),
        ("a tuple bomb", message(b"N" + (b"\x85" * 20000)), "limit", "tuples"),
        ("a doubling bomb", message(b"N" + (b"\x94h\x00\x86" * 20000)), "limit", "tuples"),
        ("a list bomb", message(b"]" + b"Na" * 20000), "limit", "lists and dicts"),
        ("many lists", message(b"]" + b"]a" * 20000), "limit", "lists and dicts"),
        ("an unknown memo entry", message(b"h\x07"), "opcode", "memo entry 7"),
        ("a far memo entry", message(b"j\xff\xff\xff\xff"), "opcode", "4294967295"),
        ("a pop of nothing", message(b"a"), "opcode", "2 values"),
        ("a pop below a mark", message(b"](Na"), "opcode", "2 values"),
        ("no mark", message(b"]e"), "opcode", "mark"),
        ("an odd dict", message(b"}(Nu"), "opcode", "without a value"),
        ("two values", message(b"NN"), "type", "2 values"),
        ("nothing", message(b""), "type", "0 values"),
        ("an open mark", message(b"]("), "type", "stack"),
        ("a call of an int", message(b"K\x01)R"), "type", "an int"),
        ("a call of a record's class", message(RECORD + b")R"), "call", "class"),
        ("arguments for a record", message(RECORD + b"K\x01\x85\x81"), "call", "1 arguments"),
        ("an object of dtype", message(DTYPE + b")\x81"), "call", "class"),
        (
            "getattr of a record",
            message(GETATTR + RECORD + text("__init__") + b"\x86R"),
            "call",
            "getattr",
        ),
        ("getattr of no state", message(GETATTR + STATE + text("mro") + b"\x86R"), "name", "mro"),
        (
            "_reconstruct of another class",
            message(RECONSTRUCT + DTYPE + b"K\x00\x85C\x01b\x87R"),
            "call",
            "_reconstruct",
        ),
        ("a state for a list", message(b"])b"), "call", "a list is given a state"),
        ("a state for a name", message(DTYPE + b")b"), "call", "state"),
        (
            "a record's state that is a tuple",
            message(RECORD + b")\x81" + b"N}\x86b"),
            "type",
            "a dict",
        ),
        ("a second state", message(RECORD + b")\x81}b}b"), "call", "second state"),
        ("an object array", masked(np.array([None])), "array", "O8"),
        ("a complex array", masked(np.zeros(1, complex)), "array", "c16"),
        ("a text array", masked(np.array(["a"])), "array", "U1"),
        ("three dimensions", masked(np.zeros((1, 1, 1))), "array", "3 dim"),
        ("too few bytes", message(array_of_int64(b"\0" * 8, 2)), "array", "8 bytes"),
        ("too many bytes", message(array_of_int64(b"\0" * 16, 1)), "array", "16 bytes"),
        ("a negative side", message(array_of_int64(b"", -1)), "array", "side"),
        ("a tensor of another dtype", masked(Tensor(np.zeros(2), "int64")), "array", "float64"),
        ("a wrong bfloat16", masked(Tensor(np.zeros(2), "bfloat16")), "array", "bfloat16"),
        ("no list", pickled(7), "type", "an int"),
        ("a list of ints", pickled([7]), "type", "an int"),
    ],
)
def test_everything_else_is_refused_by_name(
    records: _native.StreamReader, what: str, body: bytes, reason: str, words: str
) -> None:
    found, said = refusal(records, body)
    assert (found, words in said) == (reason, True), f"{what}: {found}: {said}"


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_older_protocols_are_refused_by_number(
    records: _native.StreamReader, protocol: int
) -> None:
    reason, said = refusal(records, pickled(a_row(), protocol))
    assert reason == "protocol"
    assert protocol < 2 or f"protocol {protocol}" in said


def test_a_message_larger_than_the_limit_is_refused(records: _native.StreamReader) -> None:
    reason, said = refusal(records, b"\0" * (MAX_BYTES + 1))
    assert (reason, str(MAX_BYTES) in said) == ("size", True)


def test_no_word_of_a_sender_reaches_a_terminal_unchanged(records: _native.StreamReader) -> None:
    _, said = refusal(records, message(name("\x1b[31m\n", "x" * 200)))
    assert said.isprintable()
    assert len(said) < 200


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_message_cut_anywhere_is_refused(records: _native.StreamReader, protocol: int) -> None:
    prompt = candidates([[1, 2], [3, 4]], [[0.5, 0.25]] * 2, [1, 2])
    whole = pickled(
        a_row(logprobs=candidates([[5, 6]], [[0, 1]], [1]), prompt_logprobs=prompt), protocol
    )
    assert records.read(whole) is None
    for end in range(len(whole)):
        assert records.read(whole[:end]) is not None, f"the first {end} bytes"


# --- mutated messages


def rich_messages() -> list[bytes]:
    """One message of each kind, for a fuzzer to start from."""
    logprobs = candidates([[5, 6, 7]], [[0, -1, -2]], [1])
    prompt = candidates([[1, 2], [3, 4]], [[0.5, 0.25]] * 2, [1, 2])
    plain = [record(i, i) for i in range(3)]
    pooled = [record(i, pooler_output=np.ones(4, np.float16)) for i in range(2)]
    drafts = [
        record(1, [4, 5], accept_num=np.array([2], np.int32), output_type=3),
        record(1, [4, 5], accept_num=np.int64(2), output_type=4, logprobs=prompt),
    ]
    things = [plain, [record(0, 5, logprobs=logprobs, prompt_logprobs=prompt)], pooled, drafts]
    things.append([record(0, -9), record(1, -3), record(2, -1), record(3, [1, 2, 3])])
    return [pickled(t, p, n) for t in things for p in (4, 5) for n in (1, 2)]


def mutated(rng: random.Random, messages: list[bytes]) -> bytes:
    """A message with some of its bytes changed, moved, doubled or taken from another."""
    body = bytearray(rng.choice(messages))
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(body)), rng.choice((1, 1, 1, 2, 4, 16))
        match rng.randrange(6):
            case 0:
                body[at] = rng.randrange(256)
            case 1:
                body[at] ^= 1 << rng.randrange(8)
            case 2:
                body[at:at] = body[at : at + size]
            case 3 if len(body) > size:
                del body[at : at + size]
            case 4:
                other = rng.choice(messages)
                start = rng.randrange(len(other))
                body[at : at + size] = other[start : start + size]
            case _:
                body[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**31 - 1, 2**32 - 1)))
        if not body:
            body = bytearray(b"\0")
    return bytes(body)


def fuzz(count: int, seed: int) -> None:
    rng, messages, refused = random.Random(seed), rich_messages(), 0
    good = pickled([record(3, 9)])
    config = tp.PipelineConfig(
        max_num_seqs=ROWS,
        top_logprobs=TOP,
        max_draft_tokens=DRAFTS,
        max_pooling_floats=FLOATS,
        num_decoders=2,
    )
    with InProcess(config) as pipe:
        reader = _native.StreamReader(pipe.segment.source, pipe.segment.core, MAX_BYTES)
        for _ in range(count):
            refused += reader.read(mutated(rng, messages)) is not None
            while reader.has_step:  # whatever it was, its steps are such as the decoders take
                assert pipe.producer.claim(0.0)
                reader.fill(pipe.producer)
                pipe.producer.publish()
                pipe.decode()
        counted = pipe.counters()
        bad = sum(value for name, value in counted.items() if name.startswith("bad_"))
        assert bad == refused, "a refused message is counted once, and a step of a good one never"
        dropped = sum(value for name, value in counted.items() if name.startswith("dropped_"))
        assert counted["tokens_seen"] == counted["tokens_delivered"] + dropped
        assert reader.read(good) is None
    assert 0 < refused < count


def test_mutated_messages_are_read_or_refused() -> None:
    fuzz(2_000, seed=1)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_very_many_mutated_messages_are_read_or_refused() -> None:
    fuzz(200_000, seed=2)


def test_names_of_the_stand_ins_are_the_real_ones() -> None:
    rebuild = Tensor(np.zeros(1), "float64").__reduce__()[0]
    found = [thing.__module__ for thing in (StreamTransferData, LogprobsTensors, rebuild)]
    assert found == [RECORDS, OUTPUT, PADDLE]
    assert pickle.DEFAULT_PROTOCOL in (4, 5), "pyzmq pickles with a protocol that is refused"
