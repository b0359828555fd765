"""What the engine's thread pays for a step, in each op: ours, a System V message, a pickled send.

    python benchmarks/save_cost.py           # batch 256, in under 3 minutes
    python benchmarks/save_cost.py --quick   # one round of it
    python benchmarks/save_cost.py --full    # batches of 32, 256 and 512, half an hour

Ours is the whole call from Python, begin_step() included, into a running pipeline with a client
that reads. The System V way fills FastDeploy's message layout from the same arrays and calls
msgsnd; the pickled send is one record a row over pyzmq. A wake-up alone is a write to an eventfd on
which a process sleeps: every way has one in it where the receiver is not awake. Each runs warm (500
steps/s by a thread that does not sleep) and at 50 steps/s with sleeps between. JSON lines on
stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import latency
import numpy as np
import table
from engine import microseconds, wait_until
from forked import Gate, StalledError, together
from modes import MODES, Array, Shape
from replay import Options
from ring_peers import SystemV, checked, libc, private_limits

_BATCHES = (32, 256, 512)
_WARM_RATE, _SLOW_RATE = 500.0, 50.0
_PACES = {"warm": (_WARM_RATE, True), "50/s": (_SLOW_RATE, False)}
_TIMEOUT_S = 60.0

Figures = dict[str, float]
Send = Callable[[tuple[Array, ...]], None]


# ---------------------------------------------------------------- ours


def ours(shape: Shape, rows: int, pace: str, seconds: float, ids: str) -> Figures:
    """Returns p50, p99 and maximum of a save in microseconds."""
    rate, is_awake = _PACES[pace]
    options = Options(shape.mode, round(rate * seconds), rows, check=False, is_fixed=True)
    found: Figures = latency.measure(options, rate, awake=is_awake, ids=ids)["save_us"]
    return found


# ---------------------------------------------------------------- the others


def _paced(send: Send, shape: Shape, rows: int, pace: str, seconds: float) -> Figures:
    """Calls `send` with the arrays of one step after another and returns what the calls took."""
    rate, is_awake = _PACES[pace]
    steps = [shape.arrays(rows, number, np.int64) for number in range(shape.whole(12))]
    took, begun = [], time.monotonic()
    for number in range(round(rate * seconds)):
        wait_until(begun + number / rate, is_awake)
        before = time.perf_counter_ns()
        send(steps[number % len(steps)])
        took.append(time.perf_counter_ns() - before)
    return microseconds(took[len(took) // 10 :])


class _Layout:
    """FastDeploy's message of a mode: mtype, then the payload, which is as long as that of its
    largest batch whatever the batch is."""

    _ROWS, _WIDTH, _DEPTH, _HEAD = 512, 21, 6, 8

    def __init__(self, shape: Shape) -> None:
        places = self._ROWS * (self._DEPTH if shape.is_speculative else 1)
        counts = self._ROWS if shape.is_speculative else 0
        width = self._WIDTH if shape.has_candidates else 1
        words = 3 + counts + places * width
        scores = places * width if shape.has_candidates else 0
        ranks = places if shape.has_candidates else 0
        self.bytes = 4 * (words + scores + ranks)
        self.memory = np.zeros(self._HEAD + self.bytes, np.uint8)
        self.memory[0] = 1  # mtype, which must be above 0
        body = self.memory[self._HEAD :].view(np.int32)
        lead = (self._ROWS, self._DEPTH) if shape.is_speculative else (self._ROWS,)
        every = (*lead, width) if shape.has_candidates else lead
        at = 3 + counts
        self.meta, self.counts = body[:3], body[3:at]
        self.ids = body[at : at + places * width].reshape(every)
        self.scores = body[words : words + scores].view(np.float32)
        self.scores = self.scores.reshape(every) if scores else self.scores
        self.ranks = body[words + scores :].reshape(lead) if ranks else body[:0]
        self._shape = shape

    def fill(self, step: tuple[Array, ...]) -> None:
        """Copies the arrays of one step into the message."""
        rows = len(step[0])
        self.meta[2] = rows
        rest = list(step)
        tokens = rest.pop(0)
        if self._shape.is_speculative:
            self.counts[:rows] = rest.pop(0)
        if not self._shape.has_candidates:
            self.ids[:rows] = tokens
            return
        candidates, scores, ranks = rest
        self.ids[:rows] = candidates
        self.ids[:rows, ..., 0] = tokens
        self.scores[:rows] = scores
        self.ranks[:rows] = ranks


def system_v(shape: Shape, rows: int, pace: str, seconds: float) -> Figures:
    """Returns what filling and sending a message took, in microseconds."""
    size = _Layout(shape).bytes
    queue = checked(libc.msgget(0, 0o600), "msgget")
    num_steps = round(_PACES[pace][0] * seconds)

    def save(gate: Gate) -> Figures:
        layout = _Layout(shape)
        place = layout.memory.ctypes.data

        def send(step: tuple[Array, ...]) -> None:
            layout.fill(step)
            checked(libc.msgsnd(queue, place, size, 0), "msgsnd")

        gate()
        return _paced(send, shape, rows, pace, seconds)

    def take(gate: Gate) -> None:
        to = ctypes.create_string_buffer(8 + size)
        gate()
        for _ in range(num_steps):
            checked(libc.msgrcv(queue, to, size, 0, 0), "msgrcv")

    try:
        figures: Figures = together([save, take], _TIMEOUT_S)[0]
        return figures
    finally:
        libc.msgctl(queue, 0, None)


def wake_up(shape: Shape, rows: int, pace: str, seconds: float) -> Figures:
    """Returns what the wake-up of a process that sleeps took, with nothing to tell it."""
    fd = os.eventfd(0, os.EFD_SEMAPHORE)
    num_steps = round(_PACES[pace][0] * seconds)

    def save(gate: Gate) -> Figures:
        gate()
        return _paced(lambda _step: os.eventfd_write(fd, 1), shape, rows, pace, seconds)

    def take(gate: Gate) -> None:
        gate()
        for _ in range(num_steps):
            os.read(fd, 8)

    try:
        figures: Figures = together([save, take], _TIMEOUT_S)[0]
        return figures
    finally:
        os.close(fd)


@dataclass
class _Record:
    """What goes over the wire for a row."""

    batch_id: int
    tokens: Array
    topk_ids: Array | None = None
    logprobs: Array | None = None
    ranks: Array | None = None


def _records(shape: Shape, step: tuple[Array, ...]) -> list[_Record]:
    tokens, *rest = step
    if shape.is_speculative:
        accept = rest.pop(0).tolist()
        parts = [[c[i, :n] for c in (tokens, *rest)] for i, n in enumerate(accept)]
    else:
        parts = [[c[i : i + 1] for c in (tokens, *rest)] for i in range(len(tokens))]
    return [_Record(i, *part) for i, part in enumerate(parts)]


def pickled(shape: Shape, rows: int, pace: str, seconds: float) -> Figures:
    """Returns what making, pickling and sending the records took, in microseconds."""
    import zmq

    folder = Path(tempfile.mkdtemp(prefix="tokenpipe-bench-"))
    num_steps = round(_PACES[pace][0] * seconds)

    def save(gate: Gate) -> Figures:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.bind(f"ipc://{folder}/0")

            def send(step: tuple[Array, ...]) -> None:
                socket.send(pickle.dumps(_records(shape, step), protocol=5), copy=False)

            gate()
            return _paced(send, shape, rows, pace, seconds)

    def take(gate: Gate) -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.connect(f"ipc://{folder}/0")
            gate()
            for _ in range(num_steps):
                socket.recv()

    try:
        figures: Figures = together([save, take], _TIMEOUT_S)[0]
        return figures
    finally:
        shutil.rmtree(folder)


# ---------------------------------------------------------------- all of them


Way = Callable[[Shape, int, str, float], Figures]


def ways(can_send_large: bool) -> dict[str, Way]:
    """Returns how a step can be saved here, by name."""
    found: dict[str, Way] = {
        "tokenpipe": lambda *case: ours(*case, ids="int64"),
        "tokenpipe, int32 ids": lambda *case: ours(*case, ids="int32"),
    }

    def message(shape: Shape, rows: int, pace: str, seconds: float) -> Figures:
        if not can_send_large and not SystemV.can_send(_Layout(shape).bytes):
            raise StalledError(f"a message of {_Layout(shape).bytes} bytes is above msgmax")
        return system_v(shape, rows, pace, seconds)

    found["System V"] = message
    found["pickled, pyzmq"] = pickled
    found["a wake-up alone"] = wake_up
    return found


def measure(args: argparse.Namespace, kinds: dict[str, Way]) -> dict[Any, list[Figures]]:
    """Runs the rounds; returns the figures by (mode, rows, way, pace)."""
    found: dict[Any, list[Figures]] = defaultdict(list)
    for number in range(args.rounds):
        for mode in MODES:
            for rows in args.batches:
                for who, way in kinds.items():
                    for pace in _PACES:
                        try:
                            figures = way(Shape(mode), rows, pace, args.seconds)
                        except StalledError as error:
                            _say({"skipped": who, "mode": mode, "rows": rows, "why": str(error)})
                            continue
                        found[mode, rows, who, pace].append(figures)
                        facts = {"who": who, "mode": mode, "rows": rows, "pace": pace}
                        _say({**facts, "round": number, "save_us": figures})
    return found


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": "save_cost", **facts}), flush=True)


def show(found: dict[Any, list[Figures]]) -> None:
    """Prints the medians of the rounds and the targets."""

    def cell(mode: str, rows: int, who: str, pace: str, point: str) -> float | str:
        rounds = found.get((mode, rows, who, pace))
        return median(f[point] for f in rounds) if rounds else "-"

    cases = list(dict.fromkeys(key[:3] for key in found))
    lines = [
        [f"{MODES[c[0]]}, {c[1]}: {c[2]}", *(cell(*c, p, q) for p in _PACES for q in _POINTS)]
        for c in cases
    ]
    head = ("", *(f"{p} {q}" for p in _PACES for q in _POINTS))
    table.show("cost of a save, us of the engine's thread, medians (mode, batch)", head, lines)
    typical = ("topk", 256, "tokenpipe")
    aims = [
        ["top-20, 256 rows, warm, us", "under 12", cell(*typical, "warm", "p50")],
        ["top-20, 256 rows, 50 steps/s, us", "under 20", cell(*typical, "50/s", "p50")],
    ]
    table.show("targets", ("", "target", "measured"), aims)


_POINTS = ("p50", "p99")


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one round")
    size.add_argument("--full", action="store_true", help="all batches, 5 rounds, 4 s of each case")
    args = parser.parse_args()
    args.batches = list(_BATCHES) if args.full else [256]
    args.rounds, args.seconds = (5, 4.0) if args.full else (1 if args.quick else 2, 1.0)
    why = private_limits()
    if why:
        print(f"System V: small messages only, {why}", file=sys.stderr)
    kinds = ways(can_send_large=not why)
    try:
        import zmq  # noqa: F401
    except ImportError:
        del kinds["pickled, pyzmq"]
        print("pyzmq: skipped, not installed: pip install 'tokenpipe[bench]'", file=sys.stderr)
    print(f"{len(os.sched_getaffinity(0))} cores", file=sys.stderr)
    show(measure(args, kinds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
