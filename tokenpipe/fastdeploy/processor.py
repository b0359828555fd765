"""TokenProcessor: FastDeploy's token processor, with the work done in processes of their own.

One thread of the engine's process reads whole steps from the pipeline, in row order, and does what
only that process can: it tells the resource manager, stamps the tasks, makes FastDeploy's outputs
and hands them to the scheduler. The side effects, and their order at a request's end, are those of
FastDeploy's own processor; where it was wrong, the README's table of differences says what is
right.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from tokenpipe.commands import ACKNOWLEDGED, SILENT, FinishReason
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import PipelineGoneError, TokenpipeError
from tokenpipe.fastdeploy.conversion import Columns, Converter
from tokenpipe.fastdeploy.figures import Figures
from tokenpipe.fastdeploy.going_on import GoingOn
from tokenpipe.fastdeploy.handover import CacheHandover
from tokenpipe.fastdeploy.host import Host
from tokenpipe.fastdeploy.manager import Manager
from tokenpipe.fastdeploy.rows import Life, Rows, TasksList
from tokenpipe.fastdeploy.settings import config_of
from tokenpipe.fastdeploy.telling import Telling
from tokenpipe.objects import GAP_TEXT
from tokenpipe.outputs import TARGET, OutputBatch
from tokenpipe.pipeline import Pipeline

_log = logging.getLogger("tokenpipe.fastdeploy")

_WAIT_S = 0.1
_WARN_EVERY_S = 30.0
_STOP_S = 10.0
_CLEAR_S = 5.0
_PUT_ATTEMPTS = 8
_PUT_PAUSE_S = 0.01
"""Before the second attempt; it doubles with each further one."""
_HANG_S = 120.0
_OF_MARKS = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.SHUTDOWN)
_NOBODY: frozenset[str] = frozenset()


class _Step:
    """What is told of a step as a whole."""

    __slots__ = (
        *("counts", "decode_tokens", "gap_counts", "gaps", "now", "num_tokens", "shielded"),
        "stop_flags",
    )

    def __init__(self, stop_flags: Any, shielded: frozenset[str]) -> None:
        self.now = time.time()
        self.stop_flags = stop_flags
        """The manager's own, as they change: a row whose flag is set is free."""
        self.shielded = shielded
        self.gaps: list[float] = []
        self.gap_counts: list[int] = []
        self.counts: list[int] = []
        self.num_tokens = 0
        self.decode_tokens = 0


