"""GET /status of a running pipeline, reduced to what the demo shows. Absent facts are None."""

from __future__ import annotations

import json
import threading
import urllib.request
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

TIMEOUT_S = 2.0
INTERVAL_S = 0.25


@dataclass(frozen=True)
class RoleStatus:
    """One process of the pipeline."""

    pid: int | None = None
    heartbeat_age_s: float | None = None
    waits_for: str | None = None
    cursor: int | None = None  # slots done
    lag: int | None = None  # slots published and not yet done
    resident_bytes: int | None = None


@dataclass(frozen=True)
class PipelineStatus:
    """The pipeline as a whole."""

    state: str | None = None
    role: str | None = None  # the one at fault, with the reason
    reason: str | None = None
    roles: dict[str, RoleStatus] = field(default_factory=dict)
    ring_slots: int | None = None
    ring_occupancy: int | None = None
    ring_high_water: int | None = None


def parse_status(body: dict[str, Any]) -> PipelineStatus:
    """Reads a body of /status; facts that are not shown are left out."""
    known = RoleStatus.__dataclass_fields__
    roles = {
        name: RoleStatus(**{key: value for key, value in facts.items() if key in known})
        for name, facts in body.get("roles", {}).items()
    }
    ring = body.get("ring", {})
    return PipelineStatus(
        state=body.get("state"),
        role=body.get("role"),
        reason=body.get("reason"),
        roles=roles,
        ring_slots=ring.get("slots"),
        ring_occupancy=ring.get("occupancy"),
        ring_high_water=ring.get("high_water"),
    )


def fetch_status(health_url: str) -> PipelineStatus | None:
    """Returns the pipeline's state, None when nobody answers (its coordinator has ended)."""
    url = health_url.rsplit("/", 1)[0] + "/status"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return parse_status(json.load(response))
    except OSError:
        return None


class StatusPoller:
    """Keeps the latest status, fetched by a thread, so that drawing never waits for HTTP."""

    def __init__(self, health_url: str) -> None:
        self._health_url = health_url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self.latest = PipelineStatus()

    def _run(self) -> None:
        while not self._stop.is_set():
            status = fetch_status(self._health_url)
            if status is not None:
                self.latest = status
            self._stop.wait(INTERVAL_S)

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
