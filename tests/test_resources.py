"""Rows, blocks and life cycles, in one process: whatever happens in whatever order, I1 to I3 hold.

The state machine drives reader, decoders, client, engine and coordinator by hand, each as far as it
likes, and kills the coordinator between any two of its stores. The directed tests make one claim
each.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from fake_engine import token_of
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Phase_
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from inprocess import InProcess

import tokenpipe as tp
from support import wait_until
from tokenpipe import _native
from tokenpipe import commands as commands_module
from tokenpipe import resources as resources_module
from tokenpipe.channel import CommandChannel
from tokenpipe.commands import ANY_ROW, CommandKind, FinishReason, Phase, ReplyStatus
from tokenpipe.layout import DTYPES
from tokenpipe.resources import Resources

ROWS, BLOCKS, LIMIT_S = 4, 6, 5.0
FOR_EVER_S = 1e6
EOS = 2
TOKEN, NONE, RECOVERY, ACKNOWLEDGED = range(4)
DONE = 2


class Clock:
    """Stands in for the module `time` of tokenpipe.resources."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Returns the time of the test."""
        return self.now


class KilledError(Exception):
    """The coordinator has died here."""


_STORES = frozenset(
    [
        "log_choice",
        "admit",
        "open_control",
        "control",
        "mark",
        "release",
        "reply",
        "preempt",
        "set_preempted",
        "resume",
        "note_acknowledged",
        "grow",
        "set_swept",
        "set_handed_over",
    ]
)


class MortalBook:
    """A Book whose owner dies before its n-th store from now, when `fuse` is n."""

    def __init__(self, book: _native.Book) -> None:
        self._book = book
        self.fuse: int | None = None

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._book, name)
        if name in _STORES and self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise KilledError(name)
        return attribute


@dataclass
class Answer:
    """What a command was answered."""

    status: ReplyStatus
    row: int
    generation: int
    blocks: tuple[int, ...]


class Driven(InProcess):
    """A pipeline in one process, with every command, a clock of its own and a coordinator that may
    die."""

    book: Any

    def __init__(self, **sizes: Any) -> None:
        self.clock = Clock()
        self._real_time = resources_module.time
        defaults: dict[str, Any] = {
            "name": "t" + secrets.token_hex(8),
            "max_num_seqs": ROWS,
            "top_logprobs": 0,
            "num_decoders": 2,
            "ring_slots": 4,
            "output_slots": 4,
            "source_slots": 4,
            "num_blocks": BLOCKS,
            "block_size": 4,
            "command_slots": 24,
            "abort_timeout_s": LIMIT_S,
            "prefill_timeout_s": LIMIT_S,
        }
        super().__init__(tp.PipelineConfig(**{**defaults, **sizes}))
        resources_module.time = self.clock  # type: ignore[assignment]
        self.free_slots = list(range(self.config.command_slots))
        self.posted: dict[int, tuple[CommandKind | int, dict[str, Any]]] = {}
        self.restart_coordinator()

    def restart_coordinator(self) -> None:
        """A new coordinator takes over: all that it knows is in the segment."""
        core = self.segment.core
        self.book = MortalBook(_native.Book(core, self.segment.source))
        self.resources = Resources(core, self.segment.source, self.book, self.config)

    def restart_decoder(self, k: int) -> None:
        """A new decoder goes on where the former one has committed."""
        self.decoders[k] = _native.Decoder(self.segment.core, k, 0.0)

    # ------------------------------------------------------------ commands

    def post(self, kind: CommandKind | int, wait_s: float = FOR_EVER_S, **fields: Any) -> int:
        """Posts a command and lets nobody serve it."""
        slot = self.free_slots.pop(0)
        self.posted[slot] = (kind, {**fields, "deadline_s": self.clock.now + wait_s})
        self.client.post(slot, int(kind), deadline_s=self.clock.now + wait_s, **fields)
        return slot

    def post_submit(self, request: tp.Request, row: int | None = None, wait_s: float = 0.0) -> int:
        """Posts a submit."""
        request.check(self.config)
        return self.post(
            CommandKind.SUBMIT,
            wait_s,
            id=request.request_id,
            eos=[int(t) for t in request.eos_token_ids],
            row=ANY_ROW if row is None else row,
            max_tokens=request.max_tokens or 0,
            prompt_tokens=len(request.prompt_token_ids),
            num_blocks=request.blocks_wanted(self.config),
            flags=request.flags,
        )

    def tick(self) -> None:
        """One turn of the coordinator."""
        self.resources.sweep()
        self.resources.reclaim()
        self.resources.serve()

    def tick_and_die(self, fuse: int) -> None:
        """A turn that ends after `fuse` stores, if it has so many; then a whole one of whoever is
        there."""
        self.book.fuse = fuse
        try:
            self.tick()
        except KilledError:
            self.restart_coordinator()
        self.book.fuse = None
        self.tick()

    def take(self, slot: int) -> Answer | None:
        """Returns a command's answer, if there is one yet, and frees its slot."""
        if self.client.command_state(slot) != DONE:
            return None
        status, row, generation, _value, blocks = self.client.reply(slot)
        self.client.free(slot)
        del self.posted[slot]
        self.free_slots.append(slot)
        return Answer(ReplyStatus(status), row, generation, tuple(blocks))

    def ask(self, kind: CommandKind | int, wait_s: float = 0.0, **fields: Any) -> Answer:
        """Posts a command, which must be answered in one tick."""
        slot = self.post(kind, wait_s, **fields)
        self.tick()
        answer = self.take(slot)
        assert answer is not None
        return answer

    def begin(self, name: str, row: int | None = None, **more: Any) -> Answer:
        """Submits a request, which must get a row in one tick."""
        request = tp.Request(name, prompt_token_ids=[1], eos_token_ids=[EOS], **more)
        self.requests.expect(request)
        slot = self.post_submit(request, row)
        self.tick()
        answer = self.take(slot)
        assert answer is not None
        assert answer.status is ReplyStatus.OK, answer
        self.requests.admit(tp.Admission(name, answer.row, answer.generation), request)
        return answer

    # ------------------------------------------------------------ engine, reader, decoders

    def save(
        self,
        *rows: tuple[int, int],
        tokens: list[int] | None = None,
        state: int = TOKEN,
        positions: list[int] | None = None,
    ) -> None:
        """Saves a step of (row, generation) each."""
        step = self.writer.begin_step([g for _, g in rows], rows=[r for r, _ in rows])
        self.writer.save_output(
            np.array(tokens or [100] * len(rows), np.int64),
            step=step,
            states=np.full(len(rows), state, np.uint8),
            positions=None if positions is None else np.array(positions, np.int32),
        )

    def acknowledge(self, answer: Answer) -> None:
        """Saves the engine's acknowledgement of a life, and lets everybody hear it."""
        self.save((answer.row, answer.generation), state=ACKNOWLEDGED)
        self.go()

    def has_room(self) -> bool:
        """Whether the engine would not have to wait."""
        source = self.segment.source
        waiting = _native.published(source) - _native.source_released(source)
        return bool(waiting < self.config.source_slots)

    def feed(self) -> None:
        """Lets the reader do all that it can."""
        while self.producer.claim(0.0) and self.reader.get_output(self.producer, 0.0):
            self.producer.publish()
            self.reader.release()

    def go(self) -> list[Any]:
        """Lets everybody do all that they can; returns what the client gets."""
        outputs: list[Any] = []
        for _ in range(3):
            outputs += self.outputs()
            self.tick()
        return outputs

    # ------------------------------------------------------------ what the segment says

    def rows(self) -> list[tuple[int, int, int]]:
        """Returns (admitted, freed, committed terminal) of each row."""
        return [(r[0], r[1], r[2]) for r in _native.rows(self.segment.core)]

    def is_back(self, answer: Answer) -> bool:
        """Whether the row of a life, and all its blocks, are free again."""
        key = (answer.row, answer.generation)
        is_freed = self.rows()[answer.row][1] >= answer.generation
        assert not is_freed or key not in self.book.block_owners()
        return is_freed

    def check_all_is_free(self) -> None:
        """I3 when nothing runs."""
        assert all(admitted == freed for admitted, freed, _ in self.rows())
        assert self.resources.num_free_rows == self.config.max_num_seqs
        assert self.resources.num_free_blocks == self.config.num_blocks
        assert self.resources.num_live == self.resources.num_waiting == 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        resources_module.time = self._real_time
        super().__exit__(kind, error, trace)


