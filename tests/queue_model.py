"""A model of the System V source (cuda_ops/sysv_source.hpp), walked as protocol_model.py is: the
message that a dead reader had in hand, and the barrier behind which an admission begins.

One row. Until submit begins the worker may send tokens that are nobody's: of a run before, or of a
request whose row was taken back by a deadline. (One that it sends meanwhile cannot be told from the
newcomer's: that is what the quarantine of such rows is for.) Once submit has returned it sends the
newcomer's. SIGKILL of reader and coordinator before and after every store; msgrcv takes a
message whole or not at all.

Left out: the decoder's turn and everything else that `Pipeline` has (a slot is decoded at once
here); a queue that is full of barriers; one that is removed; a second reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol_model import Violation, swap

POINTS = frozenset(
    {
        *("reader.word_cleared", "reader.claim_stored", "reader.received", "reader.published"),
        *("reader.barrier_cursor_stored", "reader.barrier_met", "barrier.number_stored"),
        *("submit.choice_logged", "submit.published"),
    }
)
"""Labels of moves that are fault points of the code."""

OWN = {
    "worker": "msgsnd of the worker",
    "barrier.sent": "msgsnd of the barrier: a system call, no store of ours",
    "barrier.let_go": "the word of a barrier that was met is cleared",
    "decoder": "one slot decoded and released",
    "reply": "the reply of submit",
    "boot": "a successor has read the segment",
}

BAD = {
    "no_claim": "a successor publishes whatever a slot that is free holds",
    "word_not_cleared": "the slot's old message-type word is left in place",
    "claim_before_clear": "the claim is stored before the word is cleared",
    "number_after_send": "a barrier is sent before its number is stored",
    "let_go_first": "a barrier's word is cleared before its number is stored as met",
    "barrier_after_reply": "submit is answered before its barrier is sent",
    "from_cursor": "an admission begins at the ring's cursor instead of behind a barrier",
    "choice_without_barrier": "the logged choice does not say which barrier it stands behind",
}

SLOTS = 2
BARRIER = 100
"""A message above it is the barrier of that number; 1, 2 ... are the newcomer's tokens, -1, -2 ...
nobody's."""


