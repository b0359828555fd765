"""Field reports on health, metrics and the life of requests that no other test holds
(FIELD_REPORTS.md)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import psutil
import pytest
from fake_engine import FakeEngine
from inprocess import InProcess
from test_supervision import read_to_the_end, request, serve

import tokenpipe as tp
from support import wait_until
from tokenpipe import health as health_module
from tokenpipe.health import HealthServer
from tokenpipe.layout import PipelineState
from tokenpipe.metrics import Exporter
from tokenpipe.status import Verdict, View, role_names

ROWS = 8

# ---------------------------------------------------------------- the health endpoint


def get(url: str, timeout_s: float = 20) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except HTTPError as e:
        return e.code, dict(e.headers), e.read()


class Endpoint:
    """A pipeline in this process with its health endpoint."""

    def __init__(self, name: str, **sizes: Any) -> None:
        self._stack = ExitStack()
        config = tp.PipelineConfig(
            **{"name": name, "max_num_seqs": ROWS, "top_logprobs": 0, "num_decoders": 2, **sizes}
        )
        self.pipe = self._stack.enter_context(InProcess(config))
        self.server = self._stack.enter_context(HealthServer(self.pipe.segment))
        self.base = self.server.url.removesuffix("/health")

    def close(self) -> None:
        """Ends it."""
        self._stack.close()


@pytest.fixture
def endpoint(unique_name: str) -> Iterator[Endpoint]:
    endpoint = Endpoint(unique_name)
    try:
        yield endpoint
    finally:
        endpoint.close()


def test_each_kind_of_failure_has_its_code_and_body(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, headers, body = get(endpoint.base + "/nothing")
    assert (code, headers.get("Retry-After")) == (404, None)
    assert json.loads(body) == {"error": "unknown path", "paths": health_module.PATHS}
    endpoint.pipe.book.set_state(int(PipelineState.FAILED), 2, "decoder-0 is dead")
    code, headers, body = get(endpoint.server.url)
    assert (code, headers["Retry-After"]) == (503, "1")
    assert json.loads(body) == {
        "state": "failed",
        "role": "decoder-0",
        "reason": "decoder-0 is dead",
    }

    def fail(*_: object) -> Verdict:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(health_module, "judge", fail)
        code, headers, body = get(endpoint.server.url)
        assert (code, headers.get("Retry-After")) == (500, None)
        assert body == b"internal error, see the log\n"
    assert get(endpoint.server.url)[0] == 503  # and it answers again


@pytest.mark.parametrize(
    ("state", "role", "codes"),
    [
        (PipelineState.STARTING, None, (200, 503, 503)),
        (PipelineState.IDLE, None, (200, 200, 200)),
        (PipelineState.RUNNING, None, (200, 200, 200)),
        (PipelineState.DEGRADED, "reader", (200, 503, 503)),
        (PipelineState.DRAINING, None, (200, 503, 503)),
        (PipelineState.STALLED, "engine", (200, 503, 503)),
        (PipelineState.STALLED, "client", (200, 503, 503)),
        (PipelineState.STALLED, "decoder-1", (503, 503, 503)),
        (PipelineState.STALLED, "coordinator", (503, 503, 503)),
        (PipelineState.FAILED, "reader", (503, 503, 503)),
    ],
)
def test_the_paths_answer_by_the_table_of_states(
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    state: PipelineState,
    role: str | None,
    codes: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(health_module, "judge", lambda *_: Verdict(state, role, "because"))
    paths = ("/livez", "/readyz", "/health")
    assert tuple(get(endpoint.base + path)[0] for path in paths) == codes
    body = json.loads(get(endpoint.server.url)[2])
    assert body == {"state": state.name.lower(), "role": role, "reason": "because"}


def test_a_coordinator_whose_loop_hangs_is_told_by_its_own_endpoint(unique_name: str) -> None:
    endpoint = Endpoint(unique_name, heartbeat_interval_s=0.01, stall_timeout_s=0.05)
    try:
        endpoint.pipe.book.set_state(int(PipelineState.IDLE), 2**32 - 1, "")
        endpoint.pipe.book.beat()  # and never again; the others go on
        roles = View(endpoint.pipe.segment).roles
        roles["heartbeat_ns"][1:] = 2**63
        wait_until(lambda: get(endpoint.base + "/livez")[0] == 503)
        code, _, body = get(endpoint.server.url)
        told = json.loads(body)
        assert (code, told["state"], told["role"]) == (503, "stalled", "coordinator")
    finally:
        endpoint.close()


def test_idle_connections_and_noise_do_not_stop_the_endpoint(endpoint: Endpoint) -> None:
    endpoint.pipe.book.set_state(int(PipelineState.STARTING), 2**32 - 1, "")
    address = (endpoint.server.host, endpoint.server.port)
    rng = np.random.default_rng(1)
    with ExitStack() as stack:
        for i in range(200):
            connection = stack.enter_context(socket.create_connection(address, timeout=20))
            if i % 2:
                connection.sendall(rng.bytes(300) + (b"\r\n\r\n" if i % 4 == 1 else b""))
        assert get(endpoint.server.url)[0] == 503
    for raw in (b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 70000, b"POST /health HTTP/1.1"):
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(raw)
    assert get(endpoint.server.url)[0] == 503


def test_the_endpoint_is_for_this_machine_alone(endpoint: Endpoint) -> None:
    assert tp.PipelineConfig().health_host == "127.0.0.1"
    listening = [
        c.laddr
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == endpoint.server.port
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]


def test_no_metric_is_labelled_with_a_pid(endpoint: Endpoint) -> None:
    text = Exporter(endpoint.pipe.segment).scrape().decode()
    names = set(re.findall(r'[{,](\w+)="', text))
    assert "pid" not in names
    assert str(os.getpid()) not in re.findall(r'="([^"]*)"', text)


def test_metrics_do_not_depend_on_the_environment(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def names() -> set[str]:
        text = Exporter(endpoint.pipe.segment).scrape().decode()
        return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))

    before = names()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    assert names() == before
    assert "tokenpipe_requests" in {n.removesuffix("_total") for n in before}


# ---------------------------------------------------------------- a pipeline under load


_COUNTER = re.compile(r"^(\S+?(?:_total|_live|_free)(?:\{.*\})?) (\S+)$", re.MULTILINE)


def all_counters(base: str) -> dict[str, float]:
    text = get(base + "/metrics")[2].decode()
    return {
        name: float(value)
        for name, value in _COUNTER.findall(text)
        if "process" not in name and "cpu" not in name
    }


def test_health_calls_change_no_counter(unique_name: str) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=ROWS, num_blocks=16, num_decoders=1)
    with tp.Pipeline(config) as pipe:
        for i in range(ROWS):  # every row in use
            pipe.submit(request(f"r{i}", num_blocks=2))
        wait_until(lambda: pipe.status()["rows"]["live"] == ROWS)
        base = pipe.health_url.removesuffix("/health")
        before = all_counters(base)
        assert len(before) > 20
        assert {get(pipe.health_url)[0] for _ in range(500)} == {200}
        assert all_counters(base) == before


def test_health_answers_while_everything_is_busy(unique_name: str) -> None:
    config = tp.PipelineConfig(
        name=unique_name, max_num_seqs=64, num_decoders=2, ring_slots=4, output_slots=4
    )
    with tp.Pipeline(config) as pipe:
        engine = FakeEngine(pipe.engine_writer(), 64)
        for i in range(64):
            engine.run(pipe.submit(request(f"r{i}")))
        stop = threading.Event()

        def run_engine() -> None:
            stamp = engine.writer.begin_step(engine.generation)
            tokens = engine.tokens()
            while not stop.is_set():
                engine.writer.save_output(tokens, step=stamp)

        def read() -> None:
            while not stop.is_set():
                for batch in pipe.batches(timeout_s=0.05):
                    batch.row.sum()
                    if stop.is_set():
                        break

        threads = [threading.Thread(target=f) for f in (run_engine, read)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: pipe.status()["counters"]["steps"] > 100)
            codes = Counter(get(pipe.health_url)[0] for _ in range(50))
        finally:
            stop.set()
            for _ in pipe.batches(timeout_s=0.2):  # the engine may wait for space
                pass
            for thread in threads:
                thread.join()
        assert codes == {200: 50}
        engine.writer.close()


def test_a_long_prefill_that_says_so_is_no_stall(unique_name: str) -> None:
    with (
        serve(unique_name, "--stall-timeout-s=0.4", "--heartbeat-interval-s=0.02") as (_, ready),
        tp.Pipeline.attach(unique_name) as pipe,
        tp.EngineWriter.attach(unique_name) as engine,
    ):
        engine.beat(busy=True)
        pipe.submit(request("a"))
        wait_until(lambda: pipe.status()["rows"]["live"] == 1)
        turns = pipe.status()["roles"]["reader"]["turns"]
        wait_until(lambda: pipe.status()["roles"]["reader"]["turns"] > turns + 50)
        assert get(ready["health_url"])[0] == 200
        engine.beat(busy=False)
        wait_until(lambda: pipe.health()["role"] == "engine")
        pipe.abort()


def test_an_idle_pipeline_never_stalls(unique_name: str) -> None:
    with (
        serve(unique_name, "--stall-timeout-s=0.9", "--heartbeat-interval-s=0.02") as (process, _),
        tp.Pipeline.attach(unique_name) as pipe,
    ):

        def turns() -> int:
            assert pipe.health()["state"] == "idle"
            return min(int(role["turns"]) for role in pipe.status()["roles"].values())

        begun = turns()
        wait_until(lambda: turns() > begun + 50)  # at least 1 s
        process.terminate()
        _, errors = process.communicate(timeout=20)
        assert "stalled" not in errors


def test_every_process_of_a_pipeline_has_a_heartbeat(unique_name: str) -> None:
    with serve(unique_name) as (process, ready), tp.Pipeline.attach(unique_name) as pipe:
        found = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        assert found == set(ready["pids"].values())
        roles = pipe.status()["roles"]
        assert list(roles) == role_names(2)
        assert {r["pid"] for r in roles.values()} == found | {process.pid}
        assert all(r["heartbeat_age_s"] < 20 for r in roles.values())


def test_a_role_that_is_replaced_ends_no_request_and_costs_few_log_lines(
    unique_name: str,
) -> None:
    with (
        serve(unique_name, "--max-num-seqs=200") as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        engine = FakeEngine(tp.EngineWriter.attach(unique_name), 200)
        for i in range(200):
            engine.run(pipe.submit(request(f"r{i}", max_tokens=2)))
        engine.step()
        pipe.sync()
        dead = ready["pids"]["decoder-1"]
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: pipe.status()["roles"]["decoder-1"]["epoch"] == 2)
        wait_until(lambda: get(ready["health_url"])[0] == 200)  # 503 not for ever
        engine.step()
        outputs: list[tp.RequestOutput] = []

        def is_over() -> bool:
            outputs.extend(o for batch in pipe.batches(timeout_s=0) for o in batch)
            return sum(o.finished for o in outputs) == 200

        wait_until(is_over)
        assert {o.finish_reason for o in outputs if o.finished} == {"length"}
        assert len(outputs) == 400
        roles = pipe.status()["roles"]
        assert roles["decoder-1"]["pid"] != dead
        assert [role["epoch"] for role in roles.values()] == [1, 1, 1, 2]
        process.terminate()
        _, errors = process.communicate(timeout=30)
        lines = errors.splitlines()
        assert len(lines) <= 50
        told = [line for line in lines if "SIGKILL" in line]
        assert len(told) == 1
        assert "decoder-1" in told[0]
        assert str(dead) in told[0]
        engine.writer.close()


def test_a_dead_role_costs_few_log_lines(unique_name: str) -> None:
    with (
        serve(unique_name, "--max-num-seqs=200", "--max-restarts=0") as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        for i in range(200):
            pipe.submit(request(f"r{i}"))
        os.kill(ready["pids"]["reader"], signal.SIGKILL)
        outputs = read_to_the_end(pipe)
        assert len([o for o in outputs if o.finished]) == 200
        _, errors = process.communicate(timeout=30)
        lines = errors.splitlines()
        assert len(lines) <= 50
        first = next(line for line in lines if "ERROR" in line)
        assert "reader" in first
        assert "SIGKILL" in first


# ---------------------------------------------------------------- requests


def test_every_end_is_counted_and_token_totals_agree(endpoint: Endpoint) -> None:
    pipe = endpoint.pipe
    saved = 0

    def run(names: list[str], steps: int, last: int, hole: int = 0) -> list[tp.Admission]:
        nonlocal saved
        admissions = [pipe.submit(request(n)) for n in names]
        rows = np.array([a.row for a in admissions])
        step = pipe.writer.begin_step([a.generation for a in admissions], rows=rows)
        for i in range(steps):
            is_last = i == steps - 1
            tokens = np.full(len(rows), last if is_last else 50)
            positions = np.full(len(rows), i + hole * is_last)
            pipe.writer.save_output(tokens, step=step, positions=positions)
            saved += len(rows)
            pipe.pump()
            list(pipe.batches())
        return admissions

    run([f"finished{i}" for i in range(5)], 3, 2)
    for a in run([f"aborted{i}" for i in range(5)], 7, 50):
        pipe.resources.end(a.row, tp.commands.FinishReason.ABORT)
    run([f"failed{i}" for i in range(2)], 4, 50, hole=9)
    pipe.pump()
    list(pipe.batches())
    found = all_counters(endpoint.base)
    for reason, count in {"stop": 5, "abort": 5, "error": 2, "length": 0}.items():
        assert found[f'tokenpipe_requests_total{{reason="{reason}"}}'] == count
    dropped = sum(v for n, v in found.items() if n.startswith("tokenpipe_tokens_dropped_total"))
    assert found["tokenpipe_tokens_saved_total"] == saved
    assert found["tokenpipe_tokens_delivered_total"] + dropped == saved
    assert found["tokenpipe_tokens_delivered_total"] == 5 * 3 + 5 * 7 + 2 * 3


def test_a_bad_row_costs_its_own_request_alone(endpoint: Endpoint) -> None:
    pipe = endpoint.pipe
    admissions = [pipe.submit(request(f"r{i}")) for i in range(ROWS)]
    positions = np.zeros(ROWS, np.int32)
    positions[3] = 5  # tokens are missing before it
    generations = np.array([a.generation for a in admissions])
    tokens = np.arange(50, 50 + ROWS)
    pipe.writer.save_output(tokens, generations=generations, positions=positions)
    outputs = {o.request_id: o for o in pipe.outputs()}
    assert len(outputs) == ROWS
    for i, a in enumerate(admissions):
        output = outputs[a.request_id]
        if i == 3:
            assert (output.finish_reason, output.error_code) == ("error", 500)
            assert output.outputs.token_ids == []
        else:
            assert (output.finished, output.outputs.token_ids) == (False, [50 + i])
    assert pipe.counters()["dropped_bad_row"] == 1
    assert pipe.counters()["finals_error"] == 1


@pytest.fixture
def real(unique_name: str) -> Iterator[tuple[tp.Pipeline, FakeEngine]]:
    config = tp.PipelineConfig(
        name=unique_name, max_num_seqs=ROWS, num_decoders=2, abort_timeout_s=600
    )
    with tp.Pipeline(config) as pipe:
        engine = FakeEngine(pipe.engine_writer(), ROWS)
        yield pipe, engine
        engine.writer.close()


def test_of_two_submits_of_one_id_one_is_refused(real: tuple[tp.Pipeline, FakeEngine]) -> None:
    pipe, engine = real
    for turn in range(20):
        results: list[object] = []
        barrier = threading.Barrier(2)

        def submit(results: list[object] = results, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                results.append(pipe.submit(request("same"), timeout_s=20))
            except tp.DuplicateRequestError as e:
                results.append(e)

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kinds = Counter(type(r).__name__ for r in results)
        assert kinds == {"Admission": 1, "DuplicateRequestError": 1}, turn
        pipe.abort("same")
        finals = 0
        while not finals:
            finals = sum(b.num_finals for b in pipe.batches(timeout_s=0.01))
        assert finals == 1
        engine.generation[:] = 0
        for a in results:
            if isinstance(a, tp.Admission):
                engine.run(a)
        engine.obey()
    wait_until(lambda: pipe.status()["rows"]["live"] == 0)


def test_a_refused_request_leaves_its_id_free(real: tuple[tp.Pipeline, FakeEngine]) -> None:
    pipe, _engine = real
    with pytest.raises(tp.InvalidRequestError):
        pipe.submit(tp.Request("a"))
    for i in range(ROWS):
        pipe.submit(request(f"r{i}"))
    with pytest.raises(tp.NoFreeRowError):
        pipe.submit(request("a"), timeout_s=0)
    assert "a" not in pipe._requests
    assert pipe.abort("a") == {"a": False}


def test_nothing_is_kept_of_requests_that_have_ended(
    real: tuple[tp.Pipeline, FakeEngine],
) -> None:
    pipe, engine = real
    rng = np.random.default_rng(1)
    number = 0
    for _ in range(60):
        for _ in range(3):
            with_end = int(rng.integers(1, 4))
            try:
                engine.run(pipe.submit(request(f"r{number}", max_tokens=with_end), timeout_s=0))
            except tp.NoFreeRowError:
                break
            number += 1
        engine.step()
        engine.obey()
        if number:
            pipe.abort(f"r{int(rng.integers(number))}")
        for batch in pipe.batches(timeout_s=0):
            list(batch)
    pipe.abort()

    def is_empty() -> bool:
        engine.obey()
        for _ in pipe.batches(timeout_s=0):
            pass
        return bool(pipe.status()["rows"]["live"] == 0)

    wait_until(is_empty)
    open_requests, handover = pipe._requests, pipe._handover
    assert number > 50
    assert not open_requests._by_key
    assert not open_requests._by_id
    assert not open_requests._running_ids
    assert not any((handover._places, handover._parked, handover._answers))
    assert open_requests.num_second_finals == 0
    assert len(pipe._channel._free) == pipe.config.command_slots
