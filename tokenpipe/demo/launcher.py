"""The demo's launcher: starts `tokenpipe serve` and the engine, is the client, ends all in order.

It does what an engine's launcher does, and then holds what it got against the engine's log.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import tokenpipe as tp
from tokenpipe.demo.children import Child, RoleWatch
from tokenpipe.demo.client import Client
from tokenpipe.demo.engine import Settings
from tokenpipe.demo.errors import ChildExitedError
from tokenpipe.demo.jobs import make_jobs
from tokenpipe.demo.lines import JsonLines, PlainLines, View, summarise
from tokenpipe.demo.log import compare, read_log
from tokenpipe.demo.model import load_pretrained
from tokenpipe.demo.options import DemoOptions
from tokenpipe.demo.status import fetch_status
from tokenpipe.demo.text import eos_token_ids

READY_TIMEOUT_S = 30.0
ENGINE_GRACE_S = 10.0
SERVE_GRACE_S = 30.0  # it drains first
WATCHED_STEP_MS = 25.0  # a step of an engine with a model worth serving
# numpy's BLAS would start a thread per core, which take the pipeline's cores; the demo's matrices
# are too small to gain by them.
ENGINE_COMMAND = (
    *("env", "OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1"),
    *(sys.executable, "-m", "tokenpipe.demo.engine"),
)
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def run(options: DemoOptions, serve_args: list[str]) -> int:
    """Runs the demo to its end; returns the exit code.

    It is 0 only when every request has finished, every process has ended well, and each token
    that the engine logged was delivered once, in order, with its values. `serve_args` are options
    of `tokenpipe serve`. Call it from the main thread: it handles SIGTERM like Ctrl-C. Raises
    TokenpipeError when the run cannot begin.
    """
    try:
        with _signals_interrupt():
            return _Run(options, serve_args).run()
    except KeyboardInterrupt:
        _complain("interrupted; every process has ended")
        return EXIT_INTERRUPTED


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    # SIGINT too: a shell starts its background jobs with it ignored.
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _complain(text: str) -> None:
    sys.stderr.write(f"tokenpipe demo: {text}\n")
    sys.stderr.flush()


class _Run:
    """One run of the demo: what its steps share."""

    def __init__(self, options: DemoOptions, serve_args: list[str]) -> None:
        self._options, self._serve_args = options, serve_args
        self._is_watched = sys.stdout.isatty() and not options.json
        self._view = _make_view(options, self._is_watched)
        _, self._tokenizer = load_pretrained()
        self._eos_token_ids = eos_token_ids(self._tokenizer)
        self._failures: list[str] = []
        self._lost_roles: dict[str, int] = {}  # role -> pid; why they ended is not known yet
        self._health_url = ""

    def run(self) -> int:
        # Both files have no name, so that nothing of a run is left, whoever is killed.
        with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as children_stderr:
            is_well = False
            try:
                with self._view:
                    client = self._run_processes(log, children_stderr)
                is_well = not self._failures
            finally:
                if self._is_watched and not is_well:
                    _show(children_stderr)  # it would have torn the screen
            return self._judge(client, log)

    def _run_processes(self, log: IO[bytes], children_stderr: IO[bytes]) -> Client:
        stderr = children_stderr if self._is_watched else None
        # Its stdin is the pipe that tells it of our end, whatever that is.
        command = [sys.executable, "-m", "tokenpipe", "serve", "--owner-fd", "0"]
        command += self._serve_args
        with Child(
            "coordinator", command, stderr=stderr, grace_s=SERVE_GRACE_S, ends_at_eof=True
        ) as serve:
            ready = serve.wait_ready(READY_TIMEOUT_S)
            self._health_url = ready["health_url"]
            with Child(
                "engine",
                ENGINE_COMMAND,
                stderr=stderr,
                pass_fds=[log.fileno()],
                grace_s=ENGINE_GRACE_S,
            ) as engine:
                with tp.Pipeline.attach(ready["name"]) as pipe:
                    engine.send(self._engine_settings(pipe, ready["name"], log).to_line())
                    context_tokens = engine.wait_ready(READY_TIMEOUT_S)["context_tokens"]
                    jobs = make_jobs(self._options, self._tokenizer, context_tokens)
                    client = Client(pipe, jobs, self._eos_token_ids, engine.send, self._view)
                    self._view.watch(client, ready, engine.pid)
                    self._run_client(client, ready["pids"], serve, engine)
                self._end(engine, engine.finish)
            # After a failure there is nothing to drain: at end-of-file it does not wait for it.
            self._end(serve, serve.finish if self._failures else serve.terminate)
        return client

    def _run_client(
        self, client: Client, pids: dict[str, int], serve: Child, engine: Child
    ) -> None:
        children = {child.pid: child for child in (serve, engine)}
        with RoleWatch({child.role: pid for pid, child in children.items()} | pids) as roles:
            try:
                client.run(lambda: self._is_broken(roles, children))
            except tp.TokenpipeError as error:
                # Not the end: what was delivered is compared and shown all the same.
                self._is_broken(roles, children)
                if str(error) not in self._failures:
                    self._failures.append(str(error))
            self._is_broken(roles, children)

    def _engine_settings(self, pipe: Any, name: str, log: IO[bytes]) -> Settings:
        options = self._options
        step_ms = options.step_ms
        if step_ms is None:
            step_ms = WATCHED_STEP_MS if self._is_watched else 0.0
        return Settings(
            name=name,
            log_path=f"/dev/fd/{log.fileno()}",
            seed=options.seed,
            temperature=options.temperature,
            max_rows=pipe.config.max_num_seqs,
            top_logprobs=pipe.config.top_logprobs,
            step_s=step_ms / 1000,
        )

    def _is_broken(self, roles: RoleWatch, children: dict[int, Child]) -> bool:
        """Notes the processes that have ended; True when the run cannot go on without them.

        The pipeline may replace a role of its own; its coordinator ends when it does not.
        """
        for role, pid in roles.exited():
            child = children.pop(pid, None)
            if child is not None:
                self._note_exit(child)
            else:
                self._lost_roles[role] = pid
        if self._lost_roles:
            self._ask_why()
        return len(children) < 2

    def _ask_why(self) -> None:
        """Only a role's parent knows how it ended; the coordinator says so while it still runs."""
        status = fetch_status(self._health_url)
        if status is not None and status.role in self._lost_roles and status.state == "failed":
            del self._lost_roles[status.role]
            self._failures.append(str(status.reason))

    def _note_exit(self, child: Child) -> None:
        """Notes, once, that a child has ended before its time."""
        failure = str(ChildExitedError(child.role, child.pid, child.finish()))
        if failure not in self._failures:
            self._failures.append(failure)

    def _end(self, child: Child, end: Callable[[], int]) -> None:
        if child.process.poll() is not None:
            self._note_exit(child)
            return
        code = end()
        if code != 0:
            self._failures.append(f"{child.role} (pid {child.pid}) ended with code {code}")

    def _judge(self, client: Client, log: IO[bytes]) -> int:
        log.seek(0)
        limits = {job.number: job.max_tokens for job in client.jobs}
        logged = read_log(log.read())
        comparison = compare(logged, client.records(), limits, self._eos_token_ids)
        if not self._failures:
            # With a failure they are its consequence: a coordinator that fails ends its roles.
            lost = self._lost_roles.items()
            self._failures += [f"{role} (pid {pid}) exited, nobody knows how" for role, pid in lost]
        self._view.summary(summarise(client, comparison, self._failures))
        for failure in self._failures:
            _complain(failure)
        is_complete = all(job.is_complete for job in client.jobs)
        if is_complete and comparison.is_clean and not self._failures:
            return 0
        return EXIT_FAILED


def _show(children_stderr: IO[bytes]) -> None:
    children_stderr.seek(0)
    sys.stderr.write(children_stderr.read().decode("utf-8", "replace"))
    sys.stderr.flush()


def _make_view(options: DemoOptions, is_watched: bool) -> View:
    if options.json:
        return JsonLines(sys.stdout)
    if not is_watched:
        return PlainLines(sys.stdout)
    from tokenpipe.demo.screen import Screen  # rich is needed on a terminal only

    return Screen(sys.stdout)
