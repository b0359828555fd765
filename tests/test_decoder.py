"""The native decoder against tests/oracle.py: the same frames, finals, counters and progress for
the same messages, whatever they are and wherever a decoder is restarted; and one claim at a
time."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inprocess import InProcess
from oracle import BAD, Admission, Final, Frame, Options, Oracle, Output, Step

import tokenpipe as tp
from tokenpipe import _native
from tokenpipe.commands import FinishReason
from tokenpipe.layout import DECODER, DTYPES, FRAME, STEP
from tokenpipe.metrics import Exporter
from tokenpipe.outputs import OutputBatch
from tokenpipe.records import SpeculateMetrics
from tokenpipe.status import View

ACCEPT, POSITIONS, POOLING, PROMPT = 1, 2, 8, 16  # TP_STEP_*
DRAFT = 4  # message_flag
SPECIAL_BITS = (0xFF800000, 0x7F800000, 0x7FC00001, 0xFFC01234, 0x80000000, 0, 1, 0x80000001)
"""-inf, inf, two NaNs, -0.0, 0.0, and the two smallest denormals."""

SMALL = {
    "ring_slots": 8,
    "output_slots": 8,
    "source_slots": 8,
    "command_slots": 16,
    "max_request_id_bytes": 24,
    "max_eos_ids": 4,
    "abort_timeout_s": 0,
    "prefill_timeout_s": 0,
}


class Twin:
    """A pipeline driven by hand; each turn of a decoder is compared with its oracle's."""

    def __init__(self, **settings: Any) -> None:
        config = self.config = tp.PipelineConfig(**{**SMALL, **settings})
        self.pipe = InProcess(config)
        options = Options(
            config.max_num_seqs,
            config.num_decoders,
            config.max_draft_tokens,
            config.role,
            config.internal_adapter,
            config.enable_draft_logprob,
        )
        self.oracles = [Oracle(options, k) for k in range(config.num_decoders)]
        self.frames: list[Frame] = []
        """What came out so far; the oracle's, which equal the decoders'."""
        self.generation = [0] * config.max_num_seqs
        self._saved: list[Step] = []
        self._ids = itertools.count()
        self._bytes = itertools.count(1000)
        self._plan = config.plan()
        self._view = View(self.pipe.segment)

    def __enter__(self) -> Twin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pipe.__exit__(kind, error, trace)

    def oracle_of(self, row: int) -> Oracle:
        return self.oracles[row % self.config.num_decoders]

    def is_free(self, row: int) -> bool:
        progress = self.oracle_of(row).progress[row]
        return progress.generation == self.generation[row] and (
            progress.reason != 0 or progress.generation == 0
        )

    # ------------------------------------------------------------ what goes in

    def admit(self, row: int, **about: Any) -> int:
        """Gives a free row to a new request; returns its generation."""
        self.pipe.resources.sweep()
        self._copy_told()
        self.pipe.resources.reclaim()
        number = next(self._ids)
        admission = Admission(
            generation=self.generation[row] + 1,
            from_sequence=self.pipe.writer.num_steps,
            request_id=f"r{number}" + "\u00e9" * (number % 9),
            **about,
        )
        request = tp.Request(
            admission.request_id,
            prompt_token_ids=[1] * admission.num_prompt_tokens or [1],
            eos_token_ids=admission.eos,
            max_tokens=admission.max_tokens or None,
            num_emitted_tokens=admission.num_emitted,
            prefill_chunk_info=[1] * admission.num_chunks or None,
            disaggregate_info={} if admission.is_disaggregated else None,
        )
        admission.num_prompt_tokens = len(request.prompt_token_ids)
        got = self.pipe.submit(request, row=row, arrival_ns=admission.arrival_ns)
        assert (got.row, got.generation) == (row, admission.generation)
        self.generation[row] = got.generation
        self.oracle_of(row).admit(row, admission)
        return got.generation

    def _copy_told(self) -> None:
        """Where the coordinator has told the engine of an end that a decoder found."""
        memory, at = self.pipe.segment.core_memory, self._plan["admissions"]
        records = np.frombuffer(memory, DTYPES["ADMISSION"], self.config.max_num_seqs, at)
        for row, told_at in enumerate(records["acknowledge_from"].tolist()):
            admission = self.oracle_of(row).admissions.get(row)
            if admission is not None:
                admission.acknowledge_from = None if told_at == 2**64 - 1 else told_at

    def mark(self, row: int, reason: FinishReason) -> None:
        """Ends the row's request as an abort or a shutdown does."""
        generation = self.generation[row]
        if generation:
            self.pipe.book.mark(row, generation, reason)
            at = self.pipe.writer.num_steps
            self.oracle_of(row).mark(row, generation, int(reason), at)

    def tell(self, row: int) -> None:
        """Tells the engine to let the row go, as an abort and a preemption do."""
        generation = self.generation[row]
        if generation:
            self.pipe.book.note_acknowledged(row, 0)
            self.oracle_of(row).tell(row, generation, self.pipe.writer.num_steps)

    def save(
        self,
        rows: list[int],
        tokens: list[list[int]] | None = None,
        *,
        kind: str = "tokens",
        generations: list[int] | None = None,
        states: list[int] | None = None,
        speculative: bool = False,
        positions: list[int] | None = None,
        width: int = 0,
        seed: int = 0,
    ) -> Step:
        """Saves one step through the engine's writer; candidates and vectors come from the seed."""
        while not self.pipe.writer._writer.wait_for_space(0.0):
            self.read()
        n = len(rows)
        rng = random.Random(seed)
        states = states or [0] * n
        generations = [self.generation[r] for r in rows] if generations is None else generations
        packed = kind == "prompt" or speculative
        tokens = [[0]] * n if tokens is None else tokens
        if packed:  # the op empties rows that have no token in this step
            tokens = [t if s == 0 else [] for t, s in zip(tokens, states, strict=True)]
        flat = [t for row in tokens for t in row]
        step = Step(
            kind=kind,
            sequence=self.pipe.writer.num_steps,
            saved_ns=0,
            rows=rows,
            generations=generations,
            states=states,
            positions=positions,
            width=width,
        )
        if kind == "pooling":
            step.vectors = [self._bits(rng, width) for _ in rows]
        else:
            step.tokens = flat
            step.accept = [len(t) for t in tokens] if packed else None
            if width:
                step.topk_ids = [self._candidates(rng, width) for _ in flat]
                step.logprobs = [self._bits(rng, width) for _ in flat]
                step.ranks = [rng.choice([0, 1, 21, 2**31 - 1, next(self._bytes)]) for _ in flat]
        self._save(step, tokens)
        self._saved.append(step)
        step.saved_ns = int(self.header(step)["saved_ns"])
        return step

    def _candidates(self, rng: random.Random, width: int) -> list[int]:
        return [rng.choice([-1, 0, 2**31 - 1, next(self._bytes)]) for _ in range(width)]

    def _bits(self, rng: random.Random, count: int) -> list[int]:
        return [rng.choice([*SPECIAL_BITS, rng.getrandbits(32)]) for _ in range(count)]

    def _save(self, step: Step, tokens: list[list[int]]) -> None:
        where: dict[str, Any] = {
            "generations": np.array(step.generations, np.int64),
            "rows": np.array(step.rows, np.int64),
            "states": np.array(step.states, np.uint8),
        }
        if step.positions is not None:
            where["positions"] = np.array(step.positions, np.int64)
        save = self.pipe.writer._writer.save
        n, width = len(step.rows), step.width
        if step.kind == "pooling":
            vectors = _floats(step.vectors, (n, width))
            save(None, where.pop("generations"), vectors=vectors, **where)
            return
        if step.accept is not None:
            where["accept_num"] = np.array(step.accept, np.int64)
        if step.accept is None or step.kind == "prompt":
            shape: tuple[int, ...] = (len(step.tokens),)
            pad = step
        else:
            depth = self.config.max_draft_tokens
            shape = (n, depth)
            pad = _padded(step, tokens, depth)
        if width:
            where["topk_ids"] = np.array(pad.topk_ids, np.int64).reshape(*shape, width)
            where["logprobs"] = _floats(pad.logprobs, (*shape, width))
            where["ranks"] = np.array(pad.ranks, np.int64).reshape(shape)
        elif step.kind == "prompt":
            where["topk_ids"] = np.zeros((*shape, 0), np.int64)
            where["logprobs"] = np.zeros((*shape, 0), np.float32)
            where["ranks"] = np.zeros(shape, np.int64)
        save(
            np.array(pad.tokens, np.int64).reshape(shape),
            where.pop("generations"),
            is_prompt=step.kind == "prompt",
            message_flag=DRAFT if step.kind == "draft" else 3,
            **where,
        )

    # ------------------------------------------------------------ bytes that went bad

    def _offset(self, step: Step) -> int:
        place = step.sequence % self.config.source_slots
        return self._plan["source_steps"] + place * self._plan["slot_bytes"]

    def header(self, step: Step) -> Any:
        """The step's record in the source segment, to be read or spoilt."""
        return np.frombuffer(self.pipe.segment.source_memory, STEP, 1, self._offset(step))[0:1][0]

    def column(self, step: Step, name: str, dtype: Any) -> Any:
        """A column of the step in the source segment, to be spoilt."""
        head = self.header(step)
        n, m, width, flags = (int(head[f]) for f in ("num_rows", "num_tokens", "width", "flags"))
        at = _native.step_columns(n, m, width, flags)[name]
        count = n if name in ("rows", "states", "generations", "positions", "accept_num") else m
        memory = self.pipe.segment.source_memory
        return np.frombuffer(memory, dtype, count, self._offset(step) + at)

    def spoil_token(self, step: Step, place: int, token: int) -> None:
        """Changes a token behind the writer's back."""
        self.column(step, "tokens", np.int32)[place] = step.tokens[place] = token

    def spoil_state(self, step: Step, i: int, state: int) -> None:
        self.column(step, "states", np.uint8)[i] = step.states[i] = state

    def spoil_row(self, step: Step, i: int, row: int) -> None:
        self.column(step, "rows", np.uint32)[i] = step.rows[i] = row

    def spoil_accept(self, step: Step, i: int, count: int) -> None:
        assert step.accept is not None
        self.column(step, "accept_num", np.int32)[i] = step.accept[i] = count

    def spoil_header(self, step: Step, reason: str, **fields: int) -> None:
        """Changes the step's header so that the reader must refuse it for `reason`."""
        memory = self.pipe.segment.source_memory
        head = np.frombuffer(memory, STEP, 1, self._offset(step))
        for name, value in fields.items():
            head[name] = value
        step.bad = BAD.index(reason)
        step.kind = "draft" if int(head["message_flag"][0]) == DRAFT else "tokens"

    def stamp(self, step: Step, saved_ns: int) -> None:
        """Says when the step was saved."""
        memory = self.pipe.segment.source_memory
        np.frombuffer(memory, STEP, 1, self._offset(step))["saved_ns"] = saved_ns
        step.saved_ns = saved_ns

    # ------------------------------------------------------------ what happens to it

    def read(self) -> bool:
        """Lets the reader take one step, if there is one; makes room for it."""
        if not self._saved:
            return False
        pipe = self.pipe
        while not pipe.producer.claim(0.0):
            for k in range(self.config.num_decoders):
                self.turn(k)
        assert pipe.reader.get_output(pipe.producer, 0.0)
        pipe.producer.publish()
        pipe.reader.release()
        step = self._saved.pop(0)
        for oracle in self.oracles:
            oracle.waiting.append(dataclasses.replace(step))
        return True

    def turn(self, k: int) -> Frame | None:
        """One turn of decoder k and of its oracle: the same frame, counters and progress."""
        oracle = self.oracles[k]
        expects_turn = oracle.has_input()
        assert self.pipe.decoders[k].run(1, 0.0) == int(expects_turn)
        if not expects_turn:
            return None
        expected = oracle.turn()
        found = self._next_frame(k)
        assert found == expected
        assert self.counters(k) == +oracle.count
        self._compare_endings(k)
        if expected:
            self.frames.append(expected)
        return expected

    def finish(self) -> None:
        """Lets everybody do all they can."""
        while self.read() or any(oracle.has_input() for oracle in self.oracles):
            for k in range(self.config.num_decoders):
                self.turn(k)

    def restart(self, k: int) -> None:
        """Throws decoder k away and makes it anew, as after its death."""
        self.pipe.decoders[k] = _native.Decoder(self.pipe.segment.core, k, 0.0)

    def outputs(self) -> list[Output]:
        """Lets everybody do all they can; returns the outputs since the last call."""
        self.finish()
        found = [o for frame in self.frames for o in frame.outputs]
        self.frames.clear()
        return found

    # ------------------------------------------------------------ what came out

    def counters(self, k: int) -> dict[str, int]:
        """The committed counters of decoder k that are not 0."""
        record = self._view.commits()[k]["counters"]
        found = {n: record[n].tolist() for n in record.dtype.names if n != "pad_"}
        heads = found.pop("spec_heads")
        found.update({f"head_{j}": count for j, count in enumerate(heads)})
        return {name: value for name, value in found.items() if value}

    def _next_frame(self, k: int) -> Frame | None:
        client, config = self.pipe.client, self.config
        head = client.head(k)
        if head is None:
            return None
        batch = OutputBatch(
            memoryview(self.pipe.segment.core_memory).toreadonly(),
            head[1],
            config.max_request_id_bytes,
            self.pipe.maker,
            self.pipe.requests.resolve,
            None,
        )
        frame = frame_of(batch)
        client.take(k)
        client.release(k)
        return frame

    def _compare_endings(self, k: int) -> None:
        oracle = self.oracles[k]
        found = {e[0]: e[1:4] for e in self.pipe.book.endings(k)[1]}
        for row, (generation, terminal, acknowledged) in found.items():
            p = oracle.progress[row]
            assert (generation, terminal, acknowledged) == (p.generation, p.reason, p.acknowledged)


