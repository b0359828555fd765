"""FastDeploy's save_* and get_* ops on its System V queue, for numpy arrays and CPU tensors with
DLPack.

Names, order of arguments, shapes and dtypes are FastDeploy's; the work is done by
cuda_ops/sysv_ops.hpp through the C functions of cuda_ops/tokenpipe_ops.h. Inputs are read without a
copy where they are contiguous; a get writes in place.

Every op raises OpArgumentError (argument) for what cannot be sent or received, and QueueError
(errno) for what the kernel refuses (EMSGSIZE: its limits are too small, with the numbers) or finds
(EBADMSG: a message that is not this op's, which is taken off). After a failed save nothing was
sent. A save waits while the queue is full, a get when told to. A get that found nothing leaves -2
and 0 in its first two words; so does one whose wait a signal has ended. `rank_id` above 0 neither
saves nor gets, with the exceptions that FastDeploy makes. Any thread may call.
"""

from __future__ import annotations

import ctypes
import errno
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpipe.cuda import refuse_on_device
from tokenpipe.errors import OpArgumentError, QueueError, TokenpipeError

GENERATIONS = ("g1", "g2", "g3", "g4")


@dataclass(frozen=True)
class Wire:
    """Which queue, and how its messages are marked. Without one, an op does what the environment
    says: INFERENCE_MSG_QUEUE_ID, INFERENCE_MSG_ID, TOKENPIPE_SYSV_GENERATION,
    TOKENPIPE_SYSV_FOLDER."""

    queue_id: int = 1
    """The port of FastDeploy's engine worker queue."""
    generation: str = "g3"
    """Of FastDeploy's ops: g1, g2 (keys by ftok), g3 (by custom_ftok), g4 (packed headers)."""
    folder: str | None = None
    """Whose inode is in the key; None: /dev/shm, of some speculative ops the working folder."""
    message_id: int = 1
    """Magnitude of header word 0, which is negative once the engine has no work left; not 2."""


class Failure(ctypes.Structure):
    """tokenpipe_error: what an op says about its failure."""

    _fields_ = (("argument", ctypes.c_char * 32), ("text", ctypes.c_char * 480))

    def as_error(self, code: int) -> TokenpipeError:
        """Returns the exception; `code` is the op's errno."""
        text = self.text.decode(errors="replace")
        if self.argument:
            return OpArgumentError(self.argument.decode(), text)
        return QueueError(code, text)


_INSTEAD = "copy it there first (EngineWriter and tokenpipe.ops.paddle take tensors on a GPU)"
_Shape = ctypes.c_int64 * 3


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", _Shape),
    )


class _Wire(ctypes.Structure):
    _fields_ = (
        ("queue_id", ctypes.c_int32),
        ("message_id", ctypes.c_int32),
        ("generation", ctypes.c_int32),
        ("folder", ctypes.c_char_p),
    )


_DTYPES = {np.dtype(np.int32): 1, np.dtype(np.int64): 2, np.dtype(np.float32): 3}


def _load() -> ctypes.CDLL:
    path = Path(__file__).parents[1] / f"_ops{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not path.exists():
        raise ImportError(f"{path} is not there: install tokenpipe again")
    return ctypes.CDLL(str(path))


_library = _load()


