"""Speed of the ring alone, from C++ and from Python, beside a floor in C++ and its peers.

    python benchmarks/ring.py [--quick]

One producer and 1, 2 or 4 consumers that each see everything, payloads of 2 KB to 530 KB. Every
case is a fresh set of processes; cases alternate within a round, and the ratios are medians of what
two cases of one round have to each other. JSON lines on stdout, tables on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from statistics import median
from typing import Any

import native_build
import numpy as np
import table
from forked import Gate, StalledError, Work, together
from ring_ours import OURS, SLOTS, FloorCpp, OursCopy, OursCpp, OursView, Transport, cores
from ring_peers import PEERS, private_limits

_TIMEOUT_S = 10.0
_GAP_S = 1e-3
_WARM_ROUNDS = 50

Kind = type[Transport]
Shape = tuple[int, int]
"""Bytes of a payload, consumers."""


class Speeds:
    """Messages per second of each kind and shape, round by round."""

    def __init__(self, kinds: list[Kind], seconds: float) -> None:
        self._kinds, self._seconds = kinds, seconds
        self._counts: dict[tuple[Kind, Shape], int] = {}
        self._stalled: set[tuple[Kind, Shape]] = set()
        self.found: dict[tuple[Kind, Shape], list[float]] = defaultdict(list)

    def round(self, shape: Shape) -> None:
        """Measures every kind once in this shape."""
        for kind in self._kinds:
            case = (kind, shape)
            if case in self._stalled or not kind.can_send(shape[0]):
                continue
            try:
                if case not in self._counts:
                    first = max(20, 4_000_000 // shape[0])
                    speed = _throughput(kind, shape, first)
                    self._counts[case] = max(first, round(speed * self._seconds))
                speed = _throughput(kind, shape, self._counts[case])
            except StalledError as error:
                self._stalled.add(case)
                self.found.pop(case, None)
                _say({"stalled": kind.name, **_facts(shape), "why": str(error)})
                continue
            self.found[case].append(speed)
            _say({"who": kind.name, **_facts(shape), "messages_per_s": round(speed)})

    def median(self, kind: Kind, shape: Shape) -> float:
        """Returns the middle of its rounds; 0 where there is none."""
        return median(self.found[kind, shape]) if self.found.get((kind, shape)) else 0.0

    def ratio(self, kind: Kind, to: Kind, shape: Shape) -> float:
        """Returns how many times faster `to` is, as the median over rounds; 0 where unknown."""
        mine, others = self.found.get((kind, shape)), self.found.get((to, shape))
        if not mine or not others:
            return 0.0
        return median(b / a for a, b in zip(mine, others, strict=False))


def _facts(shape: Shape) -> dict[str, int]:
    return {"payload_bytes": shape[0], "consumers": shape[1]}


def _throughput(kind: Kind, shape: Shape, count: int) -> float:
    """Returns messages per second, the first two laps of the ring not counted."""
    payload, consumers = shape
    transport = kind(payload, consumers)
    warm = 2 * SLOTS[payload]

    def send(gate: Gate) -> int:
        end = transport.sender()
        gate()
        end.start()
        end.send_many(warm)
        begun = time.monotonic_ns()
        end.send_many(count)
        end.finish()
        return begun

    def receiver(k: int) -> Work:
        def receive(gate: Gate) -> int:
            end = transport.receiver(k)
            gate()
            end.receive_many(warm + count)
            ended = time.monotonic_ns()
            end.finish()
            return ended

        return receive

    try:
        works = [send, *(receiver(k) for k in range(consumers))]
        begun, *ended = together(works, _TIMEOUT_S)
    finally:
        transport.close()
    return float(count * 1e9 / (max(ended) - begun))


def _round_trip(kind: Kind, payload: int, count: int, gap_s: float) -> list[float]:
    """Returns p50 and p99 in microseconds of there and back through two transports."""
    there, back = kind(payload, 1), kind(payload, 1)
    total = _WARM_ROUNDS + count

    def ping(gate: Gate) -> list[float]:
        out, into = there.sender(), back.receiver(0)
        gate()
        out.start()
        into.ping(out, _WARM_ROUNDS, 0.0)
        took = into.ping(out, count, gap_s)
        out.finish()
        into.finish()
        return [float(np.percentile(took, p)) / 1e3 for p in (50, 99)]

    def pong(gate: Gate) -> None:
        into, out = there.receiver(0), back.sender()
        gate()
        out.start()
        into.pong(out, total)
        out.finish()
        into.finish()

    try:
        found: list[float] = together([ping, pong], _TIMEOUT_S)[0]
        return found
    finally:
        there.close()
        back.close()


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": "ring", **facts}), flush=True)


def measure_speeds(args: argparse.Namespace, kinds: list[Kind]) -> Speeds:
    """Runs the throughput rounds and shows them."""
    speeds = Speeds(kinds, args.seconds)
    shapes = [(payload, n) for payload in SLOTS for n in args.consumers]
    for _ in range(args.rounds):
        for shape in shapes:
            speeds.round(shape)
    head = ["", *(f"{payload / 1000:.0f} KB 1->{n}" for payload, n in shapes)]
    rows = [
        [kind.name, *(speeds.median(kind, shape) / 1e3 or "-" for shape in shapes)]
        for kind in kinds
    ]
    table.show("throughput, 1,000 messages/s, medians", head, rows)
    rows = [
        [kind.name, *(speeds.ratio(kind, FloorCpp, shape) or "-" for shape in shapes)]
        for kind in kinds
    ]
    table.show(
        "times slower than the floor (below 1: faster), medians of paired ratios", head, rows
    )
    return speeds


def measure_round_trips(args: argparse.Namespace, kinds: list[Kind]) -> dict[Kind, float]:
    """Runs the round trips and shows them; returns the hot p50 in microseconds by kind at 2 KB."""
    found: dict[tuple[Kind, int, str], list[list[float]]] = defaultdict(list)
    waits = {"hot": (args.pings, 0.0), "1 ms gaps": (args.gap_pings, _GAP_S)}
    for _ in range(args.rounds):
        for payload in args.trip_payloads:
            for kind in (k for k in kinds if k.can_send(payload)):
                for wait, (count, gap_s) in waits.items():
                    try:
                        figures = _round_trip(kind, payload, count, gap_s)
                    except StalledError as error:
                        _say({"stalled": kind.name, "round_trip": wait, "why": str(error)})
                        continue
                    found[kind, payload, wait].append(figures)
                    facts = {"who": kind.name, "payload_bytes": payload, "round_trip": wait}
                    _say({**facts, "p50_us": round(figures[0], 2), "p99_us": round(figures[1], 2)})
    rows, hot = [], {}
    for payload in args.trip_payloads:
        for kind in kinds:
            cells: list[Any] = []
            for wait in waits:
                rounds = found.get((kind, payload, wait))
                cells += [median(f[i] for f in rounds) for i in (0, 1)] if rounds else ["-", "-"]
            rows.append([f"{payload / 1000:.0f} KB: {kind.name}", *cells])
            if payload == 2048 and cells[0] != "-":
                hot[kind] = float(cells[0])
    head = ("", "hot p50", "p99", "1 ms gaps p50", "p99")
    table.show("round trip through two rings, us, medians of rounds", head, rows)
    return hot


def show_memcpy() -> None:
    """Shows the speed of memcpy in one process, which no hop through memory can pass."""
    speed = native_build.module("ring").memcpy_speed
    rows = []
    for payload, slots in SLOTS.items():
        count = 2_000_000_000 // payload
        figures = [speed(payload, slots, copies, count) / payload / 1e3 for copies in (1, 2, 3)]
        facts = {"in": figures[0], "in_and_1_out": figures[1], "in_and_2_out": figures[2]}
        _say({"memcpy_1000_per_s": {k: round(v) for k, v in facts.items()}, "payload": payload})
        rows.append([f"{payload / 1000:.0f} KB", *figures])
    table.show("memcpy in one process, 1,000/s", ("", "in", "in + 1 out", "in + 2 out"), rows)


def show_targets(speeds: Speeds, hot: dict[Kind, float], peers: list[Kind]) -> None:
    """Shows what was aimed at beside what was measured."""
    rows: list[list[object]] = []

    def add(what: str, target: str, worst: str, measured: float) -> None:
        _say({"target": what, "aim": target, "no_worse_than": worst, "measured": measured})
        rows.append([what, target, worst, measured or "-"])

    def best(shape: Shape, ours: Kind) -> float:
        return min((r for p in peers if (r := speeds.ratio(p, ours, shape))), default=0.0)

    for n, aims in ((1, ("1.25 x", "2 x")), (2, ("1.9 x", "2.5 x"))):
        add(f"copy, 2 KB 1->{n}, to the floor", *aims, speeds.ratio(OursCopy, FloorCpp, (2048, n)))
    for n, aims in ((1, ("0.7 x", "1 x")), (2, ("0.5 x", "1 x"))):
        add(
            f"views, 90 KB 1->{n}, to the floor",
            *aims,
            speeds.ratio(OursView, FloorCpp, (90_000, n)),
        )
    for n, target in ((1, "8 x"), (2, "7 x")):
        add(f"copy, 2 KB 1->{n}, faster than the best peer", target, "", best((2048, n), OursCopy))
    for n in (1, 2):
        add(
            f"views, 90 KB 1->{n}, faster than the best peer",
            "5 x",
            "",
            best((90_000, n), OursView),
        )
    add(
        "C++, 2 KB 1->1, to the floor",
        "1.15 x",
        "1.3 x",
        speeds.ratio(OursCpp, FloorCpp, (2048, 1)),
    )
    add("hot round trip from Python, 2 KB, p50, us", "1 to 3", "", hot.get(OursCopy, 0.0))
    table.show("targets", ("", "target", "no worse than", "measured"), rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one throughput case")
    parser.add_argument("--no-peers", action="store_true", help="our ring and the floor alone")
    parser.add_argument("--quick", action="store_true", help="shorter cases, fewer rounds")
    args = parser.parse_args()
    args.consumers, args.trip_payloads = [1, 2, 4], list(SLOTS)
    args.pings, args.gap_pings = 5000, 300
    if args.quick:
        args.rounds, args.seconds = min(args.rounds, 3), 0.06
        args.trip_payloads, args.pings, args.gap_pings = [2048, 90_000], 1000, 50
    return args


def main() -> int:
    """Runs the benchmark."""
    args = _arguments()
    peers: list[Kind] = []
    for peer in () if args.no_peers else PEERS:
        if peer.missing:
            _say({"skipped": peer.name, "why": peer.missing})
            print(f"{peer.name}: skipped, {peer.missing}", file=sys.stderr)
        else:
            peers.append(peer)
    if peers and (why := private_limits()):
        _say({"skipped": "System V, large payloads", "why": why})
        print(f"System V: small payloads only, {why}", file=sys.stderr)
    print(f"{cores()} cores", file=sys.stderr)
    show_memcpy()
    kinds = [*OURS, *peers]
    speeds = measure_speeds(args, kinds)
    show_targets(speeds, measure_round_trips(args, kinds), peers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
