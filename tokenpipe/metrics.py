"""Prometheus metrics, made at scrape time from the counters in the segment.

A counter is defined once: a field of tp_counters in layout.h. The help texts below are its only
other mention; a test compares the two. Totals survive a role's restart, as they live in the
segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tokenpipe import _native
from tokenpipe.layout import COUNTERS, DECODER
from tokenpipe.segment import Segment
from tokenpipe.status import View, judge, process_figures, role_names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTER_HELP = {
    "steps": "steps decoded",
    "rows_seen": "rows of steps looked at",
    "tokens_seen": "tokens found in steps",
    "tokens_delivered": "tokens written to output frames",
    "dropped_padded": "tokens of padded rows (generation 0)",
    "dropped_unadmitted": "tokens of rows without an admission",
    "dropped_stale": "tokens of an older generation of their row",
    "dropped_early": "tokens saved before their admission",
    "dropped_finished": "tokens saved after their request's end",
    "dropped_repeated": "tokens of a position that was delivered before",
    "dropped_bad_row": "tokens of rows that failed a check",
    "dropped_chunk": "tokens of prefill chunks that are not the last",
    "dropped_adapter": "end tokens that the internal adapter does not want",
    "dropped_prefill": "drafts behind a prefill instance's first token",
    "dropped_shielded": "tokens of a decode instance's row that is being preempted",
    "dropped_warm_up": "tokens of warm-up requests",
    "finals_stop": "requests ended by an end token",
    "finals_length": "requests ended by max_tokens",
    "finals_abort": "requests aborted",
    "finals_recovery": "requests that the engine could not recover",
    "finals_error": "requests ended by an error",
    "finals_shutdown": "requests ended by a shutdown",
    "acknowledgements": "acknowledged rows (state 3)",
    "bad_rows": "steps refused: more rows than max_num_seqs",
    "bad_width": "steps refused: more candidates than top_logprobs + 1",
    "bad_tokens": "steps refused: token count does not follow from the rows",
    "bad_bytes": "steps refused: body of another size than its counts give",
    "bad_flags": "steps refused: unknown mode or flag",
    "bad_sequence": "steps refused: not the step that is due at this place of the ring",
    "bad_message": "messages refused: not what this source sends",
    "bad_lost": "steps lost: they lay on the GPU of an engine that died",
    "completions": "requests that ended with a result",
    "draft_rows_seen": "rows of draft steps",
    "draft_rows_delivered": "rows of draft steps that are delivered",
    "prompt_rows": "pieces of prompt logprobs",
    "poison_slots": "slots skipped because they killed their decoder twice",
    "spec_rows": "rows of speculative steps that emitted",
    "spec_heads": "tokens emitted by draft head, head 0 the target model's own",
}

_MAX_DRAFTS = _native.MAX_DRAFT_TOKENS
_DROPPED, _FINALS, _BAD = "dropped_", "finals_", "bad_"

# FastDeploy's histograms: name in the segment, exported name, help, unit of the bounds.
_FASTDEPLOY_HISTOGRAMS = (
    ("time_to_first_token", "time_to_first_token_seconds", "arrival to first token", 1e-9),
    ("time_per_output_token", "time_per_output_token_seconds", "gap between tokens", 1e-9),
    ("request_queue_time", "request_queue_time_seconds", "preprocessed to running", 1e-9),
    ("request_prefill_time", "request_prefill_time_seconds", "running to first token", 1e-9),
    ("request_decode_time", "request_decode_time_seconds", "first token to the end", 1e-9),
    ("request_inference_time", "request_inference_time_seconds", "running to the end", 1e-9),
    ("request_generation_tokens", "request_generation_tokens", "tokens of a request", 1.0),
    ("request_token_ratio", "request_token_ratio", "tokens per second of a request", 1e-3),
)


class _PipelineCollector(Collector):
    def __init__(self, segment: Segment) -> None:
        self._view = View(segment)

    def collect(self) -> Iterator[Metric]:
        """Yields every family from one reading of the segment."""
        view = self._view
        yield from _counters(view.commits())
        yield from _gauges(view)
        yield from _latencies(view)
        yield from _fastdeploy(view)
        yield from _processes(view)

    def describe(self) -> list[Metric]:
        return []


def _totals(commits: Any) -> dict[str, int]:
    return {
        name: sum(int(c["counters"][name]) for c in commits)
        for name in COUNTERS.names or ()
        if name not in ("pad_", "spec_heads")
    }


def _heads(commits: Any, num_speculative_tokens: int) -> list[int]:
    counts = [sum(int(c["counters"]["spec_heads"][j]) for c in commits) for j in range(_MAX_DRAFTS)]
    return counts[: num_speculative_tokens + 1]


def _counters(commits: Any) -> Iterator[Metric]:
    labelled = {
        _DROPPED: CounterMetricFamily(
            "tokenpipe_tokens_dropped", "tokens not delivered", labels=["reason"]
        ),
        _FINALS: CounterMetricFamily("tokenpipe_requests", "requests ended", labels=["reason"]),
        _BAD: CounterMetricFamily("tokenpipe_bad_slots", "steps refused", labels=["reason"]),
    }
    for name, value in _totals(commits).items():
        prefix = next((p for p in labelled if name.startswith(p)), None)
        if prefix is not None:
            labelled[prefix].add_metric([name[len(prefix) :]], value)
        else:
            # `steps` is counted by every decoder: each sees every slot.
            total = max(int(c["counters"][name]) for c in commits) if name == "steps" else value
            yield CounterMetricFamily(f"tokenpipe_{name}", COUNTER_HELP[name], value=total)
    yield from labelled.values()
    heads = CounterMetricFamily("tokenpipe_spec_heads", COUNTER_HELP["spec_heads"], labels=["head"])
    for head, count in enumerate(_heads(commits, _MAX_DRAFTS - 1)):
        heads.add_metric([str(head)], count)
    yield heads
    yield CounterMetricFamily(
        "tokenpipe_frames", "output frames", value=sum(int(c["frames"]) for c in commits)
    )


def _gauges(view: View) -> Iterator[Metric]:
    config, header = view.config, view.header
    cursor = int(view.ring["cursor"])
    published = _native.published(view.segment.source)
    occupancy = cursor - min(int(c["released"]) for c in view.consumers)
    verdict = judge(view.segment, view)
    state = GaugeMetricFamily("tokenpipe_state", "1 for the pipeline's state", labels=["state"])
    for known in type(verdict.state):
        state.add_metric([known.name.lower()], float(known is verdict.state))
    yield state
    for name, help_text, value in (
        ("ring_slots", "slots of the ring", config.ring_slots),
        ("ring_occupancy", "slots not yet released by every decoder", max(0, occupancy)),
        (
            "ring_high_water",
            "most slots that a decoder found published",
            max(int(c["high_water"]) for c in view.consumers),
        ),
        (
            "source_occupancy",
            "steps saved and not yet in the ring",
            max(0, published - int(view.source["released"])),
        ),
        ("rows_live", "rows given out", int(header["live_rows"])),
        ("rows", "rows of a batch", config.max_num_seqs),
        ("blocks_free", "KV blocks nobody owns", int(header["free_blocks"])),
        ("waiting_submits", "requests that wait for a row", int(header["waiting_submits"])),
    ):
        yield GaugeMetricFamily(f"tokenpipe_{name}", help_text, value=value)
    yield CounterMetricFamily("tokenpipe_slots_published", "slots published", value=cursor)
    yield CounterMetricFamily(
        "tokenpipe_tokens_saved",
        "tokens saved by the engine",
        value=_native.saved_tokens(view.segment.source),
    )
    blocked = CounterMetricFamily(
        "tokenpipe_blocked_seconds", "time waited for space", labels=["role"]
    )
    for name, role in zip(role_names(config.num_decoders), view.roles, strict=True):
        blocked.add_metric([name], int(role["blocked_ns"]) / 1e9)
    blocked.add_metric(["engine"], int(view.source["blocked_ns"]) / 1e9)
    yield blocked


def _histogram(decoders: Any, key: str, name: str, help_text: str, unit: float) -> Metric:
    counts = sum(d[key]["count"].astype(int) for d in decoders)
    bounds = [repr(bound * unit) for bound in _native.BOUNDS[key]]
    buckets, so_far = [], 0
    for bound, count in zip([*bounds, "+Inf"], counts, strict=False):
        so_far += int(count)
        buckets.append((bound, float(so_far)))
    total = sum(int(d[key]["sum"]) for d in decoders) * unit
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=total)


def _decoders(view: View) -> Any:
    plan, config = view.config.plan(), view.config
    return np.frombuffer(
        view.segment.core_memory, dtype=DECODER, count=config.num_decoders, offset=plan["decoders"]
    )


def _latencies(view: View) -> Iterator[Metric]:
    for name, help_text in (
        ("saved_to_published", "engine's save to slot in the ring"),
        ("saved_to_committed", "engine's save to readable frame"),
    ):
        yield _histogram(_decoders(view), name, f"tokenpipe_{name}_seconds", help_text, 1e-9)


def _fastdeploy(view: View) -> Iterator[Metric]:
    """The names that FastDeploy's dashboards know (shared/spec/token-processor.md section 3)."""
    prefix, config = view.config.metrics_prefix, view.config
    for key, name, help_text, unit in _FASTDEPLOY_HISTOGRAMS:
        yield _histogram(_decoders(view), key, prefix + name, help_text, unit)
    commits = view.commits()
    totals = _totals(commits)
    live = int(view.header["live_rows"])
    for name, help_text, value in (
        ("generation_tokens", "tokens delivered", totals["tokens_delivered"]),
        ("request_success", "requests that ended with a result", totals["completions"]),
    ):
        yield CounterMetricFamily(prefix + name, help_text, value=value)
    for name, help_text, value in (
        ("num_requests_running", "rows given out", live),
        ("batch_size", "rows given out", live),
        ("available_batch_size", "free rows", config.max_num_seqs - live),
        ("available_gpu_block_num", "free KV blocks", int(view.header["free_blocks"])),
    ):
        yield GaugeMetricFamily(prefix + name, help_text, value=value)
    if config.speculative_method != "none":
        yield from _speculation(view, commits, totals["spec_rows"])