class _Call:
    """Collects the arguments of one C call, and holds what they point to while it runs."""

    def __init__(self, wire: Wire | None) -> None:
        self._kept: list[Any] = []
        self._arguments: list[Any] = [self._wire(wire)]

    def tensor(self, name: str, value: Any, *, is_written: bool = False) -> _Call:
        array = as_array(name, value, is_written=is_written)
        shape = _Shape(*(array.shape if array.ndim <= 3 else ()))
        dtype = _DTYPES.get(array.dtype)
        if dtype is None:
            kinds = ", ".join(map(str, _DTYPES))
            raise OpArgumentError(name, f"{name} is {array.dtype}, must be one of {kinds}")
        tensor = _Tensor(array.ctypes.data, dtype, array.ndim, shape)
        return self._by_reference(tensor, array)

    def optional(self, name: str, value: Any) -> _Call:
        if value is not None:
            return self.tensor(name, value)
        self._arguments.append(None)
        return self

    def number(self, kind: Any, value: Any) -> _Call:
        self._arguments.append(kind(value))
        return self

    def flag(self, name: str, value: Any) -> _Call:
        return self.number(ctypes.c_bool, as_flag(name, value))

    def run(self, op: str) -> None:
        failure = Failure()
        code = errno.EINTR
        # A save that a signal has interrupted is tried again, behind Python's own handler.
        while code == errno.EINTR:
            code = getattr(_library, f"tokenpipe_{op}")(*self._arguments, ctypes.byref(failure))
        if code:
            raise failure.as_error(code)

    def _wire(self, wire: Wire | None) -> Any:
        if wire is None:
            return None
        if wire.generation not in GENERATIONS:
            raise OpArgumentError(
                "generation", f"generation is {wire.generation!r}, must be one of {GENERATIONS}"
            )
        for name, value in (("queue_id", wire.queue_id), ("message_id", wire.message_id)):
            if not -(2**31) <= value < 2**31:
                raise OpArgumentError(name, f"{name} is {value}, which is outside int32")
        folder = None if wire.folder is None else wire.folder.encode()
        where = _Wire(wire.queue_id, wire.message_id, int(wire.generation[1:]), folder)
        self._kept.append(where)
        return ctypes.byref(where)

    def _by_reference(self, structure: ctypes.Structure, owner: object) -> _Call:
        self._kept += [structure, owner]
        self._arguments.append(ctypes.byref(structure))
        return self


def as_array(name: str, value: Any, *, is_written: bool = False) -> npt.NDArray[Any]:
    """Returns a contiguous view of a tensor on the CPU, or a copy where it must be only read.
    Raises OpArgumentError."""
    refuse_on_device(name, value, _INSTEAD)
    if isinstance(value, np.ndarray):
        array: npt.NDArray[Any] = value
        if is_written and not array.flags.writeable:
            raise OpArgumentError(name, f"{name} is written in place, but read-only")
    elif hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise OpArgumentError(name, f"{name} cannot be read: {error}") from None
    else:
        what = "must be a numpy array or a CPU tensor with DLPack"
        raise OpArgumentError(name, f"{name} is a {type(value).__name__}, {what}")
    if array.flags.c_contiguous:
        return array
    if is_written:
        raise OpArgumentError(name, f"{name} is written in place: must be contiguous")
    return np.ascontiguousarray(array)


def as_flag(name: str, value: Any) -> bool:
    """Returns a bool, or the one in FastDeploy's tensor of one. Raises OpArgumentError."""
    refuse_on_device(name, value, _INSTEAD)
    array = np.asarray(value)
    if array.dtype != np.bool_ or array.size != 1:
        what = f"{array.dtype}{list(array.shape)}"
        raise OpArgumentError(name, f"{name} is {what}, must be one bool")
    return bool(array.reshape(-1)[0])


def save_output(
    x: Any,
    not_need_stop: Any,
    preempted_idx: Any = None,
    rank_id: int = 0,
    save_each_rank: bool = False,
    *,
    wire: Wire | None = None,
) -> None:
    """Sends a token per row.

    `x` int64 [n, 1], n at most 512; `not_need_stop` bool [1]: whether the engine has more work;
    `preempted_idx` int32, at least n: 1 where the row is preempted or aborted, whose token becomes
    -9. Rank 0 alone sends; `save_each_rank` is FastDeploy's, which does not look at it either.
    """
    call = _Call(wire).tensor("x", x).flag("not_need_stop", not_need_stop)
    call.optional("preempted_idx", preempted_idx).number(ctypes.c_int64, rank_id).run("save_output")