# ---------------------------------------------------------------- the state machine


@dataclass
class Life:
    """One admitted request, as the test knows it."""

    request: tp.Request
    row: int
    generation: int
    blocks: list[int]
    begun: float
    position: int = 0
    """What the engine samples next."""
    saved: int = 0
    """Positions that the engine has saved."""
    stop_at: int | None = None
    recovered_at: int | None = None
    owed: int | None = None
    """Tokens that must be delivered even when it is ended from outside."""
    delivered: int = 0
    final: FinishReason | None = None
    acknowledged_before: int = 0
    """Its acknowledgements saved when the engine could not have been told: they do not count."""

    @property
    def key(self) -> tuple[int, int]:
        """(row, generation)."""
        return self.row, self.generation

    def token(self, position: int) -> int:
        """Returns what the engine samples at a position."""
        return EOS if position == self.stop_at else token_of(self.row, self.generation, position)

    def owe(self) -> None:
        """From now on it may be ended from outside; what is saved by now must come out."""
        if self.owed is None:
            self.owed = self.saved

    def check_end(self, role: str) -> None:
        """Checks what was delivered against the reason of the end."""
        assert self.final is not None, self
        if self.request.warm_up:
            assert self.delivered == 0
        elif self.final is FinishReason.STOP:
            is_prefill = role == "prefill" and self.request.disaggregate_info is not None
            assert self.stop_at is not None or is_prefill
            assert self.delivered == (1 if is_prefill else (self.stop_at or 0) + 1)
        elif self.final is FinishReason.LENGTH:
            assert self.delivered == self.request.max_tokens
        elif self.final is FinishReason.RECOVERY:
            assert self.delivered == self.recovered_at
        else:
            assert self.owed is not None
            assert self.owed <= self.delivered <= self.saved


@dataclass
class Posted:
    """A command as the test posted it."""

    kind: CommandKind
    request_id: str = ""
    request: tp.Request | None = None
    is_expected: bool = False
    num_blocks: int = 0
    wait_until: float = 0.0
    back: int = 0
    is_new: bool = True
    """No tick has looked at it."""


IDS = st.sampled_from(["a", "b", "c", "d", "\u00e9_#1"])
MAX_TOKENS = st.sampled_from([None, None, 1, 3, 6])
WAITS = st.sampled_from([0.0, 3.0, FOR_EVER_S])
FUSES = st.one_of(st.none(), st.none(), st.integers(0, 12))


