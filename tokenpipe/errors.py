"""Every exception and every exit code of tokenpipe.

An exception carries its facts as fields; its text says what was attempted, what was found and what
to do. Full, empty, timed out and asked to stop are values, not exceptions.
"""

from __future__ import annotations

import inspect
import json
from enum import IntEnum

from tokenpipe import _native


class ExitCode(IntEnum):
    """How a tokenpipe process ended."""

    OK = 0
    FAILED = 1
    """A role died or an unexpected error ended the process."""
    BAD_CONFIG = 2
    """A flag, an environment variable or a configuration field cannot work."""
    NAME_TAKEN = 3
    """The name (or the port) belongs to a live run."""
    NO_SPACE = 4
    """The shared memory does not fit, or a limit of the system is too low."""
    NOT_FOUND = 5
    """Nothing of that name to attach to, or another layout."""
    BOOT_FAILED = 6
    """A role ended or hung before its first heartbeat."""
    ROLE_LOST = 7
    """A role died while running; running requests got error records."""


class TokenpipeError(Exception):
    """Root of all errors of tokenpipe."""

    exit_code = ExitCode.FAILED


class ConfigError(TokenpipeError):
    """A configuration field has a value that cannot work."""

    exit_code = ExitCode.BAD_CONFIG

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(f"{field} = {_shown(value)}: {why}")
        self.field, self.value, self.why = field, value, why


def _shown(value: object) -> str:
    """The value for a message, cut where it is long; Python refuses to write very long numbers."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


class LimitError(TokenpipeError):
    """A limit that the system sets this process is too low."""

    exit_code = ExitCode.NO_SPACE

    def __init__(self, what: str, needed: int, limit: int, setting: str) -> None:
        super().__init__(
            f"start: {needed} {what} are needed, {limit} are allowed; raise it ({setting})"
        )
        self.what, self.needed, self.limit, self.setting = what, needed, limit, setting


class SegmentError(TokenpipeError):
    """The shared memory cannot be used."""

    exit_code = ExitCode.NOT_FOUND

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class SegmentExistsError(SegmentError):
    """The name is taken and its owner lives."""

    exit_code = ExitCode.NAME_TAKEN

    def __init__(self, name: str, owner_pid: int) -> None:
        super().__init__(
            name, f'create "{name}": pid {owner_pid} runs a pipeline of that name; choose another'
        )
        self.owner_pid = owner_pid


class SegmentSpaceError(SegmentError):
    """The shared memory does not fit into /dev/shm."""

    exit_code = ExitCode.NO_SPACE

    def __init__(self, name: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            name,
            f'create "{name}": {needed_bytes} bytes are needed in /dev/shm, {free_bytes} are free; '
            "lower --ring-slots, --output-slots, --max-num-seqs or --top-logprobs, or enlarge it "
            "(docker: --shm-size)",
        )
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class SegmentMemoryError(SegmentError):
    """A process may not map the shared memory: its address space is limited."""

    exit_code = ExitCode.NO_SPACE

    def __init__(self, name: str, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            name,
            f'map "{name}": {needed_bytes} bytes do not fit into the address space of this process '
            f"(RLIMIT_AS: {limit_bytes} bytes); raise it (ulimit -v), or lower "
            "--ring-slots, --output-slots, --max-num-seqs or --top-logprobs",
        )
        self.needed_bytes, self.limit_bytes = needed_bytes, limit_bytes


class SegmentMissingError(SegmentError):
    """There is nothing to attach to, also after the wait."""

    def __init__(self, name: str, waited_s: float) -> None:
        super().__init__(
            name, f'attach "{name}": no live pipeline of that name within {waited_s:g} s'
        )
        self.waited_s = waited_s


class AdoptionError(SegmentError):
    """A pipeline whose coordinator died cannot be taken over: the configurations differ."""

    exit_code = ExitCode.NAME_TAKEN

    def __init__(self, name: str, fields: list[str]) -> None:
        super().__init__(
            name,
            f'take over "{name}": its processes run with another {", ".join(fields)}; give the '
            "same, or stop them",
        )
        self.fields = fields


class LayoutMismatchError(SegmentError):
    """Magic, layout version or sizes differ from what this build writes."""

    def __init__(self, name: str, expected: object, found: object) -> None:
        super().__init__(
            name, f'attach "{name}": found {found}, this build has {expected}; stop the old run'
        )
        self.expected, self.found = expected, found


class PartyExistsError(TokenpipeError):
    """The pipeline has its one client, writer or role of that kind already."""

    exit_code = ExitCode.NAME_TAKEN

    def __init__(self, name: str, party: str, pid: int, why: str = "") -> None:
        super().__init__(f'attach "{name}" as {party}: pid {pid} is its {party}{why}')
        self.name, self.party, self.pid = name, party, pid


class PortInUseError(TokenpipeError):
    """The HTTP port belongs to somebody else."""

    exit_code = ExitCode.NAME_TAKEN

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"listen on {host}:{port}: the port is in use; choose another or --health-port 0"
        )
        self.host, self.port = host, port


class ChildError(TokenpipeError):
    """A role's process cannot go on."""

    def __init__(self, role: str, text: str) -> None:
        super().__init__(text)
        self.role = role


