"""The output ops on a GPU: values against an oracle, then one table of times. scripts/gpu_check
builds and runs it; with --fake LIBRARY a fake driver plays the GPU, and no time means anything."""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import steps  # noqa: E402

import tokenpipe as tp  # noqa: E402
from tokenpipe import _native, cuda  # noqa: E402
from tokenpipe.segment import Segment  # noqa: E402

Array = np.ndarray[Any, Any]
MODEL_US = 200.0
"""What the model's stream does between two saves, so that the host is ahead of it."""
BURST = 16
"""Steps in a row: a quarter of the source ring, so that no save waits for its reader."""
WARM_UP_CYCLES = 100_000_000
"""Some 50 ms at full clock; an idle GPU's is a sixth of it."""
WATCHDOG_S = 10.0
WIDTH, DEPTH = 21, 6
BATCHES = (32, 256, 512)
POISON = 0xA5


class Gpu(Protocol):
    """What is needed of a framework; all of it happens in `stream`."""

    int_dtypes: tuple[Any, ...]
    layouts: tuple[str, ...]
    has_bfloat16: bool
    stream: Any

    def put(self, array: Array) -> Any:
        """A tensor with these values."""

    def place(self, array: Array, layout: str, bfloat16: bool) -> Any:
        """The same, with strides (steps.laid_out); bfloat16 is given as uint16."""

    def work(self) -> None:
        """MODEL_US of work."""

    def mark(self) -> Any:
        """An event behind all work so far."""

    def is_reached(self, mark: Any) -> bool:
        """Whether the GPU has got there."""

    def us_between(self, first: Any, last: Any) -> float:
        """Time from one event to another; blocks until the last is reached."""

    def fetch(self, tensor: Any) -> Array:
        """What `.cpu()` gives; blocks."""

    def capture(self, act: Callable[[], None]) -> Callable[[], None]:
        """Captures a graph; the answer replays it."""


def cycles_of_work(gpu: Any) -> int:
    """How many cycles take MODEL_US. A GPU that was idle takes its time to clock up."""
    gpu.cycles = WARM_UP_CYCLES
    for _ in range(4):
        gpu.work()
    first = gpu.mark()
    gpu.work()
    return int(WARM_UP_CYCLES * MODEL_US / gpu.us_between(first, gpu.mark()))


class Torch:
    """PyTorch."""

    int_dtypes = (np.int32, np.int64)
    layouts = ("contiguous", "every second", "transposed", "inside")
    has_bfloat16 = True

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ImportError("this PyTorch has no GPU")
        self._torch, self.stream = torch, torch.cuda.Stream()
        self.cycles = cycles_of_work(self)

    def put(self, array: Array) -> Any:
        array = array.view(np.int16) if array.dtype == np.uint16 else array
        with self._torch.cuda.stream(self.stream):
            return self._torch.from_numpy(array.copy()).to("cuda")

    def place(self, array: Array, layout: str, bfloat16: bool) -> Any:
        tensor = steps.laid_out(array, layout, self.put)
        return tensor.view(self._torch.bfloat16) if bfloat16 else tensor

    def work(self) -> None:
        with self._torch.cuda.stream(self.stream):
            self._torch.cuda._sleep(self.cycles)

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def is_reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def us_between(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) * 1000

    def fetch(self, tensor: Any) -> Array:
        with self._torch.cuda.stream(self.stream):
            return tensor.cpu().numpy()

    def capture(self, act: Callable[[], None]) -> Callable[[], None]:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self.stream):
            act()

        def replay() -> None:
            with self._torch.cuda.stream(self.stream):
                graph.replay()

        return replay


