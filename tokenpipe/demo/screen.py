"""The demo's live view on a terminal. Rich draws it from a thread; it reads, it decides nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tokenpipe.demo.errors import MissingExtraError
from tokenpipe.demo.jobs import Job
from tokenpipe.demo.lines import View, summary_lines
from tokenpipe.demo.status import RoleStatus, StatusPoller

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise MissingExtraError("rich", "draw the demo on a terminal") from error

if TYPE_CHECKING:
    from tokenpipe.demo.client import Client

FRAMES_PER_S = 8
BAR_WIDTH = 32
SWITCH_INTERVAL_S = 0.0005
STATE_STYLES = {"idle": "green", "running": "green", "stalled": "red", "failed": "red"}
REASON_STYLES = {"stop": "green", "length": "cyan", None: "bold"}


class Screen(View):
    """The whole terminal picture, drawn FRAMES_PER_S times a second."""

    def __init__(self, out: IO[str]) -> None:
        super().__init__(out)
        self._console = Console(file=out, highlight=False)
        self._resources = ExitStack()
        self._client: Client | None = None
        self._poller: StatusPoller | None = None
        self._ready: dict[str, Any] = {}
        self._engine_pid = 0

    def __enter__(self) -> Screen:
        # Drawing holds the interpreter for ms; the client should not wait for its turn.
        self._resources.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._resources.enter_context(
            Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=FRAMES_PER_S,
                vertical_overflow="crop",
            )
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def watch(self, client: Client, ready: dict[str, Any], engine_pid: int) -> None:
        """Starts to fetch the pipeline's state, and to draw it."""
        self._ready, self._engine_pid = ready, engine_pid
        self._poller = self._resources.enter_context(StatusPoller(ready["health_url"]))
        self._client = client

    def summary(self, facts: dict[str, Any]) -> None:
        """Prints the facts below the last picture."""
        for line in summary_lines(facts):
            self._console.print(Text(line))

    def _render(self) -> RenderableType:
        if self._client is None or self._poller is None:
            return Text("tokenpipe demo: starting the pipeline and the engine ...", style="dim")
        head = [
            self._title(self._poller),
            Text(),
            self._roles(self._poller),
            Text(),
            self._bars(self._client, self._poller),
            Text(),
        ]
        rows_left = self._console.height - len(self._poller.latest.roles) - 11
        return Group(*head, self._texts(self._client.jobs, max(rows_left, 3)))

    def _title(self, poller: StatusPoller) -> RenderableType:
        state = poller.latest.state or "starting"
        title = Table.grid(expand=True)
        title.add_column(no_wrap=True)
        title.add_column(no_wrap=True, justify="right")
        title.add_row(
            Text.assemble(
                ("tokenpipe demo", "bold"),
                ("  engine > reader > ring > decoders > client", "dim"),
            ),
            Text.assemble(
                (state, STATE_STYLES.get(state, "yellow")),
                ("  " + str(self._ready["health_url"]), "dim"),
            ),
        )
        return title

    def _roles(self, poller: StatusPoller) -> RenderableType:
        roles = {"engine": RoleStatus(pid=self._engine_pid)}
        roles["coordinator"] = RoleStatus(pid=self._ready["pid"])
        roles.update({name: RoleStatus(pid=pid) for name, pid in self._ready["pids"].items()})
        roles.update(poller.latest.roles)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("process")
        for name in ("pid", "slots done", "lag", "beat", "memory"):
            table.add_column(name, justify="right")
        table.add_column("waits for")
        for name, role in roles.items():
            age_s, size = role.heartbeat_age_s, role.resident_bytes
            beat = None if age_s is None else f"{age_s * 1000:.0f} ms"
            memory = None if size is None else f"{size / 1e6:.0f} MB"
            values = (role.pid, role.cursor, role.lag, beat, memory, role.waits_for)
            table.add_row(name, *(Text(_shown(value)) for value in values))
        return table

    def _bars(self, client: Client, poller: StatusPoller) -> RenderableType:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True, min_width=len("requests"))
        grid.add_column(width=BAR_WIDTH)
        grid.add_column(no_wrap=True)
        ring = poller.latest
        grid.add_row(
            "ring",
            ProgressBar(ring.ring_slots or 1, ring.ring_occupancy or 0, BAR_WIDTH),
            f"{_shown(ring.ring_occupancy)} of {_shown(ring.ring_slots)} slots, "
            f"most {_shown(ring.ring_high_water)}",
        )
        num_jobs, num_waiting = len(client.jobs), sum(not job.is_submitted for job in client.jobs)
        waiting = f", {num_waiting} waiting for a row" if num_waiting else ""
        grid.add_row(
            "requests",
            ProgressBar(num_jobs, client.num_finished, BAR_WIDTH),
            f"{client.num_finished} of {num_jobs} finished{waiting}",
        )
        rate = client.num_tokens / client.duration_s if client.num_tokens else 0.0
        latencies = client.latencies_ns[-1000:]  # of late; the summary has them all
        p50, p99 = np.percentile(latencies, [50, 99]) / 1000 if latencies else (0.0, 0.0)
        grid.add_row(
            "tokens",
            Text(f"{client.num_tokens}  {rate:.0f}/s", style="bold"),
            f"save to client p50 {p50:.0f} us, p99 {p99:.0f} us",
        )
        return grid

    def _texts(self, jobs: Sequence[Job], max_lines: int) -> RenderableType:
        """One line per request: those that run, then as many of the finished as there is room."""
        started = [job for job in jobs if job.is_submitted]
        # False sorts first: unfinished ones; of the finished the latest.
        started.sort(key=lambda job: (job.finish_reason is not None, -job.number))
        shown = sorted(started[:max_lines], key=lambda job: job.number)
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, ratio=1)
        table.add_column(justify="right", no_wrap=True)
        width = self._console.width - 26  # what the other two columns take at most
        for job in shown:
            reason = job.finish_reason
            table.add_row(
                job.request_id,
                _tail(job.prompt, job.stream.text, width),
                Text(
                    f"{reason or 'runs'} {len(job.token_ids):4d}", REASON_STYLES.get(reason, "red")
                ),
            )
        return table


def _tail(prompt: str, text: str, width: int) -> Text:
    """The prompt dimmed and the text after it; of a long one the end, where it grows."""
    line = Text.assemble((prompt, "dim"), text.replace("\n", " "))
    if line.cell_len > width:
        line = Text.assemble(("... ", "dim"), line[len(line) - (width - 4) :])
    return line


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
