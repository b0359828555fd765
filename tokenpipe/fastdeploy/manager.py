"""What the token processor does to FastDeploy's resource manager, for its V0 and V1 schedulers.

The manager's lock does not nest and its methods take it themselves: it is held here only to look
at the sets that name what is being preempted and aborted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container
from typing import Any

from tokenpipe.fastdeploy.host import Host

_NO_IDS: frozenset[str] = frozenset()


class Manager:
    """FastDeploy's resource manager."""

    def __init__(self, manager: Any, host: Host, can_cache_outputs: bool) -> None:
        self._manager = manager
        self._host = host
        self._can_cache_outputs = can_cache_outputs
        self._lock = getattr(manager, "lock", None) or contextlib.nullcontext()

    def to_be_let_go(self, request_id: str) -> tuple[bool, bool]:
        """Returns whether a request is being aborted, and whether it is being preempted."""
        with self._lock:
            return (
                request_id in getattr(self._manager, "to_be_aborted_req_id_set", _NO_IDS),
                request_id in getattr(self._manager, "to_be_rescheduled_request_id_set", _NO_IDS),
            )

    def reschedule_absent(self, rows: Container[int]) -> list[str]:
        """Lets every request be scheduled again that is being preempted and whose row is not among
        `rows`, those of a whole message: no token of it will come. Returns their ids."""
        manager = self._manager
        marked = getattr(manager, "to_be_rescheduled_request_id_set", _NO_IDS)
        if not marked:  # nearly always: such a step need not wait for the scheduler's turn
            return []
        with self._lock:
            tasks = getattr(manager, "requests", {})
            absent = [i for i in marked if i in tasks and tasks[i].idx not in rows]
        for request_id in absent:
            manager.reschedule_preempt_task(request_id)
        return absent

    def shielded(self) -> frozenset[str]:
        """Returns the ids of a decode instance whose outputs are not wanted any more."""
        with self._lock:
            return frozenset().union(
                getattr(self._manager, "to_be_aborted_req_id_set", _NO_IDS),
                getattr(self._manager, "to_be_rescheduled_request_id_set", _NO_IDS),
            )

    def cache_output(self, task: Any) -> None:
        """Keeps the KV cache of a request's output for other requests, where that is on."""
        host = self._host
        if host.is_v1 and self._can_cache_outputs and not host.env("ENABLE_V1_KVCACHE_MANAGER", 0):
            self._manager.cache_output_tokens(task)

    def recycle(self, task: Any, row: int) -> None:
        """Gives a row that ended back, with its blocks. V1 does that in a thread of its own."""
        manager = self._manager
        if self._host.is_v1:
            manager.finish_requests_async(task.request_id)
            return
        manager._recycle_block_tables(task)
        manager.req_dict.pop(task.request_id, None)
        manager.tasks_list[row] = None
        manager.stop_flags[row] = True  # last: who sees it may fill the row at once (fault F26)
