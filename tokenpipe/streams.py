"""Streams: one asynchronous iterator per request, fed by a thread that reads the batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from tokenpipe.delivery import Delivery
from tokenpipe.errors import PipelineGoneError, StreamTakenError
from tokenpipe.records import AnyOutput

_WAIT_S = 0.2


class _Buffer:
    """Outputs of one request that its stream has not taken yet; as many as its tokens at most."""

    def __init__(self) -> None:
        self.outputs: deque[AnyOutput] = deque()
        self.reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.is_taken = False
        self.is_abandoned = False


class Streams:
    """Hands every output to its request's buffer. A slow stream fills its own buffer only."""

    def __init__(self, delivery: Delivery, is_over: Callable[[], bool], name: str) -> None:
        self._delivery = delivery
        self._is_over = is_over
        self._name = name
        self._lock = threading.Lock()
        self._buffers: dict[str, _Buffer] = {}
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="tokenpipe-streams", daemon=True)
        self._thread.start()

    def open(self, request_id: str) -> None:
        """Makes the buffer of a request before its first output can come."""
        with self._lock:
            self._buffers[request_id] = _Buffer()

    def discard(self, request_id: str) -> None:
        """Drops the buffer of a request that was refused."""
        with self._lock:
            self._buffers.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._buffers

    def _run(self) -> None:
        while not self._closing:
            batch = self._delivery.next(_WAIT_S)
            if batch is None:
                if self._is_over():
                    break
                continue
            outputs = batch.objects()
            batch.release()
            self._put(outputs)
        with self._lock:
            self._ended = True
            waiting = list(self._buffers.values())
        self._wake(waiting)

    def _put(self, outputs: Sequence[AnyOutput]) -> None:
        filled = []
        with self._lock:
            for output in outputs:
                buffer = self._buffers.get(output.request_id)
                if buffer is None:
                    buffer = self._buffers[output.request_id] = _Buffer()
                if buffer.is_abandoned:
                    if output.finished:
                        del self._buffers[output.request_id]
                    continue
                buffer.outputs.append(output)
                filled.append(buffer)
        self._wake(filled)

    @staticmethod
    def _wake(buffers: Sequence[_Buffer]) -> None:
        """Wakes the readers: each event loop once, whatever number of streams it has."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Buffer, asyncio.Event]]] = {}
        for buffer in buffers:
            reader = buffer.reader
            if reader is not None:
                by_loop.setdefault(reader[0], []).append((buffer, reader[1]))
        for loop, readers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set_all, [event for _, event in readers])
            except RuntimeError:
                for buffer, _ in readers:
                    buffer.is_abandoned = True  # the loop has ended: nobody can read it any more

    def take(self, request_id: str) -> _Buffer:
        """Returns the buffer of a request, once. Raises StreamTakenError."""
        with self._lock:
            buffer = self._buffers.get(request_id)
            if buffer is None or buffer.is_taken:  # None: the other has just read it to its end
                raise StreamTakenError(request_id)
            buffer.is_taken = True
            return buffer

    async def read(self, request_id: str, buffer: _Buffer) -> AsyncIterator[AnyOutput]:
        """Yields the outputs of one request up to its final; `buffer` is that of take()."""
        event = asyncio.Event()
        with self._lock:
            buffer.reader = (asyncio.get_running_loop(), event)
        is_finished = False
        try:
            while not is_finished:
                event.clear()
                while buffer.outputs:
                    output = buffer.outputs.popleft()
                    is_finished = output.finished
                    yield output
                if is_finished:
                    break
                if self._ended and not buffer.outputs:
                    raise PipelineGoneError(self._name, f"it ended before {request_id!r} did")
                await event.wait()
        finally:
            with self._lock:
                buffer.reader = None
                buffer.is_abandoned = not is_finished
                if is_finished and self._buffers.get(request_id) is buffer:
                    del self._buffers[request_id]

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        self._thread.join()


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()
