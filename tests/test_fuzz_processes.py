"""Spoilt steps through the real processes: none falls, each refused step is counted once by a
reason that is true of it, and the next good step comes out token for token."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hostile import EOS, FIRST_TOKEN, HEAD_BYTES, Composer, Sizes, odd_value, seeded
from oracle import BAD

import tokenpipe as tp
from support import wait_until
from tokenpipe.layout import SOURCE
from tokenpipe.segment import Segment
from tokenpipe.status import View

ROWS, DEPTH, TOP, FLOATS = 8, 3, 3, 5
BURST = 60
SOURCE_SLOTS = 64


@pytest.fixture
def pipe(unique_name: str) -> Iterator[tp.Pipeline]:
    config = tp.PipelineConfig(
        name=unique_name,
        max_num_seqs=ROWS,
        top_logprobs=TOP,
        max_draft_tokens=DEPTH,
        max_pooling_floats=FLOATS,
        num_decoders=2,
        source_slots=SOURCE_SLOTS,
        ring_slots=16,
        output_slots=128,
        heartbeat_interval_s=0.02,
        abort_timeout_s=0,  # nobody acknowledges: a row that ended comes back at once
        log_level="error",
    )
    with tp.Pipeline(config) as pipe:
        yield pipe


class Hostile:
    """Writes straight into the source segment, and reads what comes of it."""

    def __init__(self, pipe: tp.Pipeline, rng: random.Random) -> None:
        self.pipe, self.rng = pipe, rng
        self.segment = Segment.attach(pipe.name)
        self.view = View(self.segment)
        config, plan = pipe.config, pipe.config.plan()
        self.sizes = Sizes(ROWS, DEPTH, TOP, FLOATS, config.num_decoders, plan["slot_bytes"])
        self.composer = Composer(rng, self.sizes)
        memory = memoryview(self.segment.source_memory)
        first, size = plan["source_steps"], plan["slot_bytes"]
        self.slots = [
            memory[first + i * size : first + (i + 1) * size] for i in range(SOURCE_SLOTS)
        ]
        self.head = np.frombuffer(self.segment.source_memory, SOURCE, 1)[0]
        self.lives = 0
        self.mutated = self.good = self.refused = self.tokens = 0
        self.may_be: Counter[str] = Counter()
        """reason -> steps of which it is true"""
        self.must_be: Counter[str] = Counter()
        """reason -> steps of which nothing else is"""

    # ------------------------------------------------------------ what goes in

    @property
    def due(self) -> int:
        return int(self.head["published"])

    def fill_rows(self) -> None:
        """Gives every free row to a new request."""
        for row in set(range(ROWS)) - set(self.composer.generation):
            self.lives += 1
            request = tp.Request(f"r{self.lives}", [1], [EOS])
            admission = self.pipe.submit(request, row=row, timeout_s=60)
            self.composer.generation[row] = admission.generation
            self.composer.emitted[row] = 0

    def judge(self, sequence: int) -> None:
        """Notes what must become of the step that lies there."""
        faults = self.sizes.verdict(self.slots[sequence % SOURCE_SLOTS], sequence)
        self.refused += bool(faults)
        self.may_be.update(faults)
        if len(faults) == 1:
            self.must_be.update(faults)

    def burst(self, num: int) -> None:
        """Publishes spoilt steps, several at once; the good one behind them rings the bell."""
        first = self.due
        for sequence in range(first, first + num):
            slot = self.slots[sequence % SOURCE_SLOTS]
            step = self.composer.compose(sequence)
            slot[: len(step)] = step
            self.composer.spoil(slot)
            self.judge(sequence)
        self.mutated += num
        self.head["published"] = first + num

    def jump(self) -> None:
        """Moves the cursor over steps that nobody has written."""
        first, num = self.due, self.rng.randint(1, 3)
        for sequence in range(first, first + num):
            self.judge(sequence)
        self.mutated += num
        self.head["published"] = first + num

    def lose_the_cursor(self) -> None:
        """Writes a cursor that cannot be: nothing is read for it, and /health names the engine."""
        cursor, released = self.due, int(self.head["released"])
        assert cursor == released
        limits = (SOURCE_SLOTS, cursor, cursor + SOURCE_SLOTS)
        wrong = odd_value(self.rng, cursor, limits, 64)
        if (wrong - cursor) % 2**64 <= SOURCE_SLOTS:
            return
        self.head["published"] = wrong
        reader = self.view.roles[1]
        turns = int(reader["turns"])
        wait_until(lambda: int(reader["turns"]) >= turns + 3, 60)
        assert int(self.head["released"]) == released
        health = self.pipe.health()
        assert (health["state"], health["role"]) == ("stalled", "engine")
        assert str(wrong) in health["reason"]
        self.head["published"] = cursor

    # ------------------------------------------------------------ what comes out

    def save_a_good_step(self) -> dict[int, list[int]]:
        """Saves a token for every row, as an engine does that begins where the cursor stands."""
        rows = sorted(self.composer.generation)
        tokens = [self.rng.randint(FIRST_TOKEN, 10**9) for _ in rows]
        generations = [self.composer.generation[r] for r in rows]
        with tp.EngineWriter.attach(self.pipe.name) as writer:
            writer.save_output(
                np.array(tokens, np.int64),
                generations=np.array(generations, np.int32),
                rows=np.array(rows, np.int32),
            )
        self.good += 1
        return {row: [token] for row, token in zip(rows, tokens, strict=True)}

    def read(self, sequence: int | None = None) -> dict[int, list[int]]:
        """Reads all there is, checks that it goes on where it was; returns one step's by row."""
        found: dict[int, list[int]] = {}
        self.pipe.sync(60)
        for batch in self.pipe.batches(timeout_s=0):
            offsets, tokens = batch.token_offsets.tolist(), batch.token_ids.tolist()
            heads = (batch.row, batch.generation, batch.send_idx, batch.finish_reason)
            for i, (row, generation, begin, reason) in enumerate(
                zip(*(column.tolist() for column in heads), strict=True)
            ):
                assert self.composer.generation.get(row) == generation, "of a row that has ended"
                if batch.kind == "prompt" and not reason:
                    continue  # candidates of its prompt
                got = tokens[offsets[i] : offsets[i + 1]]
                assert begin == self.composer.emitted[row], "a hole, or a token twice"
                self.composer.emitted[row] += len(got)
                self.tokens += len(got)
                if reason:
                    del self.composer.generation[row], self.composer.emitted[row]
                if batch.step == sequence:
                    assert not reason, f"row {row} has ended by {reason} in a good step"
                    found[row] = got
        return found

    def round(self) -> None:
        """Some spoilt steps, what is left of the requests, then a good step."""
        self.fill_rows()
        self.burst(self.rng.randint(1, BURST))
        if self.rng.randrange(8) == 0:
            self.jump()
        with tp.EngineWriter.attach(self.pipe.name) as writer:
            writer.save_output(np.zeros(0, np.int64), generations=np.zeros(0, np.int32))  # the bell
        self.read()
        if self.rng.randrange(40) == 0:
            self.lose_the_cursor()
        self.check_one_good()

    def check_one_good(self) -> None:
        """The next good step comes out to the token, for every row."""
        self.fill_rows()
        expected, sequence = self.save_a_good_step(), self.due - 1
        assert self.read(sequence) == expected

    def check_counts(self) -> None:
        """Refused steps by reason, tokens by what became of them, and steps."""
        counters = self.pipe.status()["counters"]
        counted = {reason: counters[f"bad_{reason}"] for reason in BAD[1:]}
        assert sum(counted.values()) == self.refused
        for reason, number in counted.items():
            assert self.must_be[reason] <= number <= self.may_be[reason], reason
        dropped = sum(v for n, v in counters.items() if n.startswith("dropped_"))
        assert counters["tokens_seen"] == counters["tokens_delivered"] + dropped
        assert counters["tokens_delivered"] == self.tokens
        assert counters["steps"] == self.due * self.pipe.config.num_decoders
        assert counters["poison_slots"] == 0

    def close(self) -> None:
        """Ends what runs and reads it, so that the pipeline need not wait for a reader."""
        self.pipe.clear()
        self.pipe.sync(60)
        for _ in self.pipe.batches(timeout_s=0):
            pass
        for slot in self.slots:
            slot.release()
        self.segment.close()


