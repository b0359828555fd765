"""A /dev/shm of 64 MB, as a container has it, and a neighbour that fills the rest of it.

Each test runs its pipeline in a mount namespace with a /dev/shm of its own (field report B13).
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from test_segment import can_unshare, own_dev_shm

import tokenpipe as tp

pytestmark = pytest.mark.skipif(not can_unshare(), reason="no mount namespaces here")

SHM_BYTES = 64 << 20

PROLOGUE = """
import json, os, signal, subprocess, sys, time
import numpy as np
import tokenpipe as tp
serve = [sys.executable, "-m", "tokenpipe", "serve"]
def free():
    about = os.statvfs("/dev/shm")
    return about.f_bavail * about.f_frsize
def fill(leave=0):
    with open("/dev/shm/neighbour", "wb", buffering=0) as f:
        os.posix_fallocate(f.fileno(), 0, free() - leave)
def say(value):
    print(json.dumps(value), flush=True)
"""


def inside(script: str) -> Any:
    """Runs a program with 64 MB of shared memory; returns what it says."""
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(script)]
    ended = subprocess.run([*own_dev_shm(SHM_BYTES), *command], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_the_defaults_fit_and_run_on_when_a_neighbour_fills_the_rest() -> None:
    """Pages are reserved: full load, a replaced reader, decoder and coordinator, and no SIGBUS."""
    told = inside(
        """
        rows, width, steps = 256, 21, 80
        config = tp.PipelineConfig(num_decoders=2)
        with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
            fill()
            left = free()
            generations = np.array([
                pipe.submit(tp.Request(f"r{i}", prompt_token_ids=[1], max_tokens=steps)).generation
                for i in range(rows)])
            tokens = np.zeros(rows, np.int64)
            ids = np.arange(rows * width).reshape(rows, width)
            counted = 0
            batches = pipe.batches(timeout_s=60)
            for step in range(steps):
                writer.save_output_topk(
                    tokens, ids, ids.astype(np.float32), tokens, generations=generations)
                if step in (20, 40, 60):
                    role = {20: "reader", 40: "decoder-1", 60: "coordinator"}[step]
                    os.kill(pipe.pids[role], signal.SIGKILL)
                while counted < (step + 1) * rows:
                    batch = next(batches)
                    assert (batch.topk_ids == ids[batch.row]).all()
                    counted += len(batch.token_ids)
            # What needs shared memory anew is told; what runs does not notice.
            second = subprocess.run(serve, capture_output=True, text=True)
            # A coordinator that has just come is told of as degraded for a moment.
            while (state := pipe.health()["state"]) == "degraded":
                time.sleep(0.01)
        say([left, counted, state, second.returncode, second.stderr.splitlines()[-1],
             os.listdir("/dev/shm")])
        """
    )
    left, counted, state, code, text, files = told
    plan = tp.PipelineConfig(num_decoders=1).plan()
    assert left == 0
    assert (counted, state) == (256 * 80, "idle")
    assert code == tp.ExitCode.NO_SPACE
    assert " bytes are needed in /dev/shm, 0 are free; lower --ring-slots" in text
    assert plan["core_bytes"] < SHM_BYTES
    assert files == ["neighbour"]


def test_what_does_not_fit_beside_a_neighbour_is_refused_with_the_numbers_until_it_does() -> None:
    """Needed, free, and the flag to change; with that flag, it starts."""
    told = inside(
        """
        fill(leave=8 << 20)
        left = free()
        flags = ["--ring-bytes=33554432", "--num-decoders=1"]
        refused = subprocess.run([*serve, *flags], capture_output=True, text=True)
        try:
            tp.Pipeline(tp.PipelineConfig(ring_bytes=32 << 20, num_decoders=1))
        except tp.SegmentSpaceError as e:
            facts = [e.needed_bytes, e.free_bytes]
        after = free()
        small = {"ring_slots": 2, "output_slots": 2, "max_num_seqs": 16, "num_decoders": 1}
        with tp.Pipeline(tp.PipelineConfig(**small)) as pipe:
            state = pipe.health()["state"]
        say([left, refused.returncode, refused.stderr.splitlines()[-1], facts, after, state,
             os.listdir("/dev/shm")])
        """
    )
    left, code, text, (needed, free), after, state, files = told
    assert code == tp.ExitCode.NO_SPACE
    assert needed == tp.PipelineConfig(ring_bytes=32 << 20, num_decoders=1).plan()["core_bytes"]
    assert free == left == after
    assert f"{needed} bytes are needed in /dev/shm, {left} are free" in text
    for flag in ("--ring-slots", "--output-slots", "--max-num-seqs", "--shm-size"):
        assert flag in text
    assert (state, files) == ("idle", ["neighbour"])
