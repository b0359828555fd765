"""Latency of a step at a fixed rate: from the engine's save to ring, frame and client."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from processes import Engine
from replay import Options

import tokenpipe as tp

_WARM_UP_STEPS = 10


def measure(options: Options, rate: float) -> dict[str, Any]:
    """Returns p50, p99 and maximum of each stage in microseconds. Blocks for steps / rate."""
    stamps = []
    with (
        tp.Pipeline(options.config()) as pipe,
        Engine(
            pipe.name, options.mode, options.steps, options.rows, rate=rate, fixed=True
        ) as engine,
    ):
        engine.admit([_submit(pipe, i, options.steps) for i in range(options.rows)])
        for batch in pipe.batches(timeout_s=10.0):
            now = time.monotonic_ns()
            stamps.append((batch.saved_ns, batch.published_ns, batch.committed_ns, now))
            if batch.num_finals:
                break
        engine.facts()
    return {
        "benchmark": "latency",
        "mode": options.mode,
        "rows": options.rows,
        "steps_per_s": rate,
        "samples": len(stamps) - _WARM_UP_STEPS,
        **_figures(np.array(stamps[_WARM_UP_STEPS:], np.int64)),
    }


def _submit(pipe: tp.Pipeline, i: int, steps: int) -> tp.Admission:
    return pipe.submit(tp.Request(f"latency-{i}", prompt_token_ids=[1], max_tokens=steps))


def _figures(stamps: np.ndarray[Any, Any]) -> dict[str, dict[str, float]]:
    since_save = (stamps[:, 1:] - stamps[:, :1]) / 1e3
    return {
        f"save_to_{stage}_us": {
            "p50": round(float(np.percentile(column, 50)), 1),
            "p99": round(float(np.percentile(column, 99)), 1),
            "max": round(float(column.max()), 1),
        }
        for stage, column in zip(("ring", "frame", "client"), since_save.T, strict=True)
    }