class Lifecycles(RuleBasedStateMachine):
    """Everything that can happen to requests, in any order."""

    role = "mixed"

    def __init__(self) -> None:
        super().__init__()
        self.pipe = Driven(role=self.role)
        self.lives: dict[tuple[int, int], Life] = {}
        self.batch: dict[int, Life] = {}
        """What the engine runs."""
        self.paused: dict[tuple[int, int], Life] = {}
        self.due: list[tuple[int, int]] = []
        """Acknowledgements that the engine will send."""
        self.asked: dict[int, Posted] = {}
        self.acknowledged: Counter[tuple[int, int]] = Counter()
        self.engine_dies = False

    # ------------------------------------------------------------ commands

    def _post(self, asked: Posted, send: Callable[[], int]) -> None:
        if len(self.pipe.free_slots) > 2:
            self.asked[send()] = asked

    @initialize(
        names=st.sets(st.sampled_from("abcd"), min_size=1),
        max_tokens=MAX_TOKENS,
        engine_dies=st.booleans(),
    )
    def begin(self, names: set[str], max_tokens: int | None, engine_dies: bool) -> None:
        """Runs some requests, so that there is something to do."""
        self.engine_dies = engine_dies
        for name in sorted(names):
            self.submit(name, 1, None, max_tokens, 0.0, "")
        self.everybody_goes()
        self.step(set(), set())

    # Few rules with many choices: hypothesis leaves whole rules out of a run.
    @rule(
        name=IDS,
        num_blocks=st.sampled_from([0, 1, 2, 4, BLOCKS, BLOCKS + 1]),
        row=st.sampled_from([None, None, None, 0, 1, 3]),
        max_tokens=MAX_TOKENS,
        wait_s=WAITS,
        kind=st.sampled_from(["", "", "", "disaggregated", "disaggregated", "warm-up"]),
        is_served=st.booleans(),
    )
    def new_request(self, is_served: bool, **choices: Any) -> None:
        self.submit(**choices)
        if is_served:
            self.tick(None)

    @rule(
        name=IDS,
        kind=st.sampled_from(
            [
                "abort",
                "abort",
                "preempt",
                "preempt",
                "preempt",
                "resume",
                "resume",
                "grow",
                "grow",
                "prefill_done",
                "clear",
            ]
        ),
        wait_s=WAITS,
        number=st.integers(1, 4),
        is_stale=st.booleans(),
        is_served=st.booleans(),
    )
    def command(
        self, name: str, kind: str, wait_s: float, number: int, is_stale: bool, is_served: bool
    ) -> None:
        match kind:
            case "resume":
                self.resume(name, wait_s, number - 1)
            case "grow":
                self.grow(name, wait_s, min(number, 3))
            case "prefill_done":
                self.prefill_done(number - 1, is_stale)
            case "clear":
                self.clear()
            case _:
                self.tell(name, CommandKind[kind.upper()])
        if is_served:
            self.tick(None)

    @rule(
        what=st.sampled_from(
            [
                "step",
                "step",
                "step",
                "step",
                "poll",
                "poll",
                "due",
                "due",
                "unasked",
                "hole",
                "recover",
                "late",
            ]
        ),
        row=st.integers(0, ROWS - 1),
        older=st.integers(-1, 2),
        left_out=st.sets(st.integers(0, ROWS - 1), max_size=1),
        stops=st.sets(st.integers(0, ROWS - 1), max_size=1),
    )
    def engine(self, what: str, row: int, older: int, left_out: set[int], stops: set[int]) -> None:
        match what:
            case "step":
                self.step(left_out, stops)
            case "poll":
                self.poll()
            case "due":
                self.acknowledge_what_is_due()
            case "unasked":
                self.acknowledge_unasked(row, older)
            case "hole":
                self.leave_a_hole(row)
            case "recover":
                self.recover(row)
            case "late":
                self.save_late(row, max(1, older))

    @rule(
        who=st.sampled_from(
            [
                "feed",
                "decode",
                "decode",
                "decode",
                "read",
                "read",
                "by_step",
                "tick",
                "tick",
                "all",
                "all",
                "decoder",
                "restart",
                "clock",
            ]
        ),
        k=st.integers(0, 1),
        turns=st.integers(1, 6),
        fuse=FUSES,
    )
    def move(self, who: str, k: int, turns: int, fuse: int | None) -> None:
        match who:
            case "feed":
                self.pipe.feed()
            case "decode":
                self.pipe.decoders[k].run(turns, 0.0)
            case "read" | "by_step":
                self.read(turns, who == "by_step")
            case "tick":
                self.tick(fuse)
            case "all":
                self.everybody_goes()
            case "decoder":
                self.pipe.restart_decoder(k)
            case "restart":
                self.restart_coordinator()
            case "clock":
                self.pipe.clock.now += 1.0 if k else LIMIT_S + 1

    def submit(
        self,
        name: str,
        num_blocks: int,
        row: int | None,
        max_tokens: int | None,
        wait_s: float,
        kind: str,
    ) -> None:
        request = tp.Request(
            name,
            prompt_token_ids=[1],
            eos_token_ids=[EOS],
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            warm_up=kind == "warm-up",
            disaggregate_info={} if kind == "disaggregated" else None,
        )
        until = self.pipe.clock.now + wait_s
        asked = Posted(CommandKind.SUBMIT, name, request, num_blocks=num_blocks, wait_until=until)

        def send() -> int:
            if name not in self.pipe.requests:
                self.pipe.requests.expect(request)
                asked.is_expected = True
            return self.pipe.post_submit(request, row, wait_s)

        self._post(asked, send)

    def tell(self, name: str, kind: CommandKind) -> None:
        self._post(Posted(kind, name), lambda: self.pipe.post(kind, id=name))

    def resume(self, name: str, wait_s: float, back: int) -> None:
        until = self.pipe.clock.now + wait_s
        asked = Posted(CommandKind.RESUME, name, wait_until=until, back=back)
        self._post(asked, lambda: self.pipe.post(CommandKind.RESUME, wait_s, id=name))

    def grow(self, name: str, wait_s: float, num_blocks: int) -> None:
        until = self.pipe.clock.now + wait_s
        asked = Posted(CommandKind.GROW, name, num_blocks=num_blocks, wait_until=until)
        kind = CommandKind.GROW
        self._post(asked, lambda: self.pipe.post(kind, wait_s, id=name, num_blocks=num_blocks))

    def prefill_done(self, row: int, is_stale: bool) -> None:
        admitted = self.pipe.rows()[row][0] if row < ROWS else 1
        generation = max(0, admitted - is_stale)
        kind = CommandKind.PREFILL_DONE
        self._post(Posted(kind), lambda: self.pipe.post(kind, row=row, generation=generation))

    def clear(self) -> None:
        kind = CommandKind.CLEAR
        self._post(Posted(kind), lambda: self.pipe.post(kind))

    # ------------------------------------------------------------ the coordinator

    def tick(self, fuse: int | None) -> None:
        """A turn, which may end in the coordinator's death before its n-th store."""
        wanted = self._wanted()
        self._note_what_is_owed()
        self.pipe.book.fuse = fuse
        try:
            self.pipe.tick()
            self.pipe.book.fuse = None
        except KilledError:
            wanted.clear()
            self.restart_coordinator()
        self._take_answers(wanted)

    def restart_coordinator(self) -> None:
        self.pipe.restart_coordinator()

    def _live_keys(self) -> list[tuple[int, int]]:
        rows = self.pipe.rows()
        return [(r, admitted) for r, (admitted, freed, _) in enumerate(rows) if admitted != freed]

    def _running_ids(self) -> set[str]:
        """Ids whose final is not published, as the segment says."""
        rows = self.pipe.rows()
        return {
            life.request.request_id
            for (row, generation), life in self.lives.items()
            if rows[row][0] == generation != rows[row][1] and not rows[row][2]
        }

    def _wanted(self) -> dict[int, set[ReplyStatus]]:
        """What the answers of this tick must be, where that is sure beforehand."""
        wanted: dict[int, set[ReplyStatus]] = {}
        if any(a.kind is CommandKind.CLEAR for a in self.asked.values()):
            return wanted
        running = self._running_ids()
        for slot, asked in self.asked.items():
            others = [a for a in self.asked.values() if a.request_id == asked.request_id]
            if len(others) != 1 or not asked.is_new:
                continue
            is_running = asked.request_id in running
            if asked.kind is CommandKind.SUBMIT:
                if asked.num_blocks > BLOCKS:
                    wanted[slot] = {ReplyStatus.TOO_MANY_BLOCKS}
                elif is_running:
                    wanted[slot] = {ReplyStatus.DUPLICATE}
                else:
                    wanted[slot] = {ReplyStatus.OK, ReplyStatus.NO_FREE_ROW, ReplyStatus.ROW_BUSY}
            elif asked.kind in (CommandKind.ABORT, CommandKind.PREEMPT):
                wanted[slot] = {ReplyStatus.OK if is_running else ReplyStatus.UNKNOWN}
            elif asked.kind in (CommandKind.GROW, CommandKind.RESUME) and not is_running:
                wanted[slot] = {ReplyStatus.UNKNOWN}
        return wanted

    def _note_what_is_owed(self) -> None:
        named = {
            a.request_id
            for a in self.asked.values()
            if a.kind in (CommandKind.ABORT, CommandKind.PREEMPT)
        }
        is_cleared = any(a.kind is CommandKind.CLEAR for a in self.asked.values())
        for key in self._live_keys():
            life = self.lives.get(key)
            if life is not None and (is_cleared or life.request.request_id in named):
                self._owe(life)

    def _owe(self, life: Life) -> None:
        """From now on it may be ended from outside: no earlier acknowledgement lets go of it."""
        if life.owed is None:
            life.acknowledged_before = self.acknowledged[life.key]
        life.owe()

    def _take_answers(self, wanted: dict[int, set[ReplyStatus]]) -> None:
        for slot, asked in list(self.asked.items()):
            asked.is_new = False
            answer = self.pipe.take(slot)
            if answer is None:
                continue
            del self.asked[slot]
            assert answer.status in wanted.get(slot, set(ReplyStatus)), (asked, answer)
            if asked.kind is CommandKind.SUBMIT:
                self._take_submit(asked, answer)
            elif answer.status is ReplyStatus.OK:
                self._take_ok(asked, answer)
            elif answer.status in (ReplyStatus.NO_FREE_BLOCKS, ReplyStatus.NOT_ACKNOWLEDGED):
                assert self.pipe.clock.now >= asked.wait_until

    def _take_submit(self, asked: Posted, answer: Answer) -> None:
        assert asked.request is not None
        if answer.status is not ReplyStatus.OK:
            if answer.status in (ReplyStatus.NO_FREE_ROW, ReplyStatus.ROW_BUSY):
                assert self.pipe.clock.now >= asked.wait_until
            if asked.is_expected:
                self.pipe.requests.forget(asked.request)
            return
        key = (answer.row, answer.generation)
        assert key not in self.lives, "given out twice"
        assert len(set(answer.blocks)) == len(answer.blocks) == asked.num_blocks
        life = Life(asked.request, *key, list(answer.blocks), self.pipe.clock.now)
        self.lives[key] = self.batch[answer.row] = life
        self.pipe.requests.admit(tp.Admission(asked.request_id, *key), asked.request)

    def _take_ok(self, asked: Posted, answer: Answer) -> None:
        life = self.lives.get((answer.row, answer.generation))
        if asked.kind is CommandKind.GROW:
            assert life is not None
            assert len(set(answer.blocks)) == len(answer.blocks) == asked.num_blocks
            life.blocks += answer.blocks
        elif asked.kind is CommandKind.RESUME:
            assert life is not None
            life.acknowledged_before = self.acknowledged[life.key]
            if self.paused.pop(life.key, None) is not None:
                life.position = max(0, life.saved - asked.back)  # computed again from there
                self.batch[life.row] = life

    # ------------------------------------------------------------ the engine

    def _has_room(self) -> bool:
        if not self.pipe.has_room():
            self.pipe.feed()
        return self.pipe.has_room()

    def step(self, left_out: set[int], stops: set[int]) -> None:
        """Saves a step of what the engine runs; rows of ended requests too, until it hears."""
        lives = [life for row, life in sorted(self.batch.items()) if row not in left_out]
        if not lives or not self._has_room():
            return
        tokens, positions = [], []
        for life in lives:
            if life.row in stops and life.stop_at is None and life.position == life.saved:
                life.stop_at = life.position
            tokens.append(life.token(life.position))
            positions.append(life.position)
            life.position += 1
            life.saved = max(life.saved, life.position)
        self.pipe.save(*(life.key for life in lives), tokens=tokens, positions=positions)

    def recover(self, row: int) -> None:
        """The engine cannot go on with a row."""
        life = self.batch.get(row)
        if life is None or life.recovered_at is not None or not self._has_room():
            return
        life.recovered_at = life.saved
        del self.batch[row]
        self.pipe.save(life.key, state=RECOVERY)

    def leave_a_hole(self, row: int) -> None:
        """The engine leaves a position out: the request ends with an error."""
        life = self.batch.get(row)
        if life is None or life.position != life.saved or not self._has_room():
            return
        self._owe(life)
        del self.batch[row]
        self.pipe.save(life.key, tokens=[99], positions=[life.saved + 1])

    def poll(self) -> None:
        """The engine hears what it must act on."""
        for event in self.pipe.writer.poll_control():
            life = self.batch.get(event.row)
            if life is None or life.generation != event.generation:
                life = None
            else:
                del self.batch[event.row]
            if event.kind == "finished":
                self.paused.pop((event.row, event.generation), None)
                continue
            self.due.append((event.row, event.generation))
            if event.kind == "preempt" and life is not None:
                self.paused[life.key] = life

    def acknowledge_what_is_due(self) -> None:
        if self.due and self._has_room():
            self._save_acknowledgements(*dict.fromkeys(self.due))
            self.due.clear()

    def acknowledge_unasked(self, row: int, older: int) -> None:
        """Also twice, for a former life, for one that never was, for a row that does not run."""
        generation = self.pipe.rows()[row][0] - older
        if generation >= 0 and self._has_room():
            self._save_acknowledgements((row, generation))

    def _save_acknowledgements(self, *keys: tuple[int, int]) -> None:
        by_row = dict(keys)  # one life of a row in a step
        self.pipe.save(*by_row.items(), state=ACKNOWLEDGED)
        self.acknowledged.update(by_row.items())

    def save_late(self, row: int, older: int) -> None:
        """A step in flight of a former life."""
        generation = self.pipe.rows()[row][0] - older
        if generation >= 0 and self._has_room():
            self.pipe.save((row, generation), tokens=[77], positions=[0])

    # ------------------------------------------------------------ reader, decoders, client

    def read(self, frames: int, by_step: bool) -> None:
        take = self.pipe.delivery.next_step if by_step else self.pipe.delivery.next
        for _ in range(frames):
            batch = take(0.0)
            if batch is None:
                return
            self._check_batch(batch)
            batch.release()

    def _check_batch(self, batch: tp.OutputBatch) -> None:
        offsets = batch.token_offsets.tolist()
        for i, (row, generation) in enumerate(
            zip(batch.row.tolist(), batch.generation.tolist(), strict=True)
        ):
            life = self.lives[row, generation]
            assert batch.requests[i] is life.request
            assert life.final is None, "something after the final"
            tokens = batch.token_ids[offsets[i] : offsets[i + 1]].tolist()
            expected = [life.token(life.delivered + j) for j in range(len(tokens))]
            assert tokens == expected
            if not life.request.warm_up:
                assert int(batch.send_idx[i]) == life.delivered
            life.delivered += len(tokens)
            if batch.finish_reason[i]:
                life.final = FinishReason(int(batch.finish_reason[i]))

    def everybody_goes(self) -> None:
        """The usual course: all do what they can."""
        self.tick(None)
        self.poll()
        self.acknowledge_what_is_due()
        self.pipe.feed()
        for decoder in self.pipe.decoders:
            decoder.run(64, 0.0)
        self.read(64, False)
        self.tick(None)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def rows_and_blocks_are_owned_once(self) -> None:
        """I3."""
        resources = self.pipe.resources
        live = self._live_keys()
        free_rows = list(resources._free_rows)
        assert sorted([*free_rows, *(row for row, _ in live)]) == list(range(ROWS))
        assert {(row, kept.generation) for row, kept in resources._live.items()} == set(live)
        owners = self.pipe.book.block_owners()
        owned: dict[tuple[int, int], set[int]] = {key: set() for key in live}
        free = set()
        for block, owner in enumerate(owners):
            owned.get(owner, free).add(block)
        assert sorted(resources._free_blocks) == sorted(free)
        for key in live:
            if key in self.lives:  # else its submit's answer has not been taken yet
                assert set(self.lives[key].blocks) == owned[key], key

    @invariant()
    def tokens_add_up(self) -> None:
        """I1 in numbers; by value each batch is checked when it is read."""
        counters = self.pipe.counters()
        dropped = sum(v for name, v in counters.items() if name.startswith("dropped_"))
        assert counters["tokens_seen"] == counters["tokens_delivered"] + dropped

    @invariant()
    def nobody_gets_a_second_final(self) -> None:
        """I2."""
        assert self.pipe.requests.num_second_finals == 0

    @invariant()
    def no_row_comes_back_before_its_time(self) -> None:
        """An aborted row that the engine may still write to is nobody else's."""
        rows = self.pipe.rows()
        for life in self.lives.values():
            admitted, freed, terminal = rows[life.row]
            is_ended_from_outside = terminal in (FinishReason.ABORT, FinishReason.ERROR)
            if admitted == freed == life.generation and is_ended_from_outside:
                has_waited = self.pipe.clock.now - life.begun >= LIMIT_S
                has_let_go = self.acknowledged[life.key] > life.acknowledged_before
                assert has_let_go or has_waited, life

    def teardown(self) -> None:
        try:
            self._drain()
        finally:
            self.pipe.__exit__(None, None, None)

    def _drain(self) -> None:
        for turn in range(40):
            if self._live_keys() or self.asked:
                self.clear()
            if self.engine_dies:
                self.batch.clear()
                self.due.clear()
            self.everybody_goes()
            if turn > 10:
                self.pipe.clock.now += LIMIT_S + 1
            if not self._live_keys() and not self.asked:
                break
        self.everybody_goes()
        self.pipe.check_all_is_free()
        for life in self.lives.values():
            life.check_end(self.role)
        saved = _native.saved_tokens(self.pipe.segment.source)
        counters = self.pipe.counters()
        assert saved == counters["tokens_seen"]
        assert sum(life.delivered for life in self.lives.values()) == counters["tokens_delivered"]
        assert sum(v for n, v in counters.items() if n.startswith("finals_")) == len(self.lives)


