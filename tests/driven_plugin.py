"""A token processor of ours in a stand-in FastDeploy, over a real System V queue or socket."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdeploy_peer as peer
import fastdeploy_standins as fd
import pytest
import zmq_peer
from stand_ins import record

from support import wait_until
from tokenpipe.fastdeploy.processor import TokenProcessor

RECOVERY_TEXT = "Recover is not supported, the result is incomplete!"
FOLDER = "/dev/shm"
_CLONE_NEWIPC = 0x08000000
_libc = ctypes.CDLL(None, use_errno=True)


def said(output: Any) -> dict[str, Any]:
    """What the scheduler and the client go by."""
    completion = output.outputs
    return {
        "id": output.request_id,
        "row": completion.index,
        "send_idx": completion.send_idx,
        "tokens": completion.token_ids,
        "end": output.finished,
        "error": (output.error_code, output.error_msg),
    }


def row(
    request_id: str,
    row: int,
    send_idx: int,
    tokens: list[int],
    end: bool = False,
    error: Any = None,
) -> dict[str, Any]:
    """What said() must give."""
    names = {"id": request_id, "row": row, "send_idx": send_idx, "tokens": tokens, "end": end}
    return {**names, "error": (200, error)}


class Driven:
    """The engine around one processor; the test is its worker."""

    def __init__(self, fastdeploy: fd.FastDeploy, cfg: Any, worker: Callable[[], Any]) -> None:
        self.fastdeploy = fastdeploy
        self.calls = fastdeploy.calls
        self.metrics = fastdeploy.metrics
        self.role = cfg.scheduler_config.splitwise_role
        self.num_rows = cfg.scheduler_config.max_num_seqs
        self.scheduler = fd.Scheduler()
        self.queue = fd.Queue()
        self.first_tokens: list[Any] = []
        self.processor = TokenProcessor(
            cfg=cfg,
            cached_generated_tokens=self.scheduler,
            engine_worker_queue=self.queue,
            split_connector=self,
        )
        self.worker = worker()
        self.uses_zmq = isinstance(self.worker, zmq_peer.Worker)
        self.manager: Any = None
        self.is_v1 = True
        self._seen = 0

    def send_first_token(self, info: Any, results: list[Any]) -> None:
        """The split connector's."""
        self.first_tokens.append((info, list(results)))

    def use(self, manager: Any) -> None:
        """Gives the processor a manager; a second one takes the place of the first."""
        self.processor.resource_manager = None
        self.processor.set_resource_manager(manager)
        self.manager = manager
        self.is_v1 = isinstance(manager, fd.ResourceManagerV1)
        self.fastdeploy.envs.ENABLE_V1_KVCACHE_SCHEDULER = int(self.is_v1)

    def use_new(self, *, v1: bool = True) -> None:
        """Gives the processor an empty manager."""
        if v1:
            self.use(fd.ResourceManagerV1(self.num_rows, self.calls, self.role))
        else:
            self.use(fd.ResourceManager(self.num_rows, self.calls))

    def admit(self, row: int, request_id: str, **fields: Any) -> fd.Request:
        """Gives a new request a row, as the scheduler does."""
        task = fd.Request(request_id, **fields)
        self.manager.give(row, task)
        return task

    def send(self, *payloads: Any) -> None:
        """The worker saves steps: a message each, on the zmq path a list of records."""
        for payload in payloads:
            if self.uses_zmq:
                self.worker.send(*payload)
            else:
                self.worker.send(payload)

    def settle(self) -> None:
        """Waits until all that was saved is decoded, delivered and applied."""
        if self.uses_zmq:
            self._sync_zmq()
        else:
            self.processor._pipe.sync()
        wait_until(self._is_idle)
        # An end that the processor has asked for comes in a frame of its own.
        wait_until(lambda: not any(n.dropped_at for n in self.processor._rows.running()))
        wait_until(self._is_idle)
        if self.is_v1:
            wait_until(self._has_finished)

    def _sync_zmq(self) -> None:
        """Waits for a message of our own, behind the others: one that is refused and counted."""
        pipe = self.processor._pipe
        count = pipe.status()["counters"]["bad_message"]
        self.worker.send_bytes(b"")
        wait_until(lambda: pipe.status()["counters"]["bad_message"] > count)
        names = [f"decoder-{k}" for k in range(pipe.config.num_decoders)]
        wait_until(lambda: not any(pipe.status()["roles"][name]["lag"] for name in names))

    def _is_idle(self) -> bool:
        processor = self.processor
        is_read = not _unread(processor._pipe) and not processor._backlog
        return is_read and processor._busy_since is None

    def _has_finished(self) -> bool:
        """Whether the manager's own thread has given back what it was told to."""
        told = {call[1] for call in self.calls.named("finish")}
        return not any(request_id in told for request_id in self.manager.requests)

    def lists(self) -> list[list[Any]]:
        """Returns the lists that the scheduler got since the last call."""
        self.settle()
        put = self.scheduler.put
        new, self._seen = put[self._seen :], len(put)
        return new

    def outputs(self) -> list[Any]:
        """Returns the outputs since the last call."""
        return [result for results in self.lists() for result in results]

    def start_afresh(self, *, v1: bool = True) -> Driven:
        """Takes every task away, as a test of its own would find it; the next manager is new."""
        for row, task in enumerate(self.manager.tasks_list):
            if task is not None:
                self.manager.tasks_list[row] = None
        self.settle()
        self.send(self._empty_rows())
        self.lists()
        self.use_new(v1=v1)
        self.calls.made.clear()
        self.processor.tokens_counter.clear()
        self.processor.set_scheduler_metrics_logger(None)
        self.fastdeploy.envs.FD_ENABLE_INTERNAL_ADAPTER = 0
        return self

    def _empty_rows(self) -> Any:
        """A step that says that the worker has let go of every row."""
        n, op = self.num_rows, self.processor._pipe.config.sysv_op
        if self.uses_zmq:
            return [record(i, -9) for i in range(n)]
        if op == "get_output":
            return peer.plain([-9] * n)
        if op == "get_output_topk":
            return peer.topk([[-9]] * n, [[0.0]] * n, [0] * n)
        if op == "speculate_get_output":
            return peer.speculate([[0]] * n, [-9] * n)
        return peer.speculate_topk([[[0]]] * n, [[[0.0]]] * n, [[0]] * n, [-9] * n)

    def step(self, *payloads: Any) -> list[Any]:
        """Sends, and returns the outputs."""
        self.send(*payloads)
        return self.outputs()