def _floats(bits: list[Any], shape: tuple[int, ...]) -> Any:
    return np.array(bits, np.uint32).view(np.float32).reshape(shape)


def _padded(step: Step, tokens: list[list[int]], depth: int) -> Step:
    """The step's token columns as [n, depth], filled with what nobody may see."""
    pad = Step(step.kind, 0, 0, [], [], [])
    first = 0
    for row in tokens:
        for j in range(depth):
            place = first + j if j < len(row) else -1
            pad.tokens.append(step.tokens[place] if place >= 0 else -7)
            if step.width:
                pad.topk_ids.append(step.topk_ids[place] if place >= 0 else [-7] * step.width)
                pad.logprobs.append(step.logprobs[place] if place >= 0 else [7] * step.width)
                pad.ranks.append(step.ranks[place] if place >= 0 else -7)
        first += len(row)
    return pad


def frame_of(batch: OutputBatch) -> Frame:
    """A batch's columns as plain values; floats as their bits."""
    offsets, drafts = batch.token_offsets.tolist(), batch.draft_offsets.tolist()
    tokens, draft_ids = batch.token_ids.tolist(), batch.draft_token_ids.tolist()
    has_candidates = batch.width and batch.kind != "pooling"
    ids, ranks = batch.topk_ids.tolist(), batch.ranks.tolist()
    bits = batch.topk_logprobs.view(np.uint32).tolist() if has_candidates else []
    finals = {
        int(f["index"]): Final(
            batch.final_id(i),
            int(f["num_tokens"]),
            int(f["prompt_tokens"]),
            int(f["arrival_ns"]),
            int(f["first_token_ns"]),
            int(f["last_token_ns"]),
            int(f["spec_steps"]),
            f["heads"].tolist(),
        )
        for i, f in enumerate(batch.finals)
    }
    outputs = []
    for i in range(batch.num_rows):
        part = slice(offsets[i], offsets[i + 1])
        output = Output(
            int(batch.row[i]),
            int(batch.generation[i]),
            int(batch.send_idx[i]),
            tokens=tokens[part],
            reason=int(batch.finish_reason[i]),
            first_token_ns=int(batch.first_token_ns[i]),
            final=finals.get(i),
        )
        if has_candidates:
            output.topk_ids, output.logprobs = ids[part], bits[part]
            output.ranks = ranks[part]
        if batch.num_drafts:
            output.drafts = draft_ids[drafts[i] : drafts[i + 1]]
        if batch.kind == "pooling" and output.reason == FinishReason.STOP:
            vector = batch.vectors[i].view(np.uint32).tolist() if batch.width else []
            output.vector = vector
        outputs.append(output)
    return Frame(
        number=batch.number,
        sequence=batch.source_sequence,
        kind=batch.kind,
        saved_ns=batch.saved_ns,
        has_slot=batch.has_slot,
        width=batch.width,
        num_firsts=batch.num_firsts,
        outputs=outputs,
    )


