"""Who starts a pipeline, and how it ends with them: shells, PID 1, threads, forks, spawned
processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import FakeEngine, token_of
from test_supervision import SERVE, files_of, request, serve

import tokenpipe as tp
from support import wait_until

NOISE = ("resource_tracker", "leaked", "KeyError", "Traceback", "DeprecationWarning", "terminate")


def end(process: subprocess.Popen[str]) -> None:
    """Kills what a failed test would leave, and closes the pipes."""
    process.kill()
    process.communicate()


@contextmanager
def program(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python program whose lines the test reads and writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        end(process)


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"exit code {process.wait()}"
    return json.loads(line)


def all_gone(pids: list[int], name: str) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: not psutil.pid_exists(pid))
    wait_until(lambda: files_of(name) == [])


# ---------------------------------------------------------------- a shell in front


@contextmanager
def behind_a_shell(name: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """`sh -c` that stays in front of `serve`: a shell that has more to do does not become it."""
    command = " ".join([*SERVE, "--name", name, "--num-decoders=1", *flags])
    shell = subprocess.Popen(["sh", "-c", f"{command}; true"], stdout=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        ready = told(shell)
        assert ready["pid"] != shell.pid
        pids += [ready["pid"], *ready["pids"].values()]
        yield shell, pids
    finally:
        for pid in filter(psutil.pid_exists, pids):  # it has the shell's pipe open
            os.kill(pid, signal.SIGKILL)
        end(shell)


@pytest.mark.parametrize(
    ("signum", "flag"),
    [
        (signal.SIGTERM, "--exit-with-parent=$$"),
        (signal.SIGKILL, "--exit-with-parent"),
        pytest.param(signal.SIGTERM, "--exit-with-parent", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, "--exit-with-parent=$$", marks=pytest.mark.full),
    ],
)
def test_a_shell_in_front_takes_the_pipeline_with_it(
    unique_name: str, signum: signal.Signals, flag: str
) -> None:
    """B31, B18: the shell hands no signal on, so `serve` sees that its parent is gone."""
    with behind_a_shell(unique_name, flag) as (shell, pids):
        shell.send_signal(signum)
        shell.wait()
        all_gone(pids, unique_name)


def test_without_the_flag_a_pipeline_outlives_its_parent(unique_name: str) -> None:
    with behind_a_shell(unique_name, "--drain-timeout-s=0") as (shell, pids):
        shell.kill()
        shell.wait()
        with tp.Pipeline.attach(unique_name) as pipe:
            pipe.submit(request("a"))
            wait_until(lambda: pipe.health()["state"] == "running")
        os.kill(pids[0], signal.SIGTERM)
        all_gone(pids, unique_name)


def test_a_shell_that_becomes_serve_hands_the_signal_to_it(unique_name: str) -> None:
    """B31: `exec` is what an image's command should do."""
    command = " ".join(["exec", *SERVE, "--name", unique_name])
    process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    ready = told(process)
    assert ready["pid"] == process.pid
    process.terminate()
    assert process.wait() == 0
    end(process)
    all_gone(list(ready["pids"].values()), unique_name)


def test_a_parent_that_is_gone_already_is_told(unique_name: str) -> None:
    """B18: a launcher that dies at once, before `serve` could look at it."""
    child = subprocess.Popen(["true"])
    child.wait()
    command = [*SERVE, "--name", unique_name, f"--exit-with-parent={child.pid}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == tp.ExitCode.FAILED
    assert f"the parent (pid {child.pid}) has ended already" in ended.stderr
    assert files_of(unique_name) == []


# ---------------------------------------------------------------- PID 1


IN_A_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_be_pid_1() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_be_pid_1(), reason="no pid namespaces here")


def inside(process: subprocess.Popen[str], text: str) -> psutil.Process | None:
    """The process of that namespace whose command line holds the text."""
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if text in " ".join(child.cmdline()):
                return child
        except psutil.Error:
            continue
    return None


