"""The seed and tokenpipe on the same generated messages: what was met, and what differs.

    python benchmarks/differential.py --steps 20000 --seed 7

Exit code 0: no difference outside the list and every entry of the list met; 1 otherwise; 2 when the
seed is not there.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from seed_driver import WHY_SKIPPED, find_seed
from test_differential import DIFFERENCES, Tally, long_run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000, help="steps to generate")
    parser.add_argument("--seed", type=int, help="of the generator; default: a new one")
    parser.add_argument("--show", type=int, default=5, help="differences outside the list to print")
    args = parser.parse_args()
    number = secrets.randbits(32) if args.seed is None else args.seed
    seed = find_seed()
    if seed is None:
        print(WHY_SKIPPED, file=sys.stderr)
        return 2
    begun = time.monotonic()
    tally = long_run(seed, args.steps, number, stops=False)
    report(tally, number, time.monotonic() - begun, args.show)
    return 1 if tally.outside or tally.missed() else 0


def report(tally: Tally, number: int, seconds: float, show: int) -> None:
    """Prints what a run has met."""
    modes = ", ".join(f"{mode} {steps}" for mode, steps in sorted(tally.modes.items()))
    print(f"generator seed {number}, {seconds:.1f} s")
    print(f"modes: {modes}")
    print(f"steps: {tally.steps}, rows: {tally.rows}, outputs: {tally.outputs}")
    print(f"tokens: {tally.tokens}")
    print("differences by allowed fault:")
    for fault, (theirs, _ours) in DIFFERENCES.items():
        print(f"  {fault:4} {tally.hits[fault]:7}  {theirs}")
    for fault in tally.missed():
        print(f"not met: {fault}")
    for text in tally.outside[:show]:
        print(text, file=sys.stderr)
    print(f"differences outside the list: {len(tally.outside)}")


if __name__ == "__main__":
    sys.exit(main())
