"""The plugin through its life: behaviours of FastDeploy (shared/spec/behaviours.md), real queues.

Cases that the pipeline's own tests show already (layouts, widths, bounds of messages) are not
repeated; here stands what FastDeploy's other parts see. The engine is a stand-in.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from importlib.metadata import distributions
from types import SimpleNamespace
from typing import Any

import fastdeploy_peer as peer
import fastdeploy_standins as fd
import numpy as np
import pytest
from driven_plugin import RECOVERY_TEXT, Driven, driven, private_ipc, row, said
from prometheus_client import CollectorRegistry, Histogram

import tokenpipe as tp
from support import wait_until
from tokenpipe.fastdeploy import PluginDisabledError, token_processor
from tokenpipe.fastdeploy.conversion import copier
from tokenpipe.fastdeploy.figures import observe_all
from tokenpipe.fastdeploy.processor import TokenProcessor
from tokenpipe.fastdeploy.rows import TasksList
from tokenpipe.fastdeploy.settings import config_of

ROOMY = (1 << 20, 1 << 22)
"""msgmax and msgmnb that carry every message."""


@pytest.fixture(scope="module")
def plain_engine() -> Iterator[Driven]:
    with pytest.MonkeyPatch.context() as patch, driven(patch) as engine:
        yield engine


@pytest.fixture
def plain(plain_engine: Driven) -> Driven:
    """A mixed instance of 4 rows, plain tokens, with an empty V1 manager."""
    return plain_engine.start_afresh()


@pytest.fixture
def plain_v0(plain_engine: Driven) -> Driven:
    """The same with V0's manager."""
    return plain_engine.start_afresh(v1=False)


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


# --- the hook