def save_output_topk(
    x: Any,
    topk_ids: Any,
    logprob_scores: Any,
    ranks: Any,
    not_need_stop: Any,
    preempted_idx: Any = None,
    rank_id: int = 0,
    *,
    wire: Wire | None = None,
) -> None:
    """Sends a token per row with its candidates.

    `topk_ids` int64 and `logprob_scores` float32 [n, T], T 1 to 21, column 0 the sampled token's;
    `ranks` int64 [n]. Else as save_output.
    """
    call = _Call(wire).tensor("x", x).tensor("topk_ids", topk_ids)
    call.tensor("logprob_scores", logprob_scores).tensor("ranks", ranks)
    call.flag("not_need_stop", not_need_stop).optional("preempted_idx", preempted_idx)
    call.number(ctypes.c_int64, rank_id).run("save_output_topk")


def speculate_save_output(
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
    wire: Wire | None = None,
) -> None:
    """Sends up to 6 accepted tokens per row.

    `accept_tokens` int64 [n, D], n at most 256; `accept_num` int32 [n]: 0 to 6 and at most D, or
    -3; `seq_lens_decoder` int32 and `prompt_lens` int64 [n]: with `skip_prefill` a row in its
    prompt sends none. Until g2 every rank sends where `save_each_rank`, since g3 rank 0 alone.
    """
    call = _Call(wire).tensor("accept_tokens", accept_tokens).tensor("accept_num", accept_num)
    call.flag("not_need_stop", not_need_stop).tensor("seq_lens_decoder", seq_lens_decoder)
    call.tensor("prompt_lens", prompt_lens).optional("preempted_idx", preempted_idx)
    call.number(ctypes.c_int64, rank_id).number(ctypes.c_bool, save_each_rank)
    call.number(ctypes.c_bool, skip_prefill).run("speculate_save_output")


def mtp_save_first_token(
    x: Any,
    not_need_stop: Any,
    seq_lens_decoder: Any,
    prompt_lens: Any,
    step_idx: Any,
    rank_id: int = 0,
    save_each_rank: bool = False,
    skip_chunk_prefill: bool = False,
    *,
    wire: Wire | None = None,
) -> None:
    """Sends the first token and the first draft of each row whose `step_idx` is 1.

    `x` int64 [n, 2 or more]; `step_idx` int64 [n]. Other rows send none (FastDeploy's op repeats
    its last message there).
    """
    call = _Call(wire).tensor("x", x).flag("not_need_stop", not_need_stop)
    call.tensor("seq_lens_decoder", seq_lens_decoder).tensor("prompt_lens", prompt_lens)
    call.tensor("step_idx", step_idx).number(ctypes.c_int64, rank_id)
    call.number(ctypes.c_bool, save_each_rank).number(ctypes.c_bool, skip_chunk_prefill)
    call.run("mtp_save_first_token")


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
    preempted_idx: Any = None,
    message_flag: int = 3,
    rank_id: int = 0,
    save_each_rank: bool = False,
    *,
    wire: Wire | None = None,
) -> None:
    """Sends up to 6 tokens per row with their candidates.

    `sampled_token_ids` int64 [n, D], n at most 512 (until g2 flat, as the candidates are);
    `logprob_token_ids` int64 and `logprob_scores` float32 [m, T], `logprob_ranks` int64 [m]: of all
    rows' tokens, a row's from `cu_batch_token_offset` int32 [n] on; `token_num_per_batch` int32
    [n]. `message_flag` 3: the target model's tokens, 4: the drafts'.
    """
    _save_speculate_topk("speculate_save_output_topk", **locals())


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
    preempted_idx: Any = None,
    message_flag: int = 3,
    rank_id: int = 0,
    save_each_rank: bool = False,
    *,
    wire: Wire | None = None,
) -> None:
    """Sends a prefill step's first token with its candidates, and the drafts behind it without.

    A row has one token more than `token_num_per_batch` says, or none where that is 0. Else as
    speculate_save_output_topk.
    """
    _save_speculate_topk("mtp_save_first_token_with_topk", **locals())


