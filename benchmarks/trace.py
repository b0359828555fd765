"""Trace: a real conversation trace, 20 times as fast, with aborts and preemptions.

    python benchmarks/trace.py [--requests 2000] [--file TRACE.csv]

Each request comes at its time in the trace with its prompt's blocks, and generates as many tokens
as there. Some are aborted and some preempted and resumed, at random points (seeded). Every token is
checked by value. One JSON line; exits with 1 unless every request had one final record, all rows
and blocks are free, the pipeline is idle and no token is uncounted.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pattern

import tokenpipe as tp

_FILE = Path("shared/data/traces/AzureLLMInferenceTrace_conv.csv")
_ROOT = Path(__file__).resolve().parents[1]
_STEP_S = 0.002
_END_S = 60.0
_QUIET_S = 0.2
_WORDS = 4  # of a record to the engine: row, generation, position, unused


# ---------------------------------------------------------------- the engine's process


class Batch:
    """What the engine runs: rows with a life and a position."""

    def __init__(self, num_rows: int) -> None:
        self.generations = np.zeros(num_rows, np.uint32)
        self.positions = np.zeros(num_rows, np.uint32)
        self._ended = np.zeros(num_rows, np.uint32)

    def take(self, records: pattern.Array) -> None:
        """Runs the requests of [k, 4] records from their position on."""
        for row, generation, position, _ in records.tolist():
            if generation > self._ended[row] and generation >= self.generations[row]:
                self.generations[row], self.positions[row] = generation, position

    def obey(self, events: list[tp.ControlEvent]) -> list[tuple[int, int]]:
        """Lets go of the rows that are named; returns those to acknowledge."""
        told = []
        for event in events:
            if self.generations[event.row] == event.generation:
                self.generations[event.row] = 0
            if event.kind == "finished" or event.kind == "abort":
                self._ended[event.row] = max(self._ended[event.row], event.generation)
            if event.kind != "finished":
                told.append((event.row, event.generation))
        return sorted(set(told))


def run_engine(name: str, num_rows: int) -> None:
    """Runs the batch until stdin ends."""
    batch, rest = Batch(num_rows), b""
    os.set_blocking(0, False)
    with tp.EngineWriter.attach(name) as engine:
        while True:
            begun = time.monotonic()
            try:
                piece = os.read(0, 1 << 16)
                if not piece:
                    return
                data = rest + piece
                whole = len(data) - len(data) % (4 * _WORDS)
                batch.take(np.frombuffer(data[:whole], np.uint32).reshape(-1, _WORDS))
                rest = data[whole:]
            except BlockingIOError:
                pass
            acknowledged = batch.obey(engine.poll_control())
            if acknowledged:
                _save_acknowledgements(engine, acknowledged)
            _save_step(engine, batch)
            time.sleep(max(0.0, begun + _STEP_S - time.monotonic()))


def _save_acknowledgements(engine: tp.EngineWriter, keys: list[tuple[int, int]]) -> None:
    by_row = dict(keys)
    step = engine.begin_step(list(by_row.values()), rows=list(by_row))
    states = np.full(len(by_row), 3, np.uint8)
    engine.save_output(np.zeros(len(by_row), np.int32), step=step, states=states)


def _save_step(engine: tp.EngineWriter, batch: Batch) -> None:
    rows = np.flatnonzero(batch.generations).astype(np.uint32)
    if len(rows) == 0:
        return
    generations, positions = batch.generations[rows], batch.positions[rows]
    step = engine.begin_step(generations, rows=rows)
    h = pattern.hashes(rows, generations, positions)
    engine.save_output(pattern.token_ids(h), step=step, positions=positions.astype(np.int32))
    batch.positions[rows] += np.uint32(1)


# ---------------------------------------------------------------- the client


@dataclass
class Planned:
    """A request of the trace, and what is done to it when it has `at` tokens."""

    arrival_s: float
    prompt_tokens: int
    tokens: int
    action: str | None
    at: int


def read_trace(path: Path, args: argparse.Namespace) -> list[Planned]:
    """Returns the first requests of the trace, with the actions drawn for them."""
    rng = random.Random(args.seed)
    planned: list[Planned] = []
    begin: datetime | None = None
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if len(planned) == args.requests:
                break
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            begin = begin or when
            tokens = max(1, int(row["GeneratedTokens"]))
            draw, action = rng.random(), None
            if draw < args.aborts:
                action = "abort"
            elif draw < args.aborts + args.preemptions:
                action = "preempt"
            planned.append(
                Planned(
                    (when - begin).total_seconds() / args.speed,
                    max(1, int(row["ContextTokens"])),
                    tokens,
                    action,
                    rng.randint(1, tokens),
                )
            )
    return planned


@dataclass
class Running:
    """What the client knows of a request."""

    name: str
    planned: Planned
    delivered: int = 0
    finals: int = 0


class Replay:
    """Submits, reads, aborts and preempts."""

    def __init__(self, pipe: tp.Pipeline, planned: list[Planned], engine: Any) -> None:
        self._pipe, self._planned, self._engine = pipe, planned, engine
        self._lock = threading.Lock()
        self._by_key: dict[tuple[int, int], Running] = {}
        self._actions: queue.Queue[tuple[Running, tp.Admission] | None] = queue.Queue()
        self.reasons: Counter[str] = Counter()
        self.wrong = 0
        self.delivered = 0
        self.resumed = 0
        self.error: BaseException | None = None

    @property
    def requests(self) -> list[Running]:
        """All that were submitted."""
        with self._lock:
            return list(self._by_key.values())

    def _tell_engine(self, row: int, generation: int, position: int) -> None:
        with self._lock:
            self._engine.write(np.array([row, generation, position, 0], np.uint32).tobytes())

    def submit_all(self) -> None:
        """Submits each request at its time, or later when no row is free."""
        begun = time.monotonic()
        for number, planned in enumerate(self._planned):
            time.sleep(max(0.0, begun + planned.arrival_s - time.monotonic()))
            request = tp.Request(
                f"trace-{number}",
                prompt_token_ids=range(planned.prompt_tokens),
                max_tokens=planned.tokens,
            )
            admission = self._pipe.submit(request, timeout_s=_END_S)
            key = (admission.row, admission.generation)
            with self._lock:
                self._by_key[key] = Running(request.request_id, planned)
            self._tell_engine(*key, 0)

    def act(self) -> None:
        """Aborts and preempts what is due; a preempted request is resumed as soon as it can be."""
        while (due := self._actions.get()) is not None:
            running, admission = due
            if running.planned.action == "abort":
                self._pipe.abort(running.name)
            elif self._pipe.preempt(running.name)[running.name]:
                try:
                    self._pipe.resume(running.name, timeout_s=_END_S)
                except tp.UnknownRequestError:
                    continue  # it had ended before the engine let go of it
                self.resumed += 1
                # What has not been read by now is computed again; the pipeline drops what it has.
                self._tell_engine(admission.row, admission.generation, running.delivered)

    def read(self) -> None:
        """Takes batches until every request has its final."""
        finals, deadline = 0, time.monotonic() + _END_S
        while finals < len(self._planned) and self.error is None:
            for batch in self._pipe.batches(timeout_s=_QUIET_S):
                finals += batch.num_finals
                self._check(batch)
                deadline = time.monotonic() + _END_S
                if finals == len(self._planned):
                    break
            if time.monotonic() > deadline:
                return

    def _check(self, batch: tp.OutputBatch) -> None:
        counts = np.diff(batch.token_offsets.astype(np.int64))
        has = counts == 1
        rows, generations, at = batch.row[has], batch.generation[has], batch.send_idx[has]
        right = batch.token_ids == pattern.token_ids(pattern.hashes(rows, generations, at))
        self.wrong += int((~right).sum()) + int((counts > 1).sum())
        self.delivered += int(batch.num_tokens)
        for row, generation, send_idx, count, reason in zip(
            batch.row.tolist(),
            batch.generation.tolist(),
            batch.send_idx.tolist(),
            counts.tolist(),
            batch.finish_reason.tolist(),
            strict=True,
        ):
            with self._lock:
                running = self._by_key[row, generation]
            if count:
                self.wrong += send_idx != running.delivered  # in order, each once
                running.delivered += count
                if running.delivered == running.planned.at and running.planned.action:
                    self._actions.put((running, tp.Admission(running.name, row, generation)))
            if reason:
                running.finals += 1
                self.reasons[tp.commands.FinishReason(reason).name.lower()] += 1

    def run(self) -> None:
        """Blocks until the trace is over."""
        threads = [
            threading.Thread(target=self._guarded, args=(f,), daemon=True)
            for f in (self.submit_all, self.act)
        ]
        for thread in threads:
            thread.start()
        self.read()
        self._actions.put(None)
        for thread in threads:
            thread.join(_END_S)
        if self.error is not None:
            raise self.error

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self.error = e


def measure(args: argparse.Namespace, planned: list[Planned]) -> dict[str, Any]:
    """Runs the trace and returns what came of it."""
    config = tp.PipelineConfig(
        max_num_seqs=args.rows,
        top_logprobs=0,
        num_decoders=args.decoders,
        num_blocks=args.blocks,
        log_level="warning",
    )
    command = [sys.executable, __file__, f"--engine-of={config.name}", f"--rows={args.rows}"]
    with tp.Pipeline(config) as pipe:
        engine = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        try:
            replay = Replay(pipe, planned, engine.stdin)
            begun = time.monotonic()
            replay.run()
            wall_s = time.monotonic() - begun
            status = _settled(pipe)
        finally:
            assert engine.stdin is not None
            engine.stdin.close()
            engine.wait(_END_S)
        health = pipe.health()
    return report(replay, status, health, wall_s, len(planned))


def _settled(pipe: tp.Pipeline) -> dict[str, Any]:
    """Waits until the last acknowledgements are through, and returns the status."""
    deadline = time.monotonic() + 10.0
    while True:
        for _ in pipe.batches(timeout_s=_QUIET_S):
            pass
        status = pipe.status()
        if not status["rows"]["live"] or time.monotonic() > deadline:
            return status


def report(
    replay: Replay, status: dict[str, Any], health: dict[str, Any], wall_s: float, planned: int
) -> dict[str, Any]:
    """Returns the facts of a run as one JSON object."""
    counters = status["counters"]
    dropped = {n: v for n, v in counters.items() if n.startswith("dropped_") and v}
    saved, delivered = status["source"]["tokens_saved"], counters["tokens_delivered"]
    every = [running.finals for running in replay.requests]
    return {
        "benchmark": "trace",
        "requests": planned,
        "wall_s": round(wall_s, 2),
        "finals": dict(replay.reasons),
        "one_final_each": len(every) == planned and set(every) == {1},
        "resumed": replay.resumed,
        "wrong_tokens": replay.wrong,
        "saved": saved,
        "delivered": delivered,
        "dropped": dropped,
        "adds_up": saved == delivered + sum(dropped.values()) and delivered == replay.delivered,
        "rows_live": status["rows"]["live"],
        "rows_high_water": status["rows"]["high_water"],
        "blocks_free": status["blocks"]["free"],
        "blocks": status["blocks"]["of"],
        "health": health["state"],
    }


def is_right(facts: dict[str, Any]) -> bool:
    """Returns whether all is back, all is told, and nothing is lost."""
    return (
        facts["one_final_each"]
        and facts["adds_up"]
        and facts["wrong_tokens"] == 0
        and facts["rows_live"] == 0
        and facts["blocks_free"] == facts["blocks"]
        and facts["health"] == "idle"
    )


def find_trace(given: Path | None) -> Path | None:
    """Returns the trace's file: the one given, or that beside or in the checkout."""
    places = [given] if given else [_ROOT / _FILE, _ROOT.parent / _FILE, Path.cwd() / _FILE]
    return next((p for p in places if p.exists()), None)


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--file", type=Path, help="the trace; default: that of shared/data")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--decoders", type=int, default=0, help="0: the default")
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--speed", type=float, default=20.0, help="how much faster than it was")
    parser.add_argument("--aborts", type=float, default=0.05, help="share of the requests")
    parser.add_argument("--preemptions", type=float, default=0.05, help="share of the requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine_of:
        try:
            run_engine(args.engine_of, args.rows)
        except tp.PipelineGoneError as error:
            print(f"engine: {error}", file=sys.stderr)
        return 0
    path = find_trace(args.file)
    if path is None:
        print(f"skipped: {args.file or _FILE} is not here", file=sys.stderr)
        return 0
    facts = measure(args, read_trace(path, args))
    print(json.dumps(facts), flush=True)
    return 0 if is_right(facts) else 1


if __name__ == "__main__":
    sys.exit(main())