class Queue:
    """The state is a dict; words[i] is the message in slot i, 0 none."""

    def __init__(self, strays: int = 2, tokens: int = 2, kills: int = 2, bad: str = "") -> None:
        assert bad in ("", *BAD)
        self.strays, self.tokens, self.kills, self.bad = strays, tokens, kills, bad

    def start(self) -> dict[str, Any]:
        return {
            "strays": 0,
            "sent": 0,
            "queue": (),
            "words": (0,) * SLOTS,
            "slot_barrier": (0,) * SLOTS,
            "claim": -1,
            "cursor": 0,
            "released": 0,
            "reader": "clear",
            "number": 0,
            "met": 0,
            "coordinator": "number",
            "mine": 0,
            "choice": None,
            "admitted": None,
            "replied": False,
            "got": (),
            "dropped": 0,
            "kills": 0,
        }

    # ---------------------------------------------------------------- moves

    def moves(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self.worker(s)
        yield from self.reader(s)
        yield from self.decoder(s)
        yield from self.coordinator(s)

    def worker(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if len(s["queue"]) >= SLOTS:
            return
        if s["coordinator"] == "number" and s["strays"] < self.strays:
            stray = s["strays"] + 1
            yield "worker", s | {"strays": stray, "queue": (*s["queue"], -stray)}
        if s["replied"] and s["sent"] < self.tokens:
            token = s["sent"] + 1
            yield "worker", s | {"sent": token, "queue": (*s["queue"], token)}

    def reader(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        pc, at = s["reader"], s["cursor"]
        word = s["words"][at % SLOTS]
        cleared = s | {"words": swap(s["words"], at % SLOTS, 0)}
        if at - s["released"] >= SLOTS:
            return
        first, second = "clear", "claim"
        if self.bad == "claim_before_clear":
            first, second = second, first
        if pc == "clear":
            after = {"reader": "receive" if first != "clear" else second}
            if self.bad == "word_not_cleared":
                yield "reader.word_cleared", s | after
            else:
                yield "reader.word_cleared", cleared | after
        elif pc == "claim":
            after = {"reader": "receive" if first != "claim" else second}
            yield "reader.claim_stored", s | after | {"claim": at}
        elif pc == "receive" and s["queue"]:
            message, *rest = s["queue"]
            words = swap(s["words"], at % SLOTS, message)
            yield "reader.received", s | {"queue": tuple(rest), "words": words, "reader": "hand"}
        elif pc == "hand" and word > BARRIER:
            if self.bad == "let_go_first":
                yield "barrier.let_go", cleared | {"reader": ("let_go", word - BARRIER)}
            elif word - BARRIER > s["met"] and word - BARRIER <= s["number"]:
                yield "reader.barrier_cursor_stored", s | {"reader": "meet"}
            else:
                yield "barrier.let_go", cleared | {"reader": first}
        elif pc == "meet":
            yield "reader.barrier_met", s | {"met": word - BARRIER, "reader": "let go"}
        elif pc == "let go":
            yield "barrier.let_go", cleared | {"reader": first}
        elif pc == "hand":
            barriers = swap(s["slot_barrier"], at % SLOTS, s["met"])
            after = {"slot_barrier": barriers, "cursor": at + 1, "reader": first}
            yield "reader.published", s | after
        elif isinstance(pc, tuple):  # let_go_first
            met = max(s["met"], pc[1]) if pc[1] <= s["number"] else s["met"]
            yield "reader.barrier_met", s | {"met": met, "reader": first}
        elif pc == "dead":
            in_hand = word != 0 and (s["claim"] == at or self.bad == "no_claim")
            yield "boot", s | {"reader": "hand" if in_hand else first}

    def decoder(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if s["released"] == s["cursor"]:
            return
        at = s["released"]
        message, barrier = s["words"][at % SLOTS], s["slot_barrier"][at % SLOTS]
        after = {"released": at + 1}
        is_early = self.bad == "from_cursor" and s["admitted"] is not None and at < s["admitted"]
        if self.bad != "from_cursor":
            is_early = s["admitted"] is not None and barrier < s["admitted"]
        if s["admitted"] is None or is_early:
            if message > 0:
                raise Violation(f"token {message} is dropped")
            yield "decoder", s | after | {"dropped": s["dropped"] + 1}
        elif message < 0:
            raise Violation("a token that is nobody's is delivered")
        elif message != len(s["got"]) + 1:
            raise Violation(f"token {message} comes at position {len(s['got']) + 1}")
        else:
            yield "decoder", s | after | {"got": (*s["got"], message)}

    def coordinator(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        pc = s["coordinator"]
        sends_late = self.bad == "barrier_after_reply"
        if pc == "number":
            mine = s["number"] + 1
            after = "choose" if sends_late else "send"
            if self.bad == "number_after_send":
                yield "barrier.sent", self.with_barrier(s, mine) | {"coordinator": "store"}
            else:
                after_number = {"number": mine, "mine": mine, "coordinator": after}
                yield "barrier.number_stored", s | after_number
        elif pc == "store":
            mine = s["number"] + 1
            after_store = {"number": mine, "mine": mine, "coordinator": "choose"}
            yield "barrier.number_stored", s | after_store
        elif pc == "send":
            yield "barrier.sent", self.with_barrier(s, s["mine"]) | {"coordinator": "choose"}
        elif pc == "choose":
            choice = 0 if self.bad == "choice_without_barrier" else s["mine"]
            yield "submit.choice_logged", s | {"choice": choice, "coordinator": "admit"}
        elif pc == "admit":
            begin = s["cursor"] if self.bad == "from_cursor" else s["mine"]
            yield "submit.published", s | {"admitted": begin, "coordinator": "reply"}
        elif pc == "reply" and not s["replied"]:
            yield "reply", s | {"replied": True, "coordinator": "late" if sends_late else "done"}
        elif pc == "late":
            yield "barrier.sent", self.with_barrier(s, s["mine"]) | {"coordinator": "done"}
        elif pc == "dead":
            if s["replied"]:
                after_boot = "late" if sends_late else "done"
            elif s["admitted"] is not None:
                after_boot = "reply"
            else:
                after_boot = "admit" if s["choice"] is not None else "number"
            yield "boot", s | {"coordinator": after_boot, "mine": s["choice"] or 0}

    def with_barrier(self, s: dict[str, Any], number: int) -> dict[str, Any]:
        """A barrier has no payload: it fits a queue that is full of tokens."""
        return s | {"queue": (*s["queue"], BARRIER + number)}

    def deaths(self, s: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        if s["kills"] < self.kills:
            for who in ("reader", "coordinator"):
                if s[who] not in ("dead", "done"):
                    yield f"SIGKILL of the {who}", s | {who: "dead", "kills": s["kills"] + 1}

    def judge_end(self, s: dict[str, Any]) -> None:
        """Nothing can move but a tick: then everything is delivered or counted."""
        if s["got"] != tuple(range(1, self.tokens + 1)):
            raise Violation(f"the newcomer got {s['got']} of {self.tokens} tokens")
        if s["dropped"] != s["strays"]:
            raise Violation(f"{s['strays']} tokens of nobody, {s['dropped']} counted")
