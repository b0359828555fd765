"""FastDeploy's save_* ops by the same names and arguments, into the shared memory of a pipeline.

What FastDeploy's wire lacks must come from the caller: the step says which life of which row each
token belongs to (`EngineWriter.begin_step`), so nothing here has a default for it. A caller that
cannot say it saves to the System V queue, and its pipeline runs with --source sysv. There is no get
side: the pipeline's reader is the only one.

save_output and save_output_topk take tensors on a GPU as well, packed there (EngineWriter) in the
`stream` in which they are made; the others take those on the CPU, as FastDeploy's worker has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpipe.cuda import device_of
from tokenpipe.errors import OpArgumentError
from tokenpipe.ops.sysv import as_array, as_flag
from tokenpipe.writer import EngineWriter, Step

TOKEN, NONE, RECOVERY, ACKNOWLEDGED = range(4)
"""States of a row in a save of EngineWriter."""
_PREEMPTED, _RECOVERY = -9, -3

Array = npt.NDArray[Any]


class ShmOps:
    """The ops over one engine writer. Values with a meaning on FastDeploy's wire become states: -9
    and a set `preempted_idx` an acknowledgement, -3 recovery, every other negative token or count
    none.

    Ranks above 0 save nothing. Raises what EngineWriter's ops raise.
    """

    def __init__(self, writer: EngineWriter) -> None:
        self.writer = writer

    @classmethod
    def attach(cls, name: str, timeout_s: float = 10.0) -> ShmOps:
        """Returns the ops into pipeline `name`; see EngineWriter.attach. `close` lets go of it."""
        return cls(EngineWriter.attach(name, timeout_s))

    def begin_step(self, generations: Sequence[int] | Array, rows: Any = None) -> Step:
        """Returns the stamp of a batch that the scheduler has just composed."""
        return self.writer.begin_step(generations, rows)

    def save_output(
        self,
        x: Any,
        not_need_stop: Any,
        preempted_idx: Any = None,
        rank_id: int = 0,
        save_each_rank: bool = False,
        *,
        step: Step,
        stream: Any = None,
    ) -> None:
        """Saves a token per row; arguments as sysv.save_output, of any number of rows. `x` may
        lie on a GPU: `stream` is the one in which it is made."""
        if rank_id > 0:
            return
        if device_of(x) is not None:
            has_work = as_flag("not_need_stop", not_need_stop)
            states = _states_of_marks(preempted_idx, len(x))
            self.writer.save_wire_values(
                x, states, step=step, not_need_stop=has_work, stream=stream
            )
            return
        tokens = as_array("x", x).reshape(-1)
        self.writer.save_output(
            tokens,
            step=step,
            states=_states(tokens, preempted_idx),
            not_need_stop=as_flag("not_need_stop", not_need_stop),
        )

    def save_output_topk(
        self,
        x: Any,
        topk_ids: Any,
        logprob_scores: Any,
        ranks: Any,
        not_need_stop: Any,
        preempted_idx: Any = None,
        rank_id: int = 0,
        *,
        step: Step,
        stream: Any = None,
    ) -> None:
        """Saves a token per row with its candidates; arguments as sysv.save_output_topk, of any
        number of rows, and as many columns as the pipeline has. `x` and the candidates may lie on a
        GPU, as of save_output."""
        if rank_id > 0:
            return
        if device_of(x) is not None:
            self.writer.save_wire_values(
                x,
                _states_of_marks(preempted_idx, len(x)),
                step=step,
                not_need_stop=as_flag("not_need_stop", not_need_stop),
                stream=stream,
                topk_ids=topk_ids,
                logprobs=logprob_scores,
                ranks=ranks,
            )
            return
        tokens = as_array("x", x).reshape(-1)
        ids = as_array("topk_ids", topk_ids).copy()
        if ids.ndim != 2 or len(ids) != len(tokens):
            what = f"{ids.dtype}{list(ids.shape)}"
            raise OpArgumentError("topk_ids", f"topk_ids is {what}, must be [{len(tokens)}, T]")
        ids[:, 0] = tokens
        self.writer.save_output_topk(
            *(tokens, ids, logprob_scores, ranks),
            step=step,
            states=_states(tokens, preempted_idx),
            not_need_stop=as_flag("not_need_stop", not_need_stop),
        )

    def speculate_save_output(
        self,
        accept_tokens: Any,
        accept_num: Any,
        not_need_stop: Any,
        seq_lens_decoder: Any,
        prompt_lens: Any,
        preempted_idx: Any = None,
        rank_id: int = 0,
        save_each_rank: bool = False,
        skip_prefill: bool = False,
        *,
        step: Step,
    ) -> None:
        """Saves the accepted tokens of each row; arguments as sysv.speculate_save_output, of any
        number of rows and drafts."""
        if rank_id > 0:
            return
        counts = as_array("accept_num", accept_num).reshape(-1)
        if skip_prefill:
            counts = np.where(_in_prompt(seq_lens_decoder, prompt_lens, len(counts)), 0, counts)
        self.writer.speculate_save_output(
            *(accept_tokens, np.maximum(counts, 0)),
            step=step,
            states=_states(counts, preempted_idx),
            not_need_stop=as_flag("not_need_stop", not_need_stop),
        )

    def mtp_save_first_token(
        self,
        x: Any,
        not_need_stop: Any,
        seq_lens_decoder: Any,
        prompt_lens: Any,
        step_idx: Any,
        rank_id: int = 0,
        save_each_rank: bool = False,
        skip_chunk_prefill: bool = False,
        *,
        step: Step,
    ) -> None:
        """Saves the first token and the first draft of rows at their first step."""
        if rank_id > 0 and not save_each_rank:
            return
        steps = as_array("step_idx", step_idx).reshape(-1)
        if skip_chunk_prefill:
            steps = np.where(_in_prompt(seq_lens_decoder, prompt_lens, len(steps)), 0, steps)
        has_work = as_flag("not_need_stop", not_need_stop)
        self.writer.mtp_save_first_token(x, steps, step=step, not_need_stop=has_work)

    def speculate_save_output_topk(
        self,
        sampled_token_ids: Any,
        logprob_token_ids: Any,
        logprob_scores: Any,
        logprob_ranks: Any,
        token_num_per_batch: Any,
        cu_batch_token_offset: Any,
        not_need_stop: Any,
        seq_lens_decoder: Any,
        prompt_lens: Any,
        preempted_idx: Any = None,
        message_flag: int = 3,
        rank_id: int = 0,
        save_each_rank: bool = False,
        *,
        step: Step,
    ) -> None:
        """Saves the tokens of each row with their candidates; arguments as
        sysv.speculate_save_output_topk, of any number of rows, drafts and columns."""
        if rank_id > 0:
            return
        tokens = as_array("sampled_token_ids", sampled_token_ids)
        counts = as_array("token_num_per_batch", token_num_per_batch).reshape(-1)
        counts = np.where(_in_prompt(seq_lens_decoder, prompt_lens, len(counts)), 0, counts)
        at = _places(cu_batch_token_offset, counts, tokens.shape[-1], len(logprob_token_ids))
        ids = _taken("logprob_token_ids", logprob_token_ids, at)
        ids[:, :, 0] = tokens
        self.writer.speculate_save_output_topk(
            *(tokens, np.maximum(counts, 0), ids),
            _taken("logprob_scores", logprob_scores, at),
            _taken("logprob_ranks", logprob_ranks, at),
            message_flag=message_flag,
            step=step,
            states=_states(counts, preempted_idx),
            not_need_stop=as_flag("not_need_stop", not_need_stop),
        )

    def mtp_save_first_token_with_topk(
        self,
        sampled_token_ids: Any,
        logprob_token_ids: Any,
        logprob_scores: Any,
        logprob_ranks: Any,
        token_num_per_batch: Any,
        cu_batch_token_offset: Any,
        not_need_stop: Any,
        seq_lens_decoder: Any,
        prompt_lens: Any,
        preempted_idx: Any = None,
        message_flag: int = 3,
        rank_id: int = 0,
        save_each_rank: bool = False,
        *,
        step: Step,
    ) -> None:
        """Saves first tokens with their candidates, and the drafts behind them without."""
        if rank_id > 0 and not save_each_rank:
            return
        counts = as_array("token_num_per_batch", token_num_per_batch).reshape(-1)
        counts = np.where(_in_prompt(seq_lens_decoder, prompt_lens, len(counts)), 0, counts)
        tokens = as_array("sampled_token_ids", sampled_token_ids)
        has_first = np.minimum(counts, 1)
        at = _places(cu_batch_token_offset, has_first, 1, len(logprob_token_ids))[:, 0]
        ids = _taken("logprob_token_ids", logprob_token_ids, at)
        ids[:, 0] = tokens[:, 0]
        self.writer.mtp_save_first_token_with_topk(
            *(tokens, np.maximum(counts, 0), ids),
            _taken("logprob_scores", logprob_scores, at),
            _taken("logprob_ranks", logprob_ranks, at),
            message_flag=message_flag,
            step=step,
            states=_states(counts, preempted_idx),
            not_need_stop=as_flag("not_need_stop", not_need_stop),
        )

    def close(self) -> None:
        """Lets go of the pipeline; another writer may attach then."""
        self.writer.close()

    def __enter__(self) -> ShmOps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _states(values: Array, preempted_idx: Any) -> npt.NDArray[np.uint8]:
    """Of tokens, or of accept counts: what each row is."""
    states = np.where(values < 0, NONE, TOKEN)
    states[values == _RECOVERY] = RECOVERY
    states[values == _PREEMPTED] = ACKNOWLEDGED
    marked = _states_of_marks(preempted_idx, len(values))
    return (states if marked is None else np.where(marked, marked, states)).astype(np.uint8)


def _states_of_marks(preempted_idx: Any, n: int) -> npt.NDArray[np.uint8] | None:
    """Acknowledged where a row is marked, else token; None where there are no marks."""
    if preempted_idx is None:
        return None
    marks = as_array("preempted_idx", preempted_idx).reshape(-1)
    is_marked = _first("preempted_idx", marks, n) == 1
    return np.where(is_marked, ACKNOWLEDGED, TOKEN).astype(np.uint8)


def _in_prompt(seq_lens_decoder: Any, prompt_lens: Any, n: int) -> npt.NDArray[np.bool_]:
    done = as_array("seq_lens_decoder", seq_lens_decoder).reshape(-1)
    prompt = as_array("prompt_lens", prompt_lens).reshape(-1)
    is_in: npt.NDArray[np.bool_] = _first("seq_lens_decoder", done, n) < _first(
        "prompt_lens", prompt, n
    )
    return is_in


def _places(cu_batch_token_offset: Any, counts: Array, depth: int, num_tokens: int) -> Array:
    """Returns where the candidates of each row's tokens lie, [n, depth]: 0 behind its count."""
    offsets = as_array("cu_batch_token_offset", cu_batch_token_offset).reshape(-1)
    first = _first("cu_batch_token_offset", offsets, len(counts)).astype(np.int64)
    last = np.where(counts > 0, first + counts, 0)
    if len(counts) and (last.max() > num_tokens or first[counts > 0].min(initial=0) < 0):
        row = int(np.argmax((last > num_tokens) | ((counts > 0) & (first < 0))))
        raise OpArgumentError(
            "cu_batch_token_offset",
            f"cu_batch_token_offset[{row}] is {first[row]}, and the row has {counts[row]} tokens, "
            f"but logprob_token_ids has {num_tokens} rows",
        )
    steps = np.arange(depth)
    places: Array = np.where(steps < counts[:, None], first[:, None] + steps, 0)
    return places


def _taken(name: str, value: Any, at: Array) -> Array:
    """Returns a copy of the rows of `value` at these places; zeros where it has none at all."""
    values = as_array(name, value)
    if not len(values):
        return np.zeros(at.shape + values.shape[1:], values.dtype)
    if at.max(initial=0) >= len(values):
        least = int(at.max()) + 1
        raise OpArgumentError(name, f"{name} has {len(values)} rows, must have at least {least}")
    taken: Array = values[at]
    return taken


def _first(name: str, values: Array, n: int) -> Array:
    if len(values) < n:
        raise OpArgumentError(name, f"{name} has {len(values)} elements, must have at least {n}")
    return values[:n]
