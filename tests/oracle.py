"""What a decoder must do in a turn, in plain Python and written to be read.

The fast one is cuda_ops/decoder.hpp; tests/test_decoder.py shows that both give the same frames and
counters for the same messages. Columns are lists as on the wire; candidates and logprobs pass
through untouched, so they may be anything (the tests use the bits of each float).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

TOKEN, NONE, RECOVERY, ACKNOWLEDGED = range(4)  # states of a row
GOES_ON, STOP, LENGTH, ABORT, RECOVERED, ERROR, SHUTDOWN = range(7)  # reasons
REASONS = ("", "stop", "length", "abort", "recovery", "error", "shutdown")
BAD = (
    *("", "rows", "width", "tokens", "bytes", "flags", "sequence", "message"),
)  # why a step was refused
NUM_HEADS = 16


@dataclass
class Step:
    """One message of the engine: n rows, m tokens, T candidates a token (0: none)."""

    kind: str  # tokens, draft, pooling, prompt
    sequence: int
    saved_ns: int
    rows: list[int]
    generations: list[int]
    states: list[int]
    tokens: list[int] = field(default_factory=list)  # [m]
    accept: list[int] | None = None  # [n]; None: one token a row
    positions: list[int] | None = None  # [n]; -1: unknown
    topk_ids: list[Any] = field(default_factory=list)  # [m] of T
    logprobs: list[Any] = field(default_factory=list)  # [m] of T
    ranks: list[int] = field(default_factory=list)  # [m]
    vectors: list[Any] = field(default_factory=list)  # [n], of a pooling step
    width: int = 0
    bad: int = 0


@dataclass
class Admission:
    """What a decoder knows of a row's request."""

    generation: int
    from_sequence: int
    request_id: str
    eos: tuple[int, ...] = ()
    max_tokens: int = 0
    num_emitted: int = 0
    num_prompt_tokens: int = 0
    num_chunks: int = 0
    is_disaggregated: bool = False
    arrival_ns: int = 1
    acknowledge_from: int | None = None  # the engine was told at this sequence to let the row go


@dataclass
class Progress:
    """How far the request of a row has come."""

    generation: int = 0
    emitted: int = 0
    reason: int = GOES_ON
    acknowledged: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    chunks: int = 0
    last_send_idx: int | None = 0  # where the drafts of the last target step belong
    spec_steps: int = 0
    heads: list[int] = field(default_factory=lambda: [0] * NUM_HEADS)