def _save_speculate_topk(op: str, *, wire: Wire | None, **given: Any) -> None:
    call = _Call(wire)
    for name in ("sampled_token_ids", "logprob_token_ids", "logprob_scores", "logprob_ranks"):
        call.tensor(name, given[name])
    for name in ("token_num_per_batch", "cu_batch_token_offset"):
        call.tensor(name, given[name])
    call.flag("not_need_stop", given["not_need_stop"])
    for name in ("seq_lens_decoder", "prompt_lens"):
        call.tensor(name, given[name])
    call.optional("preempted_idx", given["preempted_idx"])
    call.number(ctypes.c_int32, given["message_flag"]).number(ctypes.c_int64, given["rank_id"])
    call.number(ctypes.c_bool, given["save_each_rank"]).run(op)


def get_output(
    x: Any, rank_id: int = 0, wait_flag: bool = True, *, wire: Wire | None = None
) -> None:
    """Receives a token per row into `x` int64 [514]: the header (+-message id, n), then n tokens;
    elements behind them keep their values. Rank 0 alone receives; others find nothing."""
    call = _Call(wire).tensor("x", x, is_written=True).number(ctypes.c_int64, rank_id)
    call.number(ctypes.c_bool, wait_flag).run("get_output")


def get_output_ep(
    x: Any, rank_id: int = 0, wait_flag: bool = True, *, wire: Wire | None = None
) -> None:
    """As get_output, on every rank."""
    call = _Call(wire).tensor("x", x, is_written=True).number(ctypes.c_int64, rank_id)
    call.number(ctypes.c_bool, wait_flag).run("get_output_ep")


def get_output_topk(
    x: Any,
    scores: Any,
    ranks: Any,
    k: int = 20,
    rank_id: int = 0,
    wait_flag: bool = True,
    *,
    wire: Wire | None = None,
) -> None:
    """Receives a token per row with `k` candidates, on every rank.

    `x` int64 [10754]: the header, then column j of row i at 2 + 21 * i + j; `scores` float32
    [10752], `ranks` int64 [512]. Of g4 all T columns come, at a stride of T, and T is in the
    header's high half.
    """
    call = _Call(wire).tensor("x", x, is_written=True).tensor("scores", scores, is_written=True)
    call.tensor("ranks", ranks, is_written=True).number(ctypes.c_int32, k)
    call.number(ctypes.c_int64, rank_id).number(ctypes.c_bool, wait_flag).run("get_output_topk")


def speculate_get_output(
    x: Any,
    rank_id: int = 0,
    wait_flag: bool = True,
    get_each_rank: bool = False,
    *,
    wire: Wire | None = None,
) -> None:
    """Receives up to 6 tokens per row into `x` int64 [1794]: the header, 256 counts, 6 tokens a
    row. A rank above 0 finds nothing unless `get_each_rank`."""
    call = _Call(wire).tensor("x", x, is_written=True).number(ctypes.c_int64, rank_id)
    call.number(ctypes.c_bool, wait_flag).number(ctypes.c_bool, get_each_rank)
    call.run("speculate_get_output")


def speculate_get_output_topk(
    output_tokens: Any,
    output_scores: Any,
    output_ranks: Any,
    real_k: int = 20,
    rank_id: int = 0,
    wait_flag: bool = True,
    *,
    wire: Wire | None = None,
) -> None:
    """Receives up to 6 tokens per row with `real_k` candidates each, on every rank.

    `output_tokens` int64 [65027]: +-message id, flag (3 target, 4 draft), n, counts, then column k
    of token j of row i at 515 + 126 * i + 21 * j + k; `output_scores` float32 [64512],
    `output_ranks` int64 [3072].
    """
    call = _Call(wire).tensor("output_tokens", output_tokens, is_written=True)
    call.tensor("output_scores", output_scores, is_written=True)
    call.tensor("output_ranks", output_ranks, is_written=True).number(ctypes.c_int32, real_k)
    call.number(ctypes.c_int64, rank_id).number(ctypes.c_bool, wait_flag)
    call.run("speculate_get_output_topk")
