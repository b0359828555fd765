"""Runs of steps in an abstract form that the seed and tokenpipe both understand.

One generator makes them from a `random.Random`: from a seeded one for the long run, from
hypothesis's own for the tests that shrink. A step says what the engine's batch holds (special
values as FastDeploy's wire has them), never what comes of it. `seed_message` and `native_save`
translate a step for the two sides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from seed_driver import Asked, Message, Settings

MAX_DRAFT_TOKENS = 6
WIDTH = 21
_MAX_ROWS, _SPECULATIVE_MAX_ROWS = 512, 256
RECOVERY, PREEMPTED = -3, -9
MODES = ("plain", "topk", "spec", "spec+topk")
STATE_NONE, STATE_RECOVERY, STATE_ACKNOWLEDGED = 1, 2, 3
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """One batch row. `value` is the token (plain, topk) or the accept count (spec, spec+topk)."""

    value: int
    tokens: tuple[int, ...] = ()
    is_stopped: bool = False
    """The row's stop flag is set."""
    is_stale: bool = False
    """The row's tokens are of the request that had the row before."""


@dataclass(frozen=True)
class Step:
    """What happens before a message, and the message. Actions that cannot be done are left out."""

    rows: tuple[Row, ...]
    kind: str = "target"
    """target, draft, or none (status -2: nothing was received)."""
    width: int = 0
    admit: tuple[tuple[int, Asked], ...] = ()
    abort: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    status: int = 1
    noise: int = 0
    """Seed of the candidates, logprobs and ranks."""


@dataclass(frozen=True)
class Episode:
    """A run of steps through one processor and one pipeline."""

    settings: Settings
    steps: tuple[Step, ...]
    num_decoders: int = 1
    has_positions: bool = False


# --- the generator


def episode(rng: random.Random, num_steps: int = 40, mode: str | None = None) -> Episode:
    """Returns a run of `num_steps` steps, of `mode` or any."""
    settings = _settings(rng, mode or rng.choice(MODES))
    steps: list[Step] = []
    owed: dict[int, int] = {}  # row -> target messages until the worker's -9 for it
    has_drafts = settings.mode == "spec+topk" and rng.random() < 0.8
    while len(steps) < num_steps:
        steps.append(_acknowledged(_target(rng, settings), owed))
        for row in steps[-1].abort + steps[-1].preempt:
            if rng.random() < 0.8:
                owed[row] = rng.randint(0, 2)
        # Now and then a draft message is missing, or comes twice.
        if has_drafts and steps[-1].kind == "target" and rng.random() < 0.85:
            steps.append(_draft(rng, settings, steps[-1]))
            if rng.random() < 0.03:
                steps.append(_draft(rng, settings, steps[-1]))
    return Episode(settings, tuple(steps[:num_steps]), rng.choice((1, 1, 2)), rng.random() < 0.5)


def episodes(num_steps: int = 12) -> st.SearchStrategy[Episode]:
    """The same as a hypothesis strategy."""
    return st.builds(
        episode,
        st.randoms(use_true_random=False),
        st.integers(1, num_steps),
        st.sampled_from(MODES),
    )


def _settings(rng: random.Random, mode: str) -> Settings:
    is_speculative = mode.startswith("spec")
    return Settings(
        mode=mode,
        role=rng.choice(("mixed", "mixed", "mixed", "prefill", "decode")),
        v1=rng.random() < 0.8,
        adapter=rng.random() < 0.25,
        method=rng.choice(("mtp", "ngram")),
        num_speculative_tokens=rng.randint(1, MAX_DRAFT_TOKENS - 1) if is_speculative else 0,
        draft_logprob=mode == "spec+topk" and rng.random() < 0.75,
        num_rows=rng.randint(1, 6),
        release_after=rng.choice((0, 0, 0, 1, 2)),
    )


