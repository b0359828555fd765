"""FastDeploy's calls into a pipeline's shared memory: what its client gets of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inprocess import InProcess

import tokenpipe as tp
from tokenpipe.errors import OpArgumentError
from tokenpipe.ops.shm import ShmOps

ROWS, WIDTH, DEPTH = 6, 3, 3
PROMPT = np.full(ROWS, 4)
DECODED = np.array([9, 9, 9, 9, 9, 1], np.int32)  # row 5 is in its prompt
MARKS = np.array([[0], [0], [0], [1], [0], [0], [0]], np.int32)  # row 3 is preempted
HAS_WORK = np.array([True])


class Engine:
    """A pipeline of ROWS running requests, and what its client has got by row."""

    def __init__(self, **more: Any) -> None:
        about: dict[str, Any] = {"max_num_seqs": ROWS, "top_logprobs": WIDTH - 1, "num_decoders": 1}
        self.pipe = InProcess(tp.PipelineConfig(**about, max_draft_tokens=DEPTH, **more))
        for row in range(ROWS):
            self.pipe.submit(tp.Request(f"r{row}", prompt_token_ids=[1], eos_token_ids=[2]))
        self.ops = ShmOps(self.pipe.writer)
        self.step = self.ops.begin_step([1] * ROWS)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.__exit__(None, None, None)

    def tokens(self) -> dict[int, list[int]]:
        return {row: tokens for row, (tokens, _, _, _) in self.outputs().items() if tokens}

    def outputs(self) -> dict[int, tuple[list[int], Any, Any, Any]]:
        self.pipe.pump()
        got = {}
        for batch in self.pipe.batches():
            b = batch.copy()
            for i, row in enumerate(b.row.tolist()):
                part = slice(b.token_offsets[i], b.token_offsets[i + 1])
                columns = (b.topk_ids, b.topk_logprobs, b.ranks)
                got[row] = (
                    b.token_ids[part].tolist(),
                    *(None if c is None or not c.size else c[part].tolist() for c in columns),
                )
        return got


def candidates(n: int) -> tuple[Any, Any, Any]:
    ids = 100 + np.arange(n * WIDTH).reshape(n, WIDTH)
    return ids, -ids.astype(np.float32) / 8, ids[:, 0] + 1


def test_a_token_per_row_and_what_the_wires_values_mean() -> None:
    with Engine() as engine:
        x = np.array([[10], [-1], [-3], [13], [-9], [15]])
        engine.ops.save_output(x, HAS_WORK, MARKS, 0, False, step=engine.step)
        got = engine.outputs()
        assert {row: tokens for row, (tokens, *_) in got.items()} == {0: [10], 2: [], 5: [15]}
        assert engine.pipe.counters()["tokens_seen"] == 2


def test_a_token_per_row_with_candidates() -> None:
    with Engine() as engine:
        ids, scores, ranks = candidates(ROWS)
        x = ids[:, :1] + 500
        engine.ops.save_output_topk(x, ids, scores, ranks, HAS_WORK, MARKS, 0, step=engine.step)
        got = engine.outputs()
        assert sorted(got) == [0, 1, 2, 4, 5]
        assert got[4] == ([612], [[612, 113, 114]], [scores[4].tolist()], [ranks[4]])
        assert ids[4, 0] == 112, "the caller's tensor was written"


@pytest.mark.parametrize("skip_prefill", [False, True])
def test_accepted_tokens(skip_prefill: bool) -> None:
    with Engine() as engine:
        tokens = 10 + np.arange(ROWS * DEPTH).reshape(ROWS, DEPTH)
        counts = np.array([3, 0, 1, 2, -9, 2], np.int32)
        inputs = (tokens, counts, HAS_WORK, DECODED, PROMPT, MARKS, 0, False, skip_prefill)
        engine.ops.speculate_save_output(*inputs, step=engine.step)
        rest = {} if skip_prefill else {5: [25, 26]}
        assert engine.tokens() == {0: [10, 11, 12], 2: [16], **rest}


def test_first_tokens() -> None:
    with Engine() as engine:
        x = 10 + np.arange(ROWS * DEPTH).reshape(ROWS, DEPTH)
        steps = np.array([0, 1, 2, 1, 1, 1])
        inputs = (x, HAS_WORK, DECODED, PROMPT, steps, 0, False, True)
        engine.ops.mtp_save_first_token(*inputs, step=engine.step)
        assert engine.tokens() == {1: [13, 14], 3: [19, 20], 4: [22, 23]}


SAMPLED = 10 + np.arange(ROWS * DEPTH).reshape(ROWS, DEPTH)
COUNTS = np.array([2, 0, 1, 1, 2, 1], np.int32)
OFFSETS = np.array([0, 2, 2, 3, 4, 6, 7], np.int32)


def test_accepted_tokens_with_candidates() -> None:
    with Engine() as engine:
        ids, scores, ranks = candidates(7)
        inputs = (SAMPLED, ids, scores, ranks, COUNTS, OFFSETS, HAS_WORK, DECODED, PROMPT, MARKS)
        engine.ops.speculate_save_output_topk(*inputs, 3, 0, False, step=engine.step)
        got = {row: output for row, output in engine.outputs().items() if output[0]}
        assert sorted(got) == [0, 2, 4]
        assert got[4] == (
            [22, 23],
            [[22, 113, 114], [23, 116, 117]],
            *(scores[4:6].tolist(), ranks[4:6].tolist()),
        )


def test_first_tokens_with_candidates() -> None:
    with Engine() as engine:
        ids, scores, ranks = candidates(7)
        counts = COUNTS.copy()
        counts[1] = -9  # as 0, but that the row is let go of
        inputs = (SAMPLED, ids, scores, ranks, counts, OFFSETS, HAS_WORK, DECODED, PROMPT, MARKS)
        engine.ops.mtp_save_first_token_with_topk(*inputs, 3, 0, False, step=engine.step)
        got = {row: output for row, output in engine.outputs().items() if output[0]}
        assert {row: output[0] for row, output in got.items()} == {
            0: [10, 11, 12],
            2: [16, 17],
            4: [22, 23, 24],
        }
        assert got[2][1:] == (
            [[16, 107, 108], [17, -1, -1]],
            *([scores[2].tolist(), [0.0] * WIDTH], [ranks[2], 0]),
        )


def test_ranks_above_0_save_nothing() -> None:
    with Engine() as engine:
        engine.ops.save_output(np.zeros((ROWS, 1), int), HAS_WORK, MARKS, 1, step=engine.step)
        assert engine.tokens() == {}


def test_offsets_beyond_the_candidates_are_refused() -> None:
    with Engine() as engine:
        ids, scores, ranks = candidates(5)
        inputs = (SAMPLED, ids, scores, ranks, COUNTS, OFFSETS, HAS_WORK, DECODED, PROMPT, MARKS)
        with pytest.raises(OpArgumentError, match=r"cu_batch_token_offset\[4\] is 4.* 5 rows"):
            engine.ops.speculate_save_output_topk(*inputs, 3, 0, False, step=engine.step)
        short = PROMPT[:3]
        inputs = (SAMPLED, COUNTS, HAS_WORK, DECODED, short, MARKS, 0, False, True)
        with pytest.raises(OpArgumentError, match="prompt_lens has 3 elements"):
            engine.ops.speculate_save_output(*inputs, step=engine.step)
        assert engine.tokens() == {}


def test_the_ops_attach_to_a_running_pipeline(unique_name: str) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=2, num_decoders=1)
    with tp.Pipeline(config) as pipe, ShmOps.attach(unique_name) as ops:
        admission = pipe.submit(tp.Request("a", prompt_token_ids=[1], eos_token_ids=[2]))
        step = ops.begin_step([admission.generation])
        ops.save_output(np.array([[2]]), True, step=step)
        [output] = next(pipe.batches(timeout_s=20))
        assert output.finished
