"""The source cuda-ipc: the reader fetches steps from the engine's ring on its GPU, which the fake
driver plays. Its memory and events can be opened by other processes, as CUDA's can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import ROOT, FakeCuda, OnCuda
from test_cuda import error_of

import tokenpipe as tp
from support import wait_until
from tokenpipe import _native, cuda, layout
from tokenpipe.config import PipelineConfig, cuda_library
from tokenpipe.segment import Segment
from tokenpipe.status import View

ROWS, TOP, DEPTH, SLOTS, WATCHDOG_S = 24, 4, 3, 4, 30
LAYOUT = (ROOT / "cuda_ops" / "layout.h").read_text()
BAD_LOST = int(LAYOUT.split("TP_BAD_LOST = ")[1].split(",")[0])


class Bench:
    """A pipeline's segments, an engine's writer, and the reader's end of the source."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self.plan = segment, segment.config.plan()
        self.engine = tp.EngineWriter.attach(segment.name)
        self.producer = _native.Producer(segment.core, 0.0)
        self.open_reader()

    def open_reader(self) -> None:
        self.reader = _native.CudaSourceReader(
            self.segment.source,
            self.segment.core,
            cuda.driver(cuda_library()),
            self.segment.source_fd,
            0.0,
        )

    def take(self) -> dict[str, Any]:
        """Takes the oldest step as the reader does; its head and its body."""
        wait_until(lambda: _native.published(self.segment.source) > self.reader.next)
        number = self.producer.cursor
        assert self.producer.claim(0.0)
        assert self.reader.get_output(self.producer, 0.0)
        self.producer.publish()
        self.reader.release()
        _native.Decoder(self.segment.core, 0, 0.0).run(1, 0.0)
        begin = self.plan["slots"] + (number % 2) * self.plan["slot_bytes"]
        memory = self.segment.core_memory
        head = np.frombuffer(memory, layout.STEP, 1, begin)[0]
        step = {name: int(head[name]) for name in layout.STEP.names or () if name != "pad_"}
        at = _native.step_columns(*(step[k] for k in ("num_rows", "num_tokens", "width", "flags")))
        for name, dtype in (
            ("rows", np.uint32),
            ("generations", np.uint32),
            ("tokens", np.int32),
            ("topk_ids", np.int32),
            ("logprobs", np.float32),
            ("ranks", np.int32),
        ):
            per_row = name in ("rows", "generations")
            count = step["num_rows"] if per_row else step["num_tokens"]
            count *= step["width"] if name in ("topk_ids", "logprobs") else 1
            count = 0 if name == "ranks" and not step["width"] else count
            step[name] = np.frombuffer(memory, dtype, count, begin + at[name]).copy()
        return step

    @property
    def exported(self) -> Any:
        return np.frombuffer(
            self.segment.source_memory, layout.DTYPES["EXPORT"], 1, self.plan["exported"]
        )[0]

    def save(self, tokens: Any, stream: int | None = None) -> None:
        n = len(tokens)
        self.engine.save_output(tokens, generations=np.ones(n, int), stream=stream)

    def close(self) -> None:
        """Closes the engine while the reader runs on, as it would."""
        is_closed = threading.Event()

        def read() -> None:
            decoder = _native.Decoder(self.segment.core, 0, 0.0)
            while not is_closed.is_set():
                assert self.producer.claim(0.0)
                if self.reader.get_output(self.producer, 0.01):
                    self.producer.publish()
                    self.reader.release()
                    decoder.run(1, 0.0)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            self.engine.close()
        finally:
            is_closed.set()
            thread.join(WATCHDOG_S)


def config_of(name: str) -> PipelineConfig:
    return PipelineConfig(
        name=name,
        source="cuda-ipc",
        max_num_seqs=ROWS,
        top_logprobs=TOP,
        max_draft_tokens=DEPTH,
        num_decoders=1,
        ring_slots=2,
        source_slots=SLOTS,
    )