class TokenProcessor:
    """FastDeploy's token processor: its constructor, its methods, its attributes.

    The constructor starts the pipeline and blocks until it is ready. It raises ConfigError,
    QueueLimitError (the kernel's limits, with the numbers to set), QueueTakenError,
    SegmentSpaceError and what else a pipeline's start can; each is logged first.
    """

    def __init__(
        self,
        cfg: Any,
        cached_generated_tokens: Any,
        engine_worker_queue: Any,
        split_connector: Any,
    ) -> None:
        self.cfg = cfg
        self.cached_generated_tokens = cached_generated_tokens
        self.engine_worker_queue = engine_worker_queue
        self.split_connector = split_connector
        self.resource_manager: Any = None
        self.scheduler_metrics_logger: Any = None
        self.tokens_counter: Counter[str] = Counter()
        """Tokens of each running request; a write from outside is where it starts."""
        self.tasks_queue: Any = None
        self.worker: threading.Thread | None = None
        self.num_unadmitted_rows = 0
        """Rows with an output that no admission explains."""
        self.num_dropped_rows = 0
        """Rows of requests that the manager did not want any more."""
        self._host = host = Host()
        self._role = cfg.scheduler_config.splitwise_role
        method = cfg.speculative_config.method
        self._is_speculative = method is not None
        self._num_drafts = int(cfg.speculative_config.num_speculative_tokens or 0)
        self._converter = Converter(host)
        self._going_on = GoingOn(host, self._role == "decode")
        self._figures = Figures(host, method, self._num_drafts)
        self._telling = Telling(host)
        self._pipe = self._start()
        self._uses_zmq = self._pipe.config.source == "zmq"
        self._message_ns = 0
        self._message_rows: set[int] = set()
        """Rows that the message in hand names, from a socket."""
        rows = self._pipe.config.max_num_seqs
        self._rows = Rows(self._pipe, rows, self._make_room)
        self._take_lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._backlog: deque[OutputBatch] = deque()
        self._busy_since: float | None = None
        self._is_gone = False
        self._looked = time.monotonic()
        self._num_unadmitted_tokens = 0
        self._handover: CacheHandover | None = None
        self._stopping = threading.Event()
        self._threads: list[Any] = []
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._stopping, self._threads, self._pipe
        )

    def _start(self) -> Pipeline:
        host = self._host
        try:
            use_zmq = bool(host.env("FD_USE_GET_SAVE_OUTPUT_V1", False))
            pipe = Pipeline(config_of(self.cfg, use_zmq=use_zmq))
        except TokenpipeError as error:
            host.say(logging.ERROR, "the token processor cannot start: %s", error)
            raise
        config = pipe.config
        host.say(
            logging.WARNING,
            "the token processor is pipeline %s: %s, %d rows, health at %s",
            *(config.name, _source(config), config.max_num_seqs, pipe.health_url),
        )
        if host.missing:
            host.say(logging.WARNING, "not found in FastDeploy: %s", "; ".join(host.missing))
        return pipe

    # -------------------------------------------------------------- what FastDeploy calls

    def set_resource_manager(self, resource_manager: Any) -> None:
        """Takes the manager, once, and sees from now on which task it gives which row."""
        assert self.resource_manager is None, "the resource manager is set already"
        cache = self.cfg.cache_config
        can_cache = cache.enable_prefix_caching and getattr(cache, "enable_output_caching", False)
        self._manager = Manager(resource_manager, self._host, bool(can_cache))
        self._tasks = TasksList(resource_manager.tasks_list, self._rows.assigned)
        resource_manager.tasks_list = self._tasks
        self.resource_manager = resource_manager

    def set_scheduler_metrics_logger(self, scheduler_metrics_logger: Any) -> None:
        """Takes the logger that hears how many tokens each step decodes."""
        self.scheduler_metrics_logger = scheduler_metrics_logger

    def run(self) -> None:
        """Starts the thread that delivers outputs. Raises RuntimeError when it runs already."""
        assert self.resource_manager is not None, "the resource manager is not set"
        if self.worker is not None:
            raise RuntimeError("the token processor runs already")
        if self._role == "prefill":
            self._handover = CacheHandover(
                self.engine_worker_queue,
                self.split_connector,
                self._pipe.config.prefill_timeout_s,
                lambda request_id: any(
                    life.task.request_id == request_id for life in self._rows.running()
                ),
                self._handed_over,
            )
            self._threads.append(self._handover)
        self.worker = threading.Thread(target=self._run, name="tokenpipe-outputs", daemon=True)
        self._threads.append(self.worker)
        self.worker.start()

    def healthy(self) -> bool:
        """Whether outputs can get through: the thread lives and does not hang, the pipeline has not
        failed, and nothing of ours stands still. A silent engine is not the processor's illness."""
        if self._is_gone or self._stopping.is_set():
            return False
        if not all(thread.is_alive() for thread in self._threads):
            return False
        limit_s = float(self._host.env("FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT", _HANG_S))
        since = self._busy_since
        if since is not None and time.monotonic() - since > limit_s:
            return False
        health = self._pipe.health()
        if health["state"] == "stalled":
            return bool(health["role"] == "engine")
        return health["state"] not in ("failed", "stopped")

    def clear_data(self) -> None:
        """Ends every request with an error output and gives its row back. Blocks until the outputs
        are delivered, for 5 s at most."""
        if self._host.is_v1:
            self.resource_manager.clear_data()
        self._pipe.clear()
        if self._handover is not None:
            self._handover.give_up()
        deadline = time.monotonic() + _CLEAR_S
        while self._rows.running() and time.monotonic() < deadline:
            if self.worker is None:
                self._turn(0.0)
            else:
                self._stopping.wait(0.005)
        for life in self._rows.running():
            _log.error("clear_data(): request %r has not ended", life.task.request_id)
        self._host.say(logging.WARNING, "all requests were cleared")

    def stop(self) -> None:
        """Ends running requests, the thread and the pipeline. Blocks until all have ended."""
        self._finalizer()

    @property
    def num_unadmitted_tokens(self) -> int:
        """Tokens that came for a row which no task has."""
        return int(self._pipe.status()["counters"]["dropped_unadmitted"])

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        self._telling.thread_begins()
        try:
            while not (self._stopping.is_set() and self._is_gone):
                self._turn(_WAIT_S)
        except BaseException:  # of a SystemExit nobody else would hear either
            self._host.say(logging.ERROR, "the token processor's thread has died")
            _log.exception("no output is delivered any more")

    def _turn(self, wait_s: float) -> None:
        taken = None
        if self._is_gone:
            self._stopping.wait(wait_s)  # what is still submitted gets its error
        else:
            taken = self._take(wait_s)
        if taken is not None:
            self._handle(taken)
            self._busy_since = None
        self._attend()

    def _take(self, wait_s: float) -> OutputBatch | None:
        with self._take_lock:
            if self._backlog:
                self._busy_since = time.monotonic()
                return self._backlog.popleft()
            try:
                batches = self._pipe.batches(wait_s, by_step=True)
                batch = next(batches, None)
            except PipelineGoneError as error:
                self._is_gone = True
                if not self._stopping.is_set():
                    self._host.say(logging.ERROR, "no output is delivered any more: %s", error)
                return None
            if batch is not None:
                self._busy_since = time.monotonic()
                batch.release()
            return batch

    def _make_room(self) -> None:
        """Takes outputs off the rings in the thread of a submit that waits: it may hold the lock
        for which our own thread waits, and its barrier does not get through full rings. For the
        same reason a step goes back to the rings when it is taken: its columns are its own."""
        if not self._take_lock.acquire(blocking=False):
            return  # our thread is reading
        try:
            self._backlog.extend(self._pipe.batches(0.0, by_step=True))
        except PipelineGoneError:
            return  # our thread hears of it too
        finally:
            self._take_lock.release()

    def _attend(self) -> None:
        """Does what other threads have left to this one."""
        while self._rows.dropped:
            life = self._rows.dropped.popleft()
            try:
                self._rows.abort(life)
            except PipelineGoneError:
                self._rows.end(life)
        while self._rows.refused:
            life, error = self._rows.refused.popleft()
            self._host.say(logging.ERROR, "request %r: %s", life.task.request_id, error)
            result = self._ended(life, FinishReason.ERROR)
            if result is not None:
                result.error_msg = str(error)
                self._deliver([result])
        now = time.monotonic()
        if now - self._looked >= _WARN_EVERY_S and not self._is_gone:
            self._looked = now
            self._look_for_the_unadmitted()

    def _look_for_the_unadmitted(self) -> None:
        if self.resource_manager.tasks_list is not self._tasks:
            text = "the manager has another tasks_list: its tasks cannot be admitted"
            self._host.say(logging.ERROR, text)
        count = self.num_unadmitted_tokens + self.num_unadmitted_rows
        if count > self._num_unadmitted_tokens:
            self._num_unadmitted_tokens = count
            text = "%d tokens came for rows that no task has; they are dropped"
            self._host.say(logging.WARNING, text, count)

    # -------------------------------------------------------------- a step

    def _handle(self, batch: OutputBatch) -> None:
        columns = Columns(batch)
        if batch.kind == "prompt":
            self._keep_prompt_logprobs(columns)
            return
        if self._host.is_v1 and batch.has_slot:
            self._look_for_the_absent(columns)
        is_shielding = self._role == "decode" and self._host.is_v1
        shielded = self._manager.shielded() if is_shielding else _NOBODY
        step = _Step(self.resource_manager.stop_flags, shielded)
        results: list[Any] = [None] * batch.num_rows
        left: Iterable[int] = range(batch.num_rows)
        if self._going_on.can_make(columns, self.resource_manager, self.tokens_counter):
            results, left = self._make_those_that_go_on(columns, step)
        for i in left:
            life = self._life(columns, i)
            if life is None:
                self.num_unadmitted_rows += 1
                continue
            if life.is_over:  # it had trouble of its own
                continue
            try:
                results[i] = self._row(columns, i, life, step)
            except Exception:
                # One row's trouble must not cost another row's tokens (fault F15).
                _log.exception("row %d, request %r", life.row, life.task.request_id)
                results[i] = self._broken(life)
        results = [result for result in results if result is not None]
        self._tell_step(step)
        if results or (batch.has_slot and any(r != SILENT for r in columns.reasons)):
            self._deliver(results)

    def _keep_prompt_logprobs(self, columns: Columns) -> None:
        begins = columns.batch.send_idx.tolist()
        for i, row in enumerate(columns.rows):
            life = self._rows.find(row, columns.generations[i])
            if life is not None:
                life.prompt_pieces.append((begins[i], columns.candidates(i)))

    def _life(self, columns: Columns, i: int) -> Life | None:
        row, generation = columns.rows[i], columns.generations[i]
        life: Life | None = self._rows.current[row]
        if life is None or life.generation != generation:
            life = self._rows.find(row, generation)
        return life

    def _make_those_that_go_on(self, columns: Columns, step: _Step) -> tuple[list[Any], list[int]]:
        """Returns an output or None for each row, and which rows have more to them."""
        results, left, broken, gaps, gap_counts, counts, num_tokens, decode_tokens = (
            self._going_on.make(
                columns,
                self._rows.current,
                self.resource_manager,
                step.shielded,
                self.tokens_counter,
                step.now,
                self.scheduler_metrics_logger is not None,
            )
        )
        step.gaps, step.gap_counts, step.counts = gaps, gap_counts, counts
        step.num_tokens, step.decode_tokens = num_tokens, decode_tokens
        for i, error in broken:
            life = self._life(columns, i)
            if life is not None:
                _log.error("row %d, request %r: %r", life.row, life.task.request_id, error)
                results[i] = self._broken(life)
        return results, left

    def _look_for_the_absent(self, columns: Columns) -> None:
        """Once all of a message is here, and before its (last) rows: a preempted row that it does
        not name has no more tokens."""
        batch = columns.batch
        if self._uses_zmq:
            if batch.saved_ns != self._message_ns:
                self._message_ns = batch.saved_ns
                self._message_rows.clear()
            self._message_rows.update(columns.rows)
        if not batch.is_message_end:
            return
        named = self._message_rows if self._uses_zmq else range(batch.step_rows)
        for request_id in self._manager.reschedule_absent(named):
            self._tell_of_preemption(request_id)

    def _tell_step(self, step: _Step) -> None:
        self._figures.step(step.gaps, step.gap_counts, step.num_tokens)
        if self._is_speculative:
            self._figures.accepted(step.counts)
        if step.decode_tokens:
            self.scheduler_metrics_logger.on_decode_tokens(step.decode_tokens)

    def _row(self, columns: Columns, i: int, life: Life, step: _Step) -> Any:
        """Returns the output of one row, None where it has none."""
        task, reason = life.task, columns.reasons[i]
        if reason == SILENT:
            return None
        if reason in _OF_MARKS:
            made = self._ended(life, FinishReason(reason))
            if made is not None and reason == FinishReason.ERROR and columns.batch.is_gap:
                made.error_msg = GAP_TEXT
            return made
        is_shielded = task.request_id in step.shielded and reason != ACKNOWLEDGED
        if is_shielded or step.stop_flags[life.row]:
            self.num_dropped_rows += 1
            if reason in (FinishReason.NONE, ACKNOWLEDGED):
                return None
            return self._end_unwanted(life, step)
        if reason == ACKNOWLEDGED:
            self._acknowledge(life)
            return None
        if getattr(task, "prefill_chunk_info", None) and self._is_chunk(life, reason):
            return None
        if columns.is_pooling:
            return self._pool(life, columns.vectors[i], step)
        begin, end = columns.offsets[i], columns.offsets[i + 1]
        before = self.tokens_counter.get(task.request_id, 0)
        self._stamp(task, before, end - begin, step)
        token_ids = columns.tokens[begin:end]
        task.output_token_ids.extend(token_ids)
        if (
            reason == FinishReason.STOP
            and self._host.env("FD_ENABLE_INTERNAL_ADAPTER", 0)
            and token_ids[-1] in task.eos_token_ids
        ):
            del token_ids[-1]  # and its candidates with it (fault F24)
            end -= 1
        converter = self._converter
        made = converter.output(
            *(task, life.row, before, token_ids, converter.copy_metrics(task.metrics)),
            columns.batch.message_flag,
        )
        if columns.width or columns.batch.drafts is not None:
            converter.add_candidates(made, columns, i, begin, end)
        if columns.has_drafts:
            converter.add_drafts(made, columns, i)
        if life.prompt_pieces:
            pieces, life.prompt_pieces = life.prompt_pieces, []
            converter.add_prompt_logprobs(made, pieces)
        if reason != FinishReason.NONE:
            return self._finish(columns, i, life, made, step)
        return made

    def _stamp(self, task: Any, before: int, count: int, step: _Step) -> None:
        """Notes that `count` tokens have come behind `before`. A recovery stop is no token."""
        stamps = task.metrics
        if before == 0 and count:
            self._begin(task, step)
        else:
            stamps.record_recv_token()
            if before == 1 and count and self._role == "decode":
                stamps.record_decode_recv_second_token()
        if not count:
            return
        last = getattr(task, "last_token_time", None)
        if last is not None:
            step.gaps.append((step.now - last) / count)  # a step's gap is shared (fault F40)
            step.gap_counts.append(count)
        task.last_token_time = step.now
        step.num_tokens += count
        step.counts.append(count)
        self.tokens_counter[task.request_id] = before + count
        if self.scheduler_metrics_logger is not None and _is_decode_stage(task):
            step.decode_tokens += count

    def _begin(self, task: Any, step: _Step) -> None:
        """Notes a request's first output."""
        task.metrics.record_recv_first_token()
        task.metrics.cal_cost_time()
        self._figures.first_token(task, step.now)
        self._telling.first_token(task, step.now)

    def _pool(self, life: Life, vector: list[float], step: _Step) -> Any:
        """Returns the one output of a pooling request."""
        task, now = life.task, step.now
        self._begin(task, step)
        made = self._converter.pooling(task, vector, self._converter.copy_metrics(task.metrics))
        self._telling.end_of_span(task, now)
        self._figures.completion(task, now, 0)
        self._telling.completion(task)
        self._recycle(life)
        return made

    def _is_chunk(self, life: Life, reason: int) -> bool:
        """Whether a row's token belongs to a prompt that the worker has not all filled in: V0's
        scheduler says so after it has given the row, so it is found out here."""
        task = life.task
        task.prefill_chunk_num = getattr(task, "prefill_chunk_num", 0) + 1
        if task.prefill_chunk_num >= len(task.prefill_chunk_info):
            return False
        if reason != FinishReason.NONE:  # such a token looked like an end, and was none
            self._rows.end(life)
            self._rows.assigned(life.row, task)
        return True

    def _finish(self, columns: Columns, i: int, life: Life, made: Any, step: _Step) -> Any:
        task, reason, now = life.task, FinishReason(columns.reasons[i]), step.now
        stamps, num_tokens = task.metrics, self.tokens_counter.get(task.request_id, 0)
        is_disaggregated = task.disaggregate_info is not None
        is_prefill = is_disaggregated and self._role == "prefill"
        self._converter.set_end(made, reason)
        made.trace_carrier = self._telling.end_of_span(task, now)
        stamps.cal_cost_time()
        made.metrics = self._converter.copy_metrics(stamps)  # with its costs (fault F44)
        start = stamps.get_inference_start_time(is_disaggregated and self._role == "decode")
        self._telling.finish_line(
            task,
            num_tokens=num_tokens,
            token_ratio=self._figures.end(task, now, num_tokens, start),
            e2e_s=now - start if start else None,
            is_prefill=is_prefill,
            is_recovery=reason is FinishReason.RECOVERY,
        )
        self._host.llm_logger.info(self.resource_manager.info())
        if self._is_speculative:
            found = self._converter.add_speculation(made, columns, i, self._num_drafts)
            if found is not None:
                self._telling.speculation(task, found, self._figures.head_ratios())
        if is_prefill and self._handover is not None:
            self._handover.park(life, made)
            return None
        self._figures.completion(task, now, num_tokens)
        self._telling.completion(task)
        try:
            self._manager.cache_output(task)
        except Exception:
            # What the cache gains is not worth the request's last tokens.
            _log.exception("the output of %r is not kept in the cache", task.request_id)
        self._recycle(life)
        return made

    # -------------------------------------------------------------- ends

    def _recycle(self, life: Life) -> None:
        self._rows.end(life)
        self._manager.recycle(life.task, life.row)
        self._figures.recycled(self.resource_manager)
        self.tokens_counter.pop(life.task.request_id, None)

    def _acknowledge(self, life: Life) -> None:
        """The worker has let go of a row: it was aborted, or preempted, or both."""
        request_id = life.task.request_id
        if not self._host.is_v1:
            self._tell_of_preemption(request_id)
            return
        is_aborted, is_preempted = self._manager.to_be_let_go(request_id)
        if is_aborted:
            life.is_aborted = True
            self._rows.let_go(life)  # first: the manager may give the row out at once
            self.resource_manager.recycle_abort_task(request_id)
            self._telling.stage(
                "sync abortion for request_id {request_id} done.", request_id=request_id
            )
        if is_preempted:
            self.resource_manager.reschedule_preempt_task(request_id)
            self._tell_of_preemption(request_id)

    def _tell_of_preemption(self, request_id: str) -> None:
        text = "sync preemption for request_id {request_id} done."
        self._telling.stage(text, request_id=request_id)

    def _end_unwanted(self, life: Life, step: _Step) -> Any:
        """A token has ended a request that the manager does not want any more. The worker's -9 may
        be still to come, and will be nobody's: so the manager hears of it now."""
        if not step.stop_flags[life.row]:
            self._acknowledge(life)
        if life.is_aborted:
            return self._ended(life, FinishReason.ABORT)
        self._rows.end(life)
        self.tokens_counter.pop(life.task.request_id, None)
        return None

    def _ended(self, life: Life, reason: FinishReason) -> Any:
        """Returns the last output of a request that no token has ended; None where the manager took
        its row away by itself, and has told its client."""
        task, converter = life.task, self._converter
        before = self.tokens_counter.pop(task.request_id, 0)
        self._rows.end(life)
        if life.dropped_at is not None and not life.is_aborted:
            return None
        made = converter.output(
            task, life.row, before, [], converter.copy_metrics(task.metrics), TARGET
        )
        converter.set_end(made, reason)
        if not life.is_aborted:
            self._manager.recycle(task, life.row)
        self._figures.recycled(self.resource_manager)
        self._telling.stage(
            "request_id {request_id} ended: {reason}",
            request_id=task.request_id,
            reason=reason.name.lower(),
        )
        return made

    def _broken(self, life: Life) -> Any:
        """Ends a request whose output could not be made."""
        if life.is_over:
            return None
        try:
            self._rows.abort(life)
            return self._ended(life, FinishReason.ERROR)
        except Exception:
            _log.exception("request %r cannot be ended", life.task.request_id)
            return None

    def _handed_over(self, life: Life, result: Any, answer: str) -> None:
        """Gives back the row of a first token that was handed on; in the hand-over's thread."""
        try:
            if life.admission is not None:
                self._pipe.prefill_done(life.admission.request_id, answer)
        except TokenpipeError as error:
            _log.error("request %r: %s", life.task.request_id, error)
        try:
            self._recycle(life)
        except Exception:
            # Neither its output nor what else is parked may wait for that.
            _log.exception("row %d of %r was not given back", life.row, life.task.request_id)
        self._deliver([result])

    def _deliver(self, results: list[Any]) -> None:
        """Hands outputs to the scheduler, again when it fails (fault F21): all at once, in the end
        each alone, so that one that it does not take costs no other."""
        with self._put_lock:
            pause_s = _PUT_PAUSE_S
            for attempt in range(1, _PUT_ATTEMPTS + 1):
                try:
                    self.cached_generated_tokens.put_results(results)
                    return
                except Exception:
                    _log.exception("put_results() failed, attempt %d", attempt)
                if self._stopping.wait(pause_s):
                    break
                pause_s = min(1.0, 2 * pause_s)
            for result in results:
                try:
                    self.cached_generated_tokens.put_results([result])
                except Exception:
                    self._host.say(logging.ERROR, "an output of %r is lost", result.request_id)


def _source(config: PipelineConfig) -> str:
    if config.source == "zmq":
        return f"socket {config.zmq_socket}"
    return f"{config.sysv_op} of queue {config.sysv_queue_id}"


def _is_decode_stage(task: Any) -> bool:
    needed = task.need_prefill_tokens
    return needed is not None and task.num_computed_tokens >= needed


def _end(owner: int, stopping: threading.Event, threads: list[Any], pipe: Pipeline) -> None:
    """Ends what a processor has started; running requests get their finals before. A forked copy of
    the engine, which ends by itself, has started nothing."""
    if os.getpid() != owner:
        return
    stopping.set()
    try:
        pipe.drain(0.0)
    except TokenpipeError as error:
        _log.info("the pipeline is not there to be drained: %s", error)
    for thread in reversed(threads):
        if isinstance(thread, CacheHandover):
            thread.stop()
        elif thread is not threading.current_thread():
            thread.join(_STOP_S)
    pipe.close()