# --- any messages at all

ROWS = 5
EOS = (7, 2**31 - 1)
DEPTH = 4

SETTINGS = st.fixed_dictionaries(
    {
        "num_decoders": st.sampled_from([1, 2, 3]),
        "role": st.sampled_from(["mixed", "mixed", "prefill", "decode"]),
        "internal_adapter": st.booleans(),
        "enable_draft_logprob": st.booleans(),
        "top_logprobs": st.sampled_from([0, 3]),
    }
)
ADMISSIONS = st.fixed_dictionaries(
    {
        "eos": st.sampled_from([(), EOS[:1], EOS]),
        "max_tokens": st.sampled_from([0, 0, 3, 9]),
        "num_emitted": st.sampled_from([0, 0, 1]),
        "num_chunks": st.sampled_from([0, 0, 0, 1, 3]),
        "is_disaggregated": st.booleans(),
        "arrival_ns": st.sampled_from([1, 5]),
        "num_prompt_tokens": st.sampled_from([1, 4]),
    }
)
STEP_ROWS = st.lists(
    st.tuples(
        st.sampled_from(range(ROWS)),
        st.sampled_from([*["live"] * 8, "padded", "stale", "future"]),
        st.sampled_from([*[0] * 9, 1, 2, 3]),
        st.integers(0, DEPTH),  # tokens
        st.sampled_from([*["right"] * 6, "unknown", "again", "hole"]),
        st.sampled_from([*["new"] * 7, EOS[0], EOS[1], 0, -1]),  # one of its tokens
        st.integers(0, DEPTH - 1),  # which one
    ),
    min_size=1,
    max_size=ROWS + 2,
)
STEPS = st.fixed_dictionaries(
    {
        "op": st.just("step"),
        "kind": st.sampled_from([*["tokens"] * 6, "draft", "pooling", "prompt"]),
        "speculative": st.booleans(),
        "has_positions": st.booleans(),
        "width": st.integers(0, 4),
        "rows": STEP_ROWS,
        "spoilt": st.sampled_from([*[""] * 12, "bytes", "flags", "state", "row", "accept", "sum"]),
        "seed": st.integers(0, 2**32 - 1),
    }
)
ROW_OPS = st.fixed_dictionaries(
    {
        "op": st.sampled_from(["admit", "admit", "mark", "tell"]),
        "row": st.sampled_from(range(ROWS)),
        "about": ADMISSIONS,
        "reason": st.sampled_from([FinishReason.ABORT, FinishReason.ERROR, FinishReason.SHUTDOWN]),
    }
)
OTHER_OPS = st.fixed_dictionaries(
    {
        "op": st.sampled_from(["read", "read", "turn", "turn", "turn", "restart"]),
        "decoder": st.integers(0, 2),
    }
)
OPS = st.lists(st.one_of(STEPS, STEPS, ROW_OPS, OTHER_OPS, OTHER_OPS), min_size=4, max_size=40)