@pytest.fixture
def segment(fake: FakeCuda, unique_name: str) -> Iterator[Segment]:
    with Segment.create(config_of(unique_name)) as made:
        yield made


@pytest.fixture
def bench(segment: Segment) -> Iterator[Bench]:
    made = Bench(segment)
    yield made
    made.close()


@pytest.fixture
def stream(fake: FakeCuda) -> int:
    return fake.make_stream()


def test_what_lies_on_the_device_arrives_as_what_the_cpu_saves(
    bench: Bench, fake: FakeCuda, stream: int
) -> None:
    random = np.random.default_rng(3)
    for n in (1, 8, 9, ROWS):
        ids = random.integers(0, 2**31, (n, DEPTH, TOP))
        logprobs = random.standard_normal((n, DEPTH, TOP), np.float32)
        given: dict[str, Any] = {
            "accept_tokens": ids[:, :, 0].copy(),
            "accept_num": random.integers(0, DEPTH, n, endpoint=True),
            "topk_ids": ids,
            "logprobs": logprobs,
            "ranks": ids[:, :, 1].copy(),
        }
        rows = random.permutation(ROWS)[:n]
        stamp = bench.engine.begin_step(np.arange(n) + 1, rows)
        bench.engine.speculate_save_output_topk(**given, step=stamp)
        from_cpu = bench.take()
        on_device = {name: OnCuda(array) for name, array in given.items()}
        bench.engine.speculate_save_output_topk(**on_device, step=stamp, stream=stream)
        from_device = bench.take()
        assert from_device["num_rows"] == n
        for name, value in from_device.items():
            if name not in (
                "sequence",
                "source_sequence",
                "saved_ns",
                "published_ns",
                "saved_tokens",
            ):
                np.testing.assert_array_equal(value, from_cpu[name], name)
        saved = from_device["saved_tokens"] - from_cpu["saved_tokens"]
        assert saved == given["accept_num"].sum()
    assert _native.saved_tokens(bench.segment.source) == from_device["saved_tokens"]


