"""What a call of each op costs at batch 256: as a plain C call, from numpy, as a Paddle operator.

One JSON line per op. A save and the get of its message are called in turn, so that the queue is
never full; the figures are medians. The messages with candidates need kernel.msgmax >= 530448 and
kernel.msgmnb >= twice that; without, they are left out. `unshare --ipc` gives a shell in which root
may raise both without touching the machine's own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenpipe import _native
from tokenpipe.ops import sysv

ROWS, WIDTH, TOKENS = 256, 21, 3
# FastDeploy's own operators on CPU tensors, measured with its sources compiled for Paddle 3.3.1.
FASTDEPLOY_US = {
    "save_output": 11.6,
    "get_output": 10.9,
    "save_output_topk": 26.8,
    "get_output_topk": 24.2,
    "speculate_save_output": 18.5,
    "speculate_get_output": 11.6,
    "speculate_save_output_topk": 86.5,
    "speculate_get_output_topk": 73.9,
}
LONG = ("save_output_topk", "speculate_save_output_topk")


def inputs() -> dict[str, tuple[Any, ...]]:
    """Arguments of each op, arrays first; FastDeploy's order."""
    random = np.random.default_rng(0)
    has_work, marks = np.array([True]), np.zeros((ROWS, 1), np.int32)
    counts, prompts = np.full(ROWS, TOKENS, np.int32), np.ones(ROWS, np.int64)
    x = random.integers(0, 150_000, (ROWS, 1))
    drafts = random.integers(0, 150_000, (ROWS, 6))

    def candidates(n: int) -> tuple[Any, Any, Any]:
        ids = random.integers(0, 150_000, (n, WIDTH))
        return ids, random.normal(size=(n, WIDTH)).astype(np.float32), ids[:, 0].copy()

    offsets = np.arange(0, TOKENS * (ROWS + 1), TOKENS, dtype=np.int32)
    rest = (has_work, counts, prompts, marks)
    return {
        "save_output": (x, has_work, marks, 0, False),
        "get_output": (np.full((514, 1), 2), 0, True),
        "save_output_topk": (x, *candidates(ROWS), has_work, marks, 0),
        "get_output_topk": (
            *(np.full((10754, 1), 2), np.full((10752, 1), 2, np.float32), np.full(512, 2)),
            *(20, 0, True),
        ),
        "speculate_save_output": (drafts, counts, *rest, 0, False, True),
        "speculate_get_output": (np.full(1794, 2), 0, True, False),
        "speculate_save_output_topk": (
            *(drafts, *candidates(TOKENS * ROWS), counts, offsets, *rest),
            *(3, 0, False),
        ),
        "speculate_get_output_topk": (
            *(np.full((65027, 1), 2), np.full((64512, 1), 2, np.float32), np.full(3072, 2)),
            *(20, 0, True),
        ),
    }


def numpy_call(op: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    function = getattr(sysv, op)
    return lambda: function(*arguments)


def c_call(op: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """The C function with arguments made beforehand: ctypes adds less than a microsecond."""
    function = getattr(sysv._library, f"tokenpipe_{op}")
    made: list[Any] = [None]
    for value in arguments:
        if isinstance(value, np.ndarray) and value.dtype == np.bool_:
            made.append(ctypes.c_bool(bool(value[0])))
        elif isinstance(value, np.ndarray):
            shape = sysv._Shape(*value.shape)
            kind = sysv._DTYPES[value.dtype]
            made.append(ctypes.byref(sysv._Tensor(value.ctypes.data, kind, value.ndim, shape)))
        elif isinstance(value, bool):
            made.append(ctypes.c_bool(value))
        else:  # message_flag and k are 32 bits wide; the register is the same
            made.append(ctypes.c_int64(value))
    if op == "save_output":
        made.pop()  # save_each_rank, which nobody looks at
    failure = sysv.Failure()
    made.append(ctypes.byref(failure))
    return lambda: function(*made)


def paddle_call(op: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    import paddle

    import tokenpipe.ops.paddle

    function = getattr(tokenpipe.ops.paddle, op)
    made = [paddle.to_tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
    return lambda: function(*made)


def medians(save: Callable[[], Any], get: Callable[[], Any], rounds: int) -> tuple[float, float]:
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(rounds):
        for spent, call in zip(taken, (save, get), strict=True):
            begun = time.perf_counter_ns()
            call()
            spent.append(time.perf_counter_ns() - begun)
    return statistics.median(taken[0]) / 1e3, statistics.median(taken[1]) / 1e3


def main() -> None:
    """Measures every op through every face."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--no-paddle", action="store_true")
    options = parser.parse_args()
    os.environ["INFERENCE_MSG_QUEUE_ID"] = str(os.getpid() % 0xFFFFF + 1)
    queue_id = int(os.environ["INFERENCE_MSG_QUEUE_ID"])
    longest = int(Path("/proc/sys/kernel/msgmax").read_text())
    faces = {"c": c_call, "numpy": numpy_call}
    if not options.no_paddle:
        faces["paddle"] = paddle_call
    arguments = inputs()
    try:
        for save in (name for name in arguments if "save" in name):
            get = save.replace("save", "get")
            if save in LONG and longest < 530448:
                print(f"{save}: kernel.msgmax is {longest}, left out", file=sys.stderr)
                continue
            spent: dict[str, dict[str, float]] = {save: {}, get: {}}
            for face, make in faces.items():
                pair = (make(save, arguments[save]), make(get, arguments[get]))
                medians(*pair, options.rounds // 10)
                for op, us in zip((save, get), medians(*pair, options.rounds), strict=True):
                    spent[op][f"{face}_us"] = round(us, 1)
            for op, us in spent.items():
                print(json.dumps({"op": op, **us, "fastdeploy_us": FASTDEPLOY_US[op]}), flush=True)
    finally:
        for folder in ("/dev/shm", "./"):
            _native.Queue(_native.queue_key(folder, queue_id, 3)).remove()


if __name__ == "__main__":
    main()