@dataclass
class Final:
    """What only the last output of a request carries."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    arrival_ns: int
    first_token_ns: int
    last_token_ns: int
    spec_steps: int
    heads: list[int]


@dataclass
class Output:
    """One row of a frame."""

    row: int
    generation: int
    send_idx: int
    tokens: list[int] = field(default_factory=list)
    topk_ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    reason: int = GOES_ON
    drafts: list[int] = field(default_factory=list)
    vector: Any = None
    first_token_ns: int = 0
    final: Final | None = None


@dataclass
class Frame:
    """The outputs of one turn."""

    number: int
    sequence: int
    kind: str
    saved_ns: int
    has_slot: bool
    width: int
    num_firsts: int
    outputs: list[Output]


@dataclass
class Options:
    """What a decoder must know of the configuration."""

    max_num_seqs: int
    num_decoders: int = 1
    max_draft_tokens: int = 1
    role: str = "mixed"
    internal_adapter: bool = False
    enable_draft_logprob: bool = False


class Oracle:
    """Decoder `index` of `options.num_decoders`: it owns the rows with row % N == index."""

    def __init__(self, options: Options, index: int = 0) -> None:
        self.options, self.index = options, index
        self.admissions: dict[int, Admission] = {}
        self.marks: dict[int, tuple[int, int, int]] = {}  # row: generation, reason, from_sequence
        self.progress = {r: Progress() for r in range(index, options.max_num_seqs, self._step)}
        self.waiting: list[Step] = []
        self.next_sequence = 0
        self.num_frames = 0
        self.count: Counter[str] = Counter()

    @property
    def _step(self) -> int:
        return self.options.num_decoders

    # ------------------------------------------------------------ what others store

    def admit(self, row: int, admission: Admission) -> None:
        """A new request holds the row; its steps are those from `from_sequence` on."""
        if row in self.progress:
            self.admissions[row] = admission
            self.marks.pop(row, None)

    def mark(self, row: int, generation: int, reason: int, from_sequence: int) -> None:
        """The request of the row ends before step `from_sequence`. A mark that stands stays."""
        if row in self.progress and self.marks.get(row, (0,))[0] != generation:
            self.marks[row] = generation, reason, from_sequence

    def tell(self, row: int, generation: int, from_sequence: int) -> None:
        """The engine is told to let the row go: what it says from then on is its answer."""
        admission = self.admissions.get(row)
        if admission is not None and admission.generation == generation:
            admission.acknowledge_from = from_sequence

    def _mark_at(self, row: int, sequence: int) -> int:
        generation, reason, from_sequence = self.marks.get(row, (0, 0, 0))
        admission, p = self.admissions.get(row), self.progress[row]
        if admission is None or generation != admission.generation or sequence < from_sequence:
            return GOES_ON
        has_ended = p.generation == generation and p.reason != GOES_ON
        return GOES_ON if has_ended else reason

    # ------------------------------------------------------------ a turn

    def has_input(self) -> bool:
        """Whether a turn would do something."""
        return bool(self.waiting) or any(
            self._mark_at(r, self.next_sequence) for r in self.progress
        )

    def turn(self) -> Frame | None:
        """Takes the next step, or the marks alone; returns what goes out."""
        step = self.waiting.pop(0) if self.waiting else None
        at = step.sequence if step else self.next_sequence
        self._outputs: list[Output] = []
        self._num_firsts = 0
        self._visited: set[int] = set()
        self._marked = {r: m for r in self.progress if (m := self._mark_at(r, at))}
        for row, admission in self.admissions.items():
            if self.progress[row].generation != admission.generation:
                self.progress[row] = Progress(admission.generation, admission.num_emitted)
        if step:
            self.next_sequence = step.sequence + 1
            self._decode(step)
        if step is None or step.kind not in ("draft", "prompt"):  # they hold nothing else
            for row, reason in sorted(self._marked.items()):
                self._end(self._output(row, self.progress[row].emitted), reason)
        ends_drafts = step is not None and step.kind == "draft"
        if not self._outputs and not (ends_drafts and self.options.enable_draft_logprob):
            return None
        for o in self._outputs:
            o.first_token_ns = self.progress[o.row].first_token_ns
        has_candidates = step and (step.kind == "pooling" or any(o.tokens for o in self._outputs))
        frame = Frame(
            number=self.num_frames,
            sequence=at,
            kind=step.kind if step else "tokens",
            saved_ns=step.saved_ns if step else 0,
            has_slot=step is not None,
            width=step.width if step and has_candidates else 0,
            num_firsts=self._num_firsts,
            outputs=self._outputs,
        )
        self.num_frames += 1
        return frame

    def _decode(self, step: Step) -> None:
        self.count["steps"] += 1
        if step.bad:
            self._count_once("bad_" + BAD[step.bad])
            return
        accept = [1] * len(step.rows) if step.accept is None else step.accept
        most = len(step.tokens) if step.kind == "prompt" else self.options.max_draft_tokens
        is_bad = [not 0 <= a <= most for a in accept]
        accept = [0 if bad else a for a, bad in zip(accept, is_bad, strict=True)]
        if step.accept is not None and sum(accept) != len(step.tokens):
            # Nobody can tell whose tokens these are.
            lost = len(step.tokens) if step.kind == "tokens" else 0
            self._count_once("bad_tokens")
            self._count_once("tokens_seen", lost)
            self._count_once("dropped_bad_row", lost)
            return
        first = 0
        for i, (row, num) in enumerate(zip(step.rows, accept, strict=True)):
            if row % self._step == self.index:
                self._decode_row(step, i, row, range(first, first + num), is_bad[i])
            first += num

    def _count_once(self, name: str, value: int = 1) -> None:
        if self.index == 0:  # every decoder sees every step
            self.count[name] += value

    def _decode_row(self, step: Step, i: int, row: int, places: range, is_bad: bool) -> None:
        state, generation = step.states[i], step.generations[i]
        is_bad = is_bad or state > ACKNOWLEDGED
        if state != TOKEN and not is_bad:
            places = places[:0]
        owed = len(places) if step.kind == "tokens" else 0
        self.count["rows_seen"] += 1
        self.count["tokens_seen"] += owed
        why_not = self._refusal(step, row, generation)
        if why_not:
            self.count["dropped_" + why_not] += owed
            return
        p = self.progress[row]
        if self.options.enable_draft_logprob and step.kind != "draft":
            p.last_send_idx = None  # until this step gives the row something
        if state == ACKNOWLEDGED:
            told_at = self.admissions[row].acknowledge_from
            if told_at is not None and step.sequence >= told_at:
                p.acknowledged = generation
                self.count["acknowledgements"] += 1
        elif state == NONE:
            pass
        elif p.reason != GOES_ON or row in self._marked:
            self.count["dropped_finished"] += owed
        elif is_bad:
            self.count["dropped_bad_row"] += owed
            self._end(self._output(row, p.emitted), ERROR, step)
        elif step.kind == "draft":
            self._pass_drafts(step, i, row, places)
        elif step.kind == "prompt":
            if places:
                assert step.positions is not None
                self.count["prompt_rows"] += 1
                self._output(row, step.positions[i], step, places)
        elif state == RECOVERY:
            self._end(self._output(row, p.emitted), RECOVERED, step)
        elif step.kind == "pooling":
            output = self._output(row, p.emitted)
            output.vector = step.vectors[i]
            self._end(output, STOP, step)
        elif places:
            self._take_tokens(step, i, row, places)

    def _refusal(self, step: Step, row: int, generation: int) -> str:
        if row >= self.options.max_num_seqs:
            return "bad_row"
        if generation == 0:
            return "padded"
        admission = self.admissions.get(row)
        if admission is None or generation > admission.generation:
            return "unadmitted"
        if generation < admission.generation:
            return "stale"
        if step.sequence < admission.from_sequence:
            return "early"
        if row in self._visited:
            return "repeated"
        self._visited.add(row)
        return ""

    def _pass_drafts(self, step: Step, i: int, row: int, places: range) -> None:
        self.count["draft_rows_seen"] += 1
        position = -1 if step.positions is None else step.positions[i]
        send_idx = position if position >= 0 else self.progress[row].last_send_idx
        if self.options.enable_draft_logprob and places and send_idx is not None:
            self.count["draft_rows_delivered"] += 1
            self._output(row, send_idx, step, places)

    def _take_tokens(self, step: Step, i: int, row: int, places: range) -> None:
        p, admission = self.progress[row], self.admissions[row]
        if p.chunks < admission.num_chunks:
            p.chunks += 1
            if p.chunks < admission.num_chunks:
                self.count["dropped_chunk"] += len(places)
                return
        position = -1 if step.positions is None else step.positions[i]
        if position > p.emitted:  # tokens are missing before this one
            self.count["dropped_bad_row"] += len(places)
            self._end(self._output(row, p.emitted), ERROR, step)
            return
        if position >= 0:
            again = min(len(places), p.emitted - position)
            self.count["dropped_repeated"] += again
            places = places[again:]
        if places:
            self._emit(step, row, places)

    def _emit(self, step: Step, row: int, places: range) -> None:
        p, admission = self.progress[row], self.admissions[row]
        is_prefill = self.options.role == "prefill" and admission.is_disaggregated
        taken, shown, reason = 0, 0, GOES_ON
        for place in places:
            token = step.tokens[place]
            if token < 0:
                reason = ERROR
                break
            taken += 1
            is_end = token in admission.eos
            if not (is_end and self.options.internal_adapter):
                shown += 1
            if is_end or is_prefill:
                reason = STOP
            elif admission.max_tokens and p.emitted + taken >= admission.max_tokens:
                reason = LENGTH
            if reason:
                break
        output = self._output(row, p.emitted, step, places[:shown])
        if is_prefill and reason == STOP and len(places) > 1:
            output.drafts = [step.tokens[place] for place in places]
        self.count["tokens_delivered"] += shown
        self.count["dropped_adapter"] += taken - shown
        why = "bad_row" if reason == ERROR else "prefill" if is_prefill else "finished"
        self.count["dropped_" + why] += len(places) - taken
        if taken:
            if p.first_token_ns == 0:
                p.first_token_ns = step.saved_ns
                self._num_firsts += 1
            p.last_token_ns = step.saved_ns
            p.last_send_idx = p.emitted
            p.emitted += taken
            if step.accept is not None:
                self.count["spec_rows"] += 1
                p.spec_steps += 1
                for head in range(taken):
                    self.count[f"head_{head}"] += 1
                    p.heads[head] += 1
        if reason:
            self._end(output, reason, step)

    def _output(
        self, row: int, send_idx: int, step: Step | None = None, places: range = range(0)
    ) -> Output:
        output = Output(row, self.progress[row].generation, send_idx)
        if step is not None:
            output.tokens = [step.tokens[place] for place in places]
            if step.width:
                output.topk_ids = [step.topk_ids[place] for place in places]
                output.logprobs = [step.logprobs[place] for place in places]
                output.ranks = [step.ranks[place] for place in places]
        self._outputs.append(output)
        return output

    def _end(self, output: Output, reason: int, step: Step | None = None) -> None:
        """The request ends with this output; `step` is None when a mark ends it."""
        p, admission = self.progress[output.row], self.admissions[output.row]
        output.reason = p.reason = reason
        output.final = Final(
            admission.request_id,
            p.emitted,
            admission.num_prompt_tokens,
            admission.arrival_ns,
            p.first_token_ns,
            p.last_token_ns,
            p.spec_steps,
            list(p.heads),
        )
        self.count["finals_" + REASONS[reason]] += 1
        is_prefill = self.options.role == "prefill" and admission.is_disaggregated
        if step is not None and reason in (STOP, LENGTH, RECOVERED) and not is_prefill:
            self.count["completions"] += 1
