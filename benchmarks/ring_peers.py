"""The peers of benchmarks/ring.py, each in its best lossless form. Those without multicast send N
times. One that cannot run here says why in `missing`."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ring_ours import Receiver, Sender, Transport

_FORK = multiprocessing.get_context("fork")
_numbers = itertools.count()


def _missing(package: str, of: str) -> str:
    if importlib.util.find_spec(package) is not None:
        return ""
    return f"{of} is not installed here: pip install 'tokenpipe[bench]'"


class _All(Sender):
    """Sends to every consumer in turn by `send_to(end, payload)`."""

    def __init__(self, ends: list[Any], payload: bytes) -> None:
        self._ends, self._payload = ends, payload

    def send_to(self, end: Any) -> None:
        raise NotImplementedError

    def send(self) -> None:
        for end in self._ends:
            self.send_to(end)


# ---------------------------------------------------------------- multiprocessing


class Pipes(Transport):
    """multiprocessing.Pipe, bytes in and out without pickling."""

    name = "multiprocessing.Pipe"

    def __init__(self, payload: int, consumers: int) -> None:
        super().__init__(payload, consumers)
        self._pipes = [_FORK.Pipe(duplex=False) for _ in range(consumers)]

    def sender(self) -> Sender:
        return _PipeSender([end for _, end in self._pipes], bytes(self.payload))

    def receiver(self, k: int) -> Receiver:
        return _PipeReceiver(self._pipes[k][0], self.payload)

    def close(self) -> None:
        for ends in self._pipes:
            for end in ends:
                end.close()


class _PipeSender(_All):
    def send_to(self, end: Any) -> None:
        end.send_bytes(self._payload)


class _PipeReceiver(Receiver):
    def __init__(self, end: Any, payload: int) -> None:
        self._end, self._to = end, bytearray(payload)

    def receive(self) -> None:
        self._end.recv_bytes_into(self._to)


class Queues(Transport):
    """multiprocessing.Queue, which pickles and has a thread that writes."""

    name = "multiprocessing.Queue"

    def __init__(self, payload: int, consumers: int) -> None:
        super().__init__(payload, consumers)
        self._queues = [_FORK.Queue(self.slots) for _ in range(consumers)]

    def sender(self) -> Sender:
        return _QueueSender(self._queues, bytes(self.payload))

    def receiver(self, k: int) -> Receiver:
        return _QueueReceiver(self._queues[k])

    def close(self) -> None:
        for queue in self._queues:
            queue.close()


class _QueueSender(_All):
    def send_to(self, end: Any) -> None:
        end.put(self._payload)

    def finish(self) -> None:
        for queue in self._ends:
            queue.close()
            queue.join_thread()


class _QueueReceiver(Receiver):
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def receive(self) -> None:
        self._queue.get()


# ---------------------------------------------------------------- faster-fifo


class FasterFifo(Transport):
    """faster-fifo: a mutex around a ring of bytes; pickling bypassed, read many at once."""

    name = "faster-fifo"
    missing = _missing("faster_fifo", "faster-fifo")

    def __init__(self, payload: int, consumers: int) -> None:
        import faster_fifo

        super().__init__(payload, consumers)
        size = self.slots * (payload + 64)
        self._queues = [faster_fifo.Queue(size, loads=bytes, dumps=bytes) for _ in range(consumers)]

    def sender(self) -> Sender:
        return _FifoSender(self._queues, bytes(self.payload))

    def receiver(self, k: int) -> Receiver:
        return _FifoReceiver(self._queues[k], self.payload)


class _FifoSender(_All):
    def send_to(self, end: Any) -> None:
        end.put(self._payload, timeout=60.0)


class _FifoReceiver(Receiver):
    def __init__(self, queue: Any, payload: int) -> None:
        self._queue = queue
        queue.reallocate_msg_buffer(max(1 << 20, 2 * payload))

    def receive(self) -> None:
        self._queue.get(timeout=60.0)

    def receive_many(self, count: int) -> None:
        while count > 0:
            count -= len(self._queue.get_many(timeout=60.0, max_messages_to_get=min(count, 64)))


# ---------------------------------------------------------------- pyzmq


class ZeroMq(Transport):
    """pyzmq: PUSH and PULL over ipc://, a pair of sockets per consumer."""

    name = "pyzmq ipc"
    missing = _missing("zmq", "pyzmq")

    def __init__(self, payload: int, consumers: int) -> None:
        super().__init__(payload, consumers)
        self._folder = Path(tempfile.mkdtemp(prefix="tokenpipe-bench-"))

    def _socket(self, kind: str, k: int) -> tuple[Any, Any]:
        import zmq

        context = zmq.Context()
        socket = context.socket(getattr(zmq, kind))
        socket.set_hwm(self.slots)
        socket.setsockopt(zmq.LINGER, -1)
        return context, socket

    def sender(self) -> Sender:
        pairs = [self._socket("PUSH", k) for k in range(self.consumers)]
        for k, (_, socket) in enumerate(pairs):
            socket.bind(f"ipc://{self._folder}/{k}")
        return _ZmqSender(pairs, bytes(self.payload))

    def receiver(self, k: int) -> Receiver:
        pair = self._socket("PULL", k)
        pair[1].connect(f"ipc://{self._folder}/{k}")
        return _ZmqReceiver(*pair)

    def close(self) -> None:
        shutil.rmtree(self._folder)


class _ZmqSender(_All):
    def send_to(self, end: Any) -> None:
        end[1].send(self._payload, copy=False)

    def finish(self) -> None:
        for context, socket in self._ends:
            socket.close()
            context.term()


