"""Which of FastDeploy's tasks has which life of which row, and how a life begins and ends.

FastDeploy's resource manager decides about rows; our coordinator has a book of its own, and no
generation is on FastDeploy's wire. The two are kept together like this:

  begin        `tasks_list[i] = task` submits row i and returns when the coordinator has met its own
               barrier in the worker's queue: what the worker saves for the task comes after it.
  finish       (end token, recovery stop) The decoder's final frees our row before the processor has
               read it and told the manager, so the row is free here when the manager reuses it.
  abort        The worker's -9 comes in a frame. The processor first lets the row go here
               (Pipeline.let_go: no acknowledgement is waited for, it has just come), then calls
               recycle_abort_task(), after which the manager may reuse the row.
  preemption   -9 likewise, but the manager keeps the row: so do we. Tokens go on in the same life.
  taken away   `tasks_list[i] = None` without an end of ours (a decode instance's preemption, an
               engine's own cleaning): the worker may still run the row. We abort it, and its row
               comes back when the wire shows -9 or -1 for it.
  never answered, clear_data()  The same: quarantine, until the wire shows the row empty.

The manager may reuse a row that was taken away before the wire has shown it empty. Its assignment
stands under the manager's lock, so it waits LET_GO_S from the taking away at most; then the word of
the manager counts, and what is still on its way of the former task is dropped only up to the new
one's barrier. (FastDeploy's own processor credits all of it, F27.) The assignment cannot deadlock
with the processor's thread, which may wait for the same lock: while it waits, the submitting thread
itself takes outputs off the rings, so that the barrier gets through.

FastDeploy's socket (zmq) carries no barrier: there an admission holds for what is received after
it, and what the worker had sent for a row before is the row's next task's, as with FastDeploy's
own.

On both a preempted request also ends its wait when a whole message does not name its row: on the
queue one of fewer rows. One that left the worker before it ran the task says so too; the manager
then schedules the request early, and the -9 behind it finds nobody waiting for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tokenpipe.errors import DuplicateRequestError, RowBusyError, TokenpipeError
from tokenpipe.pipeline import Pipeline
from tokenpipe.records import LogprobsLists
from tokenpipe.requests import Admission, Request

_log = logging.getLogger("tokenpipe.fastdeploy")

LET_GO_S = 0.5
_FREED_S = 5.0
"""For a row that was let go: a coordinator that is just being replaced takes a second."""


class Life:
    """One task's time in a row."""

    __slots__ = (
        *("admission", "dropped_at", "generation", "is_aborted", "is_over", "prompt_pieces", "row"),
        "task",
    )

    def __init__(self, task: Any, row: int) -> None:
        self.task = task
        self.row = row
        self.generation = 0
        """0: submit has not answered, and no frame has told."""
        self.admission: Admission | None = None
        self.dropped_at: float | None = None
        """When the manager took the row away without an end of ours."""
        self.is_aborted = False
        """The worker's -9 has ended it, and the manager knows."""
        self.prompt_pieces: list[tuple[int, LogprobsLists]] = []
        """Logprobs of prompt tokens, for the next output."""
        self.is_over = False


