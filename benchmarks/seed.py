"""The seed's speed, measured in the same run by its own script, which is never copied here.

The script stands in ../shared/bench beside the repository, or where a flag says. It needs an
interpreter with paddlepaddle, numpy, prometheus_client and pyzmq; where one is missing, the seed's
part is skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modes import MODES

_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "bench"
_SCRIPT = "seed_baseline.py"
VARIANTS = {"seed": (), "seed, lazy debug strings": ("--cheap-repr",)}
"""As it is, and without the debug string that it formats per row although debug is off."""


@dataclass(frozen=True)
class Seed:
    """The seed's benchmark script and the interpreter that can run it."""

    script: Path
    python: str

    def measure(self, variant: str, batch: int, seconds: float) -> dict[str, dict[str, Any]]:
        """Returns the seed's figures by mode; none, with a line that says so, when it fails.
        Blocks for some seconds per mode."""
        command = [self.python, str(self.script), "micro", f"--modes={','.join(MODES)}"]
        command += [f"--batches={batch}", "--scenarios=steady", f"--seconds={seconds}"]
        command += ["--repeats=1", *VARIANTS[variant]]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if run.returncode != 0:
            print(f"seed: skipped, {_SCRIPT} ended with {run.returncode}", file=sys.stderr)
        figures = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
        return {f["mode"]: f for f in figures}


def tokens_per_s(figures: dict[str, Any]) -> float:
    """Returns tokens/s by the thread's CPU time, which neighbours on the machine do not slow."""
    return float(figures["tokens_per_step"]) * 1e6 / float(figures["cpu_us_step_median"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where the seed is and what runs it."""
    parser.add_argument("--seed-python", help="interpreter that has what it needs")
    parser.add_argument("--seed-folder", type=Path, default=_FOLDER, help=f"where {_SCRIPT} is")


def find(args: argparse.Namespace) -> Seed | str:
    """Returns the seed, or why it is skipped."""
    script = args.seed_folder / _SCRIPT
    if not script.is_file():
        return f"seed: skipped, no {_SCRIPT} there; --seed-folder names another place"
    if not args.seed_python:
        return "seed: skipped, --seed-python names no interpreter that has paddlepaddle"
    return Seed(script, args.seed_python)