def _speculation(view: View, commits: Any, rows: int) -> Iterator[Metric]:
    """Section 5 of the same, with its faults F16 and F35 to F40 put right."""
    prefix, n = view.config.metrics_prefix + "spec_decode_", view.config.num_speculative_tokens
    heads = _heads(commits, n)
    emitted, accepted = sum(heads), sum(heads[1:])
    is_mtp = view.config.speculative_method == "mtp"
    drafted = rows * n if is_mtp else emitted
    yield CounterMetricFamily(prefix + "num_accepted_tokens", "accepted drafts", value=accepted)
    yield CounterMetricFamily(prefix + "num_emitted_tokens", "emitted tokens", value=emitted)
    yield GaugeMetricFamily(
        prefix + "draft_acceptance_rate",
        "accepted drafts per draft",
        value=accepted / drafted if drafted else 0.0,
    )
    if not is_mtp:
        return
    most = rows * (n + 1)
    yield CounterMetricFamily(prefix + "num_draft_tokens", "drafts", value=drafted)
    yield GaugeMetricFamily(
        prefix + "efficiency", "emitted tokens per slot", value=emitted / most if most else 0.0
    )
    for i in range(1, n + 1):
        yield GaugeMetricFamily(
            f"{prefix}draft_single_head_acceptance_rate_{i - 1}",
            f"accepted drafts of head {i} per accepted of head {i - 1}",
            value=heads[i] / heads[i - 1] if heads[i - 1] else 0.0,
        )