class PrefillLifecycles(Lifecycles):
    """The same for a prefill instance."""

    role = "prefill"


PHASES = (Phase_.generate,)

MACHINES = [Lifecycles, PrefillLifecycles]


def run_machine(machine: type[Lifecycles], runs: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
        ),
    )


@pytest.mark.parametrize(("machine", "runs"), [(Lifecycles, 110), (PrefillLifecycles, 40)])
def test_whatever_happens_in_whatever_order(machine: type[Lifecycles], runs: int) -> None:
    run_machine(machine, runs, 30)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_whatever_happens_in_whatever_order_many_times(machine: type[Lifecycles]) -> None:
    run_machine(machine, 2000, 50)


# ---------------------------------------------------------------- one claim each


@pytest.fixture
def pipe() -> Iterator[Driven]:
    with Driven() as pipe:
        yield pipe


def kinds(pipe: Driven) -> list[tuple[int, str]]:
    return [(e.row, e.kind) for e in pipe.writer.poll_control()]


@pytest.mark.parametrize("reason", ["stop", "length", "recovery", "shutdown"])
def test_an_end_that_waits_for_nothing_gives_the_row_back_at_once(
    pipe: Driven, reason: str
) -> None:
    a = pipe.begin("a", num_blocks=3, max_tokens=1 if reason == "length" else None)
    if reason == "shutdown":
        pipe.resources.end(a.row, FinishReason.SHUTDOWN)
    else:
        state = RECOVERY if reason == "recovery" else TOKEN
        pipe.save((a.row, a.generation), tokens=[EOS if reason == "stop" else 50], state=state)
    [final] = pipe.go()
    assert final.finish_reason == reason
    assert pipe.is_back(a)
    pipe.check_all_is_free()


