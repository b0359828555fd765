"""Garbage in the command ring: the coordinator lives, answers or refuses each, and the next good
command works. Rows and blocks add up, also when it was killed with garbage posted."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hostile import EOS, odd_value, seeded

import tokenpipe as tp
from support import wait_until
from tokenpipe import _native
from tokenpipe.commands import CommandKind, ReplyStatus
from tokenpipe.layout import DTYPES
from tokenpipe.segment import Segment
from tokenpipe.status import View

ROWS, BLOCKS, SLOTS, ID_BYTES, MAX_EOS = 4, 6, 32, 16, 4
HOSTILE_SLOTS = 16  # the handle's own commands take the others first
COMMAND = DTYPES["COMMAND"]
FREE, POSTED, DONE = 0, 1, 2
MAY_WAIT = (CommandKind.SUBMIT, CommandKind.RESUME, CommandKind.GROW, CommandKind.SYNC)
NAMES = [n for n in COMMAND.names or () if n not in ("state", "kind", "id_bytes", "num_eos")]


@pytest.fixture
def pipe(unique_name: str) -> Iterator[tp.Pipeline]:
    config = tp.PipelineConfig(
        name=unique_name,
        max_num_seqs=ROWS,
        top_logprobs=0,
        num_decoders=1,
        num_blocks=BLOCKS,
        command_slots=SLOTS,
        max_request_id_bytes=ID_BYTES,
        max_eos_ids=MAX_EOS,
        heartbeat_interval_s=0.02,
        abort_timeout_s=0,  # nobody acknowledges: a row that ended comes back at once
        orphan_grace_s=60,
        max_restarts=10**6,  # the test kills more often than a run may allow
        restart_backoff_s=0,
        log_level="error",
    )
    with tp.Pipeline(config) as pipe:
        yield pipe


class Hostile:
    """A client that writes what it likes into command slots."""

    def __init__(self, pipe: tp.Pipeline, rng: random.Random) -> None:
        self.pipe, self.rng = pipe, rng
        self.segment = Segment.attach(pipe.name)
        self.view = View(self.segment)
        plan = pipe.config.plan()
        self.memory = memoryview(self.segment.core_memory)
        first, size = plan["commands"], plan["command_bytes"]
        self.slots = [self.memory[first + i * size : first + (i + 1) * size] for i in range(SLOTS)]
        self.heads = [np.frombuffer(slot, COMMAND, 1)[0] for slot in self.slots]
        self.client = _native.Client(self.segment.core, 0.0)
        self.writer = pipe.engine_writer()
        self.statuses: Counter[str] = Counter()
        self.posted = self.good = 0

    # ------------------------------------------------------------ garbage

    def garbage(self, i: int) -> bool:
        """Fills slot i; returns whether it can only be refused as no command at all."""
        rng, head, slot = self.rng, self.heads[i], self.slots[i]
        slot[4:] = rng.randbytes(len(slot) - 4)
        limits = (ROWS, BLOCKS, MAX_EOS, ID_BYTES, _native.now_ns())
        for name in NAMES:
            bits = 8 * COMMAND[name].itemsize
            head[name] = odd_value(rng, rng.choice((0, 1, 2**bits - 1)), limits, bits)
        kind = rng.choice((*CommandKind, *MAY_WAIT, rng.choice((0, 99, 77, 2**31, 2**32 - 1))))
        if kind == CommandKind.DRAIN or (kind == CommandKind.CLEAR and rng.randrange(8)):
            kind = CommandKind.SUBMIT  # a drain ends the pipeline, as it should
        head["kind"] = kind
        if rng.randrange(2):
            head["row"] = rng.choice((2**32 - 1, *range(ROWS + 1)))
        if rng.randrange(4):
            head["num_blocks"] = rng.randrange(BLOCKS + 2)
        else:
            head["num_blocks"] = 0
        request_id = rng.choice(
            (
                *(b"a", b"b", b"c", b"a", b"b", b"c", b"\0", b"a\0b", "\u00e9".encode()),
                *(b"\xff\xfe", b"\xc3", b""),
                rng.randbytes(rng.randrange(ID_BYTES + 1)),
            )
        )
        slot[COMMAND.itemsize : COMMAND.itemsize + len(request_id)] = request_id
        length = len(request_id)
        if rng.randrange(4) == 0:
            length = rng.choice((ID_BYTES, ID_BYTES + 1, 2**32 - 1))
        head["id_bytes"] = length
        head["num_eos"] = rng.choice((0, 0, 1, 1, MAX_EOS, MAX_EOS, MAX_EOS + 1, 2**32 - 1))
        if kind not in list(CommandKind) or length > ID_BYTES or head["num_eos"] > MAX_EOS:
            return True
        if kind != CommandKind.SUBMIT:
            return False
        try:
            is_id = bool(bytes(slot[COMMAND.itemsize : COMMAND.itemsize + length]).decode())
        except UnicodeDecodeError:
            is_id = False
        return not is_id or (head["row"] >= ROWS and head["row"] != 2**32 - 1)

    def round(self, kill: bool = False) -> None:
        """Posts garbage, looks at the answers, takes back what waits, then asks something good."""
        rng = self.rng
        used = rng.sample(range(HOSTILE_SLOTS), rng.randint(1, HOSTILE_SLOTS))
        must_refuse = {i for i in used if self.garbage(i)}
        pids = self.pipe.pids
        if kill:
            os.kill(pids["coordinator"], signal.SIGSTOP)
        for i in used:
            self.heads[i]["state"] = POSTED
        self.posted += len(used)
        meddled = {i for i in used if rng.randrange(8) == 0}
        for i in meddled:  # while it is posted
            at = rng.randrange(len(self.slots[i]))
            if rng.randrange(2):
                self.heads[i]["state"] = rng.choice((FREE, DONE, 77, 2**32 - 1))
            elif at >= 8:  # its kind stays: a drain would be one
                self.slots[i][at] = rng.randrange(256)
        if kill:
            os.kill(pids["coordinator"], signal.SIGKILL)
            wait_until(lambda: self.pipe.pids["coordinator"] not in (0, pids["coordinator"]), 60)
        self.client.ring()
        wait_until(lambda: all(self.is_done_with(i) for i in used), 60, lambda: self.heads)
        self.wait_for_turns()
        for i in used:
            if i not in meddled:
                self.check_answer(i, i in must_refuse)
            self.heads[i]["state"] = FREE
        self.check_one_good()
        assert {n: p for n, p in self.pipe.pids.items() if n != "coordinator"} == {
            n: p for n, p in pids.items() if n != "coordinator"
        }
        assert kill or self.pipe.pids == pids, "a process was replaced"

    def is_done_with(self, i: int) -> bool:
        return self.heads[i]["state"] != POSTED or self.heads[i]["kind"] in MAY_WAIT

    def wait_for_turns(self) -> None:
        coordinator = self.view.roles[0]
        turns = int(coordinator["turns"])

        def has_looked() -> bool:
            self.client.ring()
            return int(coordinator["turns"]) >= turns + 2

        wait_until(has_looked, 60)

    def check_answer(self, i: int, must_refuse: bool) -> None:
        head = self.heads[i]
        if head["state"] == POSTED:
            assert head["kind"] in MAY_WAIT
            assert not must_refuse
            self.statuses["waits"] += 1
            return
        assert head["state"] == DONE
        status = ReplyStatus(int(head["status"]))
        self.statuses[status.name.lower()] += 1
        # What would have been refused for another reason first is refused too.
        if must_refuse:
            assert status in (ReplyStatus.BAD_COMMAND, ReplyStatus.TOO_MANY_BLOCKS)
        else:
            assert status is not ReplyStatus.BAD_COMMAND

    def check_one_good(self) -> None:
        """A request with all blocks goes from submit to end, and nothing is held at the end."""
        self.pipe.clear()
        self.read()
        self.good += 1
        name = f"good-{self.good}"
        request = tp.Request(name, [1], [EOS], num_blocks=BLOCKS)
        admission = self.pipe.submit(request, timeout_s=60)
        assert len(set(admission.block_ids)) == BLOCKS
        for token in (40 + self.good, EOS):
            self.writer.save_output(
                np.array([token], np.int64),
                generations=np.array([admission.generation], np.int32),
                rows=np.array([admission.row], np.int32),
            )
        tokens = [o for o in self.read() if o.request_id == name]
        assert [o.outputs.token_ids for o in tokens] == [[40 + self.good], [EOS]]
        assert tokens[-1].finish_reason == "stop"

        def held() -> tuple[int, int]:
            status = self.pipe.status()
            return status["rows"]["live"], BLOCKS - status["blocks"]["free"]

        wait_until(lambda: held() == (0, 0), 60, held)

    def read(self) -> list[tp.RequestOutput]:
        self.pipe.sync(60)
        return [output for batch in self.pipe.batches(timeout_s=0) for output in batch]  # type: ignore[misc]

    def close(self) -> None:
        self.writer.close()
        del self.heads
        for slot in self.slots:
            slot.release()
        self.memory.release()
        self.segment.close()


def fuzz(pipe: tp.Pipeline, commands: int, kill_every: int) -> None:
    with seeded() as rng:
        hostile = Hostile(pipe, rng)
        rounds = 0
        while hostile.posted < commands:
            rounds += 1
            hostile.round(kill=rounds % kill_every == 0)
        answers = ", ".join(f"{name} {number}" for name, number in hostile.statuses.most_common())
        print(f"{hostile.posted} garbage commands ({answers}), {hostile.good} good ones worked")
        hostile.close()


def test_garbage_commands_cost_nobody_anything(pipe: tp.Pipeline) -> None:
    fuzz(pipe, 600, kill_every=30)


def test_a_client_s_cursor_that_cannot_be_is_named(pipe: tp.Pipeline) -> None:
    with Segment.attach(pipe.name) as segment:
        output = View(segment).client["output"][0]
        for wrong in (1, 2**63, 2**64 - 1):
            output["released"] = wrong
            health = pipe.health()
            assert (health["state"], health["role"]) == ("stalled", "client")
            assert f"{wrong} frames of decoder-0, of which there are 0" in health["reason"]
        output["released"] = 0
        assert pipe.health()["state"] == "idle"
        del output


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_thousand_garbage_commands(pipe: tp.Pipeline) -> None:
    fuzz(pipe, 20_000, kill_every=100)
