"""The seed and tokenpipe get the same messages and must give the same outputs, field by field.

Where they may differ stands in DIFFERENCES, one entry per fault of the seed: the run predicts from
the message that the fault shows, looks that the seed does show it, and says what is right instead.
Everything else that differs is an error, and so is an entry that a long run never meets.

A row that the seed handles wrongly is fed to a copy of the seed, which must show the fault; the
seed itself gets the same message with that row's stop flag set, so that its neighbours can be
compared exactly and its state stays right.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from inprocess import InProcess
from messages import (
    MAX_DRAFT_TOKENS,
    MODES,
    PREEMPTED,
    RECOVERY,
    Episode,
    Row,
    Step,
    episode,
    episodes,
    native_save,
    seed_message,
    without,
)
from seed_driver import WHY_SKIPPED, Asked, Fed, Seed, SeedProcessor, find_seed

import tokenpipe as tp
from tokenpipe.commands import CommandKind, ReplyStatus

LONG_RUN_STEPS = 20_000
EPISODE_STEPS = 40
README_HEADING = "Differences from FastDeploy's token processor"
RECOVERY_TEXT = "Recover is not supported, the result is incomplete!"

# Fault number of shared/spec/token-processor.md section 8 -> what the two do. The README has them.
DIFFERENCES = {
    "F12": (
        "waits in the token thread until the cache is sent, and stamps both ends of the wait",
        "does not wait; both stamps stay None",
    ),
    "F15": (
        "an error in one row loses the outputs of all rows of the step",
        "the other rows' outputs are delivered",
    ),
    "F16": (
        "a recovery stop before any accepted token divides by zero, and the row stays taken",
        "the request ends with the recovery text and ratios of 0",
    ),
    "F17": (
        "drafts' logprobs are paired by list position; targets beyond the shorter list are lost",
        "paired by request and position; every target is delivered",
    ),
    "F18": (
        "a second target message before the drafts replaces the first, or overtakes it",
        "the first goes out before it, without drafts' logprobs",
    ),
    "F19": (
        "a step in which a request ends goes out without drafts' logprobs",
        "requests that go on get theirs",
    ),
    "F20": (
        "with enable_draft_logprob off a draft message is delivered as outputs",
        "it is dropped",
    ),
    "F22": (
        "an accept count below 0 cuts from the end: tokens that nobody accepted",
        "such a row has no tokens, and drafts no candidates",
    ),
    "F23": (
        "an aborted request runs on until the worker's -9 and never gets a final output",
        "a final output 'Aborted' at once; later tokens are dropped",
    ),
    "F24": (
        "the internal adapter's eos is left out of token_ids, but not of the logprobs",
        "left out of both",
    ),
    "F27": (
        "rows that come after a request's end run as a new request, or as the row's next one",
        "dropped by the row's generation",
    ),
    "F37": (
        "a request's statistics count rows without an output and tokens behind its end",
        "only steps and tokens that were emitted count",
    ),
    "F39": (
        "-3 counts as a token, in counters and in the first and second token's stamps; so do "
        "tokens behind the end and a prefill instance's drafts in counters",
        "only emitted tokens count",
    ),
    "F44": (
        "a decode instance's outputs lack the costs that are computed when it ends",
        "every output has them",
    ),
}

# Stamps that are taken here: their values differ, which of them are there must not.
_OUR_STAMPS = frozenset(
    [
        "engine_recv_first_token_time",
        "engine_recv_latest_token_time",
        "model_execute_time",
        "llm_engine_recv_latest_token_timestamp",
        "model_forward_time",
        "first_token_time",
        "decode_recv_second_token_time",
        "wait_for_sending_cache_time",
        "send_request_output_to_decode_time",
    ]
)
_CALLERS_STAMPS = [
    "arrival_time",
    "preprocess_start_time",
    "preprocess_end_time",
    "scheduler_recv_req_time",
    "engine_get_req_time",
    "ask_decode_resource_start_time",
    "ask_decode_resource_finish_time",
    "add_req_to_resource_manager_time",
    "inference_start_time",
    "decode_recv_req_time",
    "decode_preallocate_req_time",
    "decode_recv_first_token_time",
    "decode_inference_start_time",
]
_COSTS = [
    "time_in_queue",
    "preprocess_cost_time",
    "request_start_time",
    "llm_engine_recv_req_timestamp",
    "llm_engine_send_req_to_engine_timestamp",
]
_METRICS = (*_CALLERS_STAMPS, *_COSTS, *sorted(_OUR_STAMPS))
_SENDING = ("wait_for_sending_cache_time", "send_request_output_to_decode_time")
_NUMBERS = ("gpu_cache_token_num", "cpu_cache_token_num", "preempted_count")
_OUTPUT_FIELDS = [
    "request_id",
    "output_type",
    "prompt",
    "prompt_token_ids",
    "prompt_token_ids_len",
    "prompt_logprobs",
    "finished",
    "num_cached_tokens",
    "num_input_image_tokens",
    "num_input_video_tokens",
    "error_code",
    "error_msg",
    "ic_req_data",
    "trace_carrier",
]
_COMPLETION_FIELDS = [
    "index",
    "send_idx",
    "token_ids",
    "draft_token_ids",
    "logprob",
    "decode_type",
    "logprobs",
    "text",
    "reasoning_content",
    "tool_calls",
]
_SPECULATE_FIELDS = [
    "accepted_tokens",
    "rejected_tokens",
    "accept_ratio",
    "average_accept_length",
    "accepted_tokens_per_head",
    "accept_ratio_per_head",
]

Told = dict[str, Any]


class OutsideTheListError(AssertionError):
    """The two differ, and no entry of DIFFERENCES says that they may."""


@dataclass
class Tally:
    """What a run has met."""

    modes: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    outputs: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    outside: list[str] = field(default_factory=list)

    def missed(self) -> list[str]:
        """Returns the entries that the run has not met."""
        return [fault for fault in DIFFERENCES if not self.hits[fault]]


# --- outputs in a form that can be compared


def told(output: Any) -> Told:
    """Returns what an output says, of either side."""
    completion, metrics = output.outputs, output.metrics
    said: Told = {name: getattr(output, name) for name in _OUTPUT_FIELDS}
    said |= {name: getattr(completion, name) for name in _COMPLETION_FIELDS}
    said["top_logprobs"] = _lists(completion.top_logprobs)
    said["draft_top_logprobs"] = _lists(completion.draft_top_logprobs)
    said["metrics"] = {n: getattr(metrics, n) for n in _NUMBERS}
    for name in _METRICS:
        value = getattr(metrics, name)
        if value is not None:
            said["metrics"][name] = "stamped" if name in _OUR_STAMPS else value
    found = metrics.speculate_metrics
    said["speculate_metrics"] = found and {n: getattr(found, n) for n in _SPECULATE_FIELDS}
    return said


def _lists(found: Any) -> tuple[list[Any], list[Any], list[int]] | None:
    if found is None:
        return None
    return (found.logprob_token_ids, found.logprobs, list(found.sampled_token_ranks))


def narrowed(lists: Any, width: int) -> Any:
    """Returns the first `width` columns; the seed's rows always have 21."""
    if lists is None or not width:
        return None
    ids, logprobs, ranks = lists
    return [row[:width] for row in ids], [row[:width] for row in logprobs], ranks


