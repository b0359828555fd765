"""Replay: N steps of R rows through a real pipeline, every value checked at the client.

    python benchmarks/replay.py --mode plain --steps 1000000
    python benchmarks/replay.py --mode topk --steps 50000 --no-check

The client's check may cost more than the pipeline itself; --no-check measures speed alone. Prints
one JSON line; exits with 1 when a token is lost, doubled or wrong, or a counter does not add up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from check import Checker, Counter, ObjectCounter
from garbage import Watch
from modes import MODES, Shape
from processes import Engine, cpu_seconds, resident_mb

import tokenpipe as tp

_MEAN_LENGTH, _DEVIATION, _SHORTEST = 200, 40, 8
"""Tokens of a request under --churn: as in the seed's own baseline."""
_QUIET_S = 0.5
"""The engine has ended and no batch came for so long: all is read."""


@dataclass(frozen=True)
class Options:
    """One replay. `is_fixed`: the engine saves values made beforehand, which cannot be checked.
    `objects`: the client makes an object of every output, which is no check either."""

    mode: str
    steps: int
    rows: int = 256
    decoders: int = 1
    ring_slots: int = 64
    churn: bool = False
    check: bool = True
    is_fixed: bool = False
    objects: bool = False
    width: int = 21
    depth: int = 6

    @property
    def shape(self) -> Shape:
        """The mode with its sizes."""
        return Shape(self.mode, self.width, self.depth)

    @property
    def num_steps(self) -> int:
        """Steps that are saved: up to where every row has had equally many tokens."""
        return self.shape.whole(self.steps)

    @property
    def limit(self) -> int:
        """Tokens of a request that runs through all steps."""
        return self.shape.tokens_per_row(self.steps)

    def config(self) -> tp.PipelineConfig:
        """Returns the pipeline's settings, with no more room than the mode needs."""
        return tp.PipelineConfig(
            max_num_seqs=self.rows,
            top_logprobs=self.width - 1 if self.shape.has_candidates else 0,
            max_draft_tokens=self.depth if self.shape.is_speculative else 1,
            num_decoders=self.decoders,
            ring_slots=self.ring_slots,
            log_level="warning",
        )

    def engine(self, name: str, **flags: Any) -> Engine:
        """Starts the engine process of a replay through pipeline `name`."""
        return Engine(
            name,
            self.mode,
            self.num_steps,
            self.rows,
            churn=self.churn,
            fixed=self.is_fixed,
            width=self.width,
            depth=self.depth,
            **flags,
        )

    def counter(self) -> Counter:
        """Returns what the client does with each batch."""
        kind = ObjectCounter if self.objects else Checker if self.check else Counter
        return kind(self.mode, self.rows)


@dataclass
class Outcome:
    """What one replay found."""

    wall_s: float = 0.0
    num_finals: int = 0
    num_requests: int = 0
    counts: Counter = field(default_factory=lambda: Counter("plain", 0))
    cpu_s: dict[str, float] = field(default_factory=dict)
    resident: list[dict[str, float]] = field(default_factory=list)
    collections: dict[str, int] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)


class Replay:
    """Runs one replay in this process, which is the client."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._random = np.random.default_rng(1)
        self._counts = options.counter()
        self._finals = self._requests = 0
        self._begun_ns = self._ended_ns = 0
        self._resident: list[dict[str, float]] = []
        self._warm_collections: dict[str, int] = {}

    def run(self) -> Outcome:
        """Blocks until every step is delivered and every request has its final."""
        options = self._options
        with (
            Watch() as self._watch,
            tp.Pipeline(options.config()) as pipe,
            options.engine(pipe.name) as engine,
        ):
            admissions = [self._submit(pipe) for _ in range(options.rows)]
            self._resident.append(resident_mb(pipe.pids))
            before = cpu_seconds(pipe.pids)
            engine.admit(admissions)
            self._read(pipe, engine)
            after = cpu_seconds(pipe.pids)
            collections = self._watch.counts(pipe.pids)
            self._finish(pipe, engine)
            self._resident.append(resident_mb(pipe.pids))
            cpu = {role: after[role] - before[role] for role in after}
            cpu["engine"] = engine.facts()["cpu_s"]
            since = {role: n - self._warm_collections[role] for role, n in collections.items()}
            return self._outcome(cpu, since, pipe.status())

    def _outcome(
        self, cpu_s: dict[str, float], collections: dict[str, int], status: dict[str, Any]
    ) -> Outcome:
        return Outcome(
            (self._ended_ns - self._begun_ns) / 1e9,
            self._finals,
            self._requests,
            self._counts,
            cpu_s,
            self._resident,
            collections,
            status,
        )

    def _submit(self, pipe: tp.Pipeline) -> tp.Admission:
        length = self._options.limit
        if self._options.churn:
            length = max(_SHORTEST, int(self._random.normal(_MEAN_LENGTH, _DEVIATION)))
        request = tp.Request(f"replay-{self._requests}", prompt_token_ids=[1], max_tokens=length)
        self._requests += 1
        admission = pipe.submit(request, timeout_s=30.0)
        self._counts.begin(admission, length)
        return admission

    def _read(self, pipe: tp.Pipeline, engine: Engine) -> None:
        """Takes batches until the engine has ended and all it saved has come."""
        middle = self._options.num_steps // 2
        take = self._counts.take
        for batch in self._batches(pipe, engine):
            if self._begun_ns == 0:
                self._begun_ns = batch.saved_ns
            take(batch)
            if batch.source_sequence >= middle and len(self._resident) == 1:
                self._resident.append(resident_mb(pipe.pids))
                self._warm_collections = self._watch.counts(pipe.pids)
            if batch.num_finals:
                self._take_finals(batch, pipe, engine)
            self._ended_ns = time.monotonic_ns()

    def _batches(self, pipe: tp.Pipeline, engine: Engine) -> Iterator[tp.OutputBatch]:
        while True:
            had_ended = not engine.is_running
            for batch in pipe.batches(timeout_s=_QUIET_S):
                yield batch
                if not self._options.churn and self._finals == self._options.rows:
                    return
            if had_ended:
                return

    def _take_finals(self, batch: tp.OutputBatch, pipe: tp.Pipeline, engine: Engine) -> None:
        rows = batch.row[batch.finals["index"]].tolist()
        self._finals += len(rows)
        for row in rows:
            self._counts.end(row)
        if self._options.churn and engine.is_running:
            engine.admit([self._submit(pipe) for _ in rows])

    def _finish(self, pipe: tp.Pipeline, engine: Engine) -> None:
        """Ends what still runs, and holds the engine's book against what has come of it."""
        facts = engine.facts()
        pipe.sync(timeout_s=10.0)
        if self._options.churn:
            self._counts.close(facts["generations"], facts["positions"])
            pipe.abort()
        while self._finals < self._requests:
            before = self._finals
            for batch in pipe.batches(timeout_s=_QUIET_S):
                self._counts.take(batch)
                self._finals += batch.num_finals
            if self._finals == before:
                return


