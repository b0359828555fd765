"""Frames in: the next batch of any decoder, whole steps, and exactly one final per request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tokenpipe import _native
from tokenpipe.commands import FinishReason
from tokenpipe.outputs import OutputBatch, finals_without_step, merged
from tokenpipe.requests import Admission, Request
from tokenpipe.segment import Segment

_WAIT_S = 0.1


class OpenRequests:
    """Which request runs as which (row, generation), from before its submit to its final."""

    def __init__(self, core: _native.Core, num_rows: int) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._by_key: dict[tuple[int, int], Request] = {}
        self._by_id: dict[str, Request] = {}
        self._last_ended = [0] * num_rows
        self.num_second_finals = 0
        for row, (admitted, freed, terminal, request_id, _blocks) in enumerate(_native.rows(core)):
            if admitted != freed and not terminal:  # of a former client of this pipeline
                self._by_key[row, admitted] = Request(request_id.decode())

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
                self._by_key[admission.row, admission.generation] = request

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
                self._by_key[row, generation] = found
            return found

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
                self._by_id.pop(request.request_id, None)

    def take_all(self) -> list[tuple[int, int, Request]]:
        """Returns, and forgets, every request without a final: (row, generation, request)."""
        with self._lock:
            rest = [(row, generation, r) for (row, generation), r in self._by_key.items()]
            for row, generation, _request in rest:
                self._last_ended[row] = max(self._last_ended[row], generation)
            self._by_key.clear()
            return rest

    def ids(self) -> list[str]:
        """Returns the ids of all requests without a final."""
        with self._lock:
            return [r.request_id for r in self._by_key.values()] + list(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.ids()


class Delivery:
    """Reads the output rings. One batch is in hand at a time; thread-safe."""

    def __init__(
        self,
        segment: Segment,
        client: _native.Client,
        requests: OpenRequests,
        is_over: Callable[[], bool],
        last_reason: Callable[[], FinishReason],
    ) -> None:
        self._client = client
        self._requests = requests
        self._is_over = is_over
        self._last_reason = last_reason
        self._memory = memoryview(segment.core_memory).toreadonly()
        self._id_bytes = segment.config.max_request_id_bytes
        self._num_decoders = segment.config.num_decoders
        self._lock = threading.Lock()

    def next(self, timeout_s: float | None) -> OutputBatch | None:
        """Returns the next frame; None when none came in time or the pipeline has told
        everything."""
        return self._wait(timeout_s, self._try_next)

    def next_step(self, timeout_s: float | None) -> OutputBatch | None:
        """Returns the next step of all decoders in row order. Its columns are copies."""
        return self._wait(timeout_s, self._try_next_step)

    def _wait(
        self, timeout_s: float | None, attempt: Callable[[float], OutputBatch | None]
    ) -> OutputBatch | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while True:
                left = _WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
                is_over = self._is_over()  # before the look: what was committed by then is found
                batch = attempt(0.0 if is_over else min(left, _WAIT_S))
                if batch is None and is_over:
                    batch = self._try_next(0.0) or self._missing_finals()
                if batch is not None:
                    if batch.num_finals:
                        self._requests.end(batch)
                    return batch
                if is_over or (deadline is not None and time.monotonic() >= deadline):
                    return None

    def _try_next(self, wait_s: float) -> OutputBatch | None:
        found = self._client.poll(wait_s)
        return None if found is None else self._batch(*found)

    def _batch(self, decoder: int, offset: int) -> OutputBatch:
        return OutputBatch(
            self._memory,
            offset,
            self._id_bytes,
            self._requests.resolve,
            lambda: self._client.release(decoder),
        )

    def _try_next_step(self, wait_s: float) -> OutputBatch | None:
        heads = [h for k in range(self._num_decoders) if (h := self._client.head(k)) is not None]
        if not heads:
            self._client.wait_for_frame(wait_s)
            return None
        batches = [self._batch(*head) for head in heads]
        alone = next((b for b in batches if not b.has_slot), None)
        if alone is not None:  # ends without a step must not wait for the next step
            return self._take([alone])
        step = min(b.step for b in batches)
        if not self._client.wait_for_step(step, wait_s):
            return None
        heads = [h for k in range(self._num_decoders) if (h := self._client.head(k)) is not None]
        batches = [self._batch(*head) for head in heads]
        return self._take([b for b in batches if b.step == step])

    def _take(self, parts: list[OutputBatch]) -> OutputBatch:
        whole = merged(parts)
        decoders = [p.decoder for p in parts]
        for decoder in decoders:
            self._client.take(decoder)

        def release() -> None:
            for decoder in decoders:
                self._client.release(decoder)

        whole._release = release
        return whole

    def _missing_finals(self) -> OutputBatch | None:
        rest = self._requests.take_all()
        return finals_without_step(rest, self._last_reason()) if rest else None
