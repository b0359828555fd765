"""Speed of the whole pipeline, engine op -> client, beside the seed in the same run.

    python benchmarks/pipeline.py [--quick] [--seed-python PYTHON]

Ours is everything: the engine's process, reader, decoders, and a client that makes the views of all
columns, or an object of every output. The seed's figure is its _process_batch_output alone, without
any IPC. On both sides the values were made before the clock starts. Rounds alternate all cases, and
medians are taken; ratios are of one run. JSON lines on stdout, tables on stderr; the last table has
the targets. Without --quick every batch size, mode and number of decoders is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Any

import copy_floor
import latency
import seed
import table
import targets
from modes import MODES, Shape
from replay import Options, Replay, is_right, report

_BATCHES = (1, 8, 32, 64, 128, 256, 512)
_DECODERS = (1, 2, 4)
_TYPICAL = 256
_STEP_S, _BYTE_S, _OBJECT_S = 20e-6, 0.4e-9, 10e-6
"""Roughly what a step, a byte of it and an object take: from them the steps of a case."""

Facts = dict[str, Any]


class Found:
    """Facts of every round, by case."""

    def __init__(self) -> None:
        self._by_case: dict[Any, list[Facts]] = defaultdict(list)

    def add(self, case: Any, facts: Facts) -> None:
        """Notes one round of a case."""
        self._by_case[case].append(facts)

    def of(self, case: Any, name: str) -> float:
        """Returns the median of a figure; 0 where the case was not measured."""
        rounds = self._by_case.get(case)
        return median(float(facts[name]) for facts in rounds) if rounds else 0.0

    def cases(self) -> list[Any]:
        """Returns what was measured, in order."""
        return list(self._by_case)

    def all(self, name: str) -> list[Any]:
        """Returns a fact of every round of every case."""
        return [facts[name] for rounds in self._by_case.values() for facts in rounds]


def cases(args: argparse.Namespace) -> list[Options]:
    """Returns what is measured; `steps` is 0 in all of them."""
    base = [Options(mode, 0, _TYPICAL, 1, check=False, is_fixed=True) for mode in MODES]
    found = [*base, *(replace(case, objects=True) for case in base)]
    found += [replace(base[3], rows=512), replace(base[1], churn=True)]
    if args.quick:
        return [*found, replace(base[1], decoders=2)]
    for rows in _BATCHES:
        found += [replace(case, rows=rows) for case in base]
        found += [replace(case, rows=rows, churn=True) for case in base]
    for decoders in _DECODERS:
        found += [replace(case, decoders=decoders) for case in base]
    return list(dict.fromkeys(found))


def name_of(case: Options) -> str:
    """Returns how a case is called in tables."""
    words = [f"{MODES[case.mode]}, {case.rows}"]
    words += ["churn"] * case.churn + ["objects"] * case.objects
    words += [f"{case.decoders} decoders"] * (case.decoders > 1)
    return ", ".join(words)


def run_case(case: Options, seconds: float) -> Facts:
    """Runs one replay of about so many seconds; raises RuntimeError when it went wrong."""
    a_step = _STEP_S + case.shape.hop_bytes(case.rows) * _BYTE_S
    if case.objects:
        a_step += case.rows * _OBJECT_S
    sized = replace(case, steps=max(100, round(seconds / a_step)))
    facts = report(sized, Replay(sized).run())
    if not is_right(facts):
        raise RuntimeError(f"a replay went wrong: {facts}")
    return {**facts, "benchmark": "pipeline", "who": "tokenpipe"}


def measure(args: argparse.Namespace, baseline: seed.Seed | None) -> tuple[Found, Found]:
    """Runs the rounds; returns ours by case, and the seed's by (variant, mode)."""
    ours, theirs = Found(), Found()
    for number in range(args.rounds):
        for case in cases(args):
            facts = run_case(case, args.seconds)
            _say({**facts, "round": number})
            ours.add(case, facts)
        for who in seed.VARIANTS if baseline and number < args.seed_rounds else ():
            assert baseline is not None
            for mode, found in baseline.measure(who, _TYPICAL, args.seed_seconds).items():
                facts = {**found, "tokens_per_s": seed.tokens_per_s(found)}
                _say({**facts, "benchmark": "pipeline", "who": who, "round": number})
                theirs.add((who, mode), facts)
    return ours, theirs


def _say(facts: Facts) -> None:
    print(json.dumps(facts), flush=True)


def show_speeds(ours: Found, theirs: Found, floors: dict[Options, float]) -> None:
    """Shows medians, and what is how much faster than what."""
    rows: list[list[object]] = []
    for case in ours.cases():
        speed = ours.of(case, "tokens_per_s")
        ratios = [_ratio(speed, theirs, case, who) for who in seed.VARIANTS]
        cpu = ours.of(case, "cpu_us_per_1000_tokens")
        rows.append([name_of(case), speed, cpu, floors[case] / speed, *ratios])
    head = (
        "",
        "tokens/s",
        "CPU us / 1,000 tokens",
        "copy floor / it",
        "it / seed",
        "it / lazy seed",
    )
    table.show("whole pipeline, medians (mode, batch)", head, rows)
    seeds = [
        [f"{MODES[mode]}: {who}", theirs.of((who, mode), "tokens_per_s")]
        for who, mode in theirs.cases()
    ]
    if seeds:
        table.show(f"the seed, batch {_TYPICAL}", ("", "tokens/s"), seeds)


def _ratio(speed: float, theirs: Found, case: Options, who: str) -> float | str:
    other = theirs.of((who, case.mode), "tokens_per_s")
    return speed / other if other and case.rows == _TYPICAL and not case.churn else "-"