def report(options: Options, outcome: Outcome) -> dict[str, Any]:
    """Returns the facts of a replay as one JSON object."""
    counts, counters = outcome.counts, outcome.status["counters"]
    dropped = {n: v for n, v in counters.items() if n.startswith("dropped_") and v}
    saved, delivered = outcome.status["source"]["tokens_saved"], counters["tokens_delivered"]
    adds_up = saved == delivered + sum(dropped.values()) and delivered == counts.tokens
    cpu = sum(outcome.cpu_s.values())
    return {
        "benchmark": "replay",
        "mode": options.mode + ("+churn" if options.churn else ""),
        "rows": options.rows,
        "decoders": options.decoders,
        "objects": options.objects,
        "steps": options.num_steps,
        "tokens": counts.tokens,
        "checked": options.check,
        "lost": counts.lost,
        "duplicated": counts.duplicated,
        "wrong": counts.wrong,
        "requests": outcome.num_requests,
        "finals": outcome.num_finals,
        "wall_s": round(outcome.wall_s, 3),
        "steps_per_s": round(options.num_steps / outcome.wall_s),
        "tokens_per_s": round(counts.tokens / outcome.wall_s),
        "cpu_us_per_1000_tokens": round(cpu * 1e9 / counts.tokens, 2),
        "cpu_s": {r: round(s, 2) for r, s in outcome.cpu_s.items()},
        "cpu_us_per_step": {
            r: round(s * 1e6 / options.num_steps, 2) for r, s in outcome.cpu_s.items()
        },
        "resident_mb": {
            role: [at[role] for at in outcome.resident]
            for role in outcome.resident[0]
            if role != "coordinator"
        },
        "collections_after_warm_up": outcome.collections,
        "saved": saved,
        "delivered": delivered,
        "dropped": dropped,
        "adds_up": adds_up,
    }


def is_right(facts: dict[str, Any]) -> bool:
    """Returns whether nothing is lost, doubled, wrong or uncounted."""
    if facts["lost"] or facts["duplicated"] or facts["wrong"]:
        return False
    return bool(facts["adds_up"]) and facts["finals"] == facts["requests"]


def main() -> int:
    """Runs one replay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mode", choices=tuple(MODES), default="plain")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--decoders", type=int, default=1)
    parser.add_argument("--ring-slots", type=int, default=64)
    parser.add_argument("--churn", action="store_true", help="requests end and are replaced")
    parser.add_argument("--no-check", action="store_true", help="count tokens only")
    parser.add_argument("--fixed", action="store_true", help="values made beforehand; no check")
    args = parser.parse_args()
    if Shape(args.mode).is_speculative and not args.fixed:
        parser.error("speculative modes need --fixed: their values are not checked")
    options = Options(
        args.mode,
        args.steps,
        args.rows,
        args.decoders,
        args.ring_slots,
        args.churn,
        check=not (args.no_check or args.fixed),
        is_fixed=args.fixed,
    )
    facts = report(options, Replay(options).run())
    print(json.dumps(facts), flush=True)
    return 0 if is_right(facts) else 1


if __name__ == "__main__":
    sys.exit(main())
