"""Frames in: the next batch of any decoder, whole steps, and exactly one final per request."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from tokenpipe import _native
from tokenpipe.commands import FinishReason
from tokenpipe.drafts import DraftJoin
from tokenpipe.events import RequestEvent, events_of
from tokenpipe.handover import Handover
from tokenpipe.objects import ObjectMaker
from tokenpipe.outputs import OutputBatch, finals_without_step, merged
from tokenpipe.records import LogprobsLists
from tokenpipe.requests import Admission, Request
from tokenpipe.segment import Segment

_log = logging.getLogger("tokenpipe.delivery")

_WAIT_S = 0.1


class OpenRequests:
    """Which request runs as which (row, generation), from before its submit to its final."""

    def __init__(self, core: _native.Core, num_rows: int) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._by_key: dict[tuple[int, int], Request] = {}
        self._by_id: dict[str, Request] = {}
        self._running_ids: dict[str, tuple[int, int]] = {}
        self._resolved: dict[int, tuple[bytes, bytes, list[Request]]] = {}
        """By decoder: rows and generations of its last batch, and whose they are. Most steps have
        the rows of the step before; whatever changes `_by_key` empties it."""
        self._last_ended = [0] * num_rows
        self.num_second_finals = 0
        for row, known in enumerate(_native.rows(core)):
            admitted, freed, terminal, request_id = known[:4]
            if admitted != freed and not terminal:  # of a former client of this pipeline
                self._run(row, admitted, Request(request_id.decode()))

    def _run(self, row: int, generation: int, request: Request) -> None:
        self._by_key[row, generation] = request
        self._resolved.clear()
        self._running_ids[request.request_id] = (row, generation)

    def expect(self, request: Request) -> None:
        """Notes a request before it is posted: its first output may overtake submit's reply."""
        with self._lock:
            self._by_id[request.request_id] = request

    def forget(self, request: Request) -> None:
        """Takes back expect() of a request that was refused."""
        with self._lock:
            if self._by_id.get(request.request_id) is request:
                del self._by_id[request.request_id]

    def admit(self, admission: Admission, request: Request) -> None:
        """Notes the row that a request was given."""
        with self._lock:
            self._by_id.pop(request.request_id, None)
            if self._last_ended[admission.row] < admission.generation:
                self._run(admission.row, admission.generation, request)

    def resolve(self, batch: OutputBatch, i: int) -> Request:
        """Returns the request of row i of a batch."""
        if i in batch.ended:
            return batch.ended[i]
        row, generation = int(batch.row[i]), int(batch.generation[i])
        with self._lock:
            found = self._by_key.get((row, generation))
            if found is not None:
                return found
            request_id = self._id_of(batch, i, row, generation)
            found = self._by_id.get(request_id) or Request(request_id)
            if self._last_ended[row] < generation:
                self._run(row, generation, found)
            return found

    def resolve_all(self, batch: OutputBatch) -> list[Request]:
        """Returns the request of each row of a batch."""
        rows, generations = batch.row.tobytes(), batch.generation.tobytes()
        with self._lock:
            last = self._resolved.get(batch.decoder)
            if last is not None and last[:2] == (rows, generations):
                return list(last[2])
            keys = zip(batch.row.tolist(), batch.generation.tolist(), strict=True)
            found = [self._by_key.get(key) for key in keys]
            known = [request for request in found if request is not None]
            if len(known) == len(found):
                self._resolved[batch.decoder] = rows, generations, known
                return list(known)
        return [r if r is not None else self.resolve(batch, i) for i, r in enumerate(found)]

    def _id_of(self, batch: OutputBatch, i: int, row: int, generation: int) -> str:
        for f in range(batch.num_finals):
            if int(batch.finals[f]["index"]) == i:
                return batch.final_id(f)
        request_id = _native.request_id_of(self._core, row, generation)
        # Its final is in a later frame: the row has been given out again meanwhile.
        return request_id.decode() if request_id is not None else f"row {row}, life {generation}"

    def end(self, batch: OutputBatch) -> None:
        """Notes the finals of a batch, and keeps their requests with it: the table forgets them."""
        for f in range(batch.num_finals):
            i = int(batch.finals[f]["index"])
            row, generation = int(batch.row[i]), int(batch.generation[i])
            request = batch.ended[i] = self.resolve(batch, i)
            with self._lock:
                if self._last_ended[row] >= generation:
                    self.num_second_finals += 1
                self._last_ended[row] = max(self._last_ended[row], generation)
                self._by_key.pop((row, generation), None)
                self._resolved.clear()
                self._by_id.pop(request.request_id, None)
                if self._running_ids.get(request.request_id) == (row, generation):
                    del self._running_ids[request.request_id]

    def take_all(self) -> list[tuple[int, int, Request]]:
        """Returns, and forgets, every request without a final: (row, generation, request)."""
        with self._lock:
            rest = [(row, generation, r) for (row, generation), r in self._by_key.items()]
            for row, generation, _request in rest:
                self._last_ended[row] = max(self._last_ended[row], generation)
            self._by_key.clear()
            self._resolved.clear()
            self._running_ids.clear()
            return rest

    def has_ended(self, row: int, generation: int) -> bool:
        """Whether the final of that life has been read."""
        with self._lock:
            return self._last_ended[row] >= generation

    def place_of(self, request_id: str) -> tuple[int, int] | None:
        """Returns the (row, generation) of a running request."""
        with self._lock:
            return self._running_ids.get(request_id)

    def ids(self) -> list[str]:
        """Returns the ids of all requests without a final."""
        with self._lock:
            return [r.request_id for r in self._by_key.values()] + list(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._by_id or request_id in self._running_ids


class _InHand:
    """The frames of one decoder that are handed out. They go back in their order, whatever the
    order in which they are done with: the ring has one released cursor."""

    def __init__(self, client: _native.Client, decoder: int) -> None:
        self._client, self._decoder = client, decoder
        self._frames: deque[list[bool]] = deque()

    def add(self) -> Callable[[], None]:
        """Notes the next frame; returns what to call when it is done with."""
        is_done = [False]
        self._frames.append(is_done)

        def done() -> None:
            is_done[0] = True
            while self._frames and self._frames[0][0]:
                self._frames.popleft()
                self._client.release(self._decoder)

        return done


class Delivery:
    """Reads the output rings. One batch is in hand at a time; thread-safe."""

    def __init__(
        self,
        segment: Segment,
        client: _native.Client,
        requests: OpenRequests,
        is_over: Callable[[bool], bool],
        last_reason: Callable[[], FinishReason],
        maker: ObjectMaker,
        on_event: Callable[[RequestEvent], None] | None,
        handover: Handover,
    ) -> None:
        config = segment.config
        self._core = segment.core
        self._client = client
        self._requests = requests
        self._has_told_all = False
        self._is_over = is_over
        self._last_reason = last_reason
        self._maker = maker
        self._on_event = on_event
        self._handover = handover
        self._role = config.role
        self._memory = memoryview(segment.core_memory).toreadonly()
        self._id_bytes = config.max_request_id_bytes
        self._num_decoders = config.num_decoders
        self._lock = threading.Lock()
        self._in_hand = [_InHand(client, k) for k in range(config.num_decoders)]
        joins = config.enable_draft_logprob
        self._joins = [
            DraftJoin(
                take,
                config.draft_wait_s,
                client.count_unmatched_drafts,
                whole_steps=take == self._try_next_step,
            )
            for take in self._takers()
        ] * joins

    def _takers(self) -> tuple[Callable[[float], OutputBatch | None], ...]:
        return self._try_next, self._try_next_step

    def next(self, timeout_s: float | None) -> OutputBatch | None:
        """Returns the next frame; None when none came in time or all has been told."""
        return self._wait(timeout_s, 0)

    def next_step(self, timeout_s: float | None) -> OutputBatch | None:
        """Returns the next step of all decoders in row order. Its columns are copies."""
        return self._wait(timeout_s, 1)

    def _wait(self, timeout_s: float | None, way: int) -> OutputBatch | None:
        if self._has_told_all:
            return None
        take = self._joins[way].next if self._joins else self._takers()[way]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        has_waited = False
        with self._lock:
            while True:
                batch = take(0.0)
                self._handover.give_up_overdue()
                if batch is None:
                    left = _WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
                    # Before the look: what was committed by then is found.
                    is_over = self._is_over(has_waited or left == 0.0)
                    batch = take(0.0 if is_over else min(left, _WAIT_S))
                    has_waited = True
                    if batch is None and is_over:
                        batch = self._last_batch(way)
                    if batch is None and (is_over or left == 0.0):
                        return None
                if batch is not None:
                    self._note(batch)
                    return batch

    def _last_batch(self, way: int) -> OutputBatch | None:
        held = self._joins[way].flush() if self._joins else None
        return held or self._try_next(0.0) or self._missing_finals()

    def _note(self, batch: OutputBatch) -> None:
        if batch.num_finals:
            self._requests.end(batch)
        if batch.kind == "prompt":
            self._keep_prompt_logprobs(batch)
        if self._role == "prefill" and batch.num_finals:
            self._park_first_tokens(batch)
        if self._on_event is not None:
            for event in events_of(batch, self._maker, self._role):
                try:
                    self._on_event(event)
                except Exception:
                    # The caller's callback must not cost a token.
                    _log.exception("on_event(%s) of request %r", event.name, event.request_id)

    def _park_first_tokens(self, batch: OutputBatch) -> None:
        outputs = batch.objects()
        for final in batch.finals:
            i = int(final["index"])
            row, generation, request = int(batch.row[i]), int(batch.generation[i]), batch.ended[i]
            is_first_token = int(batch.finish_reason[i]) == FinishReason.STOP
            if request.disaggregate_info is not None and is_first_token:
                self._handover.park(row, generation, request, outputs[i])
            else:
                self._handover.forget(request.request_id, row, generation)

    def _keep_prompt_logprobs(self, batch: OutputBatch) -> None:
        offsets = batch.token_offsets.tolist()
        for i, request in enumerate(batch.requests):
            part = slice(offsets[i], offsets[i + 1])
            piece = LogprobsLists(
                batch.topk_ids[part].tolist(),
                batch.topk_logprobs[part].tolist(),
                batch.ranks[part].tolist(),
            )
            request.add_prompt_logprobs(int(batch.send_idx[i]), piece)

    def _try_next(self, wait_s: float) -> OutputBatch | None:
        found = self._client.poll(wait_s)
        if found is None:
            return None
        batch = self._batch(*found)
        batch._release = self._in_hand[batch.decoder].add()
        return batch

    def _batch(self, decoder: int, offset: int) -> OutputBatch:
        return OutputBatch(
            self._memory,
            offset,
            self._id_bytes,
            self._maker.make,
            self._requests.resolve,
            self._requests.resolve_all,
        )

    def _try_next_step(self, wait_s: float) -> OutputBatch | None:
        heads = self._heads()
        if not heads:
            self._client.wait_for_frame(wait_s)
            return None
        if all(b.has_slot for b in heads):
            if not self._client.wait_for_step(min(b.step for b in heads), wait_s):
                return None
            heads = self._heads()  # a decoder that was behind may have come with an older step
        alone = next((b for b in heads if not b.has_slot), None)
        if alone is not None:  # ends without a step must not wait for the next step
            return self._take([alone])
        step = min(b.step for b in heads)
        return self._take([b for b in heads if b.step == step])

    def _heads(self) -> list[OutputBatch]:
        """Returns the oldest unread frame of each decoder that has one."""
        heads = (self._client.head(k) for k in range(self._num_decoders))
        return [self._batch(*head) for head in heads if head is not None]

    def _take(self, parts: list[OutputBatch]) -> OutputBatch:
        whole = merged(parts)
        for part in parts:
            self._client.take(part.decoder)
        give_back = [self._in_hand[part.decoder].add() for part in parts]

        def release() -> None:
            for done in give_back:
                done()

        whole._release = release
        return whole

    def _missing_finals(self) -> OutputBatch | None:
        # Whatever a pipeline that came back would say has its final by now.
        self._has_told_all = True
        self._handover.give_up_all()
        rest = self._requests.take_all()
        if not rest:
            return None
        # Every committed frame has been read by now: what is committed is what was delivered.
        progress = [
            _native.progress_of(self._core, row, generation) or (request.num_emitted_tokens, 0, 0)
            for row, generation, request in rest
        ]
        return finals_without_step(rest, progress, self._last_reason(), self._maker.make)
