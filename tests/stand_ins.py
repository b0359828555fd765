"""Classes of the same qualified names as FastDeploy's and Paddle's, pickled as theirs are.

What these pickles look like was taken down from real ones (paddlepaddle 3.3.1, numpy 1 and 2).
The stand-ins are in sys.modules only while something is pickled or unpickled, so that nobody else
takes them for the real ones.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

RECORDS = "fastdeploy.output.stream_transfer_data"
OUTPUT = "fastdeploy.worker.output"
PADDLE = "paddle.base.dygraph.math_op_patch"


class DecoderState(Enum):
    """What a record's tokens are; FastDeploy's workers send text only."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass
class StreamTransferData:
    """A row of a step. `speculaive_decoding` is how FastDeploy spells it."""

    decoder_state: Any
    batch_id: Any
    tokens: Any = None
    speculaive_decoding: Any = False
    logprobs: Any = None
    prompt_logprobs: Any = None
    accept_tokens: Any = None
    accept_num: Any = None
    pooler_output: Any = None
    sampling_mask: Any = None


class LogprobsTensors(NamedTuple):
    """Candidates: ids [m, T], logprobs [m, T], ranks [m]."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any


@dataclass
class Tensor:
    """A Paddle tensor; bfloat16 has its bits in an array of uint16."""

    array: np.ndarray
    dtype: str
    place: str = "cpu"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_tensor, (self.array, self.dtype, self.place, False)


def _rebuild_tensor(array: np.ndarray, dtype: str, place: str, requires_grad: bool) -> Tensor:
    assert requires_grad is False
    return Tensor(array, dtype, place)


def _old_reconstruct(*args: Any) -> np.ndarray:
    return np._core.multiarray._reconstruct(*args)


def _old_scalar(*args: Any) -> Any:
    return np._core.multiarray.scalar(*args)


def _old_frombuffer(*args: Any) -> np.ndarray:
    return np._core.numeric._frombuffer(*args)


NAMES = {
    RECORDS: {"DecoderState": DecoderState, "StreamTransferData": StreamTransferData},
    OUTPUT: {"LogprobsTensors": LogprobsTensors},
    PADDLE: {"_rebuild_tensor": _rebuild_tensor},
}
NUMPY_1 = {
    "numpy.core.multiarray": {"_reconstruct": _old_reconstruct, "scalar": _old_scalar},
    "numpy.core.numeric": {"_frombuffer": _old_frombuffer},
}
for _module, _names in (NAMES | NUMPY_1).items():
    for _name, _thing in _names.items():
        _thing.__module__, _thing.__name__, _thing.__qualname__ = _module, _name, _name


@contextmanager
def installed() -> Iterator[None]:
    """Within it, `import` finds the stand-ins."""
    modules: dict[str, types.ModuleType] = {}
    for path, names in (NAMES | NUMPY_1).items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            if (parent := ".".join(parts[:i])) != "numpy":
                modules.setdefault(parent, types.ModuleType(parent))
        for name, thing in names.items():
            setattr(modules[path], name, thing)
    with mock.patch.dict(sys.modules, modules):
        yield


class _Numpy1(pickle.Pickler):
    """Spells numpy's functions as numpy 1 does."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, np.ndarray | np.generic):
            return NotImplemented
        function, *rest = thing.__reduce_ex__(self.protocol)
        for names in NUMPY_1.values():
            function = names.get(function.__name__, function)
        return (function, *rest)

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.protocol = protocol


def pickled(thing: Any, protocol: int = 4, numpy: int = 2) -> bytes:
    """`thing` as FastDeploy's worker sends it: pyzmq pickles with protocol 4, from Python 3.14 on
    with 5."""
    with installed():
        if numpy == 2:
            return pickle.dumps(thing, protocol)
        file = io.BytesIO()
        _Numpy1(file, protocol).dump(thing)
        return file.getvalue()


def unpickled(message: bytes) -> Any:
    """What Python's own unpickler makes of it."""
    with installed():
        return pickle.loads(message)


def record(row: int, tokens: Any = None, **fields: Any) -> StreamTransferData:
    """A record as the worker makes it: tokens are int64, one or more; an array is left as it is."""
    if isinstance(tokens, int | list):
        tokens = np.atleast_1d(np.asarray(tokens, np.int64))
    made = StreamTransferData(DecoderState.TEXT, row, tokens)
    vars(made).update(fields)  # newer versions have fields that older ones lack
    return made


def candidates(ids: Any, logprobs: Any, ranks: Any) -> LogprobsTensors:
    """Paddle tensors of the dtypes that FastDeploy's sampler gives them."""
    return LogprobsTensors(
        Tensor(np.asarray(ids, np.int64), "int64"),
        Tensor(np.asarray(logprobs, np.float32), "float32"),
        Tensor(np.asarray(ranks, np.int64), "int64"),
    )
