"""The plugin over FastDeploy's socket (FD_USE_GET_SAVE_OUTPUT_V1=1): what differs from the queue.

The worker is a PUSH socket that sends what FastDeploy's would; the engine is a stand-in.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import fastdeploy_standins as fd
import numpy as np
import pytest
from driven_plugin import RECOVERY_TEXT, Driven, driven_by_zmq, row, said
from stand_ins import candidates, record

import tokenpipe as tp
from support import wait_until
from tokenpipe.fastdeploy.settings import config_of
from tokenpipe.objects import GAP_TEXT

WIDTH = 31
"""Columns of a token's candidates: more than FastDeploy's queue carries."""
FLOATS = 8


@pytest.fixture(scope="module")
def zmq_engine() -> Iterator[Driven]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENPIPE_MAX_POOLING_FLOATS", str(FLOATS))
        patch.setenv("TOKENPIPE_NUM_DECODERS", "2")
        with driven_by_zmq(patch, logprob=True, max_logprobs=WIDTH - 1) as engine:
            yield engine


@pytest.fixture
def engine(zmq_engine: Driven) -> Driven:
    """A mixed instance of 4 rows with an empty V1 manager."""
    return zmq_engine.start_afresh()


def wide(row: int, token: int) -> Any:
    """A record with WIDTH candidates, the token first."""
    ids, scores = _candidates(token)
    return record(row, token, logprobs=candidates([ids], [scores], [token]))


def _candidates(token: int) -> tuple[list[int], list[float]]:
    ids = list(range(token, token + WIDTH))
    return ids, [-i / 8 for i in ids]


def pooled(row: int, *vector: float) -> Any:
    """A record with a vector."""
    return record(row, pooler_output=np.array(vector, np.float32))


# --- settings


def test_the_socket_is_where_the_worker_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = fd.config(num_rows=7, role="decode", logprob=True, max_logprobs=50)
    cfg.parallel_config.local_data_parallel_id = 3
    cfg.parallel_config.local_engine_worker_queue_port = 8123
    found = config_of(cfg, use_zmq=True)
    assert (found.source, found.zmq_socket) == (
        "zmq",
        "/dev/shm/get_save_output_rank3_8123.socket",
    )
    assert (found.top_logprobs, found.max_num_seqs, found.role) == (50, 7, "decode")
    assert (found.max_pooling_floats, found.report_acknowledgements) == (0, True)
    for name, value in (("ZMQ_SOCKET", "/tmp/s"), ("TOP_LOGPROBS", 5), ("MAX_POOLING_FLOATS", 9)):
        monkeypatch.setenv(f"TOKENPIPE_{name}", str(value))
    found = config_of(cfg, use_zmq=True)
    assert (found.zmq_socket, found.top_logprobs, found.max_pooling_floats) == ("/tmp/s", 5, 9)


def test_no_candidates_are_expected_where_fastdeploy_has_none() -> None:
    assert config_of(fd.config(max_logprobs=50), use_zmq=True).top_logprobs == 0


@pytest.mark.parametrize(
    ("settings", "field", "variable"),
    [
        ({"logprob": True, "max_logprobs": -1}, "max_logprobs", "TOP_LOGPROBS"),
        ({"runner_type": "pooling"}, "max_pooling_floats", "MAX_POOLING_FLOATS"),
    ],
)
def test_a_size_that_fastdeploy_does_not_say_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], field: str, variable: str
) -> None:
    with pytest.raises(tp.ConfigError, match=f"TOKENPIPE_{variable}") as caught:
        config_of(fd.config(**settings), use_zmq=True)
    assert caught.value.field == field
    monkeypatch.setenv(f"TOKENPIPE_{variable}", "7")
    assert config_of(fd.config(**settings), use_zmq=True).source == "zmq"


def test_a_start_without_pyzmq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(tp.ConfigError, match=r"pip install 'tokenpipe\[zmq\]'") as caught:
        config_of(fd.config(), use_zmq=True)
    assert caught.value.field == "FD_USE_GET_SAVE_OUTPUT_V1"


# --- outputs


def test_tokens_are_one_list_per_message_in_row_order(engine: Driven) -> None:
    for i in range(2):
        engine.admit(i, f"q{i}", num_cached_tokens=3, messages="hello")
    engine.send([record(1, 9), record(0, 5), record(3, 1)], [record(0, 2), record(1, -1)])
    lists = engine.lists()
    assert [[said(o) for o in outputs] for outputs in lists] == [
        [row("q0", 0, 0, [5]), row("q1", 1, 0, [9])],
        [row("q0", 0, 1, [2], end=True)],
    ]
    outputs = [o for outputs in lists for o in outputs]
    assert [o.prompt for o in outputs] == ["hello", "hello", None]
    fields = {(o.num_cached_tokens, o.prompt_token_ids_len, o.output_type) for o in outputs}
    assert fields == {(3, 3, 3)}, "as on the queue (fault F49)"
    assert outputs[-1].trace_carrier is not None
    assert ("cache", "q0", "held") in engine.calls.made
    engine.send([record(0, -1), record(1, -1)])
    assert engine.lists() == [], "no row has an output"


def test_more_candidates_than_the_queue_carries(engine: Driven) -> None:
    for i in range(3):
        engine.admit(i, f"w{i}")
    outputs = engine.step([wide(0, 40), record(1, 7), wide(2, 60)])
    by_id = {o.request_id: o.outputs for o in outputs}
    for request_id, token in (("w0", 40), ("w2", 60)):
        ids, scores = _candidates(token)
        got = by_id[request_id]
        assert isinstance(got.top_logprobs, fd.LogprobsLists)
        assert got.top_logprobs == ([ids], [scores], [token])
        assert (got.token_ids, got.logprob) == ([token], scores[0])
    assert (by_id["w1"].token_ids, by_id["w1"].top_logprobs) == ([7], None)


def test_prompt_logprobs_come_with_their_requests_first_output(engine: Driven) -> None:
    engine.admit(0, "other")
    engine.admit(1, "asks")
    ids = np.arange(300).reshape(100, 3)  # more than one step of the ring holds
    prompt = candidates(ids, ids / 8, np.arange(100))
    engine.step([record(0, 5)])
    other, first = engine.step([record(0, 6), record(1, 7, prompt_logprobs=prompt)])
    _, second = engine.step([record(0, 6), record(1, 8)])
    assert [o.prompt_logprobs for o in (other, second)] == [None, None]
    found = first.prompt_logprobs
    assert isinstance(found, fd.LogprobsTensors)
    assert found.logprobs.shape == (100, 3)
    assert found.logprob_token_ids.flatten().tolist() == ids.ravel().tolist()
    assert found.logprobs.tolist() == (ids / 8).tolist()
    assert found.selected_token_ranks.tolist() == list(range(100))
    assert (first.outputs.token_ids, first.outputs.send_idx) == ([7], 0)


def test_a_vector_ends_its_request(engine: Driven) -> None:
    metrics = engine.metrics
    before = (metrics.request_success_total.value, len(metrics.time_to_first_token.observed))
    task = engine.admit(0, "embed", pooling_params=object())
    engine.admit(1, "chat")
    chat, got = engine.step([pooled(0, 0.5, 2.0, -1.0), record(1, 7)])
    assert said(chat) == row("chat", 1, 0, [7])
    assert isinstance(got, fd.PoolingRequestOutput)
    assert (got.request_id, got.finished, got.outputs) == (
        "embed",
        True,
        fd.PoolingOutput([0.5, 2.0, -1.0]),
    )
    assert (got.error_code, got.error_msg) == (200, None)
    assert got.prompt_token_ids == task.prompt_token_ids
    assert got.metrics.engine_recv_first_token_time is not None
    assert got.metrics is not task.metrics
    assert ("finish", "embed") in engine.calls.made
    assert engine.manager.stop_flags[0]
    after = (metrics.request_success_total.value, len(metrics.time_to_first_token.observed))
    assert after == (before[0] + 1, before[1] + 2)
    engine.admit(0, "again", pooling_params=object())
    assert [o.outputs.data for o in engine.step([pooled(0, 4.0)])] == [[4.0]]


def test_speculative_rows_and_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    with driven_by_zmq(
        monkeypatch, method=fd.SpecMethod.MTP, num_drafts=2, logprob=True, draft_logprob=True
    ) as engine:
        for i in range(2):
            engine.admit(i, f"s{i}")
        engine.manager.preempt("s1")
        drafts = candidates([[8, 1], [9, 2]], [[-1, -2], [-3, -4]], [1, 2])
        (got,) = engine.step(
            [
                record(0, accept_tokens=np.array([5, 6, 0]), accept_num=2),
                record(
                    0, accept_tokens=np.array([8, 9]), accept_num=2, output_type=4, logprobs=drafts
                ),
            ]
        )
        assert said(got) == row("s0", 0, 0, [5, 6])
        assert got.outputs.draft_top_logprobs == ([[8, 1], [9, 2]], [[-1, -2], [-3, -4]], [1, 2])
        assert engine.calls.named("reschedule") == [("reschedule", "s1")]


# --- special ids


@pytest.mark.parametrize(
    ("value", "v1", "marks", "calls", "end"),
    [
        (-3, True, "", ["finish"], RECOVERY_TEXT),
        (-3, False, "", ["blocks"], RECOVERY_TEXT),
        (-9, True, "r", ["reschedule"], None),
        (-9, True, "a", ["abort"], "Aborted"),
        (-9, True, "ar", ["abort", "reschedule"], "Aborted"),
        (-9, True, "", [], None),
        (-9, False, "", [], None),
        (-1, True, "ar", [], None),
        (-2, True, "ar", [], None),
    ],
)
def test_what_a_special_id_leads_to(
    zmq_engine: Driven, value: int, v1: bool, marks: str, calls: list[str], end: str | None
) -> None:
    engine = zmq_engine.start_afresh(v1=v1)
    engine.admit(0, "x")
    engine.admit(1, "y")
    engine.step([record(0, 5), record(1, 5)])
    if v1:
        with engine.manager.lock:
            if "a" in marks:
                engine.manager.to_be_aborted_req_id_set.add("x")
            if "r" in marks:
                engine.manager.to_be_rescheduled_request_id_set.add("x")
    outputs = sorted((said(o) for o in engine.step([record(0, value), record(1, 6)])), key=str)
    expected = [row("y", 1, 1, [6])]
    if end is not None:
        expected.append(row("x", 0, 1, [], end=True, error=end))
    assert outputs == sorted(expected, key=str)
    made = engine.calls.named("finish", "blocks", "abort", "reschedule")
    assert [call[0] for call in made] == calls
    assert engine.manager.stop_flags[0] == (end is not None)


def test_the_row_of_an_aborted_request_serves_the_next_one_at_once(engine: Driven) -> None:
    for i in range(10):
        engine.admit(0, f"a{i}")
        engine.step([record(0, 5)])
        engine.manager.abort(f"a{i}")
        engine.send([record(0, -9)])
        wait_until(lambda: engine.manager.stop_flags[0])
    assert engine.processor._rows.num_taken_over == 0


# --- preempted rows that a message does not name


def test_a_preempted_row_that_a_message_does_not_name_is_rescheduled(engine: Driven) -> None:
    for i in range(2):
        engine.admit(i, f"p{i}")
    engine.step([record(0, 5), record(1, 5)])
    engine.manager.preempt("p1")
    (on_its_way,) = engine.step([record(1, 6)])
    assert said(on_its_way) == row("p1", 1, 1, [6])
    assert engine.calls.named("reschedule") == []
    assert [said(o) for o in engine.step([record(0, 6)])] == [row("p0", 0, 1, [6])]
    assert engine.calls.named("reschedule") == [("reschedule", "p1")]
    assert [task.request_id for task in engine.manager.waiting] == ["p1"]
    engine.manager.tasks_list[1] = engine.manager.requests["p1"]  # the same life
    assert [said(o) for o in engine.step([record(1, 7)])] == [row("p1", 1, 2, [7])]
    assert len(engine.calls.named("reschedule")) == 1


@pytest.mark.parametrize("request_row", [0, 1])
def test_a_message_that_names_a_preempted_row_without_a_token_leaves_it(
    engine: Driven, request_row: int
) -> None:
    other = 1 - request_row
    engine.admit(request_row, "p")
    engine.admit(other, "q")
    engine.manager.preempt("p")
    assert [o.request_id for o in engine.step([record(request_row, -1), record(other, 5)])] == ["q"]
    assert engine.step([record(request_row, -1)]) == []
    assert engine.calls.named("reschedule") == []
    assert engine.step([record(request_row, -9)]) == []
    assert engine.calls.named("reschedule") == [("reschedule", "p")]


@pytest.mark.parametrize("order", [1, -1])
def test_a_message_of_several_steps_is_looked_at_as_a_whole(engine: Driven, order: int) -> None:
    for i in range(4):
        engine.admit(i, f"m{i}")
    engine.manager.preempt("m1")
    engine.manager.preempt("m3")
    records = [wide(0, 40), record(1, 7), pooled(2, 1.0)][::order]
    got = engine.step(records)
    assert sorted(o.request_id for o in got) == ["m0", "m1", "m2"]
    assert engine.calls.named("reschedule") == [("reschedule", "m3")]


def test_a_message_about_nobody_lets_preempted_rows_go(engine: Driven) -> None:
    engine.admit(0, "p")
    engine.manager.preempt("p")
    engine.send([record(3, 5)])  # a row that no task has
    assert engine.lists() == []
    assert engine.calls.named("reschedule") == [("reschedule", "p")]


def test_a_refused_message_says_nothing_of_rows_that_it_does_not_show(engine: Driven) -> None:
    engine.admit(0, "bad")
    engine.admit(1, "p")
    engine.manager.preempt("p")
    too_wide = candidates([[1] * (WIDTH + 1)], [[0.0] * (WIDTH + 1)], [1])
    (got,) = engine.step([record(0, 1, logprobs=too_wide)])
    assert (got.request_id, got.finished, got.error_code) == ("bad", True, 500)
    assert engine.calls.named("reschedule") == []


# --- a reader that is replaced


def test_what_runs_while_a_reader_is_replaced_ends_with_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with driven_by_zmq(monkeypatch) as engine:
        pipe = engine.processor._pipe
        engine.admit(0, "a")
        engine.step([record(0, 5)])
        os.kill(pipe.pids["reader"], signal.SIGKILL)
        (got,) = wait_until(lambda: [o for o in engine.scheduler.outputs() if o.finished])
        assert said(got) == {**row("a", 0, 1, [], end=True), "error": (500, GAP_TEXT)}
        wait_until(lambda: engine.manager.stop_flags[0])
        engine.admit(1, "b")
        (last,) = [o for o in engine.step([record(1, 2)]) if o.request_id == "b"]
        assert said(last) == row("b", 1, 0, [2], end=True)
        assert engine.processor.healthy()
