"""Models of the protocol of cuda_ops/: every interleaving and every death within small bounds.

`explore` walks a model breadth-first, so that the trace of a violation is a shortest one.
`Pipeline` is the protocol between writer, reader, decoders, coordinator and client; `Bell` is the
wait and the wake-up of ring.hpp under store buffers. A `Scenario` bounds a walk, and `bad` names
one deliberate mistake (BAD, BELL_BAD) that a walk must find.

One move is one store. Its label is the fault point that follows the store in the code (POINTS), or
a name of the model's own where the code has no point there (OWN). Private work and the loads before
a store belong to the move of that store, but for the places where the order of loads matters: an
engine looks at its control words before it saves, a decoder sees a slot before it loads admissions.

Left out of `Pipeline`: a second writer (it waits until a dead one is forgotten); weak memory order
and sleeping (`Bell` has the latter; here a wait is a guard on the level that it waits for); growth;
shields of a decode instance; prefill_done; drafts; bad input and slots that kill their decoder;
clear; the restart budget; a kill of whoever posts commands (only the reading half of a client
dies); the set of rows that a turn rewrites (here all rows of the decoder); loops without progress
(only a state in which nothing can move is judged). A deadline may pass at any time once its wait
has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

LENGTH, ABORT, ERROR, SHUTDOWN = "length", "abort", "error", "shutdown"
RUNNING, PREEMPTING, PREEMPTED = "running", "preempting", "preempted"
NEVER = 99

POINTS = frozenset(
    {
        *("writer.filled", "writer.published"),
        *("reader.filled", "reader.published", "reader.released"),
        *("decoder.polled", "decoder.loaded", "decoder.progress_written", "decoder.frame_written"),
        *("decoder.commit_written", "decoder.turn_stored", "decoder.released"),
        *("submit.choice_logged", "submit.blocks_owned", "submit.fields_stored"),
        *("submit.published", "submit.control_stored", "reply.fields_stored"),
        *("mark.from_stored", "mark.published", "preempt.phase_stored"),
        *("release.blocks_freed", "release.mark_cleared", "release.row_freed"),
        *("client.command_filled", "client.command_posted", "client.released"),
        "sleep",
    }
)
"""Labels of moves that are fault points of the code."""

OWN = {
    "engine.looked": "the engine's own: it has read its control words",
    "client.handed": "the caller has the frame: no store",
    "note.before": "first half of Book::note_acknowledged",
    "note.from": "second half of Book::note_acknowledged",
    "end.told": "the control word of an abort; nothing follows it but the reply",
    "preempt.told": "the control word of a preemption",
    "preempt.done": "Book::set_preempted: one store",
    "resume.told": "the control word of a resume",
    "resume.closed": "acknowledge_from of a resume",
    "resume.running": "the phase of a resume",
    "reply.done": "the state word of a command",
    "drain.begun": "the header's `accepting`",
    "writer.forgotten": "announce_writer(0)",
    "boot": "a successor has read the segment",
    "bell": "a move of Bell other than the sleep",
}
"""Labels of moves without a fault point, and what they are."""

NOT_MODELLED = {
    "reader.claimed": "a claim stores nothing",
    "reader.before_publish": "nothing that others read is stored between reader.filled and here",
    "client.before_release": "nothing is stored between the hand-over and here",
    "grow.blocks_owned": "growth is left out",
    "grow.chained": "growth is left out",
    **dict.fromkeys(
        ("reader.word_cleared", "reader.claim_stored", "reader.received", "barrier.number_stored"),
        "of a queue: queue_model.py",
    ),
    **dict.fromkeys(
        ("reader.barrier_cursor_stored", "reader.barrier_met"), "of a queue: queue_model.py"
    ),
}
"""Fault points that no move has, and why."""

BAD = {
    "turn_before_commit": "the turn word is stored before frame and commit record",
    "release_before_turn": "a slot is released before the turn word",
    "progress_in_place": "one copy of the progress instead of two",
    "freed_before_end": "a row is freed once its end is written, committed or not",
    "mark_before_from": "a mark is published before its from_sequence",
    "cursor_before_handing": "the client's cursor moves before the frame is handed out",
    "generation_before_fields": "a generation is published before the fields of its admission",
    "old_acknowledgement": "an acknowledgement counts that was saved before the engine was told",
    "forgotten_before_ended": "a dead writer is forgotten before its requests are marked",
    "forgotten_before_let_go": "a dead writer is forgotten before its rows are let go of",
    "asked_again": "an end that is asked for again does not count the answer to the first asking",
    "resumed_though_marked": "a row whose end is asked for already is resumed",
    "reply_before_generation": "submit is answered before the generation is published",
    "source_released_first": "the reader gives its step back before it has published the slot",
    "choice_not_logged": "a submit chooses its row without writing that down first",
}


class Violation(Exception):
    """A property does not hold."""


class Model(Protocol):
    """What `explore` walks. A state is a dict of hashable values, its keys always the same."""

    def start(self) -> dict[str, Any]: ...
    def moves(self, state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]: ...
    def deaths(self, state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]: ...
    def judge_end(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Walk:
    """What a walk found: `violation` is None when all was well; `labels` are the moves seen."""

    states: int
    ends: int
    labels: frozenset[str]
    violation: str | None = None
    trace: tuple[str, ...] = ()


def explore(model: Model, most_states: int = 5_000_000) -> Walk:
    """Walks every state of `model`; ends at the first violation. Raises MemoryError when there
    are more than `most_states`."""
    first = model.start()
    names = tuple(first)
    key = tuple(first.values())
    came_from: dict[Any, tuple[Any, str]] = {key: (None, "")}
    todo = deque([key])
    labels: set[str] = set()
    ends = 0

    def trace(at: Any) -> tuple[str, ...]:
        found = []
        while at is not None:
            at, label = came_from[at]
            found.append(label)
        return tuple(reversed(found[:-1]))

    while todo:
        key = todo.popleft()
        state = dict(zip(names, key, strict=True))
        has_moved = False
        try:
            for label, after in model.moves(state):
                has_moved = True
                labels.add(label)
                new = tuple(after.values())
                if new not in came_from:
                    came_from[new] = (key, label)
                    todo.append(new)
            for label, after in model.deaths(state):
                new = tuple(after.values())
                if new not in came_from:
                    came_from[new] = (key, label)
                    todo.append(new)
            if not has_moved:
                ends += 1
                model.judge_end(state)
        except Violation as e:
            return Walk(len(came_from), ends, frozenset(labels), str(e), trace(key))
        if len(came_from) > most_states:
            raise MemoryError(f"more than {most_states} states")
    return Walk(len(came_from), ends, frozenset(labels))


def swap(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    """Returns `values` with `value` in place i."""
    return (*values[:i], value, *values[i + 1 :])


@dataclass(frozen=True)
class Scenario:
    """Bounds of a walk of `Pipeline`."""

    lengths: tuple[int, ...] = (2,)
    """max_tokens of each request; they are submitted in this order."""
    surplus: int = 1
    """Tokens that the engine makes beyond that, if nobody tells it of the end."""
    rows: int = 1
    decoders: int = 1
    tokens_a_step: int = 2
    commands: tuple[str, ...] = ()
    """What the client asks for after request 0 is admitted: abort, preempt, resume, drain."""
    kills: int = 0
    killable: tuple[str, ...] = ("reader", "decoder", "coordinator")
    client_deaths: int = 0
    writer_dies: bool = False
    has_deadline: bool = True
    unasked: bool = False
    """The engine once says that it has let go of request 0 (state 3) before it has seen that
    anybody asks. Saved after the coordinator began to ask, it cannot be told from an answer; then
    the engine must mean it, and here it does."""
    slots: int = 2
    bad: str = ""


class Pipeline:
    """The protocol. Each method that yields is one party; it looks at `s` and never changes it."""

    def __init__(self, scenario: Scenario) -> None:
        self.of = scenario
        assert scenario.bad in ("", *BAD)
        turn = ["progress", "frame", "commit", "turn", "release"]
        if scenario.bad == "turn_before_commit":
            turn = ["progress", "turn", "frame", "commit", "release"]
        elif scenario.bad == "release_before_turn":
            turn = ["progress", "frame", "commit", "release", "turn"]
        self.turn = tuple(turn)

    def start(self) -> dict[str, Any]:
        o = self.of
        rows, decoders, requests = o.rows, o.decoders, len(o.lengths)
        return {
            # the source segment
            "published": 0,
            "source_released": 0,
            "source": (None,) * o.slots,
            "control": ((0, frozenset()),) * rows,
            "writer_pid": True,
            # the ring: a slot is (source sequence, step)
            "cursor": 0,
            "ring": (None,) * o.slots,
            "released": (0,) * decoders,
            # decoders: progress is (generation, emitted, terminal, acknowledgements)
            "turn": (0,) * decoders,
            "progress": (((0, 0, None, 0),) * rows,) * 2,
            "commit": (((0, 0, 0, 0),) * decoders,) * 2,  # slots, frames, next source, dropped
            "frames": ((None,) * o.slots,) * decoders,
            "output_released": (0,) * decoders,
            # the coordinator's words: fields are (max_tokens, from_sequence, request)
            "admitted": (0,) * rows,
            "fields": ((0, 0, None),) * rows,
            "freed": (0,) * rows,
            "block": (0,) * rows,
            "mark": ((0, None),) * rows,
            "mark_from": (0,) * rows,
            "before": (0,) * rows,
            "ack_from": (NEVER,) * rows,
            "phase": (RUNNING,) * rows,
            "accepting": True,
            # commands: (state, choice, reply); the client's other commands one after the other
            "submits": (("free", None, None),) * requests,
            "command": (0, "free"),
            # what each party knows by itself
            "engine": None,
            "reader": ("boot",),
            "decoder": (("boot",),) * decoders,
            "coordinator": (("boot",),),
            "in_hand": (False,) * decoders,
            # what only the properties look at
            "made": (0,) * requests,  # tokens that the engine has made; -1 - n: stopped after n
            "let_go": (False,) * requests,
            "has_unasked": False,
            "saved": ((),) * requests,  # the source sequence of each token
            "got": (0,) * requests,
            "final": (None,) * requests,
            "ended_from": (None,) * requests,
            "overdue": (False,) * requests,
            "last_frame": ((-1, None),) * decoders,
            "kills": o.kills,
            "client_deaths": o.client_deaths,
        }

    def moves(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self.writer(s)
        yield from self.reader(s)
        for k in range(self.of.decoders):
            yield from self.decoder(s, k)
            yield from self.client_reads(s, k)
        yield from self.coordinator(s)
        yield from self.client_asks(s)

    def deaths(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        o = self.of
        if s["kills"]:
            left = s["kills"] - 1
            if "reader" in o.killable and s["reader"] != ("boot",):
                yield "kill reader", s | {"reader": ("boot",), "kills": left}
            if "coordinator" in o.killable and s["coordinator"] != (("boot",),):
                yield "kill coordinator", s | {"coordinator": (("boot",),), "kills": left}
            for k, known in enumerate(s["decoder"]):
                if "decoder" in o.killable and known != ("boot",):
                    after = swap(s["decoder"], k, ("boot",))
                    yield f"kill decoder {k}", s | {"decoder": after, "kills": left}
        if s["client_deaths"]:
            left = s["client_deaths"] - 1
            yield "kill client", s | {"in_hand": (False,) * o.decoders, "client_deaths": left}
        # Who submits to a pipeline without a writer waits for the next one, so it dies after that.
        is_submitted = all(state == "done" for state, _, _ in s["submits"])
        if o.writer_dies and s["engine"] != "dead" and is_submitted:
            yield "kill writer", s | {"engine": "dead"}

    # ---------------------------------------------------------------- engine and reader

    def row_of(self, s: dict[str, Any], r: int) -> tuple[int, int] | None:
        """(row, generation) that the engine got for request r with the reply to its submit."""
        state, _, reply = s["submits"][r]
        return reply if state == "done" else None

    def writer(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        step = s["engine"]
        if step == "dead":
            return
        if step is None:
            if s["published"] - s["source_released"] < self.of.slots:
                yield from self.engine_looks(s)
            return
        at = s["published"]
        if step[0] == "step":
            source = swap(s["source"], at % self.of.slots, step[1])
            yield "writer.filled", s | {"source": source, "engine": ("filled", step[1])}
            return
        saved, let_go = s["saved"], s["let_go"]
        for r, row, _, state, _, n in step[1]:
            saved = swap(saved, r, saved[r] + (at,) * n)
            if state == "let go" or (state == "unasked" and s["ack_from"][row] <= at):
                let_go = swap(let_go, r, True)
        after = {"published": at + 1, "engine": None, "saved": saved, "let_go": let_go}
        yield "writer.published", s | after

    def engine_looks(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The next step: of each request its next tokens, or once that it was let go of."""
        rows, made = [], s["made"]
        is_unasked = False
        for r, length in enumerate(self.of.lengths):
            place = self.row_of(s, r)
            if place is None:
                continue
            generation, bits = s["control"][place[0]]
            is_mine = generation == place[1]
            asked = is_mine and ("abort" in bits or "preempt" in bits)
            is_news = not s["let_go"][r] if "abort" in bits else made[r] >= 0
            if asked and "finished" not in bits and is_news:
                rows.append((r, *place, "let go" if "abort" in bits else "paused", 0, 0))
                if made[r] >= 0:
                    made = swap(made, r, -1 - made[r])
            elif is_mine and not bits and made[r] < 0 and not s["let_go"][r]:
                made = swap(made, r, -1 - made[r])  # resumed
            if made[r] < 0 or (is_mine and bits) or s["let_go"][r]:
                continue
            if self.of.unasked and not s["has_unasked"] and r == 0:
                rows.append((r, *place, "unasked", 0, 0))
                is_unasked = True
                continue
            n = min(self.of.tokens_a_step, length + self.of.surplus - made[r])
            if n > 0:
                rows.append((r, *place, "token", made[r], n))
                made = swap(made, r, made[r] + n)
        if rows or made != s["made"]:
            step = ("step", tuple(rows)) if rows else None
            flag = s["has_unasked"] or is_unasked
            yield "engine.looked", s | {"engine": step, "made": made, "has_unasked": flag}

    def reader(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        o, at = self.of, s["cursor"]
        pc = s["reader"]
        if pc == ("boot",):
            last = s["ring"][(at - 1) % o.slots] if at else None
            skip = max(s["source_released"], last[0] + 1 if last else 0)
            label = "boot" if skip == s["source_released"] else "reader.released"
            yield label, s | {"reader": ("idle",), "source_released": skip}
        elif pc == ("idle",):
            mine = s["source_released"]
            if at - min(s["released"]) < o.slots and mine < s["published"]:
                for k in range(o.decoders):
                    if self.committed(s, k)[0] <= at - o.slots:
                        raise Violation(f"slot {at - o.slots} is overwritten, decoder {k} needs it")
                ring = swap(s["ring"], at % o.slots, (mine, s["source"][mine % o.slots]))
                yield "reader.filled", s | {"ring": ring, "reader": ("filled", mine)}
        elif (pc[0] == "filled") != (o.bad == "source_released_first"):
            after = ("published", pc[1]) if pc[0] == "filled" else ("idle",)
            yield "reader.published", s | {"cursor": at + 1, "reader": after}
        else:
            after = ("idle",) if pc[0] == "published" else ("filled first", pc[1])
            yield "reader.released", s | {"source_released": pc[1] + 1, "reader": after}

    # ---------------------------------------------------------------- decoders

    def committed(self, s: dict[str, Any], k: int) -> tuple[int, int, int, int]:
        found: tuple[int, int, int, int] = s["commit"][s["turn"][k] & 1][k]
        return found

    def progress(self, s: dict[str, Any], row: int) -> tuple[int, int, str | None, int]:
        """What the owning decoder has committed of a row."""
        found: tuple[int, int, str | None, int]
        found = s["progress"][s["turn"][row % self.of.decoders] & 1][row]
        return found

    def mark_at(self, s: dict[str, Any], row: int, at: int) -> str | None:
        """The mark that ends the row's generation at source sequence `at`."""
        generation, reason = s["mark"][row]
        if generation != s["admitted"][row] or at < s["mark_from"][row]:
            return None
        known = self.progress(s, row)
        return None if known[0] == generation and known[2] else reason

    def decoder(self, s: dict[str, Any], k: int) -> Iterator[tuple[str, dict[str, Any]]]:
        o, me = self.of, s["decoder"][k]
        rows = range(k, o.rows, o.decoders)
        commit = self.committed(s, k)

        def become(state: Any) -> tuple[Any, ...]:
            return swap(s["decoder"], k, state)

        if me == ("boot",):
            released = swap(s["released"], k, commit[0])
            idle = ("idle", ((0, 0, 0, None),) * o.rows)
            yield "boot", s | {"released": released, "decoder": become(idle)}
        elif me[0] == "idle":
            has_slot = s["cursor"] > commit[0]
            has_mark = any(s["admitted"][r] and self.mark_at(s, r, commit[2]) for r in rows)
            if commit[1] - s["output_released"][k] < o.slots and (has_slot or has_mark):
                yield "decoder.polled", s | {"decoder": become(("polled", me[1], has_slot))}
        elif me[0] == "polled":
            known, turn = self.take_turn(s, k, me[1], me[2])
            yield "decoder.loaded", s | {"decoder": become(("turn", known, turn, 0))}
        else:
            _, known, turn, pc = me
            after = ("turn", known, turn, pc + 1)
            if pc + 1 == len(self.turn):
                after = ("idle", known)
            yield self.store(s | {"decoder": become(after)}, k, turn, self.turn[pc])

    def store(
        self, s: dict[str, Any], k: int, turn: tuple[Any, ...], what: str
    ) -> tuple[str, dict[str, Any]]:
        """One store of a turn; `s` is this move's own."""
        number, progress, frame, commit = turn
        copy = number & 1
        if what == "progress":
            if self.of.bad == "progress_in_place":
                copy ^= 1
            rows = s["progress"][copy]
            for row, state in progress:
                rows = swap(rows, row, state)
            s["progress"] = swap(s["progress"], copy, rows)
            if self.of.bad == "progress_in_place":
                s["progress"] = (rows, rows)
            return "decoder.progress_written", s
        if what == "frame":
            if frame is not None:
                frames = swap(s["frames"][k], frame[0] % self.of.slots, frame)
                s["frames"] = swap(s["frames"], k, frames)
            return "decoder.frame_written", s
        if what == "commit":
            s["commit"] = swap(s["commit"], copy, swap(s["commit"][copy], k, commit))
            return "decoder.commit_written", s
        if what == "turn":
            s["turn"] = swap(s["turn"], k, number)
            return "decoder.turn_stored", s
        s["released"] = swap(s["released"], k, commit[0])
        return "decoder.released", s

    def take_turn(
        self, s: dict[str, Any], k: int, known: tuple[Any, ...], has_slot: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What a turn will store: (its number, progress, frame, commit record)."""
        o = self.of
        rows = range(k, o.rows, o.decoders)
        slots, frames, source, dropped = self.committed(s, k)
        at, step = s["ring"][slots % o.slots] if has_slot else (source, ())
        state, marks, out = {}, {}, []
        for row in rows:
            generation = s["admitted"][row]
            if generation != known[row][0]:
                known = swap(known, row, (generation, *s["fields"][row]))
            state[row] = self.progress(s, row)
            if state[row][0] != generation:
                state[row] = (generation, 0, None, 0)
            marks[row] = self.mark_at(s, row, at) if generation else None
        for _, row, generation, kind, first, n in step:
            if row not in state:
                continue
            mine, most, from_sequence, request = known[row]
            if generation > mine or (generation == mine and at < from_sequence):
                raise Violation(f"a token of row {row} came before its admission was seen")
            g, emitted, terminal, acknowledged = state[row]
            if generation < mine:
                dropped += n
            elif kind != "token":
                if at >= s["ack_from"][row] or o.bad == "old_acknowledgement":
                    state[row] = (g, emitted, terminal, acknowledged + 1)
            elif terminal or marks[row]:
                dropped += n
            else:
                taken = min(n, most - emitted)
                dropped += n - taken
                terminal = LENGTH if emitted + taken >= most else None
                out.append((request, emitted, first, taken, terminal))
                state[row] = (g, emitted + taken, terminal, acknowledged)
        for row, reason in marks.items():
            if reason and not state[row][2]:
                g, emitted, _, acknowledged = state[row]
                out.append((known[row][3], emitted, emitted, 0, reason))
                state[row] = (g, emitted, reason, acknowledged)
        frame = (frames, tuple(out)) if out else None
        commit = (slots + has_slot, frames + bool(out), at + 1 if has_slot else source, dropped)
        return known, (s["turn"][k] + 1, tuple(state.items()), frame, commit)

    # ---------------------------------------------------------------- client

    def client_reads(self, s: dict[str, Any], k: int) -> Iterator[tuple[str, dict[str, Any]]]:
        at, early = s["output_released"][k], self.of.bad == "cursor_before_handing"
        has_frame = self.committed(s, k)[1] != at
        in_hand = s["in_hand"][k]
        released = {"output_released": swap(s["output_released"], k, at + 1)}
        if early:
            if in_hand:
                yield "client.handed", self.hand_out(s, k, at - 1, False)
            elif has_frame:
                yield "client.released", s | released | {"in_hand": swap(s["in_hand"], k, True)}
        elif in_hand:
            yield "client.released", s | released | {"in_hand": swap(s["in_hand"], k, False)}
        elif has_frame:
            yield "client.handed", self.hand_out(s, k, at, True)

    def hand_out(self, s: dict[str, Any], k: int, at: int, in_hand: bool) -> dict[str, Any]:
        """The caller gets frame `at`: for a second time only the very frame that a dead client
        had in hand."""
        frame = s["frames"][k][at % self.of.slots]
        after = s | {"in_hand": swap(s["in_hand"], k, in_hand)}
        number, last = s["last_frame"][k]
        if frame is None or frame[0] != at:
            raise Violation(f"frame {at} of decoder {k} is not written")
        if at == number:
            if frame != last:
                raise Violation(f"frame {at} of decoder {k} has changed in the client's hand")
            return after
        if at != number + 1:
            raise Violation(f"frame {number + 1} of decoder {k} was never handed out")
        got, final = s["got"], s["final"]
        for r, send_idx, first, n, terminal in frame[1]:
            if final[r]:
                raise Violation(f"request {r} goes on after its final")
            if send_idx != got[r] or first != got[r]:
                raise Violation(f"request {r}: token {first} comes at {got[r]}")
            got = swap(got, r, got[r] + n)
            final = swap(final, r, terminal)
        last_frame = swap(s["last_frame"], k, (at, frame))
        return after | {"got": got, "final": final, "last_frame": last_frame}

    def client_asks(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Submits one request after the other; the other commands once request 0 has a row."""
        for r, (state, _, _) in enumerate(s["submits"]):
            if state == "free":
                after = swap(s["submits"], r, ("filled", None, None))
                yield "client.command_filled", s | {"submits": after}
            elif state == "filled":
                after = swap(s["submits"], r, ("posted", None, None))
                yield "client.command_posted", s | {"submits": after}
            if state not in ("done", "refused"):
                break
        i, state = s["command"]
        if i < len(self.of.commands) and self.row_of(s, 0):
            if state == "free":
                yield "client.command_filled", s | {"command": (i, "filled")}
            elif state == "filled":
                yield "client.command_posted", s | {"command": (i, "posted")}

    # ---------------------------------------------------------------- coordinator

    def coordinator(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Idle, it begins any job that can be done; a job is the list of its stores."""
        jobs = s["coordinator"]
        if jobs == (("boot",),):
            yield "boot", s | {"coordinator": self.rebuild(s)}
        elif jobs:
            yield self.do(s | {"coordinator": jobs[1:]}, *jobs[0])
        else:
            for job in self.jobs(s):
                yield self.do(s | {"coordinator": tuple(job[1:])}, *job[0])

    def rebuild(self, s: dict[str, Any]) -> tuple[Any, ...]:
        """What a successor does before anything else: preemptions again, the logged submit."""
        todo: list[Any] = []
        for row, phase in enumerate(s["phase"]):
            generation = s["admitted"][row]
            is_told = "preempt" in s["control"][row][1]
            if generation != s["freed"][row] and phase == PREEMPTING and not is_told:
                todo.append(("ack_from", row))
                todo.append(("told", "preempt.told", row, generation, "preempt"))
        for r, (state, choice, _) in enumerate(s["submits"]):
            if state == "posted" and choice:
                row, generation = choice
                if s["admitted"][row] == generation and s["fields"][row][2] == r:
                    todo += [("open", row, generation), *self.reply(r, choice)]
                else:
                    todo += self.admission(r, choice)
        return tuple(todo)

    def reply(self, r: int, place: tuple[int, int]) -> list[Any]:
        return [("reply_fields", r, place), ("reply", r, "done")]

    def admission(self, r: int, place: tuple[int, int]) -> list[Any]:
        row, generation = place
        own, fields = ("own", row, generation), ("fields", row, r)
        publish, control = ("publish", row, generation), ("open", row, generation)
        if self.of.bad == "generation_before_fields":
            return [own, publish, fields, control, *self.reply(r, place)]
        if self.of.bad == "reply_before_generation":
            return [own, fields, control, *self.reply(r, place), publish]
        return [own, fields, publish, control, *self.reply(r, place)]

    def ending(self, s: dict[str, Any], row: int, reason: str) -> list[Any]:
        generation = s["admitted"][row]
        known = self.progress(s, row)
        todo: list[Any] = []
        is_marked = s["mark"][row][0] == generation
        if s["phase"][row] == RUNNING and (not is_marked or self.of.bad == "asked_again"):
            before = known[3] if known[0] == generation else 0
            todo += [("before", row, before), ("ack_from", row)]
        if not is_marked:
            todo += [("mark_from", row), ("mark", row, generation, reason)]
            if self.of.bad == "mark_before_from":
                todo[-2:] = reversed(todo[-2:])
        return [*todo, ("told", "end.told", row, generation, "abort")]

    def jobs(self, s: dict[str, Any]) -> Iterator[list[Any]]:
        o = self.of
        running = []
        for row in range(o.rows):
            generation = s["admitted"][row]
            if generation == s["freed"][row]:
                continue
            known = self.progress(s, row)
            if o.bad == "freed_before_end":
                known = s["progress"][s["turn"][row % o.decoders] + 1 & 1][row]
            if known[0] != generation:
                known = (generation, 0, None, 0)
            has_let_go = known[3] > s["before"][row]
            if s["phase"][row] == PREEMPTING:
                if has_let_go:
                    yield [("phase", "preempt.done", row, PREEMPTED)]
                elif o.has_deadline and not known[2] and s["mark"][row][0] != generation:
                    yield self.ending(s, row, ERROR)
            is_slow = known[2] in (ABORT, ERROR)
            if is_slow and "abort" not in s["control"][row][1]:
                yield [("told", "end.told", row, generation, "abort")]  # the mark's maker died
            elif known[2]:
                is_done = not is_slow or has_let_go or s["phase"][row] == PREEMPTED
                if is_done or o.has_deadline:
                    release = [("disown", row), ("unmark", row, generation)]
                    yield [*release, ("free", row, generation, is_done)]
            elif s["mark"][row][0] != generation:
                running.append(row)
        yield from self.submit_jobs(s)
        if running and not s["accepting"]:
            yield [op for row in running for op in self.ending(s, row, SHUTDOWN)]
        if s["engine"] == "dead" and s["writer_pid"] and self.is_drained(s):
            held = [row for row in range(o.rows) if s["admitted"][row] != s["freed"][row]]
            let_go = [("phase", "preempt.done", row, PREEMPTED) for row in held]
            as_let_go = s | {"phase": (PREEMPTED,) * o.rows}
            marks = [op for row in running for op in self.ending(as_let_go, row, ERROR)]
            if o.bad == "forgotten_before_ended":
                yield [*let_go, ("forget",), *marks]
            elif o.bad == "forgotten_before_let_go":
                yield [*marks, ("forget",), *let_go]
            else:
                yield [*let_go, *marks, ("forget",)]
        if s["command"][1] == "posted":
            yield from self.command_jobs(s, o.commands[s["command"][0]])

    def is_drained(self, s: dict[str, Any]) -> bool:
        return all(self.committed(s, k)[2] >= s["published"] for k in range(self.of.decoders))

    def submit_jobs(self, s: dict[str, Any]) -> Iterator[list[Any]]:
        for r, (state, choice, _) in enumerate(s["submits"]):
            if state != "posted" or choice:
                continue
            if not s["accepting"]:
                yield [("reply", r, "refused")]
                continue
            free = [row for row in range(self.of.rows) if s["admitted"][row] == s["freed"][row]]
            if free:
                place = (free[0], s["admitted"][free[0]] + 1)
                log = [] if self.of.bad == "choice_not_logged" else [("choose", r, place)]
                yield [*log, *self.admission(r, place)]

    def command_jobs(self, s: dict[str, Any], kind: str) -> Iterator[list[Any]]:
        row, generation = s["submits"][0][2]
        answer = ("answer",)
        known = self.progress(s, row)
        is_running = s["admitted"][row] == generation != s["freed"][row]
        is_marked, o_bad = s["mark"][row][0] == generation, self.of.bad
        if kind == "drain":
            yield [("drain",), answer]
        elif not is_running or (known[0] == generation and known[2]):
            yield [answer]  # unknown: it has ended
        elif kind == "abort":
            yield [*self.ending(s, row, ABORT), answer]
        elif kind == "preempt" and s["phase"][row] == RUNNING:
            before = known[3] if known[0] == generation else 0
            note = [("before", row, before), ("ack_from", row)]
            phase = ("phase", "preempt.phase_stored", row, PREEMPTING)
            yield [*note, phase, ("told", "preempt.told", row, generation, "preempt"), answer]
        elif kind == "resume" and is_marked and o_bad != "resumed_though_marked":
            yield [answer]  # its end is asked for: it does not run again
        elif kind == "resume" and s["phase"][row] != PREEMPTING:
            running = ("phase", "resume.running", row, RUNNING)
            yield [("untold", row, generation), ("close", row), running, answer]
        elif kind == "preempt":
            yield [answer]

    def do(self, s: dict[str, Any], op: str, *a: Any) -> tuple[str, dict[str, Any]]:
        """One store of a job; `s` is this move's own."""
        return getattr(self, "do_" + op)(s, *a)  # type: ignore[no-any-return]

    def do_choose(self, s: dict[str, Any], r: int, place: tuple[int, int]) -> Any:
        s["submits"] = swap(s["submits"], r, ("posted", place, None))
        return "submit.choice_logged", s

    def do_own(self, s: dict[str, Any], row: int, generation: int) -> Any:
        if s["block"][row] not in (0, generation):
            raise Violation(f"the block of row {row} is given out twice")
        s["block"] = swap(s["block"], row, generation)
        return "submit.blocks_owned", s

    def do_fields(self, s: dict[str, Any], row: int, r: int) -> Any:
        s["fields"] = swap(s["fields"], row, (self.of.lengths[r], s["published"], r))
        for name, value in (("before", 0), ("ack_from", NEVER), ("phase", RUNNING)):
            s[name] = swap(s[name], row, value)
        return "submit.fields_stored", s

    def do_publish(self, s: dict[str, Any], row: int, generation: int) -> Any:
        if s["admitted"][row] != generation - 1 or s["freed"][row] != generation - 1:
            raise Violation(f"row {row} is given out while it is not free")
        s["admitted"] = swap(s["admitted"], row, generation)
        return "submit.published", s

    def do_open(self, s: dict[str, Any], row: int, generation: int) -> Any:
        if s["control"][row][0] < generation:
            s["control"] = swap(s["control"], row, (generation, frozenset()))
        return "submit.control_stored", s

    def do_reply_fields(self, s: dict[str, Any], r: int, place: tuple[int, int]) -> Any:
        s["submits"] = swap(s["submits"], r, (*s["submits"][r][:2], place))
        return "reply.fields_stored", s

    def do_reply(self, s: dict[str, Any], r: int, state: str) -> Any:
        s["submits"] = swap(s["submits"], r, (state, *s["submits"][r][1:]))
        return "reply.done", s

    def do_answer(self, s: dict[str, Any]) -> Any:
        s["command"] = (s["command"][0] + 1, "free")
        return "reply.done", s

    def do_before(self, s: dict[str, Any], row: int, before: int) -> Any:
        s["before"] = swap(s["before"], row, before)
        return "note.before", s

    def do_ack_from(self, s: dict[str, Any], row: int) -> Any:
        s["ack_from"] = swap(s["ack_from"], row, s["published"])
        return "note.from", s

    def do_mark_from(self, s: dict[str, Any], row: int) -> Any:
        request = s["fields"][row][2]
        s["mark_from"] = swap(s["mark_from"], row, s["published"])
        s["ended_from"] = swap(s["ended_from"], request, s["published"])
        return "mark.from_stored", s

    def do_mark(self, s: dict[str, Any], row: int, generation: int, reason: str) -> Any:
        s["mark"] = swap(s["mark"], row, (generation, reason))
        return "mark.published", s

    def do_told(self, s: dict[str, Any], label: str, row: int, generation: int, bit: str) -> Any:
        known, bits = s["control"][row]
        if known == generation:
            s["control"] = swap(s["control"], row, (known, bits | {bit}))
        return label, s

    def do_untold(self, s: dict[str, Any], row: int, generation: int) -> Any:
        known, bits = s["control"][row]
        if known == generation:
            s["control"] = swap(s["control"], row, (known, bits - {"preempt"}))
        return "resume.told", s

    def do_close(self, s: dict[str, Any], row: int) -> Any:
        s["ack_from"] = swap(s["ack_from"], row, NEVER)
        return "resume.closed", s

    def do_phase(self, s: dict[str, Any], label: str, row: int, phase: str) -> Any:
        s["phase"] = swap(s["phase"], row, phase)
        return label, s

    def do_disown(self, s: dict[str, Any], row: int) -> Any:
        s["block"] = swap(s["block"], row, 0)
        return "release.blocks_freed", s

    def do_unmark(self, s: dict[str, Any], row: int, generation: int) -> Any:
        self.do_told(s, "", row, generation, "finished")
        s["mark"] = swap(s["mark"], row, (0, None))
        return "release.mark_cleared", s

    def do_free(self, s: dict[str, Any], row: int, generation: int, is_acknowledged: bool) -> Any:
        if s["freed"][row] != generation - 1 or s["admitted"][row] != generation:
            raise Violation(f"row {row} is freed twice")
        known, request = self.progress(s, row), s["fields"][row][2]
        if known[0] != generation or not known[2]:
            raise Violation(f"row {row} is freed before its end is committed")
        is_away = s["let_go"][request] or s["made"][request] < 0 or s["engine"] == "dead"
        if known[2] in (ABORT, ERROR) and is_acknowledged and not is_away:
            raise Violation(f"row {row} is freed while the engine still runs it")
        s["freed"] = swap(s["freed"], row, generation)
        return "release.row_freed", s

    def do_drain(self, s: dict[str, Any]) -> Any:
        s["accepting"] = False
        return "drain.begun", s

    def do_forget(self, s: dict[str, Any]) -> Any:
        s["writer_pid"] = False
        return "writer.forgotten", s

    # ---------------------------------------------------------------- when nothing can move

    def judge_end(self, s: dict[str, Any]) -> None:
        """Everything asked for is done, every token delivered or dropped, every row back."""
        if s["command"][0] != len(self.of.commands) and self.row_of(s, 0):
            raise Violation(f"command {s['command']} is never answered")
        for r, (state, _, _) in enumerate(s["submits"]):
            if state not in ("done", "refused"):
                raise Violation(f"the submit of request {r} is never answered")
            if state == "refused":
                continue
            if not s["final"][r]:
                raise Violation(f"request {r} has no final")
            if s["final"][r] == LENGTH and s["got"][r] != self.of.lengths[r]:
                raise Violation(f"request {r} ends with {s['got'][r]} tokens")
            owed = sum(at < s["ended_from"][r] for at in s["saved"][r]) if s["ended_from"][r] else 0
            if s["final"][r] != LENGTH and s["got"][r] != owed:
                raise Violation(f"request {r}: {owed} tokens are from before its mark")
        if s["freed"] != s["admitted"] or any(s["block"]):
            raise Violation("a row or a block never comes back")
        saved = sum(len(tokens) for tokens in s["saved"])
        dropped = sum(self.committed(s, k)[3] for k in range(self.of.decoders))
        if saved != sum(s["got"]) + dropped:
            raise Violation(f"{saved} tokens saved, {sum(s['got'])} delivered, {dropped} dropped")


# -------------------------------------------------------------------- the bell

BELL_BAD = {
    "no_sleeper_fence": "the sleeper's announcement may stay in its store buffer",
    "no_waker_fence": "the waker's word may stay in its store buffer while it looks",
    "no_recheck": "the sleeper does not look again after its announcement",
}


class Bell:
    """wait_for() and ring_bell() of atomics.hpp: one sleeper, one waker that publishes `words`.

    Stores go through a first-in first-out buffer of their thread, which may empty at any time
    (total store order). A seq_cst store is a store and a fence, a read-modify-write empties the
    buffer first, and so does a system call. Each thread sees its own buffered stores. Left out:
    the time limit of a sleep, which hides a lost wake-up but for its length; spinning; signals.
    """

    def __init__(self, words: int = 2, bad: str = "") -> None:
        assert bad in ("", *BELL_BAD)
        self.words, self.bad = words, bad

    def start(self) -> dict[str, Any]:
        return {
            "published": 0,
            "waiting": 0,
            "bell": 0,
            "sleeper": "look",
            "taken": 0,
            "seen": 0,
            "waker": "store",
            "sent": 0,
            "sleeper_buffer": (),
            "waker_buffer": (),
        }

    def deaths(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter(())

    def moves(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for who in ("sleeper_buffer", "waker_buffer"):
            if s[who]:
                (name, value), *rest = s[who]
                yield "bell", s | {name: value, who: tuple(rest)}
        yield from self.sleeper(s)
        yield from self.waker(s)

    def sleeper(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        pc, is_ready = s["sleeper"], s["published"] > s["taken"]
        buffer = s["sleeper_buffer"]
        if pc == "look" and is_ready:
            yield "bell", s | {"taken": s["taken"] + 1}
        elif pc == "look" and s["taken"] < self.words:
            yield "bell", s | {"sleeper": "announce"}
        elif pc == "announce":
            fence = "note" if self.bad == "no_sleeper_fence" else "fence"
            yield "bell", s | {"sleeper": fence, "sleeper_buffer": (*buffer, ("waiting", 1))}
        elif pc == "fence" and not buffer:
            yield "bell", s | {"sleeper": "note"}
        elif pc == "note":
            after = "sleep" if self.bad == "no_recheck" else "recheck"
            yield "bell", s | {"sleeper": after, "seen": s["bell"]}
        elif pc == "recheck":
            yield "bell", s | {"sleeper": "calm" if is_ready else "sleep"}
        elif pc == "sleep":
            # The futex compares with the memory's word, under a lock that a wake takes too. Its
            # entry fences nothing that the waker's earlier look could still see.
            yield "sleep", s | {"sleeper": "asleep" if s["bell"] == s["seen"] else "announce"}
        elif pc == "calm":
            yield "bell", s | {"sleeper": "look", "sleeper_buffer": (*buffer, ("waiting", 0))}

    def waker(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        pc, buffer = s["waker"], s["waker_buffer"]
        if pc == "store" and s["sent"] < self.words:
            fence = "peek" if self.bad == "no_waker_fence" else "fence"
            after = {"waker": fence, "sent": s["sent"] + 1}
            yield "bell", s | after | {"waker_buffer": (*buffer, ("published", s["sent"] + 1))}
        elif pc == "fence" and not buffer:
            yield "bell", s | {"waker": "peek"}
        elif pc == "peek":
            yield "bell", s | {"waker": "count" if s["waiting"] else "store"}
        elif pc == "count" and not buffer:
            yield "bell", s | {"bell": s["bell"] + 1, "waker": "wake"}
        elif pc == "wake":
            after = {"sleeper": "announce"} if s["sleeper"] == "asleep" else {}
            yield "bell", s | {"waker": "store"} | after

    def judge_end(self, s: dict[str, Any]) -> None:
        """Nothing can move: then everything is taken."""
        if s["taken"] != self.words:
            raise Violation(f"asleep with {s['published'] - s['taken']} words there")
