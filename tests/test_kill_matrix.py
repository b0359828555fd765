"""SIGKILL, SIGSTOP and SIGTERM at every named point of the protocol (cuda_ops/fault.hpp): nothing
is lost, nothing comes twice, rows and blocks come back, and nobody else is restarted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import fastdeploy_peer as peer
import numpy as np
import pytest

import tokenpipe as tp
from support import wait_until
from tokenpipe.commands import FinishReason
from tokenpipe.sources.sysv import queue_key

ROWS, DEPTH, WIDTH = 6, 3, 3
MODES = ("plain", "topk", "speculative")
READER = ("claimed", "filled", "before_publish", "published", "released")
DECODER = (
    *("polled", "loaded", "progress_written", "frame_written", "commit_written"),
    *("turn_stored", "released"),
)
COORDINATOR = (
    *("submit.choice_logged", "submit.blocks_owned", "submit.fields_stored", "submit.published"),
    *("submit.control_stored", "reply.fields_stored", "mark.from_stored", "mark.published"),
    *("preempt.phase_stored", "release.blocks_freed", "release.mark_cleared", "release.row_freed"),
)
SHM_POINTS = [
    *[("reader", f"reader.{p}") for p in READER],
    *[("decoder-1", f"decoder.{p}") for p in DECODER],
    *[("coordinator", p) for p in COORDINATOR],
    *[(role, "sleep") for role in ("reader", "decoder-1", "coordinator")],
]
QUEUE_READER = (
    *("claimed", "word_cleared", "claim_stored", "received", "filled", "before_publish"),
    *("published", "barrier_cursor_stored", "barrier_met"),
)
SYSV_POINTS = [
    *[("reader", f"reader.{p}") for p in QUEUE_READER],
    *[("decoder-1", f"decoder.{p}") for p in DECODER],
    *[("coordinator", p) for p in ("barrier.number_stored", *COORDINATOR)],
    *[(role, "sleep") for role in ("reader", "decoder-1", "coordinator")],
]
POINTS = [
    *[("shm", *where) for where in SHM_POINTS],
    *[("sysv", *where) for where in SYSV_POINTS],
]
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
CASES = [
    (source, role, point, mode, signum)
    for (source, role, point), mode, signum in product(POINTS, MODES, SIGNALS)
    # SIGTERM is the coordinator's word to drain: test_a_drain_in_the_middle has it.
    if not (role == "coordinator" and signum == signal.SIGTERM)
]


def sample() -> list[Any]:
    """Every second point once by SIGKILL, those of a queue that another source has too left out,
    and a few of the rest; the whole matrix is in the full tier."""
    rnd = random.Random(20261201)
    once = [p for p in POINTS if p[0] == "shm" or p[1:] not in SHM_POINTS or p[1] == "reader"]
    chosen = [(*p, MODES[i % 3], signal.SIGKILL) for i, p in enumerate(once[::2])]
    chosen += rnd.sample([c for c in CASES if c[4] != signal.SIGKILL], 4)
    return [
        pytest.param(
            *case,
            marks=() if case in chosen else pytest.mark.full,
            id="-".join([*case[:4], signal.Signals(case[4]).name]),
        )
        for case in CASES
    ]


def token_of(name: str, position: int) -> int:
    """What the engine samples for a request: a function of it alone, so a run can be compared."""
    return 100 + (hash_of(name) * 7_919 + position * 31) % (1 << 30)


def hash_of(name: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(name))


@dataclass
class Run:
    """An engine, its scheduler and the client, over one pipeline."""

    pipe: tp.Pipeline
    mode: str
    writer: tp.EngineWriter
    running: dict[int, tuple[str, int]] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    got: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    length: dict[str, int] = field(default_factory=dict)

    end = "length"
    """How a request ends that nobody ends before."""

    def expected(self, name: str) -> list[int]:
        """All tokens of a request that runs to its end."""
        return [token_of(name, p) for p in range(self.length[name])]

    def request(self, name: str) -> tp.Request:
        return tp.Request(name, prompt_token_ids=[1], max_tokens=self.length[name], num_blocks=2)

    def submit(self, name: str, length: int) -> None:
        self.length[name] = length
        admission = self.pipe.submit(self.request(name), timeout_s=60)
        assert len(set(admission.block_ids)) == 2
        self.running[admission.row] = (name, admission.generation)
        self.position[name] = 0

    def step(self, acknowledged: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        generations = np.zeros(ROWS, np.int32)
        states = np.ones(ROWS, np.uint8)
        positions = np.full(ROWS, -1, np.int32)
        depth = DEPTH if self.mode == "speculative" else 1
        tokens = np.zeros((ROWS, depth), np.int64)
        accept = np.zeros(ROWS, np.int32)
        for row, (name, generation) in self.running.items():
            generations[row] = generation
            if row in acknowledged:
                states[row] = 3
            elif name not in self.preempted:
                states[row] = 0
                at = positions[row] = self.position[name]
                accept[row] = 1 + hash_of(name) % depth
                tokens[row] = [token_of(name, at + j) for j in range(depth)]
                self.position[name] += int(accept[row])
        self.save(generations, tokens, accept, states, positions)

    def save(self, generations: Any, tokens: Any, accept: Any, states: Any, positions: Any) -> None:
        where = {
            "step": self.writer.begin_step(generations),
            "states": states,
            "positions": positions,
        }
        if self.mode == "plain":
            self.writer.save_output(tokens[:, 0], **where)
        elif self.mode == "topk":
            ids = tokens + np.arange(WIDTH)
            self.writer.save_output_topk(
                tokens[:, 0], ids, -ids.astype(np.float32), tokens[:, 0] % 7, **where
            )
        else:
            self.writer.speculate_save_output(tokens, accept, **where)

    def obey(self) -> None:
        let_go: set[int] = set()
        for event in self.writer.poll_control():
            name, generation = self.running.get(event.row, ("", 0))
            if generation != event.generation:
                continue
            if event.kind == "finished":
                del self.running[event.row]
            elif event.kind == "preempt":
                self.preempted.add(name)
                let_go.add(event.row)
            else:
                let_go.add(event.row)
        if let_go:
            self.step(let_go)
            for row in let_go:
                if self.running.get(row, ("",))[0] not in self.preempted:
                    self.running.pop(row, None)

    def read(self, timeout_s: float = 0.0) -> None:
        for batch in self.pipe.batches(timeout_s=timeout_s):
            if batch.width and batch.num_tokens:
                expected = batch.token_ids[:, None] + np.arange(WIDTH)
                assert (batch.topk_ids == expected).all()
                assert (batch.topk_logprobs == -expected.astype(np.float32)).all()
            for output in batch:
                name, at = output.request_id, output.outputs.send_idx
                own = self.got.setdefault(name, [])
                assert at == len(own) or not output.outputs.token_ids, (name, at, len(own))
                assert name not in self.ends, f"{name}: something after its final"
                own += output.outputs.token_ids
                if output.finished:
                    self.ends[name] = str(output.finish_reason)


def workload(run: Run) -> None:
    """Requests of different length, more than there are rows; one is aborted, one preempted."""
    lengths = {f"request-{i}": 3 + 5 * (i % 4) for i in range(3 * ROWS)}
    waiting = list(lengths)
    for name in waiting[:ROWS]:
        run.submit(name, lengths[name])
    waiting = waiting[ROWS:]
    for turn in range(10_000):
        run.step()
        run.read()
        run.obey()
        if turn == 2:
            run.pipe.preempt("request-3")
        if turn == 4:
            run.pipe.abort("request-2")
        if "request-3" in run.preempted and turn > 6:
            run.pipe.resume("request-3", timeout_s=60)
            run.preempted.discard("request-3")
        while waiting and len(run.running) < ROWS:
            run.submit(waiting[0], lengths[waiting.pop(0)])
        if not waiting and len(run.ends) == len(lengths):
            break
    for name, length in lengths.items():
        own = run.got.get(name, [])
        assert own == run.expected(name)[: len(own)], name
        if name == "request-2" and run.ends[name] == "abort":
            continue
        assert (len(own), run.ends[name]) == (length, run.end), name


EOS = 2
OPS = {
    "plain": "get_output",
    "topk": "get_output_topk",
    "speculative": "speculate_get_output",
}


@dataclass
class QueueRun(Run):
    """The same over FastDeploy's queue: no generations, no positions, and only an end token, -3 or
    -9 ends a row."""

    end = "stop"

    def __post_init__(self) -> None:
        self.worker = peer.Worker(queue_key(self.pipe.config))

    def request(self, name: str) -> tp.Request:
        return tp.Request(name, prompt_token_ids=[1], eos_token_ids=[EOS], num_blocks=2)

    def expected(self, name: str) -> list[int]:
        return [*super().expected(name)[:-1], EOS]

    def save(self, generations: Any, tokens: Any, accept: Any, states: Any, positions: Any) -> None:
        """What the worker would send; it stops a row by itself behind the end token."""
        accept = np.where(states == 0, np.maximum(accept, 1), 0)
        for row, (name, _generation) in self.running.items():
            if states[row] == 0:
                left = self.length[name] - int(positions[row])
                accept[row] = max(0, min(int(accept[row]), left))
                if 0 < left <= accept[row]:
                    tokens[row, left - 1] = EOS
        values = np.where(states == 3, -9, np.where(accept == 0, -1, tokens[:, 0]))
        if self.mode == "plain":
            message = peer.plain(values.tolist())
        elif self.mode == "topk":
            ids = values[:, None] + np.arange(WIDTH)
            message = peer.topk(ids, -ids.astype(np.float32), list(values % 7))
        else:
            message = peer.speculate(tokens, np.where(states == 3, -9, accept).tolist())
        self.worker.send(message)


def lives(pipe: tp.Pipeline) -> dict[str, int]:
    return {name: role["epoch"] for name, role in pipe.status()["roles"].items()}


@pytest.mark.parametrize(("source", "role", "point", "mode", "signum"), sample())
def test_nothing_is_lost_whoever_ends_where(
    unique_name: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    source: str,
    role: str,
    point: str,
    mode: str,
    signum: signal.Signals,
) -> None:
    nth = 2 if role == "coordinator" else 5
    if point in ("preempt.phase_stored", "mark.from_stored", "mark.published"):
        nth = 1
    more: dict[str, Any] = {}
    if source == "sysv":
        if mode == "topk":
            request.getfixturevalue("queue_limits")
        more = {"source": "sysv", "sysv_queue_id": peer.free_queue_id(), "sysv_op": OPS[mode]}
        more["sysv_folder"] = "/dev/shm"
    monkeypatch.setenv("TOKENPIPE_FAULT", f"{role}:{point}:{nth}:{int(signum)}")
    config = tp.PipelineConfig(
        name=unique_name,
        max_num_seqs=ROWS,
        max_draft_tokens=DEPTH,
        top_logprobs=WIDTH - 1,
        num_decoders=2,
        ring_slots=4,
        output_slots=8,
        source_slots=4,
        num_blocks=2 * ROWS,
        stall_timeout_s=0.5,
        heartbeat_interval_s=0.05,
        abort_timeout_s=600,
        orphan_grace_s=30,
        **more,
    )
    with tp.Pipeline(config) as pipe:
        before = pipe.pids
        if role == "coordinator" and signum == signal.SIGSTOP:
            pytest.skip("a stopped coordinator is not replaced: its owner sees the probe time out")
        with pipe.engine_writer() as writer:
            workload((QueueRun if source == "sysv" else Run)(pipe, mode, writer))
            wait_until(lambda: lives(pipe)[role] >= 2, describe=pipe.status)
            pipe.sync(60)
            wait_until(lambda: pipe.health()["state"] == "idle", describe=pipe.health)
            status = pipe.status()
            assert status["rows"]["live"] == 0
            assert status["blocks"]["free"] == 2 * ROWS
            counters = status["counters"]
            dropped = sum(v for k, v in counters.items() if k.startswith("dropped_"))
            assert counters["tokens_seen"] == counters["tokens_delivered"] + dropped
            assert counters["tokens_seen"] == status["source"]["tokens_saved"]
            assert {n: p for n, p in pipe.pids.items() if n != role} == {
                n: p for n, p in before.items() if n != role
            }


CHILD = """
import json, sys
import tokenpipe as tp
from tokenpipe import _native
name, record, point, nth = sys.argv[1:5]
with open(record, "a") as log, tp.Pipeline.attach(name) as pipe:
    if nth != "0":
        _native.arm_fault(point, int(nth), 9)
    for batch in pipe.batches(timeout_s=0.5):
        rows = []
        for o in batch:
            rows.append((o.request_id, o.outputs.send_idx, o.outputs.token_ids))
        log.write(json.dumps([batch.decoder, batch.number, rows]) + "\\n")
        log.flush()