class ChildBootError(ChildError):
    """A role ended, or stayed silent too long, before its first heartbeat."""

    exit_code = ExitCode.BOOT_FAILED

    def __init__(self, role: str, pid: int, how: str) -> None:
        super().__init__(role, f"start {role} (pid {pid}): {how} before its first heartbeat")
        self.pid, self.how = pid, how


class RoleLostError(ChildError):
    """A role died while the pipeline ran."""

    exit_code = ExitCode.ROLE_LOST

    def __init__(self, role: str, pid: int, how: str) -> None:
        super().__init__(role, f"{role} (pid {pid}) {how}")
        self.pid, self.how = pid, how


class PipelineStartError(TokenpipeError):
    """The coordinator ended before it was ready; `exit_code` tells why."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class PipelineGoneError(TokenpipeError):
    """The pipeline has ended: nothing can be submitted, saved or read any more."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f'pipeline "{name}" is gone: {reason}')
        self.name, self.reason = name, reason


class DrainingError(TokenpipeError):
    """The pipeline takes nothing new: it is draining."""

    def __init__(self, name: str) -> None:
        super().__init__(f'submit to "{name}": the pipeline is draining and takes nothing new')
        self.name = name


class RequestError(TokenpipeError):
    """A request is refused; the others go on."""

    def __init__(self, request_id: str, text: str) -> None:
        super().__init__(text)
        self.request_id = request_id


class InvalidRequestError(RequestError):
    """A field of the request has a value that cannot work."""

    def __init__(self, request_id: str, field: str, value: object, why: str) -> None:
        super().__init__(request_id, f"request {request_id!r}: {field} = {value!r}: {why}")
        self.field, self.value, self.why = field, value, why


class DuplicateRequestError(RequestError):
    """A request of that id is still running."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            request_id, f"request {request_id!r}: a request of that id has not had its final yet"
        )


class NoFreeRowError(RequestError):
    """No row (or not enough blocks) came free within the time."""

    def __init__(self, request_id: str, waited_s: float, max_num_seqs: int) -> None:
        super().__init__(
            request_id,
            f"request {request_id!r}: none of {max_num_seqs} rows came free within {waited_s:g} s",
        )
        self.waited_s, self.max_num_seqs = waited_s, max_num_seqs


class RowBusyError(RequestError):
    """The wanted row's former request has not ended within the time."""

    def __init__(self, request_id: str, row: int, waited_s: float) -> None:
        super().__init__(request_id, f"request {request_id!r}: row {row} is taken")
        self.row, self.waited_s = row, waited_s


class NotEnoughBlocksError(RequestError):
    """The request wants more blocks than the pool has."""

    def __init__(self, request_id: str, wanted: int, num_blocks: int) -> None:
        super().__init__(
            request_id,
            f"request {request_id!r}: {wanted} blocks wanted, the pool has {num_blocks} in all",
        )
        self.wanted, self.num_blocks = wanted, num_blocks


class NoFreeBlocksError(RequestError):
    """Not enough KV blocks came free within the time."""

    def __init__(self, request_id: str, wanted: int, waited_s: float) -> None:
        super().__init__(
            request_id,
            f"request {request_id!r}: {wanted} blocks did not come free within {waited_s:g} s",
        )
        self.wanted, self.waited_s = wanted, waited_s


class NotAcknowledgedError(RequestError):
    """The engine has not let go of a preempted request within the time."""

    def __init__(self, request_id: str, waited_s: float) -> None:
        super().__init__(
            request_id,
            f"resume {request_id!r}: the engine has not acknowledged within {waited_s:g} s",
        )
        self.waited_s = waited_s


class RequestAbortedError(RequestError):
    """The request was aborted while it waited for a row."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, f"request {request_id!r} was aborted before it had a row")


class UnknownRequestError(RequestError):
    """No request of that id is known to this handle."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, f"request {request_id!r}: this handle knows none of that id")


class DeliveryModeError(TokenpipeError):
    """A handle delivers by batches or by streams; the first call decided."""

    def __init__(self, chosen: str, asked: str) -> None:
        super().__init__(f"this handle delivers by {chosen}; {asked} needs a handle of its own")
        self.chosen, self.asked = chosen, asked


