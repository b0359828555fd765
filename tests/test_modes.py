"""Every output mode as a client sees it: through real processes where the processes matter, else
through the same objects in one process."""

from __future__ import annotations

import bisect
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inprocess import InProcess
from prometheus_client.parser import text_string_to_metric_families

import tokenpipe as tp
from support import wait_until
from tokenpipe.commands import FinishReason
from tokenpipe.events import RequestEvent
from tokenpipe.metrics import Exporter
from tokenpipe.objects import AnyOutput
from tokenpipe.outputs import OutputBatch
from tokenpipe.records import LogprobsLists, PoolingRequestOutput, RequestMetrics, SpeculateMetrics
from tokenpipe.status import View, status_of

SAMPLE = Path(__file__).resolve().parents[2] / "shared" / "data" / "stories260k_sample.npz"
EOS = 2
DEPTH, WIDTH = 3, 3


def config_of(**more: Any) -> tp.PipelineConfig:
    about = {
        "max_num_seqs": 4,
        "top_logprobs": WIDTH - 1,
        "max_draft_tokens": DEPTH,
        "num_decoders": 2,
        "speculative_method": "mtp",
        "num_speculative_tokens": DEPTH - 1,
        "max_pooling_floats": 4,
        "abort_timeout_s": 600,
    }
    return tp.PipelineConfig(**{**about, **more})


def request(name: str, **more: Any) -> tp.Request:
    return tp.Request(name, **{"prompt_token_ids": [1], "eos_token_ids": [EOS], **more})


def candidates_of(tokens: Any, base: int = 0) -> dict[str, Any]:
    """Candidates that follow from the tokens, so that each output can be checked by value."""
    tokens = np.asarray(tokens) + base
    ids = tokens[..., None] * 10 + np.arange(WIDTH)
    return {"topk_ids": ids, "logprobs": -ids.astype(np.float32) / 8, "ranks": tokens + 1}


def lists_of(tokens: Sequence[int], base: int = 0) -> LogprobsLists:
    c = candidates_of(tokens, base)
    return LogprobsLists(*(c[n].tolist() for n in ("topk_ids", "logprobs", "ranks")))


DRAFT_BASE = 1000


def save_target(
    writer: tp.EngineWriter, rows: list[int], tokens: list[list[int]], **more: Any
) -> None:
    """Saves a target step with candidates; each row may have up to DEPTH tokens."""
    flag = more.get("message_flag", 3)
    padded = np.array([t + [0] * (DEPTH - len(t)) for t in tokens])
    writer.speculate_save_output_topk(
        padded,
        [len(t) for t in tokens],
        rows=rows,
        **candidates_of(padded, DRAFT_BASE if flag == 4 else 0),
        **{"generations": [1] * len(rows), **more},
    )


def save_drafts(
    writer: tp.EngineWriter, rows: list[int], tokens: list[list[int]], **more: Any
) -> None:
    save_target(writer, rows, tokens, message_flag=4, **more)


def by_request(outputs: Sequence[AnyOutput]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for output in outputs:
        found[output.request_id].append(output)
    return found


def read(pipe: tp.Pipeline, by_step: bool = False) -> list[AnyOutput]:
    """Every output that there is of what was saved."""
    pipe.sync()
    return [o for batch in pipe.batches(timeout_s=0, by_step=by_step) for o in batch]


# --- the real output of a real model


@pytest.fixture(scope="module")
def sample() -> Any:
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE.name} is not there: it stands in ../shared/data beside a checkout")
    return dict(np.load(SAMPLE))


