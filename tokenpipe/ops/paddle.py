"""FastDeploy's save_* and get_* ops as Paddle custom operators of the same names and arguments.

The operators are registered as `static_op_<name>`, as FastDeploy's are, and compiled at the first
import (tokenpipe/ops/build.py), which raises OpsBuildError where Paddle or a compiler is missing.
What they send, receive, refuse and raise is that of tokenpipe.ops.sysv; where the messages go is
read from the environment at each call, of the `_dynamic` ones also from `msg_queue_id`. Tensors on
the CPU are used in place; inputs on a device are copied, outputs must be on the CPU. Paddle gives
the GIL away meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

from tokenpipe.errors import OpArgumentError, OpsBuildError
from tokenpipe.ops.build import paddle_library
from tokenpipe.ops.sysv import Failure

try:
    import paddle
except ModuleNotFoundError as error:
    raise OpsBuildError(
        "the Paddle operators need Paddle 3: install paddlepaddle or paddlepaddle-gpu "
        "(tokenpipe[cpu], tokenpipe[gpu])"
    ) from error


def _load() -> ctypes.CDLL:
    from paddle.base import core
    from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

    version = paddle.version.full_version
    if not version.startswith("3."):
        raise OpsBuildError(f"the Paddle operators need Paddle 3, this is {version}")
    if "static_op_save_output" in core.get_all_op_names():
        raise OpsBuildError(
            "operators of these names are in this process already (FastDeploy's own?): Paddle "
            "aborts a process that loads them twice"
        )
    root = Path(paddle.__file__).parent
    includes = [root / "include", root / "include" / "third_party"]
    # The wheel's own core, which has all that the operators call, and is loaded already.
    link = [f"-L{root / 'base'}", f"-L{root / 'libs'}", "-Wl,--no-as-needed", "-l:libpaddle.so"]
    library = paddle_library(f"{version} {paddle.version.commit}", includes, link)
    load_op_meta_info_and_register_op(str(library))
    return ctypes.CDLL(str(library))


_library = _load()


def _run(op: str, *arguments: Any) -> Any:
    while True:
        try:
            results = paddle._C_ops._run_custom_op(op, *arguments)
        except OSError:  # what Paddle makes of every exception of an operator
            failure = Failure()
            code = _library.tokenpipe_last_error(ctypes.byref(failure))
            if code == 0:  # not of ours
                raise
            if code == errno.EINTR:  # a save; Python's own handler has run by now
                continue
            raise failure.as_error(code) from None
        return results[0] if len(results) == 1 else results


def _in_place(**outputs: Any) -> None:
    """Paddle would have the operator write into a contiguous copy, and forget it."""
    for name, tensor in outputs.items():
        if not tensor.is_contiguous():
            raise OpArgumentError(name, f"{name} is written in place: must be contiguous")


def save_output(
    x: Any, not_need_stop: Any, preempted_idx: Any, rank_id: int, save_each_rank: bool
) -> Any:
    """Sends a token per row; see sysv.save_output. Returns `x`."""
    return _run("static_op_save_output", x, not_need_stop, preempted_idx, rank_id, save_each_rank)


def save_output_dynamic(
    x: Any,
    not_need_stop: Any,
    preempted_idx: Any,
    rank_id: int,
    msg_queue_id: int,
    save_each_rank: bool,
) -> Any:
    """As save_output, to queue `msg_queue_id` where INFERENCE_MSG_QUEUE_ID names no other."""
    where = (rank_id, msg_queue_id, save_each_rank)
    return _run("static_op_save_output_dynamic", x, not_need_stop, preempted_idx, *where)


def save_output_topk(
    x: Any,
    topk_ids: Any,
    logprob_scores: Any,
    ranks: Any,
    not_need_stop: Any,
    preempted_idx: Any,
    rank_id: int,
) -> Any:
    """Sends a token per row with its candidates; see sysv.save_output_topk. Returns `x`."""
    candidates = (topk_ids, logprob_scores, ranks)
    return _run("static_op_save_output_topk", x, *candidates, not_need_stop, preempted_idx, rank_id)


def speculate_save_output(
    accept_tokens: Any,
    accept_num: Any,
    not_need_stop: Any,
    seq_lens_decoder: Any,
    prompt_lens: Any,
    preempted_idx: Any,
    rank_id: int,
    save_each_rank: bool,
    skip_prefill: bool,
) -> Any:
    """Sends the accepted tokens of each row; see sysv.speculate_save_output. Returns
    `accept_tokens`."""
    return _run(
        "static_op_speculate_save_output",
        *(accept_tokens, accept_num, not_need_stop, seq_lens_decoder, prompt_lens, preempted_idx),
        *(rank_id, save_each_rank, skip_prefill),
    )


def speculate_save_output_dynamic(
    accept_tokens: Any,
    accept_num: Any,
    not_need_stop: Any,
    seq_lens_decoder: Any,
    prompt_lens: Any,
    preempted_idx: Any,
    rank_id: int,
    msg_queue_id: int,
    save_each_rank: bool,
    skip_prefill: bool,
) -> Any:
    """As speculate_save_output, to queue `msg_queue_id` where INFERENCE_MSG_QUEUE_ID names no
    other."""
    return _run(
        "static_op_speculate_save_output_dynamic",
        *(accept_tokens, accept_num, not_need_stop, seq_lens_decoder, prompt_lens, preempted_idx),
        *(rank_id, msg_queue_id, save_each_rank, skip_prefill),
    )


def mtp_save_first_token(
    x: Any,
    not_need_stop: Any,
    seq_lens_decoder: Any,
    prompt_lens: Any,
    step_idx: Any,
    rank_id: int,
    save_each_rank: bool,
    skip_chunk_prefill: bool,
) -> Any:
    """Sends first tokens with their first draft; see sysv.mtp_save_first_token. Returns `x`."""
    return _run(
        "static_op_mtp_save_first_token",
        *(x, not_need_stop, seq_lens_decoder, prompt_lens, step_idx),
        *(rank_id, save_each_rank, skip_chunk_prefill),
    )


def mtp_save_first_token_dynamic(
    x: Any,
    not_need_stop: Any,
    seq_lens_decoder: Any,
    prompt_lens: Any,
    step_idx: Any,
    rank_id: int,
    msg_queue_id: int,
    save_each_rank: bool,
    skip_chunk_prefill: bool,
) -> Any:
    """As mtp_save_first_token, to queue `msg_queue_id` where INFERENCE_MSG_QUEUE_ID names no
    other."""
    return _run(
        "static_op_mtp_save_first_token_dynamic",
        *(x, not_need_stop, seq_lens_decoder, prompt_lens, step_idx),
        *(rank_id, msg_queue_id, save_each_rank, skip_chunk_prefill),
    )


def speculate_save_output_topk(
    sampled_token_ids: Any,
    logprob_token_ids: Any,
    logprob_scores: Any,
    logprob_ranks: Any,
    token_num_per_batch: Any,
    cu_batch_token_offset: Any,
    not_need_stop: Any,
    seq_lens_decoder: Any,
    prompt_lens: Any,
    preempted_idx: Any,
    message_flag: int,
    rank_id: int,
    save_each_rank: bool,
) -> None:
    """Sends up to 6 tokens per row with their candidates; see sysv.speculate_save_output_topk."""
    _run(
        "static_op_speculate_save_output_topk",
        *(sampled_token_ids, logprob_token_ids, logprob_scores, logprob_ranks),
        *(token_num_per_batch, cu_batch_token_offset, not_need_stop, seq_lens_decoder),
        *(prompt_lens, preempted_idx, message_flag, rank_id, save_each_rank),
    )


def mtp_save_first_token_with_topk(
    sampled_token_ids: Any,
    logprob_token_ids: Any,
    logprob_scores: Any,
    logprob_ranks: Any,
    token_num_per_batch: Any,
    cu_batch_token_offset: Any,
    not_need_stop: Any,
    seq_lens_decoder: Any,
    prompt_lens: Any,
    preempted_idx: Any,
    message_flag: int,
    rank_id: int,
    save_each_rank: bool,
) -> None:
    """Sends first tokens with candidates; see sysv.mtp_save_first_token_with_topk."""
    _run(
        "static_op_mtp_save_first_token_with_topk",
        *(sampled_token_ids, logprob_token_ids, logprob_scores, logprob_ranks),
        *(token_num_per_batch, cu_batch_token_offset, not_need_stop, seq_lens_decoder),
        *(prompt_lens, preempted_idx, message_flag, rank_id, save_each_rank),
    )


def get_output(x: Any, rank_id: int, wait_flag: bool) -> Any:
    """Receives a token per row into `x`; see sysv.get_output. Returns `x`."""
    _in_place(x=x)
    return _run("static_op_get_output", x, rank_id, wait_flag)


def get_output_dynamic(x: Any, rank_id: int, wait_flag: bool, msg_queue_id: int) -> Any:
    """As get_output, from queue `msg_queue_id` where INFERENCE_MSG_QUEUE_ID names no other."""
    _in_place(x=x)
    return _run("static_op_get_output_dynamic", x, rank_id, wait_flag, msg_queue_id)


def get_output_ep(x: Any, rank_id: int, wait_flag: bool) -> Any:
    """As get_output, on every rank."""
    _in_place(x=x)
    return _run("static_op_get_output_ep", x, rank_id, wait_flag)


def get_output_ep_dynamic(x: Any, rank_id: int, wait_flag: bool, msg_queue_id: int) -> Any:
    """As get_output_dynamic, on every rank."""
    _in_place(x=x)
    return _run("static_op_get_output_ep_dynamic", x, rank_id, wait_flag, msg_queue_id)


def get_output_topk(x: Any, scores: Any, ranks: Any, k: int, rank_id: int, wait_flag: bool) -> Any:
    """Receives a token per row with `k` candidates; see sysv.get_output_topk. Returns the three."""
    _in_place(x=x, scores=scores, ranks=ranks)
    return _run("static_op_get_output_topk", x, scores, ranks, k, rank_id, wait_flag)


def speculate_get_output(x: Any, rank_id: int, wait_flag: bool, get_each_rank: bool) -> Any:
    """Receives up to 6 tokens per row into `x`; see sysv.speculate_get_output. Returns `x`."""
    _in_place(x=x)
    return _run("static_op_speculate_get_output", x, rank_id, wait_flag, get_each_rank)


def speculate_get_output_dynamic(
    x: Any, rank_id: int, wait_flag: bool, msg_queue_id: int, get_each_rank: bool
) -> Any:
    """As speculate_get_output, from queue `msg_queue_id` where INFERENCE_MSG_QUEUE_ID names no
    other."""
    _in_place(x=x)
    where = (rank_id, wait_flag, msg_queue_id, get_each_rank)
    return _run("static_op_speculate_get_output_dynamic", x, *where)


def speculate_get_output_topk(
    output_tokens: Any,
    output_scores: Any,
    output_ranks: Any,
    real_k: int,
    rank_id: int,
    wait_flag: bool,
) -> Any:
    """Receives up to 6 tokens per row with candidates; see sysv.speculate_get_output_topk. Returns
    the three."""
    outputs = {
        "output_tokens": output_tokens,
        "output_scores": output_scores,
        "output_ranks": output_ranks,
    }
    _in_place(**outputs)
    where = (real_k, rank_id, wait_flag)
    return _run("static_op_speculate_get_output_topk", *outputs.values(), *where)
