"""FastDeploy's queue with the real processes: who is owed what on a wire that has neither
generations nor an end, and what is found out about the queue before it is read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastdeploy_peer as peer
import numpy as np
import pytest

import tokenpipe as tp
from support import wait_until
from tokenpipe.sources.sysv import queue_key

EOS = 2


def settings(unique_name: str, **more: Any) -> tp.PipelineConfig:
    return tp.PipelineConfig(
        **{
            "name": unique_name,
            "max_num_seqs": 4,
            "num_decoders": 2,
            "ring_slots": 4,
            "output_slots": 8,
            "heartbeat_interval_s": 0.05,
            "source": "sysv",
            "sysv_queue_id": peer.free_queue_id(),
            **more,
        }
    )


@contextlib.contextmanager
def running(config: tp.PipelineConfig) -> Iterator[tuple[tp.Pipeline, peer.Worker]]:
    with tp.Pipeline(config) as pipe:
        yield pipe, peer.Worker(queue_key(config))


def request(name: str, **more: Any) -> tp.Request:
    return tp.Request(name, prompt_token_ids=[1], eos_token_ids=[EOS], **more)


def read(pipe: tp.Pipeline) -> dict[str, tuple[list[int], str | None]]:
    """Everything that was saved by now: tokens and end of each request."""
    pipe.sync(60)
    found: dict[str, tuple[list[int], str | None]] = {}
    for batch in pipe.batches(timeout_s=0):
        for output in batch:
            tokens, end = found.get(output.request_id, ([], None))
            assert end is None, "something after a final"
            tokens = tokens + output.outputs.token_ids
            found[output.request_id] = (tokens, output.finish_reason if output.finished else None)
    return found


def live_rows(pipe: tp.Pipeline) -> int:
    return int(pipe.status()["rows"]["live"])


def row_of(n: int, row: int, token: int) -> bytes:
    """A message in which one row has a token."""
    return peer.plain([token if i == row else -1 for i in range(n)])


# --- whose tokens


def test_a_row_ends_by_what_the_wire_shows_and_not_by_a_limit(unique_name: str) -> None:
    with running(settings(unique_name)) as (pipe, worker):
        pipe.submit(request("eos", max_tokens=2), row=0)
        pipe.submit(request("recovery"), row=3)
        for tokens in ([11, -1, -1, 41], [12, -1, -1, 42], [13, -1, -1, -3], [EOS, -1, -1, -1]):
            worker.send(peer.plain(tokens))
        assert read(pipe) == {
            "eos": ([11, 12, 13, EOS], "stop"),
            "recovery": ([41, 42], "recovery"),
        }
        wait_until(lambda: live_rows(pipe) == 0, describe=pipe.status)


def test_what_waits_in_the_queue_is_not_a_newcomer_s(unique_name: str) -> None:
    """The reader stands still: submit does not wait for it, and tokens saved before are dropped."""
    with running(settings(unique_name)) as (pipe, worker):
        reader = pipe.pids["reader"]
        pipe.submit(request("first"), row=1)
        worker.send(row_of(4, 1, 50))
        worker.send(row_of(4, 1, EOS))
        assert read(pipe) == {"first": ([50, EOS], "stop")}
        os.kill(reader, signal.SIGSTOP)
        try:
            for token in (60, 61):  # a step in flight across the end
                worker.send(row_of(4, 1, token))
            pipe.submit(request("second"), row=1)
            worker.send(row_of(4, 1, 70))
        finally:
            os.kill(reader, signal.SIGCONT)
        worker.send(row_of(4, 1, EOS))
        assert read(pipe) == {"second": ([70, EOS], "stop")}
        counters = pipe.status()["counters"]
        assert counters["dropped_early"] == 2
        assert counters["tokens_seen"] == counters["tokens_delivered"] + 2


def test_a_token_of_a_row_that_nobody_has_is_counted(unique_name: str) -> None:
    with running(settings(unique_name)) as (pipe, worker):
        worker.send(peer.plain([7, 8, -1]))
        assert read(pipe) == {}
        assert pipe.status()["counters"]["dropped_unadmitted"] == 2
        assert pipe.status()["source"]["tokens_saved"] == 2


# --- aborts, preemptions and quarantine


def test_an_aborted_row_comes_back_when_the_worker_says_so(unique_name: str) -> None:
    with running(settings(unique_name, abort_timeout_s=600)) as (pipe, worker):
        pipe.submit(request("a"), row=2)
        worker.send(row_of(4, 2, 5))
        assert read(pipe) == {"a": ([5], None)}
        pipe.abort("a")
        wait_until(lambda: pipe.status()["counters"]["finals_abort"] == 1)
        worker.send(row_of(4, 2, 6))
        worker.send(row_of(4, 2, -1))  # a row that is shown empty before its deadline says nothing
        assert read(pipe) == {"a": ([], "abort")}
        assert live_rows(pipe) == 1
        worker.send(row_of(4, 2, -9))
        read(pipe)
        wait_until(lambda: live_rows(pipe) == 0, describe=pipe.status)


def test_a_row_that_was_not_let_go_of_is_quarantined_until_it_is_shown_empty(
    unique_name: str,
) -> None:
    with running(settings(unique_name, abort_timeout_s=0.05, quarantine_s=600)) as (pipe, worker):
        pipe.submit(request("a"), row=2)
        pipe.abort("a")
        wait_until(lambda: pipe.status()["counters"]["finals_abort"] == 1)

        def is_free_after(token: int) -> bool:
            worker.send(row_of(4, 2, token))
            read(pipe)
            return live_rows(pipe) == 0

        for token in (6, 7, 8):  # the worker still runs it
            assert not is_free_after(token)
        with pytest.raises(tp.RowBusyError):
            pipe.submit(request("b"), row=2, timeout_s=0)
        wait_until(lambda: is_free_after(-1), describe=pipe.status)
        pipe.submit(request("b"), row=2)
        worker.send(row_of(4, 2, 9))
        assert read(pipe) == {"b": ([9], None)}


def test_a_quarantine_ends_by_itself(unique_name: str) -> None:
    with running(settings(unique_name, abort_timeout_s=0.05, quarantine_s=0.05)) as (pipe, worker):
        pipe.submit(request("a"), row=2)
        pipe.abort("a")
        wait_until(lambda: live_rows(pipe) == 0, describe=pipe.status)
        del worker


def test_a_preempted_request_goes_on_in_its_row(unique_name: str) -> None:
    with running(settings(unique_name, abort_timeout_s=600)) as (pipe, worker):
        pipe.submit(request("a"), row=1)
        worker.send(row_of(4, 1, 5))
        pipe.preempt("a")
        worker.send(row_of(4, 1, -9))
        pipe.resume("a", timeout_s=60)
        worker.send(row_of(4, 1, 6))
        worker.send(row_of(4, 1, EOS))
        assert read(pipe) == {"a": ([5, 6, EOS], "stop")}


def test_the_engine_s_end_hears_of_aborts_but_cannot_save(unique_name: str) -> None:
    with running(settings(unique_name)) as (pipe, worker), pipe.engine_writer() as engine:
        admission = pipe.submit(request("a"))
        pipe.abort("a")
        events = wait_until(engine.poll_control)
        assert [(e.row, e.kind) for e in events] == [(admission.row, "abort")]
        with pytest.raises(tp.WrongSourceError, match="--source sysv"):
            engine.save_output(np.array([1]), generations=[1])
        del worker


# --- sync


def test_sync_names_the_client_that_does_not_read(unique_name: str) -> None:
    with running(settings(unique_name)) as (pipe, worker):
        pipe.submit(request("a"), row=0)
        while pipe.status()["source"]["queue"]["messages"] < 5:
            worker.send(row_of(4, 0, 5), wait=False)
        with pytest.raises(tp.SyncTimeoutError, match="client") as caught:
            pipe.sync(0.1)
        assert caught.value.stage == "client"
        for batch in pipe.batches(timeout_s=0.2):
            del batch
        pipe.sync(60)


# --- before the first message


def test_limits_that_are_too_small_are_refused_with_the_numbers(
    unique_name: str, queue_limits: Any
) -> None:
    """FastDeploy loses every such token, with one printed line and a healthy face."""
    queue_limits(8192, 16384)
    config = settings(unique_name, sysv_op="get_output_topk")
    with pytest.raises(tp.QueueLimitError) as caught:
        tp.Pipeline(config)
    for part in ("88072", "msgmax=8192", "msgmnb=16384", "kernel.msgmax=88072", "176144"):
        assert part in str(caught.value)
    assert caught.value.exit_code == tp.ExitCode.NO_SPACE


def test_a_queue_made_before_the_limits_were_raised_is_made_larger(
    unique_name: str, queue_limits: Any
) -> None:
    config = settings(unique_name, sysv_op="get_output_topk", top_logprobs=2)
    queue_limits(8192, 16384)
    worker = peer.Worker(queue_key(config))
    queue_limits(1 << 20, 1 << 20)
    try:
        with tp.Pipeline(config) as pipe:
            pipe.submit(request("a"), row=0)
            worker.send(peer.topk([[7, 8, 9]], [[-1.0, -2.0, -3.0]], [1]))
            pipe.sync(60)
            (batch,) = list(pipe.batches(timeout_s=0))
            assert batch.topk_ids.tolist() == [[7, 8, 9]]
    finally:
        worker.remove()


@pytest.mark.parametrize("what", ["drain", "keep"])
def test_messages_of_an_earlier_run(unique_name: str, what: str) -> None:
    config = settings(unique_name, sysv_leftovers=what)
    worker = peer.Worker(queue_key(config))
    try:
        for token in (91, 92):
            worker.send(peer.plain([token]))
        with tp.Pipeline(config) as pipe:
            pipe.submit(request("a"), row=0)
            worker.send(peer.plain([5]))
            assert read(pipe) == {"a": ([5], None)}, "a leftover is nobody's"
            counters, source = pipe.status()["counters"], pipe.status()["source"]
            assert source["queue"]["leftovers"] == (2 if what == "drain" else 0)
            assert counters["dropped_unadmitted"] + counters["dropped_early"] == (
                2 if what == "keep" else 0
            )
        assert worker.send(peer.plain([1]), wait=False), "a queue that was there before stays"
    finally:
        worker.remove()


def test_a_second_pipeline_of_the_same_key_is_refused_with_both_ports(unique_name: str) -> None:
    """ftok keeps 8 bits of the id: ports equal modulo 256 collide."""
    config = settings(unique_name, sysv_generation="g1")
    with running(config) as (pipe, worker):
        port = config.sysv_queue_id
        second = settings(
            f"{unique_name}-2", sysv_generation="g1", sysv_queue_id=(port + 256) % 2**16
        )
        with pytest.raises(tp.QueueTakenError) as caught:
            tp.Pipeline(second)
        text = str(caught.value)
        assert f"{queue_key(config) & 0xFFFFFFFF:#010x}" in text
        assert str(port) in text
        assert str(second.sysv_queue_id) in text
        pipe.submit(request("a"), row=0)
        worker.send(peer.plain([5]))
        assert read(pipe) == {"a": ([5], None)}


def test_the_environment_names_the_queue_as_for_fastdeploy(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", "8123")
    assert settings(unique_name, sysv_queue_id=0).sysv_queue_id == 8123
    assert settings(unique_name, sysv_queue_id=7).sysv_queue_id == 7
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", "80x")
    with pytest.raises(tp.ConfigError, match="INFERENCE_MSG_QUEUE_ID is '80x'"):
        settings(unique_name, sysv_queue_id=0)
    monkeypatch.delenv("INFERENCE_MSG_QUEUE_ID")
    assert settings(unique_name, sysv_queue_id=0).sysv_queue_id == 1


@pytest.mark.parametrize(
    ("field", "value", "more", "part"),
    [
        ("max_num_seqs", 513, {}, "512"),
        ("max_num_seqs", 257, {"sysv_op": "speculate_get_output", "max_draft_tokens": 2}, "256"),
        ("top_logprobs", 21, {"sysv_op": "get_output_topk"}, "20"),
        ("max_draft_tokens", 1, {"sysv_op": "speculate_get_output"}, "2 to 6"),
        ("max_draft_tokens", 7, {"sysv_op": "speculate_get_output"}, "2 to 6"),
        ("max_pooling_floats", 8, {}, "vectors"),
        ("sysv_folder", "here", {}, "absolute"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused(
    unique_name: str, field: str, value: Any, more: dict[str, Any], part: str
) -> None:
    with pytest.raises(tp.ConfigError, match=part) as caught:
        settings(unique_name, **{**more, field: value})
    assert caught.value.field == field


# --- the queue's own life


def queues() -> set[int]:
    return {int(line.split()[0]) for line in Path("/proc/sysvipc/msg").read_text().splitlines()[1:]}


def test_the_queue_goes_with_the_pipeline(unique_name: str) -> None:
    config = settings(unique_name)
    with running(config) as (pipe, _worker):
        assert queue_key(config) in queues()
        del pipe
    assert queue_key(config) not in queues()


def test_the_queue_is_for_its_owner_alone(unique_name: str) -> None:
    config = settings(unique_name)
    with running(config) as (pipe, worker):
        del pipe
        for line in Path("/proc/sysvipc/msg").read_text().splitlines()[1:]:
            key, msqid, mode = (int(word) for word in line.split()[:3])
            if msqid == worker.msqid:
                assert (key, mode) == (queue_key(config), 600)


def test_a_killed_pipeline_s_queue_is_removed_by_clean(unique_name: str) -> None:
    config = settings(unique_name, orphan_grace_s=0.2)
    command = [sys.executable, "-m", "tokenpipe"]
    serve = subprocess.Popen(
        [*command, "serve", *config.to_cli_args()], stdout=subprocess.PIPE, text=True
    )
    assert serve.stdout is not None
    serve.stdout.readline()
    serve.kill()
    serve.communicate()

    def clean() -> bool:
        subprocess.run([*command, "clean", unique_name], check=True, capture_output=True)
        return queue_key(config) not in queues()

    wait_until(clean, 60)
    assert not [n for n in os.listdir("/dev/shm") if unique_name in n]


def test_a_queue_in_another_namespace_keeps_its_segment(unique_name: str) -> None:
    """Whoever swept it there would leave a queue of which nobody knows any more."""
    config = settings(unique_name, orphan_grace_s=0.2)
    command = [sys.executable, "-m", "tokenpipe"]
    elsewhere = ["unshare", "--ipc", *command, "serve", *config.to_cli_args()]
    serve = subprocess.Popen(elsewhere, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert serve.stdout is not None
    line = serve.stdout.readline()
    if not line:
        pytest.skip(f"no private IPC namespace here: {serve.communicate()[1]}")
    pids = json.loads(line)["pids"].values()
    serve.kill()
    serve.communicate()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    told = subprocess.run([*command, "clean", unique_name], check=True, capture_output=True)
    assert b"another namespace" in told.stdout
    kept = Path(f"/dev/shm/tokenpipe.{unique_name}.source")
    assert kept.exists()
    kept.unlink()


def test_a_queue_that_is_removed_is_made_again(unique_name: str) -> None:
    """An operator's ipcrm: nobody can tell what was in it, so those who run end with an error, and
    what comes afterwards is read."""
    config = settings(unique_name)
    with running(config) as (pipe, worker):
        pipe.submit(request("a"), row=0)
        worker.remove()
        pipe.submit(request("b"), row=1, timeout_s=60)  # whether the reader has noticed or not
        wait_until(lambda: pipe.status()["roles"]["reader"]["epoch"] == 2, describe=pipe.status)
        wait_until(lambda: queue_key(config) in queues())
        wait_until(lambda: pipe.status()["counters"]["finals_error"], describe=pipe.status)
        worker = peer.Worker(queue_key(config))
        pipe.submit(request("c"), row=2)
        worker.send(peer.plain([5, 6, 7]))
        found = {}
        pipe.sync(60)
        for batch in pipe.batches(timeout_s=0):
            for output in batch:
                found[output.request_id] = (output.outputs.token_ids, output.error_msg)
        assert "source_gap" in str(found["a"][1])
        assert found["c"] == ([7], None)


def test_a_killed_coordinator_is_not_taken_for_the_engine(unique_name: str) -> None:
    """The kernel names who sent last; it may have been a coordinator that is dead by now."""
    with running(settings(unique_name)) as (pipe, worker):
        pipe.submit(request("a"), row=0)
        worker.send(peer.plain([10]))
        assert read(pipe) == {"a": ([10], None)}
        reader, coordinator = pipe.pids["reader"], pipe.pids["coordinator"]
        os.kill(reader, signal.SIGSTOP)
        try:
            worker.send(peer.plain([11]))
            pipe.submit(request("b"), row=1)  # behind it the coordinator's barrier is the last word
            os.kill(coordinator, signal.SIGKILL)
            wait_until(lambda: pipe.status()["roles"]["coordinator"]["epoch"] == 2)
            wait_until(lambda: pipe.health()["state"] == "running", describe=pipe.health)
        finally:
            os.kill(reader, signal.SIGCONT)
        worker.send(peer.plain([12, 20]))
        assert read(pipe) == {"a": ([11, 12], None), "b": ([20], None)}
        # None: each message so far had a barrier of read() or submit() behind it at the look.
        assert pipe.status()["source"]["writer_pid"] in (None, os.getpid())
        worker.send(peer.plain([-1, -1]))
        wait_until(lambda: pipe.status()["source"]["writer_pid"] == os.getpid())


def test_a_dead_worker_is_not_forgotten_when_another_one_sends(unique_name: str) -> None:
    config = settings(unique_name, abort_timeout_s=0.05, quarantine_s=0.05)
    with running(config) as (pipe, worker):
        for i in range(2):
            pipe.submit(request(f"r{i}"), row=i)
        coordinator = pipe.pids["coordinator"]
        os.kill(coordinator, signal.SIGSTOP)
        try:
            here = str(Path(__file__).parent)
            engine = [sys.executable, "-c", ENGINE, here, str(queue_key(config))]
            assert subprocess.run(engine).returncode == -signal.SIGKILL
            for _ in range(3):
                worker.send(peer.plain([-1, -1]))
            wait_until(lambda: pipe.status()["source"]["published"] == 8, describe=pipe.status)
        finally:
            os.kill(coordinator, signal.SIGCONT)
        wait_until(lambda: pipe.status()["counters"]["finals_error"] == 2, describe=pipe.status)


def test_a_quarantine_outlasts_a_reader_that_stands_still(unique_name: str) -> None:
    """What the engine has sent may wait in front of a full queue, where a barrier passes it."""
    config = settings(unique_name, abort_timeout_s=0.05, quarantine_s=0.05)
    with running(config) as (pipe, worker):
        pipe.submit(request("old"), row=0)
        worker.send(peer.plain([10]))
        assert read(pipe) == {"old": ([10], None)}
        reader = pipe.pids["reader"]
        os.kill(reader, signal.SIGSTOP)
        try:
            while worker.send(peer.plain([11]), wait=False):
                pass
            blocked = threading.Thread(target=worker.send, args=(peer.plain([12]),))
            blocked.start()
            pipe.abort("old")
            wait_until(lambda: pipe.status()["counters"]["finals_abort"] == 1)
            turns = pipe.status()["roles"]["coordinator"]["turns"]
            wait_until(lambda: pipe.status()["roles"]["coordinator"]["turns"] > turns + 40)
            assert live_rows(pipe) == 1
        finally:
            os.kill(reader, signal.SIGCONT)
        blocked.join()
        wait_until(lambda: live_rows(pipe) == 0, describe=pipe.status)
        pipe.submit(request("new"), row=0)
        worker.send(peer.plain([20]))
        assert read(pipe) == {"old": ([], "abort"), "new": ([20], None)}


ENGINE = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import fastdeploy_peer as peer
worker = peer.Worker(int(sys.argv[2]))
for token in range(10, 15):
    worker.send(peer.plain([token, token + 100]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_leaves_a_prefix_and_one_error_final_each(unique_name: str) -> None:
    config = settings(unique_name, abort_timeout_s=0.05, quarantine_s=0.05)
    with running(config) as (pipe, _worker):
        for i in range(2):
            pipe.submit(request(f"r{i}"), row=i)
        here = str(Path(__file__).parent)
        engine = [sys.executable, "-c", ENGINE, here, str(queue_key(config))]
        assert subprocess.run(engine).returncode == -signal.SIGKILL
        got: dict[str, list[int]] = {"r0": [], "r1": []}
        ends: dict[str, str | None] = {}
        for batch in pipe.batches(timeout_s=60):
            for output in batch:
                got[output.request_id] += output.outputs.token_ids
                if output.finished:
                    assert output.request_id not in ends
                    ends[output.request_id] = output.finish_reason
            if len(ends) == 2:
                break
        assert got == {"r0": [*range(10, 15)], "r1": [*range(110, 115)]}
        assert ends == {"r0": "error", "r1": "error"}
        wait_until(lambda: live_rows(pipe) == 0, describe=pipe.status)


def test_a_worker_that_saves_with_another_op_is_told_of_in_the_log(
    unique_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(settings(unique_name)) as (pipe, worker):
        pipe.submit(request("a"), row=0)
        for _ in range(3):
            worker.send(peer.speculate(np.array([[1, 2]]), [2]))
        worker.send(peer.plain([5]))
        assert read(pipe) == {"a": ([5], None)}
        assert pipe.status()["counters"]["bad_bytes"] == 3
        with urllib.request.urlopen(pipe.health_url.replace("health", "metrics")) as answer:
            assert 'reason="bytes"' in answer.read().decode()
    text = capfd.readouterr().err
    assert "another length than the 2056 bytes of get_output" in text
    assert text.count("another op than --sysv-op says") == 1


@pytest.mark.parametrize("generation", [pytest.param("g1", marks=pytest.mark.full), "g3"])
def test_both_kinds_of_key_are_read(unique_name: str, generation: str) -> None:
    config = settings(unique_name, sysv_generation=generation, sysv_folder="/tmp")
    derive = peer.ftok if generation == "g1" else peer.custom_ftok
    with running(config) as (pipe, _worker):
        worker = peer.Worker(derive("/tmp", config.sysv_queue_id))
        pipe.submit(request("a"), row=0)
        worker.send(peer.plain([5]))
        assert read(pipe) == {"a": ([5], None)}


def test_the_reader_waits_without_a_step_and_goes_when_told(unique_name: str) -> None:
    """A blocking msgrcv has no time limit: a timer's signal lets it beat, and loses none."""
    with running(settings(unique_name, heartbeat_interval_s=0.001, stall_timeout_s=1)) as (
        pipe,
        worker,
    ):
        pipe.submit(request("a"), row=0)
        turns = pipe.status()["roles"]["reader"]["turns"]
        wait_until(lambda: pipe.status()["roles"]["reader"]["turns"] > turns + 200)
        sent = 0
        got: list[int] = []
        while sent < 2000 or len(got) < sent:  # ticks fall into every part of a receive
            if sent < 2000:
                worker.send(peer.plain([1000 + sent]))
                sent += 1
            for batch in pipe.batches(timeout_s=0):
                got += batch.token_ids.tolist()
        assert got == [1000 + i for i in range(2000)]
        assert pipe.status()["roles"]["reader"]["epoch"] == 1
