"""Pipeline: what the engine process holds. It owns a coordinator, or is the client of one."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from tokenpipe import _native
from tokenpipe.channel import CommandChannel, Reply
from tokenpipe.children import how_it_ended
from tokenpipe.commands import ANY_ROW, CommandKind, FinishReason, ReplyStatus
from tokenpipe.config import PipelineConfig
from tokenpipe.delivery import Delivery, OpenRequests
from tokenpipe.errors import (
    DeliveryModeError,
    DrainingError,
    DuplicateRequestError,
    InvalidRequestError,
    NoFreeRowError,
    NotEnoughBlocksError,
    PartyExistsError,
    PipelineGoneError,
    PipelineStartError,
    RequestAbortedError,
    RowBusyError,
    SyncTimeoutError,
    TokenpipeError,
    UnknownRequestError,
    from_json,
)
from tokenpipe.layout import PipelineState
from tokenpipe.outputs import OutputBatch, RequestOutput
from tokenpipe.requests import Admission, Request
from tokenpipe.segment import LOCK_CLIENT, LOCK_COORDINATOR, Segment, start_time, sweep
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

    def __init__(self, config: PipelineConfig | None = None) -> None:
        """Starts a pipeline. Blocks up to `start_timeout_s`. Raises the coordinator's own error
        (ConfigError, SegmentExistsError, SegmentSpaceError, PortInUseError, ChildBootError ...)."""
        config = config or PipelineConfig()
        self._process: subprocess.Popen[bytes] | None
        self._process, self._owner_fd, ready = _spawn_coordinator(config)
        self.health_url = str(ready["health_url"])
        self.pids: dict[str, int] = {"coordinator": int(ready["pid"]), **ready["pids"]}
        try:
            self._open(config.name, timeout_s=1.0)
        except BaseException:
            os.close(self._owner_fd)
            self._process.wait()
            raise

    @classmethod
    def attach(cls, name: str, timeout_s: float = 10.0) -> Pipeline:
        """Returns the client of a running pipeline, waiting for it to be ready.

        Frames that a former client had in hand come again, with the same numbers. Raises
        SegmentMissingError, LayoutMismatchError, PartyExistsError (pid of the client it has).
        """
        self = cls.__new__(cls)
        self._process, self._owner_fd = None, -1
        self._open(name, timeout_s)
        view = View(self._segment)
        self.health_url = (
            f"http://{self.config.health_host}:{int(view.header['health_port'])}/health"
        )
        names = role_names(self.config.num_decoders)
        self.pids = {n: int(r["pid"]) for n, r in zip(names, view.roles, strict=True)}
        return self

    def _open(self, name: str, timeout_s: float) -> None:
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
        self._delivery = Delivery(
            self._segment, self._client, self._requests, self._is_over, self._last_reason
        )
        self._channel = CommandChannel(self._client, self.config.command_slots, self._raise_if_gone)
        self._streams: Streams | None = None
        self._mode: str | None = None
        self._mode_lock = threading.Lock()
        self._is_closed = False

    @property
    def name(self) -> str:
        """The pipeline's name, for EngineWriter.attach and Pipeline.attach."""
        return self.config.name

    # -------------------------------------------------------------- is it still there

    def _is_over(self) -> bool:
        """Whether no frame can come any more: said so, or the coordinator and the roles are
        dead."""
        if self._is_closed or _native.is_gone(self._segment.source):
            return True
        if self._segment.is_locked(LOCK_COORDINATOR):
            return False
        # Roles end on their own within orphan_grace_s, and may deliver until then.
        return not self._segment.has_roles()

    def _raise_if_gone(self) -> None:
        if self._is_over():
            raise PipelineGoneError(self.name, self._why_gone())

    def _why_gone(self) -> str:
        if self._is_closed:
            return "this handle is closed"
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
        self, request: Request, *, timeout_s: float | None = None, row: int | None = None
    ) -> Admission:
        """Gives the request a row; first come, first served.

        Blocks until a row (and its blocks) is free: for `timeout_s` at most, None for ever, 0 not
        at all. `row`: the one that the engine's scheduler has chosen; waits for its former
        request's end. When it returns, every decoder sees the admission before any token saved
        afterwards. Raises InvalidRequestError, DuplicateRequestError, NoFreeRowError, RowBusyError,
        NotEnoughBlocksError, RequestAbortedError, DrainingError, PipelineGoneError.
        """
        self._raise_if_gone()
        request.check(self.config)
        if row is not None and not 0 <= row < self.config.max_num_seqs:
            why = f"must be 0 to max_num_seqs - 1 = {self.config.max_num_seqs - 1}"
            raise InvalidRequestError(request.request_id, "row", row, why)
        if request.request_id in self._requests:
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
                id=request.request_id,
                eos=[int(t) for t in request.eos_token_ids],
                row=ANY_ROW if row is None else row,
                max_tokens=request.max_tokens or 0,
                num_emitted=request.num_emitted_tokens,
                prompt_tokens=len(request.prompt_token_ids),
                num_blocks=request.blocks_wanted(self.config),
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
        return admission

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
        if ids is None:
            ids = self._requests.ids()
        elif isinstance(ids, str):
            ids = [ids]
        return {
            request_id: self._channel.call(CommandKind.ABORT, id=request_id).status
            is ReplyStatus.OK
            for request_id in ids
        }

    # -------------------------------------------------------------- delivery

    def _choose(self, mode: str) -> None:
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
        iterator has advanced past it. When the pipeline ends, every open request gets its final and
        the iterator ends; a later call raises PipelineGoneError. Raises DeliveryModeError after
        stream().
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

    async def stream(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yields the outputs of one request up to its final.

        Outputs wait in the request's own buffer, so a slow stream delays itself only; leaving the
        iteration early aborts the request. The first call decides that this handle delivers by
        streams. Raises UnknownRequestError, DeliveryModeError, PipelineGoneError.
        """
        streams = self._start_streams()
        if request_id not in streams:
            if request_id not in self._requests:
                raise UnknownRequestError(request_id)
            streams.open(request_id)
        is_finished = False
        try:
            async for output in streams.read(request_id):
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
        deadline = time.monotonic() + timeout_s
        target = _native.published(self._segment.source)
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
            if time.monotonic() >= deadline:
                raise SyncTimeoutError(*self._stage(target, behind, unswept, timeout_s))
            time.sleep(_POLL_S)

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
        verdict = judge(self._segment, self._view)
        return {
            "state": verdict.state.name.lower(),
            "role": verdict.role,
            "reason": verdict.reason,
        }

    def status(self) -> dict[str, Any]:
        """Returns what GET /status shows."""
        return status_of(self._segment)

    def engine_writer(self) -> EngineWriter:
        """Returns the writer for an engine in this same process."""
        return EngineWriter.attach(self.name)

    # -------------------------------------------------------------- the end

    def drain(self, timeout_s: float) -> None:
        """Asks the pipeline to end: nothing new is taken, running requests have `timeout_s` to end,
        the rest get shutdown finals. Blocks only until the coordinator has begun; go on reading."""
        self._channel.call(CommandKind.DRAIN, argument=int(timeout_s * 1e9))

    def close(self) -> None:
        """Lets go. The owner also stops the pipeline and blocks until all its processes have
        ended."""
        if self._is_closed:
            return
        if self._process is not None:
            os.close(self._owner_fd)  # its end-of-file is the coordinator's word to stop
            try:
                self._process.wait(_STOP_GRACE_S + self.config.orphan_grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._is_closed = True
        if self._streams is not None:
            self._streams.close()
        self._segment.close()
        if self._process is not None and self._process.returncode < 0:
            self._clean_after_a_kill()

    def _clean_after_a_kill(self) -> None:
        """A coordinator that was killed could not remove its segments; its roles end by
        themselves."""
        deadline = time.monotonic() + self.config.orphan_grace_s + _STOP_GRACE_S
        while sweep(self.name) == 0 and time.monotonic() < deadline:
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


def _spawn_coordinator(
    config: PipelineConfig,
) -> tuple[subprocess.Popen[bytes], int, Mapping[str, Any]]:
    """Starts `tokenpipe serve` and waits for its ready line. Raises the error that it tells of."""
    ready_read, ready_write = os.pipe()
    owner_read, owner_write = os.pipe()
    try:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tokenpipe", "serve", *config.to_cli_args()),
                *(f"--name={config.name}", f"--ready-fd={ready_write}"),
                f"--owner-fd={owner_read}",
            ],
            pass_fds=(ready_write, owner_read),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the owner's to handle: it closes the pipeline
        )
    except BaseException:
        os.close(ready_read)
        os.close(owner_write)
        raise
    finally:
        os.close(ready_write)
        os.close(owner_read)
    try:
        return process, owner_write, _read_ready(process, ready_read, config.start_timeout_s + 10)
    except BaseException:
        os.close(owner_write)
        process.kill() if process.poll() is None else None
        process.wait()
        raise
    finally:
        os.close(ready_read)


def _read_ready(process: subprocess.Popen[bytes], fd: int, timeout_s: float) -> Mapping[str, Any]:
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise PipelineStartError(f"start: no ready line within {timeout_s:g} s", 1)
        piece = os.read(fd, 65536)
        if not piece:
            code = process.wait()
            raise PipelineStartError(f"start: the coordinator {how_it_ended(code)}", code)
        line += piece
    told: Mapping[str, Any] = json.loads(line)
    if told["event"] != "ready":
        process.wait()
        raise from_json(line.decode())
    return told
