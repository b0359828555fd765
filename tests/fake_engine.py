"""An engine whose tokens are a function of (row, generation, position), so that values can be
checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import tokenpipe as tp

VOCABULARY = 1 << 30


def token_of(row: int, generation: int, position: int) -> int:
    """Returns the token that the fake engine samples there; never an end token of the tests (<
    100)."""
    return 100 + (row * 1_000_003 + generation * 7_919 + position * 31) % VOCABULARY


class FakeEngine:
    """Runs the admissions it is given, one token a row and step."""

    def __init__(self, writer: tp.EngineWriter, num_rows: int, width: int = 0) -> None:
        self.writer = writer
        self.num_rows = num_rows
        self.width = width
        self.generation = np.zeros(num_rows, np.int32)
        self.position = np.zeros(num_rows, np.int64)
        self.end_at: dict[int, tuple[int, int]] = {}
        """row -> (position, token): what to sample instead, to end a request by a token."""

    def run(self, admission: tp.Admission) -> None:
        """Takes a request into the batch."""
        self.generation[admission.row] = admission.generation
        self.position[admission.row] = 0

    def drop(self, row: int) -> None:
        """Takes a row out of the batch: it is padded from now on."""
        self.generation[row] = 0
        self.end_at.pop(row, None)

    def tokens(self) -> npt.NDArray[np.int64]:
        """Returns what the next step samples."""
        tokens = np.array(
            [
                token_of(row, int(self.generation[row]), int(self.position[row]))
                for row in range(self.num_rows)
            ],
            np.int64,
        )
        for row, (position, token) in self.end_at.items():
            if self.position[row] == position:
                tokens[row] = token
        return tokens

    def step(self, states: npt.NDArray[np.uint8] | None = None) -> None:
        """Composes, samples and saves one step."""
        stamp = self.writer.begin_step(self.generation)
        tokens = self.tokens()
        if self.width:
            ids = tokens[:, None] + np.arange(self.width)
            logprobs = -(tokens[:, None] % 97 + np.arange(self.width)).astype(np.float32)
            ranks = tokens % 50 + 1
            self.writer.save_output_topk(tokens, ids, logprobs, ranks, step=stamp, states=states)
        else:
            self.writer.save_output(tokens, step=stamp, states=states)
        self.position += 1

    def obey(self) -> list[tp.ControlEvent]:
        """Drops the rows that poll_control names; acknowledges aborts in a step of their own."""
        events = self.writer.poll_control()
        aborted = [
            e for e in events if e.kind == "abort" and self.generation[e.row] == e.generation
        ]
        if aborted:
            states = np.ones(self.num_rows, np.uint8)  # no token in any row
            for event in aborted:
                states[event.row] = 3
            self.step(states)
            self.position -= 1
        for event in events:
            if self.generation[event.row] == event.generation:
                self.drop(event.row)
        return events
