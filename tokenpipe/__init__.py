"""tokenpipe: the output path of an LLM engine as its own processes.

Names are imported when they are first used, so that a reader or decoder process, which needs none
of them, loads neither numpy nor the HTTP server. Their types are in __init__.pyi.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "commands": "FinishReason",
    "config": "PipelineConfig",
    "errors": "ChildBootError ChildError ConfigError CudaError DeliveryModeError DrainingError "
    "DuplicateRequestError ExitCode InvalidRequestError LayoutMismatchError LimitError "
    "NoFreeBlocksError NoFreeRowError NotAcknowledgedError NotEnoughBlocksError "
    "OpArgumentError PartyExistsError PipelineGoneError PipelineStartError PortInUseError "
    "QueueError QueueLimitError QueueTakenError RequestAbortedError RequestError RoleLostError "
    "RowBusyError SegmentError SegmentExistsError SegmentMemoryError SegmentMissingError "
    "SegmentSpaceError SocketTakenError StreamTakenError SyncTimeoutError TimeLimitError "
    "TokenpipeError UnknownRequestError WrongSourceError",
    "layout": "PipelineState",
    "events": "RequestEvent",
    "outputs": "OutputBatch",
    "records": "CompletionOutput LogprobsLists PoolingOutput PoolingRequestOutput RequestMetrics "
    "RequestOutput SpeculateMetrics",
    "pipeline": "Pipeline",
    "requests": "Admission Request",
    "writer": "ControlEvent EngineWriter Step",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'tokenpipe' has no attribute {name!r}")
    value = getattr(import_module(f"tokenpipe.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
