"""EngineWriter: the engine worker's end. It maps the source segment and nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenpipe import _native, cuda
from tokenpipe.commands import Control
from tokenpipe.config import SOURCES, cuda_library
from tokenpipe.errors import (
    OpArgumentError,
    PartyExistsError,
    PipelineGoneError,
    SyncTimeoutError,
    WrongSourceError,
)
from tokenpipe.layout import SOURCE
from tokenpipe.segment import LOCK_CLIENT, LOCK_COORDINATOR, LOCK_WRITER, Segment, start_time

_WAIT_S = 0.2
_LOOK_S = 0.005
_FIRST_STEP, _BEHIND_A_FIRST = 1, 2
"""What accept_num holds: the numbers of tp::Counts."""
_CLOSE_S = 30.0
_WITHDRAW_POLL_S = 0.002
_FOR_EVER_S = float("inf")
_GONE_AFTER_S = 10.0
"""An owner whose coordinator and roles were all killed has a new one by then, or never."""


class Step(NamedTuple):
    """One composed batch: which life of which row each of its rows runs for."""

    generations: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32] | None


@dataclass(frozen=True)
class ControlEvent:
    """Something the engine's scheduler must act on; `kind` is abort, preempt or finished."""

    row: int
    generation: int
    kind: str


class EngineWriter:
    """Saves steps and hears of aborts and ends. One per pipeline; thread-safe.

    Saving blocks while the pipeline lives and its ring is full (counted as backpressure) and raises
    PipelineGoneError when it is gone. Nothing else blocks, but for flush(). Of a pipeline with
    another source than shm or cuda-ipc it hears of aborts and ends only: a save raises
    WrongSourceError.

    Tensors may lie on a CUDA device: then `stream=` of the save is the stream in which they are
    made (its handle as a number, or an object with `cuda_stream`; 0 is the default stream). The
    save puts its work into that stream and returns; the step is published when the GPU has got
    there. As with any work in a stream, their memory must stay theirs until then. What the GPU
    finds wrong with their values makes the step empty and is raised by the next call, which then
    has saved nothing itself, or by flush(). A save of tensors on the CPU waits for those before it.

    With --source cuda-ipc the step stays in a ring on the device, and the pipeline's reader copies
    it from there: what it has not copied when this process dies is lost, and counted.

    A save while its stream is captured becomes part of the CUDA graph. Each replay is announced by
    begin_step(..., replay_in=stream), and no graph may be replayed after close().
    """

    def __init__(
        self, segment: Segment, spin_us: float = 1.0, *, publish_by_stream: bool = False
    ) -> None:
        self._segment = segment
        self._publish_by_stream = publish_by_stream
        if not segment.lock(LOCK_WRITER):
            pid = int(np.frombuffer(segment.source_memory, SOURCE, 1)[0]["writer_pid"])
            segment.close()
            raise PartyExistsError(segment.name, "engine writer", pid)
        self._writer = _native.Writer(segment.source, spin_us / 1e6)
        self._source = SOURCES[_native.source_kind(segment.source)]
        self._takes_steps = self._source in ("shm", "cuda-ipc")
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        _native.announce_writer(segment.source, os.getpid(), start_time(os.getpid()) or 0)

    @classmethod
    def attach(
        cls, name: str, timeout_s: float = 10.0, *, publish_by_stream: bool = False
    ) -> EngineWriter:
        """Maps the source segment of pipeline `name`, waiting for it.

        `publish_by_stream`, for tensors on a GPU: the GPU itself stores the word that publishes a
        step, where else a thread of the driver does. It cannot wake a sleeping reader: use it with
        a reader that polls (--spin-us longer than a step), or a step waits for its heartbeat.

        After a writer that died it also waits until what that one saved is decoded and its requests
        have been ended: they are not ours. Raises SegmentMissingError, LayoutMismatchError,
        PartyExistsError (pid of the writer it has).
        """
        deadline = time.monotonic() + timeout_s
        segment = Segment.attach_source(name, timeout_s)
        source = np.frombuffer(segment.source_memory, SOURCE, 1)[0]
        while (pid := int(source["writer_pid"])) and not segment.is_locked(LOCK_WRITER):
            if time.monotonic() >= deadline:
                segment.close()
                raise PartyExistsError(
                    name,
                    "engine writer",
                    pid,
                    ": it died, and its requests have not been ended yet",
                )
            time.sleep(_LOOK_S)
        return cls(segment, publish_by_stream=publish_by_stream)

    def begin_step(
        self,
        generations: Sequence[int] | npt.NDArray[Any],
        rows: Any = None,
        *,
        replay_in: Any = None,
    ) -> Step:
        """Returns the stamp of a batch that the scheduler has just composed.

        `generations` [n]: of the Admission that runs in each batch row, 0 for a padded row. `rows`
        [n]: the pipeline's row of each, once; default 0 to n-1. A copy is kept: the step may be
        saved when the scheduler's book has moved on (DESIGN section 5). Raises OpArgumentError.

        `replay_in`: the stream in which the caller launches next, once, a CUDA graph with a
        captured save of n rows or more, which saves the step. Its place is taken now, so this
        blocks while the ring is full, and raises as a save does.
        """
        if rows is None and replay_in is None and not self._is_closed:
            usual = self._writer.stamp(generations)
            if usual is not None:
                return Step(usual, None)
        self._raise_if_closed()
        # int32 here, so that a save need not convert; the op checks the values again.
        stamp = _as_int32("generations", generations)
        where = None if rows is None else _as_int32("rows", rows)
        if where is not None and where.shape != stamp.shape:
            raise OpArgumentError(
                "rows", f"rows has shape {where.shape}, generations {stamp.shape}"
            )
        if stamp.ndim != 1:
            raise OpArgumentError(
                "generations", f"generations has shape {stamp.shape}, must be [n]"
            )
        if where is not None:
            _refuse_a_row_twice(where, stamp)
        handle = _handle_of(replay_in, "replay_in")
        if handle is not None:
            with self._lock:
                self._wait_for_space()
                self._writer.begin_replay(stamp, where, handle)
        self._writer.note(where, stamp, len(stamp))
        return Step(stamp, where)

    def save_output(
        self,
        tokens: Any,
        *,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
        stream: Any = None,
    ) -> None:
        """Saves one token per row.

        `tokens` int64 or int32 [n], numpy or any CPU tensor with DLPack, without a copy. `step` (or
        `generations` and `rows`) tells whose they are. `states` uint8 [n]: 0 token, 1 none, 2
        recovery, 3 abort or preemption acknowledged. `positions` [n]: index of the token in its
        request, -1 unknown. Raises OpArgumentError (argument) with nothing saved,
        PipelineGoneError.
        """
        self._save(step, generations, rows, tokens, states, positions, not_need_stop, stream)

    def save_output_topk(
        self,
        tokens: Any,
        topk_ids: Any,
        logprobs: Any,
        ranks: Any,
        *,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
        stream: Any = None,
    ) -> None:
        """Saves one token per row with its candidates.

        `topk_ids` int64 or int32 [n, T], `logprobs` float32, float16 or bfloat16 [n, T], `ranks`
        [n]; column 0 is the sampled token, T is 1 to top_logprobs + 1 and may differ from step to
        step. Else as save_output.
        """
        self._save(
            step,
            generations,
            rows,
            tokens,
            states,
            positions,
            not_need_stop,
            stream,
            topk_ids=_tensor("topk_ids", topk_ids),
            logprobs=_tensor("logprobs", logprobs),
            ranks=_tensor("ranks", ranks),
        )

    def speculate_save_output(
        self,
        accept_tokens: Any,
        accept_num: Any,
        *,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
        stream: Any = None,
    ) -> None:
        """Saves up to D tokens per row, the accepted ones.

        `accept_tokens` [n, D], D at most max_draft_tokens; `accept_num` [n]: how many of a row's D
        count, 0 for none. Rows that are preempted or recovered say so in `states`. Else as
        save_output.
        """
        self._save(
            step,
            generations,
            rows,
            accept_tokens,
            states,
            positions,
            not_need_stop,
            stream,
            accept_num=_tensor("accept_num", _given("accept_num", accept_num)),
        )

    def speculate_save_output_topk(
        self,
        accept_tokens: Any,
        accept_num: Any,
        topk_ids: Any,
        logprobs: Any,
        ranks: Any,
        *,
        message_flag: int = 3,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
        stream: Any = None,
    ) -> None:
        """Saves up to D tokens per row with their candidates.

        `topk_ids` and `logprobs` [n, D, T], `ranks` [n, D]. `message_flag` 3: the target model's
        tokens; 4: candidates of the drafts, saved after the target of the same step. Drafts are no
        tokens: they come out beside the target's output, where --enable-draft-logprob is on.
        """
        self._save(
            step,
            generations,
            rows,
            accept_tokens,
            states,
            positions,
            not_need_stop,
            stream,
            accept_num=_tensor("accept_num", _given("accept_num", accept_num)),
            topk_ids=_tensor("topk_ids", topk_ids),
            logprobs=_tensor("logprobs", logprobs),
            ranks=_tensor("ranks", ranks),
            message_flag=message_flag,
        )

    def mtp_save_first_token(
        self,
        tokens: Any,
        step_idx: Any,
        *,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
        stream: Any = None,
    ) -> None:
        """Saves a prefill step's first token and first draft of the rows that have just made them.

        `tokens` [n, 2 or more]; `step_idx` [n]: 1 where the row has made its first token in this
        step; other rows have no token. Else as save_output. (FastDeploy's op leaves the last
        message's counts in the rows with step_idx above 1: output-ops.md section 3.1.)
        """
        self._save(
            *(step, generations, rows, tokens, states, positions, not_need_stop, stream),
            accept_num=_tensor("step_idx", _given("step_idx", step_idx)),
            counts=_FIRST_STEP,
        )

    def mtp_save_first_token_with_topk(
        self,
        tokens: Any,
        token_num: Any,
        topk_ids: Any,
        logprobs: Any,
        ranks: Any,
        *,
        message_flag: int = 3,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        positions: Any = None,
        not_need_stop: bool = True,
        stream: Any = None,
    ) -> None:
        """Saves a prefill step's first token with its candidates, and the drafts behind it.

        `tokens` [n, D]; `token_num` [n]: 0 for rows without a token yet, else the tokens in front
        of the last draft. `topk_ids`, `logprobs` [n, T] and `ranks` [n] are the first token's; the
        drafts have no candidates (ids -1, logprob 0.0, rank 0). Else as
        speculate_save_output_topk.
        """
        self._save(
            *(step, generations, rows, tokens, states, positions, not_need_stop, stream),
            accept_num=_tensor("token_num", _given("token_num", token_num)),
            topk_ids=_tensor("topk_ids", _given("topk_ids", topk_ids)),
            logprobs=_tensor("logprobs", logprobs),
            ranks=_tensor("ranks", ranks),
            message_flag=message_flag,
            counts=_BEHIND_A_FIRST,
        )

    def save_wire_values(
        self,
        tokens: Any,
        states: Any,
        *,
        step: Step,
        not_need_stop: bool = True,
        stream: Any = None,
        **candidates: Any,
    ) -> None:
        """Saves what FastDeploy's save_output or save_output_topk are given on a GPU (ops/shm.py).

        `tokens` [n] or [n, 1]: below 0 they are no error, but say what their row is where `states`
        says token (-9 acknowledged, -3 recovery, else none). `candidates` as save_output_topk has
        them; candidate 0 becomes the token.
        """
        self._save(
            *(step, None, None, tokens, states, None, not_need_stop, stream),
            has_wire_values=True,
            **{name: _tensor(name, _given(name, value)) for name, value in candidates.items()},
        )

    def save_pooling(
        self,
        vectors: Any,
        *,
        step: Step | None = None,
        generations: Any = None,
        rows: Any = None,
        states: Any = None,
        stream: Any = None,
    ) -> None:
        """Saves a pooling vector per row, which ends its request.

        `vectors` float32, float16 or bfloat16 [n, V], V at most max_pooling_floats. A row that is
        not ready is left out (`rows`) or has state 1.
        """
        if step is not None:
            generations, rows = _parts(step)
        vectors = _tensor("vectors", _given("vectors", vectors))
        generations, rows = _tensor("generations", generations), _tensor("rows", rows)
        states = _tensor("states", states)
        with self._lock:
            self._make_ready_for(vectors)
            self._writer.save(
                None, generations, rows, states, vectors=vectors, stream=_handle_of(stream)
            )

    def save_prompt_logprobs(
        self,
        row: int,
        generation: int,
        tokens: Any,
        topk_ids: Any,
        logprobs: Any,
        ranks: Any,
        *,
        begin: int = 0,
    ) -> None:
        """Saves the candidates of one request's prompt tokens; they come with its next output.

        `tokens` [P], `topk_ids` and `logprobs` [P, T], `ranks` [P], all on the CPU; `begin`: place
        of the first in the prompt. A long prompt is split over several steps.
        """
        tokens = _array("tokens", tokens, "whole numbers", 1)
        topk_ids = _array("topk_ids", topk_ids, "whole numbers", 2)
        logprobs = _array("logprobs", logprobs, "floats", 2)
        ranks = _array("ranks", ranks, "whole numbers", 1)
        for name, column in (("topk_ids", topk_ids), ("logprobs", logprobs), ("ranks", ranks)):
            _check_shape(name, column, len(tokens), *column.shape[1:])
        last = np.iinfo(np.int32).max - len(tokens)
        if not 0 <= begin <= last:
            raise OpArgumentError("begin", f"begin is {begin}, must be 0 to {last}")
        generations = _array("generations", [generation], "whole numbers")
        rows = _array("rows", [row], "whole numbers")
        sizes = self._segment.source.sizes
        per_decoder = -(-sizes["max_num_seqs"] // sizes["num_decoders"])
        most = per_decoder * sizes["max_draft_tokens"]
        for at in range(0, len(tokens), most):
            part = slice(at, at + most)
            with self._lock:
                self._make_ready_for(tokens)
                self._writer.save(
                    tokens[part],
                    generations,
                    rows,
                    positions=np.array([begin + at], np.int32),
                    accept_num=np.array([len(tokens[part])], np.int32),
                    topk_ids=topk_ids[part],
                    logprobs=logprobs[part],
                    ranks=ranks[part],
                    is_prompt=True,
                )

    def _save(
        self,
        step: Step | None,
        generations: Any,
        rows: Any,
        tokens: Any,
        states: Any,
        positions: Any,
        not_need_stop: bool,
        stream: Any,
        *,
        accept_num: Any = None,
        topk_ids: Any = None,
        logprobs: Any = None,
        ranks: Any = None,
        message_flag: int = 3,
        counts: int = 0,
        has_wire_values: bool = False,
    ) -> None:
        if step is not None:
            generations, rows = _parts(step)
        elif generations is None:
            raise OpArgumentError("step", "give step= of begin_step(), or generations=")
        tokens = _tensor("tokens", _given("tokens", tokens))
        generations, rows = _tensor("generations", generations), _tensor("rows", rows)
        states, positions = _tensor("states", states), _tensor("positions", positions)
        with self._lock:
            self._make_ready_for(tokens)
            self._writer.save(  # by position: names would cost a fifth of a plain save
                tokens,
                generations,
                rows,
                states,
                positions,
                accept_num,
                topk_ids,
                logprobs,
                ranks,
                None,
                message_flag,
                not_need_stop,
                False,
                _handle_of(stream),
                counts,
                has_wire_values,
            )
            if step is None and cuda.device_of(generations) is None:  # what begin_step() does
                self._writer.note(rows, generations, len(generations))

    def _make_ready_for(self, tensor: Any) -> None:
        """What a save of this tensor needs before it begins. Under the lock."""
        is_usual = type(tensor) is np.ndarray and self._takes_steps and not self._is_closed
        if is_usual and self._writer.can_save():
            return
        device = cuda.device_of(tensor)
        has_device = self._writer.cuda_device >= 0
        if device is None and has_device:
            self._raise_if_closed()
            self._settle(_FOR_EVER_S)  # steps are published in the order of their saves
        elif device is not None and not has_device:
            self._raise_if_closed()
            self._writer.open_cuda(
                cuda.driver(cuda_library()), device, cuda.kernels(), self._publish_by_stream
            )
        self._wait_for_space()

    def _settle(self, timeout_s: float) -> None:
        begun = time.monotonic()
        while not self._writer.wait_settled(min(_WAIT_S, timeout_s)):
            if time.monotonic() - begun >= timeout_s:
                raise SyncTimeoutError("the GPU", timeout_s, "it has steps that are not published")

    def flush(self, timeout_s: float = 10.0) -> None:
        """Waits until every step saved so far is published; on the CPU they are at once.

        Raises what the GPU met in one of them (OpArgumentError, CudaError; again for the next),
        SyncTimeoutError.
        """
        with self._lock:
            self._raise_if_closed()
            self._settle(timeout_s)

    def _wait_for_space(self) -> None:
        self._raise_if_closed()
        if not self._takes_steps:
            how = "its steps come another way; here only poll_control() and beat() work"
            raise WrongSourceError(self._segment.name, self._source, how)
        if self._writer.is_gone:
            raise PipelineGoneError(self._segment.name, "it has stopped")
        alone_since: float | None = None
        while not self._writer.wait_for_space(_WAIT_S):
            self._writer.wait_settled(0.0)  # raises when the GPU will not get there
            if self._writer.is_gone:
                raise PipelineGoneError(self._segment.name, "it has stopped")
            if self._segment.is_locked(LOCK_COORDINATOR) or self._segment.has_roles():
                alone_since = None  # roles wait for a new coordinator, or end
                continue
            now = time.monotonic()
            alone_since = now if alone_since is None else alone_since
            if now - alone_since > self._patience_s:
                raise PipelineGoneError(self._segment.name, "its coordinator has died")

    @property
    def _patience_s(self) -> float:
        """How long somebody may still bring back a pipeline that was killed with its roles: an
        owner that lives, or who runs `tokenpipe serve`."""
        if not self._writer.is_owned:
            return self._writer.grace_s
        return _GONE_AFTER_S if self._segment.is_locked(LOCK_CLIENT) else 0.0

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise PipelineGoneError(self._segment.name, "this writer is closed")
        if self._writer.is_copy:
            why = f"this writer is a fork's copy of that of pid {self._pid}"
            raise PipelineGoneError(self._segment.name, why)

    def poll_control(self) -> list[ControlEvent]:
        """Returns what has been decided about rows since the last call; each thing once.

        abort: stop the row, then save it once with state 3. preempt: the same, it will be resumed.
        finished: the row has ended, run it no more.
        """
        with self._lock:
            self._raise_if_closed()
            return list(_events(self._writer.poll()))

    def beat(self, *, busy: bool) -> None:
        """Says that the engine works without saving (a long prefill): `busy` until the next
        save."""
        self._raise_if_closed()
        self._writer.beat(busy)

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self._segment.name

    @property
    def num_steps(self) -> int:
        """Steps saved so far, by this and former writers."""
        return self._writer.published

    def close(self) -> None:
        """Lets go of the segment; another writer may attach then. In a forked copy of the process
        it does nothing: the writer is not the copy's.

        With a GPU it first waits for the steps that are on their way, and raises what flush()
        would, or CudaError when the GPU could not be let go of. It is closed all the same.
        """
        if self._writer.is_copy:
            return
        with self._lock, contextlib.ExitStack() as stack:
            stack.callback(self._segment.close)
            if self._is_closed:
                return
            self._is_closed = True
            stack.callback(_native.announce_writer, self._segment.source, 0, 0)
            stack.callback(self._writer.close_cuda)
            self._settle(_CLOSE_S)
            self._wait_until_let_go()

    def _wait_until_let_go(self) -> None:
        """Before memory of the device is freed, its reader has copied every step and closed it."""
        begun = time.monotonic()
        while not self._writer.withdraw_cuda() and not self._writer.is_gone:
            if time.monotonic() - begun >= _CLOSE_S:
                raise SyncTimeoutError("the reader", _CLOSE_S, "it has steps of the GPU to copy")
            if not self._segment.is_locked(LOCK_COORDINATOR):
                return
            time.sleep(_WITHDRAW_POLL_S)

    def __enter__(self) -> EngineWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_int32(name: str, values: Any) -> npt.NDArray[np.int32]:
    """Returns a copy; raises OpArgumentError for what would become another number."""
    copied = _native.copy_of_numbers(name, values)
    if copied is not None:
        return copied
    given = np.asarray(values)  # a list, a rarer dtype, or a number to name
    if given.size and given.dtype.kind not in "iu":
        raise OpArgumentError(name, f"{name} is {given.dtype}, must be whole numbers")
    outside = given[(given < 0) | (given > np.iinfo(np.int32).max)]
    if outside.size:
        raise OpArgumentError(name, f"{name} holds {outside.flat[0]}, must be 0 to 2**31 - 1")
    return given.astype(np.int32)


def _parts(step: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
    if not isinstance(step, Step):
        raise OpArgumentError("step", f"step is {step!r}, must be what begin_step() returned")
    return step.generations, step.rows


def _refuse_a_row_twice(rows: npt.NDArray[np.int32], generations: npt.NDArray[np.int32]) -> None:
    """Of a row that stands twice in a step only the first token would count."""
    seen, times = np.unique(rows[generations > 0], return_counts=True)
    if (times > 1).any():
        row = seen[times > 1][0]
        raise OpArgumentError("rows", f"rows holds {row} twice, must name each running row once")


def _events(found: list[tuple[int, int, int]]) -> Iterator[ControlEvent]:
    for row, generation, bits in found:
        for bit in Control:
            if bits & bit:
                yield ControlEvent(row, generation, bit.name.lower())


def _given(name: str, value: Any) -> Any:
    if value is None:
        raise OpArgumentError(name, f"{name} is None, must be a tensor")
    return value


def _tensor(name: str, value: Any) -> Any:
    """A list as an array. Of Paddle's tensors on a GPU the capsule itself: before 3.3 their
    __dlpack__ waits for the model's stream, whatever stream= says, and older ones have none."""
    if value is None or type(value) is np.ndarray:
        return value
    if isinstance(value, (list, tuple)):
        return _of_list(name, value)
    if not type(value).__module__.startswith("paddle") or not hasattr(value, "value"):
        return value
    on_gpu = value.place.is_gpu_place()
    if hasattr(value, "__dlpack__") and not on_gpu:
        return value
    from paddle.utils.dlpack import to_dlpack  # type: ignore[import-not-found, unused-ignore]

    return _Capsule(to_dlpack(value), value.place.gpu_device_id() if on_gpu else None)


def _handle_of(stream: Any, name: str = "stream") -> int | None:
    if stream is None or isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):  # the protocol: its version, and the handle
        return int(stream.__cuda_stream__()[1])
    stream = getattr(stream, "stream_base", stream)  # what paddle.device.Stream is about
    for attribute in ("cuda_stream", "ptr"):  # of PyTorch and Paddle; of CuPy
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise OpArgumentError(
        name, f"{name} is a {type(stream).__name__}, must be a stream's handle or have one"
    )


def _of_list(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        if name in ("logprobs", "vectors"):
            return np.asarray(value, np.float32)
        array = np.asarray(value)
    except (ValueError, TypeError) as error:  # rows of several lengths, or no numbers
        raise OpArgumentError(name, f"{name} is no array: {error}") from None
    return array if array.size else array.astype(np.int64)


def _array(name: str, value: Any, kind: str, ndim: int | None = None) -> npt.NDArray[Any]:
    """Returns `value` as an array of numpy, for the ops that compose their columns here.

    `kind` is "whole numbers" or "floats". Raises OpArgumentError for anything else and for another
    number of dimensions.
    """
    value = _tensor(name, _given(name, value))
    cuda.refuse_on_device(name, value, "copy it there first")
    try:
        if hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
            array = np.asarray(value)
        else:
            array = np.from_dlpack(value)
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        raise OpArgumentError(name, f"{name} is no array: {error}") from None
    if array.dtype.kind not in ("iu" if kind == "whole numbers" else "f"):
        raise OpArgumentError(name, f"{name} is {_shown(array)}, must be {kind}")
    if array.ndim != ndim if ndim is not None else array.ndim == 0:
        wanted = "some dimension" if ndim is None else f"{ndim} dimension{'s' * (ndim > 1)}"
        raise OpArgumentError(name, f"{name} is {_shown(array)}, must have {wanted}")
    return array


def _check_shape(name: str, array: npt.NDArray[Any], *shape: int) -> None:
    if array.shape != shape:
        raise OpArgumentError(name, f"{name} is {_shown(array)}, must be {list(shape)}")


def _shown(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


class _Capsule:
    def __init__(self, capsule: Any, device: int | None) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self._device is None else (cuda.DLPACK_CUDA, self._device)
