"""The command channel: one command per slot, answered in the same slot, in any order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenpipe import _native
from tokenpipe.commands import CommandKind, ReplyStatus
from tokenpipe.errors import TimeLimitError

_WAIT_S = 0.2
_POSTED, _DONE = 1, 2
_RESERVED = 8
"""Slots that commands which wait (submit, resume, grow) leave to those that must get through."""
_WAITING = (CommandKind.SUBMIT, CommandKind.RESUME, CommandKind.GROW)
_FOR_EVER_S = 3600.0 * 24 * 365


def time_limit(name: str, value: float) -> float:
    """Returns a limit in seconds; infinity and what is longer than a year is a year.

    Raises TimeLimitError for what is no number. Below 0 is 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise TimeLimitError(name, value)
    return max(0.0, min(value, _FOR_EVER_S))


@dataclass(frozen=True)
class Reply:
    """The coordinator's answer."""

    status: ReplyStatus
    row: int
    generation: int
    value: int
    block_ids: tuple[int, ...]


class CommandChannel:
    """Posts commands and waits for their replies; any number of threads may call at once.

    The queue of those that wait is bounded by the slots: beyond it a call waits here, in its own
    time, and is answered as if no row had come free.
    """

    def __init__(self, client: _native.Client, num_slots: int, raise_if_gone: Callable[[], None]):
        self._client = client
        self._raise_if_gone = raise_if_gone
        self._changed = threading.Condition()
        # What a dead client has left posted is still being done: such a slot is free when it is
        # done.
        self._free: list[int] = []
        self._left: set[int] = set(range(num_slots))
        self._collect()

    def call(
        self,
        kind: CommandKind,
        timeout_s: float | None = None,
        while_waiting: Callable[[], None] | None = None,
        **fields: Any,
    ) -> Reply:
        """Posts a command and returns its reply. Blocks until then, or until the pipeline is gone
        (then PipelineGoneError); `timeout_s` bounds only the coordinator's own wait (submit).
        `while_waiting` is called every 0.2 s."""
        limit_s = _FOR_EVER_S if timeout_s is None else time_limit("timeout_s", timeout_s)
        self._raise_if_gone()  # before anything is posted: a fork's copy writes into our slots
        deadline_s = time.monotonic() + limit_s
        slot = self._take(_RESERVED if kind in _WAITING else 0, deadline_s)
        if slot is None:
            return Reply(ReplyStatus.NO_FREE_ROW, 0, 0, 0, ())
        try:
            self._client.post(slot, kind, deadline_s=deadline_s, **fields)
            while not self._client.wait_for_reply(slot, _WAIT_S):
                self._raise_if_gone()
                if while_waiting is not None:
                    while_waiting()
            status, row, generation, value, blocks = self._client.reply(slot)
        except BaseException:
            # The command may be done later: its slot must not be filled again before that.
            with self._changed:
                self._left.add(slot)
            raise
        self._client.free(slot)
        with self._changed:
            self._free.append(slot)
            self._changed.notify()
        return Reply(ReplyStatus(status), row, generation, value, tuple(blocks))

    def _take(self, reserved: int, deadline_s: float) -> int | None:
        with self._changed:
            while len(self._free) <= reserved:
                self._collect()
                if len(self._free) <= reserved:
                    self._raise_if_gone()
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        return None
                    self._changed.wait(min(_WAIT_S, left_s))
            return self._free.pop()

    def _collect(self) -> None:
        for slot in list(self._left):
            state = self._client.command_state(slot)
            if state == _POSTED:
                continue
            if state == _DONE:
                self._client.free(slot)
            self._left.remove(slot)
            self._free.append(slot)
