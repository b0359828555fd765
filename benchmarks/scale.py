"""Cost of a token as the batch, the candidates, the drafts, the decoders and the ring grow.

    python benchmarks/scale.py [--quick] [--plot build/scale.png]

One size grows at a time; the others stay at what a sweep says. The cost is CPU time of all
processes of a pipeline that runs as fast as it can, by token; for candidates by value too, since a
token with twice as many is twice as much to carry. JSON lines on stdout, a table on stderr, a plot.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import table
from pipeline import run_case
from replay import Options


@dataclass(frozen=True)
class Sweep:
    """One size that grows: its field of Options, and what it is to be."""

    title: str
    field: str
    base: Options
    values: tuple[int, ...]

    def cases(self) -> list[Options]:
        """Returns the options of each point."""
        return [replace(self.base, **{self.field: value}) for value in self.values]


def _options(mode: str, **more: Any) -> Options:
    return Options(mode, 0, check=False, is_fixed=True, **more)


SWEEPS = (
    Sweep("batch, plain", "rows", _options("plain"), (1, 8, 32, 64, 128, 256, 512)),
    Sweep("batch, top-20", "rows", _options("topk"), (1, 8, 32, 64, 128, 256, 512)),
    Sweep("top_logprobs + 1, batch 256", "width", _options("topk"), (1, 2, 6, 11, 21, 41, 81)),
    Sweep("draft tokens, batch 256", "depth", _options("spec"), (1, 2, 4, 6, 8)),
    Sweep("draft tokens with top-20, batch 256", "depth", _options("spec_topk"), (1, 2, 4, 6, 8)),
    Sweep("decoders, top-20, batch 256", "decoders", _options("topk"), (1, 2, 4)),
    Sweep("ring slots, top-20, batch 256", "ring_slots", _options("topk"), (2, 4, 16, 64, 256)),
)

Points = dict[tuple[Sweep, int], list[dict[str, float]]]


def measure(args: argparse.Namespace) -> Points:
    """Runs the rounds; returns cost and speed of each point by (sweep, value)."""
    found: Points = defaultdict(list)
    for number in range(args.rounds):
        for sweep in SWEEPS:
            picked = [v for v in sweep.values if not args.quick or v in _ends(sweep.values)]
            for case in sweep.cases():
                value = getattr(case, sweep.field)
                if value not in picked:
                    continue
                facts = run_case(case, args.seconds)
                point = {
                    "cpu_us_per_1000_tokens": facts["cpu_us_per_1000_tokens"],
                    "tokens_per_s": facts["tokens_per_s"],
                }
                found[sweep, value].append(point)
                _say({"sweep": sweep.title, sweep.field: value, "round": number, **point})
    return found


def _ends(values: tuple[int, ...]) -> tuple[int, ...]:
    return values[0], values[len(values) // 2], values[-1]


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": "scale", **facts}), flush=True)


def middle(found: Points, point: tuple[Sweep, int], name: str) -> float:
    """Returns the median of a figure over the rounds."""
    return median(facts[name] for facts in found[point])


def show(found: Points) -> None:
    """Prints the medians."""
    rows = []
    for sweep, value in found:
        cost = middle(found, (sweep, value), "cpu_us_per_1000_tokens")
        by_value = cost / value if sweep.field == "width" else "-"
        speed = middle(found, (sweep, value), "tokens_per_s")
        rows.append([f"{sweep.title}: {value}", cost, by_value, speed])
    head = ("", "CPU us / 1,000 tokens", "by candidate", "tokens/s")
    table.show("cost of a token, medians", head, rows)


def plot(found: Points, path: Path) -> None:
    """Draws every sweep's cost; raises ImportError where matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = list(dict.fromkeys(sweep for sweep, _ in found))
    figure, axes = pyplot.subplots(2, -(-len(sweeps) // 2), figsize=(16, 7))
    for axis, sweep in zip(axes.flat, sweeps, strict=False):
        values = [value for of, value in found if of == sweep]
        costs = [middle(found, (sweep, value), "cpu_us_per_1000_tokens") for value in values]
        axis.plot(values, costs, marker="o")
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [str(value) for value in values])
        if sweep.field == "rows":  # a step costs the same whatever its rows
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(sweep.title, fontsize=10)
        axis.set_ylabel("CPU us / 1,000 tokens")
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(sweeps) :]:
        axis.remove()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one point, roughly")
    default = Path(__file__).resolve().parents[1] / "build" / "scale.png"
    parser.add_argument("--plot", type=Path, default=default)
    parser.add_argument("--quick", action="store_true", help="one round, the ends and the middle")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 0.5
    found = measure(args)
    show(found)
    try:
        plot(found, args.plot)
    except ImportError as error:
        print(f"plot: skipped, {error}: pip install 'tokenpipe[bench]'", file=sys.stderr)
    else:
        print(f"plot: {args.plot}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
