"""Spoilt messages through a System V queue and the real processes: none falls, each message is
counted once, and the next good one comes out token for token."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import fastdeploy_peer as peer
import numpy as np
import pytest
from hostile import odd_value, seeded

import tokenpipe as tp
from support import wait_until
from tokenpipe.sources.sysv import queue_key

ROWS, DEPTH = 8, 3
LIMITS = (ROWS, DEPTH, 6, 21, 256, 512)


class Sender:
    """FastDeploy's worker gone mad; what it says in between is true."""

    def __init__(self, pipe: tp.Pipeline, rng: random.Random) -> None:
        self.pipe, self.rng = pipe, rng
        self.worker = peer.Worker(queue_key(pipe.config))
        self.is_speculative = pipe.config.sysv_op.startswith("speculate")
        self.sent = Counter[str]()
        self.lives = 0
        self.row_of: dict[int, str] = {}

    def fill_rows(self) -> None:
        """Gives every row that has ended a new life."""
        for row in range(ROWS):
            if row not in self.row_of:
                self.lives += 1
                name = f"r{self.lives}"
                self.pipe.submit(tp.Request(name, prompt_token_ids=[1]), row=row, timeout_s=60)
                self.row_of[row] = name

    def good(self, token: int) -> bytes:
        if self.is_speculative:
            tokens = token + np.arange(ROWS * DEPTH).reshape(ROWS, DEPTH)
            return peer.speculate(tokens, [DEPTH] * ROWS)
        return peer.plain([token + i for i in range(ROWS)])

    def spoilt(self) -> tuple[bytes, int]:
        """A message and its type: words at its front changed more often than those behind."""
        message = bytearray(self.good(self.rng.randrange(1 << 20)))
        for _ in range(self.rng.randrange(1, 6)):
            most = self.rng.choice((4, 12, len(message) // 4))
            at = 4 * self.rng.randrange(most)
            old = int.from_bytes(message[at : at + 4], "little")
            message[at : at + 4] = odd_value(self.rng, old, LIMITS).to_bytes(4, "little")
        if self.rng.randrange(20) == 0:
            message = message[: self.rng.randrange(len(message))]
        elif self.rng.randrange(20) == 0:
            message += self.rng.randbytes(self.rng.randrange(1, 900))
        kind = 1 if self.rng.randrange(20) else odd_value(self.rng, 1, (1 << 62,), 63) or 1
        return bytes(message), kind

    def round(self) -> None:
        self.fill_rows()
        for _ in range(40):
            message, kind = self.spoilt()
            self.worker.send(message, kind)
            # From 2^62 on a type is a barrier's, if there is no payload: no step, and of nobody's
            # number no effect.
            self.sent["spoilt" if kind < 1 << 62 or message else "barriers"] += 1
            self.read()
        self.pipe.sync(60)
        self.read()
        self.check_one_good()

    def read(self) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {}
        for batch in self.pipe.batches(timeout_s=0):
            for output in batch:
                name = output.request_id
                got.setdefault(name, []).extend(output.outputs.token_ids)
                if output.finished:
                    row = next(r for r, n in self.row_of.items() if n == name)
                    del self.row_of[row]
        return got

    def check_one_good(self) -> None:
        self.fill_rows()
        token = 1000 + 100 * self.sent["good"]
        self.worker.send(self.good(token))
        self.sent["good"] += 1
        self.pipe.sync(60)
        own = DEPTH if self.is_speculative else 1
        assert self.read() == {
            name: [token + row * own + j for j in range(own)] for row, name in self.row_of.items()
        }


def fuzz(unique_name: str, op: str, messages: int) -> None:
    config = tp.PipelineConfig(
        name=unique_name,
        max_num_seqs=ROWS,
        max_draft_tokens=DEPTH,
        num_decoders=2,
        ring_slots=16,
        output_slots=128,
        heartbeat_interval_s=0.02,
        abort_timeout_s=0,
        quarantine_s=0,
        source="sysv",
        sysv_op=op,
        sysv_folder="/dev/shm",
        sysv_queue_id=peer.free_queue_id(),
        log_level="error",
    )
    with tp.Pipeline(config) as pipe, seeded() as rng:
        pids, sender = pipe.pids, Sender(pipe, rng)
        while sender.sent["spoilt"] < messages:
            sender.round()
        status: dict[str, Any] = pipe.status()
        counters = status["counters"]
        assert pipe.pids == pids, "a process was replaced"
        # Every message is a step of each decoder, good or refused.
        steps = sender.sent["spoilt"] + sender.sent["good"]
        assert counters["steps"] == steps * config.num_decoders
        dropped = sum(v for k, v in counters.items() if k.startswith("dropped_"))
        assert counters["tokens_seen"] == counters["tokens_delivered"] + dropped
        assert counters["tokens_seen"] == status["source"]["tokens_saved"]
        refused = {k: v for k, v in counters.items() if k.startswith("bad_") and v}
        assert {"bad_rows", "bad_bytes", "bad_flags"} <= set(refused)
        print(f"{op}: {dict(sender.sent)}, refused {refused}, {sender.lives} requests")
        pipe.clear()
        wait_until(lambda: sender.read() is not None and not sender.row_of, describe=pipe.status)


@pytest.mark.parametrize("op", ["get_output", "speculate_get_output"])
def test_spoilt_messages_cost_no_process_and_no_good_message(unique_name: str, op: str) -> None:
    fuzz(unique_name, op, 2_000)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("op", ["get_output", "speculate_get_output"])
def test_fifty_thousand_spoilt_messages(unique_name: str, op: str) -> None:
    fuzz(unique_name, op, 50_000)
