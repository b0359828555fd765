"""tokenpipe/delivery.py: whose the rows of a batch are."""

from __future__ import annotations

import weakref

import numpy as np
from inprocess import InProcess

import tokenpipe as tp

EOS = 2


def save(p: InProcess, admissions: list[tp.Admission], tokens: list[int]) -> None:
    stamp = p.writer.begin_step([a.generation for a in admissions], [a.row for a in admissions])
    p.writer.save_output(np.array(tokens), step=stamp)
    p.pump()


def named(p: InProcess) -> list[list[str]]:
    """The request ids of each batch that waits, whose list the reader then spoils."""
    found = []
    for batch in p.batches():
        found.append(batch.request_ids)
        batch.requests.clear()
    return found


def test_each_step_names_the_requests_that_its_rows_have_then(unique_name: str) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=2, num_decoders=1)
    with InProcess(config) as p:
        request = {"prompt_token_ids": [1], "eos_token_ids": [EOS]}
        a = p.submit(tp.Request("a", **request))
        b = p.submit(tp.Request("b", **request))
        for _ in range(3):
            save(p, [a, b], [10, 11])
            assert named(p) == [["a", "b"]]
        save(p, [b, a], [10, 11])
        assert named(p) == [["b", "a"]], "the rows are in the engine's order"
        save(p, [a, b], [EOS, 11])
        assert named(p) == [["a", "b"]], "a's last output is a's"
        acknowledge = p.writer.begin_step([a.generation, b.generation], [a.row, b.row])
        p.writer.save_output(np.array([0, 12]), states=np.array([3, 0], np.uint8), step=acknowledge)
        p.pump()
        assert named(p) == [["b"]]
        c = p.submit(tp.Request("c", **request), row=a.row)
        assert c.row == a.row
        save(p, [c, b], [10, 11])
        assert named(p) == [["c", "b"]], "the row's next life is c's"


def test_a_batch_that_waits_names_who_had_its_rows_before(unique_name: str) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=1, num_decoders=1)
    with InProcess(config) as p:
        request = {"prompt_token_ids": [1], "eos_token_ids": [EOS]}
        a = p.submit(tp.Request("a", **request))
        save(p, [a], [10])
        save(p, [a], [EOS])
        b = p.submit(tp.Request("b", **request), row=a.row)
        save(p, [b], [10])
        assert named(p) == [["a"], ["a"], ["b"]]


def test_an_ended_request_is_not_held(unique_name: str) -> None:
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=1, num_decoders=1)
    with InProcess(config) as p:
        request = tp.Request("a", prompt_token_ids=[1], eos_token_ids=[EOS])
        held = weakref.ref(request)
        a = p.submit(request)
        del request
        save(p, [a], [10])
        assert named(p) == [["a"]]
        save(p, [a], [EOS])
        assert named(p) == [["a"]]
        p.events.clear()
        assert held() is None
