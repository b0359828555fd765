"""Limits of the system: one core, few descriptors, little address space, a cgroup's memory. A start
is refused with the numbers, or the pipeline runs on."""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from fake_engine import FakeEngine, token_of
from test_parents import OWNER, end, told
from test_supervision import SERVE, files_of, get, request

import tokenpipe as tp
from support import wait_until
from tokenpipe.limits import memory_limit

MEMORY_GROUP = Path("/sys/fs/cgroup/memory")


def limited_serve(name: str, limit: Callable[[], None], *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SERVE, "--name", name, "--num-decoders=1", "--max-num-seqs=4", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    )


def descriptors(number: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def needed_descriptors(name: str) -> int:
    """What a start asks for, out of its refusal; no refusal is a traceback."""
    refused = limited_serve(name, descriptors(8))
    _, errors = refused.communicate()
    assert refused.returncode == tp.ExitCode.NO_SPACE, errors
    words = errors.splitlines()[-1].split()
    assert "8 are allowed; raise it (ulimit -n)" in " ".join(words)
    assert "Traceback" not in errors
    return int(words[words.index("file") - 1])


def run_one(name: str) -> None:
    with tp.Pipeline.attach(name) as pipe, pipe.engine_writer() as writer:
        engine = FakeEngine(writer, 4)
        admission = pipe.submit(request("r", max_tokens=2))
        engine.run(admission)
        engine.step()
        engine.step()
        pipe.sync()
        outputs = [o for b in pipe.batches(timeout_s=0) for o in b]
        tokens = [t for o in outputs for t in o.outputs.token_ids]
        assert tokens == [token_of(admission.row, 1, p) for p in range(2)]


def test_few_descriptors_are_refused_with_the_numbers_or_are_enough(unique_name: str) -> None:
    """B88: with exactly what it asks for, connections that are held open cannot keep a role from
    being replaced."""
    needed = needed_descriptors(unique_name)
    one_less = limited_serve(unique_name, descriptors(needed - 1))
    _, errors = one_less.communicate()
    assert f"{needed} file descriptors are needed, {needed - 1} are allowed" in errors
    process = limited_serve(unique_name, descriptors(needed))
    held: list[socket.socket] = []
    try:
        ready = told(process)
        url = urlsplit(ready["health_url"])
        held = [socket.create_connection((url.hostname, url.port)) for _ in range(2 * needed)]
        with tp.Pipeline.attach(unique_name) as pipe:
            for _ in range(2):
                old = pipe.pids["reader"]
                os.kill(old, signal.SIGKILL)
                wait_until(lambda old=old: pipe.pids["reader"] != old)
                wait_until(lambda: pipe.health()["state"] == "idle")
        run_one(unique_name)
        for connection in held:
            connection.close()
        wait_until(lambda: get(ready["health_url"])[0] == 200)
        process.terminate()
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "Too many open files" not in errors
    finally:
        for connection in held:
            connection.close()
        end(process)
    assert files_of(unique_name) == []


@pytest.mark.parametrize("who", ["coordinator", "client"])
def test_an_address_space_that_is_too_small_is_told_with_the_numbers(
    unique_name: str, who: str
) -> None:
    """B13: RLIMIT_AS is not a full /dev/shm, and is not called one."""
    # What the process has mapped, and a little for what it still has to do, but not 64 MB.
    script = OWNER + (
        "import resource\n"
        "from tokenpipe import cli, coordinator, pipeline\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (32 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
    )
    size = "--ring-bytes=67108864"
    if who == "coordinator":
        script += "sys.exit(cli.main(['serve', '--name', sys.argv[1], sys.argv[2]]))"
        command = [sys.executable, "-c", script, unique_name, size]
        ended = subprocess.run(command, capture_output=True, text=True)
    else:
        script += (
            "try: tp.Pipeline.attach(sys.argv[1])\n"
            "except tp.SegmentMemoryError as e:\n"
            "    print(e, file=sys.stderr); sys.exit(e.exit_code)\n"
        )
        process = limited_serve(unique_name, lambda: None, size)
        try:
            told(process)
            command = [sys.executable, "-c", script, unique_name]
            ended = subprocess.run(command, capture_output=True, text=True)
            process.terminate()
            assert process.wait() == 0  # what serves goes on, and ends in order
        finally:
            end(process)
    assert ended.returncode == tp.ExitCode.NO_SPACE, ended.stderr
    assert "bytes do not fit into the address space of this process (RLIMIT_AS: " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert files_of(unique_name) == []


def test_the_memory_of_a_cgroup_is_the_lowest_on_the_way_up(tmp_path: Path) -> None:
    own = tmp_path / "own"
    groups = tmp_path / "groups"
    (groups / "memory" / "a" / "b").mkdir(parents=True)
    (groups / "a").mkdir()
    own.write_text("5:cpu,memory:/a/b\n0::/a\n")
    assert memory_limit(str(own), str(groups)) is None
    (groups / "memory" / "a" / "b" / "memory.limit_in_bytes").write_text("3000\n")
    (groups / "memory" / "a" / "memory.limit_in_bytes").write_text("2000\n")
    assert memory_limit(str(own), str(groups)) == 2000
    (groups / "a" / "memory.max").write_text("max\n")
    assert memory_limit(str(own), str(groups)) == 2000
    (groups / "memory.max").write_text("1000\n")
    assert memory_limit(str(own), str(groups)) == 1000
    assert memory_limit(str(tmp_path / "none"), str(groups)) is None


@pytest.fixture
def memory_group() -> Iterator[Path]:
    group = MEMORY_GROUP / f"tokenpipe-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no memory cgroup of our own here: {e}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_ring_beyond_the_cgroups_memory_is_refused_and_not_killed(
    unique_name: str, memory_group: Path
) -> None:
    """B13, B20: an out-of-memory kill at the start would be a crash loop without a message."""
    limit = 96 << 20
    (memory_group / "memory.limit_in_bytes").write_text(str(limit))

    def join() -> None:
        (memory_group / "cgroup.procs").write_text(str(os.getpid()))

    refused = limited_serve(unique_name, join, "--ring-bytes=134217728")
    _, errors = refused.communicate()
    assert refused.returncode == tp.ExitCode.NO_SPACE, errors
    assert f"bytes of shared memory are needed, {limit} are allowed" in errors
    assert "--ring-slots" in errors


