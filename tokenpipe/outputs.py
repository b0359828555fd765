"""What comes out: the columnar OutputBatch, and an object for every output on demand."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenpipe import _native
from tokenpipe.commands import FinishReason
from tokenpipe.layout import FINAL
from tokenpipe.requests import Request

Array = npt.NDArray[Any]

RECOVERY_TEXT = "Recover is not supported, the result is incomplete!"
_ERRORS: dict[FinishReason, tuple[int, str | None]] = {
    FinishReason.ABORT: (200, "Aborted"),
    FinishReason.RECOVERY: (200, RECOVERY_TEXT),
    FinishReason.ERROR: (500, "the request ended by an error of the pipeline or the engine"),
    FinishReason.SHUTDOWN: (503, "the pipeline was shut down"),
}

# tp_frame up to its padding: six uint64, nine uint32.
_HEAD = struct.Struct("<6Q9I")
_OUTPUT_TYPE = 3


class LogprobsLists(NamedTuple):
    """Candidates of each emitted token: one row of T columns per token, column 0 the sampled
    one."""

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]


@dataclass(slots=True)
class CompletionOutput:
    """The tokens of one output. `index` is the row."""

    index: int
    send_idx: int
    token_ids: list[int]
    logprob: float | None = None
    top_logprobs: LogprobsLists | None = None
    draft_top_logprobs: LogprobsLists | None = None
    draft_token_ids: list[int] = field(default_factory=list)
    decode_type: int = 0
    logprobs: Any = None
    text: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


@dataclass(slots=True)
class RequestOutput:
    """One request's part of one step, as plain Python values."""

    request_id: str
    outputs: CompletionOutput
    finished: bool
    finish_reason: str | None = None
    output_type: int = _OUTPUT_TYPE
    prompt: Any = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_token_ids_len: int = 0
    prompt_logprobs: Any = None
    num_cached_tokens: int = 0
    num_input_image_tokens: int = 0
    num_input_video_tokens: int = 0
    error_code: int = 200
    error_msg: str | None = None
    ic_req_data: Any = None
    trace_carrier: dict[str, str] | None = None


