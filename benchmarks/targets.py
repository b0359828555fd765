"""The speeds that tokenpipe aims at, beside what pipeline.py has measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from modes import MODES

_COLUMNAR = {"plain": 100, "topk": 100, "spec": 50, "spec_topk": 100}
_OBJECTS = {"plain": 25, "topk": 20, "spec": 10, "spec_topk": 20}
_SEED_P99_MS = {"plain": 71, "topk": 72}
"""Of the seed at 50 steps/s, from a run of its own: its sender and queue are not in this one."""
_VLLM_FRONT_END = {"plain": (3, 261_000), "topk": (9, 38_000)}
"""How many times ahead, and the tokens/s of vLLM 0.33's front end on such a machine, without text,
batch 256: not measured in this run."""


@dataclass(frozen=True)
class Measured:
    """What the targets are held against. By mode: tokens/s of batch 256 and latencies in
    microseconds at 50 steps/s. A figure of 0 was not measured."""

    speeds: dict[str, float]
    objects: dict[str, float]
    seeds: dict[str, float]
    floor_ratios: dict[str, float]
    reached_at_512: float
    p99_us_at_512: float
    p50_us: dict[str, float]
    p99_us: dict[str, float]
    busy_to_quiet: dict[str, float]
    cpu_us_per_1000_tokens: float
    collections: dict[str, int]

    def rows(self) -> Iterator[dict[str, object]]:
        """Yields each target: what, the aim, the measured value."""
        for what, found, aims in (
            ("columnar", self.speeds, _COLUMNAR),
            ("an object for every output", self.objects, _OBJECTS),
        ):
            for mode, aim in aims.items():
                ratio = found[mode] / self.seeds[mode] if self.seeds[mode] else "no seed here"
                yield _row(f"{MODES[mode]}, {what}, to the seed as it is", f"{aim} x", ratio)
        for what_floor, ratio in self.floor_ratios.items():
            yield _row(f"copy floor to it, {what_floor}", "at most 5 x", ratio)
        for mode, (times, speed) in _VLLM_FRONT_END.items():
            what = f"{MODES[mode]}, objects, to vLLM's front end ({speed:,} tokens/s)"
            yield _row(what, f"{times} x", self.objects[mode] / speed)
        yield _row("top-20, batch 512, 200 steps/s: reached", "200", self.reached_at_512)
        yield _row("the same, p99 to the client, ms", "under 10", self.p99_us_at_512 / 1e3)
        for mode, p50 in self.p50_us.items():
            yield _row(f"{MODES[mode]}, 50 steps/s, p50 to the client, ms", "under 0.3", p50 / 1e3)
            aim = f"under {_SEED_P99_MS[mode] / 20:.1f}"
            yield _row("the same, p99, ms", aim, self.p99_us[mode] / 1e3)
        for mode, ratio in self.busy_to_quiet.items():
            what = f"{MODES[mode]}, save -> frame p50, busy engine thread to a quiet one"
            yield _row(what, "at most 1.2 x", ratio)
        cpu_ms = self.cpu_us_per_1000_tokens / 1e3
        yield _row("top-20, CPU ms per 1,000 tokens, all processes", "under 1", cpu_ms)
        for role, count in self.collections.items():
            yield _row(f"garbage collections after warm-up, {role}", "0", count)


def _row(what: str, aim: str, measured: float | str) -> dict[str, object]:
    return {"what": what, "target": aim, "measured": measured}
