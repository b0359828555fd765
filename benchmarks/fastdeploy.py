"""FastDeploy's own token processor and the plugin on the same System V stream, in one run.

    python benchmarks/fastdeploy.py
    python benchmarks/fastdeploy.py --modes plain --steps 500 --rows 64

Each figure is of an engine process of its own, with the same stand-ins for the rest of FastDeploy
(its metrics in prometheus_client's multi-process mode, as FastDeploy's are), and a worker process
that sends. The seed's receive op is a msgrcv into numpy arrays here, cheaper than Paddle tensors:
its figures are kind. Top-k messages need larger kernel limits: they are raised in a private IPC
namespace, and without one the mode is left out. JSON lines on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import fastdeploy_peer as peer
import fastdeploy_standins as fd
from seed_driver import WHY_SKIPPED, find_seed
from table import show

SIDES = ("seed", "seed, lazy debug strings", "plugin")
OPS = {"plain": "get_output", "topk": "get_output_topk"}
FOLDER = "/dev/shm"
WARM_UP = 20
_CLONE_NEWIPC = 0x08000000
_LIMITS = {"msgmax": 1 << 20, "msgmnb": 1 << 22}
_TIMEOUT_S = 300.0
_libc = ctypes.CDLL(None, use_errno=True)


class Sink:
    """The scheduler: notes when each step's outputs come, and how many."""

    def __init__(self, steps: int) -> None:
        self.at_ns = np.zeros(steps, np.int64)
        self.outputs = 0
        self.count = 0
        self.is_full = threading.Event()
        self.cpu_s = 0.0

    def put_results(self, results: list[Any]) -> None:
        """Takes one step."""
        if self.count == WARM_UP:
            self.cpu_s = time.process_time()
        if self.count < len(self.at_ns):
            self.at_ns[self.count] = time.monotonic_ns()
            self.outputs += len(results)
        self.count += 1
        if self.count == len(self.at_ns):
            self.cpu_s = time.process_time() - self.cpu_s
            self.is_full.set()


class Busy:
    """A thread of the engine that never rests, as a scheduler under load."""

    def __init__(self) -> None:
        self._is_over = False
        self._cpu_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            sum(range(500))

    def stop(self) -> None:
        """Ends it."""
        self._is_over = True
        self._thread.join()


# --- the worker's process


def work(args: argparse.Namespace) -> None:
    """Sends steps at a rate (0: as fast as the queue takes them); prints when each was due."""
    worker = peer.Worker(args.key)
    rng, n = np.random.default_rng(1), args.rows
    if args.mode == "plain":
        payloads = [peer.plain(rng.integers(10, 30_000, n)) for _ in range(8)]
    else:
        payloads = [
            peer.topk(
                rng.integers(10, 30_000, (n, 21)),
                -rng.exponential(3, (n, 21)),
                rng.integers(1, 99, n),
            )
            for _ in range(8)
        ]
    due_ns = np.zeros(args.steps, np.int64)
    begun = time.monotonic_ns()
    for i in range(args.steps):
        if args.rate:
            due_ns[i] = begun + int(i * 1e9 / args.rate)
            time.sleep(max(0, due_ns[i] - time.monotonic_ns()) / 1e9)
        else:
            due_ns[i] = time.monotonic_ns()
        worker.send(payloads[i % 8])
    sys.stdout.buffer.write(due_ns.tobytes())


# --- the engine's process