@pytest.mark.parametrize("kind", [CommandKind.ABORT, CommandKind.CLEAR])
def test_an_abort_and_an_error_wait_for_the_acknowledgement(
    pipe: Driven, kind: CommandKind
) -> None:
    a = pipe.begin("a", num_blocks=3)
    assert pipe.ask(kind, id="a").status is ReplyStatus.OK
    [final] = pipe.go()
    assert final.finish_reason == ("abort" if kind is CommandKind.ABORT else "error")
    assert not pipe.is_back(a)
    assert pipe.resources.num_free_blocks == BLOCKS - 3
    assert kinds(pipe) == [(a.row, "abort")]
    pipe.acknowledge(a)
    assert pipe.is_back(a)
    assert kinds(pipe) == [(a.row, "finished")]
    pipe.check_all_is_free()


@pytest.mark.parametrize("kind", [CommandKind.ABORT, CommandKind.CLEAR])
def test_an_abort_and_an_error_wait_no_longer_than_their_deadline(
    pipe: Driven, kind: CommandKind
) -> None:
    a = pipe.begin("a", num_blocks=3)
    pipe.ask(kind, id="a")
    pipe.go()
    pipe.clock.now += LIMIT_S - 0.01
    pipe.go()
    assert not pipe.is_back(a)
    pipe.clock.now += 0.02
    pipe.go()
    assert pipe.is_back(a)
    assert pipe.resources.totals.reclaimed_by_timeout == 1
    pipe.save((a.row, a.generation), state=ACKNOWLEDGED)  # too late: nothing is freed twice
    pipe.go()
    pipe.check_all_is_free()


@pytest.mark.parametrize("kind", [CommandKind.ABORT, CommandKind.CLEAR])
def test_an_abort_and_an_error_of_a_preempted_request_wait_for_nothing(
    pipe: Driven, kind: CommandKind
) -> None:
    a = pipe.begin("a", num_blocks=3)
    pipe.ask(CommandKind.PREEMPT, id="a")
    pipe.acknowledge(a)
    assert not pipe.is_back(a), "a preempted request keeps its row and blocks"
    pipe.ask(kind, id="a")
    pipe.go()
    assert pipe.is_back(a)