class Scheduler:
    """Turns drawn operations into steps; knows the position that each request is at."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.position = [0] * ROWS
        self.chunks = [0] * ROWS
        self.fresh = itertools.count(100)

    def admit(self, row: int, about: dict[str, Any]) -> None:
        if not self.twin.is_free(row):
            return
        about = dict(about)
        if about["max_tokens"]:
            about["max_tokens"] += about["num_emitted"]
        self.twin.admit(row, **about)
        self.position[row] = about["num_emitted"]
        self.chunks[row] = max(0, about["num_chunks"] - 1)

    def step(self, op: dict[str, Any]) -> None:
        kind, drawn, twin = op["kind"], op["rows"], self.twin
        if kind == "prompt" and len(drawn) > ROWS // twin.config.num_decoders:
            drawn = drawn[:1]
        drawn = drawn[:ROWS]
        speculative = op["speculative"] or kind == "draft"
        rows = [d[0] for d in drawn]
        generations = [self._generation(d[0], d[1]) for d in drawn]
        states = [d[2] for d in drawn]
        tokens, wrong = self._tokens(drawn, kind == "prompt" or speculative)
        positions = None
        if op["has_positions"] or kind == "prompt":
            positions = [
                self._position(d[0], d[4], len(t)) for d, t in zip(drawn, tokens, strict=True)
            ]
        if kind == "prompt" and positions is not None:
            positions = [max(0, p) for p in positions]
        if kind == "pooling":
            positions, speculative, wrong = None, False, []
        step = twin.save(
            rows,
            tokens,
            kind=kind,
            generations=generations,
            states=states,
            speculative=speculative,
            positions=positions,
            width=min(op["width"], twin.config.top_logprobs + 1),
            seed=op["seed"],
        )
        counts = step.accept or [1] * len(rows)
        for i, j in wrong:
            if j < counts[i]:
                twin.spoil_token(step, sum(counts[:i]) + j, -1 - next(self.fresh) % 9)
        if kind == "tokens":
            self._advance(drawn, tokens)
        self._spoil(step, op["spoilt"])

    def _generation(self, row: int, which: str) -> int:
        live = self.twin.generation[row]
        return {"live": live, "padded": 0, "stale": max(0, live - 1), "future": live + 1}[which]

    def _tokens(
        self, drawn: list[Any], is_packed: bool
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        columns, wrong = [], []
        for i, (_row, _generation, state, count, _position, special, place) in enumerate(drawn):
            column = [next(self.fresh) for _ in range(count if is_packed else 1)]
            if is_packed and state:
                column = []
            if column and special != "new":
                place %= len(column)
                if special == -1:
                    wrong.append((i, place))  # the writer would refuse it
                else:
                    column[place] = special
            columns.append(column)
        return columns, wrong

    def _position(self, row: int, which: str, count: int) -> int:
        right = self.position[row]
        return {"right": right, "unknown": -1, "again": max(0, right - 2), "hole": right + 1}[which]

    def _advance(self, drawn: list[Any], tokens: list[list[int]]) -> None:
        for (row, which, state, *_), column in zip(drawn, tokens, strict=True):
            if which != "live" or state or not column:
                continue
            if self.chunks[row]:
                self.chunks[row] -= 1
            else:
                self.position[row] += len(column)

    def _spoil(self, step: Step, how: str) -> None:
        twin = self.twin
        if how == "bytes":
            twin.spoil_header(step, "bytes", body_bytes=int(twin.header(step)["body_bytes"]) + 16)
        elif how == "flags":
            twin.spoil_header(step, "flags", flags=int(twin.header(step)["flags"]) | 1 << 9)
        elif how == "state":
            twin.spoil_state(step, 0, 4)
        elif how == "row":
            twin.spoil_row(step, 0, ROWS + step.rows[0])
        elif how in ("accept", "sum") and step.accept is not None:
            twin.spoil_accept(step, 0, -3 if how == "accept" else step.accept[0] + 1)

    def do(self, op: dict[str, Any]) -> None:
        twin = self.twin
        name, decoder = op["op"], op.get("decoder", 0) % twin.config.num_decoders
        if name == "step":
            self.step(op)
        elif name == "admit":
            self.admit(op["row"], op["about"])
        elif name == "mark":
            twin.mark(op["row"], op["reason"])
        elif name == "tell":
            twin.tell(op["row"])
        elif name == "read":
            twin.read()
        elif name == "turn":
            twin.turn(decoder)
        else:
            twin.restart(decoder)


def compare(config: dict[str, Any], first: list[dict[str, Any]], ops: list[dict[str, Any]]) -> None:
    with Twin(
        max_num_seqs=ROWS,
        max_draft_tokens=DEPTH,
        speculative_method="mtp",
        num_speculative_tokens=DEPTH - 1,
        max_pooling_floats=6,
        **config,
    ) as twin:
        scheduler = Scheduler(twin)
        for row, about in enumerate(first):
            scheduler.admit(row, about)
        for op in ops:
            scheduler.do(op)
        twin.finish()
        for k in range(twin.config.num_decoders):
            count = twin.counters(k)
            dropped = sum(v for name, v in count.items() if name.startswith("dropped_"))
            assert count.get("tokens_seen", 0) == count.get("tokens_delivered", 0) + dropped


FIRST = st.lists(ADMISSIONS, min_size=ROWS - 1, max_size=ROWS - 1)
CHECKS = settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@CHECKS
@given(SETTINGS, FIRST, OPS)
def test_the_decoder_equals_the_oracle(
    config: dict[str, Any], first: list[dict[str, Any]], ops: list[dict[str, Any]]
) -> None:
    compare(config, first, ops)


@pytest.mark.full
@settings(CHECKS, max_examples=20_000)
@given(SETTINGS, FIRST, OPS)
@pytest.mark.timeout(1800)
def test_the_decoder_equals_the_oracle_at_length(
    config: dict[str, Any], first: list[dict[str, Any]], ops: list[dict[str, Any]]
) -> None:
    compare(config, first, ops)


# --- one claim each


def twin_of(num_decoders: int = 1, **more: Any) -> Twin:
    """Five rows, of which the test says what runs there."""
    about = {
        "max_num_seqs": ROWS,
        "max_draft_tokens": DEPTH,
        "num_decoders": num_decoders,
        "top_logprobs": 3,
        "max_pooling_floats": 6,
        "speculative_method": "mtp",
        "num_speculative_tokens": DEPTH - 1,
    }
    return Twin(**{**about, **more})


each_split = pytest.mark.parametrize("num_decoders", [1, 2, 3], ids=lambda n: f"{n}-decoders")


def told(outputs: list[Output]) -> dict[int, list[tuple[int, list[int], int]]]:
    """row: (send_idx, tokens, reason) of each of its outputs."""
    found: dict[int, list[tuple[int, list[int], int]]] = {}
    for o in outputs:
        found.setdefault(o.row, []).append((o.send_idx, o.tokens, o.reason))
    return found


@each_split
def test_a_negative_token_ends_its_row_and_no_other(num_decoders: int) -> None:
    with twin_of(num_decoders) as twin:
        for row in range(3):
            twin.admit(row, eos=EOS)
        step = twin.save([0, 1, 2], [[10, 11], [20, 21, 22], [30]], speculative=True, width=2)
        twin.spoil_token(step, 3, -9)
        twin.save([0, 1, 2], [[12], [23], [31]], speculative=True)
        found = told(twin.outputs())
        assert found[0] == [(0, [10, 11], 0), (2, [12], 0)]
        assert found[1] == [(0, [20], FinishReason.ERROR)]
        assert found[2] == [(0, [30], 0), (1, [31], 0)]
        total = twin.pipe.counters()
        assert total["dropped_bad_row"] == 2
        assert total["dropped_finished"] == 1


@each_split
@pytest.mark.parametrize("token", [-1, -2, -3, -4, -9, -(2**31)])
def test_every_negative_token_is_an_error_in_band(num_decoders: int, token: int) -> None:
    with twin_of(num_decoders) as twin:
        twin.admit(1, eos=EOS)
        twin.spoil_token(twin.save([1], [[5]]), 0, token)
        assert told(twin.outputs()) == {1: [(0, [], FinishReason.ERROR)]}


@each_split
def test_a_row_out_of_range_is_counted_and_costs_nobody(num_decoders: int) -> None:
    with twin_of(num_decoders) as twin:
        for row in range(3):
            twin.admit(row)
        for bad in (ROWS, ROWS + 1, 2**32 - 1):
            step = twin.save([0, 1, 2], [[10], [20], [30]])
            twin.spoil_row(step, 1, bad)
        found = told(twin.outputs())
        assert found == {0: [(i, [10], 0) for i in range(3)], 2: [(i, [30], 0) for i in range(3)]}
        assert twin.pipe.counters()["dropped_bad_row"] == 3


@each_split
def test_a_bad_state_costs_its_neighbours_nothing(num_decoders: int) -> None:
    with twin_of(num_decoders) as twin:
        for row in range(3):
            twin.admit(row)
        twin.spoil_state(twin.save([0, 1, 2], [[10], [20], [30]]), 1, 4)
        twin.spoil_state(twin.save([0, 1, 2], [[11], [21], [31]]), 1, 255)
        found = told(twin.outputs())
        assert found[0] == [(0, [10], 0), (1, [11], 0)]
        assert found[2] == [(0, [30], 0), (1, [31], 0)]


def test_a_bad_state_is_an_error_of_its_row() -> None:
    with twin_of() as twin:
        twin.admit(0)
        twin.spoil_state(twin.save([0], [[10]]), 0, 4)
        assert [o.reason for o in twin.outputs()] == [FinishReason.ERROR]


@each_split
@pytest.mark.parametrize("count", [-9, -3, -1, 0, 3, DEPTH + 1])
def test_accept_counts_that_do_not_add_up_refuse_the_step_once(
    num_decoders: int, count: int
) -> None:
    with twin_of(num_decoders) as twin:
        twin.admit(0)
        twin.admit(1)
        step = twin.save([0, 1], [[10, 11], [20]], speculative=True)
        twin.spoil_accept(step, 0, count)
        twin.save([0, 1], [[10, 11], [20]], speculative=True)
        assert told(twin.outputs()) == {0: [(0, [10, 11], 0)], 1: [(0, [20], 0)]}
        total = twin.pipe.counters()
        assert (total["bad_tokens"], total["dropped_bad_row"], total["tokens_seen"]) == (1, 3, 6)


def test_a_negative_accept_count_costs_its_row_only() -> None:
    with twin_of() as twin:
        twin.admit(0)
        twin.admit(1)
        step = twin.save([0, 1], [[], [20]], speculative=True)
        twin.spoil_accept(step, 0, -3)
        twin.read()
        twin.pipe.decoders[0].run(1, 0.0)
        frame = twin._next_frame(0)
        assert frame is not None
        assert told(frame.outputs)[1] == [(0, [20], 0)]


BAD_HEADERS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    # how the step is saved, and what is then written over its header
    "rows": ("rows", {}, {"num_rows": ROWS + 1, "num_tokens": ROWS + 1}),
    "rows, most": ("tokens", {}, {"num_rows": 2**32 - 1}),
    "width": ("width", {"width": 2}, {"width": 5}),
    "width, most": ("width", {"width": 2}, {"width": 2**32 - 1}),
    "width, speculative": ("width", {"width": 2, "speculative": True}, {"width": 5}),
    "width, pooling": ("width", {"kind": "pooling", "width": 2}, {"width": 7}),
    "width, prompt": ("width", {"kind": "prompt", "width": 2, "positions": [0]}, {"width": 5}),
    "tokens": ("tokens", {}, {"num_tokens": 2}),
    "tokens, top-k": ("tokens", {"width": 2}, {"num_tokens": 0}),
    "tokens, speculative": ("tokens", {"speculative": True}, {"num_tokens": DEPTH + 1}),
    "tokens, both": ("tokens", {"speculative": True, "width": 1}, {"num_tokens": 2**31}),
    "tokens, pooling": ("tokens", {"kind": "pooling", "width": 2}, {"num_tokens": 2}),
    "tokens, prompt": ("tokens", {"kind": "prompt", "positions": [0]}, {"num_tokens": 1000}),
    "bytes": ("bytes", {}, {"body_bytes": 0}),
    "bytes, more": ("bytes", {"width": 2}, {"body_bytes": 2**32 - 1}),
    "bytes, rows": ("bytes", {}, {"num_rows": ROWS, "num_tokens": ROWS}),
    "bytes, positions": ("bytes", {"positions": [0]}, {"flags": 4}),
    "flags": ("flags", {}, {"flags": 4 | 1 << 5}),
    "flags, most": ("flags", {"speculative": True}, {"flags": 2**32 - 1 - POOLING - PROMPT}),
    "message": ("flags", {}, {"message_flag": 0}),
    "message, most": ("flags", {"width": 1}, {"message_flag": 2**32 - 1}),
    "pooling and accept": ("flags", {"kind": "pooling", "width": 1}, {"flags": POOLING | ACCEPT}),
    "pooling and prompt": ("flags", {"kind": "pooling", "width": 1}, {"flags": POOLING | PROMPT}),
    "pooling drafts": ("flags", {"kind": "pooling", "width": 1}, {"message_flag": DRAFT}),
    "prompt of nobody": ("flags", {"kind": "prompt", "positions": [0]}, {"flags": PROMPT}),
    "prompt anywhere": ("flags", {"kind": "prompt", "positions": [0]}, {"flags": PROMPT | ACCEPT}),
    "prompt drafts": ("flags", {"kind": "prompt", "positions": [0]}, {"message_flag": DRAFT}),
    "an old step": ("sequence", {}, {"source_sequence": 2**64 - 1}),
    "a later step": ("sequence", {"width": 2}, {"source_sequence": 1}),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_is_counted_once_and_the_next_step_is_right(name: str) -> None:
    reason, how, header = BAD_HEADERS[name]
    with twin_of(num_decoders=2) as twin:
        twin.admit(0)
        twin.admit(1)
        twin.spoil_header(twin.save([1], [[10]], **how), reason, **header)
        twin.save([0, 1], [[11], [12]], width=3, seed=1)
        assert told(twin.outputs()) == {0: [(0, [11], 0)], 1: [(0, [12], 0)]}
        total = twin.pipe.counters()
        assert {n: total[f"bad_{n}"] for n in BAD[1:]} == {n: int(n == reason) for n in BAD[1:]}
        assert total["steps"] == 4  # each of two decoders saw both


def test_the_first_and_the_last_id_are_tokens_like_any_other() -> None:
    with twin_of() as twin:
        twin.admit(0, eos=(5,))
        twin.save([0], [[0, 2**31 - 1]], speculative=True, width=1)
        assert told(twin.outputs()) == {0: [(0, [0, 2**31 - 1], 0)]}


@pytest.mark.parametrize("token", [0, 2**31 - 1])
def test_the_first_and_the_last_id_may_end_a_request(token: int) -> None:
    with twin_of() as twin:
        twin.admit(0, eos=(5, token))
        twin.save([0], [[1, token, 2]], speculative=True)
        assert told(twin.outputs()) == {0: [(0, [1, token], FinishReason.STOP)]}


def test_each_of_the_end_tokens_ends_a_request() -> None:
    eos = (40, 30, 20, 10)
    with twin_of() as twin:
        for row, token in enumerate(eos):
            twin.admit(row, eos=eos)
            twin.save([row], [[token]])
        assert {r: o[0][2] for r, o in told(twin.outputs()).items()} == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("internal_adapter", [False, True])
@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_ids_candidates_ranks_and_counts_end_at_one_place(
    depth: int, internal_adapter: bool
) -> None:
    """B70, B71, B72: the end token at each place of each depth of accepted tokens."""
    for place in range(depth):
        with twin_of(internal_adapter=internal_adapter) as twin:
            twin.admit(0, eos=EOS)
            tokens = [10 + j for j in range(depth)]
            tokens[place] = EOS[1]
            twin.save([0], [tokens], speculative=True, width=3, seed=depth)
            [output] = twin.outputs()
            wanted = tokens[:place] if internal_adapter else tokens[: place + 1]
            assert output.tokens == wanted
            assert output.reason == FinishReason.STOP
            lengths = {len(output.topk_ids), len(output.logprobs), len(output.ranks)}
            assert lengths == {len(wanted)}
            total = twin.pipe.counters()
            assert total["tokens_delivered"] == len(wanted)
            assert total["dropped_finished"] == depth - place - 1
            assert output.final is not None
            assert sum(output.final.heads) == place + 1


def test_special_floats_come_out_bit_for_bit() -> None:
    bits = [[b] for b in SPECIAL_BITS]
    with twin_of(max_num_seqs=len(bits)) as twin:
        n = len(bits)
        for row in range(n):
            twin.admit(row)
        ids = np.full((n, 1), -1)
        floats = np.array(bits, np.uint32).view(np.float32)
        twin.pipe.writer.save_output_topk(
            np.arange(n), ids, floats, np.zeros(n, int), generations=[1] * n
        )
        twin.pipe.pump()
        [batch] = twin.pipe.batches()
        assert batch.topk_logprobs.view(np.uint32).tolist() == bits
        assert batch.logprobs.view(np.uint32).tolist() == [b[0] for b in bits]
        assert (batch.topk_ids == -1).all()


def test_float16_is_widened_exactly() -> None:
    """Every value of 16 bits, NaNs by being NaN."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    wanted, width = halves.astype(np.float32), 2**10
    with twin_of(max_num_seqs=64, top_logprobs=width - 1) as twin:
        for row in range(64):
            twin.admit(row)
        ids, ranks = np.zeros((64, width), np.int32), np.zeros(64, int)
        twin.pipe.writer.save_output_topk(
            np.arange(64), ids, halves.reshape(64, width), ranks, generations=[1] * 64
        )
        twin.pipe.pump()
        [batch] = twin.pipe.batches()
        found = batch.topk_logprobs.reshape(-1)
        same = found.view(np.uint32) == wanted.view(np.uint32)
        assert (same | (np.isnan(found) & np.isnan(wanted))).all()