@needs_namespaces
def test_pid_1_reaps_orphans_and_stops_when_told(unique_name: str, tmp_path: Path) -> None:
    """B31, B32: serve as a container's first process."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    orphan = f"( (read line < {fifo}) & ); "
    script = orphan + "exec " + " ".join([*SERVE, "--name", unique_name, "--num-decoders=1"])
    process = subprocess.Popen(
        [*IN_A_NAMESPACE, "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )
    try:
        assert told(process)["pid"] == 1
        first = inside(process, "tokenpipe serve")
        assert first is not None
        strangers = {p for p in first.children() if "tokenpipe role" not in " ".join(p.cmdline())}
        assert len(strangers) == 1
        fifo.write_text("end\n")
        wait_until(lambda: not any(p.is_running() for p in strangers), describe=lambda: strangers)
        reader = inside(process, "role reader")
        assert reader is not None
        reader.kill()  # its own children are still its own to reap
        with tp.Pipeline.attach(unique_name) as pipe:
            wait_until(lambda: pipe.status()["roles"]["reader"]["epoch"] == 2)
            wait_until(lambda: pipe.health()["state"] == "idle")
        first.terminate()
        assert process.wait() == 0
    finally:
        end(process)
    assert files_of(unique_name) == []


@needs_namespaces
def test_a_parent_outside_of_the_namespace_cannot_be_watched(unique_name: str) -> None:
    command = [*IN_A_NAMESPACE, *SERVE, "--name", unique_name, "--exit-with-parent"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == tp.ExitCode.BAD_CONFIG
    assert "the parent is outside of this pid namespace" in ended.stderr


@needs_namespaces
def test_equal_pids_in_two_namespaces_are_not_taken_for_one(unique_name: str) -> None:
    """B22, B20: two containers that share /dev/shm; a third start sweeps neither, then the dead
    one."""
    names = [unique_name + "a", unique_name + "b"]
    processes = [
        subprocess.Popen(
            [*IN_A_NAMESPACE, *SERVE, "--name", name, "--num-decoders=1", "--max-num-seqs=4"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    try:
        assert [told(process)["pid"] for process in processes] == [1, 1]
        with serve(unique_name):
            assert [len(files_of(name)) for name in names] == [2, 2]
        for i, name in enumerate(names):
            with tp.Pipeline.attach(name) as pipe, pipe.engine_writer() as writer:
                engine = FakeEngine(writer, 4)
                engine.position += i * 100
                admission = pipe.submit(request("r", max_tokens=1))
                engine.run(admission)
                engine.step()
                [output] = next(pipe.batches(timeout_s=30))
                assert output.outputs.token_ids == [token_of(admission.row, 1, 0)]
        processes[0].kill()  # and its namespace with it
        processes[0].wait()
        wait_until(lambda: all("no process holds it" in f for f in whys(names[0])))
        with serve(unique_name):
            assert [len(files_of(name)) for name in names] == [0, 2]
    finally:
        for process in processes:
            end(process)
    wait_until(lambda: all(why == "no process holds it" for why in whys(names[1])))
    subprocess.run([sys.executable, "-m", "tokenpipe", "clean", names[1]], check=True)


def whys(name: str) -> list[str]:
    from tokenpipe.segment import leftovers

    return [found.why for found in leftovers(name)]


# ---------------------------------------------------------------- owners


OWNER = """
import json, os, sys, threading
import tokenpipe as tp
def own(name):
    return tp.Pipeline(tp.PipelineConfig(name=name, max_num_seqs=4, num_decoders=1))
def say(value):
    print(json.dumps(value), flush=True)
"""


def test_a_pipeline_made_in_a_thread_outlives_the_thread_and_ends_with_the_process(
    unique_name: str,
) -> None:
    """B18: a death signal of the parent would be that of the thread."""
    script = OWNER + (
        "made = []\n"
        "thread = threading.Thread(target=lambda: made.append(own(sys.argv[1])))\n"
        "thread.start(); thread.join()\n"
        "made[0].submit(tp.Request('a', prompt_token_ids=[1]))\n"
        "while made[0].health()['state'] != 'running': pass\n"
        "say(list(made[0].pids.values()))\n"
        "sys.stdin.readline()\n"
        "os._exit(0)\n"
    )
    with program(script, unique_name) as process:
        pids = told(process)
        process.communicate("go\n")
        all_gone(pids, unique_name)


@pytest.mark.parametrize(
    "how", ["os._exit(0)", pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.full)]
)
def test_an_owner_that_dies_while_its_thread_starts_the_pipeline_leaves_nothing(
    unique_name: str, how: str
) -> None:
    """B18: in the state `starting`, from the main thread, right after the coordinator's spawn."""
    script = OWNER + (
        "from tokenpipe import keeper\n"
        "spawned = threading.Event()\n"
        "def wait(process, fd, timeout_s):\n"
        "    say(process.pid)\n"
        "    spawned.set()\n"
        "    threading.Event().wait()\n"
        "keeper._read_ready = wait\n"
        "threading.Thread(target=own, args=[sys.argv[1]]).start()\n"
        "spawned.wait()\n"
        f"{how}\n"
    )
    with program(script, unique_name) as process:
        pid = told(process)
        process.wait()
        all_gone([pid], unique_name)


FORKED = """
busy = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(4)]
for thread in busy: thread.start()
pipe = own(sys.argv[1])
writer = pipe.engine_writer()
pipe.submit(tp.Request('a', prompt_token_ids=[1]))
def refused(call):
    try:
        call()
    except tp.PipelineGoneError as e:
        return f"a fork's copy of that of pid {os.getppid()}" in str(e)
if os.fork() == 0:
    calls = [lambda: pipe.submit(tp.Request('b', prompt_token_ids=[1])), pipe.batches, pipe.health,
             lambda: writer.begin_step([1]), writer.poll_control,
             pipe.clear, lambda: pipe.drain(0.0)]
    answers = [refused(call) for call in calls]
    writer.close(); pipe.close()
    say([os.getpid(), answers, *pipe.pids.values()])
    threading.Event().wait()  # lives on, with a copy of everything
sys.stdin.readline()
while pipe.health()['state'] != 'running': pass
say('running')
threading.Event().wait()
"""


