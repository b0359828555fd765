"""The engine process of the benchmarks: saves steps of computed values as fast as they are taken.

Started by processes.Engine. Reads admissions (row, generation; two uint32 each) from stdin, begins
when every row has one, and prints one JSON line at the end. It knows only tokenpipe's engine side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pattern
from modes import MODES, Shape

import tokenpipe as tp

_FIXED_STEPS = 12
"""Steps whose values are made before the clock starts, where nobody checks them; or a few more, so
that accept counts go round."""


class Rows:
    """The engine's book: which life of each row runs, and how far it is."""

    def __init__(self, num_rows: int) -> None:
        self.generations = np.zeros(num_rows, np.uint32)
        self.positions = np.zeros(num_rows, np.uint32)
        self.hashes = np.zeros(num_rows, np.uint32)  # of the row's next token
        self._numbers = np.arange(num_rows, dtype=np.uint32)

    def admit(self, pairs: pattern.Array) -> None:
        """Starts the requests of [k, 2] (row, generation) at position 0."""
        rows, generations = pairs[:, 0], pairs[:, 1]
        self.generations[rows] = generations
        self.positions[rows] = 0
        self.hashes[rows] = pattern.hashes(rows, generations, np.zeros_like(rows))

    def finish(self, row: int, generation: int) -> None:
        """Runs a row no more, unless it has been given out again."""
        if self.generations[row] == generation:
            self.generations[row] = 0

    def advance(self) -> None:
        """Goes to the next position of every row."""
        self.positions += np.uint32(1)
        self.hashes += pattern.POSITION


Save = Callable[[Rows, tp.Step, int], None]


def saver(engine: tp.EngineWriter, args: argparse.Namespace) -> Save:
    """Returns the function that saves one step; with --fixed of values made beforehand."""
    shape = Shape(args.mode, args.width, args.depth)
    save = {
        "plain": engine.save_output,
        "topk": engine.save_output_topk,
        "spec": engine.speculate_save_output,
        "spec_topk": engine.speculate_save_output_topk,
    }[args.mode]
    num_fixed = shape.whole(_FIXED_STEPS) if args.fixed else 0
    steps = [shape.arrays(args.rows, s, np.dtype(args.ids)) for s in range(num_fixed)]

    def save_fixed(rows: Rows, step: tp.Step, number: int) -> None:
        save(*steps[number % num_fixed], step=step)

    def save_computed(rows: Rows, step: tp.Step, number: int) -> None:
        save(*_values(args.mode, rows.hashes), step=step)

    return save_fixed if args.fixed else save_computed


def _values(mode: str, h: pattern.Array) -> tuple[pattern.Array, ...]:
    if mode == "plain":
        return (pattern.token_ids(h),)
    every = pattern.columns(h)
    logprobs = pattern.logprob_bits(every).view(np.float32)
    return pattern.token_ids(h), pattern.token_ids(every), logprobs, pattern.ranks(h)


def read_admissions(rows: Rows, rest: bytes = b"") -> bytes | None:
    """Applies what stdin holds; returns the bytes of a record cut in two, None at its end."""
    try:
        piece = os.read(0, 1 << 16)
    except BlockingIOError:
        return rest
    if not piece:
        return None
    data = rest + piece
    whole = len(data) - len(data) % 8
    rows.admit(np.frombuffer(data[:whole], np.uint32).reshape(-1, 2))
    return data[whole:]


def wait_until(when: float, is_awake: bool) -> None:
    """Waits for time.monotonic() to be `when`; awake: without giving the core away."""
    if not is_awake:
        time.sleep(max(0.0, when - time.monotonic()))
    while time.monotonic() < when:
        pass


def keep_busy() -> None:
    """Starts a thread that never sleeps, as an engine's scheduler may not."""

    def spin() -> None:
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()


def microseconds(took_ns: list[int]) -> dict[str, float]:
    """Returns p50, p99 and the maximum of what each save took."""
    points = (("p50", 50), ("p99", 99), ("max", 100))
    return {n: round(float(np.percentile(took_ns, p)) / 1e3, 2) for n, p in points}


def run(args: argparse.Namespace) -> dict[str, object]:
    """Saves the steps; returns what the client's check needs, and the CPU seconds they took."""
    rows, took = Rows(args.rows), []
    with tp.EngineWriter.attach(args.name) as engine:
        save = saver(engine, args)
        rest: bytes | None = b""
        while not rows.generations.all():
            rest = read_admissions(rows, rest or b"")
            if rest is None:
                raise SystemExit("stdin ended before every row had an admission")
        os.set_blocking(0, False)
        if args.busy:
            keep_busy()
        cpu, begun = time.process_time(), time.monotonic()
        for number in range(args.steps):
            if args.rate:
                wait_until(begun + number / args.rate, args.awake)
            if args.churn:
                if rest is not None:
                    rest = read_admissions(rows, rest)
                for event in engine.poll_control():
                    rows.finish(event.row, event.generation)
            if args.rate:
                before = time.perf_counter_ns()
            save(rows, engine.begin_step(rows.generations), number)
            if args.rate:
                took.append(time.perf_counter_ns() - before)
            rows.advance()
        cpu, wall = time.process_time() - cpu, time.monotonic() - begun
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "generations": rows.generations.tolist(),
        "positions": rows.positions.tolist(),
        "save_us": microseconds(took[args.steps // 10 :]) if took else {},
    }


def main() -> None:
    """Runs the engine of one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="the pipeline's name")
    parser.add_argument("--mode", choices=tuple(MODES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="steps/s; 0: as fast as taken")
    parser.add_argument("--churn", action="store_true", help="take new admissions while running")
    parser.add_argument("--fixed", action="store_true", help="values made before the clock starts")
    parser.add_argument("--width", type=int, default=21, help="candidates of a token")
    parser.add_argument("--depth", type=int, default=6, help="tokens a row, of speculative modes")
    parser.add_argument("--ids", default="int32", help="dtype of tokens and candidates, --fixed")
    parser.add_argument("--awake", action="store_true", help="wait for a step without sleeping")
    parser.add_argument("--busy", action="store_true", help="beside a thread that never sleeps")
    args = parser.parse_args()
    if not args.fixed and (Shape(args.mode).is_speculative or args.width != pattern.WIDTH):
        parser.error("values that are checked are plain or top-20: add --fixed")
    try:
        facts = run(args)
    except tp.PipelineGoneError as error:
        sys.exit(f"engine: {error}")
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