def test_candidates_of_minus_one_are_kept_and_width_one_is_enough() -> None:
    with twin_of() as twin:
        twin.admit(0)
        twin.save([0], [[5]], width=1, seed=3)
        twin.save([0], [[6]], width=4, seed=4)
        twin.save([0], [[7]])
        one, four, none = twin.outputs()
        assert [len(o.topk_ids[0]) for o in (one, four)] == [1, 4]
        assert none.topk_ids == []
        assert any(-1 in o.topk_ids[0] for o in (one, four))


@pytest.mark.parametrize("width", [0, 1, 4])
def test_the_bytes_of_a_step_and_a_frame_follow_the_width_asked_for(width: int) -> None:
    """B80: not the widest that is configured."""
    with twin_of() as twin:
        twin.admit(0)
        step = twin.save([0], [[5] * DEPTH], speculative=True, width=width)
        body = int(twin.header(step)["body_bytes"])
        head = [("width", 0), ("tokens", 16), ("candidates", 2 * 16 * width), ("ranks", 16)]
        assert body == 4 * 16 + sum(b for name, b in head if width or name == "tokens")
        twin.read()
        twin.pipe.decode()
        frame = twin.pipe.client.head(0)
        assert frame is not None
        record = np.frombuffer(twin.pipe.segment.core_memory, FRAME, 1, frame[1])[0]
        assert record["width"] == width
        at = _native.frame_columns(1, DEPTH, width, 0, 0, twin.config.max_request_id_bytes, 0)
        assert at[9] == record["bytes"]  # no finals: they begin where the frame ends


