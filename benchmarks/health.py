"""Health: how fast /health answers, idle and under full load.

    python benchmarks/health.py [--calls 1000] [--rows 256]

A new connection per call, as a probe makes it. Under load the engine saves as fast as it is taken
and a client reads. A JSON line each on stdout, a table on stderr; exits with 1 when an answer is
not 200 or the p99 under load is 100 ms or more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import table
from processes import Engine

import tokenpipe as tp

_LIMIT_MS = 100.0
_ENDLESS = 10**9
_TIMEOUT_S = 10.0


def ask(url: str, calls: int) -> dict[str, Any]:
    """Returns the answer times of `calls` calls in milliseconds, and the codes."""
    place = urlsplit(url)
    assert place.hostname is not None
    times, codes = [], Counter[int]()
    for _ in range(calls):
        begun = time.perf_counter()
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=_TIMEOUT_S)
        connection.request("GET", place.path)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        times.append((time.perf_counter() - begun) * 1e3)
        codes[answer.status] += 1
    return {
        "calls": calls,
        "p50_ms": round(float(np.percentile(times, 50)), 2),
        "p99_ms": round(float(np.percentile(times, 99)), 2),
        "max_ms": round(max(times), 2),
        "codes": dict(codes),
    }


class Reader:
    """A client that reads all there is, in a thread."""

    def __init__(self, pipe: tp.Pipeline) -> None:
        self._pipe = pipe
        self._stop = threading.Event()
        self.tokens = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            for batch in self._pipe.batches(timeout_s=0.1):
                self.tokens += batch.num_tokens
                if self._stop.is_set():
                    break

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the figures, idle and under load."""
    config = tp.PipelineConfig(
        max_num_seqs=args.rows,
        top_logprobs=20,
        num_decoders=args.decoders,
        ring_slots=8,
        log_level="warning",
    )
    with ExitStack() as engines, tp.Pipeline(config) as pipe:
        idle = ask(pipe.health_url, args.calls)
        # Left after the pipeline has ended: that is what ends an engine without a last step.
        engine = engines.enter_context(Engine(pipe.name, "topk", _ENDLESS, args.rows, fixed=True))
        requests = (tp.Request(f"load-{i}", prompt_token_ids=[1]) for i in range(args.rows))
        engine.admit([pipe.submit(request) for request in requests])
        with Reader(pipe) as reader:
            while not reader.tokens:
                time.sleep(0.01)
            begun, before = time.monotonic(), reader.tokens
            load = ask(pipe.health_url, args.calls)
            load["tokens_per_s"] = round((reader.tokens - before) / (time.monotonic() - begun))
    facts = {"benchmark": "health", "rows": args.rows, "decoders": config.num_decoders}
    return [{**facts, "load": "idle", **idle}, {**facts, "load": "full", **load}]


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--decoders", type=int, default=0, help="0: the default")
    args = parser.parse_args()
    found = measure(args)
    for facts in found:
        print(json.dumps(facts), flush=True)
    rows = [[f["load"], f["p50_ms"], f["p99_ms"], f["max_ms"]] for f in found]
    table.show("answer times of /health, ms", ("", "p50", "p99", "max"), rows)
    is_good = all(set(f["codes"]) == {200} for f in found)
    return 0 if is_good and found[1]["p99_ms"] < _LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
