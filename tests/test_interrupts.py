"""Storms of signals: a timer interrupts every system call of every process about once a
millisecond."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_supervision import files_of

STORM = """
import atexit, signal
count = 0
def note(number, frame):
    global count
    count += 1
signal.signal(signal.SIGALRM, note)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
# An interpreter that ends takes its handlers away first; the signal would kill it then.
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
"""

PROGRAM = """
import json, os, signal, sys, threading
import sitecustomize
import numpy as np
import tokenpipe as tp
name, steps = sys.argv[1], int(sys.argv[2])
config = tp.PipelineConfig(
    name=name, max_num_seqs=4, num_decoders=2, ring_slots=4, source_slots=2, output_slots=4)
with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
    handlers = []
    for pid in pipe.pids.values():
        caught = [x for x in open(f"/proc/{pid}/status") if x.startswith("SigCgt")][0]
        handlers.append(bool(int(caught.split()[1], 16) & 1 << (signal.SIGALRM - 1)))
    generations = np.array([
        pipe.submit(tp.Request(f"r{i}", prompt_token_ids=[1], max_tokens=steps)).generation
        for i in range(4)])
    def save():
        for step in range(steps):
            if step == steps // 2: os.kill(pipe.pids["reader"], signal.SIGKILL)
            writer.save_output(np.arange(4) * steps + step, generations=generations)
    engine = threading.Thread(target=save)
    engine.start()  # blocks on a full ring in its thread; the client waits in the main one
    got, ends = {row: [] for row in range(4)}, []
    for batch in pipe.batches():
        for output in batch:
            got[output.outputs.token_ids[0] // steps] += output.outputs.token_ids
            ends += [output.finish_reason] * output.finished
        if len(ends) == 4: break
    engine.join()
    right = all(got[row] == list(range(row * steps, (row + 1) * steps)) for row in got)
    print(json.dumps([handlers, right, ends, sitecustomize.count > 100]))
"""


def storm(name: str, steps: int, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(STORM)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(steps)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [[True] * 4, True, ["length"] * 4, True]
    assert "Traceback" not in ended.stderr
    assert files_of(name) == []


def test_interrupted_system_calls_lose_nothing(unique_name: str, tmp_path: Path) -> None:
    """B01: EINTR in client, engine, reader, decoders and coordinator, through a replacement."""
    storm(unique_name, 300, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_interrupted_publishes_lose_nothing(unique_name: str, tmp_path: Path) -> None:
    """B01."""
    storm(unique_name, 10_000, tmp_path)