@pytest.mark.parametrize("was", ["running", "aborted", "aborting", "preempting", "preempted"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_no_row_waits_for_an_engine_that_is_dead(pipe: Driven, was: str, is_replaced: bool) -> None:
    a = pipe.begin("a", num_blocks=3)
    if was in ("aborted", "aborting"):
        pipe.ask(CommandKind.ABORT, id="a")
        if was == "aborted":
            pipe.go()
    elif was != "running":
        pipe.ask(CommandKind.PREEMPT, id="a")
        if was == "preempted":
            pipe.acknowledge(a)
    assert not pipe.is_back(a)
    pipe.resources.end_all_of_a_dead_engine()
    if is_replaced:
        pipe.restart_coordinator()
    pipe.go()
    assert pipe.is_back(a)
    assert pipe.resources.totals.reclaimed_by_timeout == 0
    pipe.check_all_is_free()


def test_what_a_dead_engine_had_handed_over_still_waits_for_the_cache() -> None:
    with Driven(role="prefill") as pipe:
        a = pipe.begin("a", disaggregate_info={"role": "prefill"})
        pipe.save((a.row, a.generation), tokens=[EOS])
        pipe.go()
        pipe.resources.end_all_of_a_dead_engine()
        pipe.go()
        assert not pipe.is_back(a), "its blocks are still being sent"
        pipe.ask(CommandKind.PREFILL_DONE, row=a.row, generation=a.generation)
        pipe.go()
        assert pipe.is_back(a)


@pytest.mark.parametrize("kind", [None, CommandKind.ABORT, CommandKind.CLEAR])
def test_a_row_that_was_let_go_waits_for_no_acknowledgement(
    pipe: Driven, kind: CommandKind | None
) -> None:
    a = pipe.begin("a", num_blocks=3)
    if kind is not None:
        pipe.ask(kind, id="a")
        pipe.go()
        assert not pipe.is_back(a)
    here = {"row": a.row, "generation": a.generation}
    other_life = pipe.ask(CommandKind.LET_GO, row=a.row, generation=a.generation + 1)
    assert other_life.status is ReplyStatus.UNKNOWN
    assert pipe.ask(CommandKind.LET_GO, **here).status is ReplyStatus.OK
    pipe.go()
    assert pipe.is_back(a)
    assert pipe.ask(CommandKind.LET_GO, **here).status is ReplyStatus.UNKNOWN
    assert pipe.begin("b", row=a.row).generation == a.generation + 1


def test_a_successor_knows_that_a_row_was_let_go(pipe: Driven) -> None:
    a = pipe.begin("a", num_blocks=3)
    pipe.ask(CommandKind.LET_GO, row=a.row, generation=a.generation)
    pipe.restart_coordinator()
    pipe.go()
    assert pipe.is_back(a)


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_client_hears_of_acknowledgements_where_it_wants_to(is_reported: bool) -> None:
    with Driven(num_decoders=1, report_acknowledgements=is_reported) as pipe:
        a, b = pipe.begin("a"), pipe.begin("b")
        pipe.save((a.row, a.generation), (b.row, b.generation), tokens=[50, EOS])
        step = pipe.writer.begin_step([a.generation, b.generation], rows=[a.row, b.row])
        states = np.full(2, ACKNOWLEDGED, np.uint8)
        pipe.writer.save_output(np.array([0, 0], np.int64), step=step, states=states)
        pipe.pump()
        told = [
            (batch.row.tolist(), batch.finish_reason.tolist(), [o.finished for o in batch])
            for batch in pipe.batches()
        ]
        expected = [([a.row, b.row], [0, FinishReason.STOP], [False, True])]
        if is_reported:  # of the one that runs; the other has ended
            expected.append(([a.row], [commands_module.ACKNOWLEDGED], [False]))
        assert told == expected
        assert not pipe.is_back(a), "it is no end"
        pipe.save((a.row, a.generation), tokens=[EOS])
        pipe.go()
        assert pipe.is_back(a)


def test_a_prefill_instances_row_waits_for_prefill_done() -> None:
    with Driven(role="prefill") as pipe:
        a = pipe.begin("a", num_blocks=3, disaggregate_info={})
        b = pipe.begin("b", num_blocks=1)  # not disaggregated: an end like any other
        pipe.save((a.row, a.generation), (b.row, b.generation), tokens=[50, EOS])
        pipe.go()
        assert not pipe.is_back(a)
        assert pipe.is_back(b)
        here = {"row": a.row, "generation": a.generation}
        stale = pipe.ask(CommandKind.PREFILL_DONE, row=a.row, generation=a.generation + 1)
        assert stale.status is ReplyStatus.UNKNOWN
        assert pipe.ask(CommandKind.PREFILL_DONE, **here).status is ReplyStatus.OK
        assert pipe.is_back(a)
        assert pipe.ask(CommandKind.PREFILL_DONE, **here).status is ReplyStatus.UNKNOWN
        pipe.check_all_is_free()


def test_prefill_done_may_come_before_the_first_token() -> None:
    with Driven(role="prefill") as pipe:
        a = pipe.begin("a", num_blocks=3, disaggregate_info={})
        pipe.ask(CommandKind.PREFILL_DONE, row=a.row, generation=a.generation)
        assert not pipe.is_back(a)
        pipe.save((a.row, a.generation))
        pipe.go()
        assert pipe.is_back(a)


def test_a_prefill_instances_row_waits_no_longer_than_its_deadline() -> None:
    with Driven(role="prefill") as pipe:
        a = pipe.begin("a", num_blocks=3, disaggregate_info={})
        pipe.save((a.row, a.generation))
        pipe.go()
        pipe.clock.now += LIMIT_S
        pipe.go()
        assert pipe.is_back(a)
        pipe.check_all_is_free()


def test_a_prefill_row_keeps_its_deadline_when_a_preemption_ends() -> None:
    with Driven(role="prefill") as pipe:
        a = pipe.begin("a", disaggregate_info={})
        pipe.ask(CommandKind.PREEMPT, id="a")
        pipe.save((a.row, a.generation))  # its first token was in flight
        pipe.go()
        pipe.acknowledge(a)
        pipe.clock.now += 10 * LIMIT_S
        pipe.go()
        assert pipe.is_back(a)


def test_preempt_then_abort_needs_one_acknowledgement(pipe: Driven) -> None:
    a = pipe.begin("a")
    pipe.ask(CommandKind.PREEMPT, id="a")
    pipe.ask(CommandKind.ABORT, id="a")
    [final] = pipe.go()
    assert final.finish_reason == "abort"
    assert not pipe.is_back(a)
    assert kinds(pipe) == [(a.row, "abort"), (a.row, "preempt")]
    pipe.acknowledge(a)
    assert pipe.is_back(a)


def test_a_second_preemption_of_one_life_reaches_poll_control(pipe: Driven) -> None:
    a = pipe.begin("a")
    for _ in range(2):
        pipe.ask(CommandKind.PREEMPT, id="a")
        assert kinds(pipe) == [(a.row, "preempt")]
        pipe.acknowledge(a)
        assert pipe.ask(CommandKind.RESUME, id="a").status is ReplyStatus.OK
        assert kinds(pipe) == []
    pipe.ask(CommandKind.PREEMPT, id="a")
    pipe.acknowledge(a)
    pipe.ask(CommandKind.RESUME, id="a")
    pipe.ask(CommandKind.PREEMPT, id="a")  # polled once for two
    assert kinds(pipe) == [(a.row, "preempt")]


@pytest.mark.parametrize("kind", [CommandKind.ABORT, CommandKind.PREEMPT])
def test_an_acknowledgement_from_before_the_mark_does_not_count(
    pipe: Driven, kind: CommandKind
) -> None:
    a = pipe.begin("a")
    for _ in range(3):
        pipe.acknowledge(a)  # nobody has asked
    pipe.ask(kind, id="a")
    pipe.go()
    assert not pipe.is_back(a)
    if kind is CommandKind.PREEMPT:
        assert pipe.ask(CommandKind.RESUME, id="a").status is ReplyStatus.NOT_ACKNOWLEDGED
    pipe.acknowledge(a)
    if kind is CommandKind.PREEMPT:
        assert pipe.ask(CommandKind.RESUME, id="a").status is ReplyStatus.OK
    else:
        assert pipe.is_back(a)


@pytest.mark.parametrize("kind", [CommandKind.ABORT, CommandKind.PREEMPT])
def test_an_acknowledgement_in_flight_at_the_mark_does_not_count(
    pipe: Driven, kind: CommandKind
) -> None:
    a = pipe.begin("a")
    pipe.save((a.row, a.generation), state=ACKNOWLEDGED)
    pipe.ask(kind, id="a")
    pipe.go()
    assert not pipe.is_back(a)
    assert pipe.resources._live[a.row].phase is not Phase.PREEMPTED


def test_the_acknowledgement_of_a_preemption_does_not_count_for_a_later_error(
    pipe: Driven,
) -> None:
    a = pipe.begin("a")
    pipe.ask(CommandKind.PREEMPT, id="a")
    pipe.acknowledge(a)
    pipe.ask(CommandKind.RESUME, id="a")
    pipe.save((a.row, a.generation), positions=[7])  # a hole: the decoder ends it with an error
    [final] = pipe.go()
    assert final.finish_reason == "error"
    assert not pipe.is_back(a)


def test_prefill_done_gives_no_aborted_row_back() -> None:
    with Driven(role="prefill") as pipe:
        a = pipe.begin("a", disaggregate_info={})
        pipe.ask(CommandKind.ABORT, id="a")
        pipe.go()
        pipe.ask(CommandKind.PREFILL_DONE, row=a.row, generation=a.generation)
        assert not pipe.is_back(a)


def test_a_preemption_that_is_never_acknowledged_ends_the_request(pipe: Driven) -> None:
    a = pipe.begin("a", num_blocks=2)
    pipe.ask(CommandKind.PREEMPT, id="a")
    resume = pipe.post(CommandKind.RESUME, id="a")
    pipe.go()
    pipe.clock.now += LIMIT_S
    [final] = pipe.go()
    assert final.finish_reason == "error"
    answer = pipe.take(resume)
    assert answer is not None
    assert answer.status is ReplyStatus.UNKNOWN
    assert not pipe.is_back(a)
    pipe.clock.now += LIMIT_S
    pipe.go()
    assert pipe.is_back(a)
    pipe.check_all_is_free()


def test_an_acknowledgement_of_another_life_or_of_a_row_that_does_not_run_frees_nothing(
    pipe: Driven,
) -> None:
    old = pipe.begin("a", max_tokens=1, row=2)
    pipe.save((2, old.generation))
    pipe.go()
    a = pipe.begin("a", row=2)
    pipe.ask(CommandKind.ABORT, id="a")
    for generation in (old.generation, a.generation + 1):
        pipe.save((2, generation), (3, 1), state=ACKNOWLEDGED)
        pipe.go()
        assert not pipe.is_back(a)
    pipe.save((2, a.generation), state=ACKNOWLEDGED)  # its row alone, outside of any batch
    pipe.go()
    assert pipe.is_back(a)


def test_a_growth_goes_before_a_new_submit(pipe: Driven) -> None:
    a = pipe.begin("a", num_blocks=4)
    b = pipe.begin("b", num_blocks=2, max_tokens=1)
    new = pipe.post_submit(tp.Request("new", [1], num_blocks=2), wait_s=FOR_EVER_S)
    pipe.tick()
    grow = pipe.post(CommandKind.GROW, id="a", num_blocks=2)
    pipe.save((b.row, b.generation))
    pipe.go()
    grown = pipe.take(grow)
    assert grown is not None
    assert sorted([*a.blocks, *grown.blocks]) == list(range(BLOCKS))
    assert pipe.take(new) is None


def test_a_growth_goes_before_a_new_submit_for_a_wanted_row(pipe: Driven) -> None:
    pipe.begin("a", num_blocks=3)
    pipe.begin("b", num_blocks=1)
    grow = pipe.post(CommandKind.GROW, id="a", num_blocks=3)  # 2 are free
    pipe.tick()
    new = pipe.post_submit(tp.Request("new", [1], num_blocks=2), row=3, wait_s=FOR_EVER_S)
    pipe.tick()
    assert pipe.take(grow) is None
    assert pipe.take(new) is None


def test_more_than_the_pool_has_is_refused_at_once(pipe: Driven) -> None:
    pipe.begin("a", num_blocks=4)
    answer = pipe.ask(CommandKind.GROW, FOR_EVER_S, id="a", num_blocks=3)
    assert answer.status is ReplyStatus.TOO_MANY_BLOCKS
    answer = pipe.ask(CommandKind.GROW, 0.0, id="a", num_blocks=1)
    assert answer.status is ReplyStatus.OK


def test_a_command_that_was_taken_back_is_not_done(pipe: Driven) -> None:
    """Its slot holds another one by now, which must get its own answer, and nobody else's row."""
    for i in range(ROWS):
        pipe.begin(f"r{i}", num_blocks=0)
    late = pipe.post_submit(tp.Request("late", [1], num_blocks=0), wait_s=FOR_EVER_S)
    pipe.tick()
    assert pipe.take(late) is None
    pipe.client.free(late)
    pipe.client.post(late, int(CommandKind.ABORT), deadline_s=pipe.clock.now, id="nobody")
    pipe.tick()
    assert pipe.client.reply(late)[0] == ReplyStatus.UNKNOWN
    assert pipe.resources.num_waiting == 0


@pytest.mark.parametrize("kind", [CommandKind.SUBMIT, CommandKind.GROW])
@pytest.mark.parametrize(("row", "generation"), [(0, 1), (1, 1), (1, 7), (ROWS, 1), (2**32 - 1, 9)])
def test_a_choice_that_nobody_logged_is_not_believed(
    pipe: Driven, kind: CommandKind, row: int, generation: int
) -> None:
    """A command's slot is the client's memory; its successor's coordinator reads it again."""
    pipe.begin("a", num_blocks=BLOCKS - 1)
    slot = pipe.post(kind, 0.0, id="b", prompt_tokens=1, num_blocks=BLOCKS)
    plan = pipe.config.plan()
    at = plan["commands"] + slot * plan["command_bytes"]
    head = np.frombuffer(pipe.segment.core_memory, DTYPES["COMMAND"], 1, at)[0]
    head["choice"] = row << 32 | generation
    pipe.restart_coordinator()
    pipe.tick()
    pipe.clock.now += 1
    pipe.tick()
    wanted = ReplyStatus.NO_FREE_ROW if kind == CommandKind.SUBMIT else ReplyStatus.UNKNOWN
    assert pipe.client.reply(slot)[0] == wanted
    assert pipe.resources.num_free_blocks == 1
    assert pipe.resources.num_live == 1


@pytest.mark.parametrize("kind", [0, max(CommandKind) + 1, 77, 2**31])
def test_an_unknown_kind_of_command_is_answered(pipe: Driven, kind: int) -> None:
    assert pipe.ask(kind, id="a").status is ReplyStatus.BAD_COMMAND
    assert pipe.begin("a").status is ReplyStatus.OK


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CommandKind.ABORT, {"id": "nobody"}),
        (CommandKind.PREEMPT, {"id": "nobody"}),
        (CommandKind.RESUME, {"id": "nobody"}),
        (CommandKind.GROW, {"id": "nobody", "num_blocks": 1}),
        (CommandKind.PREFILL_DONE, {"row": 0, "generation": 1}),
        (CommandKind.PREFILL_DONE, {"row": ROWS, "generation": 1}),
        (CommandKind.PREFILL_DONE, {"row": 2**32 - 1, "generation": 0}),
    ],
)
def test_a_command_for_nobody_is_answered(
    pipe: Driven, kind: CommandKind, fields: dict[str, Any]
) -> None:
    assert pipe.ask(kind, FOR_EVER_S, **fields).status is ReplyStatus.UNKNOWN
    pipe.check_all_is_free()


