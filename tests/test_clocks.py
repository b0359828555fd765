"""Clocks: a wall clock that is set while a pipeline runs changes nothing; a machine that has been
up for decades neither. tests/test_house_rules.py says where the wall clock may be read at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_parents import BODY
from test_supervision import files_of

DECADES_S = 10**9


@pytest.fixture
def leaping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python process sees a wall clock that leaps by years with each look at it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n"
        "leaps = itertools.cycle([0, 3e9, 1, 4e9, 2e9])\n"
        "time.time = lambda: next(leaps)\n"
        "time.time_ns = lambda: int(next(leaps) * 1e9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


LIFE = """
import os, signal, time
assert abs(time.time() - time.time()) > 1e8 or {is_offset}
def wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, (pipe.health(), pipe.status())
        time.sleep(0.001)
import numpy as np
import tokenpipe as tp
config = tp.PipelineConfig(
    name={name!r}, max_num_seqs=2, num_decoders=1, stall_timeout_s=0.5, abort_timeout_s=0.3,
    drain_timeout_s=0.1)
with tp.Pipeline(config) as pipe:
    writer = pipe.engine_writer()
    a = pipe.submit(tp.Request("a", prompt_token_ids=[1]))
    writer.save_output(np.array([7, 8]), generations=[a.generation, 0])
    wait(lambda: pipe.health()["role"] == "engine")  # stalled, and not before its time
    reader = pipe.pids["reader"]
    os.kill(reader, signal.SIGSTOP)  # silent: killed, replaced
    wait(lambda: pipe.pids["reader"] != reader)
    os.kill(pipe.pids["coordinator"], signal.SIGKILL)  # taken over
    pipe.abort("a")  # never acknowledged: the row is given up and comes back
    wait(lambda: pipe.status()["rows"]["live"] == 0)
    b = pipe.submit(tp.Request("b", prompt_token_ids=[1], max_tokens=1), timeout_s=30)
    generations = np.zeros(2, np.int32)
    generations[b.row] = b.generation
    writer.save_output(np.array([9, 9]), generations=generations)
    outputs = []
    for batch in pipe.batches(timeout_s=30):
        outputs += batch
        if outputs[-1].request_id == "b": break
    uptimes = [role["uptime_s"] for role in pipe.status()["roles"].values()]
    assert all(0 <= u < 600 for u in uptimes), uptimes
    print([(o.request_id, o.finish_reason, o.outputs.token_ids) for o in outputs])
    writer.close()
"""
TOLD = "[('a', None, [7]), ('a', 'abort', []), ('b', 'length', [9])]\n"


def test_no_liveness_and_no_time_limit_follows_the_wall_clock(
    unique_name: str, leaping: None
) -> None:
    """Stall, silence, take-over, deadlines and drain, with a wall clock that leaps in every
    process."""
    script = LIFE.format(name=unique_name, is_offset=False)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout == TOLD, ended.stderr
    assert files_of(unique_name) == []


def in_time_namespace() -> list[str]:
    return ["unshare", "--time", f"--monotonic={DECADES_S}", f"--boottime={DECADES_S}", "--fork"]


def can_shift_clocks() -> bool:
    if shutil.which("unshare") is None:
        return False
    look = "import time; assert time.monotonic() > 1e9"
    command = [*in_time_namespace(), sys.executable, "-c", look]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_shift_clocks(), reason="no time namespaces here")
def test_a_machine_that_has_been_up_for_decades_is_like_any_other(unique_name: str) -> None:
    """CLOCK_MONOTONIC and CLOCK_BOOTTIME far from zero, also against the start times in /proc."""
    script = LIFE.format(name=unique_name, is_offset=True)
    command = [*in_time_namespace(), sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout == TOLD, ended.stderr
    assert files_of(unique_name) == []


@pytest.mark.skipif(not can_shift_clocks(), reason="no time namespaces here")
def test_parties_of_different_time_namespaces_are_told_apart_from_the_dead(
    unique_name: str,
) -> None:
    """An owner whose clock is decades ahead; its neighbour's sweep takes nothing that lives."""
    script = BODY.replace("writer.close()", "writer.close(); input()") + f"main({unique_name!r})\n"
    process = subprocess.Popen(
        [*in_time_namespace(), sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[7, 8, 9]\n"
    subprocess.run([sys.executable, "-m", "tokenpipe", "clean"], check=True, capture_output=True)
    assert len(files_of(unique_name)) == 2
    process.communicate("end\n")
    assert process.returncode == 0
    assert files_of(unique_name) == []