class Columns:
    """What has come of each row, column by column, across batches."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def add(self, batch: OutputBatch) -> None:
        offsets = batch.token_offsets.tolist()
        for i, row in enumerate(batch.row.tolist()):
            part, kept = slice(offsets[i], offsets[i + 1]), self.of[row]
            kept["tokens"].extend(batch.token_ids[part].tolist())
            kept["ids"].extend(batch.topk_ids[part].tolist())
            kept["bits"].extend(batch.topk_logprobs[part].view(np.uint32).tolist())
            kept["ranks"].extend(batch.ranks[part].tolist())
            kept["send_idx"].append(int(batch.send_idx[i]))
            kept["counts"].append(offsets[i + 1] - offsets[i])
            kept["reasons"].append(int(batch.finish_reason[i]))


@pytest.mark.parametrize("mode", ["plain", "top-20", "speculative"])
def test_real_output_comes_out_bit_for_bit(mode: str, sample: Any, unique_name: str) -> None:
    tokens, ids = sample["tokens"], sample["topk_ids"]
    logprobs, ranks = sample["topk_logprobs"], sample["ranks"]
    steps, rows = tokens.shape
    accepted, lengths = sample["spec_accept"].astype(int), sample["spec_len"]
    counts = np.split(accepted, np.cumsum(lengths)[:-1])
    depth = int(accepted.max())
    emitted = [int(c.sum()) for c in counts] if mode == "speculative" else [steps] * rows
    config = config_of(
        name=unique_name, max_num_seqs=rows, top_logprobs=20, max_draft_tokens=max(2, depth),
        num_speculative_tokens=max(1, depth - 1),
    )  # fmt: skip
    columns = Columns()
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as engine:
        generations = [
            pipe.submit(request(f"r{row}", eos_token_ids=[], max_tokens=emitted[row])).generation
            for row in range(rows)
        ]
        at = np.zeros(rows, int)
        for step in range(steps):
            if mode == "plain":
                engine.save_output(tokens[step], generations=generations)
            elif mode == "top-20":
                engine.save_output_topk(
                    tokens[step], ids[step], logprobs[step], ranks[step], generations=generations
                )
            else:
                accept = np.array([c[step] if step < len(c) else 0 for c in counts])
                place = np.minimum(at[:, None] + np.arange(depth), steps - 1)
                lane = np.arange(rows)[:, None]
                engine.speculate_save_output_topk(
                    tokens[place, lane], accept, ids[place, lane], logprobs[place, lane],
                    ranks[place, lane], generations=generations,
                )  # fmt: skip
                at += accept
            if step % 25 == 24:
                pipe.sync()
                for batch in pipe.batches(timeout_s=0, by_step=bool(step % 2)):
                    columns.add(batch)
    for row, kept in columns.of.items():
        n = emitted[row]
        assert kept["tokens"] == tokens[:n, row].tolist()
        assert kept["reasons"] == [0] * (len(kept["reasons"]) - 1) + [FinishReason.LENGTH]
        assert kept["send_idx"] == (np.cumsum(kept["counts"]) - kept["counts"]).tolist()
        if mode == "plain":
            continue
        assert kept["ids"] == ids[:n, row].tolist()
        assert kept["bits"] == logprobs[:n, row].copy().view(np.uint32).tolist()
        assert kept["ranks"] == ranks[:n, row].tolist()
        if mode == "speculative":
            assert kept["counts"] == [int(c) for c in counts[row] if c]
    assert sorted(columns.of) == list(range(rows))


# --- drafts


def drafts_config(**more: Any) -> tp.PipelineConfig:
    return config_of(**{"enable_draft_logprob": True, "draft_wait_s": 0, **more})


def drafts_of(outputs: Sequence[AnyOutput]) -> dict[str, list[tuple[list[int], Any]]]:
    return {
        name: [(o.outputs.token_ids, o.outputs.draft_top_logprobs) for o in got]
        for name, got in by_request(outputs).items()
    }


def mixed_drafts(engine: tp.EngineWriter) -> dict[str, list[tuple[list[int], Any]]]:
    """Saves targets and drafts in every order; returns what must come out of it."""
    rows = [0, 1, 2, 3]
    d = lambda tokens: lists_of(tokens, DRAFT_BASE)  # noqa: E731
    save_target(engine, rows, [[11, 12], [21], [31, 32, 33], [41]])
    save_drafts(engine, [3, 1, 0], [[6], [7, 8], [9]])  # another order, one row missing
    save_target(engine, rows, [[13], [22], [34], [42]])  # a doubled target: no drafts for this one
    save_target(engine, rows, [[14], [23], [], [43]])
    save_drafts(engine, rows, [[1], [], [5], [3, 4]])  # row 2 had no target in this step
    save_drafts(engine, rows, [[1], [1], [1], [1]])  # drafts without a target
    save_target(engine, rows, [[15], [24], [35], [44]])
    save_drafts(engine, [2, 0], [[8], [9]], positions=[4, 99])  # one at a place that never was
    return {
        "r0": [([11, 12], d([9])), ([13], None), ([14], d([1])), ([15], None)],
        "r1": [([21], d([7, 8])), ([22], None), ([23], None), ([24], None)],
        "r2": [([31, 32, 33], None), ([34], None), ([35], d([8]))],
        "r3": [([41], d([6])), ([42], None), ([43], d([3, 4])), ([44], None)],
    }


@pytest.mark.parametrize("by_step", [False, True], ids=["batches", "by_step"])
def test_drafts_come_beside_the_target_they_belong_to(by_step: bool, unique_name: str) -> None:
    with tp.Pipeline(drafts_config(name=unique_name)) as pipe, pipe.engine_writer() as engine:
        for row in range(4):
            pipe.submit(request(f"r{row}"))
        wanted = mixed_drafts(engine)
        pipe.sync()
        outputs = []
        for batch in pipe.batches(timeout_s=0, by_step=by_step):
            for i, output in enumerate(batch):
                found = batch.drafts.of(i) if batch.drafts is not None else None
                assert found == output.outputs.draft_top_logprobs
                assert output.outputs.top_logprobs == lists_of(output.outputs.token_ids)
                outputs.append(output)
        assert drafts_of(outputs) == wanted
        client = pipe._view.client["output"]["released"][:2].tolist()
        frames = [int(c["frames"]) for c in pipe._view.commits()]
        assert client == frames  # each frame was given back once, the drafts' too


@pytest.mark.parametrize("num_decoders", [1, 2])
@pytest.mark.parametrize("by_step", [False, True], ids=["batches", "by_step"])
def test_drafts_without_a_target_and_targets_without_drafts_are_counted(
    num_decoders: int, by_step: bool
) -> None:
    with InProcess(drafts_config(num_decoders=num_decoders)) as p:
        for row in range(4):
            p.submit(request(f"r{row}"))
        wanted = mixed_drafts(p.writer)
        assert drafts_of(p.outputs(by_step)) == wanted
        join = p.delivery._joins[by_step]
        # Three of rows whose target had its drafts already, one at a place that never was.
        assert status_of(p.segment)["unmatched_drafts"] == 4
        # The doubled target, of each decoder.
        without = 1 if by_step else num_decoders
        assert join.num_targets_without_drafts == without
        counters = p.counters()
        assert counters["draft_rows_seen"] == 3 + 4 + 4 + 2
        # Row 2 had no target in the third step, twice; row 1 has a draft row without a token.
        assert counters["draft_rows_delivered"] == counters["draft_rows_seen"] - 3


def test_a_target_waits_for_its_drafts_but_not_for_ever(unique_name: str) -> None:
    config = drafts_config(name=unique_name, num_decoders=1, draft_wait_s=0.05)
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as engine:
        pipe.submit(request("a"))
        save_target(engine, [0], [[11]])
        begun = time.monotonic()
        [output] = next(pipe.batches(timeout_s=20))
        assert time.monotonic() - begun >= 0.05
        assert drafts_of([output]) == {"a": [([11], None)]}
        save_drafts(engine, [0], [[5]])  # too late: dropped, and nobody waits for it
        save_target(engine, [0], [[EOS]])
        [last] = next(pipe.batches(timeout_s=20))
        assert last.finished


def test_an_end_in_a_target_does_not_part_the_others_from_their_drafts() -> None:
    """F19: the target waits for its drafts although a row of it has ended."""
    with InProcess(drafts_config(num_decoders=1, draft_wait_s=600)) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        save_target(p.writer, [0, 1], [[11, EOS], [21]])
        assert p.outputs() == []
        save_drafts(p.writer, [0, 1], [[5], [6, 7]])
        assert drafts_of(p.outputs()) == {
            "r0": [([11, EOS], None)],  # drafts after the end are nobody's
            "r1": [([21], lists_of([6, 7], DRAFT_BASE))],
        }


def test_a_held_target_goes_out_before_what_follows_it() -> None:
    with InProcess(drafts_config(draft_wait_s=600, num_decoders=1)) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        save_target(p.writer, [0, 1], [[11], [21]])
        assert p.outputs() == []
        save_target(p.writer, [0], [[EOS]])  # ends all its rows: waits for nothing
        found = [(o.request_id, o.outputs.token_ids) for o in p.outputs()]
        assert found == [("r0", [11]), ("r1", [21]), ("r0", [EOS])]


def test_drafts_are_not_delivered_where_nobody_asked() -> None:
    """F20: they are counted and dropped."""
    with InProcess(config_of(num_decoders=1)) as p:
        p.submit(request("a"))
        save_target(p.writer, [0], [[11]])
        save_drafts(p.writer, [0], [[5]])
        assert drafts_of(p.outputs()) == {"a": [([11], None)]}
        total = p.counters()
        assert (total["draft_rows_seen"], total["draft_rows_delivered"]) == (1, 0)


@pytest.mark.parametrize("wait_s", [0, 600])
def test_an_abort_that_meets_a_draft_step_is_told(wait_s: float) -> None:
    with InProcess(drafts_config(num_decoders=1, draft_wait_s=wait_s)) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        save_target(p.writer, [0, 1], [[11], [21]])
        p.pump()
        p.book.mark(0, 1, FinishReason.ABORT)
        save_drafts(p.writer, [0, 1], [[5], [6]])
        assert by_request(p.outputs())["r0"][-1].finish_reason == "abort"


def test_by_step_joins_drafts_of_the_second_decoder_only() -> None:
    with InProcess(drafts_config()) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        save_target(p.writer, [0, 1], [[11], [21]])
        save_drafts(p.writer, [1], [[5]])
        found = drafts_of(p.outputs(by_step=True))
        assert found["r1"] == [([21], lists_of([5], DRAFT_BASE))]


def test_by_step_keeps_the_order_of_a_request_whose_step_is_held() -> None:
    with InProcess(drafts_config(draft_wait_s=600)) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        save_target(p.writer, [0, 1], [[11], [21]])
        save_target(p.writer, [1], [[EOS]])
        found = by_request(p.outputs(by_step=True))
        assert [o.outputs.token_ids for o in found["r1"]] == [[21], [EOS]]


def test_by_step_gives_an_older_step_first_that_comes_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoder 1's rows are in the first step alone, decoder 0's in the second alone."""
    with InProcess(config_of()) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        for row in (1, 0):
            save_target(p.writer, [row], [[11]])
            assert p.read_step()
        while p.decoders[0].run(64, 0.0):
            pass

        class Late:
            """A client that is told of decoder 1's step between its look and its wait."""

            def __getattr__(self, name: str) -> Any:
                return getattr(p.client, name)

            def wait_for_step(self, sequence: int, timeout_s: float) -> bool:
                p.decode()
                return p.client.wait_for_step(sequence, timeout_s)

        monkeypatch.setattr(p.delivery, "_client", Late())
        steps = [(batch.step, batch.row.tolist()) for batch in p.batches(by_step=True)]
        assert steps == [(0, [1]), (1, [0])]


