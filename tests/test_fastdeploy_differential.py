"""FastDeploy's own token processor and the plugin get the same tasks and the same messages.

Every list that reaches the scheduler must be the same, field by field, and so must what the manager
is asked, the tasks' tokens and the counters. Left out are the rows on which the native comparison
(test_differential.py) shows FastDeploy's to be wrong: the runs here do not meet them, but for F23
(an aborted request's last output) and F37 (statistics of rows without an output).
"""

from __future__ import annotations

import contextlib
import copy
import random
from itertools import chain
from typing import Any

import fastdeploy_peer as peer
import fastdeploy_standins as fd
import pytest
from driven_plugin import Driven, driven, private_ipc
from messages import MAX_DRAFT_TOKENS, PREEMPTED, RECOVERY, Row, Step, candidates, seed_message
from seed_driver import WHY_SKIPPED, Asked, Seed, SeedProcessor, Settings
from test_differential import differing, the_seed, told

ROWS = 5
STEPS, MANY_STEPS = 80, 3000
EOS = 2
_ROOMY = (1 << 20, 1 << 22)
_METHODS = {"mtp": fd.SpecMethod.MTP, "ngram": fd.SpecMethod.NGRAM}


class Twins:
    """One processor of each kind, each with a manager of its own."""

    def __init__(self, seed: SeedProcessor, plugin: Driven, rng: random.Random) -> None:
        self.seed, self.plugin, self.rng = seed, plugin, rng
        self.settings = seed.settings
        self.silent: set[str] = set()
        """Requests with rows that FastDeploy's statistics count and ours do not."""
        self.num_requests = self.num_outputs = 0
        self.tasks: list[tuple[Any, Any]] = []

    def play(self, num_steps: int) -> None:
        """Plays a run; fails at the first difference."""
        for _ in range(num_steps):
            for row in range(ROWS):
                if self.plugin.manager.stop_flags[row] and self.rng.random() < 0.6:
                    self.admit(row)
            going = self.ask_for_ends()
            step = self.step(going)
            put = self.seed.feed(seed_message(step, self.settings)).put
            self.plugin.send(self.payload(step))
            self.compare(put, self.plugin.lists(), going)

    def admit(self, row: int) -> None:
        """Gives a row to one request, on both sides."""
        self.num_requests += 1
        now = 1_700_000_000.0 + self.num_requests
        names = "arrival_time preprocess_start_time preprocess_end_time engine_get_req_time "
        stamps = {n: now + i / 8 for i, n in enumerate((names + "inference_start_time").split())}
        asked = Asked(
            eos=(EOS, 40),
            prompt=self.rng.choice((None, [{"role": "user"}])),
            num_cached=self.rng.choice((0, 64)),
            media=self.rng.choice((None, {"num_input_image_tokens": 4})),
            ic_req_data=self.rng.choice((None, {"a": 1})),
            stamps=stamps,
        )
        self.seed.admit(row, f"user_{self.num_requests}", asked)
        theirs = self.seed.manager.tasks_list[row]
        ours = copy.deepcopy(theirs)
        self.plugin.manager.give(row, ours)
        self.tasks.append((theirs, ours))

    def ask_for_ends(self) -> dict[int, str]:
        """Lets the schedulers abort or preempt some requests; the worker lets go at once."""
        going: dict[int, str] = {}
        for row, task in enumerate(self.plugin.manager.tasks_list):
            if task is not None and self.settings.v1 and self.rng.random() < 0.08:
                going[row] = self.rng.choice(("abort", "preempt"))
        for row, kind in going.items():
            request_id = self.plugin.manager.tasks_list[row].request_id
            self.silent.add(request_id)
            for manager in (self.seed.manager, self.plugin.manager):
                marked = manager.to_be_aborted_req_id_set
                if kind == "preempt":
                    marked = manager.to_be_rescheduled_request_id_set
                marked.add(request_id)
        return going

    def step(self, going: dict[int, str]) -> Step:
        rows = tuple(self.row(row, row in going) for row in range(ROWS))
        width = 21 if self.settings.has_logprobs else 0
        return Step(rows, width=width, noise=self.rng.getrandbits(32))

    def row(self, row: int, is_going: bool) -> Row:
        """A value that FastDeploy's own handles rightly."""
        rng, task = self.rng, self.plugin.manager.tasks_list[row]
        num_tokens = self.settings.num_speculative_tokens + 1
        tokens = [rng.randint(3, 30) for _ in range(MAX_DRAFT_TOKENS)]
        if task is None:
            return Row(0 if self.settings.is_speculative else -1, tuple(tokens))
        may_stop = len(task.output_token_ids) > 1
        if is_going:
            value = PREEMPTED
        elif may_stop and rng.random() < 0.05:
            value = RECOVERY
            self.silent.add(task.request_id)
        elif not self.settings.is_speculative:
            value = rng.choice((-1, -2, PREEMPTED)) if rng.random() < 0.1 else tokens[0]
        elif rng.random() < 0.1:
            value = rng.choice((0, PREEMPTED))
            self.silent.add(task.request_id)
        else:
            value = rng.randint(1, num_tokens)
        if value > 0 and rng.random() < 0.1:  # the end comes last: what is behind it is F39
            tokens[max(0, value - 1) if self.settings.is_speculative else 0] = rng.choice((EOS, 40))
            value = value if self.settings.is_speculative else tokens[0]
        return Row(value, tuple(tokens))

    def payload(self, step: Step) -> bytes:
        values = [row.value for row in step.rows]
        found = candidates(step, self.settings.is_speculative)
        if self.settings.mode == "plain":
            return peer.plain(values)
        if self.settings.mode == "topk":
            return peer.topk(found.ids[:, 0], found.logprobs[:, 0], found.ranks[:, 0])
        if self.settings.mode == "spec":
            return peer.speculate([row.tokens for row in step.rows], values)
        return peer.speculate_topk(found.ids, found.logprobs, found.ranks, values)

    def compare(self, theirs: list[Any], ours: list[Any], going: dict[int, str]) -> None:
        # F23: beyond what FastDeploy's own says, an aborted request has a last output.
        aborted = [o for results in ours for o in results if o.error_msg == "Aborted"]
        assert len(aborted) == list(going.values()).count("abort")
        ours = [[o for o in results if o.error_msg != "Aborted"] for results in ours]
        ours = [results for results in ours if results]
        theirs = [results for results in theirs if results]  # an empty list says nothing
        assert [len(results) for results in ours] == [len(results) for results in theirs]
        for wanted, got in zip(chain(*theirs), chain(*ours), strict=True):
            self.num_outputs += 1
            right, said = told(wanted), told(got)
            for side in (right, said):
                side.pop("trace_carrier")  # each side has a tracer of its own
            if wanted.finished and wanted.request_id in self.silent:
                right.pop("speculate_metrics"), said.pop("speculate_metrics")
            assert not differing(right, said), wanted.request_id

    def compare_what_is_left(self) -> None:
        """The tasks, the managers' calls, the counters."""
        assert self.num_outputs > self.num_requests > 0
        for theirs, ours in self.tasks:
            assert ours.output_token_ids == theirs.output_token_ids
            stamps = [getattr(task, "last_token_time", None) for task in (ours, theirs)]
            assert (stamps[0] is None) == (stamps[1] is None)
        names = ("finish", "abort", "reschedule", "cache", "blocks")
        made = [call[:2] for call in self.plugin.calls.named(*names)]
        assert made == self.seed.manager.calls
        counters = [dict(p.tokens_counter) for p in (self.seed.inner, self.plugin.processor)]
        running = {t.request_id for t in self.plugin.manager.tasks_list if t is not None}
        assert {k: v for k, v in counters[0].items() if k in running and v} == counters[1]
        for name in ("request_success_total", "time_to_first_token", "request_queue_time"):
            found = [getattr(p.metrics, name) for p in (self.seed, self.plugin)]
            assert found[0].value == found[1].value
            assert len(found[0].observed) == len(found[1].observed)


