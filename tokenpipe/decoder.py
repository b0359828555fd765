"""DECODER process: slots in, output frames out. The turn itself is cuda_ops/decoder.hpp."""

from __future__ import annotations

import os

from tokenpipe import _native
from tokenpipe.errors import PartyExistsError
from tokenpipe.lifeline import Lifeline
from tokenpipe.segment import LOCK_DECODER, Segment, start_time
from tokenpipe.stop import stop_on_signals

_TURNS_PER_CALL = 64
"""So many turns pass between two looks at the stop flag."""


def run(name: str, index: int) -> None:
    """Decoder `index`: turns its rows of each slot into an output frame, until told to stop."""
    with stop_on_signals(ignore_interrupt=True) as stop, Segment.attach(name) as segment:
        if not segment.lock(LOCK_DECODER + index):
            raise PartyExistsError(name, f"decoder-{index}", 0)
        config, lifeline = segment.config, Lifeline(segment)
        segment.core.protect_slots()
        decoder = _native.Decoder(segment.core, index, config.spin_us / 1e6)
        pid = os.getpid()
        _native.announce_role(segment.core, 2 + index, pid, start_time(pid) or 0)
        while not stop.requested and not lifeline.is_cut():
            decoder.run(_TURNS_PER_CALL, lifeline.patience_s)