def test_prompt_logprobs_between_target_and_drafts_part_nobody() -> None:
    with InProcess(drafts_config(num_decoders=1)) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        save_target(p.writer, [0], [[11]])
        p.writer.save_prompt_logprobs(1, 1, [5], **candidates_of([5]))
        save_drafts(p.writer, [0], [[6]])
        assert drafts_of(p.outputs())["r0"] == [([11], lists_of([6], DRAFT_BASE))]


# --- pooling and prompt logprobs


Submit = Callable[[tp.Request], tp.Admission]
Read = Callable[[], list[AnyOutput]]


@contextmanager
def either(way: str, name: str) -> Iterator[tuple[Submit, tp.EngineWriter, Read]]:
    """submit, an engine and what reads its outputs: batches of real processes, or whole steps."""
    if way == "by_step":
        with InProcess(config_of(name=name)) as p:
            yield p.submit, p.writer, lambda: p.outputs(by_step=True)
    else:
        with tp.Pipeline(config_of(name=name)) as pipe, pipe.engine_writer() as engine:
            yield pipe.submit, engine, lambda: read(pipe)


each_way = pytest.mark.parametrize("way", ["batches", "by_step"])


@each_way
def test_pooling_vectors_end_their_requests(way: str, unique_name: str) -> None:
    with either(way, unique_name) as (submit, engine, read_all):
        for row in range(4):
            submit(request(f"r{row}", prompt_token_ids=[7, row]))
        vectors = np.array([[0.1, -0.0], [np.inf, 1e-45], [3, 4]], np.float32)
        engine.save_pooling(vectors, rows=[3, 0, 2], generations=[1, 1, 1])
        engine.save_pooling(np.ones((1, 4), np.float16), rows=[1], generations=[1])
        found = by_request(read_all())
        wanted = {"r3": vectors[0], "r0": vectors[1], "r2": vectors[2], "r1": np.ones(4)}
        for name, vector in wanted.items():
            [output] = found[name]
            assert isinstance(output, PoolingRequestOutput)
            assert output.outputs.data == vector.tolist()
            assert str(output.outputs.data) == str(vector.tolist())  # -0.0 is not 0.0
            assert output.prompt_token_ids == [7, int(name[1])]
            assert (output.finished, output.finish_reason) == (True, "stop")
            assert (output.error_code, output.error_msg) == (200, None)