class _ZmqReceiver(Receiver):
    def __init__(self, context: Any, socket: Any) -> None:
        self._context, self._socket = context, socket

    def receive(self) -> None:
        self._socket.recv(copy=False)

    def finish(self) -> None:
        self._socket.close()
        self._context.term()


# ---------------------------------------------------------------- iceoryx2


class Iceoryx(Transport):
    """iceoryx2: zero copy and multicast. The consumer polls and yields: it has no blocking read."""

    name = "iceoryx2, polling"
    missing = _missing("iceoryx2", "iceoryx2")

    def __init__(self, payload: int, consumers: int) -> None:
        super().__init__(payload, consumers)
        self._name = f"tokenpipe-bench/{os.getpid()}/{next(_numbers)}"

    def open(self) -> tuple[Any, Any]:
        """Returns a node of this process and the service in it."""
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        service = (
            node.service_builder(iceoryx2.ServiceName.new(self._name))
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self.slots)
            .max_publishers(1)
            .max_subscribers(self.consumers)
            .open_or_create()
        )
        return node, service

    def sender(self) -> Sender:
        return _IceoryxSender(self)

    def receiver(self, k: int) -> Receiver:
        return _IceoryxReceiver(self)


class _IceoryxSender(Sender):
    def __init__(self, transport: Iceoryx) -> None:
        import iceoryx2

        self._bytes = transport.payload
        self._payload = ctypes.create_string_buffer(self._bytes)
        self._node, self._service = transport.open()
        self._publisher = (
            self._service.publisher_builder()
            .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
            .initial_max_slice_len(self._bytes)
            .create()
        )

    def start(self) -> None:
        self._publisher.update_connections()

    def send(self) -> None:
        sample = self._publisher.loan_slice_uninit(self._bytes)
        ctypes.memmove(sample.payload_ptr, self._payload, self._bytes)
        sample.assume_init().send()

    def finish(self) -> None:
        self._publisher.delete()
        self._service = self._node = None  # a node that is not dropped leaves its files behind


class _IceoryxReceiver(Receiver):
    def __init__(self, transport: Iceoryx) -> None:
        self._node, self._service = transport.open()
        self._subscriber = self._service.subscriber_builder().create()
        self._seen = 0

    def receive(self) -> None:
        receive, sched_yield = self._subscriber.receive, os.sched_yield
        while (sample := receive()) is None:
            sched_yield()
        self._seen = ctypes.c_uint64.from_address(sample.payload_ptr).value  # a word, in place
        sample.delete()

    def finish(self) -> None:
        self._subscriber.delete()
        self._service = self._node = None


# ---------------------------------------------------------------- System V


class SystemV(Transport):
    """A System V message queue by msgsnd and msgrcv. Its limits are raised in a namespace of our
    own alone (private_limits()); elsewhere only small payloads fit."""

    name = "System V queue"

    def __init__(self, payload: int, consumers: int) -> None:
        super().__init__(payload, consumers)
        self._queues = [checked(libc.msgget(0, 0o600), "msgget") for _ in range(consumers)]

    @classmethod
    def can_send(cls, payload: int) -> bool:
        return payload <= int(_MSGMAX.read_text())

    def sender(self) -> Sender:
        return _SysvSender(self._queues, self.payload)

    def receiver(self, k: int) -> Receiver:
        return _SysvReceiver(self._queues[k], self.payload)

    def close(self) -> None:
        for queue in self._queues:
            libc.msgctl(queue, 0, None)  # IPC_RMID


libc = ctypes.CDLL(None, use_errno=True)
"""With the prototypes of System V messages."""
libc.msgsnd.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.msgrcv.argtypes = [*libc.msgsnd.argtypes[:3], ctypes.c_long, ctypes.c_int]
libc.msgrcv.restype = ctypes.c_ssize_t
libc.msgctl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
_MSGMAX, _MSGMNB = Path("/proc/sys/kernel/msgmax"), Path("/proc/sys/kernel/msgmnb")
_CLONE_NEWIPC = 0x08000000
_TYPE_BYTES = 8


def checked(result: int, call: str) -> int:
    """Returns the result of a call of libc; raises OSError where it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), call)
    return result


def private_limits() -> str:
    """Moves this process into an IPC namespace of its own and raises the limits of System V
    messages there. Returns why not, where that is not allowed; nothing is changed then."""
    before = os.readlink("/proc/self/ns/ipc")
    if libc.unshare(_CLONE_NEWIPC) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    if os.readlink("/proc/self/ns/ipc") == before:
        return "unshare changed nothing"
    try:
        _MSGMAX.write_text(str(1 << 20))
        _MSGMNB.write_text(str(4 << 20))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


class _SysvSender(_All):
    def __init__(self, queues: list[int], payload: int) -> None:
        message = ctypes.create_string_buffer(_TYPE_BYTES + payload)
        message[0] = 1  # mtype, which must be above 0
        super().__init__(queues, bytes(0))
        self._message, self._bytes = message, payload

    def send_to(self, end: Any) -> None:
        checked(libc.msgsnd(end, self._message, self._bytes, 0), "msgsnd")


class _SysvReceiver(Receiver):
    def __init__(self, queue: int, payload: int) -> None:
        self._queue, self._bytes = queue, payload
        self._to = ctypes.create_string_buffer(_TYPE_BYTES + payload)

    def receive(self) -> None:
        checked(libc.msgrcv(self._queue, self._to, self._bytes, 0, 0), "msgrcv")


PEERS: tuple[type[Transport], ...] = (Iceoryx, FasterFifo, ZeroMq, Pipes, Queues, SystemV)
