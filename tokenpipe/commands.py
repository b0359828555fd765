"""What a client may ask of the coordinator, and how it is answered."""

from __future__ import annotations

from enum import IntEnum

ANY_ROW = 2**32 - 1


class CommandKind(IntEnum):
    """tp_command.kind."""

    SUBMIT = 1
    ABORT = 2
    DRAIN = 3


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


class FinishReason(IntEnum):
    """Why a request ended (TP_FINISH_*); NONE: it goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    RECOVERY = 4
    ERROR = 5
    SHUTDOWN = 6


class Control(IntEnum):
    """Bits of a control word: what the engine's scheduler must act on."""

    ABORT = 1
    PREEMPT = 2
    FINISHED = 4
