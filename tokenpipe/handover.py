"""A prefill instance's first tokens: parked until the cache sender has answered, then handed on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenpipe.records import AnyOutput, RequestOutput
from tokenpipe.requests import Request

_log = logging.getLogger("tokenpipe.handover")

SENT = "finished"
"""The cache sender's word for success; any other is shown in the error."""
FAILED = 501

FirstTokenSink = Callable[[Mapping[str, Any], list[RequestOutput]], None]


@dataclass
class _Parked:
    request: Request
    output: RequestOutput
    deadline: float


class Handover:
    """Joins each first token with the cache sender's answer, whichever comes first.

    The two meet per request: a row whose answer is late holds up no other (fault F12). `sink` gets
    (disaggregate_info, [output]); when it raises, that is logged and the row is free all the same
    (F13b). An answer is kept no longer than its request (F13).
    """

    def __init__(self, sink: FirstTokenSink | None, timeout_s: float) -> None:
        self._sink = sink
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}
        self._parked: dict[tuple[int, int], _Parked] = {}
        self._answers: dict[tuple[int, int], str] = {}

    def expect(self, request_id: str, row: int, generation: int) -> None:
        """Notes a request that will have a first token to hand on."""
        with self._lock:
            self._places[request_id] = (row, generation)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of that id holds its row until it is answered."""
        with self._lock:
            return request_id in self._places

    def is_parked(self, row: int, generation: int) -> bool:
        """Whether the first token of that life waits for its answer."""
        with self._lock:
            return (row, generation) in self._parked

    def take_place(self, request_id: str) -> tuple[int, int] | None:
        """Returns, once, the (row, generation) of a request that is still to be answered."""
        with self._lock:
            return self._places.pop(request_id, None)

    def park(self, row: int, generation: int, request: Request, output: AnyOutput) -> None:
        """Notes a first token that has come out."""
        if not isinstance(output, RequestOutput):
            return
        with self._lock:
            answer = self._answers.pop((row, generation), None)
            if answer is None:
                deadline = time.monotonic() + self._timeout_s
                self._parked[row, generation] = _Parked(request, output, deadline)
                return
        self._hand_on(request, output, answer)

    def answer(self, row: int, generation: int, status: str) -> None:
        """Notes what the cache sender said of a row."""
        with self._lock:
            parked = self._parked.pop((row, generation), None)
            if parked is None:
                self._answers[row, generation] = status
                return
        self._hand_on(parked.request, parked.output, status)

    def forget(self, request_id: str, row: int, generation: int) -> None:
        """Drops what is known of a request that ended without a first token."""
        with self._lock:
            if self._places.get(request_id) == (row, generation):
                del self._places[request_id]
            self._answers.pop((row, generation), None)

    def give_up_overdue(self) -> None:
        """Hands on, as failed, the first tokens whose answer has not come in time."""
        if not self._parked:
            return
        now = time.monotonic()
        with self._lock:
            overdue = [key for key, p in self._parked.items() if now >= p.deadline]
            late = [self._parked.pop(key) for key in overdue]
            for parked in late:
                self._places.pop(parked.request.request_id, None)
        for parked in late:
            self._hand_on(parked.request, parked.output, "answer in time")

    def give_up_all(self) -> None:
        """Hands on, as failed, every first token that is parked: nobody can answer any more."""
        with self._lock:
            left = list(self._parked.values())
            self._parked.clear()
            self._places.clear()
        for parked in left:
            self._hand_on(parked.request, parked.output, "answer before the pipeline ended")

    def _hand_on(self, request: Request, output: RequestOutput, answer: str) -> None:
        if answer != SENT:
            output.error_code = FAILED
            output.error_msg = f"{request.request_id} failed to {answer}"
        if output.metrics is not None:
            output.metrics.send_request_output_to_decode_time = time.time()
        if self._sink is None:
            return
        try:
            self._sink(request.disaggregate_info or {}, [output])
        except Exception:
            # The caller's connector must not cost a row or another request's token.
            _log.exception("the first token of request %r was not handed on", request.request_id)
