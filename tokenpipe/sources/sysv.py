"""FastDeploy's System V queue: its worker's save ops send, our reader receives
(cuda_ops/sysv_source.hpp).

The queue has neither generations nor sequence numbers, knows nobody by name, and outlives everyone:
what the coordinator can find out about it before the first message is found out here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tokenpipe import _native
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import QueueLimitError, QueueTakenError
from tokenpipe.segment import (
    Identity,
    Segment,
    ipc_namespace,
    is_running,
    live_configs,
    start_time,
)

_log = logging.getLogger("tokenpipe.sources.sysv")

_MESSAGES_OF_SLACK = 2
"""Fewer in the queue, and the worker would wait for the reader at every step."""
_WARN_EVERY_S = 30.0


class SysvSource:
    """Reader's end of the queue. A successor publishes the message that its predecessor had in
    hand."""

    def __init__(self, segment: Segment) -> None:
        config = segment.config
        self._segment, self._config = segment, config
        self._reader = _native.SysvReader(
            segment.source,
            segment.core,
            config.sysv_variant,
            _generation(config),
            queue_key(config),
            config.heartbeat_interval_s,
        )
        self._num_misfits = 0
        self._looked = self._warned = 0.0

    def get_output(self, producer: _native.Producer, timeout_s: float) -> bool:
        """Receives the next message straight into the claimed slot; False when none came before
        the next heartbeat. Raises QueueError when the queue was removed."""
        has_step = self._reader.get_output(producer, timeout_s)
        if has_step:
            self._look_at_sender()
        if self._reader.num_misfits != self._num_misfits:
            self._warn_of_length()
        return has_step

    def release(self) -> None:
        """A message that was received is gone from the queue: there is nothing to let go of."""

    def _look_at_sender(self) -> None:
        """Whose death ends the running requests: the last sender that is not our coordinator."""
        source, now = self._segment.source, time.monotonic()
        known, start = _native.writer(source)
        if known and now - self._looked < self._config.heartbeat_interval_s:
            return
        self._looked = now
        pid = self._reader.last_sender
        if pid in (0, known) or _native.is_our_sender(self._segment.core, source, pid):
            return
        if known and not is_running(known, start):
            return  # its requests have to end first: the coordinator forgets it then
        _native.announce_writer(source, pid, start_time(pid) or 0)

    def _warn_of_length(self) -> None:
        self._num_misfits = self._reader.num_misfits
        if time.monotonic() - self._warned >= _WARN_EVERY_S or not self._warned:
            self._warned = time.monotonic()
            _log.error(
                "a message of another length than the %d bytes of %s was refused (%d so far): the "
                "worker saves with another op than --sysv-op says",
                _native.payload_bytes(self._config.sysv_variant),
                self._config.sysv_op,
                self._num_misfits,
            )


def _generation(config: PipelineConfig) -> int:
    return int(config.sysv_generation[1:])


def queue_key(config: PipelineConfig) -> int:
    """Returns the System V key, as FastDeploy's ops of this generation derive it. Raises QueueError
    when the folder is not there."""
    return _native.queue_key(config.sysv_folder, config.sysv_queue_id, _generation(config))


@contextmanager
def prepared_queue(segment: Segment) -> Iterator[None]:
    """Makes or opens the queue before the reader starts, and removes the one that it has made.

    Raises QueueTakenError (key, ports) when another live pipeline has the key, QueueLimitError
    (needed, limits) when a message would not fit, QueueError.
    """
    config = segment.config
    key = queue_key(config)
    _refuse_a_second_reader(segment, key)
    _check_limits(config)
    if segment.is_adopted:  # its reader sees to the queue
        try:
            yield
        finally:
            _native.remove_queue(segment.source)
        return
    queue = _native.Queue(key)
    try:
        _make_room(config, queue)
        _warn_of_another_reader(queue)
        leftovers = _look_at_leftovers(config, queue)
        _native.set_queue(
            segment.source, key, queue.id, queue.is_created, leftovers, ipc_namespace()
        )
        yield
    finally:
        if not _native.remove_queue(segment.source) and queue.is_created:
            queue.remove()


def _refuse_a_second_reader(segment: Segment, key: int) -> None:
    own = Identity.own()
    for config, start, pid in live_configs():
        if config.name == segment.name or config.source != "sysv" or queue_key(config) != key:
            continue
        if (start, pid) <= (own.start, own.pid):  # of two that start at once one stays
            raise QueueTakenError(
                key, segment.config.sysv_queue_id, config.name, config.sysv_queue_id
            )


def _check_limits(config: PipelineConfig) -> None:
    needed = _native.payload_bytes(config.sysv_variant)
    found = {f"kernel.{name}": _kernel_limit(name) for name in ("msgmax", "msgmnb")}
    limits = {"kernel.msgmax": needed, "kernel.msgmnb": _MESSAGES_OF_SLACK * needed}
    if any(found[name] < limit for name, limit in limits.items()):
        raise QueueLimitError(config.sysv_op, needed, limits, found)


def _kernel_limit(name: str) -> int:
    with open(f"/proc/sys/kernel/{name}") as f:
        return int(f.read())


def _make_room(config: PipelineConfig, queue: _native.Queue) -> None:
    """A queue that was made before the kernel's limit was raised keeps its old size."""
    needed = _MESSAGES_OF_SLACK * _native.payload_bytes(config.sysv_variant)
    if queue.facts()["capacity"] < needed:
        queue.raise_to(_kernel_limit("msgmnb"))


def _warn_of_another_reader(queue: _native.Queue) -> None:
    pid = queue.facts()["last_receiver"]
    if pid and pid != Identity.own().pid and start_time(pid) is not None:
        _log.warning(
            "process %d has read from this queue and is alive: of two readers each gets a part", pid
        )


def _look_at_leftovers(config: PipelineConfig, queue: _native.Queue) -> int:
    """Throws away what an earlier run has left, or keeps it; returns how many messages went."""
    facts = queue.facts()
    if not facts["messages"]:
        return 0
    if config.sysv_leftovers == "keep":
        _log.warning(
            "%d messages of an earlier run wait in the queue and are kept", facts["messages"]
        )
        return 0
    room, dropped, lengths = _native.payload_bytes(config.sysv_variant) + 8, 0, set()
    while (length := queue.drop(room)) is not None:
        dropped += 1
        lengths.add(length)
    wrong = lengths - {_native.payload_bytes(config.sysv_variant)}
    _log.warning(
        "%d messages of an earlier run were thrown away%s",
        dropped,
        f"; some were not of {config.sysv_op}" if wrong else "",
    )
    return dropped
