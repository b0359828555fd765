"""COORDINATOR process: owns the segments and the roles; one tick = look, sweep, serve, judge.

Order of start: segments, health endpoint, roles, ready line. Order of stop: nothing new is taken,
published tokens are delivered, finals for the rest, roles, endpoint, segments.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenpipe import _native
from tokenpipe.children import Children, Peer, Watch
from tokenpipe.commands import FinishReason
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import ChildError, in_words
from tokenpipe.health import HealthServer
from tokenpipe.layout import PipelineState
from tokenpipe.limits import allowed_connections
from tokenpipe.resources import Resources
from tokenpipe.roles import Roles
from tokenpipe.segment import LOCK_CLIENT, LOCK_WRITER, Segment, leftovers, start_time
from tokenpipe.sources import prepared_source
from tokenpipe.status import View, judge, role_names
from tokenpipe.stop import Stop, stop_on_signals

_log = logging.getLogger("tokenpipe.coordinator")

ROLE_INDEX = 0
_NO_ROLE = 2**32 - 1
_DELIVERY_GRACE_S = 1.5
"""After the drain's limit the client has so long to read the finals."""
_LOOK_S = 0.1
"""What has a time limit is looked at so often, at least."""
_LONGEST_SLEEP_S = 1.0
_NAMED_AT_MOST = 10
"""So many files of other users are named at the start."""
_OWNER_LIMIT_S = 0.0
"""A drain that the owner's end begins waits for nobody: the client is the owner."""


def run(
    config: PipelineConfig,
    ready: Callable[[Mapping[str, Any]], None],
    owner_fds: Sequence[int] = (),
    *,
    has_keeper: bool = False,
) -> None:
    """Runs a pipeline until it is told to stop; `ready` gets the facts of the ready line.

    Takes over the pipeline of a coordinator that died, if there is one of this name. `owner_fds`:
    descriptors that become readable when the owner is gone (children.Watch); `has_keeper`: one of
    them is an owning handle's, which replaces this coordinator when it dies. Raises LimitError,
    SegmentExistsError, AdoptionError, SegmentSpaceError, SegmentMemoryError, PortInUseError,
    ChildBootError, RoleLostError; of a queue QueueError, QueueLimitError, QueueTakenError.
    """
    max_connections = allowed_connections(len(role_names(config.num_decoders)) - 1)
    with (
        stop_on_signals() as stop,
        Segment.create_or_adopt(config) as segment,
        prepared_source(segment),
        HealthServer(segment, max_connections) as health,
        Children(config.name, config.log_level) as children,
    ):
        _tell_of_foreign_segments()
        coordinator = Coordinator(segment, children, stop, health)
        try:
            if coordinator.start(owner_fds, has_keeper):
                ready(coordinator.facts())
            while coordinator.tick():
                pass
        except BaseException as e:
            coordinator.fail(e)
            raise
        finally:
            coordinator.close()


def _tell_of_foreign_segments() -> None:
    foreign = [found for found in leftovers() if found.is_foreign]
    if foreign:
        _log.info(
            "%d segments (%d bytes) in /dev/shm are other users', who alone may remove them: %s",
            len(foreign),
            sum(found.num_bytes for found in foreign),
            ", ".join(f"{found.file_name} {found.why}" for found in foreign[:_NAMED_AT_MOST]),
        )


