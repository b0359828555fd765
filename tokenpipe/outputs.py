"""The columnar OutputBatch: the outputs of one decoder for one step, where they lie in memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tokenpipe import _native
from tokenpipe.commands import FinishReason
from tokenpipe.layout import FINAL
from tokenpipe.records import AnyOutput, LogprobsLists
from tokenpipe.requests import Request

Array = npt.NDArray[Any]

# Made once: a class costs a column a look-up.
_UINT8, _UINT32, _UINT64 = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.uint64)
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

# tp_frame up to its padding: six uint64, eleven uint32.
_HEAD = struct.Struct("<6Q12I")
# TP_STEP_POOLING, TP_STEP_PROMPT, TP_STEP_GAP, TP_STEP_MESSAGE_END
_POOLING, _PROMPT, _GAP, _MESSAGE_END = 8, 16, 64, 128
TARGET, DRAFT = 3, 4  # message_flag


_T = TypeVar("_T")


class lazy(Generic[_T]):
    """An attribute that is made when it is first read. functools' own takes a lock before Python
    3.12, which costs more than a column; two threads may make the same value here."""

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type | None = None) -> _T:
        value = of.__dict__[self._name] = self._make(of)
        return value


@dataclass
class Drafts:
    """Logprobs of the drafts that belong to a batch's outputs: `row_of[i]` is the row of `batch`
    that holds those of output i, -1 where none came."""

    batch: OutputBatch
    row_of: Array

    def of(self, i: int) -> LogprobsLists | None:
        """Returns the drafts' candidates of output i as lists."""
        j = int(self.row_of[i])
        if j < 0:
            return None
        begin, end = self.batch.token_offsets[j : j + 2].tolist()
        return LogprobsLists(
            self.batch.topk_ids[begin:end].tolist(),
            self.batch.topk_logprobs[begin:end].tolist(),
            self.batch.ranks[begin:end].tolist(),
        )


