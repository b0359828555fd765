"""Rows and KV blocks: who gets them, and when they come back. Policy only: the stores are Book's.

One release function, keyed by (row, generation), serves every way in which a request ends; it is
level-triggered, so that calling it again does nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tokenpipe import _native
from tokenpipe.commands import ANY_ROW, CommandKind, Control, FinishReason, ReplyStatus
from tokenpipe.config import PipelineConfig

# Ends that the engine may not know of yet: it is still writing into the row's blocks until it says
# so.
_NEEDS_ACKNOWLEDGEMENT = (FinishReason.ABORT, FinishReason.ERROR)


@dataclass
class Live:
    """A row that is given out."""

    generation: int
    request_id: bytes
    blocks: list[int]
    terminal: FinishReason = FinishReason.NONE
    deadline: float | None = None
    """When a row whose end waits for the engine's acknowledgement is taken back without it."""


@dataclass
class Waiting:
    """A submit that has no row yet. Its command stays in its slot."""

    slot: int
    command: dict[str, Any]


@dataclass
class Totals:
    """What the coordinator has done since it started; for /status and /metrics."""

    admitted: int = 0
    refused: int = 0
    timed_out: int = 0
    released: int = 0
    reclaimed_by_timeout: int = 0
    finals: dict[str, int] = field(default_factory=dict)


