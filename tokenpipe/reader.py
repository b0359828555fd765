"""READER process: source in, slots out. No objects per row, no decoding."""

from __future__ import annotations

import os

from tokenpipe import _native
from tokenpipe.errors import PartyExistsError
from tokenpipe.lifeline import Lifeline
from tokenpipe.segment import LOCK_READER, Segment, start_time
from tokenpipe.sources import open_source
from tokenpipe.stop import stop_on_signals

ROLE_INDEX = 1


def run(name: str) -> None:
    """Reader: lets the output op write each step straight into the next slot, until told to
    stop."""
    with stop_on_signals(ignore_interrupt=True) as stop, Segment.attach(name) as segment:
        if not segment.lock(LOCK_READER):
            raise PartyExistsError(name, "reader", 0)
        config, lifeline = segment.config, Lifeline(segment)
        beat_s, spin_s = lifeline.patience_s, config.spin_us / 1e6
        producer = _native.Producer(segment.core, spin_s)
        source = open_source(segment)
        _native.announce_role(segment.core, ROLE_INDEX, os.getpid(), start_time(os.getpid()) or 0)
        while not stop.requested and not lifeline.is_cut():
            producer.beat()
            if not producer.claim(beat_s):
                continue  # the ring is full: backpressure, counted
            if source.get_output(producer, beat_s):
                producer.publish()
                source.release()  # after the publish: a successor skips what it finds in the ring