def one_core(name: str, steps: int) -> None:
    """Every process on the same core, which they share with the test's own engine and client."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        config = tp.PipelineConfig(
            name=name, max_num_seqs=4, num_decoders=2, ring_slots=8, source_slots=4, spin_us=50
        )
        with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
            for pid in pipe.pids.values():
                assert psutil.Process(pid).cpu_affinity() == [min(before)]
            engine = FakeEngine(writer, 4)
            admissions = [pipe.submit(request(f"r{i}", max_tokens=steps)) for i in range(4)]
            for admission in admissions:
                engine.run(admission)
            got: dict[int, list[int]] = {a.row: [] for a in admissions}
            for _ in range(steps):
                engine.step()
                for batch in pipe.batches(timeout_s=0):
                    collect(batch, got)
            pipe.sync(60)
            for batch in pipe.batches(timeout_s=0):
                collect(batch, got)
            for row, tokens in got.items():
                assert tokens == [token_of(row, 1, p) for p in range(steps)]
            assert json.dumps(pipe.status()["counters"]["tokens_delivered"]) == str(4 * steps)
    finally:
        os.sched_setaffinity(0, before)


def collect(batch: tp.OutputBatch, got: dict[int, list[int]]) -> None:
    for i, row in enumerate(batch.row.tolist()):
        got[row] += batch.token_ids[batch.token_offsets[i] : batch.token_offsets[i + 1]].tolist()


def test_all_processes_on_one_core_lose_nothing(unique_name: str) -> None:
    """B10: none of them starves another by its waiting."""
    one_core(unique_name, 300)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_all_processes_on_one_core_for_long(unique_name: str) -> None:
    """B10."""
    one_core(unique_name, 20_000)
