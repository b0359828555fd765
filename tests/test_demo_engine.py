"""The demo without a pipeline: model, sampling, engine loop, token log and its comparison, text."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tokenpipe as tp
from tokenpipe.demo.children import Child, RoleWatch
from tokenpipe.demo.engine import STATE_ACKNOWLEDGED, Add, Engine, Inbox, Settings
from tokenpipe.demo.errors import ChildExitedError, DemoError
from tokenpipe.demo.jobs import make_jobs
from tokenpipe.demo.log import LOG_DTYPE, MAGIC, Comparison, TokenLog, compare, read_log, topk_crcs
from tokenpipe.demo.model import BatchedModel, load_pretrained, log_softmax, sample
from tokenpipe.demo.options import DemoOptions
from tokenpipe.demo.status import parse_status
from tokenpipe.demo.text import PROMPTS, TextStream, eos_token_ids, prompt_texts

pytest.importorskip("glassllm", reason="the extra [demo] is not installed")

ROWS = np.array([4, 0, 2])  # not in order, with holes
TOP = 20


@pytest.fixture(scope="module")
def pretrained() -> tuple[Any, Any]:
    return load_pretrained()


def package_logits(model: Any, tokens: list[int]) -> np.ndarray:
    return np.asarray(model.forward(tokens).data[0, -1])


# --- model


def test_logits_are_the_packages_own_for_rows_of_different_length(
    pretrained: tuple[Any, Any],
) -> None:
    model, tokenizer = pretrained
    batched = BatchedModel(model, max_rows=5)
    sequences = [tokenizer.encode(text) for text in (PROMPTS[0], PROMPTS[1], PROMPTS[4])]
    logits = batched.prefill(ROWS, [list(sequence) for sequence in sequences])
    rng = np.random.default_rng(1)
    for _ in range(12):
        for got, sequence in zip(logits, sequences, strict=True):
            np.testing.assert_allclose(got, package_logits(model, sequence), rtol=0, atol=1e-4)
        tokens = rng.integers(4, batched.vocab_size, len(ROWS))
        positions = np.array([len(sequence) for sequence in sequences])
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        logits = batched.decode(ROWS, tokens, positions)


def test_a_row_forgets_its_former_request(pretrained: tuple[Any, Any]) -> None:
    model, tokenizer = pretrained
    batched = BatchedModel(model, max_rows=1)
    long, short = tokenizer.encode(PROMPTS[0]), tokenizer.encode(PROMPTS[1])
    batched.prefill(np.array([0]), [long])
    batched.prefill(np.array([0]), [short])
    logits = batched.decode(np.array([0]), np.array([7]), np.array([len(short)]))
    np.testing.assert_allclose(logits[0], package_logits(model, [*short, 7]), rtol=0, atol=1e-4)


def test_the_whole_context_can_be_used(pretrained: tuple[Any, Any]) -> None:
    model, _ = pretrained
    batched = BatchedModel(model, max_rows=1)
    tokens = np.random.default_rng(2).integers(4, 1024, batched.context_tokens).tolist()
    batched.prefill(np.array([0]), [tokens[:-1]])
    logits = batched.decode(np.array([0]), np.array(tokens[-1:]), np.array([len(tokens) - 1]))
    np.testing.assert_allclose(logits[0], package_logits(model, tokens), rtol=0, atol=1e-4)


# --- sampling


def random_logits(num_rows: int) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 3, (num_rows, 200)).astype(np.float32)


def test_sampled_values_are_those_of_a_plain_computation() -> None:
    logits = random_logits(50)
    sampled = sample(logits, np.random.default_rng(4).random(50), temperature=2.0, top=TOP)
    wanted = np.log(
        np.exp(logits.astype(np.float64)).T / np.exp(logits.astype(np.float64)).sum(1)
    ).T
    for row in range(50):
        token = sampled.tokens[row]
        order = np.argsort(-logits[row], kind="stable")
        assert sampled.topk_ids[row].tolist() == [token, *order[:TOP]]
        np.testing.assert_allclose(
            sampled.logprobs[row], wanted[row, sampled.topk_ids[row]], rtol=0, atol=1e-4
        )
        assert sampled.ranks[row] == 1 + (logits[row] > logits[row, token]).sum()
    assert sampled.ranks.max() > TOP, "a token beyond the top-k was meant to be among them"
    assert sampled.logprobs.dtype == np.float32


def test_equal_logprobs_share_the_better_rank() -> None:
    logits = np.array([[1, 3, 3, 2]], np.float32)
    sampled = sample(logits, np.array([0.75]), temperature=1.0, top=3)
    assert sampled.topk_ids.tolist() == [[2, 1, 2, 3]]
    assert sampled.ranks.tolist() == [1]


def test_frequencies_follow_the_temperature() -> None:
    logits = np.tile(np.array([0.0, 1.0, 2.0], np.float32), (4000, 1))
    uniforms = (np.arange(4000) + 0.5) / 4000  # evenly spread: no luck in it
    for temperature in (0.5, 1.0, 3.0):
        tokens = sample(logits, uniforms, temperature, top=1).tokens
        wanted = np.exp(log_softmax(logits[0] / temperature))
        np.testing.assert_allclose(np.bincount(tokens) / 4000, wanted, atol=1e-3)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = random_logits(10)
    sampled = sample(logits, np.full(10, 0.99), temperature=0, top=1)
    assert (sampled.tokens == logits.argmax(axis=1)).all()
    assert (sampled.ranks == 1).all()


def test_the_last_uniform_below_one_is_still_a_token() -> None:
    sampled = sample(random_logits(10), np.full(10, np.nextafter(1, 0)), 1.0, top=0)
    assert sampled.tokens.max() < 200
    assert sampled.topk_ids.shape == (10, 1)


# --- engine


@dataclass
class SavedStep:
    rows: list[int]
    generations: list[int]
    tokens: list[int]
    states: list[int]


class FakeWriter:
    """Keeps the steps; tells the control words that were asked for after a step of that number."""

    def __init__(self, control_after: dict[int, list[tuple[int, int, str]]]) -> None:
        self.steps: list[SavedStep] = []
        self._control_after = control_after

    def begin_step(self, generations: np.ndarray, rows: np.ndarray) -> SavedStep:
        return SavedStep(rows.tolist(), generations.tolist(), [], [])

    def save_output_topk(
        self,
        tokens: np.ndarray,
        topk_ids: np.ndarray,
        logprobs: np.ndarray,
        ranks: np.ndarray,
        step: SavedStep,
        states: np.ndarray,
    ) -> None:
        assert topk_ids.shape == logprobs.shape == (len(step.rows), TOP + 1)
        assert (logprobs.dtype, states.dtype) == (np.float32, np.uint8)
        assert len(ranks) == len(tokens) == len(step.rows) == len(set(step.rows))
        step.tokens, step.states = tokens.tolist(), states.tolist()
        self.steps.append(step)

    def poll_control(self) -> list[SimpleNamespace]:
        told = self._control_after.pop(len(self.steps), [])
        return [SimpleNamespace(row=row, generation=g, kind=kind) for row, g, kind in told]


def run_engine(
    pretrained: tuple[Any, Any],
    log_path: Path,
    adds: list[Add],
    control_after: dict[int, list[tuple[int, int, str]]] | None = None,
) -> tuple[list[SavedStep], np.ndarray]:
    settings = Settings("unused", str(log_path), 5, 0.8, 4, TOP, 0.0)
    writer = FakeWriter(control_after or {})
    inbox = Inbox(io.StringIO("".join(add.to_line() for add in adds)))
    model = BatchedModel(pretrained[0], settings.max_rows)
    with TokenLog(log_path) as log:
        Engine(settings, model, writer, log, inbox).run()
    return writer.steps, read_log(log_path.read_bytes())


def make_add(pretrained: tuple[Any, Any], number: int, row: int, max_tokens: int) -> Add:
    prompt = pretrained[1].encode(PROMPTS[number])
    return Add(number, f"r{number}", row, 10 + number, prompt, max_tokens)


def test_the_engine_runs_each_request_to_its_max_tokens_and_ends(
    pretrained: tuple[Any, Any], tmp_path: Path
) -> None:
    adds = [make_add(pretrained, 0, 3, 5), make_add(pretrained, 1, 0, 9)]
    steps, log = run_engine(pretrained, tmp_path / "log", adds)
    saved: dict[int, list[int]] = {10: [], 11: []}
    for step in steps:
        for generation, token in zip(step.generations, step.tokens, strict=True):
            saved[generation].append(token)
    assert [len(tokens) for tokens in saved.values()] == [5, 9]
    for add in adds:
        records = log[log["request"] == add.request_number]
        assert records["token"].tolist() == saved[add.generation]
        assert records["position"].tolist() == list(range(add.max_tokens))


def test_a_text_does_not_depend_on_its_batch(pretrained: tuple[Any, Any], tmp_path: Path) -> None:
    adds = [make_add(pretrained, number, number, 12) for number in range(3)]
    _, together = run_engine(pretrained, tmp_path / "together", adds)
    _, alone = run_engine(pretrained, tmp_path / "alone", adds[1:2])
    assert together["token"][together["request"] == 1].tolist() == alone["token"].tolist()


def test_the_engine_stops_where_the_context_is_full(
    pretrained: tuple[Any, Any], tmp_path: Path
) -> None:
    add = make_add(pretrained, 0, 0, 1000)
    steps, _ = run_engine(pretrained, tmp_path / "log", [add])
    assert len(steps) == 128 - len(add.prompt_token_ids) + 1


def test_a_finished_row_leaves_the_batch(pretrained: tuple[Any, Any], tmp_path: Path) -> None:
    adds = [make_add(pretrained, 0, 0, 6), make_add(pretrained, 1, 1, 6)]
    control = {2: [(0, 10, "finished")]}
    steps, _ = run_engine(pretrained, tmp_path / "log", adds, control)
    assert [sorted(step.rows) for step in steps] == [[0, 1]] * 2 + [[1]] * 4


@pytest.mark.parametrize("kind", ["abort", "preempt"])
def test_an_abort_is_acknowledged_in_the_next_step(
    kind: str, pretrained: tuple[Any, Any], tmp_path: Path
) -> None:
    adds = [make_add(pretrained, 0, 0, 6), make_add(pretrained, 1, 1, 2)]
    steps, log = run_engine(pretrained, tmp_path / "log", adds, {2: [(0, 10, kind)]})
    acknowledgement = steps[-1]
    assert len(steps) == 3
    assert (acknowledgement.rows, acknowledgement.generations) == ([0], [10])
    assert acknowledgement.states == [STATE_ACKNOWLEDGED]
    assert len(log) == 4, "an acknowledgement is no token"


def test_word_of_a_former_request_leaves_the_row_alone(
    pretrained: tuple[Any, Any], tmp_path: Path
) -> None:
    adds = [make_add(pretrained, 0, 0, 4)]
    steps, _ = run_engine(pretrained, tmp_path / "log", adds, {1: [(0, 9, "abort")]})
    assert [step.states for step in steps] == [[0]] * 4


def test_a_request_that_ended_before_it_came_is_not_started(
    pretrained: tuple[Any, Any], tmp_path: Path
) -> None:
    settings = Settings("unused", str(tmp_path / "log"), 5, 0.8, 4, TOP, 0.0)
    writer = FakeWriter({0: [(0, 10, "abort")]})
    add = make_add(pretrained, 0, 0, 4)

    class LateInbox:
        is_closed = False

        def take(self, wait_s: float) -> list[str]:
            self.is_closed = bool(writer.steps)
            return [add.to_line()] if writer.steps else []

    with TokenLog(settings.log_path) as log:
        model = BatchedModel(pretrained[0], settings.max_rows)
        Engine(settings, model, writer, log, LateInbox()).run()  # type: ignore[arg-type]
    assert [step.states for step in writer.steps] == [[STATE_ACKNOWLEDGED]]


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(ValueError, match="'drop'"):
        Add.from_line(json.dumps({"op": "drop"}))


# --- log and comparison

EOS = 3


def records_of(request: int, tokens: list[int]) -> np.ndarray:
    records = np.zeros(len(tokens), LOG_DTYPE)
    records["request"], records["position"] = request, np.arange(len(tokens))
    records["token"] = tokens
    records["logprob_bits"] = np.linspace(-3, 0, len(tokens), dtype=np.float32).view(np.uint32)
    return records


LOG = np.concatenate([records_of(0, [8, 9, EOS, 7, 7]), records_of(1, [5, 6, 7, 8])])
LIMITS = {0: 10, 1: 3}
# Up to the eos of request 0 and the three tokens of request 1.
DELIVERED = np.concatenate([LOG[:3], LOG[5:8]])


def found(delivered: np.ndarray) -> Comparison:
    return compare(LOG, delivered, LIMITS, [EOS])


def test_the_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    with TokenLog(tmp_path / "log") as log:
        log.append(LOG[:4])
        log.append(LOG[4:])
        data = (tmp_path / "log").read_bytes()  # before the close: nothing is held back
    assert (read_log(data) == LOG).all()


def test_a_torn_last_record_is_left_out() -> None:
    assert (read_log(MAGIC + LOG.tobytes()[:-1]) == LOG[:-1]).all()


def test_an_engine_that_never_started_has_an_empty_log() -> None:
    assert len(read_log(b"")) == 0


def test_something_else_is_no_log() -> None:
    with pytest.raises(DemoError, match="NOTALOG!"):
        read_log(b"NOTALOG!and more")


def test_a_faithful_delivery_is_clean() -> None:
    comparison = found(DELIVERED)
    assert comparison == Comparison(6, 0, 0, 0, 0, 0)
    assert comparison.is_clean


def test_a_lost_token_is_found() -> None:
    comparison = found(np.delete(DELIVERED, 1))
    assert comparison == Comparison(6, 1, 0, 0, 0, 0)
    assert not comparison.is_clean


def test_a_duplicated_token_is_found() -> None:
    comparison = found(np.insert(DELIVERED, 4, DELIVERED[1]))
    assert comparison == Comparison(6, 0, 1, 0, 0, 0)
    assert not comparison.is_clean


@pytest.mark.parametrize("field", ["token", "logprob_bits", "topk_crc"])
def test_a_wrong_value_is_found_and_counts_as_lost(field: str) -> None:
    delivered = DELIVERED.copy()
    delivered[field][2] += 1
    assert found(delivered) == Comparison(6, 1, 0, 1, 0, 0)


def test_a_token_beyond_the_end_is_found() -> None:
    comparison = found(np.concatenate([DELIVERED, LOG[3:4]]))
    assert comparison == Comparison(6, 0, 0, 0, 1, 0)
    assert not comparison.is_clean


def test_a_wrong_order_is_found() -> None:
    comparison = found(DELIVERED[[1, 0, 2, 3, 4, 5]])
    assert comparison == Comparison(6, 0, 0, 0, 0, 1)
    assert not comparison.is_clean


def test_every_topk_value_is_in_the_checksum() -> None:
    ids, logprobs = np.arange(6).reshape(1, 6), np.linspace(-1, 0, 6, dtype=np.float32)[None]
    ranks = np.array([2])
    (wanted,) = topk_crcs(ids, logprobs, ranks)
    assert topk_crcs(ids.astype(np.int32), logprobs.copy(), ranks.astype(np.int32)) == [wanted]
    for values in (ids, logprobs):
        values[0, 5] += 1
        assert topk_crcs(ids, logprobs, ranks) != [wanted]
        values[0, 5] -= 1
    assert topk_crcs(ids, logprobs, ranks + 1) != [wanted]


# --- child processes

IGNORES_SIGTERM = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"event": "ready"}', flush=True)
sys.stdin.read()
signal.pause()
"""


