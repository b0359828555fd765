"""Death and stop of every party: noticed, named, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from fake_engine import FakeEngine, token_of

import tokenpipe as tp
from support import wait_until
from tokenpipe import writer as writer_module
from tokenpipe.segment import leftovers

SERVE = [sys.executable, "-m", "tokenpipe", "serve"]


def files_of(name: str) -> list[str]:
    return [found.file_name for found in leftovers(name)]


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, json.load(answer)
    except HTTPError as e:
        return e.code, json.load(e)


@contextmanager
def serve(name: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Runs `tokenpipe serve` and yields the process and its ready line."""
    process = subprocess.Popen(
        [*SERVE, "--name", name, "--max-num-seqs=8", "--num-decoders=2", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def request(name: str, **more: Any) -> tp.Request:
    return tp.Request(name, **{"prompt_token_ids": [1], "eos_token_ids": [2], **more})


def read_to_the_end(pipe: tp.Pipeline) -> list[tp.RequestOutput]:
    outputs: list[tp.RequestOutput] = []
    for batch in pipe.batches(timeout_s=30):
        outputs.extend(batch)
    return outputs


def test_serve_says_ready_answers_and_ends_with_nothing_left(unique_name: str) -> None:
    with serve(unique_name, "--ring-slots=16", "--health-port=0") as (process, ready):
        assert ready["event"] == "ready"
        assert ready["name"] == unique_name
        assert ready["pid"] == process.pid
        assert sorted(ready["pids"]) == ["decoder-0", "decoder-1", "reader"]
        assert all(psutil.pid_exists(pid) for pid in ready["pids"].values())
        assert get(ready["health_url"]) == (
            200,
            {"state": "idle", "role": None, "reason": "no request is running"},
        )
        assert len(files_of(unique_name)) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert files_of(unique_name) == []
        assert not any(psutil.pid_exists(pid) for pid in ready["pids"].values())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_delivers_what_was_saved_then_ends_the_rest(
    unique_name: str, signum: signal.Signals
) -> None:
    with (
        serve(unique_name, "--drain-timeout-s=0") as (process, _ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        engine = FakeEngine(tp.EngineWriter.attach(unique_name), 8)
        admissions = [pipe.submit(request(f"r{i}")) for i in range(3)]
        for admission in admissions:
            engine.run(admission)
        for _ in range(5):
            engine.step()
        process.send_signal(signum)
        outputs = read_to_the_end(pipe)
        for a in admissions:
            own = [o for o in outputs if o.request_id == a.request_id]
            tokens = [t for o in own for t in o.outputs.token_ids]
            assert tokens == [token_of(a.row, 1, p) for p in range(5)]
            assert [o.finish_reason for o in own if o.finished] == ["shutdown"]
        assert process.wait(30) == 0
        with pytest.raises(tp.PipelineGoneError):
            pipe.submit(request("late"))
        with pytest.raises(tp.PipelineGoneError):
            next(pipe.batches())
        with pytest.raises(tp.PipelineGoneError):
            engine.step()
        engine.writer.close()
    assert files_of(unique_name) == []


def test_a_drain_waits_for_running_requests_and_takes_nothing_new(unique_name: str) -> None:
    with (
        serve(unique_name, "--drain-timeout-s=600") as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        engine = FakeEngine(tp.EngineWriter.attach(unique_name), 8)
        engine.run(pipe.submit(request("a", max_tokens=2)))
        engine.step()
        pipe.drain(600)
        with pytest.raises(tp.DrainingError):
            pipe.submit(request("b"))
        base = ready["health_url"].removesuffix("/health")
        assert get(base + "/readyz")[0] == 503
        assert get(base + "/livez")[0] == 200
        engine.step()
        assert [o.finish_reason for o in read_to_the_end(pipe)] == [None, "length"]
        assert process.wait(30) == 0
        engine.writer.close()


@pytest.mark.parametrize(
    "role", ["reader", pytest.param("decoder-0", marks=pytest.mark.full), "decoder-1"]
)
def test_a_dead_role_is_named_and_running_requests_get_one_error_each(
    unique_name: str, role: str
) -> None:
    with (
        serve(unique_name, "--max-restarts=0") as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        engine = FakeEngine(tp.EngineWriter.attach(unique_name), 8)
        names = [f"r{i}" for i in range(4)]
        for name in names:
            engine.run(pipe.submit(request(name)))
        engine.step()
        pipe.sync()
        os.kill(ready["pids"][role], signal.SIGKILL)
        wait_until(lambda: pipe.health()["state"] == "failed")
        health = pipe.health()
        assert health["role"] == role
        assert f"{role} (pid {ready['pids'][role]}) was killed by SIGKILL" in health["reason"]
        outputs = read_to_the_end(pipe)
        assert sorted(o.request_id for o in outputs if o.finished) == names
        assert {o.finish_reason for o in outputs if o.finished} == {"error"}
        assert process.wait(30) == tp.ExitCode.ROLE_LOST
        assert process.stderr is not None
        assert role in process.stderr.read()
        engine.writer.close()
    assert files_of(unique_name) == []


def test_health_names_a_dead_role_while_the_coordinator_lives(unique_name: str) -> None:
    no_restart = "--max-restarts=0"
    with (
        serve(unique_name, no_restart) as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        pipe.submit(request("a"))  # its final is not read, so the coordinator waits a moment
        seen: list[tuple[int, Any]] = []

        def is_failed() -> bool:
            try:
                seen.append(get(ready["health_url"]))
            except OSError:
                return True  # it has ended
            return seen[-1][1]["state"] == "failed"

        os.kill(ready["pids"]["decoder-1"], signal.SIGKILL)
        wait_until(is_failed)
        code, body = seen[-1]
        assert (code, body["state"], body["role"]) == (503, "failed", "decoder-1")
        process.wait(30)


def save_until_it_raises(engine: FakeEngine) -> None:
    for _ in range(1000):  # some go into the source's ring
        engine.step()


def test_roles_end_when_the_coordinator_is_killed_and_the_client_gets_finals(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_GONE_AFTER_S", 600.0)  # the dead roles are word enough
    with serve(unique_name, "--orphan-grace-s=0.2") as (process, ready):
        pipe = tp.Pipeline.attach(unique_name)
        engine = FakeEngine(tp.EngineWriter.attach(unique_name), 8)
        engine.run(pipe.submit(request("a")))
        engine.step()
        process.kill()
        outputs = read_to_the_end(pipe)
        assert [o.finish_reason for o in outputs if o.finished] == ["error"]
        for pid in ready["pids"].values():
            wait_until(lambda pid=pid: not psutil.pid_exists(pid))
        with pytest.raises(tp.PipelineGoneError, match="coordinator has died"):
            save_until_it_raises(engine)
        pipe.close()
        engine.writer.close()
        # Another run that starts just now may have swept them already.
        assert all(found.is_dead for found in leftovers(unique_name))
        clean = [sys.executable, "-m", "tokenpipe", "clean", unique_name]
        subprocess.run(clean, capture_output=True, check=True)
    assert files_of(unique_name) == []


def test_everything_ends_when_the_owner_is_killed(unique_name: str) -> None:
    script = f"""
import tokenpipe as tp, sys, time
pipe = tp.Pipeline(tp.PipelineConfig(name={unique_name!r}, max_num_seqs=4, num_decoders=2))
pipe.submit(tp.Request("a", prompt_token_ids=[1]))
print(*pipe.pids.values(), flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 4
    owner.kill()
    owner.communicate()
    for pid in pids:
        wait_until(lambda pid=pid: not psutil.pid_exists(pid))
    wait_until(lambda: files_of(unique_name) == [])


def test_the_owner_hears_of_its_coordinators_death(unique_name: str) -> None:
    config = tp.PipelineConfig(
        name=unique_name, max_num_seqs=4, num_decoders=1, orphan_grace_s=0.1, max_restarts=0
    )
    with tp.Pipeline(config) as pipe:
        pipe.submit(request("a"))
        os.kill(pipe.pids["coordinator"], signal.SIGKILL)
        [final] = read_to_the_end(pipe)
        assert (final.request_id, final.finish_reason) == ("a", "error")
        with pytest.raises(tp.PipelineGoneError, match="coordinator has died"):
            pipe.submit(request("b"))
    assert files_of(unique_name) == []


def test_starting_errors_are_raised_by_the_owner_with_their_facts(unique_name: str) -> None:
    with serve(unique_name) as (process, ready):
        with pytest.raises(tp.SegmentExistsError) as taken:
            tp.Pipeline(tp.PipelineConfig(name=unique_name))
        assert taken.value.owner_pid == process.pid
        port = int(ready["health_url"].split(":")[2].split("/")[0])
        with pytest.raises(tp.PortInUseError) as in_use:
            tp.Pipeline(tp.PipelineConfig(name=unique_name + "b", health_port=port))
        assert in_use.value.port == port
        assert files_of(unique_name + "b") == []
        huge = tp.PipelineConfig(
            name=unique_name + "c", max_num_seqs=65536, top_logprobs=1024, ring_slots=65536
        )
        with pytest.raises(tp.SegmentSpaceError) as no_space:
            tp.Pipeline(huge)
        assert no_space.value.needed_bytes > no_space.value.free_bytes
        assert "--ring-slots" in str(no_space.value)
        assert files_of(unique_name + "c") == []
        # What was running goes on.
        assert get(ready["health_url"])[0] == 200


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--ring-slots=10"], tp.ExitCode.BAD_CONFIG, "8 or 16"),
        (["--max-num-seqs=0"], tp.ExitCode.BAD_CONFIG, "max_num_seqs = 0: must be 1 to 65536"),
        (["--ring-bytes=100"], tp.ExitCode.BAD_CONFIG, "a slot is"),
        (["--health-port=70000"], tp.ExitCode.BAD_CONFIG, "must be 0 to 65535"),
        (["--num-decoders=17"], tp.ExitCode.BAD_CONFIG, "must be 1 to 16"),
        (["--name=a/b"], tp.ExitCode.BAD_CONFIG, "letters, digits"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_at_start(
    flags: list[str], code: int, text: str
) -> None:
    ended = subprocess.run([*SERVE, *flags], capture_output=True, text=True)
    assert ended.returncode == code
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_role_that_dies_while_starting_fails_the_start(
    unique_name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interpreter start-up file ends the decoders before they do anything.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nimport os\nif 'decoder-0' in sys.orig_argv: os._exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(tp.ChildBootError, match="exit code 9 before its first heartbeat"):
        tp.Pipeline(tp.PipelineConfig(name=unique_name))
    assert files_of(unique_name) == []


def test_a_role_that_hangs_while_starting_fails_the_start(
    unique_name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, signal\nif 'reader' in sys.orig_argv: signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = tp.PipelineConfig(name=unique_name, start_timeout_s=1)
    with pytest.raises(tp.ChildBootError, match="silent for 1 s"):
        tp.Pipeline(config)
    assert files_of(unique_name) == []


def test_a_stopped_engine_a_stopped_role_and_an_idle_pipeline_are_told_apart(
    unique_name: str,
) -> None:
    with (
        serve(unique_name, "--stall-timeout-s=0.5") as (_process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        base = ready["health_url"].removesuffix("/health")

        def state() -> tuple[int, int, str, str | None]:
            code, body = get(base + "/health")
            return get(base + "/livez")[0], code, body["state"], body["role"]

        assert state() == (200, 200, "idle", None)
        engine = FakeEngine(tp.EngineWriter.attach(unique_name), 8)
        engine.run(pipe.submit(request("a")))
        wait_until(lambda: state() == (200, 503, "stalled", "engine"), describe=state)
        engine.step()
        wait_until(lambda: state() == (200, 200, "running", None), describe=state)
        engine.writer.beat(busy=True)  # a long prefill
        for pid, name in (
            (ready["pids"]["decoder-1"], "decoder-1"),
            (ready["pids"]["reader"], "reader"),
        ):
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda name=name: state() == (503, 503, "stalled", name), describe=state)
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: state() == (200, 200, "running", None), describe=state)
        pipe.abort("a")
        engine.obey()
        engine.writer.close()
        wait_until(lambda: state() == (200, 200, "idle", None), describe=state)


def test_a_client_that_reads_nothing_is_named(unique_name: str) -> None:
    with (
        serve(unique_name, "--stall-timeout-s=0.5", "--output-slots=2", "--drain-timeout-s=0") as (
            _process,
            ready,
        ),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        engine = FakeEngine(tp.EngineWriter.attach(unique_name), 8)
        engine.run(pipe.submit(request("a")))
        for _ in range(2):
            engine.step()
        told: Callable[[], Any] = lambda: get(ready["health_url"])[1]  # noqa: E731
        body = wait_until(lambda: (b := told())["role"] == "client" and b, describe=told)
        assert body["state"] == "stalled"
        assert f"the client (pid {os.getpid()}) has read nothing" in body["reason"]
        engine.writer.close()


def test_signal_handlers_of_an_embedding_program_are_left_alone(unique_name: str) -> None:
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    before = [signal.getsignal(s) for s in signums]
    with tp.Pipeline(tp.PipelineConfig(name=unique_name, max_num_seqs=2)):
        assert [signal.getsignal(s) for s in signums] == before
    assert [signal.getsignal(s) for s in signums] == before


def test_a_script_without_a_main_guard_runs_once(unique_name: str) -> None:
    script = (
        "import tokenpipe as tp\nprint('body')\n"
        f"with tp.Pipeline(tp.PipelineConfig(name={unique_name!r}, max_num_seqs=2)) as p:\n"
        "    print(p.health()['state'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "body\nidle\n"
    for word in ("resource_tracker", "KeyError", "leaked", "Traceback"):
        assert word not in ended.stderr


def test_reader_and_decoders_load_neither_numpy_nor_a_framework(unique_name: str) -> None:
    with serve(unique_name) as (_process, ready):
        for pid in ready["pids"].values():
            mapped = {os.path.basename(m.path) for m in psutil.Process(pid).memory_maps()}
            assert not any(n.startswith(("_multiarray", "libpaddle", "libtorch")) for n in mapped)
            assert psutil.Process(pid).memory_info().rss < 60e6


def test_rare_heartbeats_stretch_no_time_limit(unique_name: str) -> None:
    rarely = {"heartbeat_interval_s": 10.0, "stall_timeout_s": 0, "abort_timeout_s": 0.1}
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=1, **rarely)
    with tp.Pipeline(config) as pipe:
        pipe.submit(request("a"))
        with pytest.raises(tp.NoFreeRowError) as refused:
            pipe.submit(request("b"), timeout_s=0.05)
        assert refused.value.waited_s < 9, "it was looked at with the next heartbeat"
        pipe.abort("a")  # nobody acknowledges, nobody reads the final
        wait_until(lambda: pipe.status()["rows"]["live"] == 0, timeout_s=9)
        assert [o.finish_reason for o in next(pipe.batches())] == ["abort"]
    assert files_of(unique_name) == []