@each_way
def test_prompt_logprobs_come_with_the_next_output(way: str, unique_name: str) -> None:
    prompt = list(range(20, 50))
    with either(way, unique_name) as (submit, engine, read_all):
        for row in range(2):
            submit(request(f"r{row}", prompt_token_ids=prompt))
        engine.save_prompt_logprobs(1, 1, prompt[25:], **candidates_of(prompt[25:]), begin=25)
        engine.save_prompt_logprobs(1, 1, prompt[:25], **candidates_of(prompt[:25]))
        save_target(engine, [0, 1], [[11], [21]])
        save_target(engine, [0, 1], [[EOS], [EOS]])
        found = by_request(read_all())
        assert [o.prompt_logprobs for o in found["r0"]] == [None, None]
        assert [o.prompt_logprobs for o in found["r1"]] == [lists_of(prompt), None]
        assert [o.outputs.token_ids for o in found["r1"]] == [[21], [EOS]]


def test_an_abort_that_meets_prompt_logprobs_is_told() -> None:
    with InProcess(config_of(num_decoders=1)) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        p.book.mark(0, 1, FinishReason.ABORT)
        p.writer.save_prompt_logprobs(1, 1, [5], **candidates_of([5]))
        assert [o.finish_reason for o in p.outputs()] == ["abort"]


def test_an_abort_that_meets_a_pooling_step_is_told() -> None:
    with InProcess(config_of(num_decoders=1)) as p:
        for row in range(2):
            p.submit(request(f"r{row}"))
        p.book.mark(0, 1, FinishReason.ABORT)
        p.writer.save_pooling(np.ones((2, 4), np.float32), generations=[1, 1])
        found = by_request(p.outputs())
        assert found["r0"][0].finish_reason == "abort"
        assert found["r1"][0].outputs.data == [1.0] * 4


@pytest.mark.parametrize("kind", ["tokens", "pooling"])
def test_an_empty_vectors_column_can_be_read(kind: str) -> None:
    with InProcess(config_of(num_decoders=1)) as p:
        p.submit(request("a"))
        if kind == "tokens":
            save_target(p.writer, [0], [[11]])
        else:
            p.writer.save_pooling(np.ones((1, 0), np.float32), generations=[1])
        p.pump()
        for batch in p.batches():
            assert batch.vectors.size == 0