def python(code: str, grace_s: float = 10.0) -> Child:
    return Child("helper", [sys.executable, "-c", code], grace_s=grace_s)


def test_a_child_that_exits_before_it_is_ready_is_named() -> None:
    with python("import sys; sys.exit(4)") as child, pytest.raises(ChildExitedError) as caught:
        child.wait_ready(timeout_s=20)
    assert str(caught.value) == f"helper (pid {child.pid}) exited with code 4"
    assert caught.value.exit_code == 4


def test_a_child_that_says_something_else_is_not_ready() -> None:
    with python("print('hello')") as child, pytest.raises(DemoError, match="hello"):
        child.wait_ready(timeout_s=20)


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    with python(IGNORES_SIGTERM, grace_s=0.05) as child:
        child.wait_ready(timeout_s=20)
    assert child.process.returncode == -9


def test_a_child_ends_at_the_end_of_its_input() -> None:
    with python("import sys; sys.exit(len(sys.stdin.read()))") as child:
        child.send("abc")
        assert child.finish() == 3


def test_the_watch_tells_an_exit_once() -> None:
    with python("input()") as child, RoleWatch({"helper": child.pid}) as roles:
        assert roles.exited() == []
        child.send("go\n")
        child.process.wait()
        assert roles.exited() == [("helper", child.pid)]
        assert roles.exited() == []


