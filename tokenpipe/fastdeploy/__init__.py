"""The token processor of a FastDeploy engine: found by its plugin hook, no patch to FastDeploy.

`token_processor` is the entry point of the group `fastdeploy.token_processor_plugins`.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenpipe.config import is_plugin_disabled
from tokenpipe.errors import TokenpipeError

_log = logging.getLogger("tokenpipe.fastdeploy")


class PluginDisabledError(TokenpipeError):
    """TOKENPIPE_DISABLE is set: FastDeploy goes on with its own token processor."""

    def __init__(self) -> None:
        super().__init__("TOKENPIPE_DISABLE is set: FastDeploy's own token processor runs")


def token_processor() -> type[Any]:
    """Returns the class that FastDeploy makes its token processor of.

    FastDeploy takes its own on any exception, and says nothing: so this says which one runs.
    Raises PluginDisabledError.
    """
    try:
        if is_plugin_disabled():
            raise PluginDisabledError
        from tokenpipe.fastdeploy.processor import TokenProcessor
    except PluginDisabledError as error:
        _log.warning("%s", error)
        raise
    except Exception:
        _log.exception("tokenpipe cannot run here: FastDeploy's own token processor runs")
        raise
    _log.warning("tokenpipe is the token processor; TOKENPIPE_DISABLE=1 gives FastDeploy's back")
    return TokenProcessor