def receive_ops(key: int) -> dict[str, Any]:
    """The seed's receive ops over a raw msgrcv."""
    msqid = peer.Worker(key).msqid
    room = 1 << 20
    buffer = ctypes.create_string_buffer(8 + room)
    _libc.msgrcv.restype = ctypes.c_ssize_t

    def receive() -> Any:
        length = -1
        while length < 0:
            length = _libc.msgrcv(msqid, buffer, ctypes.c_size_t(room), ctypes.c_long(0), 0)
        return np.frombuffer(buffer, np.int32, length // 4, 8)

    def get_output(tokens: Any, _rank: int, _wait: bool) -> None:
        tokens.reshape(-1)[:] = receive()

    def get_output_topk(
        tokens: Any, scores: Any, ranks: Any, _k: int, _rank: int, _wait: bool
    ) -> None:
        words = receive()
        head, width = 2 + peer.ROWS * peer.COLUMNS, peer.ROWS * peer.COLUMNS
        tokens.reshape(-1)[:] = words[:head]
        scores.reshape(-1)[:] = words[head : head + width].view(np.float32)
        ranks[:] = words[head + width :]

    return {"get_output": get_output, "get_output_topk": get_output_topk}


@contextlib.contextmanager
def surroundings(side: str, ops: dict[str, Any]) -> Iterator[Any]:
    """What both sides see of FastDeploy: the seed's stand-ins; without a seed those of the
    tests."""
    seed = find_seed(ops=ops, prom="multi", cheap_repr=side != "seed")
    if seed is None:
        with fd.installed():
            yield None
        return
    sys.modules.update(seed.modules)
    try:
        yield seed
    finally:
        shutil.rmtree(os.environ["PROMETHEUS_MULTIPROC_DIR"], ignore_errors=True)


def measure(args: argparse.Namespace) -> None:
    """One engine process: one side, one mode, one rate. Prints one JSON line."""
    queue_id = peer.free_queue_id(FOLDER)
    key = peer.custom_ftok(FOLDER, queue_id)
    os.environ.update(
        TOKENPIPE_SYSV_QUEUE_ID=str(queue_id),
        TOKENPIPE_SYSV_FOLDER=FOLDER,
        TOKENPIPE_LOG_LEVEL="error",
    )
    sink = Sink(args.steps)
    cfg = fd.config(num_rows=args.rows, logprob=args.mode == "topk")
    ops = {} if args.side == "plugin" else receive_ops(key)
    with surroundings(args.side, ops) as seed:
        if args.side == "plugin":
            from tokenpipe.fastdeploy.processor import TokenProcessor as kind
        else:
            kind = seed.module.TokenProcessor
        processor: Any = kind(cfg, sink, None, None)
        manager = fd.ResourceManagerV1(args.rows, fd.Calls())
        processor.set_resource_manager(manager)
        processor.run()
        for row in range(args.rows):
            if seed is None:
                task: Any = fd.Request(f"r{row}")
            else:
                task = seed.standins.Request(f"r{row}", 100, [2], [], time.time())
            manager.give(row, task)
        busy = Busy() if args.busy else None
        command = [sys.executable, __file__, "--role=worker", f"--mode={args.mode}"]
        command += [f"--rows={args.rows}", f"--steps={args.steps}", f"--rate={args.rate}"]
        worker = subprocess.Popen([*command, f"--key={key}"], stdout=subprocess.PIPE)
        is_whole = sink.is_full.wait(_TIMEOUT_S)
        if busy is not None:
            busy.stop()
        if not is_whole:
            worker.kill()
        due_ns = np.frombuffer(worker.communicate()[0], np.int64)
        if args.side == "plugin":
            processor.stop()
        peer.Worker(key).remove()
        if is_whole:
            print(json.dumps(figures(args, sink, due_ns)), flush=True)
    os._exit(0 if is_whole else 1)  # the seed's thread waits in msgrcv for ever


def figures(args: argparse.Namespace, sink: Sink, due_ns: Any) -> dict[str, Any]:
    """Returns what one run has shown, its first steps left out."""
    late_ms = (sink.at_ns - due_ns)[WARM_UP:] / 1e6
    steps = args.steps - WARM_UP
    seconds = (sink.at_ns[-1] - sink.at_ns[WARM_UP - 1]) / 1e9
    tokens = sink.outputs - WARM_UP * args.rows
    found: dict[str, Any] = {
        "benchmark": "fastdeploy",
        "side": args.side,
        "mode": args.mode,
        "rows": args.rows,
        "rate": args.rate or "max",
        "busy_thread": args.busy,
        "steps": steps,
        "tokens": tokens,
        "whole": sink.outputs == args.steps * args.rows,
        "steps_per_s": round(steps / seconds, 1),
        "tokens_per_s": round(tokens / seconds),
        "latency_ms_p50": round(float(np.percentile(late_ms, 50)), 3),
        "latency_ms_p99": round(float(np.percentile(late_ms, 99)), 3),
    }
    if not args.busy:
        found["engine_cpu_us_per_step"] = round(sink.cpu_s * 1e6 / (steps - 1))
    return found


# --- the benchmark


def raise_limits() -> str | None:
    """Gives this process and its children queues with larger limits; returns why not."""
    if _libc.unshare(_CLONE_NEWIPC) != 0:
        return os.strerror(ctypes.get_errno())
    for name, value in _LIMITS.items():
        Path(f"/proc/sys/kernel/{name}").write_text(str(value))
    return None


def run_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the figures of every run."""
    for mode in args.modes.split(","):
        if mode == "topk" and args.why_not_raised:
            print(
                f"topk: skipped, no private IPC namespace: {args.why_not_raised}", file=sys.stderr
            )
            continue
        for rate, is_busy in ((0, False), (args.rate, False), (args.rate, True)):
            steps = args.steps if not rate else max(WARM_UP * 2, int(rate * args.seconds))
            for side in args.sides.split(";"):
                command = [sys.executable, __file__, "--role=engine", f"--side={side}"]
                command += [f"--mode={mode}", f"--rows={args.rows}", f"--steps={steps}"]
                command += [f"--rate={rate}"] + ["--busy"] * is_busy
                run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                if run.returncode != 0:
                    print(f"{side}: ended with {run.returncode}", file=sys.stderr)
                for line in run.stdout.splitlines():
                    print(line, flush=True)
                    yield json.loads(line)


def report(found: list[dict[str, Any]]) -> None:
    """Prints the table."""
    head = ["mode, rate, side", "tokens/s", "steps/s", "p50 ms", "p99 ms", "engine CPU us a step"]
    rows = []
    for f in found:
        load = f"{f['rate']}{', busy thread' if f['busy_thread'] else ''}"
        figures_ = [f[n] for n in ("tokens_per_s", "steps_per_s", "latency_ms_p50")]
        cpu = f.get("engine_cpu_us_per_step", "-")
        name = f"{f['mode']}, {load}: {f['side']}"
        rows.append([name, *figures_, f["latency_ms_p99"], cpu])
    show("FastDeploy's token processor and the plugin", head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modes", default="plain,topk", help="of plain and topk")
    parser.add_argument("--rows", type=int, default=256, help="rows of the batch")
    parser.add_argument("--steps", type=int, default=400, help="steps of a run at full speed")
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second of the others")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of the others")
    parser.add_argument("--sides", default=";".join(SIDES), help="which, separated by ';'")
    parser.add_argument("--role", choices=("engine", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--key", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "worker":
        work(args)
        return 0
    if args.role == "engine":
        measure(args)
    args.why_not_raised = raise_limits()
    if find_seed() is None:
        print(WHY_SKIPPED, file=sys.stderr)
        args.sides = SIDES[-1]
    found = list(run_all(args))
    report(found)
    return 0 if found and all(f["whole"] for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
