"""The C face of the shared-memory transport: an engine in plain C saves into a real pipeline, and
its client compares the values. The example of the README runs here too."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastdeploy_peer import Worker, custom_ftok, free_queue_id

import tokenpipe as tp
from support import SHM, wait_until
from tokenpipe import _native
from tokenpipe.segment import Segment, source_name

ROOT = Path(__file__).parents[1]
ROWS, DEPTH, WIDTH, FLOATS, SLOTS = 4, 3, 3, 5, 2
MOST_PROMPT_TOKENS = ROWS * DEPTH
FOR_EVER = -1
KINDS = (1, 4)  # TOKENPIPE_ABORT, TOKENPIPE_FINISHED
numbers = itertools.count()
COMPILE = ("gcc", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror")

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


def build(source: Path, program: Path) -> Path:
    """Compiles a C program over the library."""
    (library,) = (ROOT / "tokenpipe").glob("_ops.*.so")
    flags = ("-pthread", f"-I{ROOT / 'cuda_ops'}")
    subprocess.run([*COMPILE, *flags, str(source), str(library), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ops_c")
    return build(ROOT / "tests" / "native" / "shm_writer.c", folder / "shm_writer")


@pytest.fixture(scope="module")
def pipe() -> Iterator[tp.Pipeline]:
    config = tp.PipelineConfig(
        max_num_seqs=ROWS,
        top_logprobs=WIDTH - 1,
        max_draft_tokens=DEPTH,
        max_pooling_floats=FLOATS,
        num_decoders=1,
        source_slots=SLOTS,
    )
    with tp.Pipeline(config) as pipe:
        yield pipe


class Engine:
    """A process of shm_writer.c."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, line: str) -> tuple[int, str, str]:
        """Returns the answer: code, argument, text."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        code, argument, text = self.process.stdout.readline().rstrip("\n").split("|", 2)
        return int(code), argument, text

    def save(self, op: str, generations: Any, depth: int = 1, width: int = 0) -> Any:
        """Saves a step, waiting for room as long as the pipeline lives."""
        stamp = " ".join(map(str, generations))
        return self.do(f"{op} {FOR_EVER} {depth} {width} {stamp}")

    def end(self) -> None:
        """Closes the writer by the end of the input."""
        if self.process.poll() is None:
            self.process.communicate()

    def die(self) -> None:
        """With the requests that it runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def idle(program: Path) -> Iterator[Engine]:
    """An engine that has not attached."""
    engine = Engine(program)
    try:
        yield engine
    finally:
        engine.end()


@pytest.fixture
def engine(idle: Engine, pipe: tp.Pipeline) -> Iterator[Engine]:
    """One that is attached; what it runs in the end dies with it."""
    assert idle.do(f"attach {pipe.name} 20") == (0, "", "")
    try:
        yield idle
    finally:
        if pipe.status()["rows"]["live"]:
            idle.die()
        idle.end()
        wait_until(lambda: pipe.status()["rows"]["live"] == 0)
        list(pipe.batches(timeout_s=0.0))


def submit(pipe: tp.Pipeline, max_tokens: list[int]) -> list[int]:
    """Submits a request for each row; returns their generations."""
    stamps = []
    for row, count in enumerate(max_tokens):
        request_id = f"{next(numbers)}"
        request = tp.Request(
            request_id, prompt_token_ids=[1, 2, 3], eos_token_ids=[2], max_tokens=count
        )
        stamps.append(pipe.submit(request, row=row, timeout_s=20).generation)
    return stamps


def outputs(pipe: tp.Pipeline, count: int) -> dict[int, Any]:
    """Returns the next `count` outputs by row."""
    got = dict(itertools.islice(each_output(pipe), count))
    assert len(got) == count
    return got


def each_output(pipe: tp.Pipeline) -> Iterator[tuple[int, Any]]:
    for batch in pipe.batches(timeout_s=20):
        if batch.kind != "prompt":  # its logprobs come with another output
            yield from zip(batch.row.tolist(), batch, strict=True)


