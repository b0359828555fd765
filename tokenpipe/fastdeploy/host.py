"""The FastDeploy that the plugin runs in: its classes, metrics, logs and traces, by name.

A part that cannot be imported is replaced by ours (the outputs) or by nothing (logs, traces,
metrics), and named once. Nothing of FastDeploy is imported before the processor is made.
"""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

from tokenpipe import records

_log = logging.getLogger("tokenpipe.fastdeploy")

_OUTPUTS = (
    *("RequestOutput", "CompletionOutput", "SpeculateMetrics"),
    *("PoolingRequestOutput", "PoolingOutput"),
)


def _nothing(*_args: Any, **_fields: Any) -> None:
    """Stands for a log or a trace that is not there."""


_NO_TRACING = SimpleNamespace(
    trace_set_thread_info=_nothing,
    trace_set_proc_propagate_context=_nothing,
    trace_get_proc_propagate_context=_nothing,
    trace_report_span=_nothing,
    TraceSpanName=SimpleNamespace(PREFILL="PREFILL", DECODE="DECODE"),
)
_NO_LEVELS = SimpleNamespace(LIFECYCLE=0, STAGES=1)
_NO_EVENTS = SimpleNamespace(
    FIRST_TOKEN_GENERATED="FIRST_TOKEN_GENERATED",
    DECODE_START="DECODE_START",
    INFERENCE_END="INFERENCE_END",
    POSTPROCESSING_START="POSTPROCESSING_START",
)


class Host:
    """What of FastDeploy can be imported."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self._envs = self._module("fastdeploy.envs")
        request = self._module("fastdeploy.engine.request")
        for name in _OUTPUTS:
            setattr(self, name, getattr(request, name, getattr(records, name)))
        worker = self._module("fastdeploy.worker.output")
        self.LogprobsLists: Any = getattr(worker, "LogprobsLists", records.LogprobsLists)
        self.LogprobsTensors: Any = getattr(worker, "LogprobsTensors", records.LogprobsLists)
        metrics = self._module("fastdeploy.metrics.metrics")
        self.metrics: Any = getattr(metrics, "main_process_metrics", None)
        self.tracing: Any = self._module("fastdeploy.metrics.trace") or _NO_TRACING
        printer = self._module("fastdeploy.trace.trace_logger")
        self.trace_print: Any = getattr(printer, "print", _nothing)
        constants = self._module("fastdeploy.trace.constants")
        self.events: Any = getattr(constants, "LoggingEventName", _NO_EVENTS)
        logger = self._module("fastdeploy.logger.request_logger")
        self.log_request: Any = getattr(logger, "log_request", _nothing)
        self.levels: Any = getattr(logger, "RequestLogLevel", _NO_LEVELS)
        utils = self._module("fastdeploy.utils")
        self.llm_logger: Any = getattr(utils, "llm_logger", None) or _log
        self.spec_logger: Any = getattr(utils, "spec_logger", None) or _log

    RequestOutput: Any
    CompletionOutput: Any
    SpeculateMetrics: Any
    PoolingRequestOutput: Any
    PoolingOutput: Any

    def _module(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            self.missing.append(f"{name} ({error})")
            return None

    def env(self, name: str, default: Any) -> Any:
        """Returns a setting of FastDeploy's, which may change at run time."""
        return getattr(self._envs, name, default)

    @property
    def is_v1(self) -> bool:
        """Whether FastDeploy's V1 scheduler runs."""
        return bool(self.env("ENABLE_V1_KVCACHE_SCHEDULER", 1))

    def say(self, level: int, text: str, *values: Any) -> None:
        """Logs to our log and, where it is another one, to FastDeploy's."""
        _log.log(level, text, *values)
        if self.llm_logger is not _log:
            self.llm_logger.log(level, "tokenpipe: " + text % values)