def test_a_forked_copy_neither_uses_nor_keeps_what_its_parent_holds(unique_name: str) -> None:
    """B28, B18: a copy's close() takes nothing from its parent; the parent's death is seen while
    the copy lives."""
    with program(OWNER + FORKED, unique_name) as process:
        copy, answers, *pids = told(process)
        try:
            assert answers == [True] * 7
            with pytest.raises(tp.PartyExistsError, match=f"pid {process.pid} is its client"):
                tp.Pipeline.attach(unique_name)
            with pytest.raises(tp.PartyExistsError, match=f"pid {process.pid} is its engine wri"):
                tp.EngineWriter.attach(unique_name)
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert told(process) == "running"
            process.kill()
            all_gone(pids, unique_name)
            assert psutil.pid_exists(copy)
        finally:
            os.kill(copy, signal.SIGKILL)


def test_an_engine_that_dies_is_seen_dead_while_a_fork_of_it_lives(unique_name: str) -> None:
    """B18, B28: a fork of the engine's worker must not hold its place."""
    engine = OWNER + (
        "writer = tp.EngineWriter.attach(sys.argv[1])\n"
        "copy = os.fork()\n"
        "if copy: say(copy)\n"
        "threading.Event().wait()\n"
    )
    with serve(unique_name), tp.Pipeline.attach(unique_name) as pipe:
        pipe.submit(request("a"))
        with program(engine, unique_name) as process:
            copy = told(process)
            try:
                process.kill()
                [final] = next(pipe.batches(timeout_s=60))
                assert (final.request_id, final.finish_reason) == ("a", "error")
                assert psutil.pid_exists(copy)
                tp.EngineWriter.attach(unique_name).close()  # the place is free
            finally:
                os.kill(copy, signal.SIGKILL)


# ---------------------------------------------------------------- ways to run a program


BODY = """
import numpy as np
import tokenpipe as tp
def main(name):
    with tp.Pipeline(tp.PipelineConfig(name=name, max_num_seqs=2, num_decoders=1)) as pipe:
        writer = pipe.engine_writer()
        adm = pipe.submit(tp.Request("r", prompt_token_ids=[1], max_tokens=3))
        for token in (7, 8, 9):
            writer.save_output(np.full(2, token), generations=[adm.generation, 0])
        got = [t for b in pipe.batches(timeout_s=0 if pipe.sync() else 0.0) for o in b
               for t in o.outputs.token_ids]
        print(got, flush=True)
        writer.close()
"""


@pytest.mark.parametrize(
    "method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.full)]
)
def test_a_pipeline_runs_inside_a_process_of_multiprocessing(
    unique_name: str, method: str, tmp_path: Path
) -> None:
    """B21, B27, B28: from a parent with threads too; nothing of the resource tracker is heard."""
    script = tmp_path / "program.py"
    script.write_text(
        BODY + "if __name__ == '__main__':\n"
        "    import multiprocessing, sys, threading\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        f"    process = context.Process(target=main, args=[{unique_name!r}])\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    # Python 3.12 warns of every fork of a program with threads; this fork is the program's own.
    quiet = ["-W", "ignore:This process:DeprecationWarning"]
    ended = subprocess.run([sys.executable, *quiet, str(script)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "[7, 8, 9]\n"), ended.stderr
    assert not any(word in ended.stderr for word in NOISE), ended.stderr


@pytest.mark.parametrize(
    "way", ["script", pytest.param("command", marks=pytest.mark.full), "interactive"]
)
def test_a_program_without_a_main_guard_runs_once_whatever_runs_it(
    unique_name: str, way: str, tmp_path: Path
) -> None:
    """B29: `python FILE`, `python -c`, and a REPL that ends without close(); `python -` is in
    test_supervision.py."""
    lines = (
        "import tokenpipe as tp\nprint('body')\n"
        f"pipe = tp.Pipeline(tp.PipelineConfig(name={unique_name!r}, max_num_seqs=2))\n"
        "print(pipe.health()['state'])\n"
    )
    script = tmp_path / "program.py"
    script.write_text(lines)
    arguments = {
        "script": [str(script)],
        "command": ["-c", lines],
        "interactive": ["-i"],
    }[way]
    ended = subprocess.run(
        [sys.executable, *arguments],
        input=lines if way == "interactive" else "",
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "body\nidle\n"), ended.stderr
    assert not any(word in ended.stderr for word in NOISE), ended.stderr
    wait_until(lambda: files_of(unique_name) == [])
