"""Speed of the whole pipeline, engine op -> client, columnar, beside the seed in the same run.

    python benchmarks/pipeline.py --seed-python PYTHON [--quick]

Rounds are alternated (ours plain, ours top-20, the seed as it is, the seed with lazy debug strings)
and medians taken. JSON lines on stdout, tables on stderr.

Ours is everything: the engine's process, reader, decoders, and a client that makes the views of all
columns. The seed's figure is its _process_batch_output alone, without any IPC. On both sides the
values were made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from statistics import median
from typing import Any

import latency
import seed
import table
from replay import Options, Replay, is_right, report

MODES = {"plain": "plain", "topk": "top-20"}
_STEPS = {"plain": 100_000, "topk": 60_000}
_RATE = 50.0

Figures = dict[tuple[str, str], list[float]]
"""Tokens/s of each round, by (who, mode)."""


def measure(args: argparse.Namespace, baseline: seed.Seed | None) -> tuple[Figures, Figures]:
    """Runs the rounds; returns tokens/s, and CPU microseconds per 1,000 tokens."""
    speeds, cpu = defaultdict(list), defaultdict(list)
    for number in range(args.rounds):
        for mode in MODES:
            facts = _ours(args, mode)
            _say({**facts, "benchmark": "pipeline", "who": "tokenpipe", "round": number})
            speeds["tokenpipe", mode].append(facts["tokens_per_s"])
            cpu["tokenpipe", mode].append(facts["cpu_us_per_1000_tokens"])
        for who in seed.VARIANTS if baseline else ():
            assert baseline is not None
            for mode, facts in baseline.measure(who, args.rows, args.seed_seconds).items():
                _say({**facts, "benchmark": "pipeline", "who": who, "round": number})
                speeds[who, mode].append(seed.tokens_per_s(facts))
                cpu[who, mode].append(1e9 / seed.tokens_per_s(facts))
    return speeds, cpu


def _ours(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    options = Options(
        mode,
        _STEPS[mode] // args.divisor,
        args.rows,
        args.decoders,
        args.ring_slots,
        check=False,
        is_fixed=True,
    )
    facts = report(options, Replay(options).run())
    if not is_right(facts):
        raise RuntimeError(f"a replay went wrong: {facts}")
    return facts


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


def show_speeds(speeds: Figures, cpu: Figures) -> None:
    """Prints medians and ratios, as JSON lines and as a table."""
    rows = []
    for (who, mode), found in speeds.items():
        speed, ours = median(found), median(speeds["tokenpipe", mode])
        facts = {
            "benchmark": "pipeline",
            "summary": who,
            "mode": MODES[mode],
            "tokens_per_s": round(speed),
            "lowest": round(min(found)),
            "highest": round(max(found)),
            "cpu_us_per_1000_tokens": round(median(cpu[who, mode]), 1),
            "tokenpipe_is_faster_by": round(ours / speed, 2),
        }
        _say(facts)
        rows.append([f"{MODES[mode]}: {who}", *list(facts.values())[3:]])
    rows.sort(key=lambda row: str(row[0]).split(":")[0])
    table.show(
        "whole pipeline, medians",
        ("", "tokens/s", "lowest", "highest", "CPU us / 1,000 tokens", "tokenpipe / it"),
        rows,
    )


def show_latencies(args: argparse.Namespace) -> None:
    """Measures and prints the latency of a step at 50 steps/s."""
    rows = []
    for mode in MODES:
        steps = int(_RATE * args.latency_seconds)
        facts = latency.measure(Options(mode, steps, args.rows, args.decoders), _RATE)
        _say(facts)
        for stage in ("ring", "frame", "client"):
            figures = facts[f"save_to_{stage}_us"]
            rows.append([f"{MODES[mode]}: save -> {stage}", *figures.values()])
    table.show(f"latency at {_RATE:g} steps/s, us", ("", "p50", "p99", "max"), rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--decoders", type=int, default=1)
    parser.add_argument("--ring-slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed-seconds", type=float, default=1.5, help="per mode and round")
    parser.add_argument("--latency-seconds", type=float, default=30.0, help="per mode")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    seed.add_arguments(parser)
    args = parser.parse_args()
    args.divisor = 1
    if args.quick:
        args.rounds, args.divisor, args.latency_seconds = min(args.rounds, 3), 4, 10.0
    return args


def main() -> int:
    """Runs the benchmark."""
    args = _arguments()
    baseline = seed.find(args)
    if isinstance(baseline, str):
        print(baseline, file=sys.stderr)
    show_speeds(*measure(args, None if isinstance(baseline, str) else baseline))
    show_latencies(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