def fuzz(pipe: tp.Pipeline, steps: int) -> None:
    pids = pipe.pids
    with seeded() as rng:
        hostile = Hostile(pipe, rng)
        while hostile.mutated < steps:
            hostile.round()
            assert pipe.pids == pids, "a process was replaced"
        hostile.check_counts()
        epochs = [int(role["epoch"]) for role in hostile.view.roles]
        assert max(epochs) == 1, "a process was replaced"
        counters = pipe.status()["counters"]
        by_reason = ", ".join(f"{reason} {counters['bad_' + reason]}" for reason in BAD[1:])
        print(
            f"{hostile.mutated} mutated steps, {hostile.refused} refused ({by_reason}), "
            f"{hostile.good} good steps right, {hostile.tokens} tokens, {hostile.lives} requests"
        )
        hostile.close()


def test_spoilt_steps_cost_no_process_and_no_good_step(pipe: tp.Pipeline) -> None:
    fuzz(pipe, 6_000)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_hundred_thousand_spoilt_steps(pipe: tp.Pipeline) -> None:
    fuzz(pipe, 100_000)


def test_bytes_that_change_while_they_are_read_cost_no_process(pipe: tp.Pipeline) -> None:
    pids = pipe.pids
    with seeded() as rng:
        hostile = Hostile(pipe, rng)
        hostile.fill_rows()
        is_over = threading.Event()

        def scribble() -> None:
            own = random.Random(rng.random())
            while not is_over.is_set():
                slot = own.choice(hostile.slots)
                if own.randrange(2):
                    hostile.composer._spoil_head(slot)
                else:
                    at = own.randrange(HEAD_BYTES, HEAD_BYTES + 256)
                    slot[at] = own.randrange(256)

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for _ in range(20):
                for slot in hostile.slots[:BURST]:
                    slot[: len(step)] = (step := hostile.composer.compose(hostile.due))
                hostile.head["published"] = hostile.due + BURST
                with tp.EngineWriter.attach(pipe.name) as writer:
                    writer.save_output(np.zeros(0, np.int64), generations=np.zeros(0, np.int32))
                hostile.read()
                hostile.fill_rows()
        finally:
            is_over.set()
            thread.join()
        hostile.check_one_good()
        assert pipe.pids == pids, "a process was replaced"
        hostile.close()
