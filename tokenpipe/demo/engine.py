"""ENGINE process of the demo: continuous batching over the model, as a user's engine would do it.

It talks to the pipeline through tokenpipe.EngineWriter alone. Stdin brings a line of settings and
then the admitted requests, a JSON line each; stdout gets one line when it is ready. End-of-file on
stdin ends it once nothing runs. SIGTERM keeps its default action: it ends at once, also in a save.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

import tokenpipe as tp
from tokenpipe.demo.log import TokenLog, make_records
from tokenpipe.demo.model import BatchedModel, Ints, load_pretrained, sample

STATE_TOKEN, STATE_ACKNOWLEDGED = 0, 3  # of EngineWriter's save ops
# How often an engine in which nothing runs looks for aborts of rows that it has stopped itself.
IDLE_POLL_S = 0.5


@dataclass(frozen=True)
class Settings:
    """The first line on stdin."""

    name: str  # of the pipeline
    log_path: str
    seed: int
    temperature: float
    max_rows: int
    top_logprobs: int
    step_s: float  # least time of a step

    def to_line(self) -> str:
        """As JSON, newline included."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


@dataclass(frozen=True)
class Add:
    """An admitted request, as the launcher sends it."""

    request_number: int
    request_id: str
    row: int
    generation: int
    prompt_token_ids: list[int]
    max_tokens: int

    def to_line(self) -> str:
        """As JSON, newline included."""
        return json.dumps({"op": "add", **dataclasses.asdict(self)}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Add:
        """Parses a line of stdin."""
        fields = json.loads(line)
        op = fields.pop("op")
        if op != "add":
            raise ValueError(f"engine command {op!r}: only 'add' is known")
        return cls(**fields)


class Inbox:
    """Lines of stdin, read by a thread so that the model's loop never waits for them."""

    def __init__(self, lines: IO[str]) -> None:
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lines = lines
        self.is_closed = False
        # A daemon: at the end of the process it may still wait for a line.
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            self._queue.put(line)
        self._queue.put(None)

    def take(self, wait_s: float) -> list[str]:
        """Returns the lines that have come; with none, waits up to `wait_s` for the first."""
        lines: list[str] = []
        while not self.is_closed:
            try:
                line = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            except queue.Empty:
                break
            if line is None:
                self.is_closed = True
            else:
                lines.append(line)
            wait_s = 0
        return lines


class Engine:
    """The rows' book and the loop over it. Arrays are indexed by row."""

    def __init__(
        self, settings: Settings, model: BatchedModel, writer: Any, log: TokenLog, inbox: Inbox
    ) -> None:
        self._settings, self._model, self._writer = settings, model, writer
        self._log, self._inbox = log, inbox
        rows = settings.max_rows
        self._is_running = np.zeros(rows, bool)
        self._generation = np.zeros(rows, np.int64)  # of the admission in the row
        self._ended = np.zeros(rows, np.int64)  # last generation whose end we were told
        self._request = np.zeros(rows, np.int64)
        self._num_prompt_tokens = np.zeros(rows, np.int64)
        self._num_sampled = np.zeros(rows, np.int64)
        self._max_sampled = np.zeros(rows, np.int64)
        self._last_token = np.zeros(rows, np.int64)
        # Drawn at admission, so that a text depends on the seed and its request's number only,
        # not on who shared its batches.
        self._uniforms = np.zeros((rows, model.context_tokens + 1))
        self._prompts: dict[int, list[int]] = {}  # row -> prompt that waits for its prefill
        self._acknowledge: dict[int, int] = {}  # row -> generation, said in the next step

    def run(self) -> None:
        """Steps until stdin has ended and nothing runs."""
        while not (self._inbox.is_closed and not self._has_work()):
            started = time.monotonic()
            self._take_requests()
            if self._has_work():
                self._step()
            self._obey_control()
            # The pace of an engine with a larger model, when one is asked for.
            if self._has_work():
                time.sleep(max(0.0, started + self._settings.step_s - time.monotonic()))

    def _has_work(self) -> bool:
        return bool(self._acknowledge) or bool(self._is_running.any())

    def _take_requests(self) -> None:
        for line in self._inbox.take(wait_s=0 if self._has_work() else IDLE_POLL_S):
            self._admit(Add.from_line(line))

    def _admit(self, add: Add) -> None:
        row = add.row
        if add.generation <= self._ended[row]:
            return  # ended before it reached us
        prompt = add.prompt_token_ids
        # The last token is sampled from a full context and needs no place in it.
        room = self._model.context_tokens - len(prompt) + 1
        self._is_running[row] = True
        self._generation[row] = add.generation
        self._request[row] = add.request_number
        self._num_prompt_tokens[row] = len(prompt)
        self._num_sampled[row] = 0
        self._max_sampled[row] = min(add.max_tokens, room)
        seeds = [self._settings.seed, add.request_number]
        self._uniforms[row] = np.random.default_rng(seeds).random(self._uniforms.shape[1])
        self._prompts[row] = prompt
        # The row was given out anew without waiting for us.
        self._acknowledge.pop(row, None)

    def _step(self) -> None:
        """Composes one batch, runs and samples it, logs it, saves it."""
        running, acknowledged = np.flatnonzero(self._is_running), sorted(self._acknowledge)
        is_new = np.isin(running, list(self._prompts))
        rows = np.concatenate([running[is_new], running[~is_new]])
        batch = np.concatenate([rows, np.array(acknowledged, np.int64)])
        generations = self._generation[batch]
        generations[len(rows) :] = [self._acknowledge.pop(row) for row in acknowledged]
        step = self._writer.begin_step(generations, rows=batch)

        logits = self._forward(running[is_new], running[~is_new])
        positions = self._num_sampled[rows]
        settings = self._settings
        sampled = sample(
            logits, self._uniforms[rows, positions], settings.temperature, settings.top_logprobs
        )
        values = (sampled.tokens, sampled.topk_ids, sampled.logprobs, sampled.ranks)
        self._log.append(make_records(self._request[rows], positions, *values))
        states = np.full(len(batch), STATE_ACKNOWLEDGED, np.uint8)
        states[: len(rows)] = STATE_TOKEN
        padded = [_pad(value, len(acknowledged)) for value in values]
        self._writer.save_output_topk(*padded, step=step, states=states)

        self._last_token[rows] = sampled.tokens
        self._num_sampled[rows] += 1
        self._is_running[rows] = self._num_sampled[rows] < self._max_sampled[rows]

    def _forward(self, new_rows: Ints, old_rows: Ints) -> Any:
        """Logits of the next tokens, those of the new rows first."""
        parts = [np.empty((0, self._model.vocab_size), np.float32)]
        if len(new_rows):
            prompts = [self._prompts.pop(row) for row in new_rows.tolist()]
            parts.append(self._model.prefill(new_rows, prompts))
        if len(old_rows):
            positions = self._num_prompt_tokens[old_rows] + self._num_sampled[old_rows] - 1
            parts.append(self._model.decode(old_rows, self._last_token[old_rows], positions))
        return np.concatenate(parts)

    def _obey_control(self) -> None:
        for control in self._writer.poll_control():
            row, generation = control.row, control.generation
            self._ended[row] = max(generation, self._ended[row])
            if self._generation[row] > generation:
                continue  # about the row's former request
            self._is_running[row] = False
            self._prompts.pop(row, None)
            if control.kind != "finished":
                self._acknowledge[row] = generation


def _pad(values: NDArray[Any], count: int) -> NDArray[Any]:
    """Appends `count` rows of zeros: an acknowledgement carries no token."""
    return np.concatenate([values, np.zeros((count, *values.shape[1:]), values.dtype)])


def main() -> int:
    """Runs the engine until stdin and its requests have ended."""
    settings = Settings(**json.loads(sys.stdin.readline()))
    pretrained, _ = load_pretrained()
    model = BatchedModel(pretrained, settings.max_rows)
    with (
        tp.EngineWriter.attach(settings.name) as writer,
        TokenLog(settings.log_path) as log,
    ):
        ready = {"event": "ready", "pid": os.getpid(), "context_tokens": model.context_tokens}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        Engine(settings, model, writer, log, Inbox(sys.stdin)).run()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tp.TokenpipeError as error:
        sys.exit(f"demo engine: {error}")
