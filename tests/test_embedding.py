"""The program around a pipeline: its signals, its children, its end. All of it stays its own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
from test_parents import OWNER, all_gone, end, program, told
from test_supervision import SERVE, files_of

import tokenpipe as tp
from support import wait_until


def ended(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end."""
    command = [sys.executable, "-c", OWNER + textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


# ---------------------------------------------------------------- signals


def test_handlers_mask_and_wake_up_descriptor_stay_the_programs(unique_name: str) -> None:
    """B30: before, during (a replaced coordinator included) and after; each signal reaches its own
    handler, and none of them stops the pipeline."""
    script = """
    import signal
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGPIPE)
    seen = set()
    handlers = {s: (lambda number, frame: seen.add(number)) for s in ours}
    for s, handler in handlers.items(): signal.signal(s, handler)
    wake_up = os.eventfd(0, os.EFD_NONBLOCK)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    timer = signal.getitimer(signal.ITIMER_REAL)
    def is_untouched():
        return (all(signal.getsignal(s) is handler for s, handler in handlers.items())
            and signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False) == wake_up
            and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
            and signal.getitimer(signal.ITIMER_REAL) == timer)
    answers = [is_untouched()]
    with own(sys.argv[1]) as pipe:
        answers.append(is_untouched())
        for s in ours: os.kill(os.getpid(), s)
        pipe.submit(tp.Request('a', prompt_token_ids=[1]))
        old = pipe.pids['coordinator']
        os.kill(old, signal.SIGKILL)
        pipe.submit(tp.Request('b', prompt_token_ids=[1]))
        answers += [is_untouched(), pipe.pids['coordinator'] != old, seen == set(ours)]
        while pipe.health()['state'] != 'running': pass
    answers.append(is_untouched())
    say(answers)
    """
    done = ended(script, unique_name)
    assert done.stdout == "[true, true, true, true, true, true]\n", done.stderr
    assert files_of(unique_name) == []


def test_an_interrupt_ends_every_wait_and_leaves_the_pipeline_whole(unique_name: str) -> None:
    """B30: Ctrl-C is the program's: KeyboardInterrupt in its main thread, nothing else."""
    script = """
    import queue, signal
    import numpy as np
    wanted = queue.SimpleQueue()
    def interrupt():
        while wanted.get(): os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    pipe = tp.Pipeline(tp.PipelineConfig(
        name=sys.argv[1], max_num_seqs=1, num_decoders=1, source_slots=2, ring_slots=2,
        output_slots=2))
    writer = pipe.engine_writer()
    admission = pipe.submit(tp.Request('a', prompt_token_ids=[1]))
    def save():
        while True:
            token = np.array([writer.num_steps])
            writer.save_output(token, generations=[admission.generation])
    def interrupted(call):
        try:
            wanted.put(True)
            call()
        except KeyboardInterrupt:
            return True
    answers = [
        interrupted(lambda: next(pipe.batches())),
        interrupted(lambda: pipe.submit(tp.Request('b', prompt_token_ids=[1]))),
        interrupted(save),
    ]
    saved, got = writer.num_steps, []
    for batch in pipe.batches():
        got += batch.token_ids.tolist()
        if len(got) == saved: break
    say([answers, got == list(range(saved))])
    pipe.close()
    """
    done = ended(script, unique_name)
    # A token is saved once, whether its call returned or was interrupted after its save.
    assert done.stdout == "[[true, true, true], true]\n", done.stderr
    assert files_of(unique_name) == []


STOLEN = {
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "reaped": (
        "def reap(number, frame):\n"
        "    try:\n"
        "        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "    except ChildProcessError: pass\n"
        "signal.signal(signal.SIGCHLD, reap)"
    ),
}


@pytest.mark.parametrize("how", STOLEN)
def test_a_program_that_takes_every_childs_exit_code_keeps_its_pipeline(
    unique_name: str, how: str
) -> None:
    """B30, B42: SIGCHLD ignored (which is inherited), or a handler that waits for all children."""
    script = (
        OWNER + "import signal\n" + STOLEN[how] + "\n"
        "pipe = own(sys.argv[1])\n"
        "say(pipe.pids)\n"
        "while sys.stdin.readline() == '?\\n': say([pipe.health(), pipe.pids])\n"
        "pipe.close()\n"
        "say('closed')\n"
    )
    with program(script, unique_name) as process:
        assert process.stdin is not None
        pids = told(process)
        stdin = process.stdin

        def ask() -> tuple[dict[str, str], dict[str, int]]:
            stdin.write("?\n")
            stdin.flush()
            health, now = told(process)
            return health, now

        os.kill(pids["coordinator"], signal.SIGKILL)
        wait_until(lambda: ask()[1]["coordinator"] != pids["coordinator"])
        os.kill(pids["reader"], signal.SIGKILL)  # by now an adopted child
        wait_until(lambda: ask()[1]["reader"] != pids["reader"])
        wait_until(lambda: ask()[0]["state"] == "idle")
        _health, pids = ask()
        os.kill(pids["reader"], signal.SIGKILL)  # and this one is the coordinator's own
        wait_until(lambda: ask()[1]["reader"] != pids["reader"])
        stdin.write("close\n")
        stdin.flush()
        assert told(process) == "closed"
        assert files_of(unique_name) == []
        process.wait()


def test_signals_that_were_blocked_or_ignored_do_not_keep_a_pipeline_from_stopping(
    unique_name: str,
) -> None:
    """B31: a program's worker threads often block every signal, and a child inherits it."""
    script = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    """
    command = [sys.executable, "-c", OWNER + textwrap.dedent(script), *SERVE[1:]]
    process = subprocess.Popen(
        [*command, "--name", unique_name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = told(process)
        pids = [process.pid, *ready["pids"].values()]
        bit = 1 << (signal.SIGTERM - 1)
        for pid in pids:
            about = Path(f"/proc/{pid}/status").read_text()
            blocked = next(x for x in about.splitlines() if x.startswith("SigBlk"))
            assert not int(blocked.split()[1], 16) & bit
        os.kill(ready["pids"]["reader"], signal.SIGKILL)
        with tp.Pipeline.attach(unique_name) as pipe:
            wait_until(lambda: pipe.status()["roles"]["reader"]["epoch"] == 2)
            wait_until(lambda: pipe.health()["state"] == "idle")
        process.terminate()
        _, errors = process.communicate()
        assert process.returncode == 0
        assert f"reader (pid {ready['pids']['reader']}) was killed by SIGKILL" in errors
        assert "did not stop: killed" not in errors
    finally:
        end(process)
    all_gone(pids, unique_name)


# ---------------------------------------------------------------- the end of the program


THREADS = """
import numpy as np
pipe = tp.Pipeline(tp.PipelineConfig(
    name=sys.argv[1], max_num_seqs=2, num_decoders=1, source_slots=2, ring_slots=2, output_slots=2))
writer = pipe.engine_writer()
admissions = [pipe.submit(tp.Request(name, prompt_token_ids=[1])) for name in 'ab']
def save():
    while True:
        writer.save_output(np.array([7, 8]), generations=[a.generation for a in admissions])
def submit():
    pipe.submit(tp.Request('c', prompt_token_ids=[1]))
def watch():
    while True: pipe.sync()
for wait in (save, submit, watch, save, save):
    threading.Thread(target=wait, daemon=True).start()
while pipe.status()['source']['occupancy'] < 2 or pipe.status()['waiting_submits'] < 1: pass
"""


@pytest.mark.parametrize(
    ("last", "code"),
    [
        pytest.param("pass", 0, marks=pytest.mark.full),
        ("raise ValueError('X-marker')", 1),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.full),
        pytest.param("os._exit(4)", 4, marks=pytest.mark.full),
    ],
)
def test_a_program_that_ends_without_close_ends_as_it_would_without_us(
    unique_name: str, last: str, code: int
) -> None:
    """B33, B27: threads of the program that wait in the pipeline hold nothing up and abort
    nothing; processes and segments go with it."""
    done = ended(THREADS + last, unique_name)
    assert done.returncode == code, done.stderr
    own = [x for x in done.stderr.splitlines() if " tokenpipe coordinator[" not in x]
    if code == 1:
        assert own.pop() == "ValueError: X-marker"
        assert own[0].startswith("Traceback")
        own = own[3:]
    assert not own or "leaked" not in "".join(own), own
    for word in ("terminate", "Fatal", "Exception ignored", "resource_tracker"):
        assert word not in done.stderr
    wait_until(lambda: files_of(unique_name) == [])


def many(unique_name: str, times: int) -> None:
    me = psutil.Process()

    def held() -> tuple[int, int, int, list[str]]:
        gc.collect()
        return me.num_fds(), threading.active_count(), len(me.children()), files_of(unique_name)

    def once() -> None:
        config = tp.PipelineConfig(name=unique_name, max_num_seqs=2, num_decoders=1)
        with tp.Pipeline(config) as pipe, pipe.engine_writer():
            pipe.submit(tp.Request("a", prompt_token_ids=[1]))

    once()  # what a first use opens for good
    before = held()
    for _ in range(times):
        once()
    assert held() == before


def test_pipelines_made_and_closed_leave_nothing_in_the_process(unique_name: str) -> None:
    """B30: descriptors, threads, children and files are as before."""
    many(unique_name, 2)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_hundred_pipelines_made_and_closed_leave_nothing_in_the_process(
    unique_name: str,
) -> None:
    """B30, B28: a hundred starts from a process with threads."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        many(unique_name, 100)
    finally:
        stop.set()