def _processes(view: View) -> Iterator[Metric]:
    cpu = CounterMetricFamily("tokenpipe_role_cpu_seconds", "CPU time", labels=["role"])
    starts = CounterMetricFamily("tokenpipe_role_starts", "lives of the role", labels=["role"])
    resident = GaugeMetricFamily(
        "tokenpipe_role_resident_bytes", "resident memory", labels=["role"]
    )
    uptime = GaugeMetricFamily(
        "tokenpipe_role_uptime_seconds", "age of the process", labels=["role"]
    )
    age = GaugeMetricFamily(
        "tokenpipe_heartbeat_age_seconds", "time since the role's last heartbeat", labels=["role"]
    )
    now = _native.now_ns()
    for name, role in zip(role_names(view.config.num_decoders), view.roles, strict=True):
        starts.add_metric([name], int(role["epoch"]))
        age.add_metric([name], max(0.0, (now - int(role["heartbeat_ns"])) / 1e9))
        figures = process_figures(int(role["pid"]))
        if figures:
            cpu.add_metric([name], figures["cpu_s"])
            resident.add_metric([name], figures["resident_bytes"])
            uptime.add_metric([name], figures["uptime_s"])
    yield from (cpu, starts, resident, uptime, age)


class Exporter:
    """Makes the text of /metrics."""

    def __init__(self, segment: Segment) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_PipelineCollector(segment))

    def scrape(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
