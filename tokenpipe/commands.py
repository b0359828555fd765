"""What a client may ask of the coordinator, and how it is answered; the codes of layout.h."""

from __future__ import annotations

from enum import IntEnum

ANY_ROW = 2**32 - 1
NO_BLOCK = 2**32 - 1


class CommandKind(IntEnum):
    """tp_command.kind."""

    SUBMIT = 1
    ABORT = 2
    DRAIN = 3
    PREEMPT = 4
    RESUME = 5
    GROW = 6
    PREFILL_DONE = 7
    CLEAR = 8
    SYNC = 9
    LET_GO = 10


class ReplyStatus(IntEnum):
    """tp_command.status."""

    OK = 0
    NO_FREE_ROW = 1
    ROW_BUSY = 2
    DUPLICATE = 3
    TOO_MANY_BLOCKS = 4
    DRAINING = 5
    ABORTED = 6
    """The submit was aborted while it waited."""
    UNKNOWN = 7
    """No request of that id: it has ended or never was."""
    BAD_COMMAND = 8
    NOT_ACKNOWLEDGED = 9
    """The engine has not let go of the row yet, so it cannot be resumed."""
    NO_FREE_BLOCKS = 10


class FinishReason(IntEnum):
    """Why a request ended (TP_FINISH_*); NONE: it goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    RECOVERY = 4
    ERROR = 5
    SHUTDOWN = 6


ACKNOWLEDGED = 32
"""In the same column, and no end: the engine has let go of the row (TP_OUTPUT_ACKNOWLEDGED)."""
SILENT = 33
"""Likewise: a message of the zmq source names the row without a token (TP_OUTPUT_SILENT)."""


class Phase(IntEnum):
    """Where a row's request stands with the engine (TP_PHASE_*)."""

    RUNNING = 0
    PREEMPTING = 1
    PREEMPTED = 2


class Control(IntEnum):
    """Bits of a control word: what the engine's scheduler must act on."""

    ABORT = 1
    PREEMPT = 2
    FINISHED = 4


class AdmissionFlag(IntEnum):
    """TP_ADMISSION_*."""

    DISAGGREGATED = 1
    WARM_UP = 2
