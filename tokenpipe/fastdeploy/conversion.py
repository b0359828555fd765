"""Rows of a batch to FastDeploy's RequestOutput: one pass over plain lists, no deep copies."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from tokenpipe.commands import FinishReason
from tokenpipe.fastdeploy.host import Host
from tokenpipe.objects import ERRORS
from tokenpipe.outputs import TARGET, OutputBatch, lazy
from tokenpipe.records import LogprobsLists, SpeculateMetrics
from tokenpipe.requests import in_prompt_order


def _listed(column: str) -> lazy[Any]:
    """A column of a batch as a list of Python's own."""
    return lazy(lambda columns: getattr(columns.batch, column).tolist())


class Columns:
    """The columns of a batch as lists, each made when it is first asked for."""

    def __init__(self, batch: OutputBatch) -> None:
        self.batch = batch
        self.is_pooling = batch.kind == "pooling"
        self.width = 0 if self.is_pooling else batch.width
        self.has_drafts = batch.num_drafts != 0

    rows = _listed("row")
    generations = _listed("generation")
    reasons = _listed("finish_reason")
    offsets = _listed("token_offsets")
    tokens = _listed("token_ids")
    ids = _listed("topk_ids")
    logprobs = _listed("topk_logprobs")
    ranks = _listed("ranks")
    vectors = _listed("vectors")
    """Of a pooling step."""

    def drafts(self, i: int) -> list[int]:
        """Returns a prefill instance's first token of row i and its drafts."""
        part = slice(*self.batch.draft_offsets[i : i + 2].tolist())
        found: list[int] = self.batch.draft_token_ids[part].tolist()
        return found

    def candidates(self, i: int) -> LogprobsLists:
        """Returns the candidates of the tokens of row i."""
        part = slice(*self.offsets[i : i + 2])
        return LogprobsLists(self.ids[part], self.logprobs[part], self.ranks[part])


class Converter:
    """Makes the outputs of one FastDeploy version."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._make = host.RequestOutput
        self._make_completion = host.CompletionOutput
        self._make_lists = host.LogprobsLists
        self._copiers: dict[type, Callable[[Any], Any]] = {}

    def copy_metrics(self, metrics: Any) -> Any:
        """Returns a shallow copy of a task's RequestMetrics."""
        kind = type(metrics)
        if kind not in self._copiers:  # how they are copied best is known when there are some
            self._copiers[kind] = copier(metrics)
        return self._copiers[kind](metrics)

    def output(
        self, task: Any, row: int, send_idx: int, token_ids: list[int], metrics: Any, kind: int
    ) -> Any:
        """Returns a RequestOutput of one row; `kind` is its output_type."""
        made = self._make(
            request_id=task.request_id,
            outputs=self._make_completion(
                index=row, send_idx=send_idx, token_ids=token_ids, draft_token_ids=[]
            ),
            finished=False,
            metrics=metrics,
        )
        if kind != TARGET:
            made.output_type = kind
        made.prompt_token_ids_len = task.prompt_token_ids_len
        made.num_cached_tokens = task.num_cached_tokens
        made.ic_req_data = task.ic_req_data
        media = task.multimodal_inputs
        if media:
            made.num_input_image_tokens = media.get("num_input_image_tokens", 0)
            made.num_input_video_tokens = media.get("num_input_video_tokens", 0)
        if send_idx == 0 and token_ids and task.messages is not None:
            made.prompt = task.messages
        return made

    def add_candidates(self, made: Any, columns: Columns, i: int, begin: int, end: int) -> None:
        """Adds the candidates of tokens `begin` to `end`, and those of row i's drafts."""
        outputs = made.outputs
        if columns.width and end > begin:
            logprobs = columns.logprobs[begin:end]
            outputs.logprob = logprobs[-1][0]
            outputs.top_logprobs = self._make_lists(
                columns.ids[begin:end], logprobs, columns.ranks[begin:end]
            )
        if columns.batch.drafts is not None:
            found = columns.batch.drafts.of(i)
            if found is not None:
                outputs.draft_top_logprobs = self._make_lists(*found)

    def add_prompt_logprobs(self, made: Any, pieces: list[tuple[int, LogprobsLists]]) -> None:
        """Adds the prompt's candidates as arrays, for which FastDeploy's readers can ask shape,
        flatten() and tolist(), as of the tensors that its own processor hands on."""
        found = in_prompt_order(pieces)
        made.prompt_logprobs = self._host.LogprobsTensors(
            np.array(found.logprob_token_ids, np.int64),
            np.array(found.logprobs, np.float32),
            np.array(found.sampled_token_ranks, np.int64),
        )

    def pooling(self, task: Any, vector: list[float], metrics: Any) -> Any:
        """Returns the one output of a pooling request."""
        made = self._host.PoolingRequestOutput(
            request_id=task.request_id,
            outputs=self._host.PoolingOutput(data=vector),
            prompt_token_ids=task.prompt_token_ids,
            finished=True,
            metrics=metrics,
        )
        made.error_code, made.error_msg = 200, None  # their defaults are tuples (fault F43)
        return made

    @staticmethod
    def add_drafts(made: Any, columns: Columns, i: int) -> None:
        """Adds a prefill instance's first token and its drafts."""
        made.outputs.draft_token_ids = columns.drafts(i)

    def add_speculation(self, made: Any, columns: Columns, i: int, num_drafts: int) -> Any:
        """Adds how well the request's drafts were accepted; returns it, None where it drafted
        nothing."""
        for final in columns.batch.finals:
            if int(final["index"]) == i:
                found = SpeculateMetrics.of(
                    final["heads"].tolist(), int(final["spec_steps"]), num_drafts
                )
                fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
                made.metrics.speculate_metrics = self._host.SpeculateMetrics(**fields)
                return found
        return None

    @staticmethod
    def set_end(made: Any, reason: FinishReason) -> None:
        """Says of an output that it is the last one, and why."""
        made.finished = True
        made.error_code, made.error_msg = ERRORS.get(reason, (200, None))


def copier(example: Any) -> Callable[[Any], Any]:
    """Returns the fastest shallow copy of objects like `example`."""
    kind: Any = type(example)
    if hasattr(example, "__dict__"):

        def copied(found: Any) -> Any:
            new = kind.__new__(kind)
            new.__dict__.update(found.__dict__)
            return new

        return copy.copy if hasattr(kind, "__slots__") else copied
    fields = dataclasses.fields(example) if dataclasses.is_dataclass(example) else ()
    if len(fields) < 2 or not all(f.init and not f.kw_only for f in fields):
        return copy.copy
    values = attrgetter(*(f.name for f in fields))
    return lambda found: kind(*values(found))