class Cupy:
    """CuPy, which knows no bfloat16."""

    int_dtypes = (np.int32, np.int64, np.uint32, np.uint64)
    layouts = ("contiguous", "every second", "transposed", "inside", "backwards")
    has_bfloat16 = False

    def __init__(self) -> None:
        import cupy

        self._cupy, self.stream = cupy, cupy.cuda.Stream(non_blocking=True)
        source = """extern "C" __global__ void work(long long cycles) {
            const long long begun = clock64();
            while (clock64() - begun < cycles) {}
        }"""
        self._kernel = cupy.RawKernel(source, "work")
        self.cycles = cycles_of_work(self)

    def put(self, array: Array) -> Any:
        with self.stream:
            return self._cupy.asarray(array)

    def place(self, array: Array, layout: str, bfloat16: bool) -> Any:
        return steps.laid_out(array, layout, self.put)

    def work(self) -> None:
        with self.stream:
            self._kernel((1,), (1,), (np.int64(self.cycles),))

    def mark(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record(self.stream)
        return event

    def is_reached(self, mark: Any) -> bool:
        return bool(mark.done)

    def us_between(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(first, last)) * 1000

    def fetch(self, tensor: Any) -> Array:
        return tensor.get(stream=self.stream)

    def capture(self, act: Callable[[], None]) -> Callable[[], None]:
        self.stream.begin_capture()
        act()
        graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)


class Fake:
    """The fake driver: everything but the times is as on a GPU."""

    int_dtypes, layouts, has_bfloat16 = steps.INT_DTYPES, steps.LAYOUTS, True

    def __init__(self, library: Path) -> None:
        import fake_cuda

        self._on_cuda, self._fake = fake_cuda.OnCuda, fake_cuda.FakeCuda(library)
        self.stream = self._fake.make_stream()

    def put(self, array: Array) -> Any:
        return self._on_cuda(array)

    def place(self, array: Array, layout: str, bfloat16: bool) -> Any:
        made = steps.laid_out(array, layout, lambda base: base)
        return self._on_cuda(made, bfloat16=bfloat16)

    def work(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter() * 1e6

    def is_reached(self, mark: float) -> bool:
        return True

    def us_between(self, first: float, last: float) -> float:
        return last - first

    def fetch(self, tensor: Any) -> Array:
        return np.array(tensor.array)

    def capture(self, act: Callable[[], None]) -> Callable[[], None]:
        with self._fake.capture(self.stream):
            act()
        return lambda: self._fake.replay(self.stream)


def gpu_of(fake: Path | None) -> Gpu:
    """The fake, or the framework that is there."""
    if fake is not None:
        return Fake(fake)
    try:
        return Torch()
    except ImportError:
        return Cupy()


# ---------------------------------------------------------------- values


def config_of(source: str = "shm", **more: Any) -> tp.PipelineConfig:
    """Sizes of the check: several blocks of the kernel, and not a multiple of them."""
    sizes: dict[str, Any] = {"max_num_seqs": 300, "top_logprobs": 20, "max_draft_tokens": DEPTH}
    sizes |= {"max_pooling_floats": 100, "num_decoders": 1, "ring_slots": 4, "source_slots": 4}
    return tp.PipelineConfig(source=source, **{**sizes, **more})


class Drain:
    """Takes what was saved, as reader and decoder do."""

    def __init__(self, segment: Segment) -> None:
        self._producer = _native.Producer(segment.core, 0.0)
        self._reader = _native.SourceReader(segment.source, segment.core, 0.0)
        self._decoder = _native.Decoder(segment.core, 0, 0.0)

    def take_all(self) -> None:
        """Everything that is published."""
        while self._producer.claim(0.0) and self._reader.get_output(self._producer, 0.0):
            self._producer.publish()
            self._reader.release()
            self._decoder.run(1, 0.0)


def poison(segment: Segment, number: int) -> None:
    """Fills a slot that is going to be written, so that nothing can be there by chance."""
    plan = segment.config.plan()
    begin = plan["source_steps"] + number % segment.config.source_slots * plan["slot_bytes"]
    slot = np.frombuffer(segment.source_memory, np.uint8, plan["slot_bytes"], begin)
    slot[:] = POISON


def check_values(gpu: Gpu, rounds: int, by_stream: bool) -> int:
    """Every op with steps at random, and a captured one; returns how many steps were compared."""
    random = np.random.default_rng(rounds)
    compared = 0
    with (
        Segment.create(config_of()) as segment,
        tp.EngineWriter.attach(segment.name, publish_by_stream=by_stream) as engine,
    ):
        drain = Drain(segment)
        for op in steps.OPS * rounds:
            batch = steps.random_batch(
                op,
                random,
                segment.config.sizes(),
                gpu.int_dtypes,
                gpu.layouts,
                gpu.has_bfloat16,
            )
            given = batch.on_gpu(gpu.place)
            poison(segment, engine.num_steps)
            getattr(engine, op)(**given, stream=gpu.stream)
            engine.flush()
            compare(segment, engine.num_steps - 1, steps.expected_columns(batch))
            drain.take_all()
            compared += 1
        compared += check_replays(gpu, engine, segment, drain)
        check_refusal(gpu, engine)
        drain.take_all()
    return compared


def compare(segment: Segment, number: int, expected: dict[str, Any]) -> None:
    """Raises AssertionError where the step differs from what it must be."""
    found = steps.read_step(segment, number)
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column, f"step {number}: {name}")


