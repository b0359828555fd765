"""The engine process of the benchmarks: saves steps of computed values as fast as they are taken.

Started by processes.Engine. Reads admissions (row, generation; two uint32 each) from stdin, begins
when every row has one, and prints one JSON line at the end. It knows only tokenpipe's engine side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import pattern

import tokenpipe as tp

_FIXED_STEPS = 16
"""Steps whose values are made before the clock starts, where nobody checks them."""


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


def saver(engine: tp.EngineWriter, mode: str, is_fixed: bool, num_rows: int) -> Save:
    """Returns the function that saves one step; `is_fixed`: of values made beforehand."""
    if is_fixed:
        steps = [_values(mode, _some_hashes(num_rows, s)) for s in range(_FIXED_STEPS)]
    save = engine.save_output if mode == "plain" else engine.save_output_topk

    def save_fixed(rows: Rows, step: tp.Step, number: int) -> None:
        save(*steps[number % _FIXED_STEPS], step=step)

    def save_computed(rows: Rows, step: tp.Step, number: int) -> None:
        save(*_values(mode, rows.hashes), step=step)

    return save_fixed if is_fixed else save_computed


def _some_hashes(num_rows: int, position: int) -> pattern.Array:
    rows = np.arange(num_rows, dtype=np.uint32)
    return pattern.hashes(rows, np.ones_like(rows), np.full_like(rows, position))


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


def run(args: argparse.Namespace) -> dict[str, object]:
    """Saves the steps; returns what the client's check needs, and the CPU seconds they took."""
    rows = Rows(args.rows)
    with tp.EngineWriter.attach(args.name) as engine:
        save = saver(engine, args.mode, args.fixed, args.rows)
        rest: bytes | None = b""
        while not rows.generations.all():
            rest = read_admissions(rows, rest or b"")
            if rest is None:
                raise SystemExit("stdin ended before every row had an admission")
        os.set_blocking(0, False)
        cpu, begun = time.process_time(), time.monotonic()
        for number in range(args.steps):
            if args.rate:
                time.sleep(max(0.0, begun + number / args.rate - time.monotonic()))
            if args.churn:
                if rest is not None:
                    rest = read_admissions(rows, rest)
                for event in engine.poll_control():
                    rows.finish(event.row, event.generation)
            save(rows, engine.begin_step(rows.generations), number)
            rows.advance()
        cpu, wall = time.process_time() - cpu, time.monotonic() - begun
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "generations": rows.generations.tolist(),
        "positions": rows.positions.tolist(),
    }


def main() -> None:
    """Runs the engine of one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="the pipeline's name")
    parser.add_argument("--mode", choices=("plain", "topk"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="steps/s; 0: as fast as taken")
    parser.add_argument("--churn", action="store_true", help="take new admissions while running")
    parser.add_argument("--fixed", action="store_true", help="values made before the clock starts")
    try:
        facts = run(parser.parse_args())
    except tp.PipelineGoneError as error:
        sys.exit(f"engine: {error}")
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