class TasksList(list[Any]):
    """The manager's list of tasks: an item that is assigned is admitted before it can be seen."""

    def __init__(self, tasks: Iterable[Any], assigned: Callable[[int, Any], None]) -> None:
        super().__init__(tasks)
        self._assigned = assigned
        for row, task in enumerate(self):
            if task is not None:
                assigned(row, task)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Assigns one row or a slice of them. Blocks while a task is admitted."""
        rows = range(len(self))[index]
        if isinstance(rows, int):
            self._assigned(rows, value)
        else:
            value = list(value)
            if len(value) != len(rows):
                raise ValueError(f"{len(rows)} rows cannot be given {len(value)} tasks")
            for row, task in zip(rows, value, strict=True):
                self._assigned(row, task)
        super().__setitem__(index, value)


class Rows:
    """Every life that has not ended. Assignments come from the manager's threads, one at a time per
    row; ends from the processor's thread."""

    def __init__(self, pipe: Pipeline, num_rows: int, make_room: Callable[[], None]) -> None:
        self._pipe = pipe
        self._make_room = make_room
        self._lock = threading.Lock()
        self.current: list[Life | None] = [None] * num_rows
        """The last life of each row, ended or not."""
        self._former: dict[tuple[int, int], Life] = {}
        self._coming: dict[int, Life] = {}
        self.dropped: deque[Life] = deque()
        """Taken away by the manager; to be aborted."""
        self.refused: deque[tuple[Life, TokenpipeError]] = deque()
        self.num_taken_over = 0

    def assigned(self, row: int, task: Any) -> None:
        """Notes what the manager has put into a row. Blocks while a task is admitted."""
        life = self.current[row]
        runs = life is not None and not life.is_over
        if runs and life is not None and task is not life.task and life.dropped_at is None:
            life.dropped_at = time.monotonic()
            if not life.is_aborted:
                self.dropped.append(life)
        if task is None or (runs and life is not None and task is life.task):
            return
        self._begin(Life(task, row), life if runs else None)

    def _begin(self, life: Life, former: Life | None) -> None:
        with self._lock:
            self._coming[life.row] = life
            if former is not None:
                self._former[life.row, former.generation] = former
        try:
            life.admission = self._admit(life)
            life.generation = life.admission.generation
        except TokenpipeError as error:
            self.refused.append((life, error))
        with self._lock:
            del self._coming[life.row]
            self.current[life.row] = life

    def _admit(self, life: Life) -> Admission:
        request = _request(life.task)
        last = self.current[life.row]
        try:
            return self._submit(life, request, self._patience(last))
        except RowBusyError:
            if last is None or last.admission is None:
                raise
        self.num_taken_over += 1
        _log.warning(
            "row %d is given to %r before the worker has let go of %r",
            *(life.row, request.request_id, last.task.request_id),
        )
        self._pipe.let_go(last.admission)
        return self._submit(life, request, _FREED_S)

    @staticmethod
    def _patience(last: Life | None) -> float:
        if last is None or last.dropped_at is None:
            return LET_GO_S
        return max(0.0, last.dropped_at + LET_GO_S - time.monotonic())

    def _submit(self, life: Life, request: Request, timeout_s: float) -> Admission:
        how: Any = {"row": life.row, "timeout_s": timeout_s, "while_waiting": self._make_room}
        last = self.current[life.row]
        if last is not None and last.dropped_at is not None and not last.is_over:
            self.abort(last)  # the processor's thread may not have come to it
        try:
            return self._pipe.submit(request, **how)
        except DuplicateRequestError:
            # The manager knows the id no more; here its last output has not been read yet.
            request.request_id = f"{request.request_id}#{id(life):x}"
            return self._pipe.submit(request, **how)

    def abort(self, life: Life) -> None:
        """Ends a life that the manager took away; its row comes back when the worker lets go."""
        if life.admission is not None and not life.is_over:
            self._pipe.abort(life.admission.request_id)

    def let_go(self, life: Life) -> None:
        """Ends a life that the worker has let go of."""
        if life.admission is not None:
            self._pipe.let_go(life.admission)

    def find(self, row: int, generation: int) -> Life | None:
        """Returns the life that a frame's row belongs to; None where nobody was admitted."""
        life = self.current[row]
        if life is not None and life.generation == generation:
            return life
        with self._lock:
            life = self._coming.get(row)
            if life is not None and life.generation in (0, generation):
                known = self.current[row]
                if known is None or generation > known.generation:
                    life.generation = generation  # a frame has overtaken submit's answer
                    life.admission = Admission(life.task.request_id, row, generation)
                    return life
            return self._former.get((row, generation))

    def end(self, life: Life) -> None:
        """Forgets a life whose last output is made."""
        life.is_over = True
        with self._lock:
            self._former.pop((life.row, life.generation), None)

    def running(self) -> list[Life]:
        """Returns every life that has not ended."""
        with self._lock:
            lives = [*self._former.values(), *self._coming.values()]
        return [*lives, *(n for n in self.current if n is not None and not n.is_over)]


def _request(task: Any) -> Request:
    """What the pipeline must know of a task; what outputs echo is read from the task itself."""
    tokens = getattr(task, "prompt_token_ids_len", None) or 1
    return Request(
        task.request_id,
        prompt_token_ids=range(tokens),
        eos_token_ids=sorted({int(t) for t in task.eos_token_ids or () if int(t) >= 0}),
        disaggregate_info=getattr(task, "disaggregate_info", None),
    )