def check_replays(gpu: Gpu, engine: tp.EngineWriter, segment: Segment, drain: Drain) -> int:
    """A captured save, replayed with other rows each time."""
    n, random = 200, np.random.default_rng(1)
    tokens = random.integers(0, steps.INT32, n)
    tensor, ones = gpu.put(tokens), np.ones(n, np.int32)
    engine.save_output(tensor, generations=ones, stream=gpu.stream)
    engine.flush()
    drain.take_all()
    replay = gpu.capture(lambda: engine.save_output(tensor, generations=ones, stream=gpu.stream))
    for generation in range(2, 10):
        rows = random.permutation(300)[: n - generation]
        poison(segment, engine.num_steps)
        engine.begin_step(np.full(len(rows), generation), rows, replay_in=gpu.stream)
        replay()
        engine.flush()
        expected = {"rows": rows, "tokens": tokens[: len(rows)]}
        compare(segment, engine.num_steps - 1, expected)
        drain.take_all()
    return 8


def check_refusal(gpu: Gpu, engine: tp.EngineWriter) -> None:
    """A bad value is reported by flush()."""
    bad = gpu.put(np.array([1, -2, 3]))
    engine.save_output(bad, generations=np.ones(3, np.int32), stream=gpu.stream)
    said = ""
    try:
        engine.flush()
    except tp.OpArgumentError as error:
        said = str(error)
    assert "tokens holds -2" in said, f"a negative token was reported as {said!r}"


def check_pipeline(gpu: Gpu, source: str, num_tokens: int) -> int:
    """A whole pipeline, its processes included; returns how many tokens it delivered."""
    config = config_of(source, max_num_seqs=8)
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as engine:
        request = tp.Request("r", prompt_token_ids=[1], max_tokens=num_tokens)
        admission = pipe.submit(request)
        stamps = np.zeros(8, np.int32)
        stamps[admission.row] = admission.generation
        wanted = list(range(100, 100 + num_tokens))
        kept = [gpu.put(np.full(8, token)) for token in wanted]
        for tensor in kept:
            engine.save_output(tensor, generations=stamps, stream=gpu.stream)
        engine.flush()
        found: list[int] = []
        for batch in pipe.batches(timeout_s=30.0):
            for output in batch:
                found += output.outputs.token_ids
            if len(found) >= num_tokens:
                break
        assert found == wanted, f"{source}: {found}"
    return num_tokens


# ---------------------------------------------------------------- times


RECEIVER = """
import ctypes, sys
libc, room = ctypes.CDLL(None), ctypes.c_size_t(int(sys.argv[2]))
message = ctypes.create_string_buffer(8 + room.value)
while libc.msgrcv(int(sys.argv[1]), message, room, ctypes.c_long(0), 0) >= 0:
    pass
"""


