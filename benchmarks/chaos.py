"""Chaos: roles are killed at random under full load, and nothing may be lost or come twice.

    python benchmarks/chaos.py --minutes 5
    python benchmarks/chaos.py --minutes 1 --mode topk --decoders 2 --every-ms 300

Prints one JSON line: tokens saved and delivered, lost, duplicated, wrong, kills and recovery times
by role, restarts, poison slots, what is left in /dev/shm. Exits with 1 when something is lost,
doubled, wrong, uncounted or left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
from replay import Options, Outcome, Replay

import tokenpipe as tp

_SHM = "/dev/shm"
_GIVE_UP_S = 60.0
_UP = ("running", "idle")


def segments(name: str) -> list[str]:
    """Returns the segment files of one pipeline."""
    return sorted(found for found in os.listdir(_SHM) if name in found)


class Killer(threading.Thread):
    """Kills a random role, waits until the pipeline is whole again, and so on."""

    def __init__(self, pipe: tp.Pipeline, every_s: float, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._pipe = pipe
        self._every_s = every_s
        self._random = random.Random(seed)
        self._ending = threading.Event()
        self.recoveries: dict[str, list[float]] = {}

    def run(self) -> None:
        """Goes on until stop()."""
        while not self._ending.wait(self._every_s * self._random.uniform(0.5, 1.5)):
            role = self._random.choice(sorted(self._pipe.pids))
            pid = self._pipe.pids[role]
            begun = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            while not self._is_whole(role, pid):
                if time.monotonic() - begun > _GIVE_UP_S:
                    self.recoveries.setdefault(role, []).append(float("inf"))
                    return
                time.sleep(0.002)
            self.recoveries.setdefault(role, []).append(time.monotonic() - begun)

    def _is_whole(self, role: str, dead: int) -> bool:
        return self._pipe.pids[role] not in (0, dead) and self._pipe.health()["state"] in _UP

    def stop(self) -> None:
        """Ends the killing; returns when the last victim has been replaced."""
        self._ending.set()
        self.join()


class Chaos(Replay):
    """A replay whose roles are killed meanwhile."""

    def __init__(self, options: Options, rate: float, every_s: float, seed: int) -> None:
        super().__init__(options)
        self._rate, self._every_s, self._seed = rate, every_s, seed
        self.name = f"chaos-{secrets.token_hex(8)}"
        self.recoveries: dict[str, list[float]] = {}

    def run(self) -> Outcome:
        """Blocks until every step is delivered and every request has its final."""
        options = self._options
        config = replace(
            options.config(), name=self.name, max_restarts=10**9, restart_backoff_s=0.0
        )
        with (
            tp.Pipeline(config) as pipe,
            options.engine(pipe.name, rate=self._rate) as engine,
        ):
            admissions = [self._submit(pipe) for _ in range(options.rows)]
            engine.admit(admissions)
            killer = Killer(pipe, self._every_s, self._seed)
            killer.start()
            self._resident = [{}, {}]  # the processes change: their memory is not followed
            self._read(pipe, engine)
            killer.stop()
            self.recoveries = killer.recoveries
            self._finish(pipe, engine)
            return self._outcome({}, {}, pipe.status())


def report(chaos: Chaos, outcome: Outcome) -> dict[str, Any]:
    """Returns the facts as one JSON object."""
    counts, status = outcome.counts, outcome.status
    counters = status["counters"]
    dropped = {n: v for n, v in counters.items() if n.startswith("dropped_") and v}
    saved, delivered = status["source"]["tokens_saved"], counters["tokens_delivered"]
    times = [t for of_role in chaos.recoveries.values() for t in of_role]
    return {
        "benchmark": "chaos",
        "mode": chaos._options.mode,
        "wall_s": round(outcome.wall_s, 1),
        "requests": outcome.num_requests,
        "finals": outcome.num_finals,
        "saved": saved,
        "delivered": delivered,
        "dropped": dropped,
        "adds_up": saved == delivered + sum(dropped.values()) and delivered == counts.tokens,
        "lost": counts.lost,
        "duplicated": counts.duplicated,
        "wrong": counts.wrong,
        "kills": {role: len(of_role) for role, of_role in sorted(chaos.recoveries.items())},
        "restarts": sum(r["epoch"] - 1 for r in status["roles"].values()),
        "recovery_s": {
            "p50": round(float(np.percentile(times, 50)), 3) if times else None,
            "p99": round(float(np.percentile(times, 99)), 3) if times else None,
        },
        "poison_slots": counters["poison_slots"],
        "leaked": segments(chaos.name),
    }


def is_right(facts: dict[str, Any]) -> bool:
    """Returns whether nothing is lost, doubled, wrong, uncounted or left behind."""
    if facts["lost"] or facts["duplicated"] or facts["wrong"] or facts["leaked"]:
        return False
    return bool(facts["adds_up"]) and facts["finals"] == facts["requests"]


def main() -> int:
    """Runs one chaos."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--mode", choices=("plain", "topk"), default="plain")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--decoders", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1500.0, help="steps/s that the engine tries")
    parser.add_argument("--every-ms", type=float, default=300.0, help="mean time between kills")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    steps = int(args.minutes * 60 * args.rate)
    options = Options(args.mode, steps, args.rows, args.decoders, churn=True)
    chaos = Chaos(options, args.rate, args.every_ms / 1000, args.seed)
    outcome = chaos.run()
    facts = report(chaos, outcome)
    print(json.dumps(facts), flush=True)
    return 0 if is_right(facts) else 1


if __name__ == "__main__":
    sys.exit(main())