def is_plain(value: Any) -> bool:
    """Whether a value is made of Python's own types: what msgpack takes."""
    if isinstance(value, dict):
        return all(is_plain(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_plain(v) for v in value)
    return value is None or type(value) in (int, float, str, bool)


def differing(expected: Told, got: Told) -> dict[str, tuple[Any, Any]]:
    """Returns {field: (expected, got)}."""
    return {
        k: (expected.get(k), got.get(k))
        for k in expected.keys() | got.keys()
        if expected.get(k) != got.get(k)
    }


# --- what is right, told without either side's code


def num_taken(row: Row, asked: Asked, is_speculative: bool, is_prefill: bool) -> int:
    """Returns how many tokens of a row are its request's: up to its end."""
    tokens = row.tokens[: row.value] if is_speculative else (row.value,)
    for j, token in enumerate(tokens, 1):
        if is_prefill or token in asked.eos:
            return j
    return len(tokens)


def speculation(heads: list[int], steps: int, n: int) -> Told:
    """Returns a request's figures (token-processor.md section 5), 0 where nothing was accepted."""
    accepted = sum(heads)
    return {
        "accepted_tokens": accepted,
        "rejected_tokens": steps * (n + 1) - accepted,
        "accept_ratio": 1 - steps / accepted if accepted else 0,
        "average_accept_length": accepted / steps if steps else 0,
        "accepted_tokens_per_head": heads[: n + 1],
        "accept_ratio_per_head": [b / a if a else 0 for a, b in pairwise(heads)][:n],
    }


@dataclass
class Life:
    """A request that has a row, and what is right for it so far."""

    request_id: str
    row: int
    generation: int
    asked: Asked
    emitted: int = 0
    last_send_idx: int | None = None
    """Of the last target message; None: it had no tokens of this request."""
    chunks: int = 0
    heads: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    steps: int = 0
    is_overcounted: bool = False
    """The seed has counted for it what was not emitted."""
    is_over: bool = False
    is_aborted: bool = False
    has_second_stamp: bool = False

    def metrics(self) -> Told:
        """Returns the metrics of an output made now, without a new token."""
        s = self.asked.stamps
        found: Told = dict.fromkeys(_NUMBERS, 0)
        found |= {n: s[n] for n in _CALLERS_STAMPS if n in s}
        always = ("engine_recv_latest_token_time", "llm_engine_recv_latest_token_timestamp")
        stamped = [*always, "model_execute_time", "model_forward_time"]
        if self.emitted > self.asked.emitted or "engine_recv_first_token_time" in s:
            stamped += ["engine_recv_first_token_time", "first_token_time"]
        if self.has_second_stamp:
            stamped.append("decode_recv_second_token_time")
        return found | dict.fromkeys(stamped, "stamped") | self.costs()

    def costs(self) -> Told:
        """Returns what follows from the caller's stamps."""
        s = self.asked.stamps
        return {
            "time_in_queue": s["inference_start_time"] - s["preprocess_end_time"],
            "preprocess_cost_time": s["preprocess_end_time"] - s["preprocess_start_time"],
            "request_start_time": s["arrival_time"],
            "llm_engine_recv_req_timestamp": s["engine_get_req_time"],
            "llm_engine_send_req_to_engine_timestamp": s["inference_start_time"],
        }

    def final(self, error_msg: str, prompt: Any, speculate: Told | None) -> Told:
        """Returns a last output without tokens."""
        media = self.asked.media or {}
        return {
            "request_id": self.request_id,
            "output_type": 3,
            "prompt": prompt,
            "prompt_token_ids": [],
            "prompt_token_ids_len": self.asked.prompt_len,
            "prompt_logprobs": None,
            "finished": True,
            "num_cached_tokens": self.asked.num_cached,
            "num_input_image_tokens": media.get("num_input_image_tokens", 0),
            "num_input_video_tokens": media.get("num_input_video_tokens", 0),
            "error_code": 200,
            "error_msg": error_msg,
            "ic_req_data": self.asked.ic_req_data,
            "trace_carrier": self.asked.carrier,
            "index": self.row,
            "send_idx": self.emitted,
            "token_ids": [],
            "draft_token_ids": [],
            "decode_type": 0,
            "metrics": self.metrics(),
            "speculate_metrics": speculate,
        }


@dataclass
class Sent:
    """A target message's outputs at the seed, and which drafts' logprobs are theirs."""

    results: list[Any]
    right: dict[str, Any] = field(default_factory=dict)
    draft_order: list[str] | None = None
    draft_width: int = 0
    is_followed: bool = False
    """Another target message came before the drafts."""


# --- both sides, step by step


class Twins:
    """The seed and a pipeline that are told the same."""

    def __init__(self, seed: Seed, run: Episode, tally: Tally) -> None:
        s = self.settings = run.settings
        self.run, self.tally = run, tally
        self.seed = SeedProcessor(seed, s)
        config = tp.PipelineConfig(
            max_num_seqs=s.num_rows,
            top_logprobs=20,
            max_draft_tokens=MAX_DRAFT_TOKENS if s.is_speculative else 1,
            max_eos_ids=4,
            num_decoders=min(run.num_decoders, s.num_rows),
            ring_slots=4,
            output_slots=8,
            source_slots=4,
            command_slots=16,
            role=s.role,
            speculative_method=s.method if s.is_speculative else "none",
            num_speculative_tokens=s.num_speculative_tokens,
            enable_draft_logprob=s.draft_logprob,
            draft_wait_s=1e6,
            internal_adapter=s.adapter,
        )
        self.pipe = InProcess(config)
        self.lives: dict[int, Life] = {}
        self.former: dict[int, Life] = {}
        self.num_requests = 0
        self.sent: list[Sent] = []
        self.held: list[Told] = []
        self.held_by: Sent | None = None
        self.expected: list[Told] = []
        self.got: list[Told] = []
        self.excess_tokens = 0
        self.missed_completions = 0
        self._abort_slot = 0

    def play(self) -> None:
        """Plays the run. Raises OutsideTheListError."""
        with self.pipe:
            for number, step in enumerate(self.run.steps):
                self.tally.steps += 1
                try:
                    self._step(step)
                    self._compare(self._delivered())
                except OutsideTheListError as error:
                    about = f"{self.settings}, {self.run.num_decoders} decoders"
                    raise OutsideTheListError(f"{error}\nin {number}: {step}\nof {about}") from None
            self.expected += self._let_go()
            held = self.pipe.delivery._joins and self.pipe.delivery._joins[1].flush()
            self._compare(list(held) if held else [], is_end=True)
            self._judge_deliveries()
            self._compare_counters()

    def hit(self, fault: str, times: int = 1) -> None:
        assert fault in DIFFERENCES
        self.tally.hits[fault] += times

    def check(self, is_so: bool, what: str) -> None:
        if not is_so:
            raise OutsideTheListError(what)

    # --- before a message

    def _act(self, step: Step) -> None:
        for row, asked in step.admit:
            if row not in self.lives:
                self._admit(row, asked)
        if not self.settings.v1 or self.held:
            return
        manager = self.seed.manager
        for row in step.abort:
            life = self.lives.get(row)
            if life is not None and not life.is_over and not life.is_aborted:
                manager.to_be_aborted_req_id_set.add(life.request_id)
                self._abort(life)
        for row in step.preempt:
            life = self.lives.get(row)
            if life is None or life.is_over or life.is_aborted:
                continue
            manager.to_be_rescheduled_request_id_set.add(life.request_id)
            if self.settings.role == "decode":  # it reports an error and drops the request
                self._abort(life)

    def _admit(self, row: int, asked: Asked) -> None:
        self.num_requests += 1
        request_id = f"user_{row}_{self.num_requests}"
        self.seed.admit(row, request_id, asked)
        admission = self.pipe.submit(
            tp.Request(
                request_id,
                prompt_token_ids=[7] * asked.prompt_len,
                eos_token_ids=asked.eos,
                num_emitted_tokens=asked.emitted,
                prompt=asked.prompt,
                num_cached_tokens=asked.num_cached,
                multimodal_inputs=asked.media,
                ic_req_data=asked.ic_req_data,
                trace_carrier=asked.carrier,
                metrics=tp.RequestMetrics(**asked.stamps),
                disaggregate_info={"role": "any"} if asked.is_disaggregated else None,
                prefill_chunk_info=None if asked.chunks is None else [1] * asked.chunks,
            ),
            row=row,
        )
        self.lives[row] = Life(request_id, row, admission.generation, asked, emitted=asked.emitted)

    def _abort(self, life: Life) -> None:
        pipe = self.pipe
        self._abort_slot = (self._abort_slot + 1) % pipe.config.command_slots
        pipe.client.post(self._abort_slot, CommandKind.ABORT, id=life.request_id)
        pipe.resources.sweep()
        pipe.resources.serve()
        status = pipe.client.reply(self._abort_slot)[0]
        pipe.client.free(self._abort_slot)
        self.check(status == ReplyStatus.OK, f"abort of {life.request_id}: status {status}")
        pipe.decode()
        life.is_aborted = True
        self.expected.append(life.final("Aborted", None, None))
        self._compare(self._delivered())  # finals without a step have no order between decoders
        self.hit("F23")

    # --- a message

    def _step(self, step: Step) -> None:
        s = self.settings
        self.tally.modes[s.mode] += 1
        self._act(step)
        if step.kind == "none":
            fed = self.seed.feed(seed_message(step, s))
            self.check(fed.built is None and not fed.put, "the seed handled an empty receive")
            self._take_back()
            return
        step = self._without_recovery_in_chunks(step)
        self.tally.rows += len(step.rows)
        stopped = {i for i, row in enumerate(step.rows) if row.is_stopped}
        generations = [self._generation(i, row) for i, row in enumerate(step.rows)]
        positions = [self._position(step, i, row) for i, row in enumerate(step.rows)]
        if step.kind == "draft":
            self._draft(step, stopped)
        else:
            self._target(step, stopped)
        native_save(
            self.pipe.writer, step, s, generations, positions if self.run.has_positions else None
        )
        self._take_back()

    def _without_recovery_in_chunks(self, step: Step) -> Step:
        """A recovery stop between two prefill chunks is not compared: the seed counts it as a chunk
        and goes on, tokenpipe ends the request, and no fault's number says which is right."""
        if step.kind == "draft":
            return step
        inert = 0 if self.settings.is_speculative else -1
        rows = [
            Row(inert, row.tokens, row.is_stopped, row.is_stale)
            if row.value == RECOVERY and self._is_between_chunks(i)
            else row
            for i, row in enumerate(step.rows)
        ]
        return Step(
            tuple(rows),
            step.kind,
            step.width,
            step.admit,
            step.abort,
            step.preempt,
            step.status,
            step.noise,
        )

    def _is_between_chunks(self, row: int) -> bool:
        life = self.lives.get(row)
        return life is not None and life.chunks + 1 < (life.asked.chunks or 0)

    def _generation(self, i: int, row: Row) -> int:
        life, former = self.lives.get(i), self.former.get(i)
        if row.is_stopped:
            return 0
        if row.is_stale and former is not None:
            return former.generation
        return life.generation if life is not None else 0

    def _position(self, step: Step, i: int, row: Row) -> int:
        life = self.lives.get(i)
        if life is None or row.is_stale:
            return -1
        if step.kind == "draft" and life.last_send_idx is not None:
            return life.last_send_idx
        return life.emitted

    def _is_stale(self, i: int, row: Row) -> bool:
        return row.is_stale and i in self.former

    def _runs(self, step: Step) -> Iterator[tuple[int, Row, Life]]:
        """Yields the rows that a request runs in, as the seed sees it."""
        for i, row in enumerate(step.rows):
            if not row.is_stopped and i in self.lives and not self.seed.manager.stop_flags[i]:
                yield i, row, self.lives[i]

    def _faulty(self, step: Step) -> dict[int, str]:
        """Returns {row: fault} of the rows that the seed handles wrongly."""
        s = self.settings
        faulty: dict[int, str] = {}
        for i, row, life in self._runs(step):
            is_shielded = s.v1 and s.role == "decode" and life.is_aborted
            if self._is_stale(i, row) or life.is_over:
                faulty[i] = "F27"
            elif life.is_aborted and row.value != PREEMPTED and not is_shielded:
                faulty[i] = "F23"
            elif not s.is_speculative or is_shielded:
                continue
            elif row.value < 0 and row.value not in (RECOVERY, PREEMPTED):
                faulty[i] = "F22"
            elif row.value == RECOVERY and self.seed.accepted(life.request_id) == 0:
                faulty[i] = "F16"
        return faulty

    def _target(self, step: Step, stopped: set[int]) -> None:
        faulty = self._faulty(step)
        message = seed_message(step, self.settings)
        runs = list(self._runs(step))
        actual = self.seed.fork().feed(message, stopped) if faulty else None
        fed = self.seed.feed(message, stopped | faulty.keys())
        self.check(fed.built is not None, "the seed failed where no fault was foreseen")
        results = {r.outputs.index: r for r in fed.built or ()}
        if actual is not None:
            self._look_at(actual, faulty, results)
        outputs: list[Told] = []
        for life in self.lives.values():
            life.last_send_idx = None
        for i, row, life in runs:
            if i in results:
                outputs.append(self._right(step, row, life, results[i]))
            elif faulty.get(i) == "F16":
                figures = speculation(life.heads, life.steps, self.settings.num_speculative_tokens)
                prompt = life.asked.prompt if life.emitted == 0 else None
                outputs.append(life.final(RECOVERY_TEXT, prompt, figures))
                life.is_over = True
                self.missed_completions += not self._is_prefill(life)
                self.seed.retire(life.request_id)
            else:
                self._count_silent(row, life, is_faulty=i in faulty)
        self._send(outputs, list(fed.built or ()))

    def _count_silent(self, row: Row, life: Life, *, is_faulty: bool) -> None:
        """Notes what a row without an output changed in the seed."""
        if is_faulty:
            return
        life.is_overcounted = True  # the seed counts a step for every row it looks at
        if row.value >= (1 if self.settings.is_speculative else 0):
            life.chunks += 1

    def _look_at(self, actual: Fed, faulty: dict[int, str], results: dict[int, Any]) -> None:
        """Checks that the copy of the seed that got the message as it is shows the faults."""
        faults = set(faulty.values())
        if actual.built is None:
            self.check(bool(faults & {"F16", "F22", "F23", "F27"}), f"the seed failed by {faulty}")
            self.check(not actual.put, "the seed failed and delivered")
            for fault in faults & {"F16"}:
                self.hit(fault)
            if results:
                self.hit("F15")
            return
        self.check("F16" not in faults, "a recovery stop before any token did not fail the seed")
        shown = {r.outputs.index for r in actual.built}
        for i, fault in faulty.items():
            if i in shown:
                self.hit(fault)

    def _is_prefill(self, life: Life) -> bool:
        return self.settings.role == "prefill" and life.asked.is_disaggregated

    def _right(self, step: Step, row: Row, life: Life, result: Any) -> Told:
        """Returns what is right instead of one output of the seed."""
        s = self.settings
        right = told(result)
        right["top_logprobs"] = narrowed(right["top_logprobs"], step.width)
        if not step.width:
            right["logprob"] = None
        is_recovery, is_prefill = row.value == RECOVERY, self._is_prefill(life)
        counted = row.value if s.is_speculative else 1
        taken = 0 if is_recovery else num_taken(row, life.asked, s.is_speculative, is_prefill)
        self._recount(right, life, is_recovery, taken, 1 if is_recovery else counted)
        if taken:
            life.last_send_idx = life.emitted
            if s.role == "decode" and life.emitted == 1:
                life.has_second_stamp = True
            life.steps += 1
            for j in range(taken):
                life.heads[j] += 1
            life.emitted += taken
        life.chunks += 1
        if s.is_speculative and counted != taken:
            life.is_overcounted = True
        if s.adapter and right["finished"] and not is_recovery:
            self._align(right)
        if right["finished"]:
            life.is_over = True
            if s.is_speculative:
                self._put_right_figures(right, life)
        if is_prefill and right["finished"]:
            for name in _SENDING:
                self.check(right["metrics"].pop(name, None) is not None, f"{name} is missing")
            self.hit("F12")
        if life.asked.emitted:
            lacks = [n for n in life.costs() if n not in right["metrics"]]
            self.check(len(lacks) == len(_COSTS), f"a decode instance has costs: {lacks} lack")
            right["metrics"] |= life.costs() | {"first_token_time": "stamped"}
            self.hit("F44")
        return right

    def _recount(
        self, right: Told, life: Life, is_recovery: bool, taken: int, counted: int
    ) -> None:
        self.excess_tokens += counted - taken
        if counted != taken:
            self.hit("F39")
        if is_recovery and life.emitted == 0:
            for name in ("engine_recv_first_token_time", "first_token_time"):
                self.check(right["metrics"].pop(name, None) is not None, f"no {name} for -3")
        elif is_recovery and life.emitted == 1 and self.settings.role == "decode":
            found = right["metrics"].pop("decode_recv_second_token_time", None)
            self.check(found is not None, "no stamp of the second token for -3")

    def _align(self, right: Told) -> None:
        """Cuts the logprobs of the end token that the adapter leaves out of token_ids."""
        shown, lists = len(right["token_ids"]), right["top_logprobs"]
        if lists is None or len(lists[0]) == shown:
            return
        self.check(len(lists[0]) == shown + 1, "more than the end token is left out")
        ids, logprobs, ranks = lists
        right["top_logprobs"] = (ids[:shown], logprobs[:shown], ranks[:shown]) if shown else None
        right["logprob"] = logprobs[shown - 1][0] if shown else None
        self.hit("F24")

    def _put_right_figures(self, right: Told, life: Life) -> None:
        figures = speculation(life.heads, life.steps, self.settings.num_speculative_tokens)
        if right["speculate_metrics"] == figures:
            return
        self.check(life.is_overcounted, f"statistics {right['speculate_metrics']} not {figures}")
        right["speculate_metrics"] = figures
        self.hit("F37")

    # --- drafts

    def _send(self, outputs: list[Told], results: list[Any]) -> None:
        if not self.settings.draft_logprob:
            self.expected += outputs
            return
        if self.sent and self.sent[-1].draft_order is None:
            self.sent[-1].is_followed = True
        self.sent.append(Sent(results))
        if not outputs:
            return
        self.expected += self._let_go()
        # What waits for drafts: a step with tokens in which a request goes on.
        if any(o["token_ids"] for o in outputs) and not all(o["finished"] for o in outputs):
            self.held, self.held_by = outputs, self.sent[-1]
        else:
            self.expected += outputs

    def _let_go(self) -> list[Told]:
        held, self.held = self.held, []
        return held

    def _draft(self, step: Step, stopped: set[int]) -> None:
        s = self.settings
        ended = {i for i, row, life in self._runs(step) if life.is_over or life.is_aborted}
        ended |= {i for i, row, _life in self._runs(step) if self._is_stale(i, row)}
        bad = {i for i, row in enumerate(step.rows) if row.value < 0}
        if bad:
            actual = self.seed.fork().feed(seed_message(step, s), stopped | ended)
            garbage = [r for r in actual.built or () if r.outputs.index in bad]
            self.hit("F22", sum(r.outputs.draft_top_logprobs is not None for r in garbage))
        fed = self.seed.feed(seed_message(without(step, bad), s), stopped | ended)
        self.check(fed.built is not None, "the seed failed on a draft message")
        built = fed.built or []
        if not s.draft_logprob:
            self.check(fed.put == [built], "a draft message was not delivered as it is")
            self.check(all(r.output_type == 4 for r in built), "output_type of a draft")
            self.hit("F20", len(built))
            return
        found = {r.request_id: _lists(r.outputs.draft_top_logprobs) for r in built}
        found = {key: narrowed(lists, step.width) for key, lists in found.items()}
        if self.sent and self.sent[-1].draft_order is None:
            sent = self.sent[-1]
            sent.draft_order, sent.draft_width = list(found), step.width
            sent.right = found
        if not any(lists is not None for lists in found.values()):
            return  # nothing has come: the target waits on
        if not self.sent or self.held_by is not self.sent[-1]:
            return  # they belong to a later step, which had no outputs
        for output in self.held:
            output["draft_top_logprobs"] = found.get(output["request_id"])
        self.expected += self._let_go()

    def _judge_deliveries(self) -> None:
        """Checks what the seed's buffer did: all right, or one of its faults."""
        if not self.settings.draft_logprob:
            return
        place = {id(r): at for at, put in enumerate(self.seed.put) for r in put}
        latest = -1
        for sent in self.sent:
            places = [place[id(r)] for r in sent.results if id(r) in place]
            is_late = any(at < latest for at in places)
            latest = max([latest, *places])
            is_pending = sent is self.sent[-1] and sent.draft_order is None
            lost = 0 if is_pending else len(sent.results) - len(places)
            has_end = any(r.finished for r in sent.results)
            wrong = 0
            for r in sent.results:
                got = narrowed(_lists(r.outputs.draft_top_logprobs), sent.draft_width)
                wanted = None if r.finished else sent.right.get(r.request_id)
                wrong += got != wanted
            if not lost and not wrong and not is_late:
                continue
            if sent.is_followed or is_late:
                self.hit("F18")
            elif has_end:
                self.check(not lost, "a step with an end lost outputs")
                self.hit("F19")
            else:
                order = [r.request_id for r in sent.results]
                self.check(order != sent.draft_order, f"{lost} lost, {wrong} wrong drafts")
                self.hit("F17")

    # --- after a message

    def _take_back(self) -> None:
        self.pipe.pump()
        for row, life in list(self.lives.items()):
            is_ours_free = row not in self.pipe.resources._live
            if self.seed.manager.stop_flags[row] and is_ours_free:
                self.former[row] = self.lives.pop(row)
            elif is_ours_free and not (life.is_over or life.is_aborted):
                raise OutsideTheListError(f"{life.request_id} lost its row")

    def _delivered(self) -> list[Any]:
        return self.pipe.outputs(by_step=True)

    def _compare(self, delivered: list[Any], *, is_end: bool = False) -> None:
        """Compares what has come so far. A target may wait for its drafts on one side only: it is
        compared when both have it."""
        for output in delivered:
            said = told(output)
            self.check(is_plain(said), f"not of plain types: {said}")
            m = output.metrics
            first, latest = m.engine_recv_first_token_time, m.engine_recv_latest_token_time
            if first is not None and self.settings.role != "decode":
                self.check(first <= latest, f"first token at {first}, latest at {latest}")
            self.got.append(said)
        both = min(len(self.expected), len(self.got))
        for wanted, said in zip(self.expected[:both], self.got[:both], strict=True):
            found = differing(wanted, said)
            self.check(not found, f"{wanted['request_id']}: (right, got) {found}")
            self.tally.outputs += 1
            self.tally.tokens += len(said["token_ids"])
        del self.expected[:both], self.got[:both]
        if is_end or not self.settings.draft_logprob:
            sides = (self.expected, self.got)
            rest = [[(o["request_id"], o["token_ids"]) for o in side] for side in sides]
            self.check(rest == [[], []], f"right but not delivered {rest[0]}, delivered {rest[1]}")

    def _compare_counters(self) -> None:
        ours, theirs = self.pipe.counters(), self.seed.metrics
        emitted = ours["tokens_delivered"] + ours["dropped_adapter"]
        theirs_emitted = theirs.generation_tokens_total.value - self.excess_tokens
        self.check(emitted == theirs_emitted, f"{theirs_emitted} tokens, {emitted} counted")
        completed = theirs.request_success_total.value + self.missed_completions
        self.check(
            ours["completions"] == completed, f"{completed} ended, {ours['completions']} counted"
        )


# --- the runs


def long_run(
    seed: Seed, num_steps: int, number: int, *, stops: bool = True, tally: Tally | None = None
) -> Tally:
    """Plays generated runs of all modes until `num_steps` steps are done.

    What differs outside of the list is raised, or with `stops` off noted.
    """
    rng = random.Random(number)
    tally = tally or Tally()
    turn = 0
    while tally.steps < num_steps:
        run = episode(rng, EPISODE_STEPS, MODES[turn % len(MODES)])
        turn += 1
        try:
            Twins(seed, run, tally).play()
        except OutsideTheListError as error:
            if stops:
                raise
            tally.outside.append(str(error))
    return tally


@cache
def the_seed() -> Seed | None:
    return find_seed()


@pytest.fixture
def seed() -> Seed:
    found = the_seed()
    if found is None:
        pytest.skip(WHY_SKIPPED)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_short_run_differs_only_where_it_may(seed: Seed, mode: str) -> None:
    rng = random.Random(f"{mode} 1")
    for _ in range(6):
        Twins(seed, episode(rng, EPISODE_STEPS, mode), Tally()).play()


@settings(max_examples=60, deadline=None)
@given(run=episodes())
def test_generated_runs_differ_only_where_they_may(run: Episode) -> None:
    found = the_seed()
    if found is None:
        pytest.skip(WHY_SKIPPED)
    Twins(found, run, Tally()).play()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_long_run_meets_every_difference_and_no_other(seed: Seed) -> None:
    tally = long_run(seed, LONG_RUN_STEPS, 1)
    assert not tally.missed()
    assert tally.steps >= LONG_RUN_STEPS


def readme_differences() -> dict[str, tuple[str, str]]:
    """Returns {fault: (FastDeploy, tokenpipe)} of the README's table, but those it marks as not
    met here."""
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    _, found, section = text.partition(f"\n## {README_HEADING}\n")
    assert found, f"the README has no section {README_HEADING!r}"
    section = re.split(r"\n## ", section)[0]
    rows = re.findall(r"^\| (F\d+b?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {fault: (theirs, ours) for fault, theirs, ours in rows if "(not met here)" not in ours}


def test_the_readme_has_every_difference_and_no_other() -> None:
    assert readme_differences() == DIFFERENCES