class Queue:
    """A System V queue, as the seed sends through it: a message at a time, of the kernel's size.
    Another process takes them out, until the queue is removed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._id = self._libc.msgget(0, 0o600 | 0o1000)  # IPC_PRIVATE, IPC_CREAT
        self._most = int(Path("/proc/sys/kernel/msgmax").read_text())
        self._buffer = ctypes.create_string_buffer(8 + self._most)
        self._buffer[0] = 1
        command = [sys.executable, "-c", RECEIVER, str(self._id), str(self._most)]
        self._receiver = subprocess.Popen(command)

    def send(self, payload: bytes) -> None:
        """Sends it in as many messages as the limit makes of it; waits while the queue is full."""
        for at in range(0, len(payload), self._most):
            part = payload[at : at + self._most]
            ctypes.memmove(ctypes.addressof(self._buffer) + 8, part, len(part))
            if self._libc.msgsnd(self._id, self._buffer, ctypes.c_size_t(len(part)), 0) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"msgsnd: {os.strerror(code)}")

    def close(self) -> None:
        """Removes it."""
        self._libc.msgctl(self._id, 0, None)
        self._receiver.wait(WATCHDOG_S)


@contextmanager
def queue() -> Iterator[Queue]:
    """A queue that is removed at the end."""
    made = Queue()
    try:
        yield made
    finally:
        made.close()


def tensors_of(gpu: Gpu, mode: str, n: int) -> dict[str, Any]:
    """One step of a mode: the op's arguments on the device."""
    random = np.random.default_rng(n)
    cell = (n, DEPTH) if mode.startswith("speculative") else (n,)
    ids = random.integers(0, 100_000, (*cell, WIDTH))
    logprobs = -random.random((*cell, WIDTH), np.float32)
    given = {"tokens": ids[..., 0].copy()}
    if mode.startswith("speculative"):
        given = {"accept_tokens": given["tokens"]}
        given["accept_num"] = random.integers(1, DEPTH, n, endpoint=True)
    if mode != "plain":
        given |= {"topk_ids": ids, "logprobs": logprobs, "ranks": ids[..., 1].copy()}
    return {name: gpu.put(array) for name, array in given.items()}


OP_OF = {
    "plain": "save_output",
    "top-20": "save_output_topk",
    "speculative + top-20": "speculate_save_output_topk",
}


def nothing() -> None:
    """Where there is nothing to do."""


def stream_us(gpu: Gpu, act: Callable[[], None], settle: Callable[[], None], rounds: int) -> float:
    """Median over bursts of the stream's time for a round of the model's work, and of `act` behind
    it."""
    times = []
    for begun in range(0, rounds, BURST):
        settle()
        steps_in_a_row = min(BURST, rounds - begun)
        first = gpu.mark()
        for _ in range(steps_in_a_row):
            gpu.work()
            act()
        times.append(gpu.us_between(first, gpu.mark()) / steps_in_a_row)
    return statistics.median(times)


def host_us(gpu: Gpu, act: Callable[[], None], settle: Callable[[], None], rounds: int) -> float:
    """Median time of the call, while the GPU works."""
    times = []
    for i in range(rounds):
        if i % BURST == 0:
            settle()
        gpu.work()
        begun = time.perf_counter_ns()
        act()
        times.append((time.perf_counter_ns() - begun) / 1000)
    return statistics.median(times)


def published_us(
    gpu: Gpu, engine: tp.EngineWriter, segment: Segment, save: Callable[[], None], rounds: int
) -> float:
    """Median time from the end of the pack kernel until the step is published, as the host sees
    both by asking again and again."""
    times = []
    for _ in range(rounds):
        gpu.work()
        save()
        mark, wanted = gpu.mark(), engine.num_steps
        while not gpu.is_reached(mark):
            pass
        ended = time.perf_counter_ns()
        while _native.published(segment.source) < wanted:
            pass
        times.append((time.perf_counter_ns() - ended) / 1000)
    return statistics.median(times)


Times = dict[tuple[str, int, str], tuple[float, float, float]]
"""By mode, batch and way: added to the stream, from the kernel's end to published, of the call."""
BY_HOST, BY_STREAM = "host function", "stream write (its reader polls)"
AS_THE_SEED = ".cpu() and System V"


