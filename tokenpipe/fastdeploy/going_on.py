"""Rows whose requests just go on, nearly all of any step: their outputs made in one call, in C++.

What this makes and notes is what the processor would for one row after the other; a row with
anything else to it is left to the processor, and so is everything where FastDeploy's classes are of
a kind that cannot be copied (the log says so once).
"""

from __future__ import annotations

import logging
from typing import Any

from tokenpipe import _native
from tokenpipe.fastdeploy.conversion import Columns
from tokenpipe.fastdeploy.host import Host
from tokenpipe.fastdeploy.rows import Life
from tokenpipe.objects import candidates_of
from tokenpipe.outputs import TARGET

_log = logging.getLogger("tokenpipe.fastdeploy")


class GoingOn:
    """Makes the outputs of one FastDeploy version."""

    def __init__(self, host: Host, is_decode: bool) -> None:
        self._maker: _native.StepMaker | None = None
        try:
            completion, other_completion = (
                host.CompletionOutput(index=n, send_idx=n, token_ids=[n] * n, draft_token_ids=[])
                for n in (0, 1)
            )
            _check_alike(completion, other_completion, ("index", "send_idx", "token_ids"))
            output, other = (
                host.RequestOutput(request_id=name, outputs=of, finished=False, metrics=metrics)
                for name, of, metrics in (("", completion, None), ("other", other_completion, 1))
            )
            _check_alike(output, other, ("request_id", "outputs", "metrics"))
            self._maker = _native.StepMaker(output, completion, host.LogprobsLists, Life, is_decode)
        except (TypeError, AttributeError) as error:
            _log.info("outputs are made one by one: %s", error)

    def can_make(self, columns: Columns, manager: Any, counter: Any) -> bool:
        """Whether rows of this step can be made here at all."""
        is_plain = not (columns.is_pooling or columns.has_drafts) and columns.batch.drafts is None
        return (
            self._maker is not None
            and is_plain
            and isinstance(manager.stop_flags, list)
            and isinstance(counter, dict)
        )

    def make(
        self,
        columns: Columns,
        current: list[Life | None],
        manager: Any,
        shielded: frozenset[str],
        counter: Any,
        now: float,
        counts_decode: bool,
    ) -> tuple[
        list[Any],
        list[int],
        list[tuple[int, object]],
        list[float],
        list[int],
        list[int],
        int,
        int,
    ]:
        """Returns (outputs, left, broken, gaps, gap_counts, counts, num_tokens, decode_tokens).

        `outputs` has None for the rows of the batch that are `left` to the caller, untouched, and
        for those that are `broken`: (row, what went wrong). `gaps` are seconds per token since the
        row's last output, of `gap_counts` tokens each; `counts` the tokens of each row made.
        """
        assert self._maker is not None
        batch = columns.batch
        kind = batch.message_flag
        return self._maker.make(
            (
                batch.row,
                batch.generation,
                batch.finish_reason,
                batch.token_offsets,
                batch.token_ids,
            ),
            candidates_of(batch) if columns.width else None,
            current,
            manager.stop_flags,
            shielded,
            counter,
            None if kind == TARGET else kind,
            now,
            counts_decode,
        )


def _check_alike(output: Any, other: Any, given: tuple[str, ...]) -> None:
    """Raises TypeError where a constructor makes more of an output than it is `given`: copies of
    one would not be like it."""
    fields = [*vars(output)] if hasattr(output, "__dict__") else [*type(output).__slots__]
    for name in fields:
        if name not in given and getattr(output, name) != getattr(other, name):
            raise TypeError(f"{type(output).__name__}.{name} is another one in each output")
