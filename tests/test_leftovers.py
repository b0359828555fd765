"""After a kill nothing stays, and what others have is left alone: owners, whole runs, files that
are missing or of another build, and zombies."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import FakeEngine, token_of
from test_segment import KINDS, creator, file_of, files_of, small
from test_supervision import read_to_the_end, request, serve

import tokenpipe as tp
from support import SHM, wait_until
from tokenpipe.segment import Segment, sweep
from tokenpipe.status import View

HERE = Path(__file__).parent
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>


def processes_marked(mark: str) -> list[int]:
    """Found by their environment, whatever they call themselves (our own test run's is another)."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if f"LEFTOVER={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            ):
                found.append(pid)
    return found


# The launcher of the reports: it owns a pipeline, runs an engine in it and reads the outputs.
LAUNCHER = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import tokenpipe as tp
from fake_engine import FakeEngine
name, how = sys.argv[1:]
print("starting", flush=True)
config = tp.PipelineConfig(name=name, max_num_seqs=4, num_decoders=2, orphan_grace_s=0.5)
with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
    engine = FakeEngine(writer, 4)
    for i in range(4):
        engine.run(pipe.submit(tp.Request(f"r{{i}}", prompt_token_ids=[1])))
    print("up", pipe.pids["decoder-1"], flush=True)
    while True:
        engine.step()
        for batch in pipe.batches(timeout_s=0):
            pass
"""


@pytest.mark.parametrize(
    ("how", "signum"),
    [
        ("starting", signal.SIGKILL),
        ("busy", signal.SIGTERM),
        pytest.param("busy", signal.SIGKILL, marks=pytest.mark.full),
        pytest.param("busy", signal.SIGINT, marks=pytest.mark.full),
        ("stuck", signal.SIGKILL),  # a decoder that answers nobody
    ],
)
def test_nothing_outlives_the_launcher(unique_name: str, how: str, signum: signal.Signals) -> None:
    """B18, B19, B21: whatever it was doing when it was told to end, or was not told."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, unique_name, how],
        env={**os.environ, "LEFTOVER": unique_name},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "starting\n"
    if how == "starting":
        wait_until(lambda: len(processes_marked(unique_name)) >= 3)  # a role has just been spawned
    else:
        decoder = int(launcher.stdout.readline().split()[1])
        if how == "stuck":
            os.kill(decoder, signal.SIGSTOP)
    os.killpg(launcher.pid, signum)
    launcher.communicate()
    assert launcher.returncode in (-signum, 1)  # 1: Python's own word for KeyboardInterrupt
    wait_until(
        lambda: not processes_marked(unique_name), describe=lambda: processes_marked(unique_name)
    )
    # A start that was killed half way may leave its files to the next one.
    sweep(unique_name) if how == "starting" else None
    wait_until(lambda: files_of(unique_name) == set())


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_restarts_after_a_kill_of_everything_do_not_fill_dev_shm(
    unique_name: str, rounds: int
) -> None:
    """B20: every process of a run is killed under load; the next start leaves nothing of it."""
    names = [f"{unique_name}.{i}" for i in range(rounds)]
    for i, name in enumerate(names):
        with serve(name, "--orphan-grace-s=0.5") as (process, ready):
            assert [n for n in names if files_of(n)] == [name], "what was killed is still there"
            with tp.Pipeline.attach(name) as pipe, tp.EngineWriter.attach(name) as writer:
                engine = FakeEngine(writer, 8)
                engine.run(pipe.submit(request("a")))
                for _ in range(3):
                    engine.step()
                for pid in (process.pid, *ready["pids"].values()):
                    os.kill(pid, signal.SIGKILL)
                process.wait()
                assert read_to_the_end(pipe)[-1].finish_reason == "error"
        assert i < len(names)
    sweep(names[-1])
    assert not any(files_of(name) for name in names)


def test_two_pipelines_of_one_machine_see_their_own_tokens_alone(unique_name: str) -> None:
    """B19: no port and no name is fixed."""
    with (
        tp.Pipeline(tp.PipelineConfig(max_num_seqs=4)) as one,
        tp.Pipeline(tp.PipelineConfig(max_num_seqs=4)) as other,
    ):
        assert one.name != other.name
        assert one.health_url != other.health_url
        with one.engine_writer() as first, other.engine_writer() as second:
            for pipe, writer, generation in ((one, first, 1), (other, second, 2)):
                if generation == 2:  # so that its tokens are others
                    pipe.submit(request("before", max_tokens=1), row=0)
                    writer.save_output([5], generations=[1])
                    wait_until(lambda pipe=pipe: pipe.status()["rows"]["live"] == 0)
                engine = FakeEngine(writer, 4)
                engine.run(pipe.submit(request("a", max_tokens=2), row=0))
                engine.step()
                engine.step()
            for pipe, generation in ((one, 1), (other, 2)):
                tokens: list[int] = []
                for batch in pipe.batches(timeout_s=60):
                    tokens += [t for o in batch if o.request_id == "a" for t in o.outputs.token_ids]
                    if len(tokens) == 2:
                        break
                assert tokens == [token_of(0, generation, 0), token_of(0, generation, 1)]


IN_A_NAMESPACE = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import tokenpipe as tp
from fake_engine import FakeEngine, token_of
from tokenpipe.segment import sweep
row = int(sys.argv[1])
with tp.Pipeline(tp.PipelineConfig(max_num_seqs=4, num_decoders=1)) as pipe:
    print(pipe.name, os.getpid(), *pipe.pids.values(), flush=True)
    sys.stdin.readline()  # the other one is up
    assert sweep(pipe.name) == 0
    sweep()
    with pipe.engine_writer() as writer:
        engine = FakeEngine(writer, 4)
        a = pipe.submit(tp.Request("a", prompt_token_ids=[1], max_tokens=3), row=row)
        engine.run(a)
        tokens = []
        for position in range(3):
            engine.step()
        for batch in pipe.batches(timeout_s=60):
            tokens += batch.token_ids.tolist()
            if batch.num_finals:
                break
    assert tokens == [token_of(row, 1, p) for p in range(3)], tokens
    print("done", flush=True)
    sys.stdin.readline()  # the other one has looked, too
"""
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_unshare(), reason="no pid namespaces here")
def test_equal_pids_in_two_namespaces_are_two_pipelines() -> None:
    """B22: two containers that share /dev/shm. Pids are the same, and nobody is swept away."""
    pair = [
        subprocess.Popen(
            [*NAMESPACE, sys.executable, "-c", IN_A_NAMESPACE, str(row)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for row in (1, 2)
    ]
    try:
        facts = []
        for process in pair:
            assert process.stdout is not None
            facts.append(process.stdout.readline().split())
        assert facts[0][0] != facts[1][0]
        assert facts[0][1:] == facts[1][1:] != [], "their pids are not the same"
        for words in ("done\n", ""):
            for process in pair:
                assert process.stdin is not None
                process.stdin.write("go on\n")
                process.stdin.flush()
            for process in pair:
                assert process.stdout is not None
                assert process.stdout.readline() == words
        assert [process.wait() for process in pair] == [0, 0]
    finally:
        for process in pair:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("missing", [*KINDS, "both", "none"])
def test_any_file_of_a_dead_run_may_be_missing(unique_name: str, missing: str) -> None:
    """B23: somebody has cleaned up by hand, in part."""
    with creator(unique_name) as other:
        other.kill()
    for kind in KINDS if missing == "both" else [missing] if missing != "none" else []:
        file_of(unique_name, kind).unlink()
    with Segment.create_or_adopt(small(unique_name, max_num_seqs=9)):
        assert Segment.attach(unique_name).config.max_num_seqs == 9
    assert files_of(unique_name) == set()


@pytest.mark.parametrize(
    "kinds",
    [KINDS, *(pytest.param((kind,), marks=pytest.mark.full) for kind in ("core", "source"))],
)
def test_a_live_run_whose_files_were_removed_goes_on_and_harms_no_successor(
    unique_name: str, kinds: tuple[str, ...]
) -> None:
    """B23: the names are gone, the memory is not. The name may be another run's by then."""
    with tp.Pipeline(tp.PipelineConfig(name=unique_name, max_num_seqs=4)) as pipe:
        with pipe.engine_writer() as writer:
            engine = FakeEngine(writer, 4)
            engine.run(pipe.submit(request("a", max_tokens=2)))
            for kind in kinds:
                file_of(unique_name, kind).unlink()
            engine.step()
            engine.step()
            final = read_to_the_final(pipe)
            assert final.finish_reason == "length"
        if set(kinds) == set(KINDS):
            with Segment.create(small(unique_name)):
                pipe.close()
                assert files_of(unique_name) == set(KINDS), "it has removed its successor's files"
    wait_until(lambda: files_of(unique_name) == set())


def read_to_the_final(pipe: tp.Pipeline) -> Any:
    for batch in pipe.batches(timeout_s=60):
        for output in batch:
            if output.finished:
                return output
    raise AssertionError("no final")


@pytest.mark.parametrize("kind", KINDS)
def test_a_leftover_of_another_layout_is_removed_if_it_is_dead_and_left_if_not(
    unique_name: str, kind: str
) -> None:
    """B25: nobody needs to understand a file to see that no process holds it."""

    def make_old() -> None:
        with file_of(unique_name, kind).open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<Q", 2))

    with creator(unique_name) as other:
        make_old()
        with pytest.raises(tp.SegmentError):
            Segment.create_or_adopt(small(unique_name))
        assert files_of(unique_name) == set(KINDS)
        other.kill()
    with Segment.create_or_adopt(small(unique_name)):
        Segment.attach(unique_name).close()
    assert files_of(unique_name) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_leftovers_of_another_user_are_told_once_and_stop_nobody(unique_name: str) -> None:
    """B24: we may not remove them, and they may be alive."""
    theirs = SHM / f"tokenpipe.{unique_name}.theirs.core"
    theirs.write_bytes(bytes(8192))
    os.chown(theirs, 12345, -1)
    try:
        with serve(unique_name, "--heartbeat-interval-s=0.02") as (process, _ready):
            wait_until(lambda: ticks(unique_name) > 20)
            process.terminate()
            said = process.communicate()[1].splitlines()
        told = [line for line in said if theirs.name in line]
        assert len(told) == 1, said
        assert "belongs to uid 12345" in told[0]
        assert theirs.exists()
    finally:
        theirs.unlink()


def ticks(name: str) -> int:
    segment = Segment.attach(name)
    try:
        return int(View(segment).header["ticks"])
    finally:
        segment.close()


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """This process becomes the parent of its orphans, and it reaps nobody: a bad PID 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_zombie_is_dead(unique_name: str) -> None:
    """B32: it has a pid and a /proc entry. Its successor is started all the same."""
    with adopting_orphans(), serve(unique_name, "--orphan-grace-s=60") as (process, ready):
        zombie = ready["pids"]["decoder-1"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        os.kill(zombie, signal.SIGKILL)
        wait_until(lambda: psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE)
        left = [pid for role, pid in ready["pids"].items() if pid != zombie]
        with (
            serve(unique_name, "--orphan-grace-s=60") as (successor, new),
            tp.Pipeline.attach(unique_name) as pipe,
            tp.EngineWriter.attach(unique_name) as writer,
        ):
            wait_until(lambda: pipe.pids["decoder-1"] != zombie)
            assert new["pids"]["reader"] == ready["pids"]["reader"]
            assert psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE
            engine = FakeEngine(writer, 8)
            for row in range(2):
                engine.run(pipe.submit(request(f"r{row}", max_tokens=1), row=row))
            engine.step()
            finals = 0
            for batch in pipe.batches(timeout_s=60):
                finals += batch.num_finals
                if finals == 2:
                    break
            successor.terminate()
            assert successor.wait(30) == 0, "it has waited for a zombie"
        os.waitpid(zombie, 0)
        for pid in left:
            os.waitpid(pid, 0)


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.full)])
def test_pipelines_that_come_and_go_leave_nothing_in_their_process(rounds: int) -> None:
    """B30: descriptors, threads, children and mappings are as before."""

    def now() -> tuple[set[str], int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return (
            set(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(psutil.Process().children(recursive=True)),
            maps.count("tokenpipe."),
        )

    def one_round() -> None:
        with (
            tp.Pipeline(tp.PipelineConfig(max_num_seqs=2, num_decoders=1)) as pipe,
            pipe.engine_writer() as writer,
        ):
            engine = FakeEngine(writer, 2)
            engine.run(pipe.submit(request("a", max_tokens=1)))
            engine.step()
            assert read_to_the_final(pipe).finish_reason == "length"

    one_round()  # what is imported late is there by now
    before = now()
    for _ in range(rounds - 1):
        one_round()
    assert now() == before


@pytest.mark.parametrize("where", ["coordinator", "reader", "decoder-1"])
def test_an_error_in_a_running_role_ends_its_process(
    unique_name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B33: no thread of ours keeps a process alive whose main thread has failed."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, sys
role = sys.argv and sys.orig_argv[sys.orig_argv.index("-m") + 2 :] if "-m" in sys.orig_argv else []
where, gate = {where!r}, {str(tmp_path / "gate")!r}

def failing(real):
    def wrapped(*args):
        if os.path.exists(gate):
            raise ValueError("X-marker")
        return real(*args)
    return wrapped

if role[:1] == ["serve"] and where == "coordinator":
    from tokenpipe.coordinator import Coordinator
    Coordinator._judge = failing(Coordinator._judge)
elif role[:2] == ["role", where]:
    from tokenpipe.lifeline import Lifeline
    Lifeline.is_cut = failing(Lifeline.is_cut)
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with serve(unique_name, "--max-restarts=0") as (process, ready):
        pids = {"coordinator": process.pid, **ready["pids"]}
        (tmp_path / "gate").touch()
        assert process.wait(60) in (tp.ExitCode.FAILED, tp.ExitCode.ROLE_LOST)
        assert not any(psutil.pid_exists(pid) for pid in pids.values())
        assert process.stderr is not None
        said = process.stderr.read().splitlines()
        assert any("X-marker" in line for line in said[-20:])
        assert any(where in line for line in said[-20:])
    assert files_of(unique_name) == set()