# --- text, jobs, status


def test_text_that_comes_in_parts_is_the_tokenizers_own(pretrained: tuple[Any, Any]) -> None:
    _, tokenizer = pretrained
    ids = np.random.default_rng(6).integers(0, tokenizer.vocab_size, 500).tolist()
    text = "\u201cCuriouser\u201d \u2014 \u00c6sop\u2019s o\u00f9\nAlice"
    ids += tokenizer.encode(text)
    stream, parts = TextStream(tokenizer), []
    for size in np.random.default_rng(7).integers(0, 4, 1000).tolist():
        parts.append(stream.push(ids[:size]))
        parts[-1].encode("utf-8")  # each part is whole characters
        ids = ids[size:]
    assert stream.text == "".join(parts)
    assert stream.text.endswith(text)


def test_every_prompt_is_in_the_models_alphabet(pretrained: tuple[Any, Any]) -> None:
    _, tokenizer = pretrained
    for text in prompt_texts(100):
        ids = tokenizer.encode(text)
        assert tokenizer.unk_id not in ids
        assert tokenizer.decode(ids) == text
    assert all(" " in text for text in prompt_texts(500))


def test_no_job_asks_for_more_than_the_context_holds(pretrained: tuple[Any, Any]) -> None:
    _, tokenizer = pretrained
    jobs = make_jobs(DemoOptions(requests=30, max_tokens=500), tokenizer, context_tokens=128)
    assert {len(job.prompt_token_ids) + job.max_tokens for job in jobs} == {129}
    assert [job.number for job in jobs] == list(range(30))


def test_the_ends_of_a_text_are_tokens_of_the_model(pretrained: tuple[Any, Any]) -> None:
    assert len(set(eos_token_ids(pretrained[1]))) == 4


@pytest.mark.parametrize(
    "options", [{"requests": 0}, {"max_tokens": 0}, {"temperature": -1.0}, {"step_ms": -1.0}]
)
def test_an_option_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(tp.ConfigError, match=name):
        DemoOptions(**options)


def test_a_status_without_our_facts_is_still_a_status() -> None:
    assert parse_status({}).state is None
    status = parse_status({"state": "running", "roles": {"reader": {"pid": 5, "other": 1}}})
    assert status.state == "running"
    assert status.roles["reader"].pid == 5
    assert status.roles["reader"].lag is None