def test_send_idx_counts_tokens_not_steps() -> None:
    with twin_of() as twin:
        twin.admit(0, num_emitted=1)
        for tokens in ([1, 2, 3], [4], [5, 6]):
            twin.save([0], [tokens], speculative=True)
        assert [o.send_idx for o in twin.outputs()] == [1, 4, 5]


def test_a_chunk_that_emits_nothing_does_not_count_as_one() -> None:
    """F48: only a step with a token is a chunk's."""
    with twin_of() as twin:
        twin.admit(0, num_chunks=2)
        for tokens in ([], [1], [], [2], [3]):
            twin.save([0], [tokens], speculative=True)
        assert told(twin.outputs()) == {0: [(0, [2], 0), (1, [3], 0)]}


def test_a_prefill_instance_delivers_its_first_token_and_shows_the_drafts() -> None:
    with twin_of(role="prefill") as twin:
        twin.admit(0, is_disaggregated=True)
        twin.admit(1, is_disaggregated=True)
        twin.admit(2)
        twin.save([0, 1, 2], [[11, 12], [21], [31, 32]], speculative=True)
        outputs = twin.outputs()
        assert told(outputs) == {0: [(0, [11], 1)], 1: [(0, [21], 1)], 2: [(0, [31, 32], 0)]}
        assert [o.drafts for o in outputs] == [[11, 12], [], []]
        assert twin.pipe.counters()["completions"] == 0