LatencyCase = tuple[str, int, float, bool]
"""Mode, batch, steps/s, whether a thread of the engine's process never sleeps."""


def latency_cases(args: argparse.Namespace) -> list[LatencyCase]:
    """Returns which latencies are measured."""
    found = [(m, _TYPICAL, 50.0, busy) for m in ("plain", "topk") for busy in (False, True)]
    found.append(("topk", 512, 200.0, False))
    if not args.quick:
        found += [(m, n, r, False) for m in MODES for n in (32, 256, 512) for r in (50.0, 200.0)]
    return list(dict.fromkeys(found))


def measure_latencies(args: argparse.Namespace) -> Found:
    """Runs the latency rounds and shows them."""
    found, stages = Found(), ("ring", "frame", "client")
    for number in range(args.latency_rounds):
        for case in latency_cases(args):
            mode, batch, rate, busy = case
            steps = round(rate * args.latency_seconds)
            options = Options(mode, steps, batch, check=False, is_fixed=True)
            facts = latency.measure(options, rate, busy=busy)
            _say({**facts, "round": number})
            figures = {f"{s}_{p}": facts[f"save_to_{s}_us"][p] for s in stages for p in _POINTS}
            found.add(case, {**figures, "reached": facts["reached_steps_per_s"]})
    rows = []
    for case in found.cases():
        mode, batch, rate, busy = case
        cells = [found.of(case, f"{s}_{p}") for s in stages for p in _POINTS]
        words = f"{MODES[mode]}, {batch}, {rate:g}/s{', busy engine thread' if busy else ''}"
        rows.append([words, found.of(case, "reached"), *cells])
    head = ("", "reached", *(f"{s} {p}" for s in stages for p in _POINTS))
    table.show("latency of a step from its save, us, medians of rounds", head, rows)
    return found


_POINTS = ("p50", "p99", "max")


def show_targets(ours: Found, theirs: Found, delays: Found, floors: dict[Options, float]) -> None:
    """Shows the targets with what was measured beside them."""
    base = {m: Options(m, 0, _TYPICAL, 1, check=False, is_fixed=True) for m in MODES}
    speeds = {m: ours.of(case, "tokens_per_s") for m, case in base.items()}
    objects = {m: ours.of(replace(c, objects=True), "tokens_per_s") for m, c in base.items()}
    seeds = {m: theirs.of(("seed", m), "tokens_per_s") for m in MODES}
    large = replace(base["spec_topk"], rows=512)
    quiet = {m: (m, _TYPICAL, 50.0, False) for m in ("plain", "topk")}
    full = ("topk", 512, 200.0, False)
    measured = targets.Measured(
        speeds=speeds,
        objects=objects,
        seeds=seeds,
        floor_ratios={
            "batch 256, top-20": floors[base["topk"]] / speeds["topk"],
            "batch 512, spec+top-20": floors[large] / ours.of(large, "tokens_per_s"),
        },
        reached_at_512=delays.of(full, "reached"),
        p99_us_at_512=delays.of(full, "client_p99"),
        p50_us={m: delays.of(case, "client_p50") for m, case in quiet.items()},
        p99_us={m: delays.of(case, "client_p99") for m, case in quiet.items()},
        busy_to_quiet={
            m: delays.of((*case[:3], True), "frame_p50") / delays.of(case, "frame_p50")
            for m, case in quiet.items()
        },
        cpu_us_per_1000_tokens=ours.of(base["topk"], "cpu_us_per_1000_tokens"),
        collections=_collections(ours),
    )
    for facts in measured.rows():
        _say({"benchmark": "pipeline", **facts})
    head = ("", "target", "measured")
    table.show("targets", head, [list(facts.values()) for facts in measured.rows()])


def _collections(ours: Found) -> dict[str, int]:
    """Returns the most collections after the warm-up in any run without churn, by kind of role."""
    most: dict[str, int] = defaultdict(int)
    for mode, is_objects, counts in zip(
        ours.all("mode"), ours.all("objects"), ours.all("collections_after_warm_up"), strict=True
    ):
        for role, count in counts.items():
            if not mode.endswith("churn") and not (is_objects and role == "client"):
                kind = role.split("-")[0]
                most[kind] = max(most[kind], count)
    return dict(most)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one case, roughly")
    parser.add_argument("--seed-seconds", type=float, default=1.5, help="per mode and round")
    parser.add_argument("--latency-seconds", type=float, default=20.0, help="per case and round")
    parser.add_argument("--quick", action="store_true", help="batch 256, short rounds, under 3 min")
    seed.add_arguments(parser)
    args = parser.parse_args()
    args.latency_rounds, args.seed_rounds = 3, args.rounds
    if args.quick:
        args.rounds, args.seconds, args.latency_rounds = min(args.rounds, 2), 0.5, 1
        args.seed_rounds, args.seed_seconds, args.latency_seconds = 1, 0.5, 4.0
    return args


def main() -> int:
    """Runs the benchmark."""
    args = _arguments()
    baseline = seed.find(args)
    if isinstance(baseline, str):
        print(baseline, file=sys.stderr)
    ours, theirs = measure(args, None if isinstance(baseline, str) else baseline)
    floors = {c: _floor(c.shape, c.rows) for c in ours.cases()}
    show_speeds(ours, theirs, floors)
    show_targets(ours, theirs, measure_latencies(args), floors)
    return 0


def _floor(shape: Shape, rows: int) -> float:
    speed = copy_floor.tokens_per_s(shape, rows)
    facts = {"floor_of": shape.mode, "rows": rows, "bytes_of_hops": shape.hop_bytes(rows)}
    _say({"benchmark": "pipeline", **facts, "tokens_per_s": round(speed)})
    return speed


if __name__ == "__main__":
    sys.exit(main())