# --- the fields of an object


@contextmanager
def running(**more: Any) -> Iterator[InProcess]:
    """One decoder, one request "a" in row 0, with every field that is echoed."""
    about = {k: more.pop(k) for k in list(more) if k in tp.Request.__dataclass_fields__}
    with InProcess(config_of(num_decoders=1, **more)) as p:
        echoed = {
            "prompt": [{"role": "user"}],
            "num_cached_tokens": 3,
            "multimodal_inputs": {"num_input_image_tokens": 4, "num_input_video_tokens": 5},
            "ic_req_data": {"x": 1},
            "trace_carrier": {"root": "span"},
        }
        p.submit(request("a", prompt_token_ids=[1, 2], **{**echoed, **about}))
        yield p


def test_what_is_on_every_output_and_what_on_one_only() -> None:
    with running() as p:
        for tokens in ([11, 12], [13], [14, EOS, 15]):
            save_target(p.writer, [0], [tokens])
        first, second, last = outputs = p.outputs()
        for o in outputs:
            assert (o.num_cached_tokens, o.prompt_token_ids_len) == (3, 2)
            assert (o.num_input_image_tokens, o.num_input_video_tokens) == (4, 5)
            assert (o.ic_req_data, o.error_code, o.error_msg) == ({"x": 1}, 200, None)
            assert (o.output_type, o.prompt_token_ids, o.outputs.index) == (3, [], 0)
            assert o.outputs.decode_type == 0
        assert [o.prompt for o in outputs] == [[{"role": "user"}], None, None]
        assert [o.trace_carrier for o in outputs] == [None, None, {"root": "span"}]
        assert [o.outputs.send_idx for o in outputs] == [0, 2, 3]
        assert [o.finished for o in outputs] == [False, False, True]
        assert [o.finish_reason for o in outputs] == [None, None, "stop"]
        assert [o.outputs.token_ids for o in outputs] == [[11, 12], [13], [14, EOS]]
        for o in outputs:
            assert o.outputs.top_logprobs == lists_of(o.outputs.token_ids)
            assert o.outputs.logprob == lists_of(o.outputs.token_ids).logprobs[-1][0]
        assert type(first.outputs.token_ids[0]) is int
        assert type(first.outputs.logprob) is float
        assert [o.metrics.speculate_metrics for o in (first, second)] == [None, None]
        assert last.metrics.speculate_metrics == SpeculateMetrics.of([3, 2, 0], 3, DEPTH - 1)


ENDS = {
    "recovery": (200, "Recover is not supported, the result is incomplete!"),
    "abort": (200, "Aborted"),
    "error": (500, "the request ended by an error of the pipeline or the engine"),
    "shutdown": (503, "the pipeline was shut down"),
}


@pytest.mark.parametrize("reason", ENDS)
def test_an_end_without_a_token_says_why(reason: str) -> None:
    with running() as p:
        save_target(p.writer, [0], [[11]])
        p.pump()
        if reason == "recovery":
            save_target(p.writer, [0], [[12]], states=np.array([2], np.uint8))
        else:
            p.book.mark(0, 1, FinishReason[reason.upper()])
        last = p.outputs()[-1]
        assert (last.finish_reason, last.finished, last.outputs.token_ids) == (reason, True, [])
        assert (last.error_code, last.error_msg) == ENDS[reason]
        assert (last.outputs.send_idx, last.outputs.top_logprobs) == (1, None)
        assert last.outputs.logprob is None


@pytest.mark.parametrize("reason", ["abort", "recovery"])
def test_an_end_before_the_first_token(reason: str) -> None:
    with running() as p:
        if reason == "abort":
            p.book.mark(0, 1, FinishReason.ABORT)
        else:
            p.writer.save_output([5], generations=[1], states=np.array([2], np.uint8))
        [only] = p.outputs()
        assert (only.finish_reason, only.outputs.send_idx) == (reason, 0)


@pytest.mark.parametrize("how", ["recovery", "adapter"])
def test_the_statistics_come_with_a_last_output_without_tokens(how: str) -> None:
    with running(internal_adapter=how == "adapter") as p:
        save_target(p.writer, [0], [[11, 12]])
        states = np.array([2 if how == "recovery" else 0], np.uint8)
        save_target(p.writer, [0], [[EOS]], states=states)
        assert p.outputs()[-1].metrics.speculate_metrics is not None


def test_the_internal_adapter_gets_no_end_token_and_no_candidates_of_it() -> None:
    """F24: ids and candidates stay of one length."""
    with running(internal_adapter=True) as p:
        save_target(p.writer, [0], [[11, EOS, 12]])
        [output] = p.outputs()
        assert (output.finish_reason, output.outputs.token_ids) == ("stop", [11])
        assert output.outputs.top_logprobs == lists_of([11])