def measure(gpu: Gpu, rounds: int) -> Times:
    """All times, in us."""
    cases = [(mode, n) for mode in OP_OF for n in BATCHES]
    found: Times = {}
    for way in (BY_HOST, BY_STREAM):
        # The GPU's own publish wakes nobody: its reader polls.
        spin_us = 1e6 if way == BY_STREAM else 1.0
        config = config_of(max_num_seqs=max(BATCHES), source_slots=4 * BURST, spin_us=spin_us)
        with (
            tp.Pipeline(config) as pipe,
            tp.EngineWriter.attach(pipe.name, publish_by_stream=way == BY_STREAM) as engine,
            Segment.attach_source(pipe.name) as segment,
        ):
            for mode, n in cases:
                given, op = tensors_of(gpu, mode, n), getattr(engine, OP_OF[mode])
                step = engine.begin_step(np.zeros(n, np.int32))  # rows that nobody waits for

                def save(op: Any = op, step: Any = step, given: Any = given) -> None:
                    op(**given, step=step, stream=gpu.stream)

                def settle(engine: tp.EngineWriter = engine, segment: Segment = segment) -> None:
                    wait_until_read(engine, segment)

                save()
                added = stream_us(gpu, save, settle, rounds)
                added -= stream_us(gpu, nothing, settle, rounds)
                published = published_us(gpu, engine, segment, save, rounds)
                called = host_us(gpu, save, settle, rounds)
                found[mode, n, way] = max(0.0, added), published, called
                settle()
    with queue() as sent:
        for mode, n in cases:
            given = tensors_of(gpu, mode, n)

            def as_the_seed(given: Any = given) -> None:
                sent.send(b"".join(gpu.fetch(tensor).tobytes() for tensor in given.values()))

            as_the_seed()
            added = stream_us(gpu, as_the_seed, nothing, rounds)
            added -= stream_us(gpu, nothing, nothing, rounds)
            called = host_us(gpu, as_the_seed, nothing, rounds)
            found[mode, n, AS_THE_SEED] = max(0.0, added), float("nan"), called
    return found


def wait_until_read(engine: tp.EngineWriter, segment: Segment) -> None:
    """Returns when the pipeline's reader has taken every step."""
    engine.flush()
    deadline = time.monotonic() + WATCHDOG_S
    while _native.source_released(segment.source) < engine.num_steps:
        assert time.monotonic() < deadline, "the reader does not take the steps"
        time.sleep(1e-4)


def judge(found: Times) -> Iterator[str]:
    """What was hoped for on an H200, and what came of it."""
    ours = [v for (_, _, way), v in found.items() if way != AS_THE_SEED]
    typical = [found["top-20", 256, way] for way in (BY_HOST, BY_STREAM)]
    least = min(
        found[mode, n, AS_THE_SEED][0] / max(found[mode, n, BY_HOST][0], 0.1)
        for mode in OP_OF
        for n in BATCHES
    )
    for what, worst, target in (
        ("the call, at most", max(v[2] for v in ours), 10.0),
        ("added to the stream at batch 256, top-20, at most", max(v[0] for v in typical), 15.0),
        ("kernel end to published there, at most", max(v[1] for v in typical), 30.0),
    ):
        verdict = "met" if worst < target else "MISSED"
        yield f"{what}: {worst:.1f} us, {verdict} (target {target} us)"
    verdict = "met" if least >= 5 else "MISSED"
    yield f"stream time of the seed's way over ours, at least: {least:.1f}, {verdict} (target 5)"


def show_times(found: Times, is_fake: bool) -> None:
    """The table, and on a GPU what it says of the targets."""
    title = "microseconds a step, on a GPU"
    if is_fake:
        title = "DRY RUN with a fake driver: these are no times of a GPU"
    head = ("mode, and how it is published", "batch", "stream", "kernel end to published", "call")
    ways = (BY_HOST, BY_STREAM, AS_THE_SEED)
    rows: list[list[object]] = []
    for mode in OP_OF:
        for n in BATCHES:
            for way in ways:
                cells = ["-" if value != value else value for value in found[mode, n, way]]
                rows.append([f"{mode}, {way}", n, *cells])
    table.show(title, head, rows)
    for line in judge(found):
        if not is_fake:
            print(line, file=sys.stderr)


def main() -> None:
    """Runs the parts that are named; exit code 1 when a value is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=("values", "pipelines", "times"))
    parser.add_argument("--rounds", type=int, default=40, help="of every op, or of every time")
    parser.add_argument("--fake", type=Path, help="the fake driver's library: no GPU is needed")
    args = parser.parse_args()
    if args.fake is not None:
        cuda.KERNELS = args.fake  # it looks at no kernel
    gpu = gpu_of(args.fake)
    if "values" in args.parts:
        for by_stream in (False, True):
            compared = check_values(gpu, args.rounds, by_stream)
            way = "the GPU" if by_stream else "a host function"
            print(f"values: {compared} steps right, published by {way}")
    if "pipelines" in args.parts:
        for source in ("shm", "cuda-ipc"):
            print(f"pipeline: {check_pipeline(gpu, source, 50)} tokens right, source {source}")
    if "times" in args.parts:
        show_times(measure(gpu, args.rounds), args.fake is not None)


if __name__ == "__main__":
    main()
