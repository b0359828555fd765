"""Rows and KV blocks: who gets them, and when they come back. Policy only: the stores are Book's.

One release function, keyed by (row, generation), serves every way in which a request ends; it is
level-triggered, so that calling it again does nothing. What an end waits for:

    stop, length, recovery, shutdown    nothing: the row and its blocks come back at once
    abort, error                        the engine's acknowledgement (state 3), or
    `abort_timeout_s`;
                                        nothing when the row is preempted, let_go() was called, or
                                        the engine is dead: it has let go of it
    stop of a prefill instance          prefill_done(), or `prefill_timeout_s`
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenpipe import _native
from tokenpipe.commands import (
    ANY_ROW,
    NO_BLOCK,
    AdmissionFlag,
    CommandKind,
    Control,
    FinishReason,
    Phase,
    ReplyStatus,
)
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import QueueError

_log = logging.getLogger("tokenpipe.resources")

_NEEDS_ACKNOWLEDGEMENT = (FinishReason.ABORT, FinishReason.ERROR)
_WARN_EVERY_S = 30.0


@dataclass
class Live:
    """A row that is given out."""

    generation: int
    request_id: bytes
    blocks: list[int]
    flags: int
    phase: Phase = Phase.RUNNING
    terminal: FinishReason = FinishReason.NONE
    acknowledged: int = 0
    """Acknowledgements of this life that a decoder has committed."""
    acknowledged_before: int = 0
    """Those that were there when the engine was told to let go: only a later one counts."""
    deadline: float | None = None
    """When what is waited for is not waited for any longer."""
    is_told: bool = False
    """The engine was told to let it go."""
    is_ending: bool = False
    """Its end was asked for here: a mark stands."""
    is_handed_over: bool = False
    """prefill_done() was called."""
    idle_at: int = 0
    """Source sequence + 1 of the last step that showed the ended row empty."""
    quarantined_from: int | None = None
    """Its deadline has passed; a step from here on that shows it empty frees it."""
    barrier: int = 0
    """Its quarantine is over once the queue has passed this, and what was sent behind it."""
    passed_at: int | None = None
    """Steps received when that barrier was seen to have passed."""
    rests: int = 0
    """How often in turn the queue was at rest since then."""


@dataclass
class Waiting:
    """A command that cannot be done yet; it stays in its slot."""

    command: dict[str, Any]
    row: int = ANY_ROW
    generation: int = 0
    barrier: int = 0
    """Of a sync: which barrier its queue must have passed."""

    @property
    def is_overdue(self) -> bool:
        """Whether its caller waits no longer."""
        return bool(time.monotonic() >= self.command["deadline_ns"] / 1e9)


def _is_text(request_id: bytes) -> bool:
    """Whether the outputs can name a request so: not empty, and UTF-8."""
    try:
        return bool(request_id.decode())
    except UnicodeDecodeError:
        return False


@dataclass
class Totals:
    """What the coordinator has done since it started."""

    admitted: int = 0
    refused: int = 0
    timed_out: int = 0
    released: int = 0
    reclaimed_by_timeout: int = 0
    finals: dict[str, int] = field(default_factory=dict)


class Resources:
    """Rows, generations and the block pool, with the commands that wait for them."""

    def __init__(
        self,
        core: _native.Core,
        source: _native.Source,
        book: _native.Book,
        config: PipelineConfig,
    ) -> None:
        self._core, self._source, self._book = core, source, book
        self._config = config
        self._live: dict[int, Live] = {}
        self._row_of: dict[bytes, int] = {}
        self._free_rows: deque[int] = deque()
        self._generation: list[int] = []
        self._free_blocks: deque[int] = deque()
        self._submits: dict[int, Waiting] = {}
        self._growths: dict[int, Waiting] = {}
        self._resumes: dict[int, Waiting] = {}
        self._drains: dict[int, float] = {}
        self._syncs: dict[int, Waiting] = {}
        self._seen_turn = [-1] * config.num_decoders
        self._timed: set[int] = set()
        self._warned = 0.0
        self.high_water = 0
        self.totals = Totals()
        self.is_accepting = True
        # A queue tells neither lives of a row apart nor where a step is: barriers do.
        self._is_queue = config.source == "sysv"
        self._is_unstamped = not config.has_writer
        self._do = {
            CommandKind.SUBMIT: self._submit,
            CommandKind.ABORT: self._abort,
            CommandKind.PREEMPT: self._preempt,
            CommandKind.RESUME: self._resume,
            CommandKind.GROW: self._grow,
            CommandKind.PREFILL_DONE: self._prefill_done,
            CommandKind.CLEAR: self._clear,
            CommandKind.DRAIN: self._drain,
            CommandKind.SYNC: self._sync,
            CommandKind.LET_GO: self._let_go,
        }
        self._waiting: tuple[Mapping[int, object], ...] = (
            *(self._submits, self._growths, self._resumes, self._drains, self._syncs),
        )
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
        return len(self._submits)

    @property
    def num_free_rows(self) -> int:
        """Rows nobody has."""
        return len(self._free_rows)

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody owns."""
        return len(self._free_blocks)

    @property
    def is_timed(self) -> bool:
        """Whether anything waits that has a time limit."""
        return bool(self._timed or self._submits or self._growths or self._resumes)

    def _rebuild(self) -> None:
        """Derives every list from the segment, as a coordinator must that takes over."""
        for row, known in enumerate(_native.rows(self._core)):
            admitted, freed, end, request_id, flags, phase, before, told, ending, handed = known
            self._generation.append(admitted)
            if admitted == freed:
                self._free_rows.append(row)
                continue
            blocks = self._book.blocks_of(row)
            live = Live(admitted, request_id, blocks, flags, Phase(phase))
            live.acknowledged_before, live.is_handed_over = before, handed
            live.is_told, live.is_ending = told, ending
            if live.phase is Phase.PREEMPTING:
                self._book.repeat_preempt(row, admitted, self._config.role == "decode")
                self._time(row, live, self._config.abort_timeout_s)
            self._live[row] = live
            if not end:  # an id is free again once its final is out
                self._row_of[request_id] = row
        self._rebuild_blocks()
        # A command whose choice is logged comes before all others.
        for _, slot in self._book.posted():
            command = self._book.command(slot)
            if not command["fits"]:
                continue
            if command["choice_generation"] and command["kind"] == CommandKind.SUBMIT:
                self._finish_submit(slot, command)
            elif command["choice_generation"] and command["kind"] == CommandKind.GROW:
                self._finish_growth(slot, command)

    def _rebuild_blocks(self) -> None:
        """A block is owned when it is in the chain of the admission that it names."""
        owned = {block for live in self._live.values() for block in live.blocks}
        for block, (_row, generation) in enumerate(self._book.block_owners()):
            if block in owned:
                continue
            if generation:
                self._book.disown(block)
            self._free_blocks.append(block)

    def _finish_submit(self, slot: int, command: dict[str, Any]) -> None:
        row, generation = command["choice_row"], command["choice_generation"]
        if self._book.is_applied(slot):
            self._book.open_control(row, generation)
            self._reply_with_blocks(slot, row, generation, self._book.blocks_of(row))
            return
        # The slot is the client's memory: a choice that we cannot have logged is none of ours.
        is_ours = row in self._free_rows and generation == self._generation[row] + 1
        if is_ours and command["num_blocks"] <= len(self._free_blocks):
            self._free_rows.remove(row)
            self._give(slot, command, row, generation)

    def _finish_growth(self, slot: int, command: dict[str, Any]) -> None:
        """A growth logs how many blocks there were, plus one, in the generation's place."""
        row, before = command["choice_row"], command["choice_generation"] - 1
        live = self._live.get(row)
        if live is not None and live.request_id == command["id"]:
            new = live.blocks[before : before + command["num_blocks"]]
            if len(new) == command["num_blocks"]:
                self._reply_with_blocks(slot, row, live.generation, new)

    # -------------------------------------------------------------- commands

    def serve(self) -> None:
        """Does every posted command that can be done; the others wait, each for itself."""
        posted = self._book.posted()
        self._forget_withdrawn({slot: number for number, slot in posted})
        for _, slot in posted:
            if any(slot in waiting for waiting in self._waiting):
                continue
            command = self._book.command(slot)
            do = self._do.get(command["kind"])
            if do is None or not command["fits"]:
                self._refuse(slot, ReplyStatus.BAD_COMMAND)
            else:
                do(slot, command)
        self._resume_waiting()
        self._grow_waiting()
        self._admit_waiting()
        self._sync_waiting()

    def _forget_withdrawn(self, numbers: dict[int, int]) -> None:
        """A command that waits is done for its own caller only: not when its slot was taken back or
        holds another one by now."""
        for waiting in (self._submits, self._growths, self._resumes, self._syncs):
            for slot, one in list(waiting.items()):
                if numbers.get(slot) == one.command["number"]:
                    continue
                del waiting[slot]

    def _submit(self, slot: int, command: dict[str, Any]) -> None:
        if not self.is_accepting:
            self._refuse(slot, ReplyStatus.DRAINING)
        elif not _is_text(command["id"]):
            self._refuse(slot, ReplyStatus.BAD_COMMAND)
        elif command["num_blocks"] > self._config.num_blocks:
            self._refuse(slot, ReplyStatus.TOO_MANY_BLOCKS)
        elif command["row"] != ANY_ROW and command["row"] >= self._config.max_num_seqs:
            self._refuse(slot, ReplyStatus.BAD_COMMAND)
        elif self._is_duplicate(command["id"]):
            self._refuse(slot, ReplyStatus.DUPLICATE)
        else:
            self._submits[slot] = Waiting(command)

    def _is_duplicate(self, request_id: bytes) -> bool:
        if request_id in self._row_of:
            self.sweep()  # its final may be out already: then the id is free
        return request_id in self._row_of or any(
            w.command["id"] == request_id for w in self._submits.values()
        )

    def _refuse(self, slot: int, status: ReplyStatus) -> None:
        self.totals.refused += 1
        self._book.reply(slot, status)

    def _admit_waiting(self) -> None:
        """First come, first served: a submit for any row does not pass one that came before it."""
        is_blocked = bool(self._growths)  # a running request goes before a new one
        for slot, waiting in list(self._submits.items()):
            command = waiting.command
            row = self._row_for(command, is_blocked)
            # On a queue what is received before this barrier is not the newcomer's.
            barrier = self._book.send_barrier() if row is not None and self._is_queue else 0
            if row is not None and self._is_queue and not barrier:
                self._free_rows.appendleft(row)  # the queue takes none now: at the next tick
                row, is_blocked = None, True
            if row is not None:
                del self._submits[slot]
                generation = self._generation[row] + 1
                self._book.log_choice(slot, row, generation, barrier)
                self._give(slot, command, row, generation)
            elif waiting.is_overdue:
                del self._submits[slot]
                self.totals.timed_out += 1
                is_any = command["row"] == ANY_ROW
                self._book.reply(slot, ReplyStatus.NO_FREE_ROW if is_any else ReplyStatus.ROW_BUSY)
            elif command["row"] == ANY_ROW:
                is_blocked = True

    def _row_for(self, command: dict[str, Any], is_blocked: bool) -> int | None:
        count = command["num_blocks"]
        if count > len(self._free_blocks) or (count and self._growths):
            return None
        wanted: int = command["row"]
        if wanted != ANY_ROW:
            if wanted in self._live:
                return None
            self._free_rows.remove(wanted)
            return wanted
        return self._free_rows.popleft() if self._free_rows and not is_blocked else None

    def _give(self, slot: int, command: dict[str, Any], row: int, generation: int) -> None:
        blocks = self._take_blocks(command["num_blocks"])
        self._book.admit(slot, row, generation, blocks)
        self._generation[row] = generation
        self._live[row] = Live(generation, command["id"], blocks, command["flags"])
        self._row_of[command["id"]] = row
        self.high_water = max(self.high_water, len(self._live))
        self.totals.admitted += 1
        self._reply_with_blocks(slot, row, generation, blocks)

    def _take_blocks(self, count: int) -> list[int]:
        return [self._free_blocks.popleft() for _ in range(count)]

    def _reply_with_blocks(self, slot: int, row: int, generation: int, blocks: list[int]) -> None:
        first = blocks[0] if blocks else NO_BLOCK
        self._book.reply(slot, ReplyStatus.OK, row, generation, first_block=first)

    def _find(self, slot: int, command: dict[str, Any]) -> int | None:
        """The row of a running request; answers the command when there is none."""
        row = self._row_of.get(command["id"])
        if row is not None:
            self.sweep()  # what has ended by now is not running
            row = self._row_of.get(command["id"])
        if row is None:
            self._book.reply(slot, ReplyStatus.UNKNOWN)
        return row

    def _abort(self, slot: int, command: dict[str, Any]) -> None:
        for waiting_slot, waiting in list(self._submits.items()):
            if waiting.command["id"] == command["id"]:
                del self._submits[waiting_slot]
                self._book.reply(waiting_slot, ReplyStatus.ABORTED)
                self._book.reply(slot, ReplyStatus.OK)
                return
        row = self._find(slot, command)
        if row is not None:
            self.end(row, FinishReason.ABORT)
            self._book.reply(slot, ReplyStatus.OK, row, self._live[row].generation)

    def _let_go(self, slot: int, command: dict[str, Any]) -> None:
        """The client's scheduler knows that the engine runs this life of the row no more."""
        self.sweep()  # whether it has ended decides what there is to do
        row, generation = command["row"], command["generation"]
        live = self._live.get(row)
        if live is None or live.generation != generation:
            self._book.reply(slot, ReplyStatus.UNKNOWN)
            return
        live.phase = Phase.PREEMPTED
        self._book.set_preempted(row)
        if live.terminal is FinishReason.NONE:
            self.end(row, FinishReason.ABORT)
        elif live.terminal in _NEEDS_ACKNOWLEDGEMENT:
            self._release(row, generation)
        self._book.reply(slot, ReplyStatus.OK, row, generation)

    def end(self, row: int, reason: FinishReason) -> None:
        """Marks a row for its decoder to end, and tells the engine's scheduler."""
        live = self._live[row]
        # While it is being preempted one acknowledgement does both; and an end that is asked for
        # again must not pass over the answer to the first asking.
        if live.phase is Phase.RUNNING and not live.is_told:
            live.acknowledged_before = live.acknowledged
            self._book.note_acknowledged(row, live.acknowledged)
        live.is_told = live.is_ending = True
        self._book.mark(row, live.generation, reason)
        self._book.control(row, live.generation, Control.ABORT)

    def end_all(self, reason: FinishReason) -> None:
        """Ends every running request and refuses every command that waits."""
        for waiting in (self._submits, self._growths, self._resumes):
            for slot in list(waiting):
                del waiting[slot]
                self._refuse(slot, ReplyStatus.DRAINING)
        self.end_running(reason)

    def end_running(self, reason: FinishReason) -> None:
        """Ends every running request."""
        for row, live in self._live.items():
            if live.terminal is FinishReason.NONE:
                self.end(row, reason)

    def end_all_of_a_dead_engine(self) -> None:
        """Ends every running request. By its death the engine has let go of every row, so that no
        end waits for its word; that stands in the segment, for who takes over from us here."""
        for row, live in list(self._live.items()):
            if live.phase is not Phase.PREEMPTED:
                live.phase = Phase.PREEMPTED
                self._book.set_preempted(row)
            if live.terminal is FinishReason.NONE:
                self.end(row, FinishReason.ERROR)
            elif self._is_done(live, has_let_go=True):
                self._release(row, live.generation)

    def _clear(self, slot: int, _command: dict[str, Any]) -> None:
        for waiting_slot in list(self._submits):
            del self._submits[waiting_slot]
            self._refuse(waiting_slot, ReplyStatus.ABORTED)
        self.end_running(FinishReason.ERROR)
        self._book.reply(slot, ReplyStatus.OK)

    def _preempt(self, slot: int, command: dict[str, Any]) -> None:
        row = self._find(slot, command)
        if row is None:
            return
        live = self._live[row]
        if live.phase is Phase.RUNNING and not live.is_ending:
            live.phase = Phase.PREEMPTING
            live.acknowledged_before = live.acknowledged
            shield = self._config.role == "decode"
            self._book.preempt(row, live.generation, live.acknowledged, shield)
            self._time(row, live, self._config.abort_timeout_s)
        self._book.reply(slot, ReplyStatus.OK, row, live.generation)

    def _resume(self, slot: int, command: dict[str, Any]) -> None:
        row = self._find(slot, command)
        if row is not None:
            self._resumes[slot] = Waiting(command, row, self._live[row].generation)

    def _resume_waiting(self) -> None:
        for slot, waiting in list(self._resumes.items()):
            live = self._live.get(waiting.row)
            is_gone = live is None or live.generation != waiting.generation
            if live is None or is_gone or live.is_ending or live.terminal is not FinishReason.NONE:
                status = ReplyStatus.UNKNOWN
            elif live.phase is not Phase.PREEMPTING:
                live.phase = Phase.RUNNING
                live.acknowledged_before = live.acknowledged
                live.is_told = False
                self._book.resume(waiting.row, live.generation, live.acknowledged)
                status = ReplyStatus.OK
            elif waiting.is_overdue:
                status = ReplyStatus.NOT_ACKNOWLEDGED
            else:
                continue
            del self._resumes[slot]
            self._book.reply(slot, status, waiting.row, waiting.generation)

    def _grow(self, slot: int, command: dict[str, Any]) -> None:
        row = self._find(slot, command)
        if row is None:
            return
        live = self._live[row]
        if len(live.blocks) + command["num_blocks"] > self._config.num_blocks:
            self._refuse(slot, ReplyStatus.TOO_MANY_BLOCKS)
        else:
            self._growths[slot] = Waiting(command, row, live.generation)

    def _grow_waiting(self) -> None:
        for slot, waiting in list(self._growths.items()):
            live = self._live.get(waiting.row)
            count = waiting.command["num_blocks"]
            is_gone = live is None or live.generation != waiting.generation
            if live is None or is_gone or live.terminal is not FinishReason.NONE:
                self._book.reply(slot, ReplyStatus.UNKNOWN)
            elif count <= len(self._free_blocks):
                blocks = self._take_blocks(count)
                last = live.blocks[-1] if live.blocks else NO_BLOCK
                self._book.log_choice(slot, waiting.row, len(live.blocks) + 1)
                self._book.grow(waiting.row, live.generation, blocks, last)
                live.blocks += blocks
                self._reply_with_blocks(slot, waiting.row, live.generation, blocks)
            elif waiting.is_overdue:
                self._book.reply(slot, ReplyStatus.NO_FREE_BLOCKS)
            else:
                continue
            del self._growths[slot]

    def _prefill_done(self, slot: int, command: dict[str, Any]) -> None:
        row, generation = command["row"], command["generation"]
        live = self._live.get(row)
        if live is None or live.generation != generation:
            self._book.reply(slot, ReplyStatus.UNKNOWN)
            return
        live.is_handed_over = True
        self._book.set_handed_over(row)
        if live.terminal is FinishReason.STOP and self._is_prefill(live):
            self._release(row, generation)
        self._book.reply(slot, ReplyStatus.OK, row, generation)

    def _drain(self, slot: int, command: dict[str, Any]) -> None:
        self._drains[slot] = command["argument"] / 1e9

    def take_drains(self) -> list[float]:
        """Returns the limits in seconds of the drains that are asked for, and answers them."""
        limits = list(self._drains.values())
        for slot in self._drains:
            self._book.reply(slot, ReplyStatus.OK)
        self._drains.clear()
        return limits

    def _sync(self, slot: int, command: dict[str, Any]) -> None:
        self._syncs[slot] = Waiting(command)

    def _sync_waiting(self) -> None:
        """Answers with the source sequence that what was saved before the call is below."""
        for slot, waiting in list(self._syncs.items()):
            if not self._is_queue:
                cursor = _native.published(self._source)
            else:
                waiting.barrier = waiting.barrier or self._book.send_barrier()
                if not waiting.barrier or not self._book.has_passed(waiting.barrier):
                    if waiting.is_overdue:
                        del self._syncs[slot]
                        self._book.reply(slot, ReplyStatus.NOT_ACKNOWLEDGED)
                    continue
                cursor = self._book.barrier_cursor()
            del self._syncs[slot]
            self._book.reply(slot, ReplyStatus.OK, value=cursor)

    # -------------------------------------------------------------- what comes back

    def sweep(self) -> None:
        """Takes back the rows whose end the decoders have committed."""
        for k in range(self._config.num_decoders):
            if self._book.turn(k) == self._seen_turn[k]:
                continue
            turn, endings = self._book.endings(k)
            for row, generation, terminal, _acknowledged, count, idle_at in endings:
                live = self._live.get(row)
                if live is not None and live.generation == generation:
                    live.acknowledged, live.idle_at = count, idle_at
                    self._look_at(row, live, FinishReason(terminal))
            self._seen_turn[k] = turn
            self._book.set_swept(k, turn)

    def _look_at(self, row: int, live: Live, terminal: FinishReason) -> None:
        if terminal is not FinishReason.NONE and live.terminal is FinishReason.NONE:
            self._note_end(row, live, terminal)
        has_let_go = live.acknowledged > live.acknowledged_before
        if live.phase is Phase.PREEMPTING and has_let_go:
            live.phase = Phase.PREEMPTED
            self._book.set_preempted(row)
            if live.terminal is FinishReason.NONE:
                self._untime(row, live)
        if terminal is not FinishReason.NONE and self._is_done(live, has_let_go):
            self._release(row, live.generation)

    def _note_end(self, row: int, live: Live, terminal: FinishReason) -> None:
        live.terminal = terminal
        name = terminal.name.lower()
        self.totals.finals[name] = self.totals.finals.get(name, 0) + 1
        if self._row_of.get(live.request_id) == row:
            del self._row_of[live.request_id]
        if terminal in _NEEDS_ACKNOWLEDGEMENT:
            self._time(row, live, self._config.abort_timeout_s)
            if not self._knows_of(live, terminal):
                live.acknowledged_before = live.acknowledged
                self._book.note_acknowledged(row, live.acknowledged)
            self._book.control(row, live.generation, Control.ABORT)
        elif self._is_prefill(live):
            self._time(row, live, self._config.prefill_timeout_s)

    @staticmethod
    def _knows_of(live: Live, terminal: FinishReason) -> bool:
        """Whether the engine has been told to let go: of an error that a decoder found it has
        not."""
        return live.is_told or live.phase is not Phase.RUNNING or terminal is FinishReason.ABORT

    def _is_prefill(self, live: Live) -> bool:
        return self._config.role == "prefill" and bool(live.flags & AdmissionFlag.DISAGGREGATED)

    def _is_done(self, live: Live, has_let_go: bool) -> bool:
        if live.terminal in _NEEDS_ACKNOWLEDGEMENT:
            was_seen_empty = (
                live.quarantined_from is not None and live.idle_at > live.quarantined_from
            )
            return has_let_go or was_seen_empty or live.phase is Phase.PREEMPTED
        if live.terminal is FinishReason.STOP and self._is_prefill(live):
            return live.is_handed_over
        return True

    def _time(self, row: int, live: Live, limit_s: float) -> None:
        live.deadline = time.monotonic() + limit_s
        self._timed.add(row)

    def _untime(self, row: int, live: Live) -> None:
        live.deadline = None
        self._timed.discard(row)

    def reclaim(self) -> None:
        """Waits no longer for acknowledgements and hand-overs whose time is up."""
        now = time.monotonic()
        overdue = [r for r in self._timed if now >= (self._live[r].deadline or now)]
        for row in overdue:
            live = self._live[row]
            if live.quarantined_from is not None:  # and nothing has shown it empty
                if self._may_leave_quarantine(live):
                    self._release(row, live.generation)
                else:
                    self._time(row, live, self._config.heartbeat_interval_s)
                continue
            self.totals.reclaimed_by_timeout += 1
            self._warn(live)
            if live.terminal is FinishReason.NONE:
                # Preempted, and the engine does not say that it has let go: it may be lost.
                self._untime(row, live)
                self.end(row, FinishReason.ERROR)
            elif self._is_unstamped and live.terminal in _NEEDS_ACKNOWLEDGEMENT:
                # The engine may still run it, and nothing on this wire would tell its tokens from
                # a newcomer's.
                live.quarantined_from = _native.published(self._source)
                self._time(row, live, self._config.quarantine_s)
            else:
                self._release(row, live.generation)

    def _may_leave_quarantine(self, live: Live) -> bool:
        """Whether what the engine had sent for the row by the end of its time has been received.

        Time alone would not do: while the reader stands still, the engine's last message may wait
        in front of a full queue, and a barrier of a newcomer would pass it.
        """
        if not self._is_queue:
            return True
        live.barrier = live.barrier or self._book.send_barrier()
        if not live.barrier or not self._book.has_passed(live.barrier):
            return False
        received = _native.published(self._source)
        if live.passed_at is None:
            live.passed_at = received
        live.rests = live.rests + 1 if self._is_at_rest() else 0
        return received > live.passed_at or live.rests > 1

    def _is_at_rest(self) -> bool:
        try:
            return _native.is_at_rest(self._source)
        except QueueError:  # removed by somebody: nothing is in it
            return True

    def _warn(self, live: Live) -> None:
        if time.monotonic() - self._warned >= _WARN_EVERY_S:
            self._warned = time.monotonic()
            what = "prefill_done()" if self._is_prefill(live) else "an acknowledgement (state 3)"
            _log.warning(
                "request %r: %s has not come in time, its row is taken back; %d so far",
                live.request_id.decode(errors="replace"),
                what,
                self.totals.reclaimed_by_timeout,
            )

    def _release(self, row: int, generation: int) -> None:
        live = self._live.get(row)
        if live is None or live.generation != generation:
            return
        self._book.release(row, generation, live.blocks)
        del self._live[row]
        self._timed.discard(row)
        if self._row_of.get(live.request_id) == row:
            del self._row_of[live.request_id]
        self._free_blocks.extend(live.blocks)
        self._free_rows.append(row)
        self.totals.released += 1

    def publish_gauges(self) -> None:
        """Stores what /status shows of rows, blocks and the queue."""
        running = sum(
            live.terminal is FinishReason.NONE and live.phase is not Phase.PREEMPTED
            for live in self._live.values()
        )
        self._book.set_gauges(
            len(self._live), running, len(self._free_blocks), len(self._submits), self.high_water
        )
