"""Full and empty rings: nobody is lost who waits, nobody spins, and a stall names who stands."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest
from fake_engine import FakeEngine, token_of
from inprocess import InProcess
from test_supervision import request, serve

import tokenpipe as tp
from support import wait_until

ROWS = 4


def smallest_rings(name: str, **more: Any) -> tp.PipelineConfig:
    return tp.PipelineConfig(
        **{
            "name": name,
            "max_num_seqs": ROWS,
            "top_logprobs": 0,
            "num_decoders": 2,
            "ring_slots": 2,
            "output_slots": 2,
            "source_slots": 2,
            **more,
        }
    )


@contextmanager
def in_a_thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def resident(pipe: tp.Pipeline) -> dict[str, float]:
    return {n: float(r["resident_bytes"]) for n, r in pipe.status()["roles"].items()}


@pytest.mark.parametrize("steps", [1500, pytest.param(40_000, marks=pytest.mark.full)])
def test_a_slow_client_costs_no_token_no_order_and_no_memory(unique_name: str, steps: int) -> None:
    """B03, B08: backpressure instead of loss or growth, and never a step ahead of another."""
    with tp.Pipeline(smallest_rings(unique_name)) as pipe, pipe.engine_writer() as writer:
        engine = FakeEngine(writer, ROWS)
        admissions = [pipe.submit(request(f"r{i}", max_tokens=steps)) for i in range(ROWS)]
        for admission in admissions:
            engine.run(admission)
        with in_a_thread(lambda: [engine.step() for _ in range(steps)]):
            tokens: list[list[int]] = [[] for _ in range(ROWS)]
            seen: list[list[int]] = [[], []]
            before: dict[str, float] = {}
            for number, batch in enumerate(pipe.batches(timeout_s=60)):
                seen[batch.decoder].append(batch.step)
                for row, start, end in zip(
                    batch.row.tolist(),
                    batch.token_offsets.tolist(),
                    batch.token_offsets.tolist()[1:],
                    strict=False,
                ):
                    tokens[row] += batch.token_ids[start:end].tolist()
                if number % 7 == 0:  # so the rings are full again and again
                    pipe.status()
                if number == 200:
                    before = resident(pipe)
                if all(len(own) == steps for own in tokens):
                    break
        for admission in admissions:
            expected = [token_of(admission.row, admission.generation, p) for p in range(steps)]
            assert tokens[admission.row] == expected
        assert all(a < b for own in seen for a, b in pairwise(own))
        assert pipe.status()["source"]["blocked_s"] > 0
        grown = {n: r - before[n] for n, r in resident(pipe).items() if n != "coordinator"}
        assert all(by < 4e6 for by in grown.values()), grown  # what it kept of each step is 100 B


@pytest.mark.parametrize("hold_s", [1.0, pytest.param(35.0, marks=pytest.mark.full)])
def test_who_is_held_back_waits_without_end_and_without_spinning(
    unique_name: str, hold_s: float
) -> None:
    """B14, B16: longer than every time limit of the path (35 s: also the defaults)."""
    limits: dict[str, Any] = {}
    if hold_s < 10:
        limits = {"heartbeat_interval_s": 0.02, "stall_timeout_s": 0.2, "abort_timeout_s": 0.1}
    with (
        tp.Pipeline(smallest_rings(unique_name, **limits)) as pipe,
        pipe.engine_writer() as writer,
    ):
        engine = FakeEngine(writer, ROWS)
        admission = pipe.submit(request("a", max_tokens=40))
        engine.run(admission)
        pids = pipe.pids
        with in_a_thread(lambda: [engine.step() for _ in range(40)]) as thread:
            wait_until(lambda: pipe.status()["source"]["occupancy"] == 2)
            clock = time.pthread_getcpuclockid(thread.ident or 0)
            begun, cpu_begun = time.monotonic(), time.clock_gettime(clock)
            wait_until(lambda: time.monotonic() - begun >= hold_s, timeout_s=2 * hold_s + 20)
            held, cpu = time.monotonic() - begun, time.clock_gettime(clock) - cpu_begun
            assert thread.is_alive(), "the save has given up"
            assert cpu < 0.05 * held, f"a blocked save has used {cpu:.2f} s in {held:.2f} s"
            if limits:
                wait_until(lambda: pipe.health()["role"] == "client", describe=pipe.health)
            tokens: list[int] = []
            for batch in pipe.batches(timeout_s=60):
                tokens += batch.token_ids.tolist()
                if batch.num_finals:
                    break
        assert tokens == [token_of(admission.row, 1, p) for p in range(40)]
        assert pipe.pids == pids, "somebody was replaced while he only waited"


@pytest.mark.parametrize("spin_us", [0.0, 1000.0])
def test_a_step_wakes_everybody_who_sleeps(unique_name: str, spin_us: float) -> None:
    """B11: no wake-up is lost. A sleeper that misses one would sleep for the whole interval."""
    config = tp.PipelineConfig(
        name=unique_name,
        max_num_seqs=ROWS,
        num_decoders=2,
        spin_us=spin_us,
        heartbeat_interval_s=10,
        orphan_grace_s=20,
        stall_timeout_s=1000,
    )
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
        engine = FakeEngine(writer, ROWS)
        for i in range(ROWS):
            engine.run(pipe.submit(request(f"r{i}")))

        def all_sleep() -> bool:
            roles = pipe.status()["roles"]
            return all(role["waits_for"] == "input" for role in roles.values())

        begun = time.monotonic()
        for number in range(20):
            wait_until(all_sleep, describe=lambda: pipe.status()["roles"])
            engine.step()
            got = [(b.decoder, b.token_ids.tolist()) for b in two_batches(pipe)]
            assert sorted(k for k, _ in got) == [0, 1]
            assert sorted(t for _, own in got for t in own) == sorted(
                token_of(row, 1, number) for row in range(ROWS)
            )
        # A watchdog: if each second step were found by the timeout only, it would be 100 s.
        assert time.monotonic() - begun < 50


def two_batches(pipe: tp.Pipeline) -> Iterator[tp.OutputBatch]:
    for count, batch in enumerate(pipe.batches(timeout_s=60), 1):
        yield batch.copy()
        if count == 2:
            break


def test_who_has_nothing_to_do_sleeps(unique_name: str) -> None:
    """B12: an idle role turns once per heartbeat, and uses next to no CPU time."""
    interval_s = 0.05
    config = smallest_rings(unique_name, heartbeat_interval_s=interval_s)
    with tp.Pipeline(config) as pipe:
        pipe.status()

        def turns_and_cpu() -> dict[str, tuple[int, float]]:
            return {n: (r["turns"], r["cpu_s"]) for n, r in pipe.status()["roles"].items()}

        before, begun = turns_and_cpu(), time.monotonic()
        wait_until(lambda: time.monotonic() - begun > 20 * interval_s)
        after = turns_and_cpu()
        elapsed = time.monotonic() - begun
        for name in ("reader", "decoder-0", "decoder-1"):
            turns = after[name][0] - before[name][0]
            assert turns <= 2 * elapsed / interval_s + 4, f"{name}: {turns} turns"
        used = sum(after[n][1] - before[n][1] for n in after)
        assert used < 0.1 * elapsed, f"{used:.2f} s of CPU time in {elapsed:.2f} s"


@pytest.mark.parametrize("steps", [3, pytest.param(1000, marks=pytest.mark.full)])
def test_the_largest_steps_of_the_report_arrive_whole(unique_name: str, steps: int) -> None:
    """B02: 512 rows, top 20, five drafts. No limit of a kernel queue is in the way."""
    rows, depth, width = 512, 6, 21
    config = tp.PipelineConfig(
        name=unique_name,
        max_num_seqs=rows,
        top_logprobs=width - 1,
        max_draft_tokens=depth,
        num_decoders=2,
        ring_slots=2,
        source_slots=2,
        output_slots=2,
    )
    with InProcess(config) as pipe:
        for i in range(rows):
            pipe.submit(request(f"r{i}"))
        ones = np.ones(rows, np.int32)
        for step in range(steps):
            ids = np.arange(rows * depth * width).reshape(rows, depth, width) * 7 + step + 100
            logprobs = -(ids % 1013).astype(np.float32)
            pipe.writer.speculate_save_output_topk(
                ids[:, :, 0], ones * depth, ids, logprobs, ids[:, :, 0] % 99, generations=ones
            )
            pipe.pump()
            batches = list(pipe.batches(by_step=True))
            assert len(batches) == 1
            assert (batches[0].topk_ids == ids.reshape(-1, width)).all()
            assert (batches[0].topk_logprobs == logprobs.reshape(-1, width)).all()
            assert (batches[0].token_ids == ids[:, :, 0].reshape(-1)).all()
        assert pipe.counters()["tokens_delivered"] == steps * rows * depth


@pytest.mark.parametrize("who", ["decoder-1", "client"])
def test_a_stall_costs_one_log_line_that_names_who_stands(unique_name: str, who: str) -> None:
    """B09: not 'no memory', but which process has not moved, and for how long."""
    limits = ("--heartbeat-interval-s=0.05", "--stall-timeout-s=0.5", "--drain-timeout-s=0")
    rings = ("--ring-slots=2", "--output-slots=2", "--source-slots=2")
    with (
        serve(unique_name, *limits, *rings) as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
        tp.EngineWriter.attach(unique_name) as writer,
    ):
        engine = FakeEngine(writer, 8)
        for i in range(8):
            engine.run(pipe.submit(request(f"r{i}", max_tokens=30)))
        pid = os.getpid() if who == "client" else ready["pids"][who]
        if who != "client":
            os.kill(pid, signal.SIGSTOP)  # it is killed once it was silent for the limit
        with in_a_thread(lambda: [engine.step() for _ in range(30)]):
            # The first log line tells it, and from then on the stall goes on and on.
            wait_until(lambda: pipe.health()["state"] in ("stalled", "degraded"))
            if who == "client":
                since = time.monotonic()
                wait_until(lambda: time.monotonic() - since > 0.5)
            else:
                wait_until(lambda: not psutil.pid_exists(pid))
            finals = 0
            for batch in pipe.batches(timeout_s=60):
                finals += batch.num_finals
                if finals == 8:
                    break
        process.terminate()
        said = process.communicate()[1].splitlines()
    told = [line for line in said if "stalled:" in line or "is silent" in line]
    if who == "client":
        [line] = told
        assert re.search(
            rf"the client \(pid {pid}\) has read nothing for \d\.\d s and the output ring of "
            r"decoder-\d is full",
            line,
        )
    else:  # it may be killed before it is judged
        assert 1 <= len(told) <= 2
        assert all(f"{who} (pid {pid})" in line for line in told)
    assert not re.search(r"\b(memory|size)\b", "\n".join(said))