# --- the values of shm_writer.c


def token(row: int, j: int = 0) -> int:
    return 1000 + 100 * row + 10 * j


def candidates(row: int, j: int, depth: int) -> tuple[list[int], list[float], int]:
    k = row * depth + j
    ids = [token(row, j) + t for t in range(WIDTH)]
    return ids, [-(k * WIDTH + t) / 4 for t in range(WIDTH)], k + 1


def lists(found: Any) -> Any:
    return tuple(np.asarray(part).tolist() for part in found)


# --- saves


def test_the_pipelines_limits(engine: Engine) -> None:
    expected = f"{ROWS} {DEPTH} {WIDTH} {FLOATS} {MOST_PROMPT_TOKENS}"
    assert engine.do("limits") == (0, "", expected)


def test_a_token_a_row(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [1] * ROWS)
    assert engine.save("plain", stamps) == (0, "", "")
    got = outputs(pipe, ROWS)
    assert {i: o.outputs.token_ids for i, o in got.items()} == {
        row: [token(row)] for row in range(ROWS)
    }
    assert all(o.finished and o.error_code == 200 for o in got.values())


def test_batch_rows_of_any_order_and_padded_ones(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [1] * ROWS)
    backwards = stamps[::-1]
    assert engine.save("backwards", [0, *backwards[1:]])[0] == 0  # row 3 is padded
    got = outputs(pipe, ROWS - 1)
    assert {i: o.outputs.token_ids for i, o in got.items()} == {
        row: [token(ROWS - 1 - row)] for row in range(ROWS - 1)
    }
    assert engine.save("plain", [0, 0, 0, stamps[3]])[0] == 0
    assert outputs(pipe, 1)[3].outputs.token_ids == [token(3)]


def test_a_token_a_row_with_candidates(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [1] * ROWS)
    assert engine.save("topk", stamps, 1, WIDTH) == (0, "", "")
    got = outputs(pipe, ROWS)
    for row in range(ROWS):
        ids, scores, rank = candidates(row, 0, 1)
        found = got[row].outputs
        assert found.token_ids == [token(row)]
        assert lists(found.top_logprobs) == ([ids], [scores], [rank])


def test_accepted_tokens(engine: Engine, pipe: tp.Pipeline) -> None:
    counts = [1 + row % DEPTH for row in range(ROWS)]
    stamps = submit(pipe, counts)
    assert engine.save("speculate", stamps, DEPTH) == (0, "", "")
    got = outputs(pipe, ROWS)
    for row, count in enumerate(counts):
        assert got[row].outputs.token_ids == [token(row, j) for j in range(count)]


def test_accepted_tokens_with_candidates(engine: Engine, pipe: tp.Pipeline) -> None:
    counts = [1 + row % DEPTH for row in range(ROWS)]
    stamps = submit(pipe, counts)
    before = pipe.status()["source"]["tokens_saved"]
    assert engine.save("drafts", stamps, DEPTH, WIDTH) == (0, "", "")
    assert pipe.status()["source"]["tokens_saved"] == before, "drafts are no tokens"
    assert engine.save("speculate_topk", stamps, DEPTH, WIDTH) == (0, "", "")
    assert pipe.status()["source"]["tokens_saved"] == before + sum(counts)
    got = outputs(pipe, ROWS)
    for row, count in enumerate(counts):
        columns = [candidates(row, j, DEPTH) for j in range(count)]
        found = got[row].outputs
        assert found.token_ids == [token(row, j) for j in range(count)]
        assert lists(found.top_logprobs) == tuple([c[part] for c in columns] for part in range(3))


def test_first_tokens(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [2] * ROWS)  # rows 0 and 3 are at their first step
    assert engine.save("first", stamps, DEPTH) == (0, "", "")
    got = outputs(pipe, 2)
    assert {i: o.outputs.token_ids for i, o in got.items()} == {
        row: [token(row), token(row, 1)] for row in (0, 3)
    }


