"""The owner's hold on its coordinator: spawn it, replace it when it is killed, stop it."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from tokenpipe import forks
from tokenpipe.children import how_it_ended
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import PipelineStartError, TokenpipeError, from_json
from tokenpipe.segment import leftovers

_log = logging.getLogger("tokenpipe.keeper")

_TRIES = 3
"""So often the successor of a coordinator that was killed is started, as a role's is."""


class Keeper:
    """Runs `tokenpipe serve` as a child that ends with us, and again when it is killed.

    The end of the pipe that only we hold tells the coordinator that we are gone. A coordinator that
    ends by itself has said why: it is not replaced. One that was killed is: its successor adopts
    the roles, which outlive it by `orphan_grace_s`.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._epoch = 0
        self._starts: deque[float] = deque()
        self._lock = threading.Lock()
        self._is_stopping = False
        self.is_replacing = False
        """A coordinator was killed and its successor is not ready yet."""
        self._process, self._owner_fd, ready = self._spawn()
        self.health_url = str(ready["health_url"])
        self._thread = threading.Thread(target=self._watch, name="tokenpipe-keeper", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            code = self._process.wait()
            with self._lock:
                if self._is_stopping or self._ended_by_itself(code) or not self._may_restart():
                    self.is_replacing = False
                    return
                self.is_replacing = True
                forks.close(self._owner_fd)
            _log.error("the coordinator (pid %d) %s", self._process.pid, how_it_ended(code))
            successor = self._replaced()
            with self._lock:
                self.is_replacing = False
                if successor is None:
                    self._owner_fd = -1
                    return
                self._process, self._owner_fd = successor

    def _replaced(self) -> tuple[subprocess.Popen[bytes], int] | None:
        for left in reversed(range(_TRIES)):
            try:
                process, owner_fd, _ready = self._spawn()
            except PipelineStartError:  # it has ended before it could say why: killed, too
                _log.exception("the coordinator could not be replaced; tries left: %d", left)
            except (TokenpipeError, OSError):
                _log.exception("the coordinator could not be replaced")
                break
            else:
                return process, owner_fd
        return None

    @property
    def has_given_up(self) -> bool:
        """Whether no coordinator will follow one that has ended."""
        return not self._thread.is_alive()

    def _ended_by_itself(self, code: int) -> bool:
        if code:
            return code > 0
        # A program that ignores SIGCHLD, or waits for every child, takes the code away from us, and
        # it reads as 0. But who ends in order removes its segments first.
        return not any(leftovers(self._config.name))

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._starts and now - self._starts[0] > self._config.restart_window_s:
            self._starts.popleft()
        self._starts.append(now)
        return len(self._starts) <= self._config.max_restarts

    def stop(self, grace_s: float) -> bool:
        """Ends the coordinator and waits for it; returns whether it had to be killed or was."""
        deadline = time.monotonic() + grace_s
        while True:
            with self._lock:
                if not self.is_replacing:
                    self._is_stopping = True
                    owner_fd, self._owner_fd = self._owner_fd, -1
                    break
            time.sleep(0.005)
        if owner_fd >= 0:
            forks.close(owner_fd)  # its end-of-file is the coordinator's word to stop
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()
        return not self._ended_by_itself(self._process.wait())

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int, Mapping[str, Any]]:
        """Starts `tokenpipe serve`, waits for its ready line, raises the error that it tells of."""
        self._epoch += 1
        with forks.guard:  # a copy of these ends would hide that the other side is gone
            ready_read, ready_write = os.pipe()
            owner_read, owner_write = os.pipe()
            forks.mark(ready_write)
            forks.mark(owner_write)
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokenpipe", "serve", *self._config.to_cli_args()),
                    *(f"--name={self._config.name}", f"--ready-fd={ready_write}"),
                    *(f"--owner-fd={owner_read}", f"--epoch={self._epoch}"),
                ],
                pass_fds=(ready_write, owner_read),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the owner's to handle: it closes the pipeline
            )
        except BaseException:
            os.close(ready_read)
            forks.close(owner_write)
            raise
        finally:
            forks.close(ready_write)
            os.close(owner_read)
        try:
            return process, owner_write, _read_ready(process, ready_read, self._patience_s)
        except BaseException:
            forks.close(owner_write)
            if process.poll() is None:
                process.kill()
            process.wait()
            raise
        finally:
            os.close(ready_read)

    @property
    def _patience_s(self) -> float:
        return self._config.start_timeout_s + 10.0


def _read_ready(process: subprocess.Popen[bytes], fd: int, timeout_s: float) -> Mapping[str, Any]:
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise PipelineStartError(f"start: no ready line within {timeout_s:g} s", 1)
        piece = os.read(fd, 65536)
        if not piece:
            code = process.wait()
            raise PipelineStartError(f"start: the coordinator {how_it_ended(code)}", code)
        line += piece
    told: Mapping[str, Any] = json.loads(line)
    if told["event"] != "ready":
        process.wait()
        raise from_json(line.decode())
    return told
