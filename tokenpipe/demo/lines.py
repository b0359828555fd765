"""What the demo prints when nobody watches it live: plain lines or JSON lines, and the summary."""

from __future__ import annotations

import json
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tokenpipe.demo.jobs import Job
from tokenpipe.demo.log import Comparison

if TYPE_CHECKING:
    from tokenpipe.demo.client import Client


def summarise(client: Client, comparison: Comparison, failures: list[str]) -> dict[str, Any]:
    """Returns the facts of a run, as `--json` prints them last."""
    reasons: dict[str, int] = {}
    for job in client.jobs:
        reason = job.finish_reason or "unfinished"
        reasons[reason] = reasons.get(reason, 0) + 1
    latencies_us = np.array(client.latencies_ns) / 1000
    p50, p99 = np.percentile(latencies_us, [50, 99]).tolist() if latencies_us.size else (None, None)
    return {
        "requests": len(client.jobs),
        "tokens": client.num_tokens,
        "lost": comparison.lost,
        "duplicated": comparison.duplicated,
        "mismatched": comparison.mismatched,
        "unexpected": comparison.unexpected,
        "out_of_order": comparison.out_of_order,
        "tokens_per_s": round(client.num_tokens / client.duration_s, 1) if client.num_tokens else 0,
        "latency_us": {"p50": _rounded(p50), "p99": _rounded(p99)},
        "duration_s": round(client.duration_s, 3),
        "finish_reasons": reasons,
        "failures": failures,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


class View:
    """Shows a run. This one shows nothing; the others override what they show."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def __enter__(self) -> View:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def watch(self, client: Client, ready: dict[str, Any], engine_pid: int) -> None:
        """Called once, when every process is up and before the first request is submitted."""

    def finished(self, job: Job) -> None:
        """Called from the client's loop at each request's end."""

    def summary(self, facts: dict[str, Any]) -> None:
        """Called last, outside of the context."""

    def _print(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()


class PlainLines(View):
    """One line of text per request, and a summary to read."""

    def finished(self, job: Job) -> None:
        """Prints the request."""
        text = " ".join((job.prompt + job.stream.text).split())
        self._print(f"{job.request_id} ({job.finish_reason}, {len(job.token_ids)} tokens): {text}")

    def summary(self, facts: dict[str, Any]) -> None:
        """Prints the facts."""
        for line in summary_lines(facts):
            self._print(line)


class JsonLines(View):
    """One JSON object per request and one for the summary; nothing else."""

    def finished(self, job: Job) -> None:
        """Prints the request."""
        self._print(
            json.dumps(
                {
                    "request_id": job.request_id,
                    "prompt": job.prompt,
                    "text": job.stream.text,
                    "tokens": len(job.token_ids),
                    "finish_reason": job.finish_reason,
                    "logprob_sum": round(sum(job.logprobs), 4),
                    "token_ids": job.token_ids,
                    "logprobs": [round(value, 4) for value in job.logprobs],
                    "ranks": job.ranks,
                }
            )
        )

    def summary(self, facts: dict[str, Any]) -> None:
        """Prints the facts."""
        self._print(json.dumps(facts))


def summary_lines(facts: dict[str, Any]) -> list[str]:
    """Returns the summary of a run as lines to read."""
    reasons = ", ".join(
        f"{count} {name}" for name, count in sorted(facts["finish_reasons"].items())
    )
    latency = facts["latency_us"]
    found = [f"lost {facts['lost']}", f"duplicated {facts['duplicated']}"]
    # These are 0 unless something is badly wrong; then each has its say.
    found += [
        f"{name.replace('_', ' ')} {facts[name]}"
        for name in ("mismatched", "unexpected", "out_of_order")
        if facts[name]
    ]
    return [
        "",
        f"{facts['requests']} requests ({reasons}), {facts['tokens']} tokens "
        f"in {facts['duration_s']:.2f} s: {facts['tokens_per_s']:.0f} tokens/s",
        f"from the engine's save to the client: {_shown(latency['p50'])} us (p50), "
        f"{_shown(latency['p99'])} us (p99)",
        f"against the engine's log, value by value: {', '.join(found)}",
    ]