def test_an_id_is_free_exactly_after_its_final(pipe: Driven) -> None:
    a = pipe.begin("a")
    again = tp.Request("a", [1])
    slot = pipe.post_submit(again)
    pipe.tick()
    refused = pipe.take(slot)
    assert refused is not None
    assert refused.status is ReplyStatus.DUPLICATE
    pipe.ask(CommandKind.ABORT, id="a")  # marked; the decoder has not made the final yet
    slot = pipe.post_submit(again)
    pipe.tick()
    refused = pipe.take(slot)
    assert refused is not None
    assert refused.status is ReplyStatus.DUPLICATE
    pipe.go()
    assert not pipe.is_back(a)
    assert pipe.begin("a").row != a.row


def _two_rows_of_one_id(pipe: Driven, first_row: int) -> Answer:
    pipe.begin("same", row=first_row)
    pipe.ask(CommandKind.ABORT, id="same")
    pipe.go()
    return pipe.begin("same", row=3 - first_row)


@pytest.mark.parametrize("first_row", [1, 2])
def test_the_ids_of_a_successor_are_right(pipe: Driven, first_row: int) -> None:
    """An aborted request still waits for its acknowledgement; its id runs again in another row."""
    new = _two_rows_of_one_id(pipe, first_row)
    pipe.restart_coordinator()
    pipe.tick()
    answer = pipe.ask(CommandKind.ABORT, id="same")
    assert (answer.status, answer.row) == (ReplyStatus.OK, new.row)