def test_first_tokens_with_candidates(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [1, 2, 3, 1])  # row i has i % DEPTH tokens in front of its last draft
    assert engine.save("first_topk", stamps, DEPTH, WIDTH) == (0, "", "")
    got = outputs(pipe, 2)
    none = [-1] * (WIDTH - 1)
    for row, count in ((1, 2), (2, 3)):
        _, scores, rank = candidates(row, 0, 1)
        ids = [token(0, row) + t for t in range(WIDTH)]  # as the program has them, row after row
        found = got[row].outputs
        tokens = [token(row, j) for j in range(count)]
        assert found.token_ids == tokens
        drafts = [[tokens[j], *none] for j in range(1, count)]
        zeros = [[0.0] * WIDTH] * (count - 1)
        expected = ([ids, *drafts], [scores, *zeros], [rank] + [0] * (count - 1))
        assert lists(found.top_logprobs) == expected


def test_vectors(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [1] * 2)
    assert engine.save("pooling", stamps, 1, FLOATS) == (0, "", "")
    got = outputs(pipe, 2)
    for row in range(2):
        expected = [-(row * FLOATS + t) / 4 for t in range(FLOATS)]
        assert list(got[row].outputs.data) == expected


def test_prompt_logprobs_come_with_the_next_output(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [1])
    assert engine.save("prompt", stamps, 2, WIDTH) == (0, "", "")
    assert engine.save("plain", stamps) == (0, "", "")
    (got,) = outputs(pipe, 1).values()
    ids, scores, ranks = lists(got.prompt_logprobs)
    assert ids[-2:] == [[token(0, j) + t for t in range(WIDTH)] for j in range(2)]
    assert scores[-2:] == [[-(j * WIDTH + t) / 4 for t in range(WIDTH)] for j in range(2)]
    assert ranks[-2:] == [1, 2]


def test_what_is_decided_about_rows_is_heard_once(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [9] * 2)
    assert engine.save("plain", stamps)[0] == 0
    wait_until(lambda: engine.do("poll 8") == (0, "", ""))  # of those who had the rows before
    pipe.abort()
    aborted, ended = ([f"{row},{stamps[row]},{kind} " for row in range(2)] for kind in KINDS)
    assert sorted(hear(engine, 2)) == aborted
    assert engine.do("poll 8") == (0, "", "")
    assert engine.save("acknowledged", stamps)[0] == 0
    assert sorted(hear(engine, 2)) == ended
    assert [o.error_code for _, o in itertools.islice(each_output(pipe), 4)] == [200] * 4


def hear(engine: Engine, count: int) -> list[str]:
    """Returns the next events. Each call has room for one: the others wait for the next."""
    return [wait_until(lambda: engine.do("poll 1")[2]) for _ in range(count)]


# --- what is refused


@pytest.mark.parametrize(
    ("line", "argument", "said"),
    [
        ("plain 0 1 0 1 1 1 1 1", "tokens", f"5 rows, max_num_seqs is {ROWS}"),
        (f"topk 0 1 {WIDTH + 1} 1", "topk_ids", f"must be 1 to top_logprobs + 1 = {WIDTH}"),
        (f"speculate 0 {DEPTH + 1} 0 1", "tokens", f"max_draft_tokens is {DEPTH}"),
        (f"first_topk 0 {DEPTH} {WIDTH + 1} 1", "topk_ids", f"= {WIDTH}"),
        (f"pooling 0 1 {FLOATS + 1} 1", "vectors", f"max_pooling_floats is {FLOATS}"),
        ("prompt 0 13 1 1", "tokens", "13 prompt tokens, the most that one step holds is 12"),
        ("plain 0 1 0 -1", "generations", "is -1, must be 0"),
        ("unstamped 0 1 0 1", "generations", "must be int32 or int64 [1]"),
        ("uncounted 0 2 0 1", "accept_num", "is NULL"),
        ("twice 0 1 0 1 1", "rows", "holds 0 twice"),
        ("backwards 0 1 0 1 1 1 1 1", "tokens", "5 rows"),
        ("no_data 0 1 0 1", "tokens", "has 1 elements and no data"),
        ("negative 0 1 0 1", "tokens", "has -1 as shape[0]"),
        ("poll -1", "room", "is -1"),
    ],
)
def test_a_wrong_argument_is_named_and_saves_nothing(
    engine: Engine, pipe: tp.Pipeline, line: str, argument: str, said: str
) -> None:
    before = pipe.status()["source"]["published"]
    code, found, text = engine.do(line)
    assert (code, found) == (errno.EINVAL, argument)
    assert said in text
    assert pipe.status()["source"]["published"] == before


