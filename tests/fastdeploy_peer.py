"""FastDeploy's worker as its queue sees it: messages packed by `struct` from the wire's tables and
sent by raw msgsnd, so that nothing of ours is tested against itself."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

IPC_CREAT, IPC_NOWAIT, IPC_RMID = 0o1000, 0o4000, 0
ROWS, SPECULATE_ROWS, COLUMNS, DRAFTS = 512, 256, 21, 6
BYTES = {
    "get_output": 2056,
    "get_output_ep": 2056,
    "get_output_topk": 88072,
    "speculate_get_output": 7176,
    "speculate_get_output_topk": 530448,
}

_libc = ctypes.CDLL(None, use_errno=True)


def custom_ftok(folder: str, queue_id: int) -> int:
    """The key of generations g3 and g4, as a signed 32-bit number."""
    about = os.stat(folder)
    key = (about.st_dev & 0xF) << 28 | (about.st_ino & 0xFF) << 20 | (queue_id & 0xFFFFF)
    return ctypes.c_int32(key).value


def ftok(folder: str, queue_id: int) -> int:
    """The key of generations g1 and g2: the C library's own."""
    _libc.ftok.restype = ctypes.c_int32
    return int(_libc.ftok(folder.encode(), queue_id & 0xFF))


def free_queue_id(folder: str = "/dev/shm") -> int:
    """A queue id whose keys (of both kinds) nobody on this machine uses."""
    taken = {int(line.split()[0]) for line in _rows()}
    while True:
        number = int.from_bytes(os.urandom(2), "little") + 1
        if not {custom_ftok(folder, number), ftok(folder, number)} & taken:
            return number


def _rows() -> list[str]:
    return Path("/proc/sysvipc/msg").read_text().splitlines()[1:]


class Worker:
    """One end of one queue: it sends, as FastDeploy's worker does, or receives."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.msqid = _libc.msgget(key, IPC_CREAT | 0o666)
        assert self.msqid >= 0, os.strerror(ctypes.get_errno())

    def send(self, payload: bytes, mtype: int = 1, wait: bool = True) -> bool:
        """Sends one message; False when there is no room and `wait` is not set."""
        message = struct.pack("q", mtype) + payload
        while True:
            flags = 0 if wait else IPC_NOWAIT
            if _libc.msgsnd(self.msqid, message, ctypes.c_size_t(len(payload)), flags) == 0:
                return True
            code = ctypes.get_errno()
            if code == errno.EAGAIN:
                return False
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def receive(self, room: int = 2**20) -> bytes | None:
        """Takes the payload of the first message; None when there is none."""
        message = ctypes.create_string_buffer(8 + room)
        _libc.msgrcv.restype = ctypes.c_ssize_t
        got = _libc.msgrcv(self.msqid, message, ctypes.c_size_t(room), ctypes.c_long(0), IPC_NOWAIT)
        if got < 0:
            code = ctypes.get_errno()
            assert code == errno.ENOMSG, os.strerror(code)
            return None
        assert struct.unpack_from("q", message)[0] == 1, "FastDeploy's messages have the type 1"
        return message.raw[8 : 8 + got]

    def remove(self) -> None:
        """Removes the queue, as an operator might."""
        _libc.msgctl(self.msqid, IPC_RMID, None)


def _words(values: Sequence[int]) -> bytes:
    return np.asarray(values, np.int64).astype(np.int32).tobytes()


def plain(tokens: Sequence[int], *, sign: int = 1, stale: int = 0) -> bytes:
    """save_output. `stale`: what the sender's buffer held behind the batch."""
    rest = [stale] * (ROWS - len(tokens))
    return _words([sign, len(tokens), *tokens, *rest])


def topk(
    ids: Any, scores: Any, ranks: Sequence[int], *, sign: int = 1, packed: bool = False
) -> bytes:
    """save_output_topk of ids and scores [n, T]; `packed`: generation g4."""
    ids, scores = np.asarray(ids, np.int64), np.asarray(scores, np.float32)
    n, width = ids.shape
    stride = width if packed else COLUMNS
    head = n | width << 16 if packed else n
    tokens = np.full((n, stride), -1, np.int64)
    values = np.zeros((n, stride), np.float32)
    tokens[:, :width], values[:, :width] = ids[:, :stride], scores[:, :stride]
    tokens[(ids[:, 0] == -9)] = -9
    all_ids = np.zeros(ROWS * COLUMNS, np.int64)
    all_scores = np.zeros(ROWS * COLUMNS, np.float32)
    all_ids[: tokens.size], all_scores[: values.size] = tokens.ravel(), values.ravel()
    all_ranks = [*ranks, *([0] * (ROWS - n))]
    return _words([sign, head]) + _words(all_ids) + all_scores.tobytes() + _words(all_ranks)


def speculate(tokens: Any, accepted: Sequence[int], *, sign: int = 1) -> bytes:
    """speculate_save_output of tokens [n, <= 6]."""
    tokens = np.asarray(tokens, np.int64).reshape(len(accepted), -1)
    block = np.zeros((SPECULATE_ROWS, DRAFTS), np.int64)
    block[: len(accepted), : tokens.shape[1]] = tokens
    counts = [*accepted, *([0] * (SPECULATE_ROWS - len(accepted)))]
    return _words([sign, len(accepted), *counts]) + _words(block.ravel())


def speculate_topk(
    ids: Any,
    scores: Any,
    ranks: Any,
    accepted: Sequence[int],
    *,
    flag: int = 3,
    sign: int = 1,
    packed: bool = False,
    tail: bool = True,
) -> bytes:
    """speculate_save_output_topk of ids and scores [n, D, T], ranks [n, D]."""
    ids, scores = np.asarray(ids, np.int64), np.asarray(scores, np.float32)
    ranks = np.asarray(ranks, np.int64)
    n, depth, width = ids.shape
    head = flag | width << 8 if packed else flag
    counts = [*accepted, *([0] * (ROWS - n))]
    rows = []
    for i in range(ROWS):
        tokens = np.zeros((DRAFTS, COLUMNS), np.int64)
        values = np.zeros((DRAFTS, COLUMNS), np.float32)
        rank = np.zeros(DRAFTS, np.int64)
        if i < n:
            tokens[:depth, width:] = -1
            tokens[:depth, :width], values[:depth, :width] = ids[i], scores[i]
            rank[:depth] = ranks[i]
        rows.append(_words(tokens.ravel()) + values.tobytes() + _words(rank))
    return _words([sign, head, n, *counts]) + b"".join(rows) + (b"\0" * 4 if tail else b"")