class Resources:
    """Rows, generations and the block pool, with the submits that wait for them."""

    def __init__(self, core: _native.Core, book: _native.Book, config: PipelineConfig) -> None:
        self._core, self._book = core, book
        self._config = config
        self._live: dict[int, Live] = {}
        self._row_of: dict[bytes, int] = {}
        self._free_rows: deque[int] = deque()
        self._generation: list[int] = []
        self._free_blocks: deque[int] = deque()
        self._waiting: dict[int, Waiting] = {}
        self._seen_turn = [-1] * config.num_decoders
        self._pending: set[int] = set()
        self.high_water = 0
        self.totals = Totals()
        self.is_accepting = True
        self._rebuild()

    @property
    def num_live(self) -> int:
        """Rows given out and not yet back."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Rows whose request has had no final yet."""
        return sum(live.terminal is FinishReason.NONE for live in self._live.values())

    @property
    def num_waiting(self) -> int:
        """Submits without a row."""
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody owns."""
        return len(self._free_blocks)

    def _rebuild(self) -> None:
        """Derives every list from the segment, as a coordinator must that takes over."""
        owners = self._book.block_owners()
        for row, (admitted, freed, _end, request_id, _) in enumerate(_native.rows(self._core)):
            self._generation.append(admitted)
            if admitted == freed:
                self._free_rows.append(row)
                continue
            blocks = [b for b, owner in enumerate(owners) if owner == (row, admitted)]
            self._live[row] = Live(admitted, request_id, blocks)
            self._row_of[request_id] = row
        taken = {b for live in self._live.values() for b in live.blocks}
        self._free_blocks.extend(b for b in range(self._config.num_blocks) if b not in taken)
        for slot in self._book.posted():  # a command whose choice is logged comes before all others
            command = self._book.command(slot)
            if command["kind"] == CommandKind.SUBMIT and command["choice_generation"]:
                self._finish_choice(slot, command)

    def _finish_choice(self, slot: int, command: dict[str, Any]) -> None:
        row, generation = command["choice_row"], command["choice_generation"]
        if self._book.is_applied(slot):
            self._book.open_control(row, generation)
            self._book.reply(slot, ReplyStatus.OK, row, generation)
            return
        self._free_rows.remove(row)
        self._give(slot, command, row, generation)

    # -------------------------------------------------------------- commands

    def serve(self) -> None:
        """Does every posted command that can be done; a submit without a row waits its turn."""
        now = time.monotonic()
        for slot in self._book.posted():
            if slot in self._waiting:
                continue
            command = self._book.command(slot)
            kind = command["kind"]
            if kind == CommandKind.SUBMIT:
                self._begin_submit(slot, command)
            elif kind == CommandKind.ABORT:
                self._abort(slot, command)
            elif kind != CommandKind.DRAIN:  # the coordinator's own
                self._book.reply(slot, ReplyStatus.BAD_COMMAND)
        self._admit_waiting(now)

    def drain_commands(self) -> list[tuple[int, float]]:
        """Returns (slot, limit in seconds) of the drains that are asked for."""
        found = []
        for slot in self._book.posted():
            command = self._book.command(slot)
            if command["kind"] == CommandKind.DRAIN:
                found.append((slot, command["argument"] / 1e9))
        return found

    def answer_drain(self, slot: int) -> None:
        """Tells the caller of drain() that the drain has begun."""
        self._book.reply(slot, ReplyStatus.OK)

    def _begin_submit(self, slot: int, command: dict[str, Any]) -> None:
        if not self.is_accepting:
            self._refuse(slot, ReplyStatus.DRAINING)
        elif command["num_blocks"] > self._config.num_blocks:
            self._refuse(slot, ReplyStatus.TOO_MANY_BLOCKS)
        elif command["row"] != ANY_ROW and command["row"] >= self._config.max_num_seqs:
            self._refuse(slot, ReplyStatus.BAD_COMMAND)
        elif self._is_duplicate(command["id"]):
            self._refuse(slot, ReplyStatus.DUPLICATE)
        else:
            self._waiting[slot] = Waiting(slot, command)

    def _is_duplicate(self, request_id: bytes) -> bool:
        if request_id in self._row_of:
            self.sweep()  # its final may be out already: then the id is free
        return request_id in self._row_of or any(
            w.command["id"] == request_id for w in self._waiting.values()
        )

    def _refuse(self, slot: int, status: ReplyStatus) -> None:
        self.totals.refused += 1
        self._book.reply(slot, status)

    def _admit_waiting(self, now: float) -> None:
        """First come, first served: a submit for any row does not pass one that came before it."""
        is_blocked = False
        for slot, waiting in list(self._waiting.items()):
            command = waiting.command
            row = self._row_for(command, is_blocked)
            if row is not None:
                del self._waiting[slot]
                generation = self._generation[row] + 1
                self._book.log_choice(slot, row, generation)
                self._give(slot, command, row, generation)
            elif now >= command["deadline_ns"] / 1e9:
                del self._waiting[slot]
                self.totals.timed_out += 1
                is_any = command["row"] == ANY_ROW
                self._book.reply(slot, ReplyStatus.NO_FREE_ROW if is_any else ReplyStatus.ROW_BUSY)
            elif command["row"] == ANY_ROW:
                is_blocked = True

    def _row_for(self, command: dict[str, Any], is_blocked: bool) -> int | None:
        if command["num_blocks"] > len(self._free_blocks):
            return None
        wanted: int = command["row"]
        if wanted != ANY_ROW:
            if wanted in self._live:
                return None
            self._free_rows.remove(wanted)
            return wanted
        return self._free_rows.popleft() if self._free_rows and not is_blocked else None

    def _give(self, slot: int, command: dict[str, Any], row: int, generation: int) -> None:
        blocks = [self._free_blocks.popleft() for _ in range(command["num_blocks"])]
        self._book.admit(slot, row, generation, blocks)
        self._generation[row] = generation
        self._live[row] = Live(generation, command["id"], blocks)
        self._row_of[command["id"]] = row
        self.high_water = max(self.high_water, len(self._live))
        self.totals.admitted += 1
        self._book.reply(slot, ReplyStatus.OK, row, generation)

    def _abort(self, slot: int, command: dict[str, Any]) -> None:
        request_id = command["id"]
        for waiting_slot, waiting in list(self._waiting.items()):
            if waiting.command["id"] == request_id:
                del self._waiting[waiting_slot]
                self._book.reply(waiting_slot, ReplyStatus.ABORTED)
                self._book.reply(slot, ReplyStatus.OK)
                return
        row = self._row_of.get(request_id)
        if row is None:
            self._book.reply(slot, ReplyStatus.UNKNOWN)
            return
        self.end(row, FinishReason.ABORT)
        self._book.reply(slot, ReplyStatus.OK, row, self._live[row].generation)

    def end(self, row: int, reason: FinishReason) -> None:
        """Marks a row for its decoder to end, and tells the engine's scheduler."""
        live = self._live[row]
        self._book.mark(row, live.generation, reason)
        self._book.control(row, live.generation, Control.ABORT)

    def end_all(self, reason: FinishReason) -> None:
        """Ends every running request and refuses every waiting one."""
        for slot in list(self._waiting):
            del self._waiting[slot]
            self._refuse(slot, ReplyStatus.DRAINING)
        for row, live in self._live.items():
            if live.terminal is FinishReason.NONE:
                self.end(row, reason)

    # -------------------------------------------------------------- what comes back

    def sweep(self) -> None:
        """Takes back the rows whose end the decoders have committed."""
        for k in range(self._config.num_decoders):
            if self._book.turn(k) == self._seen_turn[k]:
                continue
            turn, endings = self._book.endings(k)
            for row, generation, terminal, acknowledged, _count, _emitted in endings:
                self._take_back(row, generation, FinishReason(terminal), acknowledged == generation)
            self._seen_turn[k] = turn
            self._book.set_swept(k, turn)

    def _take_back(
        self, row: int, generation: int, terminal: FinishReason, is_acknowledged: bool
    ) -> None:
        live = self._live.get(row)
        if live is None or live.generation != generation or terminal is FinishReason.NONE:
            return
        if live.terminal is FinishReason.NONE:
            live.terminal = terminal
            name = terminal.name.lower()
            self.totals.finals[name] = self.totals.finals.get(name, 0) + 1
            self._row_of.pop(live.request_id, None)
            if terminal in _NEEDS_ACKNOWLEDGEMENT:
                live.deadline = time.monotonic() + self._config.abort_timeout_s
                self._pending.add(row)
                if terminal is FinishReason.ERROR:
                    self._book.control(row, generation, Control.ABORT)
        if live.deadline is None or is_acknowledged:
            self._release(row, generation)

    def reclaim(self) -> None:
        """Takes back the rows whose acknowledgement has not come in time."""
        now = time.monotonic()
        for row in list(self._pending):
            live = self._live[row]
            if live.deadline is not None and now >= live.deadline:
                self.totals.reclaimed_by_timeout += 1
                self._release(row, live.generation)

    def _release(self, row: int, generation: int) -> None:
        live = self._live.get(row)
        if live is None or live.generation != generation:
            return
        self._book.release(row, generation, live.blocks)
        del self._live[row]
        self._pending.discard(row)
        self._free_blocks.extend(live.blocks)
        self._free_rows.append(row)
        self.totals.released += 1

    def publish_gauges(self) -> None:
        """Stores what /status shows of rows, blocks and the queue."""
        self._book.set_gauges(
            len(self._live), len(self._free_blocks), len(self._waiting), self.high_water
        )