"""


def read_record(path: Path) -> Iterator[tuple[tuple[int, int], Any]]:
    for line in path.read_text().splitlines():
        decoder, number, rows = json.loads(line)
        yield (decoder, number), rows


@pytest.mark.parametrize(
    "point",
    [
        "client.released",
        pytest.param("client.before_release", marks=pytest.mark.full),
        pytest.param("sleep", marks=pytest.mark.full),
    ],
)
def test_a_killed_client_is_followed_by_one_that_gets_the_batch_in_hand_again(
    unique_name: str, tmp_path: Path, point: str
) -> None:
    config = tp.PipelineConfig(
        name=unique_name, max_num_seqs=ROWS, num_decoders=2, output_slots=64, num_blocks=2 * ROWS
    )
    record = tmp_path / "record"
    with tp.Pipeline(config) as owner:
        writer = owner.engine_writer()
        run = Run(owner, "plain", writer)
        for i in range(ROWS):
            run.submit(f"r{i}", 20)
        owner._segment.close()  # this process is the engine; the client is another one
        for _ in range(20):
            run.step()
        command = [sys.executable, "-c", CHILD, unique_name, str(record), point]
        nth = "7" if point != "sleep" else "1"
        killed = subprocess.run([*command, nth])
        assert killed.returncode == -signal.SIGKILL
        first = list(read_record(record))
        record.unlink()
        assert subprocess.run([*command, "0"]).returncode == 0
        second = list(read_record(record))
        by_frame = dict(first)
        for frame, rows in second:
            # The frame in hand comes again, as it was.
            assert by_frame.get(frame, rows) == rows
            by_frame[frame] = rows
        overlap = {f for f, _ in first} & {f for f, _ in second}
        assert len(overlap) == (1 if point == "client.before_release" else 0)
        tokens: dict[str, list[int]] = {}
        for (_decoder, _number), rows in sorted(by_frame.items(), key=lambda item: item[0][1]):
            for name, at, ids in rows:
                own = tokens.setdefault(name, [])
                assert at == len(own)
                own += ids
        assert tokens == {f"r{i}": [token_of(f"r{i}", p) for p in range(20)] for i in range(ROWS)}
        writer.close()


ENGINE = """
import sys
import numpy as np
import tokenpipe as tp
from tokenpipe import _native
sys.path.insert(0, sys.argv[5])
from test_kill_matrix import token_of
name, point, nth, rows = sys.argv[1:5]
names = rows.split(",")
with tp.EngineWriter.attach(name) as writer:
    _native.arm_fault(point, int(nth), 9)
    for position in range(100):
        tokens = np.array([token_of(n, position) for n in names])
        writer.save_output(tokens, step=writer.begin_step(np.ones(len(names), np.int32)))
