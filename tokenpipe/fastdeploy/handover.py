"""A prefill instance's first tokens: parked until the cache is sent, then handed to the decode
instance. In a thread of its own: neither a slow cache nor a slow connector holds up other rows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenpipe.fastdeploy.rows import Life
from tokenpipe.handover import FAILED, SENT

_log = logging.getLogger("tokenpipe.fastdeploy")

_POLL_S = 0.002
_TOO_LATE = "answer in time"


@dataclass
class _Parked:
    life: Life
    result: Any
    deadline: float


class CacheHandover:
    """Asks the cache sender while something is parked, and hands on what it has answered.

    `done` is called in this thread with (life, result, the sender's word) when a row may be given
    back. An answer that comes before its token is kept for `is_known` ids only (fault F13).
    """

    def __init__(
        self,
        engine_worker_queue: Any,
        split_connector: Any,
        timeout_s: float,
        is_known: Callable[[str], bool],
        done: Callable[[Life, Any, str], None],
    ) -> None:
        self._queue = engine_worker_queue
        self._connector = split_connector
        self._timeout_s = timeout_s
        self._is_known = is_known
        self._done = done
        self._changed = threading.Condition()
        self._parked: dict[str, _Parked] = {}
        self._answers: dict[str, str] = {}
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, name="tokenpipe-first-tokens", daemon=True
        )
        self._thread.start()

    def park(self, life: Life, result: Any) -> None:
        """Notes a first token that waits for its cache."""
        result.metrics.wait_for_sending_cache_time = time.time()
        with self._changed:
            deadline = time.monotonic() + self._timeout_s
            self._parked[life.task.request_id] = _Parked(life, result, deadline)
            self._changed.notify()

    def give_up(self) -> None:
        """Hands on, as failed, everything that is parked."""
        with self._changed:
            left = list(self._parked.values())
            self._parked.clear()
        for parked in left:
            self._hand_on(parked, "answer before the data were cleared")

    def stop(self) -> None:
        """Ends the thread; what is parked stays where it is."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._parked and not self._is_stopped:
                    self._changed.wait()
                if self._is_stopped:
                    return
            self._collect()
            for parked, answer in self._answered():
                self._hand_on(parked, answer)
            with self._changed:
                if self._parked and not self._is_stopped:
                    self._changed.wait(_POLL_S)

    def _collect(self) -> None:
        try:
            answers = [(str(id_), status) for id_, status in self._queue.get_finished_req()]
        except Exception:
            # The cache sender's process may be gone: each row's deadline speaks for it.
            _log.exception("the cache sender cannot be asked")
            answers = []
        with self._changed:
            self._answers.update(answers)

    def _answered(self) -> list[tuple[_Parked, str]]:
        now = time.monotonic()
        with self._changed:
            found = []
            for request_id, parked in list(self._parked.items()):
                answer = self._answers.pop(request_id, None)
                if answer is None and now >= parked.deadline:
                    answer = _TOO_LATE
                if answer is not None:
                    del self._parked[request_id]
                    found.append((parked, answer))
            for request_id in [r for r in self._answers if not self._is_known(r)]:
                del self._answers[request_id]
            return found

    def _hand_on(self, parked: _Parked, answer: str) -> None:
        life, result = parked.life, parked.result
        if answer != SENT:
            result.error_code = FAILED
            result.error_msg = f"{life.task.request_id} failed to {answer}"
            _log.error("the first token of %s", result.error_msg)
        result.metrics.send_request_output_to_decode_time = time.time()
        try:
            self._connector.send_first_token(life.task.disaggregate_info, [result])
        except Exception:
            # The row must come back all the same (fault F13b).
            _log.exception("the first token of %r was not handed on", life.task.request_id)
        self._done(life, result, answer)
