"""Idle: CPU time and memory of a pipeline that nobody uses.

    python benchmarks/idle.py [--seconds 30] [--decoders 2]

Starts `tokenpipe serve`, attaches an engine writer and a client that waits for batches, and does
nothing. One JSON line on stdout, a table on stderr; exits with 1 at 1 % of a core or more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import table
from processes import cpu_seconds, resident_mb

import tokenpipe as tp

_LIMIT_PERCENT = 1.0
_SETTLE_S = 1.0
_STOP_S = 20.0


@contextmanager
def served(config: tp.PipelineConfig) -> Iterator[dict[str, Any]]:
    """Runs `tokenpipe serve`; gives what its ready line says, and stops it by SIGTERM."""
    command = [sys.executable, "-m", "tokenpipe", "serve", f"--name={config.name}"]
    process = subprocess.Popen([*command, *config.to_cli_args()], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"serve ended with {process.wait(_STOP_S)}")
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(_STOP_S)


def measure(num_decoders: int, seconds: float) -> dict[str, Any]:
    """Returns the figures. Blocks for `seconds` and a little more."""
    config = tp.PipelineConfig(num_decoders=num_decoders, log_level="warning")
    with (
        served(config) as facts,
        tp.EngineWriter.attach(config.name),
        tp.Pipeline.attach(config.name) as client,
    ):
        pids = {"coordinator": int(facts["pid"]), **facts["pids"]}
        for _ in client.batches(timeout_s=_SETTLE_S):
            pass
        before, begun = cpu_seconds(pids), time.monotonic()
        for _ in client.batches(timeout_s=seconds):
            pass
        after, wall_s = cpu_seconds(pids), time.monotonic() - begun
        percent = {r: round(100 * (after[r] - before[r]) / wall_s, 3) for r in after}
        client_percent = percent.pop("client")
        return {
            "benchmark": "idle",
            "seconds": round(wall_s, 1),
            "percent_of_a_core": round(sum(percent.values()), 3),
            "by_role": percent,
            "waiting_client_percent": client_percent,
            "resident_mb": resident_mb(pids),
        }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--decoders", type=int, default=0, help="0: the default")
    args = parser.parse_args()
    facts = measure(args.decoders, args.seconds)
    print(json.dumps(facts), flush=True)
    rows = [[r, p, facts["resident_mb"][r]] for r, p in facts["by_role"].items()]
    rows.append(["all together", facts["percent_of_a_core"], ""])
    rows.append(["a client that waits", facts["waiting_client_percent"], ""])
    table.show("idle", ("", "% of a core", "resident MB"), rows)
    return 0 if facts["percent_of_a_core"] < _LIMIT_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
