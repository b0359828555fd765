"""Steps at random for every save op, what their columns must be, and what a segment holds of them.

Without pytest, so that scripts/gpu_check can use them on a machine that has a GPU and little else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenpipe import _native, layout
from tokenpipe.segment import Segment

Array = np.ndarray[Any, Any]

POSITIONS, ACCEPT, POOLING = 2, 1, 8  # TP_STEP_*
DRAFT = 4  # TP_MESSAGE_DRAFT
INT32 = 2**31 - 1
OPS = (
    "save_output",
    "save_output_topk",
    "speculate_save_output",
    "speculate_save_output_topk",
    "save_pooling",
)
INT_DTYPES = (np.int32, np.int64, np.uint32, np.uint64)
LAYOUTS = ("contiguous", "every second", "transposed", "inside", "backwards")


def read_step(segment: Segment, number: int) -> dict[str, Any]:
    """Step `number` of the source ring: its head's fields and a copy of its columns."""
    plan, memory = segment.config.plan(), segment.source_memory
    place = number & (segment.config.source_slots - 1)
    begin = plan["source_steps"] + place * plan["slot_bytes"]
    head = np.frombuffer(memory, layout.STEP, 1, begin)[0]
    names = [n for n in layout.STEP.names or () if n != "pad_"]
    found: dict[str, Any] = {name: int(head[name]) for name in names}
    n, m, width, flags = (found[k] for k in ("num_rows", "num_tokens", "width", "flags"))
    at = _native.step_columns(n, m, width, flags)
    assert found["body_bytes"] == at["end"] - layout.STEP.itemsize
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "rows": (np.uint32, (n,)),
        "generations": (np.uint32, (n,)),
        "states": (np.uint8, (n,)),
        "logprobs": (np.float32, (m, width)),
    }
    if not flags & POOLING:
        shapes["tokens"] = (np.int32, (m,))
        shapes["topk_ids"] = (np.int32, (m, width))
    if flags & POSITIONS:
        shapes["positions"] = (np.int32, (n,))
    if flags & ACCEPT:
        shapes["accept_num"] = (np.int32, (n,))
    if width and not flags & POOLING:
        shapes["ranks"] = (np.int32, (m,))
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        column = np.frombuffer(memory, dtype, count, begin + at[name])
        found[name] = column.reshape(shape).copy()
    return found


def laid_out(array: Array, how: str, put: Callable[[Array], Any]) -> Any:
    """A tensor that put() makes, or a view of one, with the array's values and other strides."""
    if how == "every second":
        return put(np.repeat(array, 2, axis=-1))[..., ::2]
    if how == "backwards":
        return put(np.ascontiguousarray(array[..., ::-1]))[..., ::-1]
    if how == "transposed":
        return put(np.ascontiguousarray(array.swapaxes(0, -1))).swapaxes(0, -1)
    if how == "inside":
        padded = np.zeros([n + 2 for n in array.shape], array.dtype)
        inner = tuple(slice(1, n + 1) for n in array.shape)
        padded[inner] = array
        return put(padded)[inner]
    assert how == "contiguous"
    return put(np.ascontiguousarray(array))


@dataclass(frozen=True)
class Batch:
    """What one save is given. `layouts` says which strides a tensor has; floats are bfloat16, as
    uint16, where `bfloat16` says so."""

    op: str
    tensors: dict[str, Array]
    columns: dict[str, Array]
    layouts: dict[str, str]
    bfloat16: bool
    words: dict[str, Any]
    """message_flag, where the op has one, and not_need_stop."""
    on_device: frozenset[str]
    """Which of `columns` (rows, generations, states, positions) lie on the device."""

    def on_cpu(self) -> dict[str, Any]:
        """Arguments of the CPU's op. numpy has no bfloat16, but float32 has all its values."""
        given: dict[str, Any] = {**self.tensors, **self.columns, **self.words}
        for name in FLOATS & set(given):
            given[name] = floats_of(given[name], self.bfloat16)
        return given

    def on_gpu(self, place: Callable[[Array, str, bool], Any]) -> dict[str, Any]:
        """The same on a device: place(array, layout, is bfloat16) makes a tensor there."""
        given: dict[str, Any] = dict(self.words)
        for name, array in {**self.tensors, **self.columns}.items():
            if name in self.columns and name not in self.on_device:
                given[name] = array
            else:
                is_bfloat16 = self.bfloat16 and name in FLOATS
                given[name] = place(array, self.layouts[name], is_bfloat16)
        return given


FLOATS = frozenset({"logprobs", "vectors"})