class OutputBatch:
    """The outputs of one decoder for one step, as columns; iterating it makes RequestOutput
    objects.

    n rows, m tokens, T candidates. The columns are read-only views of shared memory: they hold
    until the iterator that gave the batch is advanced, or release() is called; `copy()` keeps them.
    """

    def __init__(
        self,
        memory: memoryview,
        offset: int,
        max_request_id_bytes: int,
        resolve: Callable[[OutputBatch, int], Request],
        release: Callable[[], None] | None,
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
            _flags,
            _bytes,
        ) = _HEAD.unpack_from(memory, offset)
        self.has_slot = bool(has_slot)
        """False: ends of requests without a step behind them (abort, shutdown)."""
        self._memory, self._offset, self._id_bytes = memory, offset, max_request_id_bytes
        self._resolve = resolve
        self._release = release
        self.ended: dict[int, Request] = {}
        """Requests that end here, by their row's index in the batch."""

    @cached_property
    def _at(self) -> tuple[int, ...]:
        return _native.frame_columns(
            self.num_rows, self.num_tokens, self.width, self.num_finals, self._id_bytes
        )

    def _column(self, index: int, dtype: Any, count: int) -> Array:
        return np.frombuffer(self._memory, dtype, count, self._offset + self._at[index])

    @cached_property
    def row(self) -> Array:
        """uint32 [n]: the rows."""
        return self._column(0, np.uint32, self.num_rows)

    @cached_property
    def generation(self) -> Array:
        """uint32 [n]: which life of the row."""
        return self._column(1, np.uint32, self.num_rows)

    @cached_property
    def send_idx(self) -> Array:
        """uint32 [n]: tokens of the request before this output."""
        return self._column(2, np.uint32, self.num_rows)

    @cached_property
    def token_offsets(self) -> Array:
        """uint32 [n + 1]: tokens of row i are token_offsets[i] to token_offsets[i + 1]."""
        return self._column(3, np.uint32, self.num_rows + 1)

    @cached_property
    def finish_reason(self) -> Array:
        """uint8 [n]: FinishReason, 0 while the request goes on."""
        return self._column(4, np.uint8, self.num_rows)

    @cached_property
    def token_ids(self) -> Array:
        """int32 [m]."""
        return self._column(5, np.int32, self.num_tokens)

    @cached_property
    def topk_ids(self) -> Array:
        """int32 [m, T]; column 0 is the sampled token. T is 0 without logprobs."""
        count = self.num_tokens * self.width
        return self._column(6, np.int32, count).reshape(self.num_tokens, self.width)

    @cached_property
    def topk_logprobs(self) -> Array:
        """float32 [m, T]."""
        count = self.num_tokens * self.width
        return self._column(7, np.float32, count).reshape(self.num_tokens, self.width)

    @cached_property
    def logprobs(self) -> Array:
        """float32 [m]: of the sampled tokens; empty without logprobs."""
        return self.topk_logprobs[:, 0] if self.width else self.topk_logprobs.reshape(-1)

    @cached_property
    def ranks(self) -> Array:
        """int32 [m]: of the sampled tokens; empty without logprobs."""
        return self._column(8, np.int32, self.num_tokens if self.width else 0)

    @cached_property
    def finals(self) -> Array:
        """tp_final [f]: facts of the requests that end here."""
        return self._column(9, FINAL, self.num_finals)

    def final_id(self, i: int) -> str:
        """Returns the id of the request of finals[i]."""
        begin = self._offset + self._at[10] + i * self._id_bytes
        length = int(self.finals[i]["id_bytes"])
        return bytes(self._memory[begin : begin + length]).decode()

    @cached_property
    def requests(self) -> list[Request]:
        """The Request of each row, as it was submitted."""
        return [self._resolve(self, i) for i in range(self.num_rows)]

    @property
    def request_ids(self) -> list[str]:
        """The request id of each row."""
        return [request.request_id for request in self.requests]

    def __len__(self) -> int:
        return int(self.num_rows)

    def __iter__(self) -> Iterator[RequestOutput]:
        return iter(self.objects())

    def objects(self) -> list[RequestOutput]:
        """Returns an object per row: plain ints and floats, float32 widened exactly."""
        rows, send_idx = self.row.tolist(), self.send_idx.tolist()
        offsets, reasons = self.token_offsets.tolist(), self.finish_reason.tolist()
        tokens = self.token_ids.tolist()
        has_logprobs = self.width > 0
        ids, logprobs = self.topk_ids.tolist(), self.topk_logprobs.tolist()
        ranks = self.ranks.tolist()
        made = []
        for i, request in enumerate(self.requests):
            begin, end = offsets[i], offsets[i + 1]
            output = CompletionOutput(rows[i], send_idx[i], tokens[begin:end])
            if has_logprobs and end > begin:
                output.top_logprobs = LogprobsLists(
                    ids[begin:end], logprobs[begin:end], ranks[begin:end]
                )
                output.logprob = logprobs[end - 1][0]
            made.append(_request_output(request, output, FinishReason(reasons[i])))
        return made

    def release(self) -> None:
        """Counts the batch as delivered; its columns must not be read after."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def copy(self) -> OutputBatch:
        """Returns a batch whose columns are its own."""
        return merged([self])


def _request_output(
    request: Request, output: CompletionOutput, reason: FinishReason
) -> RequestOutput:
    is_first = output.send_idx == request.num_emitted_tokens
    code, text = _ERRORS.get(reason, (200, None))
    media = request.multimodal_inputs or {}
    return RequestOutput(
        request_id=request.request_id,
        outputs=output,
        finished=reason is not FinishReason.NONE,
        finish_reason=None if reason is FinishReason.NONE else reason.name.lower(),
        prompt=request.prompt if is_first else None,
        prompt_token_ids_len=len(request.prompt_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        num_input_image_tokens=media.get("num_input_image_tokens", 0),
        num_input_video_tokens=media.get("num_input_video_tokens", 0),
        error_code=code,
        error_msg=text,
        ic_req_data=request.ic_req_data,
        trace_carrier=request.trace_carrier,
    )


class _OwnBatch(OutputBatch):
    """A batch whose columns are arrays of its own: merged, copied, or made by the handle."""

    def __init__(self, **columns: Any) -> None:
        # cached_property lets the instance's own dict win over the view of shared memory.
        self.__dict__.update(columns)
        self._release = None
        self.ended = {}
        self._resolve = lambda batch, i: batch.requests[i]

    def final_id(self, i: int) -> str:
        """Returns the id of the request of finals[i]."""
        return self.requests[int(self.finals[i]["index"])].request_id


def merged(parts: Sequence[OutputBatch]) -> OutputBatch:
    """Returns the batches of several decoders for one step as one, in row order."""
    head = parts[0]
    counts = np.concatenate([np.diff(p.token_offsets.astype(np.int64)) for p in parts])
    rows = np.concatenate([p.row for p in parts])
    order = np.argsort(rows, kind="stable")
    begins = np.concatenate(([0], np.cumsum(counts)))[:-1]
    tokens = np.concatenate(
        [np.arange(begins[i], begins[i] + counts[i]) for i in order] or [np.zeros(0, np.int64)]
    ).astype(np.int64)
    width = max(p.width for p in parts)
    requests = [r for p in parts for r in p.requests]
    place = np.empty(len(order), np.uint32)
    place[order] = np.arange(len(order), dtype=np.uint32)
    finals, first = [], 0
    for p in parts:
        part = p.finals.copy()
        part["index"] = place[part["index"].astype(np.int64) + first]
        finals.append(part)
        first += p.num_rows

    def joined(name: str) -> Array:
        with_tokens = [
            getattr(p, name) for p in parts if p.num_tokens or name not in _TOKEN_COLUMNS
        ]
        return np.concatenate(with_tokens) if with_tokens else getattr(head, name).copy()

    columns: dict[str, Any] = {n: joined(n)[order] for n in _ROW_COLUMNS}
    columns.update({n: joined(n)[tokens] if len(joined(n)) else joined(n) for n in _TOKEN_COLUMNS})
    columns["token_offsets"] = np.concatenate(([0], np.cumsum(counts[order]))).astype(np.uint32)
    columns["finals"] = np.sort(np.concatenate(finals), order="index")
    columns["requests"] = [requests[i] for i in order]
    return _OwnBatch(
        number=head.number,
        step=head.step,
        source_sequence=head.source_sequence,
        saved_ns=head.saved_ns,
        published_ns=head.published_ns,
        committed_ns=max(p.committed_ns for p in parts),
        decoder=head.decoder,
        num_rows=len(rows),
        num_tokens=int(counts.sum()),
        width=width,
        num_finals=sum(p.num_finals for p in parts),
        message_flag=head.message_flag,
        has_slot=head.has_slot,
        **columns,
    )


_ROW_COLUMNS = ("row", "generation", "send_idx", "finish_reason")
_TOKEN_COLUMNS = ("token_ids", "topk_ids", "topk_logprobs", "ranks")


def finals_without_step(
    ended: Sequence[tuple[int, int, Request]], reason: FinishReason
) -> OutputBatch:
    """Returns the finals that the handle makes itself, of (row, generation, request) each."""
    n = len(ended)
    finals = np.zeros(n, FINAL)
    finals["index"] = np.arange(n)
    return _OwnBatch(
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
        message_flag=_OUTPUT_TYPE,
        has_slot=False,
        row=np.array([e[0] for e in ended], np.uint32),
        generation=np.array([e[1] for e in ended], np.uint32),
        send_idx=np.zeros(n, np.uint32),
        token_offsets=np.zeros(n + 1, np.uint32),
        finish_reason=np.full(n, int(reason), np.uint8),
        token_ids=np.zeros(0, np.int32),
        topk_ids=np.zeros((0, 0), np.int32),
        topk_logprobs=np.zeros((0, 0), np.float32),
        ranks=np.zeros(0, np.int32),
        finals=finals,
        requests=[e[2] for e in ended],
    )
