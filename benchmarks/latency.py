"""Latency of a step at a fixed rate: from the engine's save to ring, frame and client."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from replay import Options

import tokenpipe as tp

_WARM_UP_STEPS = 10


def measure(options: Options, rate: float, **flags: Any) -> dict[str, Any]:
    """Returns p50, p99 and maximum of each stage, and of the engine's save, in microseconds.

    `flags` are the engine's: awake, busy, ids. Blocks for steps / rate.
    """
    stamps, finals = [], 0
    with (
        tp.Pipeline(options.config()) as pipe,
        options.engine(pipe.name, rate=rate, **flags) as engine,
    ):
        engine.admit([_submit(pipe, i, options.limit) for i in range(options.rows)])
        for batch in pipe.batches(timeout_s=10.0):
            now = time.monotonic_ns()
            stamps.append((batch.saved_ns, batch.published_ns, batch.committed_ns, now))
            finals += batch.num_finals
            if finals == options.rows:
                break
        save_us = engine.facts()["save_us"]
    if finals != options.rows:
        raise RuntimeError(f"{options.rows - finals} of {options.rows} requests have no final")
    warm = np.array(stamps[_WARM_UP_STEPS * options.decoders :], np.int64)
    saved = np.unique(warm[:, 0])
    return {
        "benchmark": "latency",
        "mode": options.mode,
        "rows": options.rows,
        "decoders": options.decoders,
        "steps_per_s": rate,
        **flags,
        "reached_steps_per_s": round((len(saved) - 1) * 1e9 / float(saved[-1] - saved[0]), 1),
        "samples": len(warm),
        "save_us": save_us,
        **_figures(warm),
    }


def _submit(pipe: tp.Pipeline, i: int, limit: int) -> tp.Admission:
    return pipe.submit(tp.Request(f"latency-{i}", prompt_token_ids=[1], max_tokens=limit))


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