def test_the_entry_point_is_found_and_gives_the_class(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = [e for found in distributions(name="tokenpipe") for e in found.entry_points]
    hook = next(e for e in hooks if e.group == "fastdeploy.token_processor_plugins")
    monkeypatch.delenv("TOKENPIPE_DISABLE", raising=False)
    with caplog.at_level(logging.WARNING, "tokenpipe.fastdeploy"):
        assert hook.load()() is TokenProcessor
    assert "tokenpipe is the token processor" in caplog.text


def test_fastdeploys_own_runs_when_ours_is_disabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKENPIPE_DISABLE", "1")
    with (
        caplog.at_level(logging.WARNING, "tokenpipe.fastdeploy"),
        pytest.raises(PluginDisabledError),
    ):
        token_processor()
    assert "FastDeploy's own token processor runs" in caplog.text


def test_a_value_that_cannot_be_says_so_before_fastdeploy_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOKENPIPE_DISABLE", "perhaps")
    with caplog.at_level(logging.ERROR, "tokenpipe.fastdeploy"), pytest.raises(tp.ConfigError):
        token_processor()
    assert "perhaps" in caplog.text


def test_a_start_that_the_kernels_limits_forbid_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        private_ipc(8192, 16384),
        caplog.at_level(logging.ERROR, "tokenpipe.fastdeploy"),
        pytest.raises(tp.QueueLimitError, match="88072"),
        driven(monkeypatch, logprob=True),
    ):
        pass
    assert "kernel.msgmax" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("get_output", 0, 1, "none")),
        ({"logprob": True}, ("get_output_topk", 20, 1, "none")),
        ({"method": fd.SpecMethod.MTP}, ("speculate_get_output", 0, 6, "mtp")),
        (
            {"method": fd.SpecMethod.NGRAM, "logprob": True, "num_drafts": 2},
            ("speculate_get_output_topk", 20, 3, "ngram"),
        ),
    ],
)
def test_fastdeploys_configuration_names_the_op_and_the_sizes(
    settings: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    found = config_of(fd.config(num_rows=7, role="decode", **settings), use_zmq=False)
    sizes = (found.top_logprobs, found.max_draft_tokens, found.speculative_method)
    assert (found.sysv_op, *sizes) == expected
    assert (found.max_num_seqs, found.role, found.report_acknowledgements) == (7, "decode", True)


def test_the_environment_says_what_fastdeploy_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPIPE_RING_SLOTS", "8")
    monkeypatch.setenv("TOKENPIPE_MAX_EOS_IDS", "5")
    monkeypatch.setenv("TOKENPIPE_ROLE", "prefill")
    found = config_of(fd.config(), use_zmq=False)
    assert (found.ring_slots, found.max_eos_ids, found.role) == (8, 5, "mixed")


# --- admissions


def test_a_worker_that_answers_at_once_is_never_too_early(plain: Driven) -> None:
    """The list's assignment returns when the admission stands before the worker's next save."""
    for i in range(50):
        plain.admit(i % 4, f"early-{i}")
        tokens = [-1] * 4
        tokens[i % 4] = 2
        plain.send(peer.plain(tokens))
        if i % 4 == 3:
            plain.settle()
    assert [o.request_id for o in plain.outputs()] == [f"early-{i}" for i in range(50)]
    assert plain.processor.num_unadmitted_rows == 0


def test_a_row_is_given_to_the_next_task_while_its_last_one_is_being_finished(
    plain: Driven,
) -> None:
    for i in range(20):
        plain.admit(0, f"next-{i}")
        (last,) = plain.step(peer.plain([2]))
        assert said(last) == row(f"next-{i}", 0, 0, [2], end=True)


def test_a_token_without_an_admission_is_counted_and_nobodys(plain: Driven) -> None:
    before = plain.processor.num_unadmitted_tokens
    plain.admit(0, "only")
    (got,) = plain.step(peer.plain([5, 6, 7]))
    assert said(got) == row("only", 0, 0, [5])
    # The rows of former tests have ended: their tokens are dropped as such.
    assert plain.processor.num_unadmitted_rows == 0
    assert plain.processor.num_unadmitted_tokens >= before


def test_the_tasks_list_admits_slices_and_what_it_holds_already() -> None:
    seen: list[tuple[int, Any]] = []
    tasks = TasksList([None, "a", None], lambda row, task: seen.append((row, task)))
    tasks[0:2] = ["b", None]
    tasks[-1] = "c"
    with pytest.raises(ValueError, match="2 rows cannot be given 1 tasks"):
        tasks[0:2] = ["d"]
    assert seen == [(1, "a"), (0, "b"), (1, None), (2, "c")]
    assert tasks == ["b", None, "c"]


def test_a_task_that_cannot_be_admitted_gets_an_error_and_gives_its_row_back(
    plain: Driven,
) -> None:
    plain.admit(1, "many-ends", eos_token_ids=list(range(100)))
    (got,) = wait_until(plain.outputs)
    assert got.finished
    assert got.error_code == 500
    assert "max_eos_ids is 64" in got.error_msg
    assert ("finish", "many-ends") in plain.calls.made


def test_an_admission_needs_no_reading_thread_that_waits_for_the_managers_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manager's thread holds its lock while it admits, the processor's thread waits for that
    lock, and every ring is full: the admission itself makes room."""
    for name, value in (("RING_SLOTS", 2), ("OUTPUT_SLOTS", 2)):
        monkeypatch.setenv(f"TOKENPIPE_{name}", str(value))
    with driven(monkeypatch) as engine:
        engine.admit(0, "a")
        engine.step(peer.plain([5]))
        manager = engine.manager
        with manager.lock:
            manager.to_be_aborted_req_id_set.add("nobody")
            engine.send(peer.plain([-9]))  # the processor looks at the sets, and waits
            wait_until(lambda: engine.processor._busy_since is not None)
            token = 6
            while engine.worker.send(peer.plain([token]), wait=False):
                token += 1  # until nothing fits anywhere
            task = fd.Request("b")
            task.idx = 1
            manager.requests["b"] = task
            manager.tasks_list[1] = task
            manager.stop_flags[1] = False
        engine.send(peer.plain([30, 31]))
        tokens = [t for o in engine.outputs() if o.request_id == "a" for t in o.outputs.token_ids]
        assert tokens == [*range(6, token), 30]


# --- plain tokens (behaviours 2)


def test_outputs_are_one_list_per_step_in_row_order_with_what_the_task_says(plain: Driven) -> None:
    for i in range(2):
        plain.admit(
            i,
            f"q{i}",
            messages=[{"role": "user"}],
            num_cached_tokens=3,
            ic_req_data={"k": i},
            multimodal_inputs={"num_input_image_tokens": 4, "num_input_video_tokens": 5},
        )
    first, second = (plain.step(peer.plain(t)) for t in ([5, 9], [6, 8]))
    assert [said(o) for o in first] == [row("q0", 0, 0, [5]), row("q1", 1, 0, [9])]
    assert [said(o) for o in second] == [row("q0", 0, 1, [6]), row("q1", 1, 1, [8])]
    assert [o.prompt for o in (*first, *second)] == [[{"role": "user"}]] * 2 + [None] * 2
    for o in (*first, *second):
        assert (o.output_type, o.num_cached_tokens, o.prompt_token_ids_len) == (3, 3, 3)
        assert (o.num_input_image_tokens, o.num_input_video_tokens) == (4, 5)
        assert isinstance(o, fd.RequestOutput)
    plain.send(peer.plain([7, 7]), peer.plain([8, 8]))
    assert [len(results) for results in plain.lists()] == [2, 2]
    assert plain.processor.tokens_counter == {"q0": 4, "q1": 4}


def test_an_end_gives_the_row_back_after_the_cache_and_before_the_output(plain: Driven) -> None:
    task = plain.admit(0, "e", eos_token_ids=[4, 7])
    (got,) = plain.step(peer.plain([7]))
    assert said(got) == row("e", 0, 0, [7], end=True)
    assert task.output_token_ids == [7]
    assert plain.calls.named("cache", "finish") == [("cache", "e", "held"), ("finish", "e")]
    assert (plain.manager.stop_flags[0], plain.manager.tasks_list[0]) == (True, None)
    assert not plain.processor.tokens_counter


def test_v0_gives_blocks_and_map_back_before_the_flag(plain_v0: Driven) -> None:
    plain_v0.admit(0, "e")
    plain_v0.admit(1, "f")
    (got, _) = plain_v0.step(peer.plain([2, 5]))
    assert said(got) == row("e", 0, 0, [2], end=True)
    assert plain_v0.calls.named("cache", "finish", "blocks") == [("blocks", "e", "held")]
    assert (plain_v0.manager.stop_flags[0], plain_v0.manager.tasks_list[0]) == (True, None)
    assert plain_v0.manager.req_dict == {"f": 1}
    assert plain_v0.metrics.batch_size.value == 1
    assert plain_v0.metrics.available_batch_size.value == 3
    assert plain_v0.metrics.available_gpu_block_num.value == fd.BLOCKS - 2


def test_the_internal_adapter_leaves_the_end_out_of_the_output_only(plain: Driven) -> None:
    plain.fastdeploy.envs.FD_ENABLE_INTERNAL_ADAPTER = 1
    task = plain.admit(0, "e")
    first, last = plain.step(peer.plain([5]), peer.plain([2]))
    assert (said(first), said(last)) == (row("e", 0, 0, [5]), row("e", 0, 1, [], end=True))
    assert task.output_token_ids == [5, 2]


def test_a_row_whose_flag_is_set_is_not_touched(plain: Driven) -> None:
    task = plain.admit(0, "s")
    plain.admit(1, "t")
    plain.manager.stop_flags[0] = True
    assert [o.request_id for o in plain.step(peer.plain([5, 6]))] == ["t"]
    assert task.output_token_ids == []
    assert task.metrics.engine_recv_latest_token_time is None
    plain.manager.stop_flags[1] = True
    plain.send(peer.plain([5, 6]))
    assert plain.lists() == [[]], "the sink hears of a step whose rows nobody wants"


def test_tokens_of_prompt_chunks_are_not_delivered(plain_v0: Driven) -> None:
    task = plain_v0.admit(0, "c")
    task.prefill_chunk_info = [1, 1, 1]  # V0 says so after it has given the row
    # The second looks like an end, and is none.
    assert plain_v0.step(peer.plain([5]), peer.plain([2])) == []
    assert task.prefill_chunk_num == 2
    assert [said(o) for o in plain_v0.step(peer.plain([6]))] == [row("c", 0, 0, [6])]
    assert [said(o) for o in plain_v0.step(peer.plain([2]))] == [row("c", 0, 1, [2], end=True)]


def test_the_schedulers_logger_hears_of_rows_that_decode(plain: Driven) -> None:
    heard: list[int] = []
    plain.processor.set_scheduler_metrics_logger(SimpleNamespace(on_decode_tokens=heard.append))
    for i, (needed, computed) in enumerate([(None, 9), (4, 3), (4, 4), (4, 5)]):
        plain.admit(i, f"d{i}", need_prefill_tokens=needed, num_computed_tokens=computed)
    plain.step(peer.plain([5, 5, 5, 5]))
    assert heard == [2]


def test_a_write_to_the_counter_is_where_a_request_starts(plain: Driven) -> None:
    plain.admit(0, "w", messages="never")
    plain.processor.tokens_counter["w"] = 1  # the engine writes it after it has given the row
    first, second = plain.step(peer.plain([5]), peer.plain([6]))
    assert [said(o) for o in (first, second)] == [row("w", 0, 1, [5]), row("w", 0, 2, [6])]
    assert first.prompt is None
    assert first.metrics.engine_recv_first_token_time is None


# --- special ids (behaviours 3)


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
        (-4, True, "ar", [], None),
    ],
)
def test_what_a_special_id_leads_to(
    plain_engine: Driven, value: int, v1: bool, marks: str, calls: list[str], end: str | None
) -> None:
    engine = plain_engine.start_afresh(v1=v1)
    task = engine.admit(0, "x")
    engine.admit(1, "y")
    engine.step(peer.plain([5, 5]))
    with getattr(engine.manager, "lock", threading.Lock()):
        if "a" in marks:
            engine.manager.to_be_aborted_req_id_set.add("x")
        if "r" in marks:
            engine.manager.to_be_rescheduled_request_id_set.add("x")
    outputs = sorted((said(o) for o in engine.step(peer.plain([value, 6]))), key=lambda s: s["id"])
    expected = [row("y", 1, 1, [6])]
    if end is not None:
        expected.insert(0, row("x", 0, 1, [], end=True, error=end))
    assert outputs == expected
    made = engine.calls.named("finish", "blocks", "abort", "reschedule")
    assert [call[0] for call in made] == calls
    assert task.output_token_ids == [5]
    assert engine.manager.stop_flags[0] == (end is not None)
    assert engine.processor.tokens_counter["x"] == (0 if end else 1)


def test_a_preempted_request_goes_on_in_its_row(plain: Driven) -> None:
    plain.admit(0, "p")
    plain.step(peer.plain([5]))
    plain.manager.preempt("p")
    (on_its_way,) = plain.step(peer.plain([6]))
    assert said(on_its_way) == row("p", 0, 1, [6])
    assert plain.step(peer.plain([-9])) == []
    assert [task.request_id for task in plain.manager.waiting] == ["p"]
    plain.manager.tasks_list[0] = plain.manager.requests["p"]  # the same life
    assert [said(o) for o in plain.step(peer.plain([7]))] == [row("p", 0, 2, [7])]


def test_a_preempted_row_beyond_the_workers_batch_is_rescheduled(plain: Driven) -> None:
    for i in range(3):
        plain.admit(i, f"f{i}")
    plain.step(peer.plain([5, 5, 5]))
    plain.manager.preempt("f2")
    on_their_way = plain.step(peer.plain([6, 6, 6]))
    assert [said(o) for o in on_their_way] == [row(f"f{i}", i, 1, [6]) for i in range(3)]
    assert plain.step(peer.plain([-1, -1, -1])) == []
    assert plain.calls.named("reschedule") == []
    assert [o.request_id for o in plain.step(peer.plain([7, 7]))] == ["f0", "f1"]
    assert plain.calls.named("reschedule") == [("reschedule", "f2")]
    assert [task.request_id for task in plain.manager.waiting] == ["f2"]
    assert plain.step(peer.plain([-1, -1, -9])) == [], "of a worker that sends its -9 too"
    assert len(plain.calls.named("reschedule")) == 1
    plain.manager.tasks_list[2] = plain.manager.requests["f2"]  # the same life
    assert [said(o) for o in plain.step(peer.plain([-1, -1, 7]))] == [row("f2", 2, 2, [7])]


def test_a_message_of_rows_without_an_output_lets_those_beyond_it_go(plain: Driven) -> None:
    for i in range(2):
        plain.admit(i, f"g{i}")
    plain.manager.preempt("g1")
    plain.send(peer.plain([-1]))
    assert plain.lists() == []
    assert plain.calls.named("reschedule") == [("reschedule", "g1")]


def test_a_refused_message_lets_no_preempted_row_go(plain: Driven) -> None:
    plain.admit(3, "h")
    plain.manager.preempt("h")
    plain.send(peer.plain([5])[:-4])
    assert plain.lists() == []
    assert plain.calls.named("reschedule") == []
    plain.send(peer.plain([5]))
    assert plain.lists() == []
    assert plain.calls.named("reschedule") == [("reschedule", "h")]


def test_the_row_of_an_aborted_request_serves_the_next_one_at_once(plain: Driven) -> None:
    for i in range(20):
        plain.admit(0, f"a{i}")
        plain.step(peer.plain([5]))
        plain.manager.abort(f"a{i}")
        plain.send(peer.plain([-9]))
        wait_until(lambda i=i: ("abort", f"a{i}") in plain.calls.made)
        wait_until(lambda: plain.manager.stop_flags[0])
    assert plain.processor._rows.num_taken_over == 0


def test_a_row_that_the_manager_took_away_is_given_out_again(
    plain: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker does not let go of it: the manager's word counts, after a while."""
    plain.admit(0, "old")
    plain.step(peer.plain([5]))
    before = plain.processor._rows.num_taken_over
    plain.manager.tasks_list[0] = None
    with caplog.at_level(logging.WARNING, "tokenpipe.fastdeploy"):
        plain.admit(0, "new")
    assert "before the worker has let go of 'old'" in caplog.text
    assert plain.processor._rows.num_taken_over == before + 1
    assert [said(o) for o in plain.step(peer.plain([6]))] == [row("new", 0, 0, [6])]


def test_a_row_that_the_manager_took_away_waits_for_the_worker(plain: Driven) -> None:
    plain.admit(0, "old")
    plain.step(peer.plain([5]))
    before = plain.processor._rows.num_taken_over
    plain.manager.tasks_list[0] = None
    plain.settle()
    assert plain.step(peer.plain([6]), peer.plain([-9])) == [], "its manager has told its client"
    plain.admit(0, "new")
    assert plain.processor._rows.num_taken_over == before
    assert [said(o) for o in plain.step(peer.plain([7]))] == [row("new", 0, 0, [7])]


# --- metrics, traces, logs


def test_a_requests_stamps_events_and_metrics(plain: Driven) -> None:
    metrics = plain.metrics
    names = "time_to_first_token request_queue_time request_prefill_time time_per_output_token "
    names += "request_token_ratio request_decode_time request_inference_time "
    names += "request_generation_tokens"
    before = {n: len(getattr(metrics, n).observed) for n in names.split()}
    tokens, ended = metrics.generation_tokens_total.value, metrics.request_success_total.value
    gauges = (metrics.num_requests_running, metrics.batch_size, metrics.available_gpu_block_num)
    set_before = [g.value for g in gauges]
    task = plain.admit(0, "a_b", trace_carrier={"c": 1})
    outputs = plain.step(*(peer.plain([t]) for t in (5, 6, 7, 2)))
    new = {n: getattr(metrics, n).observed[count:] for n, count in before.items()}
    assert {n: len(values) for n, values in new.items()} == {
        **dict.fromkeys(before, 1),
        "time_per_output_token": 3,
    }
    assert new["request_generation_tokens"] == [4]
    assert metrics.generation_tokens_total.value == tokens + 4
    assert metrics.request_success_total.value == ended + 1
    assert metrics.available_batch_size.value in (3, 4)
    events = [call[1] for call in plain.calls.named("event")]
    first = ["FIRST_TOKEN_GENERATED", "DECODE_START"]
    assert events == [*first, "INFERENCE_END", "POSTPROCESSING_START"]
    spans = [("open", "a"), ("span", "prefill", False), ("open", "a"), ("span", "decode", True)]
    assert plain.calls.named("open", "span") == spans
    assert [o.trace_carrier for o in outputs] == [None, None, None, {"root_span": "a"}]
    line = next(call[2] for call in plain.calls.named("log") if call[1] == 0)
    assert line.startswith("Request=a_b, InputToken=3, CachedDetail=")
    for part in ("OutputToken=4", "TTFT_S=", "E2E=", "IsPrefill=False", "RecoveryStop=False"):
        assert part in line
    assert [o.metrics.engine_recv_first_token_time for o in outputs] == [
        task.metrics.engine_recv_first_token_time
    ] * 4
    latest = [o.metrics.engine_recv_latest_token_time for o in outputs]
    assert latest == sorted(latest)
    copies = [*(o.metrics for o in outputs), task.metrics]
    assert len({id(m) for m in copies}) == 5, "each output has a copy of its own"
    assert [g.value for g in gauges] == set_before, "V1's manager sets them"
    assert all(o.metrics.first_token_time is not None for o in outputs)
    assert task.last_token_time is not None


def test_missing_stamps_cost_nothing(plain: Driven) -> None:
    plain.admit(0, "m", metrics=fd.RequestMetrics(arrival_time=1.0))
    first, last = plain.step(peer.plain([5]), peer.plain([2]))
    assert (said(first), said(last)) == (row("m", 0, 0, [5]), row("m", 0, 1, [2], end=True))


def test_a_row_in_trouble_costs_no_other(plain: Driven) -> None:
    task = plain.admit(0, "bad")
    plain.admit(1, "good")
    task.output_token_ids = None  # type: ignore[assignment]
    bad, good = plain.step(peer.plain([5, 6]))
    assert (bad.request_id, bad.finished, bad.error_code) == ("bad", True, 500)
    assert said(good) == row("good", 1, 0, [6])
    assert ("finish", "bad") in plain.calls.made
    assert [said(o) for o in plain.step(peer.plain([7, 8]))] == [row("good", 1, 1, [8])]


# --- the sink, health, clear_data, the end


def test_outputs_that_the_sink_refuses_are_handed_to_it_again(plain: Driven) -> None:
    plain.admit(0, "r")
    plain.scheduler.failures = 2
    plain.send(peer.plain([5]), peer.plain([6]))
    assert [[said(o) for o in results] for results in plain.lists()] == [
        [row("r", 0, 0, [5])],
        [row("r", 0, 1, [6])],
    ]


def test_an_output_that_the_sink_never_takes_costs_no_other(
    plain: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenpipe.fastdeploy.processor._PUT_PAUSE_S", 0.0001)
    put = plain.scheduler.put_results

    def picky(results: list[Any]) -> None:
        if any(r.request_id == "poison" for r in results):
            raise TypeError("not this one")
        put(results)

    monkeypatch.setattr(plain.scheduler, "put_results", picky)
    plain.admit(0, "poison")
    plain.admit(1, "fine")
    assert [o.request_id for o in plain.step(peer.plain([5, 6]))] == ["fine"]


def test_health_sees_a_hang_and_not_an_idle_engine(
    plain: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plain.processor.healthy()
    release, entered = threading.Event(), threading.Event()

    def stuck(_results: list[Any]) -> None:
        entered.set()
        release.wait(30)

    plain.admit(0, "h")
    with monkeypatch.context() as patch:
        patch.setattr(plain.scheduler, "put_results", stuck)
        plain.send(peer.plain([5]))
        assert entered.wait(30)
        assert plain.processor.healthy(), "it has only begun"
        plain.fastdeploy.envs.FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT = 0
        wait_until(lambda: not plain.processor.healthy())
        plain.fastdeploy.envs.FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT = 120
        release.set()
        plain.settle()
    assert plain.processor.healthy()


@pytest.mark.parametrize("v1", [True, False])
def test_clear_data_ends_every_request_with_an_error(plain_engine: Driven, v1: bool) -> None:
    engine = plain_engine.start_afresh(v1=v1)
    for i in range(3):
        engine.admit(i, f"c{i}")
    engine.step(peer.plain([5, 6, 7]))
    engine.processor.clear_data()
    got = engine.outputs()
    assert [(o.request_id, o.finished, o.error_code) for o in got] == [
        (f"c{i}", True, 500) for i in range(3)
    ]
    assert [o.outputs.send_idx for o in got] == [1, 1, 1]
    assert not engine.processor.tokens_counter
    assert engine.manager.stop_flags == [True] * 4
    if v1:
        assert engine.manager.cleared == 1


def test_the_constructors_promises(plain: Driven) -> None:
    with pytest.raises(AssertionError):
        plain.processor.set_resource_manager(plain.manager)
    with pytest.raises(RuntimeError, match="runs already"):
        plain.processor.run()


def test_stop_ends_what_runs_and_is_known_to_health(monkeypatch: pytest.MonkeyPatch) -> None:
    with driven(monkeypatch, run=False) as engine:
        engine.processor.resource_manager = None
        with pytest.raises(AssertionError):
            engine.processor.run()
        engine.processor.resource_manager = engine.manager
        assert engine.processor.healthy()
        engine.processor.run()
        engine.admit(0, "z")
        engine.step(peer.plain([5]))
        engine.processor.stop()
        assert not engine.processor.healthy()
        last = engine.scheduler.outputs()[-1]
        assert (last.request_id, last.finished, last.error_code) == ("z", True, 503)
        assert not engine.processor.worker.is_alive()
        engine.processor.stop()


def test_a_pipeline_that_has_failed_is_told_to_clients_and_to_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENPIPE_MAX_RESTARTS", "0")
    with driven(monkeypatch) as engine:
        engine.admit(0, "z")
        engine.step(peer.plain([5]))
        kill(engine.processor._pipe.pids["decoder-0"])
        wait_until(lambda: not engine.processor.healthy())
        (last,) = wait_until(lambda: [o for o in engine.scheduler.outputs() if o.finished])
        assert (last.request_id, last.error_code) == ("z", 500)
        engine.admit(1, "too-late")
        wait_until(lambda: engine.scheduler.outputs()[-1].request_id == "too-late")
        assert engine.scheduler.outputs()[-1].error_code == 500


# --- speculation (behaviours 5)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_copy_of_the_engine_ends_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its exit the interpreter calls stop(). No lock that another thread held at the fork is
    waited for."""
    with driven(monkeypatch, role="prefill") as engine:
        engine.admit(0, "a")
        is_held, is_forked = threading.Event(), threading.Event()

        def hold() -> None:
            with engine.processor._handover._changed:
                is_held.set()
                is_forked.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
        copy = os.fork()
        if copy == 0:
            try:
                engine.processor.stop()
            finally:
                os._exit(0)
        is_forked.set()
        holder.join()
        try:
            wait_until(lambda: os.waitpid(copy, os.WNOHANG)[0] == copy)
        except AssertionError:
            kill(copy)
            raise
        assert engine.processor.healthy()
        assert [said(o) for o in engine.step(peer.plain([5]))] == [row("a", 0, 0, [5])]


@pytest.fixture(scope="module")
def speculative_engine() -> Iterator[Driven]:
    with (
        pytest.MonkeyPatch.context() as patch,
        driven(patch, method=fd.SpecMethod.MTP, num_drafts=2) as engine,
    ):
        yield engine


def test_accepted_tokens_go_out_together(speculative_engine: Driven) -> None:
    engine = speculative_engine.start_afresh()
    for i in range(4):
        engine.admit(i, f"s{i}")
    engine.manager.preempt("s3")
    outputs = engine.step(
        peer.speculate([[3, 4, 5], [6, 2, 7], [8, 8, 8], [9, 9, 9]], [3, 3, 0, -9])
    )
    assert [said(o) for o in outputs] == [
        row("s0", 0, 0, [3, 4, 5]),
        row("s1", 1, 0, [6, 2], end=True),
    ]
    assert engine.calls.named("reschedule", "abort") == [("reschedule", "s3")]
    (got,) = engine.step(peer.speculate([[3, 4, 5]], [2]))
    assert said(got) == row("s0", 0, 3, [3, 4])
    (last,) = engine.step(peer.speculate([[3]], [-3]))
    assert said(last) == row("s0", 0, 5, [], end=True, error=RECOVERY_TEXT)


def test_statistics_of_a_request_and_of_all(speculative_engine: Driven) -> None:
    engine = speculative_engine.start_afresh()
    metrics = engine.metrics
    begun = metrics.spec_decode_num_emitted_tokens_total.value
    gaps = len(metrics.time_per_output_token.observed)
    engine.admit(0, "n")
    _, last = engine.step(peer.speculate([[3, 4, 0]], [2]), peer.speculate([[5, 6, 2]], [3]))
    found = last.metrics.speculate_metrics
    assert isinstance(found, fd.SpeculateMetrics)
    assert (found.accepted_tokens, found.rejected_tokens) == (5, 1)
    assert found.accept_ratio == pytest.approx(0.6)
    assert found.average_accept_length == 2.5
    assert (found.accepted_tokens_per_head, found.accept_ratio_per_head) == ([2, 2, 1], [1.0, 0.5])
    assert metrics.spec_decode_num_emitted_tokens_total.value == begun + 5, "a counter counts"
    assert metrics.speculative == (fd.SpecMethod.MTP, 2)
    assert len(metrics.spec_decode_draft_single_head_acceptance_rate) == 2
    assert len(metrics.time_per_output_token.observed) == gaps + 3, "the gap is shared"


# --- decode and prefill instances (behaviours 3 and 8)


def test_a_decode_instance_goes_on_from_the_second_token_and_drops_what_is_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with driven(monkeypatch, role="decode") as engine:
        for i in range(2):
            engine.admit(i, f"d{i}", disaggregate_info={"role": "decode"})
            engine.processor.tokens_counter[f"d{i}"] = 1
        first, _ = engine.step(peer.plain([5, 6]))
        assert said(first) == row("d0", 0, 1, [5])
        assert first.metrics.decode_recv_second_token_time is not None
        assert first.metrics.engine_recv_first_token_time is None
        with engine.manager.lock:
            engine.manager.to_be_aborted_req_id_set.add("d0")
        assert [o.request_id for o in engine.step(peer.plain([7, 7]))] == ["d1"]
        engine.manager.preempt("d1")  # its row is free for the manager at once
        engine.admit(1, "d2", disaggregate_info={"role": "decode"})
        assert [said(o) for o in engine.step(peer.plain([8, 8]))] == [row("d2", 1, 0, [8])]


def test_an_aborted_request_gives_a_decode_instances_row_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the worker's -9, which is no output that is shielded; by an end token before it, behind
    which the -9 finds nobody."""
    with driven(monkeypatch, role="decode") as engine:
        for i, tokens in enumerate([[-9], [2, -9]]):
            request_id = f"d{i}"
            engine.admit(0, request_id, disaggregate_info={"role": "decode"})
            engine.processor.tokens_counter[request_id] = 1
            assert len(engine.step(peer.plain([5]))) == 1
            engine.manager.abort(request_id)
            outputs = engine.step(*(peer.plain([token]) for token in tokens))
            ended = row(request_id, 0, 2, [], end=True, error="Aborted")
            assert [said(o) for o in outputs] == [ended]
            assert engine.calls.named("abort")[i:] == [("abort", request_id)]
            assert engine.manager.stop_flags[0]
            assert not engine.processor.tokens_counter


def test_a_prefill_instance_hands_its_first_token_on_when_the_cache_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with driven(monkeypatch, role="prefill") as engine:
        for i in range(3):
            engine.admit(i, f"p{i}", disaggregate_info={"role": "prefill", "n": i})
        engine.admit(3, "alone")
        assert [said(o) for o in engine.step(peer.plain([5, 6, 7, 8]))] == [row("alone", 3, 0, [8])]
        assert engine.calls.named("finish") == [], "no row comes back before its cache is sent"
        assert [said(o) for o in engine.step(peer.plain([-1, -1, -1, 9]))] == [
            row("alone", 3, 1, [9])
        ], "nobody waits for another's cache"
        engine.queue.answers.extend([("p1", "finished"), ("unknown", "finished")])
        wait_until(lambda: ("finish", "p1") in engine.calls.made)
        engine.queue.answers.append(("p0", "time out"))
        wait_until(lambda: ("finish", "p0") in engine.calls.made)
        good, bad = engine.outputs()
        assert said(good) == row("p1", 1, 0, [6], end=True)
        assert [results[0] for _info, results in engine.first_tokens] == [good, bad]
        assert engine.first_tokens[0][0] == {"role": "prefill", "n": 1}
        assert (bad.error_code, bad.error_msg) == (501, "p0 failed to time out")
        assert good.metrics.send_request_output_to_decode_time is not None
        assert not engine.calls.named("event")[8:], "no completion on a prefill instance"
        wait_until(lambda: engine.manager.stop_flags[1])
        engine.admit(1, "again", disaggregate_info={"role": "prefill"})
        engine.queue.answers.append(("again", "finished"))
        engine.send(peer.plain([2, 3, 2, 2]))
        wait_until(lambda: ("finish", "again") in engine.calls.made)
        engine.processor.clear_data()
        assert ("finish", "p2") in engine.calls.made
        assert engine.processor._handover._answers == {}


def test_a_connector_that_raises_and_a_cache_that_is_never_sent_cost_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENPIPE_PREFILL_TIMEOUT_S", "0.2")
    with driven(monkeypatch, role="prefill") as engine:
        monkeypatch.setattr(engine, "first_tokens", None)
        engine.admit(0, "lost", disaggregate_info={"role": "prefill"})
        engine.send(peer.plain([5]))
        wait_until(lambda: ("finish", "lost") in engine.calls.made)
        (got,) = wait_until(engine.outputs)
        assert (got.error_code, got.error_msg) == (501, "lost failed to answer in time")


def test_an_answer_that_is_none_and_a_manager_that_raises_do_not_end_the_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with driven(monkeypatch, role="prefill") as engine:
        for i in range(2):
            engine.admit(i, f"p{i}", disaggregate_info={"role": "prefill"})
        finish = engine.manager.finish_requests_async

        def fail_once(_request_id: str) -> None:
            engine.manager.finish_requests_async = finish
            raise KeyError("not there")

        engine.manager.finish_requests_async = fail_once
        engine.send(peer.plain([5, 6]))
        asked = threading.Event()
        answers = iter([[("p0",)], [("p0", "finished")], [("p1", "finished")]])
        monkeypatch.setattr(
            engine.queue, "get_finished_req", lambda: next(answers, asked.set()) or []
        )
        wait_until(lambda: ("finish", "p1") in engine.calls.made)
        wait_until(asked.is_set)
        assert engine.processor.healthy()
        assert {o.request_id for o in engine.scheduler.outputs()} == {"p0", "p1"}
        monkeypatch.setattr(engine.processor._handover, "is_alive", lambda: False)
        assert not engine.processor.healthy()


# --- candidates (behaviours 4 and 6): in a private IPC namespace, whose limits are ours


def candidates(n: int, base: int) -> tuple[Any, Any, list[int]]:
    ids = np.arange(n * 21).reshape(n, 21) + base
    return ids, -ids / 8, list(range(n))


def test_candidates_come_with_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with private_ipc(*ROOMY), driven(monkeypatch, logprob=True, num_rows=512) as engine:
        for i in range(512):
            engine.admit(i, f"k{i}")
        ids, scores, ranks = candidates(512, 3)
        outputs = engine.step(peer.topk(ids, scores, ranks))
        assert len(outputs) == 512
        for i, o in enumerate(outputs):
            assert o.outputs.token_ids == [int(ids[i, 0])]
            assert o.outputs.top_logprobs == ([ids[i].tolist()], [scores[i].tolist()], [i])
            assert isinstance(o.outputs.top_logprobs, fd.LogprobsLists)
            assert o.outputs.logprob == scores[i, 0]
        engine.fastdeploy.envs.FD_ENABLE_INTERNAL_ADAPTER = 1
        ids[0, 0] = 2
        ids[1, 0] = -3
        last, stopped = engine.step(peer.topk(ids[:2], scores[:2], ranks[:2]))
        for o in (last, stopped):
            assert (o.finished, o.outputs.token_ids) == (True, [])
            assert (o.outputs.top_logprobs, o.outputs.logprob) == (None, None)


def test_drafts_candidates_come_with_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"method": fd.SpecMethod.MTP, "draft_logprob": True}
    monkeypatch.setenv("TOKENPIPE_DRAFT_WAIT_S", "30")
    with private_ipc(*ROOMY), driven(monkeypatch, logprob=True, **settings) as engine:
        for i in range(2):
            engine.admit(i, f"t{i}")
        ids = np.arange(2 * 3 * 21).reshape(2, 3, 21) + 3
        scores, ranks = -ids / 4, np.arange(6).reshape(2, 3)
        target = peer.speculate_topk(ids, scores, ranks, [3, 3])
        draft = peer.speculate_topk(ids + 500, scores - 1, ranks + 1, [3, 2], flag=4)
        outputs = engine.step(target, draft)
        assert [said(o) for o in outputs] == [
            row(f"t{i}", i, 0, ids[i, :, 0].tolist()) for i in range(2)
        ]
        for i, o in enumerate(outputs):
            lists = (ids[i].tolist(), scores[i].tolist(), ranks[i].tolist())
            assert o.outputs.top_logprobs == lists
            assert o.outputs.logprob == scores[i, 2, 0]
            n = (3, 2)[i]
            drafts = ((ids[i, :n] + 500).tolist(), (scores[i, :n] - 1).tolist())
            assert o.outputs.draft_top_logprobs == (*drafts, (ranks[i, :n] + 1).tolist())
            assert isinstance(o.outputs.draft_top_logprobs, fd.LogprobsLists)
        ids[0, 1, 0] = 2
        (ending, going) = engine.step(
            peer.speculate_topk(ids, scores, ranks, [3, 1]),
            peer.speculate_topk(ids, scores, ranks, [1, 1], flag=4),
        )
        assert said(ending) == row("t0", 0, 3, [int(ids[0, 0, 0]), 2], end=True)
        assert said(going) == row("t1", 1, 3, [int(ids[1, 0, 0])])


# --- small parts


def test_copies_of_metrics_are_shallow_and_whole() -> None:
    class Plain:
        def __init__(self) -> None:
            self.a: list[int] = [1]

    slotted, plain = fd.RequestMetrics(arrival_time=1.0, first_token_time=2.0), Plain()
    plain.late = 3  # type: ignore[attr-defined]
    for found in (slotted, plain):
        made = copier(found)(found)
        assert made is not found
        assert type(made) is type(found)
    assert copier(slotted)(slotted) == slotted
    assert vars(copier(plain)(plain)) == vars(plain)


def test_a_step_is_observed_as_its_values_would_be_one_by_one() -> None:
    bounds, registry = (0.1, 0.5, 1.0), CollectorRegistry()
    one, all_at_once = (
        Histogram(name, "of a test", buckets=bounds, registry=registry) for name in ("one", "all")
    )
    values, counts = [0.05, 0.1, 0.7, 5.0, 0.5], [1, 2, 3, 1, 2]
    for value, count in zip(values, counts, strict=True):
        for _ in range(count):
            one.observe(value)
    observe_all(all_at_once, values, counts)
    found = [
        {s.name.split("_", 1)[1] + str(s.labels): s.value for s in metric.collect()[0].samples}
        for metric in (one, all_at_once)
    ]
    names = [n for n in found[0] if "created" not in n]
    assert [found[0][n] for n in names] == pytest.approx([found[1][n] for n in names])


def test_a_cache_that_fails_costs_no_last_token(
    plain: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.admit(0, "x")
    monkeypatch.setattr(plain.manager, "cache_output_tokens", lambda _task: {}["not there"])
    assert [said(o) for o in plain.step(peer.plain([5]), peer.plain([2]))] == [
        row("x", 0, 0, [5]),
        row("x", 0, 1, [2], end=True),
    ]
    wait_until(lambda: plain.manager.stop_flags[0])