@pytest.mark.parametrize("fuse", range(4))
def test_a_growth_is_done_once_whatever_dies(pipe: Driven, fuse: int) -> None:
    a = pipe.begin("a", num_blocks=1)
    slot = pipe.post(CommandKind.GROW, id="a", num_blocks=2)
    pipe.tick_and_die(fuse)
    grown = pipe.take(slot)
    assert grown is not None
    owned = [b for b, owner in enumerate(pipe.book.block_owners()) if owner[1]]
    assert owned == sorted([*a.blocks, *grown.blocks])


def test_prefill_done_outlives_the_coordinator() -> None:
    with Driven(role="prefill") as pipe:
        a = pipe.begin("a", disaggregate_info={})
        pipe.ask(CommandKind.PREFILL_DONE, row=a.row, generation=a.generation)
        pipe.restart_coordinator()
        pipe.save((a.row, a.generation))
        pipe.go()
        assert pipe.is_back(a)


@pytest.mark.parametrize(
    "kind",
    [
        CommandKind.ABORT,
        CommandKind.CLEAR,
    ],
)
@pytest.mark.parametrize("is_swept", [False, True])
def test_an_acknowledgement_counts_whatever_coordinator_sees_it(
    pipe: Driven, kind: CommandKind, is_swept: bool
) -> None:
    a = pipe.begin("a")
    pipe.ask(kind, id="a")
    assert kinds(pipe) == [(a.row, "abort")]
    if is_swept:
        pipe.go()  # the final is out, and the first coordinator has seen it
    pipe.save((a.row, a.generation), state=ACKNOWLEDGED)
    pipe.feed()
    for decoder in pipe.decoders:
        decoder.run(64, 0.0)
    pipe.restart_coordinator()
    pipe.go()
    assert pipe.is_back(a)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("again", [CommandKind.ABORT, CommandKind.CLEAR, CommandKind.PREEMPT])
def test_an_end_that_is_asked_for_again_does_not_pass_over_the_answer(
    pipe: Driven, again: CommandKind, is_replaced: bool
) -> None:
    """tests/protocol_model.py, asked_again: else the row would wait for its deadline."""
    a = pipe.begin("a")
    pipe.ask(CommandKind.ABORT, id="a")
    pipe.save((a.row, a.generation), state=ACKNOWLEDGED)  # saved, and not decoded yet
    if is_replaced:
        pipe.restart_coordinator()
    pipe.ask(again, id="a")
    pipe.go()
    assert pipe.is_back(a)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_row_whose_end_is_asked_for_is_not_resumed(pipe: Driven, is_replaced: bool) -> None:
    """tests/protocol_model.py, resumed_though_marked."""
    a = pipe.begin("a")
    pipe.ask(CommandKind.PREEMPT, id="a")
    pipe.acknowledge(a)
    pipe.ask(CommandKind.ABORT, id="a")  # marked; no decoder has seen it
    if is_replaced:
        pipe.restart_coordinator()
    assert pipe.ask(CommandKind.RESUME, id="a").status is ReplyStatus.UNKNOWN
    pipe.go()
    assert pipe.is_back(a)


def test_who_takes_over_tells_the_engine_of_an_error_that_a_decoder_found(pipe: Driven) -> None:
    a = pipe.begin("a")
    pipe.save((a.row, a.generation), positions=[7])  # a hole
    pipe.save((a.row, a.generation), state=ACKNOWLEDGED)  # nobody has asked
    pipe.feed()
    for decoder in pipe.decoders:
        decoder.run(64, 0.0)
    pipe.restart_coordinator()
    pipe.go()
    assert not pipe.is_back(a)
    assert kinds(pipe) == [(a.row, "abort")]
    pipe.acknowledge(a)
    assert pipe.is_back(a)


@pytest.mark.parametrize("fuse", range(10))
def test_a_submit_is_done_once_whatever_dies(pipe: Driven, fuse: int) -> None:
    request = tp.Request("a", [1], num_blocks=2)
    slot = pipe.post_submit(request, wait_s=FOR_EVER_S)
    pipe.tick_and_die(fuse)
    answer = pipe.take(slot)
    assert answer is not None
    assert (answer.status, answer.generation) == (ReplyStatus.OK, 1)
    owner = (answer.row, 1)
    assert [pipe.book.block_owners()[b] for b in answer.blocks] == [owner, owner]
    assert (pipe.resources.num_live, pipe.resources.num_free_blocks) == (1, BLOCKS - 2)


def test_a_decode_instance_delivers_nothing_from_behind_its_shield() -> None:
    with Driven(role="decode") as pipe:
        a = pipe.begin("a")
        pipe.ask(CommandKind.PREEMPT, id="a")
        pipe.save((a.row, a.generation))  # behind the shield, and the decoder lags
        pipe.ask(CommandKind.ABORT, id="a")
        assert [o.outputs.token_ids for o in pipe.go()] == [[]]


def test_waiting_submits_do_not_stop_an_abort() -> None:
    with Driven(command_slots=64) as pipe:
        names = [pipe.begin(f"r{i}") and f"r{i}" for i in range(ROWS)]
        pipe.clock.monotonic = real_time  # type: ignore[method-assign]
        is_over = threading.Event()

        def raise_if_gone() -> None:
            if is_over.is_set():
                raise tp.PipelineGoneError("test", "over")

        channel = CommandChannel(pipe.client, pipe.config.command_slots, raise_if_gone)

        def submit(i: int) -> None:
            with pytest.raises(tp.PipelineGoneError):
                channel.call(CommandKind.SUBMIT, None, id=f"w{i}", prompt_tokens=1)

        def serve() -> None:
            while not is_over.wait(0.001):
                pipe.tick()

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(300)]
        threads.append(threading.Thread(target=serve))
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: pipe.resources.num_waiting == pipe.config.command_slots - 8)
            for name in names:
                assert channel.call(CommandKind.ABORT, id=name).status is ReplyStatus.OK
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


def real_time() -> float:
    """The real clock, for what waits in real time."""
    return time.monotonic()


def test_the_warning_of_rows_taken_back_is_limited(
    pipe: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3 * ROWS):
        pipe.begin(f"r{i}")
        pipe.ask(CommandKind.ABORT, id=f"r{i}")
        pipe.go()
        pipe.clock.now += LIMIT_S
        pipe.go()
    lines = [r for r in caplog.records if "is taken back" in r.getMessage()]
    assert len(lines) == 2  # 12 rows in 60 s, a line every 30 s
    assert pipe.resources.totals.reclaimed_by_timeout == 3 * ROWS
