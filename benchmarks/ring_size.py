"""How large a ring must be to ride out a stall: decoder-0 is stopped for a while at a steady rate.

    python benchmarks/ring_size.py [--quick]

Each case runs with the slots that steps/s x stall gives, rounded up to a power of two, and with a
quarter of them. The first must not have been full; where the engine waits in the second, the slots
were needed. JSON lines on stdout, a table on stderr; exit code 1 when a ring that should have been
large enough was full. (On a busy machine the engine may wait although the ring has room: for a
reader that gets no core, with the steps of the source ring before it.)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import table
from modes import MODES
from replay import Options

import tokenpipe as tp

_BEFORE_S, _AFTER_S = 0.5, 0.5
_CASES = (
    *((mode, 256, 50.0, stall_s) for mode in ("plain", "topk") for stall_s in (0.35, 1.0, 5.0)),
    *((mode, 256, 200.0, stall_s) for mode in ("plain", "topk") for stall_s in (0.35, 1.0, 5.0)),
    *(("topk", 512, rate, stall_s) for rate in (50.0, 200.0) for stall_s in (0.35, 1.0)),
    ("spec_topk", 512, 50.0, 1.0),
)
_QUICK = (("topk", 256, 50.0, 1.0), ("topk", 256, 200.0, 0.35), ("topk", 512, 200.0, 1.0))

Case = tuple[str, int, float, float]
"""Mode, batch, steps/s, seconds of the stall."""


def slots_for(rate: float, stall_s: float) -> int:
    """Returns the power of two that holds the steps of a stall; a ring has at least 2."""
    return max(2, 1 << (int(rate * stall_s + 0.999) - 1).bit_length())


def measure(case: Case, ring_slots: int) -> dict[str, Any]:
    """Runs one case; returns how long the engine waited, and how full the ring was."""
    mode, rows, rate, stall_s = case
    steps = round(rate * (_BEFORE_S + stall_s + _AFTER_S))
    options = Options(mode, steps, rows, ring_slots=ring_slots, check=False, is_fixed=True)
    with (
        tp.Pipeline(options.config()) as pipe,
        options.engine(pipe.name, rate=rate) as engine,
    ):
        requests = (
            tp.Request(f"stall-{i}", prompt_token_ids=[1], max_tokens=options.limit)
            for i in range(rows)
        )
        engine.admit([pipe.submit(request) for request in requests])
        stall = threading.Thread(target=_stall, args=(pipe.pids["decoder-0"], stall_s))
        finals = 0
        for batch in pipe.batches(timeout_s=stall_s + 10.0):
            if not stall.ident:
                stall.start()  # the engine has begun
            finals += batch.num_finals
            if finals == rows:
                break
        stall.join()
        engine.facts()
        status = pipe.status()
        slot_bytes = options.config().plan()["slot_bytes"]
    return {
        "mode": mode,
        "rows": rows,
        "steps_per_s": rate,
        "stall_s": stall_s,
        "slots": ring_slots,
        "ring_mb": round(ring_slots * slot_bytes / 1e6, 2),
        "most_used": status["roles"]["decoder-0"]["high_water"],
        "engine_waited_s": round(status["source"]["blocked_s"], 3),
        "finals": finals,
    }


def _stall(pid: int, seconds: float) -> None:
    time.sleep(_BEFORE_S)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cases")
    args = parser.parse_args()
    rows, is_right = [], True
    for case in _QUICK if args.quick else _CASES:
        slots = slots_for(*case[2:])
        for tried in (slots, max(2, slots // 4)):
            facts = measure(case, tried)
            print(json.dumps({"benchmark": "ring_size", **facts}), flush=True)
            mode, batch, rate, stall_s = case
            words = f"{MODES[mode]}, {batch}, {rate:g}/s, {stall_s:g} s"
            figures = [facts[n] for n in ("ring_mb", "most_used", "engine_waited_s")]
            rows.append([words, tried, *figures])
            is_right &= facts["finals"] == batch
            is_right &= tried != slots or facts["most_used"] < slots
    head = ("mode, batch, rate, stall", "slots", "MB", "most used", "engine waited, s")
    table.show("a decoder that stalls", head, rows)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