def _unread(pipe: Any) -> int:
    roles = pipe.status()["roles"]
    return sum(roles[name]["unread_frames"] for name in roles if name.startswith("decoder"))


@contextlib.contextmanager
def driven(patch: pytest.MonkeyPatch, *, run: bool = True, **settings: Any) -> Iterator[Driven]:
    """A running processor with an empty V1 manager; `settings` are those of fd.config()."""
    queue_id = peer.free_queue_id(FOLDER)
    patch.setenv("TOKENPIPE_SYSV_QUEUE_ID", str(queue_id))
    patch.setenv("TOKENPIPE_SYSV_FOLDER", FOLDER)
    key = peer.custom_ftok(FOLDER, queue_id)
    with fd.installed() as fastdeploy:
        yield from _driven(Driven(fastdeploy, fd.config(**settings), lambda: peer.Worker(key)), run)


@contextlib.contextmanager
def driven_by_zmq(patch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Driven]:
    """The same with FD_USE_GET_SAVE_OUTPUT_V1=1."""
    with tempfile.TemporaryDirectory(prefix="tpz") as folder, fd.installed() as fastdeploy:
        path = f"{folder}/rank0.socket"
        patch.setenv("TOKENPIPE_ZMQ_SOCKET", path)
        fastdeploy.envs.FD_USE_GET_SAVE_OUTPUT_V1 = True
        engine = Driven(fastdeploy, fd.config(**settings), lambda: zmq_peer.Worker(path))
        try:
            yield from _driven(engine, run=True)
        finally:
            engine.worker.close()
        assert not os.listdir(folder), "the socket file is removed with its pipeline"


def _driven(engine: Driven, run: bool) -> Iterator[Driven]:
    try:
        engine.use_new()
        if run:
            engine.processor.run()
        yield engine
    finally:
        engine.processor.stop()


@contextlib.contextmanager
def private_ipc(msgmax: int, msgmnb: int) -> Iterator[None]:
    """Lets this thread, and what it starts, have System V queues of its own with other limits.

    Skips the test where that is not allowed.
    """
    before = os.open("/proc/thread-self/ns/ipc", os.O_RDONLY)
    try:
        if _libc.unshare(_CLONE_NEWIPC) != 0:
            pytest.skip(f"no private IPC namespace: {os.strerror(ctypes.get_errno())}")
        try:
            Path("/proc/sys/kernel/msgmax").write_text(str(msgmax))
            Path("/proc/sys/kernel/msgmnb").write_text(str(msgmnb))
            yield
        finally:
            assert _libc.setns(before, _CLONE_NEWIPC) == 0
    finally:
        os.close(before)
