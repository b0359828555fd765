"""What a pipeline is doing, read from its segments alone: for /health, /status, inspect and
metrics.

Every figure is read without stopping anybody; what a decoder commits in one turn is read as one.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from tokenpipe import _native
from tokenpipe.errors import LayoutMismatchError, QueueError
from tokenpipe.layout import (
    CLIENT,
    COMMIT,
    CONSUMER,
    HEADER,
    RING,
    ROLE,
    SOURCE,
    PipelineState,
)
from tokenpipe.segment import LOCK_CLIENT, LOCK_WRITER, Segment, start_time

WAITS = {0: "nothing", 1: "input", 2: "space"}


def role_names(num_decoders: int) -> list[str]:
    """Returns the roles in the order of their tp_role records."""
    return ["coordinator", "reader", *(f"decoder-{k}" for k in range(num_decoders))]


class View:
    """The shared records of a pipeline as numpy records over the mapped memory."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.config = segment.config
        plan, memory = self.config.plan(), segment.core_memory
        n = self.config.num_decoders

        def records(dtype: np.dtype[Any], count: int, offset: int) -> Any:
            return np.frombuffer(memory, dtype=dtype, count=count, offset=offset)

        self.header = records(HEADER, 1, 0)[0]
        self.roles = records(ROLE, 2 + n, plan["roles"])
        self.ring = records(RING, 1, plan["ring"])[0]
        self.consumers = records(CONSUMER, n, plan["consumers"])
        self.client = records(CLIENT, 1, plan["client"])[0]
        self.source = np.frombuffer(segment.source_memory, dtype=SOURCE, count=1)[0]

    def commits(self) -> Any:
        """Returns the committed record of each decoder, counters included (a copy)."""
        raw = b"".join(
            _native.commit_bytes(self.segment.core, k) for k in range(self.config.num_decoders)
        )
        return np.frombuffer(raw, dtype=COMMIT)


# What only the coordinator knows.
_SAID = (
    PipelineState.STARTING,
    PipelineState.DEGRADED,
    PipelineState.FAILED,
    PipelineState.STOPPED,
)


@dataclass(frozen=True)
class Verdict:
    """The state of the pipeline and, where one is at fault, who and why."""

    state: PipelineState
    role: str | None
    reason: str


def _age_s(now_ns: int, then_ns: int) -> float:
    return max(0.0, (now_ns - int(then_ns)) / 1e9)


def state_of(view: View) -> PipelineState:
    """Returns the state that the coordinator has stored. Raises LayoutMismatchError for none that
    there is."""
    number = int(view.header["state"])
    try:
        return PipelineState(number)
    except ValueError:
        wanted = f"0 to {max(PipelineState)}"
        raise LayoutMismatchError(view.config.name, wanted, f"state {number}") from None


def judge(segment: Segment, view: View | None = None) -> Verdict:
    """Returns the pipeline's state as its progress proves it.

    The coordinator's own words count for what only it knows (starting, draining, failed);
    everything else follows from heartbeats and cursors, so a coordinator that hangs is found too.
    """
    view = view or View(segment)
    header, config, now = view.header, view.config, _native.now_ns()
    said = state_of(view)
    reason = bytes(header["reason"]).split(b"\0")[0].decode(errors="replace")
    names = role_names(config.num_decoders)
    if said in _SAID:
        index = int(header["state_role"])
        return Verdict(said, names[index] if index < len(names) else None, reason)
    limit = config.stall_timeout_s
    if limit > 0:
        stalled = _stalled(view, now, limit, names)
        if stalled is not None:
            return stalled
    if said is PipelineState.DRAINING:
        return Verdict(said, None, reason or "draining: nothing new is taken")
    if int(header["live_rows"]) == 0:
        return Verdict(PipelineState.IDLE, None, "no request is running")
    return Verdict(PipelineState.RUNNING, None, f"{int(header['live_rows'])} rows are given out")