def test_a_pipeline_that_is_not_there(idle: Engine, unique_name: str) -> None:
    code, argument, text = idle.do(f"attach {unique_name} 0.01")
    assert (code, argument) == (errno.ENOENT, "")
    assert text == f'attach "{unique_name}": no live pipeline of that name within 0.01 s'
    assert idle.do("attach ../x 0")[:2] == (errno.EINVAL, "name")
    assert idle.do("plain 0 1 0 1")[:2] == (errno.EINVAL, "writer")
    assert idle.do("close")[0] == 0


@pytest.fixture
def fake_segment(unique_name: str) -> Iterator[Path]:
    path = SHM / source_name(unique_name)
    # Not our magic: no sweep touches it.
    path.write_bytes(struct.pack("<QQ", 0, _native.LAYOUT_VERSION + 1).ljust(8192, b"\0"))
    yield path
    path.unlink()


def test_a_pipeline_of_another_version(idle: Engine, unique_name: str, fake_segment: Path) -> None:
    code, _, text = idle.do(f"attach {unique_name} 0")
    assert code == errno.EPROTO
    now = _native.LAYOUT_VERSION
    assert f"found layout {now + 1}, this build has layout {now}" in text
    fake_segment.unlink()
    fake_segment.symlink_to("/dev/null")
    assert idle.do(f"attach {unique_name} 0")[0] == errno.EACCES


def test_a_pipeline_has_one_writer(engine: Engine, pipe: tp.Pipeline, program: Path) -> None:
    other = Engine(program)
    code, _, text = other.do(f"attach {pipe.name} 0")
    other.end()
    assert code == errno.EBUSY
    assert f"pid {engine.process.pid} is its engine writer" in text
    with pytest.raises(tp.PartyExistsError, match=str(engine.process.pid)):
        pipe.engine_writer()


def test_a_queues_pipeline_takes_no_steps(idle: Engine, unique_name: str) -> None:
    with Segment.create(tp.PipelineConfig(name=unique_name, source="sysv")):
        assert idle.do(f"attach {unique_name} 0")[0] == 0
        assert idle.do("poll 1") == (0, "", "")
        code, _, text = idle.do("plain 0 1 0 1")
    assert code == errno.ENOTSUP
    assert "FastDeploy's queue" in text


# --- waits


def test_a_full_ring_is_waited_for_and_loses_nothing(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [SLOTS + 2])
    reader = pipe.pids["reader"]
    os.kill(reader, signal.SIGSTOP)
    try:
        for _ in range(SLOTS):
            assert engine.do(f"plain 0 1 0 {stamps[0]}")[0] == 0
        for wait_s in ("0", "0.01"):
            code, _, text = engine.do(f"plain {wait_s} 1 0 {stamps[0]}")
            assert code == errno.ETIMEDOUT
            assert f"its {SLOTS} source slots stayed full" in text
        assert engine.do(f"later plain {FOR_EVER} 1 0 {stamps[0]}")[0] == 0
        busy = wait_until(lambda: [a for a in [engine.do("poll 1")] if a[0] == errno.EBUSY])
        assert "another thread is inside a call" in busy[0][2]
        assert engine.do("beat 1") == (0, "", ""), "any thread may"
    finally:
        os.kill(reader, signal.SIGCONT)
    assert engine.do("join")[0] == 0
    assert engine.save("plain", stamps)[0] == 0
    got: list[int] = []
    for batch in pipe.batches(timeout_s=20):
        got += batch.token_ids.tolist()
        if batch.num_finals:
            break
    assert got == [token(0)] * (SLOTS + 2)