def _target(rng: random.Random, settings: Settings) -> Step:
    n = settings.num_rows
    rows = tuple(_row(rng, settings) for _ in range(n if rng.random() < 0.9 else rng.randint(0, n)))
    admit = tuple((i, _asked(rng, settings)) for i in range(n) if rng.random() < 0.6)
    return Step(
        rows,
        kind="none" if rng.random() < 0.03 else "target",
        width=_width(rng) if settings.has_logprobs else 0,
        admit=admit,
        abort=tuple(i for i in range(n) if rng.random() < 0.03),
        preempt=tuple(i for i in range(n) if rng.random() < 0.04),
        status=rng.choice((1, 1, 1, -1, 0)),
        noise=rng.getrandbits(32),
    )


def _acknowledged(step: Step, owed: dict[int, int]) -> Step:
    """Returns the step with the -9 of the rows that were told to stop some messages ago."""
    due = {row for row, left in owed.items() if left == 0}
    for row in list(owed):
        owed[row] -= 1
        if owed[row] < 0:
            del owed[row]
    rows = (
        replace(row, value=PREEMPTED, is_stopped=False, is_stale=False) if i in due else row
        for i, row in enumerate(step.rows)
    )
    return replace(step, rows=tuple(rows))


def _draft(rng: random.Random, settings: Settings, target: Step) -> Step:
    rows = []
    for row in target.rows:
        is_alike = rng.random() < 0.8
        accept = row.value if is_alike else _accept(rng)
        rows.append(Row(accept, _tokens(rng), row.is_stopped, row.is_stale))
    return Step(tuple(rows), "draft", max(1, _width(rng)), noise=rng.getrandbits(32))


def _width(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 6, WIDTH, WIDTH)) if rng.random() < 0.7 else rng.randint(1, WIDTH)


def _row(rng: random.Random, settings: Settings) -> Row:
    is_stopped, is_stale = rng.random() < 0.04, rng.random() < 0.02
    tokens = _tokens(rng)
    if settings.is_speculative:
        return Row(_accept(rng), tokens, is_stopped, is_stale)
    special = rng.random() < 0.12
    value = rng.choice((-1, -2, RECOVERY, -4, PREEMPTED, PREEMPTED)) if special else tokens[0]
    return Row(value, tokens, is_stopped, is_stale)