@pytest.fixture
def seed() -> Seed:
    found = the_seed()
    if found is None:
        pytest.skip(WHY_SKIPPED)
    return found


def compared(seed: Seed, patch: pytest.MonkeyPatch, mode: str, v1: bool, num_steps: int) -> None:
    rng = random.Random(f"{mode} {v1}")
    method = rng.choice(sorted(_METHODS))
    drafts = 3 if mode.startswith("spec") else 0
    settings = Settings(
        mode=mode, v1=v1, method=method, num_speculative_tokens=drafts, num_rows=ROWS
    )
    with contextlib.ExitStack() as stack:
        if mode.endswith("topk"):
            stack.enter_context(private_ipc(*_ROOMY))
        plugin = stack.enter_context(
            driven(
                patch,
                num_rows=ROWS,
                logprob=settings.has_logprobs,
                method=_METHODS[method] if settings.is_speculative else None,
                num_drafts=drafts,
            )
        )
        plugin.start_afresh(v1=v1)
        twins = Twins(SeedProcessor(seed, settings), plugin, rng)
        twins.play(num_steps)
        twins.compare_what_is_left()


@pytest.mark.parametrize(
    ("mode", "v1"),
    [
        pytest.param(mode, v1, marks=() if v1 == (mode in ("plain", "spec")) else pytest.mark.full)
        for mode in ("plain", "topk", "spec", "spec+topk")
        for v1 in (True, False)
    ],
)
def test_the_plugin_says_what_fastdeploys_own_processor_says(
    seed: Seed, monkeypatch: pytest.MonkeyPatch, mode: str, v1: bool
) -> None:
    compared(seed, monkeypatch, mode, v1, STEPS)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["plain", "topk", "spec", "spec+topk"])
def test_long_runs_say_the_same(seed: Seed, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    compared(seed, monkeypatch, mode, True, MANY_STEPS)