def test_a_prefill_instance_hands_its_drafts_over() -> None:
    with running(role="prefill", disaggregate_info={"role": "prefill"}) as p:
        save_target(p.writer, [0], [[11, 12]])
        [output] = p.outputs()
        assert (output.outputs.token_ids, output.outputs.draft_token_ids) == ([11], [11, 12])
        assert output.finished


def test_a_decode_instance_stamps_its_second_token() -> None:
    with running(role="decode", num_emitted_tokens=1) as p:
        save_target(p.writer, [0], [[11]])
        save_target(p.writer, [0], [[12]])
        first, second = p.outputs()
        stamp = first.metrics.decode_recv_second_token_time
        assert stamp == first.metrics.engine_recv_latest_token_time
        assert second.metrics.decode_recv_second_token_time == stamp
        assert first.outputs.send_idx == 1
        assert first.metrics.engine_recv_first_token_time is None
        assert first.prompt is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_roles_do_not_change_a_request_that_runs_on_one_instance(role: str) -> None:
    with running(role=role) as p:
        save_target(p.writer, [0], [[11, 12]])
        save_target(p.writer, [0], [[13]])
        assert [o.outputs.token_ids for o in p.outputs()] == [[11, 12], [13]]


def test_requests_of_different_widths_share_a_pipeline() -> None:
    """B78: each gets what its step had: none, one, all."""
    with running() as p:
        c = candidates_of([11])
        p.writer.save_output([11], generations=[1])
        for width in (1, WIDTH):
            cut = {n: c[n][:, :width] for n in ("topk_ids", "logprobs")}
            p.writer.save_output_topk([11], **cut, ranks=c["ranks"], generations=[1])
        none, one, every = (o.outputs for o in p.outputs())
        assert (none.top_logprobs, none.logprob) == (None, None)
        assert one.top_logprobs.logprobs == [c["logprobs"][0, :1].tolist()]
        assert one.logprob == every.logprob == float(c["logprobs"][0, 0])
        assert every.top_logprobs == lists_of([11])


def test_what_was_not_sent_is_none_in_a_slot_that_held_it_before() -> None:
    """B75: slots come round again; nothing of their former step shows."""
    with running(ring_slots=2, output_slots=2, source_slots=2) as p:
        for step in range(8):
            if step % 2:
                p.writer.save_output([11 + step], generations=[1])
            else:
                save_target(p.writer, [0], [[11 + step]])
            [output] = p.outputs()
            wanted = None if step % 2 else lists_of([11 + step])
            assert output.outputs.top_logprobs == wanted


# --- events


class Listener:
    """Keeps what it hears, and raises."""

    def __init__(self) -> None:
        self.heard: list[RequestEvent] = []

    def __call__(self, event: RequestEvent) -> None:
        self.heard.append(event)
        raise RuntimeError("the callback is broken")

    def names(self, request_id: str) -> list[str]:
        return [e.name for e in self.heard if e.request_id == request_id]


def test_events_and_finish_lines_are_told_and_cost_no_token(unique_name: str) -> None:
    listener, now = Listener(), time.time()
    metrics = RequestMetrics(
        arrival_time=now - 4, preprocess_end_time=now - 3, inference_start_time=now - 1
    )
    metrics.gpu_cache_token_num, metrics.cpu_cache_token_num, metrics.preempted_count = 5, 6, 7
    config = config_of(name=unique_name)
    with tp.Pipeline(config, on_event=listener) as pipe, pipe.engine_writer() as engine:
        pipe.submit(request("a", prompt_token_ids=[1, 2, 3], user="u", metrics=metrics))
        pipe.submit(request("b"))
        save_target(engine, [0, 1], [[11, 12], [21]])
        save_target(engine, [0, 1], [[13], [22]])
        pipe.sync()
        pipe.abort("b")
        save_target(engine, [0, 1], [[14, EOS], [23]])
        outputs: list[AnyOutput] = []
        wait_until(lambda: (outputs.extend(read(pipe)), sum(o.finished for o in outputs) == 2)[1])
    found = by_request(outputs)
    assert [t for o in found["a"] for t in o.outputs.token_ids] == [11, 12, 13, 14, EOS]
    assert [t for o in found["b"] for t in o.outputs.token_ids] == [21, 22]
    began = ["FIRST_TOKEN_GENERATED", "DECODE_START"]
    assert listener.names("a") == [*began, "INFERENCE_END", "POSTPROCESSING_START", "FINISHED"]
    assert listener.names("b") == [*began, "FINISHED"]
    stages = {e.name: e.stage for e in listener.heard}
    assert stages == {
        "FIRST_TOKEN_GENERATED": "PREFILL",
        "DECODE_START": "DECODE",
        "INFERENCE_END": "DECODE",
        "POSTPROCESSING_START": "POSTPROCESSING",
        "FINISHED": "POSTPROCESSING",
    }
    last = found["a"][-1].metrics
    line = next(e for e in listener.heard if e.name == "FINISHED" and e.request_id == "a")
    assert (line.user, line.time_s) == ("u", last.engine_recv_latest_token_time)
    e2e = last.engine_recv_latest_token_time - metrics.inference_start_time
    ttft = last.engine_recv_first_token_time - metrics.inference_start_time
    assert line.fields == {
        "Request": "a",
        "InputToken": 3,
        "CachedDetail": {"CachedToken": 11, "GPU": 5, "CPU": 6},
        "OutputToken": 5,
        "TokenRatio": pytest.approx(5 / e2e),
        "TTFT": pytest.approx(ttft),
        "TTFT_S": pytest.approx(ttft + 2),
        "E2E": pytest.approx(e2e),
        "IsPrefill": False,
        "RecoveryStop": False,
        "PreemptedCount": 7,
        "FinishReason": "stop",
    }