"""


ENGINE_COMMAND = [sys.executable, "-c", ENGINE]


@pytest.mark.parametrize(
    "point", [pytest.param("writer.filled", marks=pytest.mark.full), "writer.published"]
)
def test_a_killed_engine_leaves_a_prefix_and_one_error_final_each(
    unique_name: str, point: str
) -> None:
    config = tp.PipelineConfig(
        name=unique_name, max_num_seqs=ROWS, num_decoders=2, abort_timeout_s=600
    )
    with tp.Pipeline(config) as pipe:
        names = [f"r{i}" for i in range(ROWS)]
        for name in names:
            pipe.submit(tp.Request(name, prompt_token_ids=[1]))
        here = str(Path(__file__).parent)
        engine = [*ENGINE_COMMAND, unique_name, point, "9", ",".join(names), here]
        assert subprocess.run(engine).returncode == -signal.SIGKILL
        saved = 9 if point == "writer.published" else 8
        got: dict[str, list[int]] = {name: [] for name in names}
        ends: dict[str, str | None] = {}
        for batch in pipe.batches(timeout_s=60):
            for output in batch:
                got[output.request_id] += output.outputs.token_ids
                if output.finished:
                    assert output.request_id not in ends
                    ends[output.request_id] = output.finish_reason
            if len(ends) == ROWS:
                break
        assert got == {n: [token_of(n, p) for p in range(saved)] for n in names}
        assert ends == dict.fromkeys(names, FinishReason.ERROR.name.lower())
        wait_until(lambda: pipe.status()["rows"]["live"] == 0, describe=pipe.status)
        with pipe.engine_writer() as successor:  # the next engine may attach
            assert successor.num_steps == saved


def test_an_engine_that_comes_at_once_takes_over_no_request_of_the_dead_one(
    unique_name: str,
) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=ROWS, abort_timeout_s=600)
    with tp.Pipeline(config) as pipe:
        names = [f"r{i}" for i in range(ROWS)]
        for name in names:
            pipe.submit(tp.Request(name, prompt_token_ids=[1]))
        here = str(Path(__file__).parent)
        command = [*ENGINE_COMMAND, unique_name, "writer.filled", "3", ",".join(names), here]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        with pipe.engine_writer() as writer:
            admission = pipe.submit(tp.Request("new", prompt_token_ids=[1], max_tokens=1))
            stamp = np.zeros(ROWS, np.int32)
            stamp[admission.row] = admission.generation
            writer.save_output(np.arange(ROWS), generations=stamp)
            ends: dict[str, str | None] = {}
            for batch in pipe.batches(timeout_s=60):
                ends.update({o.request_id: o.finish_reason for o in batch if o.finished})
                if len(ends) == ROWS + 1:
                    break
        assert ends == {**dict.fromkeys(names, "error"), "new": "length"}


def test_a_slot_that_kills_its_decoder_twice_is_skipped(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = ":decoder.loaded:1:9"
    monkeypatch.setenv("TOKENPIPE_FAULT", f"decoder-0/1{kill},decoder-0/2{kill}")
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=4, num_decoders=2)
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
        for i in range(4):
            pipe.submit(tp.Request(f"r{i}", prompt_token_ids=[1]))
        for position in range(3):
            writer.save_output(np.arange(4) + 10 * position, generations=np.ones(4, np.int32))
        ends: dict[str, str | None] = {}
        tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}

        def read() -> bool:
            for batch in pipe.batches(timeout_s=0):
                for output in batch:
                    tokens[output.request_id] += output.outputs.token_ids
                    if output.finished:
                        ends[output.request_id] = output.finish_reason
            return len(ends) == 2 and len(tokens["r1"]) == 3

        wait_until(read, describe=pipe.status)
        # The rows of decoder-0 end with an error; the others never hear of it.
        assert ends == {"r0": "error", "r2": "error"}
        assert tokens["r1"] == [1, 11, 21]
        assert pipe.status()["counters"]["poison_slots"] == 1
        assert lives(pipe)["decoder-0"] == 3


def test_a_role_that_dies_again_while_it_starts_is_tried_again(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TOKENPIPE_FAULT", "decoder-1/1:decoder.frame_written:5:9,decoder-1/2:boot:1:9"
    )
    config = tp.PipelineConfig(
        name=unique_name, max_num_seqs=ROWS, num_decoders=2, num_blocks=2 * ROWS, top_logprobs=2
    )
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
        workload(Run(pipe, "plain", writer))
        assert lives(pipe)["decoder-1"] == 3


def test_a_coordinator_s_successor_that_dies_while_it_starts_is_tried_again(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TOKENPIPE_FAULT",
        "coordinator/1:reply.fields_stored:2:9,coordinator/2:boot:1:9,coordinator/3:boot:1:9",
    )
    config = tp.PipelineConfig(
        name=unique_name, max_num_seqs=ROWS, num_decoders=2, num_blocks=2 * ROWS, top_logprobs=2
    )
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
        workload(Run(pipe, "plain", writer))
        wait_until(lambda: pipe.health()["state"] in ("idle", "running"))


def test_a_serve_that_is_killed_with_its_roles_is_taken_over(unique_name: str) -> None:
    """Client and engine wait `orphan_grace_s` for who starts it again with the same flags."""
    serve = [sys.executable, "-m", "tokenpipe", "serve", f"--name={unique_name}"]
    serve += ["--max-num-seqs=2", "--orphan-grace-s=60"]

    def start() -> tuple[subprocess.Popen[str], dict[str, Any]]:
        process = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    first, ready = start()
    with tp.Pipeline.attach(unique_name) as pipe, tp.EngineWriter.attach(unique_name) as writer:
        admission = pipe.submit(tp.Request("a", prompt_token_ids=[1], max_tokens=3))
        generations = np.zeros(2, np.int32)
        generations[admission.row] = admission.generation
        writer.save_output(np.full(2, 10), generations=generations)
        pipe.sync(60)
        first.kill()
        for pid in ready["pids"].values():
            os.kill(pid, signal.SIGKILL)
        first.communicate()
        wait_until(lambda: pipe.health()["state"] == "failed", describe=pipe.health)
        second, _ready = start()
        for token in (11, 12):
            writer.save_output(np.full(2, token), generations=generations)
        pipe.sync(60)
        outputs = [o for batch in pipe.batches(timeout_s=0) for o in batch]
        assert [t for o in outputs for t in o.outputs.token_ids] == [10, 11, 12]
        assert [o.finish_reason for o in outputs if o.finished] == ["length"]
    second.terminate()
    assert second.wait(60) == 0
    assert second.stdout is not None
    second.stdout.close()


def test_a_spent_budget_ends_the_pipeline_with_the_reason(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = ":decoder.loaded:1:9"
    spec = ",".join(f"decoder-0/{life}{kill}" for life in range(1, 4))
    monkeypatch.setenv("TOKENPIPE_FAULT", spec)
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=2, num_decoders=1, max_restarts=1)
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as writer:
        pipe.submit(tp.Request("a", prompt_token_ids=[1]))
        writer.save_output(np.array([7, 8]), generations=np.array([1, 0]))
        outputs = [o for batch in pipe.batches(timeout_s=60) for o in batch]
        assert [o.finish_reason for o in outputs] == ["error"]
        with pytest.raises(tp.PipelineGoneError, match=r"killed by SIGKILL; 1 restarts within"):
            pipe.submit(tp.Request("b", prompt_token_ids=[1]))


def test_a_pipeline_of_another_configuration_is_not_taken_over(unique_name: str) -> None:
    serve = [sys.executable, "-m", "tokenpipe", "serve", f"--name={unique_name}"]
    first = subprocess.Popen([*serve, "--max-num-seqs=8"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    ready = json.loads(first.stdout.readline())
    first.kill()
    first.communicate()
    refused = subprocess.run([*serve, "--max-num-seqs=9"], capture_output=True, text=True)
    assert refused.returncode == tp.ExitCode.NAME_TAKEN
    assert "another max_num_seqs" in refused.stderr
    second = subprocess.Popen([*serve, "--max-num-seqs=8"], stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None
    again = json.loads(second.stdout.readline())
    assert again["pids"] == ready["pids"]
    assert again["health_url"] == ready["health_url"]
    second.terminate()
    assert second.wait(60) == 0
    second.stdout.close()
    for pid in ready["pids"].values():
        wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
