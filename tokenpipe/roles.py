"""The reader and the decoders as the coordinator sees them: which lives, which is silent, what
next.

A role's process is in one of four states:

    unborn      spawned, no heartbeat yet           -> running, or its start fails
    running     it beats                            -> silent, or exited
    silent      no beat for `stall_timeout_s`       -> killed, then exited
    exited      its death was seen                  -> spawned again after the backoff

Nobody is replaced alive: a successor is spawned only after waitpid or the pidfd has told of the
death.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from tokenpipe import _native
from tokenpipe.children import Children, Exited
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import ChildBootError, ExitCode, RoleLostError
from tokenpipe.status import View, role_names

_log = logging.getLogger("tokenpipe.roles")

_BOOT_TRIES = 3
_NOT_RETRIED = (ExitCode.BAD_CONFIG, ExitCode.NAME_TAKEN, ExitCode.NO_SPACE, ExitCode.NOT_FOUND)
_MAX_BACKOFF_S = 2.0


class _Life:
    """What is known of one role."""

    def __init__(self, index: int, role: str) -> None:
        self.index, self.role = index, role
        self.pid = 0
        self.spawn_at: float | None = None
        """When to start the next life; None while one runs."""
        self.spawned_at = 0.0
        self.has_beaten = False
        self.restarts: deque[float] = deque()
        self.failed_boots = 0
        self.last_beat = 0
        self.still_ticks = 0
        self.why = ""


class Roles:
    """Spawns, watches and replaces the roles; one look() per tick."""

    def __init__(
        self, children: Children, book: _native.Book, view: View, config: PipelineConfig
    ) -> None:
        self._children, self._book, self._view, self._config = children, book, view, config
        names = role_names(config.num_decoders)
        self._lives = [_Life(i, role) for i, role in enumerate(names) if i]
        interval = config.heartbeat_interval_s
        self._tick_s = interval
        self._next_tick = 0.0
        # Ticks without a change, not seconds: a pause of the whole machine is one tick.
        self._silent_ticks = (
            round(config.stall_timeout_s / interval) if config.stall_timeout_s else 0
        )

    @property
    def num_lives(self) -> int:
        """How many roles there are."""
        return len(self._lives)

    def start(self) -> None:
        """Spawns every role that no predecessor has left running."""
        for life in self._lives:
            record = self._view.roles[life.index]
            pid = int(record["pid"])
            if pid and self._children.adopt(life.role, pid, int(record["start_time"])):
                life.pid, life.has_beaten = pid, True
                _log.info("%s (pid %d) goes on", life.role, pid)
            else:
                self._spawn(life)

    @property
    def are_up(self) -> bool:
        """Whether every role has given a heartbeat in its present life."""
        return all(life.spawn_at is None and self._beats(life) for life in self._lives)

    def missing(self) -> tuple[str, str] | None:
        """Returns (role, why) of the first role that is being replaced."""
        for life in self._lives:
            if life.why and (life.spawn_at is not None or not life.has_beaten):
                return life.role, life.why
        return None

    def look(self) -> None:
        """Reaps, kills the silent, spawns. Raises RoleLostError when the budget is spent,
        ChildBootError when a role does not come up."""
        for exited in self._children.reap():
            self._note_exit(exited)
        now = time.monotonic()
        for life in self._lives:
            if life.spawn_at is not None:
                if now >= life.spawn_at:
                    self._spawn(life)
            elif not life.has_beaten:
                self._look_at_newborn(life, now)
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            self._kill_silent()

    def _spawn(self, life: _Life) -> None:
        self._book.expect_role(life.index)
        life.spawn_at, life.has_beaten, life.still_ticks = None, False, 0
        life.spawned_at = time.monotonic()
        epoch = int(self._view.roles[life.index]["epoch"])
        life.pid = self._children.spawn(life.role, epoch).pid

    def _beats(self, life: _Life) -> bool:
        return int(self._view.roles[life.index]["heartbeat_ns"]) != 0

    def _look_at_newborn(self, life: _Life, now: float) -> None:
        if self._beats(life):
            life.has_beaten = True
            life.failed_boots = 0
            if life.why:
                _log.info("%s is back as pid %d", life.role, life.pid)
                life.why = ""
        elif now - life.spawned_at >= self._config.start_timeout_s:
            limit = self._config.start_timeout_s
            raise ChildBootError(life.role, life.pid, f"silent for {limit:g} s")

    def _note_exit(self, exited: Exited) -> None:
        life = next(one for one in self._lives if one.role == exited.role)
        now = time.monotonic()
        if not life.has_beaten and not self._beats(life):
            life.failed_boots += 1
            is_first_life = not life.restarts
            is_final = exited.code in _NOT_RETRIED or life.failed_boots >= _BOOT_TRIES
            if is_first_life or is_final:
                raise ChildBootError(exited.role, exited.pid, exited.how)
        life.why = f"{exited.role} (pid {exited.pid}) {exited.how}"
        window_s = self._config.restart_window_s
        while life.restarts and now - life.restarts[0] > window_s:
            life.restarts.popleft()
        if len(life.restarts) >= self._config.max_restarts:
            spent = (
                f"{exited.how}; {len(life.restarts)} restarts within {window_s:g} s are all that "
                "--max-restarts allows"
                if life.restarts
                else exited.how
            )
            raise RoleLostError(exited.role, exited.pid, spent)
        # The first replacement is at once; one that dies again and again is given time.
        soon = self._config.restart_backoff_s * (2 ** len(life.restarts) - 1)
        life.restarts.append(now)
        life.spawn_at = now + min(soon, _MAX_BACKOFF_S)
        life.has_beaten = False
        _log.error("%s: replaced in %.2f s", life.why, life.spawn_at - now)

    def _kill_silent(self) -> None:
        for life in self._lives:
            if life.spawn_at is not None or not life.has_beaten:
                continue
            beat = int(self._view.roles[life.index]["heartbeat_ns"])
            life.still_ticks = life.still_ticks + 1 if beat == life.last_beat else 0
            life.last_beat = beat
            if self._silent_ticks and life.still_ticks > self._silent_ticks:
                life.still_ticks = 0
                _log.error("%s (pid %d) is silent: killed", life.role, life.pid)
                self._children.kill(life.role)

    @property
    def pids(self) -> dict[str, int]:
        """Pid of each role's present life."""
        return {life.role: life.pid for life in self._lives}