# --- metrics

LAT = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000]
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1]
FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1]
PREFIX = "fastdeploy:"


def scrape(pipe: tp.Pipeline) -> dict[str, Any]:
    """The families of /metrics over HTTP."""
    url = pipe.health_url.replace("/health", "/metrics")
    with urllib.request.urlopen(url, timeout=20) as reply:
        return families(reply.read())


def families(text: bytes) -> dict[str, Any]:
    """family -> (type, {(suffix, bound): value})."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        samples = {
            (s.name.removeprefix(family.name), s.labels.get("le", "")): s.value
            for s in family.samples
        }
        found[family.name] = (family.type, samples)
    return found


class Recomputed:
    """FastDeploy's figures from the delivered objects alone."""

    def __init__(self, outputs: Sequence[AnyOutput]) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self.tokens = self.success = 0
        self.heads = [0] * DEPTH
        self.rows = 0
        for got in by_request(outputs).values():
            self._request(got)

    def _request(self, got: list[Any]) -> None:
        total, previous = 0, 0.0
        for o in got:
            tokens = [] if isinstance(o, PoolingRequestOutput) else o.outputs.token_ids
            m, now = o.metrics, o.metrics.engine_recv_latest_token_time
            if tokens and not total:
                self.values["time_to_first_token_seconds"].append(now - m.arrival_time)
                if m.inference_start_time:
                    start = m.inference_start_time
                    queued = start - m.preprocess_end_time
                    self.values["request_queue_time_seconds"].append(queued)
                    self.values["request_prefill_time_seconds"].append(now - start)
            elif tokens:
                gap = (now - previous) / len(tokens)
                self.values["time_per_output_token_seconds"] += [gap] * len(tokens)
            if tokens:
                previous = now
                self.rows += 1
                for head in range(len(tokens)):
                    self.heads[head] += 1
            total += len(tokens)
            if o.finish_reason in ("stop", "length", "recovery"):
                self._end(m, now, total)
        self.tokens += total

    def _end(self, m: RequestMetrics, now: float, total: int) -> None:
        self.success += 1
        self.values["request_generation_tokens"].append(total)
        if m.engine_recv_first_token_time:
            first = m.engine_recv_first_token_time
            self.values["request_decode_time_seconds"].append(now - first)
        if m.inference_start_time:
            e2e = now - m.inference_start_time
            self.values["request_inference_time_seconds"].append(e2e)
            self.values["request_token_ratio"].append(total / e2e)


BOUNDS = {
    "time_to_first_token_seconds": FIRST,
    "time_per_output_token_seconds": PER_TOKEN,
    "request_queue_time_seconds": LAT,
    "request_prefill_time_seconds": LAT,
    "request_decode_time_seconds": LAT,
    "request_inference_time_seconds": LAT,
    "request_generation_tokens": COUNTS,
    "request_token_ratio": None,  # FastDeploy's are not known
}


def mixed_run(pipe: tp.Pipeline, engine: tp.EngineWriter) -> list[AnyOutput]:
    """Requests of every kind and end; returns what was delivered."""
    now = time.time()
    for i in range(6):
        metrics = RequestMetrics(arrival_time=now - 0.12 * (i + 1))
        if i % 2 == 0:
            metrics.preprocess_end_time = now - 7 - i
            metrics.inference_start_time = now - 0.4 * (i + 1)
        limit = 5 if i == 1 else None
        pipe.submit(request(f"r{i}", metrics=metrics, max_tokens=limit, num_blocks=2))
    rows = list(range(6))
    save_target(engine, rows, [[11, 12], [21], [31], [41, 42, 43], [51], []])
    save_target(engine, rows, [[13], [22, 23, 24], [32], [44], [52], []])
    outputs = read(pipe)
    pipe.abort("r4")
    save_target(engine, rows, [[14, EOS, 15], [25, 26], [33], [45], [53], []])
    states = np.array([1, 1, 2, 1, 3, 1], np.uint8)
    save_target(engine, rows, [[], [], [], [], [], []], states=states)
    engine.save_pooling(np.ones((1, 4), np.float32), rows=[5], generations=[1])
    return outputs + read(pipe)