def _stalled(view: View, now: int, limit: float, names: list[str]) -> Verdict | None:
    """Looks from our own roles outwards: the first that does not move is the one to name."""
    for name, role in zip(names, view.roles, strict=True):
        age = _age_s(now, role["heartbeat_ns"])
        if age > limit and int(role["heartbeat_ns"]):
            return Verdict(
                PipelineState.STALLED,
                name,
                f"{name} (pid {int(role['pid'])}) has given no heartbeat for {age:.1f} s",
            )
    client = _client_stall(view, now, limit)
    if client is not None:
        return client
    source = view.source
    cursor, believed = int(source["published"]), _native.published(view.segment.source)
    if believed != cursor and int(source["published"]) == cursor:
        return Verdict(
            PipelineState.STALLED,
            "engine",
            f"the engine's cursor says {cursor} steps, which cannot follow {believed} in a ring of "
            f"{view.config.source_slots}: its segment was written over",
        )
    running_since = int(view.header["running_since_ns"])
    if running_since == 0:
        return None
    last = max(running_since, int(source["beat_ns"]))
    age = _age_s(now, last)
    if age > limit and not int(source["busy"]):
        return Verdict(
            PipelineState.STALLED,
            "engine",
            f"the engine has saved no step for {age:.1f} s while "
            f"{int(view.header['running_rows'])} rows run",
        )
    return None


def _client_stall(view: View, now: int, limit: float) -> Verdict | None:
    read = [int(output["released"]) for output in view.client["output"]]  # before what there is
    for k, commit in enumerate(view.commits()):
        frames = int(commit["frames"])
        if read[k] > frames:
            return Verdict(
                PipelineState.STALLED,
                "client",
                f"the client's cursor says that it has read {read[k]} frames of decoder-{k}, of "
                f"which there are {frames}: the segment was written over",
            )
        if frames - read[k] < view.config.output_slots:
            continue
        age = min(
            _age_s(now, view.client["progress_ns"]),
            _age_s(now, view.roles[2 + k]["progress_ns"]),
        )
        if age > limit:
            pid = int(view.client["pid"])
            is_there = view.segment.is_locked(LOCK_CLIENT)
            who = f"the client (pid {pid})" if is_there else "a client that is gone"
            return Verdict(
                PipelineState.STALLED,
                "client",
                f"{who} has read nothing for {age:.1f} s and the output ring of "
                f"decoder-{k} is full",
            )
    return None


def ring_advice(view: View) -> str:
    """Returns one sentence on the ring's size, in words an operator can act on."""
    slots = view.config.ring_slots
    most = max(int(c["high_water"]) for c in view.consumers)
    reader = view.roles[1]
    uptime = max(1e-9, _age_s(_native.now_ns(), view.header["running_since_ns"] or 0))
    blocked_s = int(reader["blocked_ns"]) / 1e9
    if most >= slots:
        slowest = min(
            range(view.config.num_decoders), key=lambda k: int(view.consumers[k]["released"])
        )
        waits_for_client = any(int(r["bell"]["waiting"]) == 2 for r in view.roles[2:])
        culprit = "the client, which reads too slowly" if waits_for_client else f"decoder-{slowest}"
        share = min(100.0, 100 * blocked_s / uptime)
        return (
            f"the ring of {slots} slots was full; the reader waited {blocked_s:.2f} s in all"
            f" ({share:.0f} % of the time) for {culprit}"
        )
    would_do = max(2, 1 << most.bit_length())
    if would_do < slots:
        return f"the ring was never more than {most} of {slots} full: {would_do} slots would do"
    return f"the ring was never more than {most} of {slots} full"


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_figures(pid: int) -> dict[str, float]:
    """Returns CPU seconds, resident bytes and uptime of a process; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)  # no step of the wall clock shows
        with process.oneshot():
            cpu = process.cpu_times()
            return {
                "cpu_s": cpu.user + cpu.system,
                "resident_bytes": process.memory_info().rss,
                "uptime_s": max(0.0, since_boot_s - (start_time(pid) or 0) / _TICKS_PER_S),
            }
    except psutil.Error:
        return {}


def _writer_pid(view: View) -> int | None:
    """Of a queue whoever sent last; else who holds the writer's lock."""
    pid = int(view.source["writer_pid"])
    if view.config.has_writer and not view.segment.is_locked(LOCK_WRITER):
        return None
    return pid or None