class StreamTakenError(RequestError):
    """Another stream() reads the request's outputs."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, f"request {request_id!r}: another stream() is reading it")


class TimeLimitError(TokenpipeError, ValueError):
    """A time limit that is no number of seconds."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__(f"{name} = {value!r}: must be a number of seconds, 0 or more")
        self.name, self.value = name, value


class SyncTimeoutError(TokenpipeError):
    """sync() ran out of time; `stage` names who has not moved on."""

    def __init__(self, stage: str, waited_s: float, detail: str) -> None:
        super().__init__(f"sync: {stage} did not get there within {waited_s:g} s: {detail}")
        self.stage, self.waited_s, self.detail = stage, waited_s, detail


class OpArgumentError(TokenpipeError, ValueError):
    """An output op got a tensor of a wrong shape, dtype, device or value. Nothing was saved."""

    def __init__(self, argument: str, text: str) -> None:
        super().__init__(text)
        self.argument = argument


class QueueError(TokenpipeError, OSError):
    """The kernel refused something about a System V queue; `errno` says why."""

    def __init__(self, errno: int, text: str) -> None:
        super().__init__(text)
        self.errno, self.text = errno, text


class QueueLimitError(TokenpipeError):
    """The kernel's limits are too small for the messages of an op: the sender would lose each."""

    exit_code = ExitCode.NO_SPACE

    def __init__(self, op: str, needed: int, limits: dict[str, int], found: dict[str, int]) -> None:
        wanted = ", ".join(f"{name}={value}" for name, value in limits.items())
        now = ", ".join(f"{name}={value}" for name, value in found.items())
        super().__init__(
            f"a message of {op} has {needed} bytes, which do not fit the kernel's limits ({now}): "
            f"every token would be lost. Set {wanted} (sysctl -w), or let the worker use "
            "FD_USE_GET_SAVE_OUTPUT_V1=1 and --source zmq"
        )
        self.op, self.needed, self.limits, self.found = op, needed, limits, found


class QueueTakenError(TokenpipeError):
    """Another live pipeline reads the same System V queue: each would get half of the tokens."""

    exit_code = ExitCode.NAME_TAKEN

    def __init__(self, key: int, queue_id: int, other: str, other_queue_id: int) -> None:
        super().__init__(
            f"queue id {queue_id} gives the System V key {key & 0xFFFFFFFF:#010x}, which pipeline "
            f"{other!r} already reads for queue id {other_queue_id}: choose another port"
        )
        self.key, self.queue_id = key, queue_id
        self.other, self.other_queue_id = other, other_queue_id


class SocketTakenError(TokenpipeError):
    """Somebody listens on the socket file already: FastDeploy's own reader, or another pipeline."""

    exit_code = ExitCode.NAME_TAKEN

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} belongs to a live reader: of two readers each would get a part")
        self.path = path


class OpsBuildError(TokenpipeError, ImportError):
    """The Paddle operators cannot be compiled or loaded here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class WrongSourceError(TokenpipeError):
    """A pipeline's steps come another way than the caller wants to save them."""

    def __init__(self, name: str, source: str, how: str) -> None:
        super().__init__(f"pipeline {name!r} has --source {source}: {how}")
        self.name, self.source, self.how = name, source, how


class CudaError(TokenpipeError):
    """A call of the CUDA driver failed, or cannot be made; `code` is the driver's, 0 without one.

    Raised by the call that met it or by the next one. After a failure that left a step half done
    every further call raises it: close the writer and attach another.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(text)
        self.call, self.code = call, code


_native.set_errors(OpArgumentError, QueueError, CudaError)


def in_words(error: BaseException) -> str:
    """Returns the text of an error; of one that is not ours with its kind, without which many a
    text means nothing."""
    return str(error) if isinstance(error, TokenpipeError) else f"{type(error).__name__}: {error}"


def to_json(error: Exception) -> str:
    """Returns an error with its facts as one JSON object, for another process to raise again."""
    facts = {}
    if isinstance(error, TokenpipeError):
        names = inspect.signature(type(error).__init__).parameters
        facts = {n: getattr(error, n) for n in names if n != "self" and hasattr(error, n)}
    return json.dumps(
        {"event": "failed", "error": type(error).__name__, "text": in_words(error), "facts": facts}
    )


def from_json(text: str) -> TokenpipeError:
    """Returns the error of `to_json`, of the same class where its facts allow."""
    told = json.loads(text)
    kind = globals().get(told["error"])
    if isinstance(kind, type) and issubclass(kind, TokenpipeError):
        wanted = [n for n in inspect.signature(kind.__init__).parameters if n != "self"]
        if set(wanted) <= set(told["facts"]):
            return kind(**{n: told["facts"][n] for n in wanted})
    return PipelineStartError(str(told["text"]), int(ExitCode.FAILED))
