"""Pipeline: what the engine process holds. It owns a coordinator, or is the client of one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from tokenpipe import _native
from tokenpipe.channel import CommandChannel, Reply, time_limit
from tokenpipe.commands import ANY_ROW, CommandKind, FinishReason, ReplyStatus
from tokenpipe.config import PipelineConfig
from tokenpipe.delivery import Delivery, OpenRequests
from tokenpipe.errors import (
    DeliveryModeError,
    DrainingError,
    DuplicateRequestError,
    InvalidRequestError,
    NoFreeBlocksError,
    NoFreeRowError,
    NotAcknowledgedError,
    NotEnoughBlocksError,
    PartyExistsError,
    PipelineGoneError,
    RequestAbortedError,
    RowBusyError,
    SyncTimeoutError,
    TokenpipeError,
    UnknownRequestError,
    WrongSourceError,
)
from tokenpipe.events import RequestEvent
from tokenpipe.handover import SENT, FirstTokenSink, Handover
from tokenpipe.keeper import Keeper
from tokenpipe.layout import PipelineState
from tokenpipe.objects import ObjectMaker
from tokenpipe.outputs import OutputBatch
from tokenpipe.records import AnyOutput
from tokenpipe.requests import Admission, Request, fits, whole_number
from tokenpipe.segment import LOCK_CLIENT, LOCK_COORDINATOR, Segment, leftovers, start_time, sweep
from tokenpipe.status import View, judge, role_names, status_of
from tokenpipe.streams import Streams
from tokenpipe.writer import EngineWriter

_STOP_GRACE_S = 5.0
_POLL_S = 0.0005


class Pipeline:
    """A handle on a pipeline: `Pipeline(config)` owns it, `Pipeline.attach(name)` does not.

    The owner spawns the coordinator and returns when every role has beaten once; leaving the `with`
    stops everything. A handle is the pipeline's one client. Every method may be called from any
    thread; those that block say so.
    """

    def __init__(
        self,
        config: PipelineConfig | None = None,
        *,
        on_event: Callable[[RequestEvent], None] | None = None,
        on_first_token: FirstTokenSink | None = None,
    ) -> None:
        """Starts a pipeline. Blocks up to `start_timeout_s`.

        `on_event` hears of first tokens and ends, in the thread that reads. `on_first_token` gets
        (disaggregate_info, [output]) of a prefill instance once prefill_done() was called. Raises
        the
        coordinator's own error (ConfigError, SegmentExistsError, SegmentSpaceError, PortInUseError,
        ChildBootError ...).
        """
        config = config or PipelineConfig()
        self._keeper: Keeper | None = Keeper(config)
        self.health_url = self._keeper.health_url
        try:
            self._open(config.name, 1.0, on_event, on_first_token)
        except BaseException:
            self._keeper.stop(_STOP_GRACE_S)
            raise

    @classmethod
    def attach(
        cls,
        name: str,
        timeout_s: float = 10.0,
        *,
        on_event: Callable[[RequestEvent], None] | None = None,
        on_first_token: FirstTokenSink | None = None,
    ) -> Pipeline:
        """Returns the client of a running pipeline, waiting for it to be ready.

        Frames that a former client had in hand come again, with the same numbers. Raises
        SegmentMissingError, LayoutMismatchError, PartyExistsError (pid of the client it has).
        """
        self = cls.__new__(cls)
        self._keeper = None
        self._open(name, timeout_s, on_event, on_first_token)
        view = View(self._segment)
        self.health_url = (
            f"http://{self.config.health_host}:{int(view.header['health_port'])}/health"
        )
        return self

    def _open(
        self,
        name: str,
        timeout_s: float,
        on_event: Callable[[RequestEvent], None] | None,
        on_first_token: FirstTokenSink | None,
    ) -> None:
        self._segment = Segment.attach(name, timeout_s)
        self._view = View(self._segment)
        self.config = self._segment.config
        if not self._segment.lock(LOCK_CLIENT):
            pid = int(self._view.client["pid"])
            self._segment.close()
            raise PartyExistsError(name, "client", pid)
        core = self._segment.core
        self._client = _native.Client(core, self.config.spin_us / 1e6)
        self._client.announce(os.getpid(), start_time(os.getpid()) or 0)
        self._requests = OpenRequests(core, self.config.max_num_seqs)
        self._handover = Handover(on_first_token, self.config.prefill_timeout_s)
        self._wall_offset_ns = int(self._view.header["wall_offset_ns"])
        self._delivery = Delivery(
            self._segment,
            self._client,
            self._requests,
            self._is_over,
            self._last_reason,
            ObjectMaker(self.config, self._wall_offset_ns),
            on_event,
            self._handover,
        )
        self._channel = CommandChannel(self._client, self.config.command_slots, self._raise_if_gone)
        self._streams: Streams | None = None
        self._mode: str | None = None
        self._mode_lock = threading.Lock()
        self._pid = os.getpid()
        self._was_closed = False
        self._alone_since: float | None = None
        self._has_ended = False

    @property
    def name(self) -> str:
        """The pipeline's name, for EngineWriter.attach and Pipeline.attach."""
        return self.config.name

    @property
    def pids(self) -> dict[str, int]:
        """Pid of each role's present life, the coordinator's included."""
        names = role_names(self.config.num_decoders)
        return {n: int(r["pid"]) for n, r in zip(names, self._view.roles, strict=True)}

    # -------------------------------------------------------------- is it still there

    @property
    def _is_closed(self) -> bool:
        return self._was_closed or os.getpid() != self._pid

    def _is_over(self, asks_who_lives: bool = True) -> bool:
        """Whether no frame can come any more: said so, or the coordinator and the roles are dead.
        To ask for the latter hands the GIL over, which beside a busy thread costs 5 ms."""
        if self._is_closed or _native.is_gone(self._segment.source):
            return True
        if self._has_ended:  # its finals are made: one that comes back is another handle's
            return True
        if not asks_who_lives:
            return False
        # Roles end on their own within orphan_grace_s, and may deliver until then.
        if not self._is_alone():
            self._alone_since = None
            return False
        if self._keeper is not None:
            self._has_ended = self._keeper.has_given_up
            return self._has_ended
        # Who runs `tokenpipe serve` may start it again, and it takes this pipeline over.
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        self._has_ended = now - self._alone_since >= self.config.orphan_grace_s
        return self._has_ended

    def _is_alone(self) -> bool:
        return not self._segment.is_locked(LOCK_COORDINATOR) and not self._segment.has_roles()

    def _raise_if_gone(self) -> None:
        if self._is_over():
            raise PipelineGoneError(self.name, self._why_gone())

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise PipelineGoneError(self.name, self._why_gone())

    def _why_gone(self) -> str:
        if self._was_closed:
            return "this handle is closed"
        if self._is_closed:
            return f"this handle is a fork's copy of that of pid {self._pid}"
        reason = bytes(self._view.header["reason"]).split(b"\0")[0].decode(errors="replace")
        state = PipelineState(int(self._view.header["state"]))
        if state in (PipelineState.FAILED, PipelineState.STOPPED):
            return f"{state.name.lower()}: {reason}"
        return "its coordinator has died"

    def _last_reason(self) -> FinishReason:
        stopped = int(self._view.header["state"]) in (
            PipelineState.STOPPED,
            PipelineState.DRAINING,
        )
        return FinishReason.SHUTDOWN if stopped else FinishReason.ERROR

    # -------------------------------------------------------------- requests

    def submit(
        self,
        request: Request,
        *,
        timeout_s: float | None = None,
        row: int | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> Admission:
        """Gives the request a row; first come, first served.

        Blocks until a row (and its blocks) is free: for `timeout_s` at most, None for ever, 0 not
        at all. `row`: the one that the engine's scheduler has chosen; waits for its former
        request's end. When it returns, every decoder sees the admission before any token saved
        afterwards. `while_waiting` is called now and then meanwhile, for a caller whose own lock
        keeps its reading thread from making room. Raises InvalidRequestError,
        DuplicateRequestError, NoFreeRowError, RowBusyError, NotEnoughBlocksError,
        RequestAbortedError, DrainingError, PipelineGoneError.
        """
        self._raise_if_gone()
        request.check(self.config)
        if row is not None and not 0 <= row < self.config.max_num_seqs:
            why = f"must be 0 to max_num_seqs - 1 = {self.config.max_num_seqs - 1}"
            raise InvalidRequestError(request.request_id, "row", row, why)
        if request.request_id in self._requests or request.request_id in self._handover:
            raise DuplicateRequestError(request.request_id)
        self._requests.expect(request)
        streams = self._streams
        if streams is not None:
            streams.open(request.request_id)
        begun = time.monotonic()
        try:
            reply = self._channel.call(
                CommandKind.SUBMIT,
                timeout_s,
                while_waiting,
                id=request.request_id,
                eos=[int(t) for t in request.eos_token_ids],
                row=ANY_ROW if row is None else row,
                max_tokens=request.max_tokens or 0,
                num_emitted=request.num_emitted_tokens,
                prompt_tokens=len(request.prompt_token_ids),
                num_blocks=request.blocks_wanted(self.config),
                num_chunks=len(request.prefill_chunk_info or ()),
                flags=request.flags,
                arrival_ns=self._monotonic_ns(request.metrics.arrival_time),
                preprocess_end_ns=self._monotonic_ns(request.metrics.preprocess_end_time),
                inference_start_ns=self._monotonic_ns(
                    request.metrics.inference_start(self.config.role)
                ),
            )
            if reply.status is not ReplyStatus.OK:
                raise self._refusal(request, reply, row, time.monotonic() - begun)
        except BaseException:
            self._requests.forget(request)
            if streams is not None:
                streams.discard(request.request_id)
            raise
        admission = Admission(request.request_id, reply.row, reply.generation, reply.block_ids)
        self._requests.admit(admission, request)
        if self.config.role == "prefill" and request.disaggregate_info is not None:
            self._expect_first_token(admission)
        return admission

    def _expect_first_token(self, admission: Admission) -> None:
        place = admission.row, admission.generation
        self._handover.expect(admission.request_id, *place)
        # Its final may have been read before submit() came back.
        if self._requests.has_ended(*place) and not self._handover.is_parked(*place):
            self._handover.forget(admission.request_id, *place)

    def _monotonic_ns(self, wall_s: float | None) -> int:
        """A stamp of the caller on our clock; 0 for one that is missing or older than the clock."""
        return 0 if wall_s is None else max(0, int(wall_s * 1e9) - self._wall_offset_ns)

    def _refusal(
        self, request: Request, reply: Reply, row: int | None, waited_s: float
    ) -> TokenpipeError:
        waited_s, request_id = round(waited_s, 3), request.request_id
        if reply.status is ReplyStatus.NO_FREE_ROW:
            return NoFreeRowError(request_id, waited_s, self.config.max_num_seqs)
        if reply.status is ReplyStatus.ROW_BUSY:
            return RowBusyError(request_id, -1 if row is None else row, waited_s)
        if reply.status is ReplyStatus.DUPLICATE:
            return DuplicateRequestError(request_id)
        if reply.status is ReplyStatus.TOO_MANY_BLOCKS:
            wanted = request.blocks_wanted(self.config)
            return NotEnoughBlocksError(request_id, wanted, self.config.num_blocks)
        if reply.status is ReplyStatus.ABORTED:
            return RequestAbortedError(request_id)
        if reply.status is ReplyStatus.DRAINING:
            return DrainingError(self.name)
        return TokenpipeError(f"submit of {request_id!r}: unexpected reply {reply.status.name}")

    async def submit_async(
        self, request: Request, *, timeout_s: float | None = None, row: int | None = None
    ) -> Admission:
        """As submit, without blocking the event loop."""
        return await asyncio.to_thread(self.submit, request, timeout_s=timeout_s, row=row)

    def abort(self, ids: str | Iterable[str] | None = None) -> dict[str, bool]:
        """Ends requests: one id, many, or all (None). Blocks for the coordinator's answer only.

        Each gets its final at once; its row comes back when the engine acknowledges (state 3) or
        after `abort_timeout_s`. Returns for each id whether there was something to abort: unknown
        and finished ids are answered with False.
        """
        return self._tell(CommandKind.ABORT, ids)

    def _tell(self, kind: CommandKind, ids: str | Iterable[str] | None) -> dict[str, bool]:
        if ids is None:
            ids = self._requests.ids()
        elif isinstance(ids, str):
            ids = [ids]
        return {request_id: self._tell_one(kind, request_id) for request_id in ids}

    def _tell_one(self, kind: CommandKind, request_id: str) -> bool:
        if not isinstance(request_id, str):
            raise InvalidRequestError(str(request_id), "request_id", request_id, "must be a string")
        if not fits(request_id, self.config):
            return False  # submit() refuses such an id
        return self._channel.call(kind, id=request_id).status is ReplyStatus.OK

    def let_go(self, admission: Admission) -> bool:
        """Tells that the engine has let go of a request that its own scheduler took away.

        It is ended like an abort, unless it has ended already, and its row comes back without an
        acknowledgement. Blocks for the coordinator's answer only. Returns False when that life of
        the row is over.
        """
        row, generation = admission.row, admission.generation
        reply = self._channel.call(CommandKind.LET_GO, row=row, generation=generation)
        return reply.status is ReplyStatus.OK

    def preempt(self, ids: str | Iterable[str] | None = None) -> dict[str, bool]:
        """Asks the engine to let go of running requests for a while: one id, many, or all (None).

        Blocks for the coordinator's answer only. The request keeps its row, generation and blocks;
        the engine hears of it by poll_control, and acknowledges with state 3. Tokens that are on
        their way are delivered (a decode instance's are not). An acknowledgement that does not
        come in `abort_timeout_s` ends the request with an error. Returns for each id whether it
        was running.
        """
        return self._tell(CommandKind.PREEMPT, ids)

    def resume(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Lets the engine run a preempted request again, in the same row and generation.

        Blocks until the engine has acknowledged, for `timeout_s` at most. Positions go on: a token
        that is sent again (`positions=`) is dropped and counted. Raises UnknownRequestError when it
        has ended, NotAcknowledgedError.
        """
        if not fits(request_id, self.config):
            raise UnknownRequestError(request_id)
        begun = time.monotonic()
        reply = self._channel.call(CommandKind.RESUME, timeout_s, id=request_id)
        if reply.status is not ReplyStatus.OK:
            if reply.status is ReplyStatus.UNKNOWN:
                raise UnknownRequestError(request_id)
            if reply.status is ReplyStatus.DRAINING:
                raise DrainingError(self.name)
            raise NotAcknowledgedError(request_id, round(time.monotonic() - begun, 3))

    def grow(
        self, request_id: str, num_blocks: int, *, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Gives a running request more KV blocks and returns their ids.

        Blocks until so many are free, before any waiting submit, for `timeout_s` at most. Raises
        UnknownRequestError, NotEnoughBlocksError (more than the pool has), NoFreeBlocksError.
        """
        whole_number(request_id, "num_blocks", num_blocks, 1)
        if not fits(request_id, self.config):
            raise UnknownRequestError(request_id)
        begun = time.monotonic()
        reply = self._channel.call(
            CommandKind.GROW, timeout_s, id=request_id, num_blocks=num_blocks
        )
        if reply.status is ReplyStatus.OK:
            return reply.block_ids
        if reply.status is ReplyStatus.UNKNOWN:
            raise UnknownRequestError(request_id)
        if reply.status is ReplyStatus.TOO_MANY_BLOCKS:
            raise NotEnoughBlocksError(request_id, num_blocks, self.config.num_blocks)
        if reply.status is ReplyStatus.DRAINING:
            raise DrainingError(self.name)
        raise NoFreeBlocksError(request_id, num_blocks, round(time.monotonic() - begun, 3))

    def prefill_done(self, request_id: str, status: str = SENT) -> bool:
        """Tells a prefill instance what the cache sender said of a request.

        Its row and blocks come back, and its first token goes to `on_first_token`, with error 501
        unless `status` is "finished". May be called before the first token has been read. Returns
        False when nothing of that id waits for it.
        """
        place = self._handover.take_place(request_id)
        if place is None:
            return False
        row, generation = place
        reply = self._channel.call(CommandKind.PREFILL_DONE, row=row, generation=generation)
        self._handover.answer(row, generation, status)
        return reply.status is ReplyStatus.OK

    def clear(self) -> None:
        """Ends every request with an error record, and every waiting submit with
        RequestAbortedError. Blocks for the coordinator's answer only."""
        self._channel.call(CommandKind.CLEAR)

    # -------------------------------------------------------------- delivery

    def _choose(self, mode: str) -> None:
        if os.getpid() != self._pid:  # a copy must not take the frames of the one client
            self._raise_if_closed()
        with self._mode_lock:
            if self._mode not in (None, mode):
                raise DeliveryModeError(str(self._mode), mode)
            self._mode = mode

    def batches(
        self, timeout_s: float | None = None, *, by_step: bool = False
    ) -> Iterator[OutputBatch]:
        """Yields output batches until none comes for `timeout_s` (None: for ever).

        Blocks. One batch per (step, decoder), in order per request; `by_step` waits for all
        decoders and gives each step whole, in row order. A batch counts as delivered when the
        iterator has advanced past it. With report_acknowledgements, of the sources sysv and zmq,
        a batch may have no rows (OutputBatch.is_message_end). When the pipeline ends, every open
        request gets its final and the iterator ends; a later call raises PipelineGoneError. Raises
        DeliveryModeError after stream().
        """
        self._choose("batches")
        take = self._delivery.next_step if by_step else self._delivery.next
        return self._each_batch(take, timeout_s)

    def _each_batch(self, take: Any, timeout_s: float | None) -> Iterator[OutputBatch]:
        is_first = True
        while True:
            batch: OutputBatch | None = take(timeout_s)
            if batch is None:
                if is_first:
                    self._raise_if_gone()
                return
            is_first = False
            try:
                yield batch
            finally:
                batch.release()

    async def stream(self, request_id: str) -> AsyncIterator[AnyOutput]:
        """Yields the outputs of one request up to its final.

        Outputs wait in the request's own buffer, so a slow stream delays itself only; leaving the
        iteration early aborts the request. The first call decides that this handle delivers by
        streams, and from then on each request that is submitted needs one: its outputs are kept for
        it. Raises UnknownRequestError, StreamTakenError, DeliveryModeError, PipelineGoneError.
        """
        streams = self._start_streams()
        if request_id not in streams:
            if request_id not in self._requests:
                raise UnknownRequestError(request_id)
            streams.open(request_id)
        buffer = streams.take(request_id)
        is_finished = False
        try:
            async for output in streams.read(request_id, buffer):
                is_finished = output.finished
                yield output
        finally:
            if not is_finished and not self._is_over():
                await asyncio.to_thread(self.abort, request_id)

    def _start_streams(self) -> Streams:
        self._choose("streams")
        with self._mode_lock:
            if self._streams is None:
                self._streams = Streams(self._delivery, self._is_over, self.name)
            return self._streams

    def sync(self, timeout_s: float = 10.0) -> None:
        """Blocks until every step saved before the call is decoded, its frames are readable with
        batches(timeout_s=0), and the rows that ended in it are given back.

        Raises SyncTimeoutError (stage) when that takes longer: a full output ring that nobody reads
        has the stage 'client'.
        """
        self._raise_if_closed()
        deadline = time.monotonic() + timeout_s
        target = self._sync_target(timeout_s)
        decoders = range(self.config.num_decoders)
        while True:
            committed = [self._client.committed(k) for k in decoders]
            behind = [k for k in decoders if committed[k][3] < target]
            unswept = [
                k for k in decoders if _native.swept(self._segment.core, k) < committed[k][0]
            ]
            if not behind and not unswept:
                return
            self._raise_if_gone()
            if not behind:
                self._client.ring()  # a turn without an end wakes nobody
            if time.monotonic() >= deadline:
                raise SyncTimeoutError(*self._stage(target, behind, unswept, timeout_s))
            time.sleep(_POLL_S)

    def _sync_target(self, timeout_s: float) -> int:
        """The source sequence that everything saved by now is below."""
        if self.config.has_writer:
            return _native.published(self._segment.source)
        if self.config.source == "zmq":
            how = "sync() is not offered, as nothing tells what is still in the socket"
            raise WrongSourceError(self.name, "zmq", how)
        reply = self._channel.call(CommandKind.SYNC, timeout_s)  # a queue must be asked
        if reply.status is ReplyStatus.OK:
            return reply.value
        decoders = list(range(self.config.num_decoders))
        received = _native.published(self._segment.source)
        behind = [k for k in decoders if self._client.committed(k)[3] < received]
        if behind:
            raise SyncTimeoutError(*self._stage(received, behind, [], timeout_s))
        raise SyncTimeoutError("reader", timeout_s, "it has not reached the end of the queue")

    def _stage(
        self, target: int, behind: list[int], unswept: list[int], timeout_s: float
    ) -> tuple[str, float, str]:
        for k in behind:
            unread = self._client.committed(k)[2] - int(self._view.client["output"][k]["released"])
            if unread >= self.config.output_slots:
                text = f"the output ring of decoder-{k} is full and nobody reads it"
                return "client", timeout_s, text
        released = _native.source_released(self._segment.source)
        if behind and released < target:
            return "reader", timeout_s, f"{target - released} steps wait in the source"
        if behind:
            return f"decoder-{behind[0]}", timeout_s, f"it is behind source step {target}"
        return "coordinator", timeout_s, f"it has not swept decoder-{unswept[0]}"

    # -------------------------------------------------------------- state

    def health(self) -> dict[str, Any]:
        """Returns state, role at fault and reason, as GET /health shows them."""
        self._raise_if_closed()
        verdict = judge(self._segment, self._view)
        is_lost = self._is_over() or (self._keeper is None and self._is_alone())
        if is_lost and verdict.state is not PipelineState.STOPPED:
            return {"state": "failed", "role": "coordinator", "reason": self._why_gone()}
        return {
            "state": verdict.state.name.lower(),
            "role": verdict.role,
            "reason": verdict.reason,
        }

    def status(self) -> dict[str, Any]:
        """Returns what GET /status shows."""
        self._raise_if_closed()
        return {**status_of(self._segment), **self.health()}

    def engine_writer(self) -> EngineWriter:
        """Returns the writer for an engine in this same process."""
        return EngineWriter.attach(self.name)

    # -------------------------------------------------------------- the end

    def drain(self, timeout_s: float) -> None:
        """Asks the pipeline to end: nothing new is taken, running requests have `timeout_s` to end,
        the rest get shutdown finals. Blocks only until the coordinator has begun; go on reading."""
        limit_s = time_limit("timeout_s", timeout_s)
        self._channel.call(CommandKind.DRAIN, argument=int(limit_s * 1e9))

    def close(self) -> None:
        """Lets go. The owner also stops the pipeline and blocks until all its processes have
        ended. In a forked copy of the process it does nothing: the handle is not the copy's."""
        if self._is_closed:
            return
        killed = False
        if self._keeper is not None:
            killed = self._keeper.stop(_STOP_GRACE_S + self.config.orphan_grace_s)
        self._was_closed = True
        if self._streams is not None:
            self._streams.close()
        self._handover.give_up_all()
        is_left = killed and self._segment.has_its_names
        self._segment.close()
        if is_left:
            self._clean_after_a_kill()

    def _clean_after_a_kill(self) -> None:
        """A coordinator that was killed could not remove its segments; its roles end by
        themselves."""
        deadline = time.monotonic() + self.config.orphan_grace_s + _STOP_GRACE_S
        while any(leftovers(self.name)) and time.monotonic() < deadline:
            if sweep(self.name) == 0:
                time.sleep(0.02)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