class Coordinator:
    """The coordinator's loop and what it decides."""

    def __init__(
        self, segment: Segment, children: Children, stop: Stop, health: HealthServer
    ) -> None:
        self._segment, self._children, self._stop, self._health = segment, children, stop, health
        self._config = segment.config
        self._book = _native.Book(segment.core, segment.source)
        self._view = View(segment)
        self._resources = Resources(segment.core, segment.source, self._book, self._config)
        self._watch: Watch | None = None
        self._sender: Peer | None = None
        self._barrier = 0
        self._roles = Roles(children, self._book, self._view, self._config)
        self._is_degraded = False
        self._stalled: str | None = None
        self._drain_limit: float | None = None
        self._drain_until = 0.0
        self._has_ended_rest = False
        self._last_judged = 0.0
        self._names = role_names(self._config.num_decoders)
        pid = os.getpid()
        _native.announce_role(segment.core, ROLE_INDEX, pid, start_time(pid) or 0)
        self._book.set_health_port(health.port)
        self._book.expect_role(ROLE_INDEX)
        self._book.beat()

    # -------------------------------------------------------------- start

    def start(self, owner_fds: Sequence[int], has_keeper: bool) -> bool:
        """Spawns the roles and returns True when each has beaten once, False when a stop was asked
        for meanwhile. Raises ChildBootError."""
        self._set_state(PipelineState.STARTING, None, "waiting for every role's first heartbeat")
        self._book.set_owned(has_keeper, self._config.orphan_grace_s)
        self._watch = self._children.watch = Watch(self._book.ring, owner_fds)
        self._roles.start()
        while not self._roles.are_up:
            seen = self._book.events()
            self._book.beat()
            self._roles.look()
            if self._stop.requested or self._watch.owner_is_gone:
                return False
            self._book.wait(seen, 0.005)
        self._resources.publish_gauges()
        self._set_state(PipelineState.IDLE, None, "")
        if not int(self._view.header["accepting"]):  # its predecessor died while it drained
            self._begin_drain(self._config.drain_timeout_s, "asked to stop before a restart")
        return True

    def facts(self) -> dict[str, Any]:
        """Returns what the ready line says."""
        return {
            "event": "ready",
            "pid": os.getpid(),
            "name": self._config.name,
            "health_url": self._health.url,
            "pids": self._roles.pids,
        }

    # -------------------------------------------------------------- loop

    def tick(self) -> bool:
        """One turn; False when the pipeline has drained. Raises RoleLostError."""
        seen = self._book.events()
        self._book.beat()
        self._roles.look()
        self._look_at_writer()
        self._resources.sweep()
        self._resources.reclaim()
        self._resources.serve()
        self._resources.publish_gauges()
        self._look_for_a_stop()
        if self._drain_limit is not None and self._drain():
            return False
        self._judge()
        self._book.wait(seen, self._patience_s)
        return True

    @property
    def _patience_s(self) -> float:
        """How long to sleep: a death of the engine or the client rings no bell, and what has a time
        limit is looked at in time, however rare the beats."""
        interval_s = min(self._config.heartbeat_interval_s, _LONGEST_SLEEP_S)
        is_timed = self._is_degraded or self._drain_limit is not None or self._resources.is_timed
        return min(interval_s, _LOOK_S) if is_timed else interval_s

    def _look_at_writer(self) -> None:
        """An engine that died: what it had published is delivered, then its requests end."""
        pid = int(self._view.source["writer_pid"])
        if not pid or self._writer_lives(pid):
            return
        if self._config.source == "sysv":  # what it had sent is before a barrier sent from now on
            self._barrier = self._barrier or self._book.send_barrier()
            if not self._barrier or not self._book.has_passed(self._barrier):
                return
            self._barrier = 0
        published = _native.published(self._segment.source)
        if all(int(c["next_source_sequence"]) >= published for c in self._view.commits()):
            _log.error("the engine's writer (pid %d) has died: its requests end", pid)
            # Ended first: who takes over from a coordinator killed here must see the dead writer.
            self._resources.end_all_of_a_dead_engine()
            _native.announce_writer(self._segment.source, 0, 0)

    def _writer_lives(self, pid: int) -> bool:
        if self._config.has_writer or self._segment.is_locked(LOCK_WRITER):
            return self._segment.is_locked(LOCK_WRITER)
        # A sender holds no lock of ours; the reader has noted who it is.
        start = int(self._view.source["writer_start"])
        if self._sender is None or (self._sender.pid, self._sender.start) != (pid, start):
            if self._sender is not None:
                self._sender.close()
            self._sender = Peer(pid, start)
        return self._sender.is_alive()

    def _judge(self) -> None:
        missing = self._roles.missing()
        if missing is not None and self._drain_limit is None:
            self._is_degraded = True
            self._set_state(PipelineState.DEGRADED, *missing)
            return
        if self._is_degraded:
            self._is_degraded = False
            self._set_state(PipelineState.IDLE, None, "")
        now = time.monotonic()
        if now - self._last_judged < self._config.heartbeat_interval_s:
            return
        self._last_judged = now
        verdict = judge(self._segment, self._view)
        stalled = verdict.role if verdict.state is PipelineState.STALLED else None
        if stalled is not None and stalled != self._stalled:  # once, also while draining
            _log.error("stalled: %s", verdict.reason)
        self._stalled = stalled
        if int(self._view.header["state"]) == verdict.state:
            return
        if self._drain_limit is None:
            self._set_state(verdict.state, verdict.role, verdict.reason)

    def _set_state(self, state: PipelineState, role: str | None, reason: str) -> None:
        index = self._names.index(role) if role in self._names else _NO_ROLE
        self._book.set_state(int(state), index, reason)

    # -------------------------------------------------------------- stop

    def _look_for_a_stop(self) -> None:
        if self._drain_limit is None:
            if self._stop.requested:
                self._begin_drain(self._config.drain_timeout_s, "asked to stop")
            elif self._watch is not None and self._watch.owner_is_gone:
                self._begin_drain(_OWNER_LIMIT_S, "the owner has closed it or is gone")
        for limit_s in self._resources.take_drains():
            self._begin_drain(limit_s, "drain() was called")

    def _begin_drain(self, limit_s: float, why: str) -> None:
        _log.info("draining for up to %g s: %s", limit_s, why)
        self._drain_limit = limit_s
        self._drain_until = time.monotonic() + limit_s
        self._resources.is_accepting = False
        self._book.set_accepting(False)
        self._set_state(PipelineState.DRAINING, None, f"draining: {why}")

    def _drain(self) -> bool:
        """Returns whether everything is delivered that will be."""
        now = time.monotonic()
        if self._resources.num_running and now >= self._drain_until and not self._has_ended_rest:
            self._has_ended_rest = True
            self._resources.end_all(FinishReason.SHUTDOWN)
        if self._resources.num_running == 0 and self._is_read():
            return True
        return now >= self._drain_until + _DELIVERY_GRACE_S

    def _is_read(self) -> bool:
        """Whether the client, if there is one, has read every frame of every published step. An
        owner that is gone was the client; what it has not read is in its own mapping."""
        published = _native.published(self._segment.source)
        owner_is_gone = self._watch is not None and self._watch.owner_is_gone
        has_client = not owner_is_gone and self._segment.is_locked(LOCK_CLIENT)
        for k, commit in enumerate(self._view.commits()):
            if int(commit["next_source_sequence"]) < published:
                return False
            unread = int(commit["frames"]) - int(self._view.client["output"][k]["released"])
            if has_client and unread:
                return False
        return True

    def fail(self, error: BaseException) -> None:
        """Says who failed, and lets the roles that live make the finals of the running requests."""
        role = error.role if isinstance(error, ChildError) else "coordinator"
        _log.error("failed: %s", in_words(error))
        self._set_state(PipelineState.FAILED, role, in_words(error))
        self._resources.is_accepting = False
        self._book.set_accepting(False)
        self._resources.end_all(FinishReason.ERROR)
        deadline = time.monotonic() + _DELIVERY_GRACE_S
        while time.monotonic() < deadline and (self._resources.num_running or not self._is_read()):
            seen = self._book.events()
            self._resources.sweep()
            self._resources.serve()
            self._resources.publish_gauges()
            self._book.beat()
            self._book.wait(seen, 0.02)

    def close(self) -> None:
        """Tells writer and client that the pipeline is over."""
        if int(self._view.header["state"]) != PipelineState.FAILED:
            self._set_state(PipelineState.STOPPED, None, "the pipeline has stopped")
        self._resources.end_all(FinishReason.SHUTDOWN)
        if self._watch is not None:
            self._watch.close()
        if self._sender is not None:
            self._sender.close()
        self._children.stop()
        self._book.set_gone()