def test_every_name_of_fastdeploy_holds_what_was_delivered(unique_name: str) -> None:
    config = config_of(name=unique_name, max_num_seqs=8, num_blocks=32)
    with tp.Pipeline(config) as pipe, pipe.engine_writer() as engine:
        outputs = mixed_run(pipe, engine)
        ends = {name: got[-1].finish_reason for name, got in by_request(outputs).items()}
        assert ends == {
            "r0": "stop",
            "r1": "length",
            "r2": "recovery",
            "r3": None,
            "r4": "abort",
            "r5": "stop",
        }
        wait_until(lambda: pipe.status()["rows"]["live"] == 1)
        found = scrape(pipe)
    wanted = Recomputed(outputs)
    for name, bounds in BOUNDS.items():
        kind, samples = found[PREFIX + name]
        values = wanted.values[name]
        assert kind == "histogram"
        assert samples["_count", ""] == len(values) > 0, name
        # What is kept is whole ns (and tokens per 1000 s): less than the stamps' own rounding.
        tolerance = 2e-3 if name == "request_token_ratio" else 1e-5
        assert samples["_sum", ""] == pytest.approx(sum(values), abs=tolerance * len(values)), name
        if bounds is None:
            continue
        of_bound = {float(le): v for (part, le), v in samples.items() if part == "_bucket"}
        assert sorted(of_bound) == pytest.approx([*bounds, float("inf")])
        ordered = sorted(values)
        for bound, count in of_bound.items():
            below = bisect.bisect_right(ordered, bound + 1e-6)
            assert bisect.bisect_right(ordered, bound - 1e-6) <= count <= below, (name, bound)
    emitted, accepted = sum(wanted.heads), sum(wanted.heads[1:])
    n = DEPTH - 1
    values = {
        "generation_tokens": ("counter", wanted.tokens),
        "request_success": ("counter", wanted.success),
        "num_requests_running": ("gauge", 1),
        "batch_size": ("gauge", 1),
        "available_batch_size": ("gauge", 7),
        "available_gpu_block_num": ("gauge", 30),
        "spec_decode_num_accepted_tokens": ("counter", accepted),
        "spec_decode_num_emitted_tokens": ("counter", emitted),
        "spec_decode_num_draft_tokens": ("counter", wanted.rows * n),
        "spec_decode_draft_acceptance_rate": ("gauge", accepted / (wanted.rows * n)),
        "spec_decode_efficiency": ("gauge", emitted / (wanted.rows * (n + 1))),
        "spec_decode_draft_single_head_acceptance_rate_0": (
            "gauge",
            wanted.heads[1] / wanted.heads[0],
        ),
        "spec_decode_draft_single_head_acceptance_rate_1": (
            "gauge",
            wanted.heads[2] / wanted.heads[1],
        ),
    }
    for name, (kind, value) in values.items():
        got_kind, samples = found[PREFIX + name]
        suffix = "_total" if kind == "counter" else ""
        assert (got_kind, samples[suffix, ""]) == (kind, pytest.approx(value)), name


def test_ngram_has_its_own_rate_and_a_prefix_may_be_chosen() -> None:
    with running(speculative_method="ngram", metrics_prefix="mine_") as p:
        save_target(p.writer, [0], [[11, 12, 13]])
        p.pump()
        found = families(Exporter(p.segment).scrape())
        assert found["mine_spec_decode_draft_acceptance_rate"][1]["", ""] == pytest.approx(2 / 3)
        assert "mine_spec_decode_efficiency" not in found
        assert not any(name.startswith(PREFIX) for name in found)


def test_work_is_spread_evenly_over_the_decoders() -> None:
    """B81: 256 requests of unequal length, 4 decoders."""
    n, rng = 256, np.random.default_rng(0)
    config = config_of(max_num_seqs=n, num_decoders=4, command_slots=16)
    with InProcess(config) as p:
        lengths = rng.geometric(0.1, n)
        generations = [
            p.submit(request(f"r{i}", max_tokens=int(lengths[i])), row=i).generation
            for i in range(n)
        ]
        for _ in range(int(lengths.max())):
            p.writer.save_output(np.full(n, 11), generations=generations)
            p.pump()
            for batch in p.batches():
                assert len(batch)
        commits = View(p.segment).commits()
        delivered = [int(c["counters"]["tokens_delivered"]) for c in commits]
        assert sum(delivered) == lengths.sum()
        assert max(delivered) <= 1.5 * sum(delivered) / 4


def test_prompt_logprobs_that_are_saved_twice_come_once() -> None:
    """As after a preemption that fills the prompt again: the last value of each place counts."""
    with InProcess(drafts_config(enable_draft_logprob=False)) as p:
        p.submit(request("r0", prompt_token_ids=[1] * 4))
        p.writer.save_prompt_logprobs(0, 1, [5, 6], **candidates_of([5, 6]))
        p.writer.save_prompt_logprobs(0, 1, [7, 8, 9], **candidates_of([7, 8, 9]))
        save_target(p.writer, [0], [[11]])
        [output] = p.outputs()
        assert isinstance(output, tp.RequestOutput)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.sampled_token_ranks == [8, 9, 10]