@each_split
def test_an_abort_ends_a_request_at_the_step_where_it_was_asked_for(num_decoders: int) -> None:
    """Tokens saved before it are delivered, those after it dropped, in the same turn or later."""
    with twin_of(num_decoders, role="decode") as twin:
        for row in range(2):
            twin.admit(row)
        twin.save([0, 1], [[10], [20]])
        twin.mark(0, FinishReason.ABORT)
        twin.save([0, 1], [[11], [21]])
        twin.save([0, 1], [[12], [22]])
        assert told(twin.outputs()) == {
            0: [(0, [10], 0), (1, [], FinishReason.ABORT)],
            1: [(0, [20], 0), (1, [21], 0), (2, [22], 0)],
        }
        assert twin.pipe.counters()["dropped_finished"] == 2


def test_a_decoder_made_anew_goes_on_exactly() -> None:
    with twin_of(2) as twin:
        for row in range(4):
            twin.admit(row, num_chunks=2, max_tokens=6, eos=EOS)
        for i in range(6):
            twin.save(list(range(4)), [[10 * i + j for j in range(2)]] * 4, speculative=True)
            while twin.read():
                pass
            for k in range(2):
                twin.turn(k)
                twin.restart(k)
        twin.finish()
        finals = [o.final for f in twin.frames for o in f.outputs if o.final]
        assert [f.num_tokens for f in finals] == [6] * 4
        assert [f.heads[:3] for f in finals] == [[3, 3, 0]] * 4


def test_a_restart_finds_what_the_turn_before_the_last_has_changed() -> None:
    """The two copies: the last turn wrote the other one, with what the turn before had changed."""
    with twin_of() as twin:
        twin.admit(0)
        twin.admit(1)
        for row, token in ((0, 10), (1, 20), (0, 11), (1, 21)):
            twin.save([row], [[token]])
            twin.finish()
            twin.restart(0)
        assert told(twin.outputs()) == {
            0: [(0, [10], 0), (1, [11], 0)],
            1: [(0, [20], 0), (1, [21], 0)],
        }


def test_a_restart_keeps_the_heads_of_one_token_a_step() -> None:
    with twin_of(max_draft_tokens=1, speculative_method="none", num_speculative_tokens=0) as twin:
        twin.admit(0, max_tokens=3)
        for token in (5, 6, 7):
            twin.save([0], [[token]], speculative=True)
            twin.finish()
            twin.restart(0)


# --- statistics and histograms

MS, S = 10**6, 10**9


def observed(twin: Twin, name: str) -> tuple[dict[int, int], int]:
    """What decoder 0's histogram holds: {bucket: count}, and the sum."""
    at = twin._plan["decoders"]
    record = np.frombuffer(twin.pipe.segment.core_memory, DECODER, 1, at)[0][name]
    counts = {i: int(c) for i, c in enumerate(record["count"]) if c}
    return counts, int(record["sum"])


def in_buckets(name: str, values: list[int]) -> tuple[dict[int, int], int]:
    """The same of values: each in the first bucket whose bound it does not exceed."""
    counts: dict[int, int] = {}
    for value in values:
        bucket = bisect.bisect_left(_native.BOUNDS[name], value)
        counts[bucket] = counts.get(bucket, 0) + 1
    return counts, sum(values)