def test_the_engine_copies_nothing_to_the_host(bench: Bench, fake: FakeCuda, stream: int) -> None:
    bench.save(OnCuda(np.arange(5)), stream)
    bench.engine.flush()
    assert "cuMemcpyDtoHAsync" not in fake.take_log()
    assert bench.take()["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert fake.take_log().count("cuMemcpyDtoHAsync") == 1


def test_a_step_waits_on_the_device_until_there_is_room(
    bench: Bench, fake: FakeCuda, stream: int
) -> None:
    for token in range(SLOTS):
        bench.save(OnCuda(np.full(2, token)), stream)
    bench.engine.flush()
    for token in range(3 * SLOTS):
        assert bench.take()["tokens"].tolist() == [token] * 2
        bench.save(OnCuda(np.full(2, token + SLOTS)), stream)
    for token in range(3 * SLOTS, 4 * SLOTS):
        assert bench.take()["tokens"].tolist() == [token] * 2


def test_a_replayed_save_arrives(bench: Bench, fake: FakeCuda, stream: int) -> None:
    tokens = np.arange(4)
    bench.save(OnCuda(tokens), stream)
    bench.take()
    with fake.capture(stream):
        bench.save(OnCuda(tokens), stream)
    for generation in range(2, 9):
        bench.engine.begin_step(np.full(3, generation), replay_in=stream)
        fake.replay(stream)
        step = bench.take()
        assert step["generations"].tolist() == [generation] * 3
        assert step["tokens"].tolist() == [0, 1, 2]


def test_a_bad_value_empties_the_step(bench: Bench, fake: FakeCuda, stream: int) -> None:
    bench.save(OnCuda(np.array([1, -1])), stream)
    with pytest.raises(tp.OpArgumentError, match="tokens holds -1"):
        bench.engine.flush()
    assert bench.take()["num_rows"] == 0


def test_a_closed_writer_s_ring_is_let_go_of_and_the_next_one_s_opened(
    bench: Bench, fake: FakeCuda, stream: int
) -> None:
    for life in range(1, 4):
        bench.save(OnCuda(np.full(2, life)), stream)
        assert bench.take()["tokens"].tolist() == [life] * 2
        assert bench.exported["epoch"] == bench.exported["attached"] == life
        bench.close()
        assert bench.exported["epoch"] == bench.exported["attached"] == 0
        assert fake.held_things == 0
        bench.engine = tp.EngineWriter.attach(bench.segment.name)


def test_a_writer_that_closes_waits_for_its_steps_to_be_copied(
    bench: Bench, fake: FakeCuda, stream: int
) -> None:
    bench.save(OnCuda(np.arange(2)), stream)
    thread = threading.Thread(target=bench.engine.close)
    thread.start()
    assert bench.take()["tokens"].tolist() == [0, 1]
    while thread.is_alive():
        assert bench.producer.claim(0.0)
        bench.reader.get_output(bench.producer, 0.01)
    thread.join(WATCHDOG_S)
    assert fake.held_things == 0


def test_a_reader_s_successor_opens_the_ring_again(
    bench: Bench, fake: FakeCuda, stream: int
) -> None:
    for token in range(3):
        bench.save(OnCuda(np.full(2, token)), stream)
    assert bench.take()["tokens"].tolist() == [0, 0]
    bench.open_reader()
    assert bench.exported["attached"] == 0
    assert [bench.take()["tokens"][0] for _ in range(2)] == [1, 2]


def test_a_ring_that_this_process_cannot_use_is_refused_and_the_step_stays(
    bench: Bench, fake: FakeCuda, stream: int
) -> None:
    def refused(text: str) -> None:
        assert bench.producer.claim(0.0)
        with pytest.raises(tp.CudaError, match=text):
            bench.reader.get_output(bench.producer, 0.0)
        assert bench.exported["attached"] == 0

    bench.save(OnCuda(np.arange(2)), stream)
    bench.engine.flush()
    held = fake.held_things
    for field, text in (
        ("layout_version", "has layout"),
        ("num_slots", "has slots"),
        ("slot_bytes", "has slot bytes"),
        ("ring_bytes", "has bytes"),
    ):
        exported = bench.exported
        right = int(exported[field])
        exported[field] = right + 1
        refused(f"{text} {right + 1}, expected {right}")
        exported[field] = right
    fake.set_uuid(b"another device!")
    refused("CUDA_VISIBLE_DEVICES")
    assert fake.held_things == held, "what was opened is closed"
    fake.set_uuid(b"fake device 000")
    assert bench.take()["tokens"].tolist() == [0, 1]


def test_every_failure_of_the_reader_is_raised_and_costs_no_step(
    bench: Bench, fake: FakeCuda, stream: int
) -> None:
    bench.save(OnCuda(np.arange(2)), stream)
    bench.engine.flush()
    held = fake.held_things
    fake.take_log()
    bench.take()
    calls = [name for name in fake.take_log() if name != "cuGetErrorName"]
    assert set(calls) >= {"cuIpcOpenMemHandle", "cuIpcOpenEventHandle", "cuMemcpyDtoHAsync"}
    for name in sorted(set(calls) - {"cuCtxPopCurrent"}):
        for nth in sorted({1, calls.count(name)}):
            bench.open_reader()  # lets go of what its predecessor had open
            assert fake.held_things == held
            bench.save(OnCuda(np.full(2, nth)), stream)
            bench.engine.flush()
            fake.fail(name, nth)
            assert bench.producer.claim(0.0)
            error = error_of(lambda: bench.reader.get_output(bench.producer, 0.0))
            fake.fail("", 0)
            assert error is not None, (name, nth)
            assert error.call == name, (name, nth)
            assert bench.take()["tokens"].tolist() == [nth] * 2, (name, nth)


ENGINE = """
import sys
import numpy as np
import tokenpipe as tp
from tokenpipe import cuda
from fake_cuda import FakeCuda, OnCuda
from pathlib import Path

cuda.KERNELS = Path(__file__)
fake = FakeCuda(Path(sys.argv[2]))
engine = tp.EngineWriter.attach(sys.argv[1])
stream = fake.make_stream()
for token in range(int(sys.argv[3])):
    engine.save_output(OnCuda(np.full(2, token)), generations=np.ones(2, int), stream=stream)
engine.flush()
print("saved", flush=True)
sys.stdin.read()
engine.close()
"""


def start_engine(
    segment: Segment, fake: FakeCuda, steps: int, folder: Any
) -> subprocess.Popen[str]:
    script = folder / "engine.py"
    script.write_text(ENGINE)
    process = subprocess.Popen(
        [sys.executable, str(script), segment.name, fake.library, str(steps)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    return process


def test_an_engine_that_dies_loses_what_was_not_copied_and_nothing_else(
    segment: Segment, fake: FakeCuda, tmp_path: Path, stream: int
) -> None:
    bench = Bench(segment)
    bench.engine.close()
    with start_engine(segment, fake, 3, tmp_path) as process:
        assert bench.take()["tokens"].tolist() == [0, 0]
        assert fake.held_things > 0
        process.kill()
        process.wait(WATCHDOG_S)
    for _ in range(2):
        step = bench.take()
        assert (step["bad"], step["num_rows"], step["body_bytes"]) == (BAD_LOST, 0, 0)
    assert bench.producer.claim(0.0)
    assert not bench.reader.get_output(bench.producer, 0.0)
    assert fake.held_things == 0, "the dead engine's handles are closed"
    _native.announce_writer(segment.source, 0, 0)  # as the coordinator does, once its rows ended
    bench.engine = tp.EngineWriter.attach(segment.name)
    bench.save(OnCuda(np.array([7, 8])), stream)
    assert bench.take()["tokens"].tolist() == [7, 8]
    bench.close()


def test_a_pipeline_delivers_what_its_engine_saved_on_a_device_also_when_readers_die(
    fake: FakeCuda, unique_name: str, stream: int
) -> None:
    num_tokens = 40
    with tp.Pipeline(config_of(unique_name)) as pipe, pipe.engine_writer() as engine:
        request = tp.Request("r", prompt_token_ids=[1], max_tokens=num_tokens)
        admission = pipe.submit(request)
        stamps, tokens = np.zeros(ROWS, np.int32), np.zeros((num_tokens, ROWS), np.int64)
        stamps[admission.row] = admission.generation
        tokens[:, admission.row] = np.arange(num_tokens) + 100

        def run_engine() -> None:
            for row in tokens:
                engine.save_output(OnCuda(row), generations=stamps, stream=stream)

        thread = threading.Thread(target=run_engine)
        thread.start()
        found: list[int] = []
        kills = 0
        for batch in pipe.batches(timeout_s=WATCHDOG_S):
            for output in batch:
                found += output.outputs.token_ids
                is_finished = output.finished
            if len(found) > 5 and not kills:
                with Segment.attach(unique_name) as view:
                    os.kill(int(View(view).roles[1]["pid"]), signal.SIGKILL)
                kills += 1
            if is_finished:
                break
        thread.join(WATCHDOG_S)
    assert found == list(range(100, 100 + num_tokens))
    assert kills == 1


def test_without_a_driver_the_pipeline_says_so(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENPIPE_CUDA_LIBRARY", "libno_such_driver.so")
    with Segment.create(config_of(unique_name)) as segment:
        from tokenpipe.sources import open_source

        with pytest.raises(tp.CudaError, match="cannot open shared object file"):
            open_source(segment)