def _queue_of(view: View) -> dict[str, Any]:
    """Returns what the kernel says of the System V queue, and what was found in it at the start."""
    queue = view.source["queue"]
    about: dict[str, Any] = {
        "key": f"{int(queue['key']) & 0xFFFFFFFF:#010x}",
        "id": int(queue["id"]),
        "leftovers": int(queue["leftovers"]),
    }
    try:
        facts = _native.Queue(int(queue["key"]), int(queue["id"])).facts()
    except QueueError as error:
        return about | {"error": str(error)}
    return about | {name: facts[name] for name in ("messages", "bytes", "capacity")}


def status_of(segment: Segment) -> dict[str, Any]:
    """Returns everything that /status and `tokenpipe inspect` show, as plain JSON values."""
    view = View(segment)
    config, header, now = view.config, view.header, _native.now_ns()
    plan = config.plan()
    commits = view.commits()
    cursor = int(view.ring["cursor"])
    verdict = judge(segment, view)
    roles = {}
    for index, name in enumerate(role_names(config.num_decoders)):
        role = view.roles[index]
        entry: dict[str, Any] = {
            "pid": int(role["pid"]),
            "epoch": int(role["epoch"]),
            "heartbeat_age_s": round(_age_s(now, role["heartbeat_ns"]), 3),
            "turns": int(role["turns"]),
            "waits_for": WAITS.get(int(role["bell"]["waiting"]), "unknown"),
            "blocked_s": round(int(role["blocked_ns"]) / 1e9, 6),
            "blocked_times": int(role["blocked_times"]),
            **process_figures(int(role["pid"])),
        }
        if index == 1 and int(view.source["reader_bell"]["waiting"]):
            entry["waits_for"] = WAITS[1]  # it sleeps on the source's bell
        if index:
            moved = int(role["progress_ns"])
            entry["progress_age_s"] = round(_age_s(now, moved), 3) if moved else None
        if index >= 2:
            commit = commits[index - 2]
            entry["cursor"] = int(commit["slots_done"])
            entry["lag"] = max(0, cursor - int(commit["slots_done"]))
            entry["high_water"] = int(view.consumers[index - 2]["high_water"])
            released = int(view.client["output"][index - 2]["released"])
            entry["frames"] = int(commit["frames"])
            entry["unread_frames"] = int(commit["frames"]) - released
        roles[name] = entry
    published, source_released = _native.published(segment.source), int(view.source["released"])
    counters = {
        name: int(sum(int(c["counters"][name]) for c in commits))
        for name in commits.dtype["counters"].names
        if name not in ("pad_", "spec_heads")
    }
    return {
        "name": config.name,
        "state": verdict.state.name.lower(),
        "role": verdict.role,
        "reason": verdict.reason,
        "rows": {
            "live": int(header["live_rows"]),
            "of": config.max_num_seqs,
            "high_water": int(header["rows_high_water"]),
        },
        "blocks": {"free": int(header["free_blocks"]), "of": config.num_blocks},
        "waiting_submits": int(header["waiting_submits"]),
        "ring": {
            "slots": config.ring_slots,
            "slot_bytes": plan["slot_bytes"],
            "cursor": cursor,
            "occupancy": max(0, cursor - min(int(c["released"]) for c in view.consumers)),
            "high_water": max(int(c["high_water"]) for c in view.consumers),
            "advice": ring_advice(view),
        },
        "source": {
            "kind": config.source,
            "slots": config.source_slots,
            "published": published,
            "occupancy": max(0, published - source_released),
            "writer_pid": _writer_pid(view),
            "tokens_saved": _native.saved_tokens(segment.source),
            "blocked_s": round(int(view.source["blocked_ns"]) / 1e9, 6),
            **({"queue": _queue_of(view)} if config.source == "sysv" else {}),
        },
        "client_pid": int(view.client["pid"]) if segment.is_locked(LOCK_CLIENT) else None,
        "unmatched_drafts": int(view.client["unmatched_drafts"]),
        "counters": counters,
        "roles": roles,
        "segment": {
            "core_bytes": plan["core_bytes"],
            "ring_bytes": plan["slot_bytes"] * config.ring_slots,
            "output_bytes": plan["frame_bytes"] * config.output_slots * config.num_decoders,
            "control_bytes": plan["slots"],
            "source_bytes": plan["source_bytes"],
        },
    }