def _accept(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.82:
        return rng.randint(1, MAX_DRAFT_TOKENS)
    if kind < 0.90:
        return 0
    return rng.choice((PREEMPTED, PREEMPTED, RECOVERY, -1, -2, -4, -5, -6, -7))


def _tokens(rng: random.Random) -> tuple[int, ...]:
    return tuple(
        rng.choice((0, _MOST, 2**24 + 1)) if rng.random() < 0.02 else rng.randint(0, 60)
        for _ in range(MAX_DRAFT_TOKENS)
    )


def _asked(rng: random.Random, settings: Settings) -> Asked:
    is_split = settings.role != "mixed" and rng.random() < 0.7
    goes_on = settings.role == "decode" and is_split
    now = 1_700_000_000.0 + rng.randint(0, 999)
    stamps = {
        "arrival_time": now,
        "preprocess_start_time": now + 0.125,
        "preprocess_end_time": now + 0.25,
        "engine_get_req_time": now + 0.5,
        "inference_start_time": now + 1,
    }
    if settings.role == "decode":
        stamps["decode_inference_start_time"] = now + 2
    if goes_on:
        stamps["engine_recv_first_token_time"] = now + 1.5
    media = {"num_input_image_tokens": rng.randint(0, 9), "num_input_video_tokens": 3}
    return Asked(
        eos=tuple(rng.sample(range(61), rng.randint(0, 3))),
        prompt_len=rng.randint(1, 9),
        prompt=rng.choice((None, "hello", [{"role": "user", "content": "hi"}])),
        num_cached=rng.choice((0, 64)),
        media=rng.choice((None, {}, media, {"num_input_image_tokens": 4})),
        ic_req_data=rng.choice((None, {"a": 1})),
        carrier=rng.choice((None, {"root_span": "r", "prev_span": "p"})),
        chunks=rng.choice((None, None, None, 0, 1, 2, 3)),
        is_disaggregated=is_split,
        emitted=int(goes_on),
        stamps=stamps,
    )


# --- the candidates


@dataclass(frozen=True)
class Candidates:
    """Candidates of a step, WIDTH columns wherever fewer are meant: ids, logprobs [n, D, 21], ranks
    [n, D]. Column 0 is the sampled token."""

    ids: Any
    logprobs: Any
    ranks: Any


def candidates(step: Step, is_speculative: bool) -> Candidates:
    """Returns what the step's sampler would have said."""
    n, depth = len(step.rows), MAX_DRAFT_TOKENS if is_speculative else 1
    rng = np.random.default_rng(step.noise)
    ids = rng.integers(-1, 100_000, (n, depth, WIDTH))
    logprobs = -rng.exponential(3, (n, depth, WIDTH)).astype(np.float32)
    logprobs[rng.random((n, depth, WIDTH)) < 0.02] = -np.inf
    ranks = rng.integers(0, 2**31 - 1, (n, depth))
    ids[:, :, step.width :] = -1
    logprobs[:, :, step.width :] = 0
    for i, row in enumerate(step.rows):
        ids[i, :, 0] = row.tokens[:depth] if is_speculative else row.value
    return Candidates(ids, logprobs, ranks)


# --- for the seed


def seed_message(step: Step, settings: Settings) -> Message:
    """Returns the message that FastDeploy's op would have received."""
    n = len(step.rows)
    values = np.array([row.value for row in step.rows], np.int64)
    if step.kind == "none":
        return Message([(0, np.array([-2], np.int64))])
    if not settings.is_speculative:
        head = (0, np.array([step.status, n], np.int64))
        if not settings.has_logprobs:
            return Message([head, (2, values)])
        found = candidates(step, False)
        return Message([head, (2, found.ids)], found.logprobs, found.ranks)
    if not settings.has_logprobs:
        tokens = np.array([row.tokens for row in step.rows], np.int64)
        head = (0, np.array([step.status, n], np.int64))
        return Message([head, (2, values), (2 + _SPECULATIVE_MAX_ROWS, tokens)])
    found = candidates(step, True)
    flag = 4 if step.kind == "draft" else 3
    return Message(
        [(0, np.array([step.status, flag, n], np.int64)), (3, values), (3 + _MAX_ROWS, found.ids)],
        found.logprobs,
        found.ranks,
    )


def without(step: Step, rows: set[int]) -> Step:
    """Returns the step with accept count 0 in `rows`."""
    return replace(
        step,
        rows=tuple(replace(r, value=0) if i in rows else r for i, r in enumerate(step.rows)),
    )


# --- for tokenpipe


def native_save(
    writer: Any, step: Step, settings: Settings, generations: list[int], positions: list[int] | None
) -> None:
    """Saves the step. States go beside the values here, and the width is the true one."""
    if step.kind == "none":
        return
    values = np.array([row.value for row in step.rows], np.int64)
    states = np.zeros(len(values), np.uint8)
    states[values < 0] = STATE_NONE
    states[values == RECOVERY] = STATE_RECOVERY
    states[values == PREEMPTED] = STATE_ACKNOWLEDGED
    where = {
        "generations": np.array(generations, np.int32),
        "states": states,
        "positions": None if positions is None else np.array(positions, np.int32),
    }
    found = candidates(step, settings.is_speculative)
    ids, logprobs = found.ids[:, :, : step.width], found.logprobs[:, :, : step.width]
    if not settings.is_speculative:
        if step.width:
            writer.save_output_topk(values, ids[:, 0], logprobs[:, 0], found.ranks[:, 0], **where)
        else:
            writer.save_output(values, **where)
        return
    tokens = np.array([row.tokens for row in step.rows], np.int64).reshape(-1, MAX_DRAFT_TOKENS)
    accept = np.maximum(values, 0)
    if step.width:
        flag = 4 if step.kind == "draft" else 3
        writer.speculate_save_output_topk(
            tokens, accept, ids, logprobs, found.ranks, message_flag=flag, **where
        )
    else:
        writer.speculate_save_output(tokens, accept, **where)
