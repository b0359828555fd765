"""Every interleaving of the protocol, with deaths between any two stores (protocol_model.py): the
protocol as it is holds, each deliberate mistake is found, and the model's stores are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import queue_model
from protocol_model import (
    BAD,
    BELL_BAD,
    NOT_MODELLED,
    OWN,
    POINTS,
    Bell,
    Pipeline,
    Scenario,
    explore,
)

CUDA_OPS = Path(__file__).resolve().parents[1] / "cuda_ops"

GOOD = {
    "two-deaths": Scenario(kills=2),
    "a-row-again": Scenario(lengths=(1, 2), surplus=2, tokens_a_step=1),
    "a-row-again-a-death": Scenario(lengths=(1, 2), kills=1),
    "two-decoders": Scenario((1,), 0, decoders=2, tokens_a_step=1, kills=1),
    "abort": Scenario(commands=("abort",)),
    "abort-acknowledged": Scenario((1,), commands=("abort", "abort"), has_deadline=False),
    "abort-a-coordinator-death": Scenario(
        surplus=0, commands=("abort",), kills=1, killable=("coordinator",), has_deadline=False
    ),
    "abort-a-decoder-death": Scenario(
        surplus=0, commands=("abort",), kills=1, killable=("decoder",), has_deadline=False
    ),
    "abort-unasked": Scenario((1,), 0, commands=("abort",), unasked=True, has_deadline=False),
    "preempt-resume-a-death": Scenario(
        (1,),
        0,
        commands=("preempt", "resume"),
        kills=1,
        killable=("coordinator",),
        has_deadline=False,
    ),
    "preempt-resume-abort": Scenario(
        (1,), 0, commands=("preempt", "resume", "abort"), has_deadline=False
    ),
    "preempt-abort": Scenario((1,), 0, commands=("preempt", "abort"), has_deadline=False),
    "drain": Scenario(commands=("drain",)),
    "drain-a-death": Scenario((1,), 0, commands=("drain",), kills=1, killable=("coordinator",)),
    "client-deaths": Scenario(tokens_a_step=1, client_deaths=2),
    "writer-death": Scenario(writer_dies=True, kills=1),
    "writer-death-no-deadline": Scenario(
        (1,), writer_dies=True, kills=1, killable=("coordinator",), has_deadline=False
    ),
}
LARGE = {
    "preempt-resume": Scenario((1,), 0, commands=("preempt", "resume")),
    "three-deaths": Scenario(kills=3),
    "two-rows-two-decoders": Scenario((1, 1), 0, rows=2, decoders=2),
    "two-decoders-a-death": Scenario(
        (1,), 2, decoders=2, tokens_a_step=1, kills=1, killable=("decoder",)
    ),
    "abort-any-death": Scenario(commands=("abort",), kills=1),
    "abort-then-again": Scenario((1, 1), commands=("abort",), tokens_a_step=1),
    "abort-client-death": Scenario(commands=("abort",), client_deaths=1),
    "preempt-resume-any-death": Scenario(
        (1,), 0, commands=("preempt", "resume", "abort"), kills=1, has_deadline=False
    ),
    "drain-any-death": Scenario(commands=("drain",), kills=1),
    "drain-while-one-waits": Scenario((1, 1), 0, commands=("drain",)),
    "writer-death-while-aborted": Scenario(
        (1,), 0, commands=("abort",), writer_dies=True, kills=1, killable=("coordinator",)
    ),
    "writer-death-while-preempted": Scenario(
        (1,), 0, commands=("preempt", "resume"), writer_dies=True, has_deadline=False
    ),
}
WRONG = {
    "turn_before_commit": Scenario(),
    "release_before_turn": Scenario((3,), tokens_a_step=1),
    "progress_in_place": Scenario(kills=1, killable=("decoder",)),
    "freed_before_end": Scenario(),
    "mark_before_from": Scenario(commands=("abort",)),
    "cursor_before_handing": Scenario(client_deaths=1),
    "generation_before_fields": Scenario((1, 2), 2, tokens_a_step=1),
    "old_acknowledgement": Scenario(commands=("abort",), unasked=True, has_deadline=False),
    "asked_again": Scenario((1,), commands=("abort", "abort"), has_deadline=False),
    "forgotten_before_ended": Scenario(writer_dies=True, kills=1),
    "forgotten_before_let_go": Scenario(
        (1,), 0, writer_dies=True, kills=1, killable=("coordinator",), has_deadline=False
    ),
    "resumed_though_marked": Scenario(
        (1,), 0, commands=("preempt", "resume"), kills=1, killable=("coordinator",)
    ),
    "reply_before_generation": Scenario(),
    "source_released_first": Scenario(kills=1, killable=("reader",)),
    "choice_not_logged": Scenario(kills=1, killable=("coordinator",)),
}
SYMPTOM = {
    "turn_before_commit": "is not written",
    "release_before_turn": "is overwritten",
    "progress_in_place": "has no final",
    "freed_before_end": "before its end is committed",
    "mark_before_from": "are from before its mark",
    "cursor_before_handing": "never handed out|has no final",
    "generation_before_fields": "goes on after its final|ends with",
    "old_acknowledgement": "while the engine still runs it",
    "asked_again": "never comes back",
    "forgotten_before_ended": "has no final",
    "forgotten_before_let_go": "never comes back",
    "resumed_though_marked": "while the engine still runs it",
    "reply_before_generation": "before its admission was seen",
    "source_released_first": "comes at",
    "choice_not_logged": "never answered|given out",
}

SLOW = ("resumed_though_marked",)


def report(scenario: Scenario) -> str:
    walk = explore(Pipeline(scenario))
    assert walk.ends or walk.violation
    return f"{walk.violation}: {' > '.join(walk.trace)}" if walk.violation else ""


@pytest.mark.parametrize("name", GOOD)
def test_the_protocol_holds(name: str) -> None:
    assert report(GOOD[name]) == ""


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_the_protocol_holds_in_larger_bounds(name: str) -> None:
    assert report(LARGE[name]) == ""


@pytest.mark.parametrize(
    "bad", [pytest.param(b, marks=pytest.mark.full if b in SLOW else ()) for b in BAD]
)
def test_a_mistake_is_found(bad: str) -> None:
    """The same bounds without the mistake are fine, so it is the mistake that is found."""
    scenario = WRONG[bad]
    wrong = Scenario(**{**vars(scenario), "bad": bad})
    assert re.search(SYMPTOM[bad], report(wrong))


@pytest.mark.full
@pytest.mark.parametrize("bad", BAD)
def test_without_the_mistake_nothing_is_found(bad: str) -> None:
    assert report(WRONG[bad]) == ""


def test_no_wake_up_is_lost() -> None:
    walk = explore(Bell(words=3))
    assert walk.violation is None, walk.trace
    assert walk.ends


@pytest.mark.parametrize("bad", BELL_BAD)
def test_a_lost_wake_up_is_found(bad: str) -> None:
    walk = explore(Bell(bad=bad))
    assert walk.violation is not None
    assert "asleep" in walk.violation


@pytest.mark.parametrize(
    "bounds", [{}, {"strays": 3, "kills": 1}, {"tokens": 3, "strays": 1}, {"kills": 0}]
)
def test_the_queue_of_a_source_holds(bounds: dict[str, int]) -> None:
    walk = explore(queue_model.Queue(**bounds))
    assert walk.violation is None, walk.trace
    assert walk.ends


QUEUE_SYMPTOM = {
    "no_claim": "comes at position|is delivered|is dropped",
    "word_not_cleared": "comes at position|is delivered|is dropped",
    "claim_before_clear": "comes at position|is delivered|is dropped",
    "number_after_send": "is dropped",
    "let_go_first": "is dropped",
    "barrier_after_reply": "is dropped",
    "from_cursor": "nobody's is delivered",
    "choice_without_barrier": "nobody's is delivered",
}


@pytest.mark.parametrize("bad", queue_model.BAD)
def test_a_mistake_about_the_queue_is_found(bad: str) -> None:
    walk = explore(queue_model.Queue(bad=bad))
    assert walk.violation is not None
    assert re.search(QUEUE_SYMPTOM[bad], walk.violation), walk.violation


def fault_points() -> set[str]:
    named = re.compile(r'fault::point\("([^"]+)"\)')
    files = [*CUDA_OPS.glob("*.hpp"), *CUDA_OPS.glob("*.cpp")]
    return {name for f in files for name in named.findall(f.read_text("utf-8"))}


def test_the_model_has_the_stores_of_the_code() -> None:
    """A point that is new in the code is either a move of the model or listed with a reason."""
    assert fault_points() == POINTS | set(NOT_MODELLED)
    assert not POINTS & (set(NOT_MODELLED) | set(OWN))


def test_every_named_store_is_a_move_that_happens() -> None:
    walks = [
        explore(Bell()),
        explore(
            Pipeline(Scenario((1,), 0, commands=("preempt", "resume", "abort"), has_deadline=False))
        ),
        explore(Pipeline(Scenario((1,), 0, commands=("drain",)))),
        explore(Pipeline(Scenario(writer_dies=True))),
    ]
    assert frozenset().union(*(walk.labels for walk in walks)) == POINTS | set(OWN)
    queue = explore(queue_model.Queue())
    assert queue.labels == queue_model.POINTS | set(queue_model.OWN)
    assert fault_points() >= queue_model.POINTS