class OutputBatch:
    """The outputs of one decoder for one step, as columns; iterating it makes an object per row.

    n rows, m tokens, T candidates. The columns are read-only views of shared memory: they hold
    until the iterator that gave the batch is advanced, or release() is called; `copy()` keeps them.
    """

    def __init__(
        self,
        memory: memoryview,
        offset: int,
        max_request_id_bytes: int,
        make: Callable[[OutputBatch], list[AnyOutput]],
        resolve: Callable[[OutputBatch, int], Request],
        resolve_all: Callable[[OutputBatch], list[Request]],
    ) -> None:
        (
            self.number,
            self.step,
            self.source_sequence,
            self.saved_ns,
            self.published_ns,
            self.committed_ns,
            self.decoder,
            self.num_rows,
            self.num_tokens,
            self.width,
            self.num_finals,
            self.message_flag,
            has_slot,
            self.flags,
            _bytes,
            self.num_drafts,
            self.num_firsts,
            self.step_rows,
        ) = _HEAD.unpack_from(memory, offset)
        self.has_slot = bool(has_slot)
        """False: ends of requests without a step behind them (abort, shutdown)."""
        self.drafts: Drafts | None = None
        """Logprobs of drafts, where the engine sends them."""
        self._memory, self._offset, self._id_bytes = memory, offset, max_request_id_bytes
        self._make = make
        self._resolve = resolve
        self._resolve_all = resolve_all
        self._release: Callable[[], None] | None = None
        self.ended: dict[int, Request] = {}
        """Requests that end here, by their row's index in the batch."""

    @property
    def kind(self) -> str:
        """What the rows hold: tokens, pooling, prompt (logprobs of prompt tokens) or draft."""
        if self.flags & _POOLING:
            return "pooling"
        if self.flags & _PROMPT:
            return "prompt"
        return "draft" if self.message_flag == DRAFT else "tokens"

    @property
    def is_gap(self) -> bool:
        """Whether steps before this one may have been lost, so that its requests ended."""
        return bool(self.flags & _GAP)

    @property
    def is_message_end(self) -> bool:
        """sysv, zmq: whether a message of the engine is told with this batch: of a queue its first
        `step_rows` rows, of a socket those of the batches that have its saved_ns. With
        report_acknowledgements it is told also where no row has an output, by a batch without
        rows (num_rows 0), unless the message has max_num_seqs rows."""
        return bool(self.flags & _MESSAGE_END)

    @lazy
    def _at(self) -> tuple[int, ...]:
        count = self.num_rows if self.flags & _POOLING else self.num_tokens
        return _native.frame_columns(
            self.num_rows,
            count,
            self.width,
            self.num_drafts,
            self.num_finals,
            self._id_bytes,
            self.flags,
        )

    def _column(self, index: int, dtype: Any, shape: Any) -> Array:
        return np.ndarray(shape, dtype, self._memory, self._offset + self._at[index])

    @lazy
    def row(self) -> Array:
        """uint32 [n]: the rows."""
        return self._column(0, _UINT32, self.num_rows)

    @lazy
    def generation(self) -> Array:
        """uint32 [n]: which life of the row."""
        return self._column(1, _UINT32, self.num_rows)

    @lazy
    def send_idx(self) -> Array:
        """uint32 [n]: tokens of the request before this output; of a prompt piece, where it
        begins."""
        return self._column(2, _UINT32, self.num_rows)

    @lazy
    def token_offsets(self) -> Array:
        """uint32 [n + 1]: tokens of row i are token_offsets[i] to token_offsets[i + 1]."""
        return self._column(3, _UINT32, self.num_rows + 1)

    @lazy
    def finish_reason(self) -> Array:
        """uint8 [n]: FinishReason, 0 while the request goes on; with report_acknowledgements also
        ACKNOWLEDGED, of a row without tokens that the engine has let go of, and SILENT (zmq)."""
        return self._column(4, _UINT8, self.num_rows)

    @lazy
    def first_token_ns(self) -> Array:
        """uint64 [n]: CLOCK_MONOTONIC stamp of the request's first token, 0 before it."""
        return self._column(11, _UINT64, self.num_rows)

    @lazy
    def token_ids(self) -> Array:
        """int32 [m]."""
        return self._column(5, _INT32, self.num_tokens)

    @lazy
    def topk_ids(self) -> Array:
        """int32 [m, T]; column 0 is the sampled token. T is 0 without logprobs."""
        width = 0 if self.flags & _POOLING else self.width
        return self._column(6, _INT32, (self.num_tokens, width))

    @lazy
    def topk_logprobs(self) -> Array:
        """float32 [m, T]."""
        width = 0 if self.flags & _POOLING else self.width
        return self._column(7, _FLOAT32, (self.num_tokens, width))

    @lazy
    def vectors(self) -> Array:
        """float32 [n, T] of a pooling batch; zeros where finish_reason is not STOP."""
        n, width = (self.num_rows, self.width) if self.flags & _POOLING else (0, 0)
        return self._column(7, _FLOAT32, (n, width))

    @lazy
    def logprobs(self) -> Array:
        """float32 [m]: of the sampled tokens; empty without logprobs."""
        return self.topk_logprobs[:, 0] if self.topk_logprobs.size else np.zeros(0, np.float32)

    @lazy
    def ranks(self) -> Array:
        """int32 [m]: of the sampled tokens; empty without logprobs."""
        return self._column(8, _INT32, self.topk_ids.shape[0] if self.topk_ids.size else 0)

    @lazy
    def draft_offsets(self) -> Array:
        """uint32 [n + 1]: drafts of row i are draft_offsets[i] to draft_offsets[i + 1]."""
        return self._column(12, _UINT32, self.num_rows + 1 if self.num_drafts else 0)

    @lazy
    def draft_token_ids(self) -> Array:
        """int32 [d]: a prefill instance's first token and the drafts behind it."""
        return self._column(13, _INT32, self.num_drafts)

    @lazy
    def finals(self) -> Array:
        """tp_final [f]: facts of the requests that end here."""
        return self._column(9, FINAL, self.num_finals)

    def final_id(self, i: int) -> str:
        """Returns the id of the request of finals[i]."""
        begin = self._offset + self._at[10] + i * self._id_bytes
        length = int(self.finals[i]["id_bytes"])
        return bytes(self._memory[begin : begin + length]).decode()

    @lazy
    def requests(self) -> list[Request]:
        """The Request of each row, as it was submitted."""
        return self._resolve_all(self)

    @property
    def request_ids(self) -> list[str]:
        """The request id of each row."""
        return [request.request_id for request in self.requests]

    def __len__(self) -> int:
        return int(self.num_rows)

    def __iter__(self) -> Iterator[AnyOutput]:
        return iter(self.objects())

    def objects(self) -> list[AnyOutput]:
        """Returns a RequestOutput (or PoolingRequestOutput) per row."""
        return self._make(self)

    def release(self) -> None:
        """Counts the batch as delivered; its columns must not be read after."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def copy(self) -> OutputBatch:
        """Returns a batch whose columns are its own."""
        own = _joined([self], np.arange(self.num_rows))
        own.requests  # noqa: B018 - resolved now: their finals may be delivered before they are read
        return own


class _OwnBatch(OutputBatch):
    """A batch whose columns are arrays of its own: merged, copied, or made by the handle."""

    def __init__(self, request_at: Callable[[int], Request], **columns: Any) -> None:
        # A lazy attribute lets the instance's own dict win over the view of shared memory.
        self.__dict__.update(columns)
        self._release = None
        self.ended = {}
        self._resolve = lambda _batch, i: self.ended.get(i) or request_at(i)
        self._resolve_all = lambda batch: [batch._resolve(batch, i) for i in range(len(batch))]

    def final_id(self, i: int) -> str:
        """Returns the id of the request of finals[i]."""
        return self._resolve(self, int(self.finals[i]["index"])).request_id


def _request_at(part: OutputBatch, i: int) -> Request:
    return part._resolve(part, i)


_ROW_COLUMNS = ("row", "generation", "send_idx", "finish_reason", "first_token_ns")
_TOKEN_COLUMNS = ("token_ids", "topk_ids", "topk_logprobs", "ranks")
_HEAD_FIELDS = (
    *("number", "step", "source_sequence", "saved_ns", "published_ns", "decoder"),
    *("message_flag", "has_slot", "flags", "step_rows", "drafts", "_make"),
)


def merged(parts: Sequence[OutputBatch]) -> OutputBatch:
    """Returns the batches of several decoders for one step as one, in row order.

    Its columns are its own; its requests are resolved when they are asked for.
    """
    return _joined(parts, np.argsort(np.concatenate([p.row for p in parts]), kind="stable"))


def _joined(parts: Sequence[OutputBatch], order: Array) -> OutputBatch:
    rows = np.concatenate([p.row for p in parts])
    places = [(p, i) for p in parts for i in range(p.num_rows)]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(p, name) for p in parts])[order] for name in _ROW_COLUMNS
    }
    tokens, columns["token_offsets"] = _ragged([p.token_offsets for p in parts], order)
    for name in _TOKEN_COLUMNS:
        held = [getattr(p, name) for p in parts if getattr(p, name).size]
        empty = getattr(parts[0], name)
        columns[name] = (
            np.concatenate(held)[tokens]
            if held
            else np.zeros((len(tokens), 0) if empty.ndim == 2 else 0, empty.dtype)
        )
    # A pooling frame holds a vector a row; a mark's final among others has none.
    vectors = [p.vectors for p in parts if p.flags & _POOLING]
    columns["vectors"] = np.concatenate(vectors)[order] if vectors else np.zeros((0, 0), np.float32)
    num_drafts = sum(p.num_drafts for p in parts)
    none = [np.zeros(p.num_rows + 1, np.uint32) for p in parts]
    drafts, columns["draft_offsets"] = _ragged(
        [p.draft_offsets if p.num_drafts else n for p, n in zip(parts, none, strict=True)], order
    )
    ids = np.concatenate([p.draft_token_ids for p in parts])
    columns["draft_token_ids"] = ids[drafts] if num_drafts else ids
    columns["finals"] = _moved_finals(parts, order)
    if len(parts) > 1:
        columns["drafts"] = None
    head = {name: getattr(parts[0], name) for name in _HEAD_FIELDS}
    return _OwnBatch(
        lambda i: _request_at(*places[order[i]]),
        **{**head, **columns},
        committed_ns=max(p.committed_ns for p in parts),
        num_rows=len(rows),
        num_tokens=sum(p.num_tokens for p in parts),
        width=max(p.width for p in parts),
        num_finals=sum(p.num_finals for p in parts),
        num_drafts=num_drafts,
        num_firsts=sum(p.num_firsts for p in parts),
    )


def _ragged(offsets: Sequence[Array], order: Array) -> tuple[Array, Array]:
    """Returns the places of every piece's items in the wanted order of rows, and the new
    offsets."""
    counts = np.concatenate([np.diff(o.astype(np.int64)) for o in offsets])
    begins, wanted = np.cumsum(counts) - counts, counts[order]
    new = np.concatenate(([0], np.cumsum(wanted)))
    # Item j of the new order lies as far behind its row's old begin as behind its new one.
    flat = np.repeat(begins[order] - new[:-1], wanted) + np.arange(new[-1])
    return flat, new.astype(np.uint32)


def _moved_finals(parts: Sequence[OutputBatch], order: Array) -> Array:
    place = np.empty(len(order), np.uint32)
    place[order] = np.arange(len(order), dtype=np.uint32)
    finals, first = [], 0
    for p in parts:
        part = p.finals.copy()
        part["index"] = place[part["index"].astype(np.int64) + first]
        finals.append(part)
        first += p.num_rows
    return np.sort(np.concatenate(finals), order="index")


def finals_without_step(
    ended: Sequence[tuple[int, int, Request]],
    progress: Sequence[tuple[int, int, int]],
    reason: FinishReason,
    make: Callable[[OutputBatch], list[AnyOutput]],
) -> OutputBatch:
    """Returns the finals that the handle makes itself, of (row, generation, request) each.

    `progress`: for each its tokens so far, and the stamps of the first and the last.
    """
    n = len(ended)
    finals = np.zeros(n, FINAL)
    finals["index"] = np.arange(n)
    tokens, firsts, lasts = zip(*progress, strict=True)
    finals["num_tokens"], finals["first_token_ns"], finals["last_token_ns"] = tokens, firsts, lasts
    finals["prompt_tokens"] = [len(request.prompt_token_ids) for _, _, request in ended]
    return _OwnBatch(
        lambda i: ended[i][2],
        number=0,
        step=0,
        source_sequence=0,
        saved_ns=0,
        published_ns=0,
        committed_ns=_native.now_ns(),
        decoder=0,
        num_rows=n,
        num_tokens=0,
        width=0,
        num_finals=n,
        num_drafts=0,
        num_firsts=0,
        step_rows=0,
        message_flag=TARGET,
        has_slot=False,
        flags=0,
        drafts=None,
        _make=make,
        row=np.array([e[0] for e in ended], np.uint32),
        generation=np.array([e[1] for e in ended], np.uint32),
        send_idx=np.array(tokens, np.uint32),
        token_offsets=np.zeros(n + 1, np.uint32),
        finish_reason=np.full(n, int(reason), np.uint8),
        first_token_ns=np.array(firsts, np.uint64),
        token_ids=np.zeros(0, np.int32),
        topk_ids=np.zeros((0, 0), np.int32),
        topk_logprobs=np.zeros((0, 0), np.float32),
        ranks=np.zeros(0, np.int32),
        vectors=np.zeros((0, 0), np.float32),
        draft_offsets=np.zeros(0, np.uint32),
        draft_token_ids=np.zeros(0, np.int32),
        finals=finals,
    )