def timed(twin: Twin, row: int, times: list[int], tokens: list[list[int]]) -> None:
    for now, column in zip(times, tokens, strict=True):
        twin.stamp(twin.save([row], [column], speculative=True), now)
        twin.finish()


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("name", ["time_to_first_token", "time_per_output_token"])
def test_a_value_at_a_bound_lands_in_its_bucket(name: str, offset: int) -> None:
    bounds = _native.BOUNDS[name]
    with twin_of(max_num_seqs=len(bounds)) as twin:
        start, values = 10 * S, [b + offset for b in bounds]
        for row, value in enumerate(values):
            twin.admit(row, arrival_ns=start)
            gap = [] if name == "time_to_first_token" else [start]
            timed(twin, row, [*gap, start + value], [[1]] * (len(gap) + 1))
        assert observed(twin, name) == in_buckets(name, values)


def test_a_gap_is_shared_by_the_tokens_of_its_step() -> None:
    with twin_of() as twin:
        twin.admit(0, arrival_ns=1 * S)
        timed(twin, 0, [1 * S + 30 * MS, 1 * S + 150 * MS, 2 * S], [[1, 2], [3, 4, 5], [6]])
        gaps = [40 * MS] * 3 + [850 * MS]
        assert observed(twin, "time_to_first_token") == in_buckets("time_to_first_token", [30 * MS])
        assert observed(twin, "time_per_output_token") == in_buckets("time_per_output_token", gaps)


def test_a_request_is_observed_once_in_each_of_its_histograms() -> None:
    with twin_of() as twin:
        request = tp.Request("a", prompt_token_ids=[1], max_tokens=5)
        stamps = {"arrival_ns": 1 * S, "preprocess_end_ns": 2 * S, "inference_start_ns": 4 * S}
        twin.pipe.submit(request, row=0, **stamps)
        twin.generation[0] = 1
        twin.oracles[0].admit(
            0, Admission(1, 0, "a", max_tokens=5, num_prompt_tokens=1, arrival_ns=1 * S)
        )
        timed(twin, 0, [5 * S, 9 * S], [[1, 2, 3], [4, 5]])
        wanted = {
            "time_to_first_token": [4 * S],
            "time_per_output_token": [2 * S, 2 * S],
            "request_queue_time": [2 * S],
            "request_prefill_time": [1 * S],
            "request_decode_time": [4 * S],
            "request_inference_time": [5 * S],
            "request_generation_tokens": [5],
            "request_token_ratio": [1000],  # one token a second, told per 1000 s
        }
        assert {n: observed(twin, n) for n in wanted} == {
            n: in_buckets(n, values) for n, values in wanted.items()
        }


def test_an_aborted_request_is_no_completion() -> None:
    with twin_of() as twin:
        twin.admit(0)
        twin.save([0], [[1]])
        twin.finish()
        twin.mark(0, FinishReason.ABORT)
        twin.finish()
        assert twin.pipe.counters()["completions"] == 0
        for name in ("request_decode_time", "request_generation_tokens"):
            assert observed(twin, name) == ({}, 0)


def test_a_requests_speculation_as_computed_by_hand() -> None:
    """behaviours.md section 5: n = 2, 2 tokens accepted and then 3, the last of them an end."""
    metrics = SpeculateMetrics.of([2, 2, 1, 0, 0, 0], 2, 2)
    assert metrics == SpeculateMetrics(
        accepted_tokens=5,
        rejected_tokens=1,
        accept_ratio=1 - 2 / 5,
        average_accept_length=2.5,
        accepted_tokens_per_head=[2, 2, 1],
        accept_ratio_per_head=[1.0, 0.5],
    )
    assert SpeculateMetrics.of([2, 1, 0, 0, 0, 0], 2, 2).accepted_tokens == 3
    with twin_of() as twin:
        twin.admit(0, eos=EOS)
        twin.save([0], [[1, 2]], speculative=True)
        twin.save([0], [[3, 4, EOS[0]]], speculative=True)
        final = twin.outputs()[-1].final
        assert final is not None
        assert SpeculateMetrics.of(final.heads, final.spec_steps, 2) == metrics


def test_nothing_accepted_is_a_ratio_of_zero() -> None:
    """F16: a recovery before the first token."""
    assert SpeculateMetrics.of([0] * 6, 0, 2) == SpeculateMetrics(0, 0, 0.0, 0.0, [0] * 3, [0] * 2)


def scraped(twin: Twin, name: str) -> float:
    for line in Exporter(twin.pipe.segment).scrape().decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise AssertionError(f"{name} is not exported")


@pytest.mark.parametrize(
    ("method", "heads", "rows", "wanted"),
    [
        # behaviours.md section 5; the ids of the second are 3 of one row: 2 drafts of 3 tokens.
        (
            "mtp",
            [2, 3, 0],
            2,
            {
                "num_accepted_tokens_total": 3,
                "num_emitted_tokens_total": 5,
                "num_draft_tokens_total": 4,
                "draft_acceptance_rate": 3 / 4,
                "efficiency": 5 / 6,
                "draft_single_head_acceptance_rate_0": 1.5,
                "draft_single_head_acceptance_rate_1": 0,
            },
        ),
        ("ngram", [1, 1, 1], 1, {"draft_acceptance_rate": 2 / 3, "num_emitted_tokens_total": 3}),
        ("mtp", [0, 0, 0], 0, {"draft_acceptance_rate": 0, "efficiency": 0}),
    ],
)
def test_the_process_figures_of_speculation_as_computed_by_hand(
    method: str, heads: list[int], rows: int, wanted: dict[str, float]
) -> None:
    with twin_of(speculative_method=method, num_speculative_tokens=2) as twin:
        memory, at = twin.pipe.segment.core_memory, twin._plan["decoders"]
        for copy in np.frombuffer(memory, DECODER, 1, at)[0]["commit"]:
            copy["counters"]["spec_heads"][: len(heads)] = heads
            copy["counters"]["spec_rows"] = rows
        prefix = "fastdeploy:spec_decode_"
        assert {n: scraped(twin, prefix + n) for n in wanted} == pytest.approx(wanted)


def test_rows_that_emit_nothing_are_no_speculative_steps() -> None:
    """F36, F37: accept 0, a recovery and an acknowledgement are not counted."""
    with twin_of() as twin:
        for row in range(4):
            twin.admit(row)
        twin.save([0, 1, 2, 3], [[1, 2], [], [], []], states=[0, 0, 2, 3], speculative=True)
        finals = {o.row: o for o in twin.outputs()}
        assert twin.pipe.counters()["spec_rows"] == 1
        assert finals[2].final is not None
        assert finals[2].final.spec_steps == 0