def floats_of(array: Array, bfloat16: bool) -> Array:
    """The values as float32."""
    if bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def random_batch(
    op: str,
    random: np.random.Generator,
    sizes: dict[str, int],
    int_dtypes: Sequence[Any] = INT_DTYPES,
    layouts: Sequence[str] = LAYOUTS,
    may_be_bfloat16: bool = True,
) -> Batch:
    """A batch of any number of rows, depth, width, dtype and stride; floats of any bits."""
    most = sizes["max_num_seqs"]
    n = int(random.choice([0, 1, 7, 8, 9, 16, most, *random.integers(0, most, 7)]))
    n = min(n, most)
    is_packed = op.startswith("speculate")
    depth = int(random.integers(1, sizes["max_draft_tokens"], endpoint=True)) if is_packed else 1
    width = int(random.integers(1, sizes["top_logprobs"] + 1, endpoint=True))
    bfloat16 = may_be_bfloat16 and bool(random.integers(2))

    def ints(*shape: int, top: int = INT32) -> Array:
        dtype = int_dtypes[int(random.integers(len(int_dtypes)))]
        return random.integers(0, top, shape, endpoint=True).astype(dtype)

    def floats(*shape: int) -> Array:
        bits = random.integers(0, 2**32, shape, dtype=np.uint64)  # NaN, infinities, subnormals
        if bfloat16:
            return bits.astype(np.uint16)
        if random.integers(2):
            return bits.astype(np.uint16).view(np.float16)
        return bits.astype(np.uint32).view(np.float32)

    tensors: dict[str, Array] = {}
    cell = (n, depth) if is_packed else (n,)
    if op == "save_pooling":
        floats_a_row = int(random.integers(1, sizes["max_pooling_floats"], endpoint=True))
        tensors["vectors"] = floats(n, floats_a_row)
    else:
        tensors["accept_tokens" if is_packed else "tokens"] = ints(*cell)
        if is_packed:
            tensors["accept_num"] = ints(n, top=depth)
        if op.endswith("topk"):
            tensors["topk_ids"] = ints(*cell, width)
            tensors["logprobs"] = floats(*cell, width)
            tensors["ranks"] = ints(*cell)
    columns = {"generations": ints(n, top=3)}
    if random.integers(2):
        columns["rows"] = random.permutation(most)[:n].astype(np.int64)
    if random.integers(2):
        kind = [np.uint8, np.int32, np.int64][int(random.integers(3))]
        columns["states"] = random.integers(0, 4, n).astype(kind)
    if op != "save_pooling" and random.integers(2):
        columns["positions"] = ints(n)
    chosen = {name: str(random.choice(layouts)) for name in (*tensors, *columns)}
    on_device = frozenset(name for name in columns if random.integers(2))
    words: dict[str, Any] = {}
    if op != "save_pooling":
        words["not_need_stop"] = bool(random.integers(2))
    if op == "speculate_save_output_topk":
        words["message_flag"] = int(random.integers(3, 5))
    return Batch(op, tensors, columns, chosen, bfloat16, words, on_device)


def expected_columns(batch: Batch) -> dict[str, Any]:
    """The columns of the batch's step, made of whole arrays."""
    generations = batch.columns["generations"]
    n = len(generations)
    expected: dict[str, Any] = {
        "rows": batch.columns.get("rows", np.arange(n)),
        "generations": generations,
        "states": batch.columns.get("states", np.zeros(n, int)),
    }
    if "positions" in batch.columns:
        expected["positions"] = batch.columns["positions"]
    if batch.op == "save_pooling":
        expected["logprobs"] = floats_of(batch.tensors["vectors"], batch.bfloat16)
        return expected
    taken: Any = slice(None)
    if "accept_num" in batch.tensors:
        counts = batch.tensors["accept_num"].astype(int) * (expected["states"] == 0)
        expected["accept_num"] = counts
        depth = batch.tensors["accept_tokens"].shape[1]
        taken = np.arange(depth)[None, :] < counts[:, None]
    for name, array in batch.tensors.items():
        if name == "logprobs":
            expected[name] = floats_of(array, batch.bfloat16)[taken]
        elif name != "accept_num":
            expected["tokens" if name == "accept_tokens" else name] = array[taken]
    return expected


def num_tokens(batch: Batch, expected: dict[str, Any]) -> int:
    """Tokens that the step adds to those saved."""
    if batch.op == "save_pooling" or batch.words.get("message_flag") == DRAFT:
        return 0
    if "accept_num" in expected:
        return int(expected["accept_num"].sum())
    return int((expected["states"] == 0).sum())
