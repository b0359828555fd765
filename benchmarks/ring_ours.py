"""What benchmarks/ring.py sends through: the shape every transport has, and our own ring in it."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import native_build
import numpy as np

SLOTS = {2048: 256, 6144: 128, 90_000: 32, 530_448: 8}
"""Slots by payload: a ring of 0.5 to 4 MB, which stays in the caches (README, ring size)."""


class Sender:
    """One process's sending end. `send_many` is the loop that is timed."""

    def start(self) -> None:
        """Called once after all ends are there."""

    def send(self) -> None:
        """Sends one payload to every consumer; blocks while there is no room."""
        raise NotImplementedError

    def send_many(self, count: int) -> None:
        """Sends `count` payloads."""
        send = self.send
        for _ in range(count):
            send()

    def finish(self) -> None:
        """Called before the process ends: nothing that was sent may be lost."""


class Receiver:
    """One consumer's end."""

    def receive(self) -> None:
        """Takes one payload; blocks until there is one."""
        raise NotImplementedError

    def receive_many(self, count: int) -> None:
        """Takes `count` payloads."""
        receive = self.receive
        for _ in range(count):
            receive()

    def ping(self, out: Sender, count: int, gap_s: float) -> list[int]:
        """Sends and waits for the answer; returns nanoseconds of each round."""
        took = []
        for _ in range(count):
            if gap_s:
                time.sleep(gap_s)
            begun = time.monotonic_ns()
            out.send()
            self.receive()
            took.append(time.monotonic_ns() - begun)
        return took

    def pong(self, out: Sender, count: int) -> None:
        """Answers `count` payloads."""
        for _ in range(count):
            self.receive()
            out.send()

    def finish(self) -> None:
        """Called before the process ends."""


class Transport:
    """A way from one producer to N consumers, made before the processes fork."""

    name = ""
    missing = ""
    """Why it cannot run here; empty where it can."""

    def __init__(self, payload: int, consumers: int) -> None:
        self.payload, self.consumers, self.slots = payload, consumers, SLOTS[payload]

    @classmethod
    def can_send(cls, payload: int) -> bool:
        """Whether a message may be so long."""
        return True

    def sender(self) -> Sender:
        """Returns the sending end; called in the producer's process."""
        raise NotImplementedError

    def receiver(self, k: int) -> Receiver:
        """Returns the end of consumer k; called in its process."""
        raise NotImplementedError

    def close(self) -> None:
        """Removes what the transport left outside of the processes."""


class _Native(Transport):
    kind = "Ours"

    def __init__(self, payload: int, consumers: int) -> None:
        super().__init__(payload, consumers)
        make = getattr(native_build.module("ring"), self.kind)
        self.memory = mmap.mmap(-1, make.bytes(consumers, self.slots, payload))
        self.ring = make(self.memory, consumers, self.slots, payload)

    def sender(self) -> Sender:
        return _LoopSender(self.ring)

    def receiver(self, k: int) -> Receiver:
        return _LoopReceiver(self.ring, k)


class _LoopSender(Sender):
    """The loop itself is C++."""

    def __init__(self, ring: Any) -> None:
        self.native = type(ring).Sender(ring)
        self.send_many = self.native.send_many


class _LoopReceiver(Receiver):
    def __init__(self, ring: Any, k: int) -> None:
        self._native = type(ring).Receiver(ring, k)
        self.receive_many = self._native.receive_many

    def ping(self, out: Sender, count: int, gap_s: float) -> list[int]:
        assert isinstance(out, _LoopSender)
        took: list[int] = self._native.ping(out.native, count, round(gap_s * 1e9))
        return took

    def pong(self, out: Sender, count: int) -> None:
        assert isinstance(out, _LoopSender)
        self._native.pong(out.native, count)


class FloorCpp(_Native):
    """The least ring of two cursors and a futex, in C++: what the others are held against."""

    name, kind = "floor: C++ futex ring", "Floor"


class OursCpp(_Native):
    """Our ring, both loops in C++."""

    name = "tokenpipe: C++"


class OursCopy(_Native):
    """Our ring from Python: a call copies a payload in, a call copies it out."""

    name = "tokenpipe: Python, copy"

    def sender(self) -> Sender:
        return _CopySender(self)

    def receiver(self, k: int) -> Receiver:
        return _CopyReceiver(self, k)


class _CopySender(Sender):
    def __init__(self, transport: _Native) -> None:
        self._send = type(transport.ring).Sender(transport.ring).send
        self._payload = bytes(transport.payload)

    def send(self) -> None:
        self._send(self._payload)

    def send_many(self, count: int) -> None:
        send, payload = self._send, self._payload
        for _ in range(count):
            send(payload)


class _CopyReceiver(Receiver):
    def __init__(self, transport: _Native, k: int) -> None:
        self._receive = type(transport.ring).Receiver(transport.ring, k).receive_into
        self._to = bytearray(transport.payload)

    def receive(self) -> None:
        self._receive(self._to)

    def receive_many(self, count: int) -> None:
        receive, to = self._receive, self._to
        for _ in range(count):
            receive(to)


class OursView(_Native):
    """Our ring from Python: the producer fills a numpy view of the slot, the consumer reads a word
    of its view in place."""

    name = "tokenpipe: Python, views"

    def views(self) -> list[Any]:
        """Returns the payload of each slot as uint64 [payload / 8]."""
        words = self.payload // 8
        return [
            np.frombuffer(self.memory, np.uint64, words, self.ring.offset(i))
            for i in range(self.slots)
        ]

    def sender(self) -> Sender:
        return _ViewSender(self)

    def receiver(self, k: int) -> Receiver:
        return _ViewReceiver(self, k)


class _ViewSender(Sender):
    def __init__(self, transport: OursView) -> None:
        self._native = type(transport.ring).Sender(transport.ring)
        self._views = transport.views()
        self._payload = np.ones(transport.payload // 8, np.uint64)

    def send(self) -> None:
        self.send_many(1)

    def send_many(self, count: int) -> None:
        claim, publish = self._native.claim, self._native.publish
        views, payload = self._views, self._payload
        for _ in range(count):
            views[claim()][:] = payload
            publish()


class _ViewReceiver(Receiver):
    def __init__(self, transport: OursView, k: int) -> None:
        self._native = type(transport.ring).Receiver(transport.ring, k)
        self._views = transport.views()

    def receive(self) -> None:
        self.receive_many(1)

    def receive_many(self, count: int) -> None:
        poll, release, views, seen = self._native.poll, self._native.release, self._views, 0
        for _ in range(count):
            seen += views[poll()].item(0)
            release()
        if seen != count:
            raise RuntimeError(f"read {seen} in {count} slots that hold 1 each")


OURS: tuple[type[Transport], ...] = (FloorCpp, OursCpp, OursCopy, OursView)


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0))