def test_a_pipeline_that_ends(idle: Engine) -> None:
    with tp.Pipeline(tp.PipelineConfig(num_decoders=1)) as pipe:
        assert idle.do(f"attach {pipe.name} 20")[0] == 0
    code, _, text = idle.do("plain -1 1 0 1")
    assert code == errno.EPIPE
    assert text == f'pipeline "{pipe.name}" is gone: it has stopped'


def test_a_pipeline_whose_coordinator_died(idle: Engine, unique_name: str) -> None:
    with Segment.create(tp.PipelineConfig(name=unique_name, source_slots=SLOTS)):
        assert idle.do(f"attach {unique_name} 0")[0] == 0
    for _ in range(SLOTS):
        assert idle.do("plain 0 1 0 1")[0] == 0, "somebody may come and read it"
    code, _, text = idle.do("plain -1 1 0 1")
    assert code == errno.EPIPE
    assert text == f'pipeline "{unique_name}" is gone: its coordinator has died'
    assert idle.do("plain 0 1 0 1")[0] == errno.EPIPE, "also without a wait"


def test_a_writer_after_one_that_was_killed(
    engine: Engine, pipe: tp.Pipeline, program: Path
) -> None:
    stamps = submit(pipe, [5])
    assert engine.save("plain", stamps)[0] == 0
    engine.die()
    other = Engine(program)
    assert other.do(f"attach {pipe.name} 20")[0] == 0
    last = [o for _, o in itertools.islice(each_output(pipe), 2)]
    other.end()
    assert [(o.outputs.token_ids, o.error_code) for o in last] == [([token(0)], 200), ([], 500)]


def test_a_forked_copy_holds_nothing(engine: Engine, pipe: tp.Pipeline) -> None:
    stamps = submit(pipe, [1])
    assert engine.do(f"fork plain 0 1 0 {stamps[0]}") == (errno.EPERM, "", "")
    assert engine.save("plain", stamps)[0] == 0, "the copy has closed its own only"
    assert outputs(pipe, 1)[0].outputs.token_ids == [token(0)]
    code, _, copy = engine.do("linger")
    assert code == 0
    try:
        assert engine.do("close")[0] == 0
        tp.EngineWriter.attach(pipe.name, 20).close()  # not held by the copy, which lives
    finally:
        os.kill(int(copy), signal.SIGKILL)


# --- the example of the README


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (text,) = re.findall(r"```c\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("example")
    (folder / "engine.c").write_text(text)
    return build(folder / "engine.c", folder / "engine")


def test_the_readmes_example_saves_into_a_pipeline(example: Path, pipe: tp.Pipeline) -> None:
    (stamp,) = submit(pipe, [1])
    subprocess.run([example, pipe.name, str(stamp)], check=True)
    assert outputs(pipe, 1)[0].outputs.token_ids == [7]
    done = subprocess.run([example, "../x", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, 'no pipeline can be named "../x"\n')


def test_the_readmes_example_saves_to_fastdeploys_queue(example: Path) -> None:
    queue_id = free_queue_id()
    worker = Worker(custom_ftok("/dev/shm", queue_id))
    try:
        environment = os.environ | {"INFERENCE_MSG_QUEUE_ID": str(queue_id)}
        subprocess.run([example], check=True, env=environment)
        message = worker.receive()
    finally:
        worker.remove()
    assert message is not None
    assert struct.unpack_from("3i", message) == (1, 1, 7)
