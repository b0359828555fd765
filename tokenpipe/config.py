"""PipelineConfig: every setting, defined once.

A field's name is its flag (`ring_slots` -> --ring-slots) and its environment variable
(TOKENPIPE_RING_SLOTS); a flag wins over the environment, the environment over the default. Names
carry units: _s seconds, _us microseconds, _bytes bytes.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenpipe import _native
from tokenpipe.errors import ConfigError

if TYPE_CHECKING:
    import argparse

_log = logging.getLogger("tokenpipe.config")

NAME_PATTERN = r"[A-Za-z0-9_.-]{1,64}"
_NAME = re.compile(NAME_PATTERN)
_HOST = re.compile(r"[A-Za-z0-9_.:%-]+")
_ENVIRONMENT = "TOKENPIPE_"
SOURCES = ("shm", "sysv", "zmq", "cuda-ipc")
"""In the order of TP_SOURCE_*."""
SYSV_OPS = {
    "get_output": 0,
    "get_output_ep": 0,
    "get_output_topk": 1,
    "speculate_get_output": 2,
    "speculate_get_output_topk": 3,
}
"""Ops that read FastDeploy's queue, and the variant of the message that each reads."""
_SYSV_COLUMNS, _SYSV_DRAFT_TOKENS = 21, 6
SYSV_ROWS = {0: 512, 1: 512, 2: 256, 3: 512}
"""Rows of a message of each variant."""
_OTHER_VARIABLES = ("DEBUG", "DISABLE", "FAULT", "SANITIZE", "SHARED", "TEST_MARK")
"""Names behind the prefix that are no fields: of the build, the tests, an engine's integration."""
_SERVICE_VARIABLE = re.compile(r"PORT|PORT_\d+_.*|SERVICE_.*")
"""What Kubernetes sets in every pod beside a Service that is called tokenpipe."""
_MAX_SOCKET_PATH_BYTES = 107
_MAX_TEXT_BYTES = 255
"""Of a host or a prefix: with all else it fits the segment's header."""


def _setting(default: Any, group: str, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": help, **more})


@dataclass(frozen=True)
class PipelineConfig:
    """Settings of one pipeline. Raises ConfigError (field, value, why) for values that cannot
    work."""

    name: str = _setting(
        "", "pipeline", "name of the pipeline; empty: a random one", shown="random"
    )
    num_decoders: int = _setting(
        0, "pipeline", "decoder processes; 0: from the usable cores (1 below 4 cores, else 2)"
    )

    max_num_seqs: int = _setting(256, "sizes", "rows of a batch")
    top_logprobs: int = _setting(20, "sizes", "candidates a token may carry beside the sampled one")
    max_draft_tokens: int = _setting(
        1, "sizes", "tokens a row may emit in one step, the bonus token included"
    )
    max_eos_ids: int = _setting(16, "sizes", "end tokens that one request may name")
    max_request_id_bytes: int = _setting(
        128, "sizes", "bytes of a request id in UTF-8; a multiple of 8"
    )
    num_blocks: int = _setting(0, "sizes", "KV blocks of the pool; 0: blocks are not managed here")
    block_size: int = _setting(64, "sizes", "tokens that one block holds")
    max_pooling_floats: int = _setting(
        0, "sizes", "floats of a pooling vector; 0: this pipeline has no pooling outputs"
    )
    command_slots: int = _setting(
        256, "sizes", "commands in flight, submits that wait for a row included"
    )

    ring_slots: int = _setting(64, "rings", "slots of the ring, a power of two")
    ring_bytes: int = _setting(
        0, "rings", "size of the ring instead of --ring-slots: the most slots that fit into it"
    )
    output_slots: int = _setting(64, "rings", "frames of each output ring, a power of two")
    source_slots: int = _setting(16, "rings", "steps of the engine's own ring, a power of two")
    spin_us: float = _setting(
        1.0, "rings", "microseconds of busy waiting before a process yields and sleeps"
    )

    source: str = _setting(
        "shm",
        "source",
        "where steps come from: shm (the engine's writer), cuda-ipc (also fetched from its GPU), "
        "sysv (FastDeploy's System V queue) or zmq (its socket, with FD_USE_GET_SAVE_OUTPUT_V1=1)",
        choices=SOURCES,
    )
    sysv_op: str = _setting(
        "get_output",
        "source",
        "the op that reads what FastDeploy's worker saves",
        choices=tuple(SYSV_OPS),
    )
    sysv_generation: str = _setting(
        "g3",
        "source",
        "of FastDeploy's ops: g1, g2 (keys by ftok), g3 (by custom_ftok), g4 (packed headers)",
        choices=("g1", "g2", "g3", "g4"),
    )
    sysv_queue_id: int = _setting(
        0, "source", "the engine worker queue's port; 0: INFERENCE_MSG_QUEUE_ID, or 1"
    )
    sysv_folder: str = _setting(
        "",
        "source",
        "folder of the key; empty: /dev/shm, of speculate_get_output the working folder",
        shown="by the op",
    )
    sysv_leftovers: str = _setting(
        "drain",
        "source",
        "messages of an earlier run: drain (and count) or keep them",
        choices=("drain", "keep"),
    )
    zmq_socket: str = _setting(
        "",
        "source",
        "socket file that FastDeploy's worker sends to; empty: "
        "/dev/shm/get_save_output_rank0_PORT.socket, the port being "
        "INFERENCE_MSG_QUEUE_ID, or 1",
        shown="by the port",
    )
    zmq_max_message_bytes: int = _setting(
        1 << 26, "source", "a message that is larger is not received"
    )
    quarantine_s: float = _setting(
        10.0,
        "source",
        "a row that the engine did not let go of is given out again after so long, or once it is "
        "shown empty",
    )

    heartbeat_interval_s: float = _setting(0.1, "supervision", "longest time between heartbeats")
    stall_timeout_s: float = _setting(
        30.0, "supervision", "without progress for so long is 'stalled'; 0: never"
    )
    max_restarts: int = _setting(
        8, "supervision", "replacements of one role within --restart-window-s; then it fails"
    )
    restart_window_s: float = _setting(60.0, "supervision", "see --max-restarts")
    restart_backoff_s: float = _setting(
        0.05, "supervision", "pause before a second replacement; it doubles with each further one"
    )
    start_timeout_s: float = _setting(
        30.0, "supervision", "time for every role to give its first heartbeat"
    )
    drain_timeout_s: float = _setting(
        5.0, "supervision", "time for running requests to end after SIGTERM"
    )
    orphan_grace_s: float = _setting(
        3.0, "supervision", "roles end after so long without a coordinator"
    )
    abort_timeout_s: float = _setting(
        5.0, "supervision", "an aborted row waits so long for the engine's acknowledgement"
    )

    prefill_timeout_s: float = _setting(
        30.0, "supervision", "a prefill instance's row waits so long for prefill_done()"
    )

    health_host: str = _setting("127.0.0.1", "http", "address of the health endpoint")
    health_port: int = _setting(0, "http", "port of the health endpoint; 0: any free one")

    role: str = _setting(
        "mixed",
        "engine",
        "what this instance does: mixed, prefill or decode",
        choices=("mixed", "prefill", "decode"),
    )
    speculative_method: str = _setting(
        "none",
        "engine",
        "how the engine drafts, for the statistics: none, mtp or ngram",
        choices=("none", "mtp", "ngram"),
    )
    num_speculative_tokens: int = _setting(
        0, "engine", "drafts per row and step; with a method 1 to max_draft_tokens - 1"
    )
    enable_draft_logprob: bool = _setting(
        False, "engine", "deliver the logprobs of drafts with their target's output"
    )
    draft_wait_s: float = _setting(
        0.05, "engine", "a target's output waits so long for its drafts' logprobs"
    )
    internal_adapter: bool = _setting(
        False, "engine", "leave end tokens out of the outputs, as FastDeploy's adapter wants it"
    )

    report_acknowledgements: bool = _setting(
        False,
        "engine",
        "tell the client when the engine lets go of a row, and of every message, with (zmq) the "
        "rows that it names without a token: its scheduler acts by itself, and gets batches "
        "without rows",
    )

    metrics_prefix: str = _setting(
        "fastdeploy:", "logs", "prefix of the metrics that FastDeploy's dashboards know"
    )
    log_level: str = _setting(
        "info", "logs", "what is logged", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            kind = type(f.default)
            if kind is float and type(value) is int:
                object.__setattr__(self, f.name, _as_float(f.name, value))
            elif type(value) is not kind:
                raise ConfigError(f.name, value, f"must be of type {kind.__name__}")
            choices = f.metadata.get("choices")
            if choices is not None and value not in choices:
                raise ConfigError(f.name, value, f"must be one of {', '.join(choices)}")
        if not self.name:
            object.__setattr__(self, "name", f"tp-{secrets.token_hex(8)}")
        if not self.num_decoders:
            object.__setattr__(self, "num_decoders", min(default_decoders(), self.max_num_seqs))
        if self.source == "sysv":
            self._find_queue()
        if self.source == "zmq" and not self.zmq_socket:
            path = f"/dev/shm/get_save_output_rank0_{self._queue_id('zmq_socket')}.socket"
            object.__setattr__(self, "zmq_socket", path)
        self._check()
        if self.ring_bytes:
            object.__setattr__(self, "ring_slots", self._slots_that_fit())

    def _check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError("name", self.name, "1 to 64 letters, digits, '_', '.' and '-'")
        limits = {
            "max_num_seqs": (1, 65536),
            "num_decoders": (1, min(_native.MAX_DECODERS, self.max_num_seqs)),
            "top_logprobs": (0, 1024),
            "max_draft_tokens": (1, _native.MAX_DRAFT_TOKENS),
            "max_eos_ids": (1, 4096),
            "max_request_id_bytes": (8, 4096),
            "num_blocks": (0, 2**26),
            "block_size": (1, 65536),
            "command_slots": (16, 65536),
            "max_pooling_floats": (0, 2**20),
            "num_speculative_tokens": (0, _native.MAX_DRAFT_TOKENS - 1),
            "draft_wait_s": (0, 1e6),
            "ring_slots": (2, 65536),
            "output_slots": (2, 65536),
            "source_slots": (2, 65536),
            "ring_bytes": (0, 2**40),
            "health_port": (0, 65535),
            "spin_us": (0, 1e6),
            "heartbeat_interval_s": (0.001, 10),
            "stall_timeout_s": (0, 1e6),
            "start_timeout_s": (0.1, 1e6),
            "max_restarts": (0, 10**9),
            "restart_window_s": (0, 1e6),
            "restart_backoff_s": (0, 60),
            "drain_timeout_s": (0, 1e6),
            "orphan_grace_s": (0, 1e6),
            "abort_timeout_s": (0, 1e6),
            "prefill_timeout_s": (0, 1e6),
            "sysv_queue_id": (0, 2**20 - 1),
            "zmq_max_message_bytes": (4096, 2**31 - 1),
            "quarantine_s": (0, 1e6),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(name, value, f"must be {low} to {high}")
        for name in ("ring_slots", "output_slots", "source_slots"):
            value = getattr(self, name)
            if value & (value - 1):
                below = 1 << (value.bit_length() - 1)
                raise ConfigError(name, value, f"must be a power of two: {below} or {2 * below}")
        if self.max_request_id_bytes % 8:
            raise ConfigError(
                "max_request_id_bytes", self.max_request_id_bytes, "must be a multiple of 8"
            )
        if self.ring_bytes and self.ring_slots != _default("ring_slots"):
            raise ConfigError("ring_bytes", self.ring_bytes, "give --ring-slots or it, not both")
        shortest = 4 * self.heartbeat_interval_s
        if 0 < self.stall_timeout_s < shortest:
            raise ConfigError(
                "stall_timeout_s",
                self.stall_timeout_s,
                f"must be 0 or at least 4 x heartbeat_interval_s = {shortest:g}",
            )
        self._check_speculation()
        self._check_source()
        if not _HOST.fullmatch(self.health_host):
            why = "must be an address or a host's name; 0.0.0.0 for every network of this machine"
            raise ConfigError("health_host", self.health_host, why)
        for name in ("health_host", "metrics_prefix", "sysv_folder"):
            text, most = getattr(self, name), _MAX_TEXT_BYTES
            if not text.isprintable():
                raise ConfigError(name, text, "has a character that cannot be shown")
            if len(text.encode()) > most:
                raise ConfigError(name, text, f"must have at most {most} bytes")
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*|", self.metrics_prefix):
            raise ConfigError("metrics_prefix", self.metrics_prefix, "no prefix of a metric's name")

    def _check_speculation(self) -> None:
        n, most = self.num_speculative_tokens, self.max_draft_tokens - 1
        if self.speculative_method == "none":
            if n:
                raise ConfigError("num_speculative_tokens", n, "needs a --speculative-method")
            if self.enable_draft_logprob:
                raise ConfigError("enable_draft_logprob", True, "needs a --speculative-method")
        elif not 1 <= n <= most:
            why = f"must be 1 to max_draft_tokens - 1 = {most}: a step holds the bonus token too"
            raise ConfigError("num_speculative_tokens", n, why)

    @property
    def sysv_variant(self) -> int:
        """Layout of the messages of `sysv_op` (tp::sysv::Variant)."""
        return SYSV_OPS[self.sysv_op]

    def _find_queue(self) -> None:
        """Fills in what FastDeploy's ops take from their surroundings."""
        if not self.sysv_queue_id:
            object.__setattr__(self, "sysv_queue_id", self._queue_id("sysv_queue_id"))
        if not self.sysv_folder:
            is_here = self.sysv_op == "speculate_get_output"
            object.__setattr__(self, "sysv_folder", os.getcwd() if is_here else "/dev/shm")

    @staticmethod
    def _queue_id(field_name: str) -> int:
        text = os.environ.get("INFERENCE_MSG_QUEUE_ID", "1")
        if not text.isdecimal():
            why = f"INFERENCE_MSG_QUEUE_ID is {text!r}, must be a whole number"
            raise ConfigError(field_name, text, why)
        return int(text)

    def _check_source(self) -> None:
        for f in dataclasses.fields(self):
            owner = f.name.split("_")[0]
            is_foreign = owner in SOURCES and owner != self.source
            if "_" in f.name and is_foreign and getattr(self, f.name) != f.default:
                raise ConfigError(f.name, getattr(self, f.name), f"needs --source {owner}")
        if self.has_writer and self.quarantine_s != _default("quarantine_s"):
            raise ConfigError("quarantine_s", self.quarantine_s, "needs --source sysv or zmq")
        if self.source == "sysv":
            self._check_sysv()
        if self.source == "zmq":
            self._check_zmq()

    def _check_zmq(self) -> None:
        path, most = self.zmq_socket, _MAX_SOCKET_PATH_BYTES
        if not path.startswith("/") or len(path.encode()) > most:
            why = f"must be an absolute path of at most {most} bytes, as a socket's address is"
            raise ConfigError("zmq_socket", path, why)

    def _check_sysv(self) -> None:
        op, rows = self.sysv_op, SYSV_ROWS[self.sysv_variant]
        if not self.sysv_folder.startswith("/"):
            raise ConfigError("sysv_folder", self.sysv_folder, "must be an absolute path")
        if self.max_num_seqs > rows:
            raise ConfigError(
                "max_num_seqs", self.max_num_seqs, f"a message of {op} has at most {rows} rows"
            )
        if self.max_pooling_floats:
            raise ConfigError(
                "max_pooling_floats", self.max_pooling_floats, "this queue carries no vectors"
            )
        if op.endswith("_topk") and self.top_logprobs >= _SYSV_COLUMNS:
            why = f"a message of {op} has {_SYSV_COLUMNS - 1} candidates a token; zmq carries more"
            raise ConfigError("top_logprobs", self.top_logprobs, why)
        if op.startswith("speculate") and not 2 <= self.max_draft_tokens <= _SYSV_DRAFT_TOKENS:
            why = f"{op} needs 2 to {_SYSV_DRAFT_TOKENS}: drafts per step + 1"
            raise ConfigError("max_draft_tokens", self.max_draft_tokens, why)
        if self.enable_draft_logprob and op != "speculate_get_output_topk":
            why = "only messages of speculate_get_output_topk carry them"
            raise ConfigError("enable_draft_logprob", True, why)

    def _slots_that_fit(self) -> int:
        slot_bytes = self.plan()["slot_bytes"]
        slots = self.ring_bytes // slot_bytes
        if slots < 2:
            raise ConfigError(
                "ring_bytes",
                self.ring_bytes,
                f"a slot is {slot_bytes} bytes ({self.max_num_seqs} rows x {self.max_draft_tokens} "
                f"tokens x {self.top_logprobs + 1} candidates) and a ring has at least 2",
            )
        return 1 << (min(slots, 65536).bit_length() - 1)

    def sizes(self) -> dict[str, int]:
        """Returns the sizes that decide the layout of both segments."""
        names = (
            "max_num_seqs top_logprobs max_draft_tokens num_decoders ring_slots output_slots "
            "source_slots command_slots num_blocks block_size max_eos_ids max_request_id_bytes "
            "max_pooling_floats"
        )
        sizes = {name: getattr(self, name) for name in names.split()}
        sizes["raw_bytes"] = 0
        if not self.has_writer:  # nobody writes into the source's own ring
            sizes["source_slots"] = 2
        if self.source == "sysv":
            sizes["raw_bytes"] = int(_native.raw_message_bytes(self.sysv_variant))
        return sizes

    @property
    def source_kind(self) -> int:
        """TP_SOURCE_*."""
        return SOURCES.index(self.source)

    @property
    def has_writer(self) -> bool:
        """Whether the engine saves through our EngineWriter, which has generations and a lock."""
        return self.source in ("shm", "cuda-ipc")

    def options(self) -> dict[str, int]:
        """Returns what a decoder must know beside the sizes."""
        return {
            "role": ("mixed", "prefill", "decode").index(self.role),
            "internal_adapter": int(self.internal_adapter),
            "enable_draft_logprob": int(self.enable_draft_logprob),
            "num_speculative_tokens": self.num_speculative_tokens,
            "source": self.source_kind,
            "report_acknowledgements": int(self.report_acknowledgements),
        }

    def plan(self) -> dict[str, int]:
        """Returns the bytes and offsets that follow from the sizes."""
        return dict(_native.plan(self.sizes()))

    def to_json(self) -> str:
        """Returns the configuration as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PipelineConfig:
        """Returns the configuration of `to_json`, checked again. Raises ConfigError."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("JSON", text[:40], str(error)) from None
        if not isinstance(values, dict):
            raise ConfigError("JSON", text[:40], "a configuration is an object")
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError("JSON", name, f"no such field{_meant(name, known)}")
        if values.get("ring_bytes"):
            values["ring_slots"] = _default("ring_slots")  # it follows from the bytes again
        return cls(**values)

    def differences(self, other: PipelineConfig, but: tuple[str, ...]) -> list[str]:
        """Returns the names of the fields in which two configurations differ, `but` apart."""
        names = (f.name for f in dataclasses.fields(self) if f.name not in but)
        return [n for n in names if getattr(self, n) != getattr(other, n)]

    def digest(self) -> str:
        """Returns a hash by which two processes tell whether they have the same configuration."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Adds one flag per field, in groups, so that an engine's own parser can carry them."""
        groups: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            name = f.metadata["group"]
            if name not in groups:
                groups[name] = parser.add_argument_group(f"tokenpipe: {name}")
            default = f.metadata.get("shown", f.default)
            groups[name].add_argument(
                "--" + f.name.replace("_", "-"),
                dest=f.name,
                type=str,
                default=None,
                **({"nargs": "?", "const": "true"} if isinstance(f.default, bool) else {}),
                metavar=type(f.default).__name__.upper(),
                help=f"{f.metadata['help']} (default {default}; {_ENVIRONMENT}{f.name.upper()})",
            )

    @classmethod
    def from_cli_args(
        cls, args: argparse.Namespace, environment: Mapping[str, str] | None = None
    ) -> PipelineConfig:
        """Returns the configuration of parsed flags, the environment and the defaults, in that
        order. `environment` defaults to the process's own."""
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        if any(getattr(args, f.name, None) is None for f in dataclasses.fields(cls)):
            warn_of_misspelt(environment)
        for f in dataclasses.fields(cls):
            text = getattr(args, f.name, None)
            if text is None:
                text = environment.get(_ENVIRONMENT + f.name.upper())
            if text is not None:
                values[f.name] = _parsed(f.name, str(text), type(f.default))
        # A flag for the ring's size wins over the environment's other word for it.
        for flag, other in (("ring_slots", "ring_bytes"), ("ring_bytes", "ring_slots")):
            if getattr(args, flag, None) is not None and getattr(args, other, None) is None:
                values.pop(other, None)
        return cls(**values)

    @classmethod
    def with_environment(
        cls,
        fixed: Mapping[str, Any],
        defaults: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> PipelineConfig:
        """Returns a configuration of values that an engine decides (`fixed`), else of the
        environment, else of `defaults`, else of ours."""
        environment = os.environ if environment is None else environment
        values = dict(defaults)
        for f in dataclasses.fields(cls):
            text = environment.get(_ENVIRONMENT + f.name.upper())
            if text is not None:
                values[f.name] = _parsed(f.name, text, type(f.default))
        return cls(**{**values, **fixed})

    def to_cli_args(self) -> list[str]:
        """Returns flags that give this configuration again, whatever the environment says."""
        args = []
        for f in dataclasses.fields(self):
            # Given in bytes, the slots follow; both together would be refused.
            follows = f.name == "ring_slots" and self.ring_bytes
            value = f.default if follows else getattr(self, f.name)
            args.append(f"--{f.name.replace('_', '-')}={value}")
        return args


def warn_of_misspelt(environment: Mapping[str, str]) -> None:
    """Logs a warning for each variable that has our prefix and that nobody reads.

    It is no error: others may set variables of that prefix for a purpose of their own.
    """
    fields = [f.name.upper() for f in dataclasses.fields(PipelineConfig)]
    for variable in sorted(environment):
        name = variable.removeprefix(_ENVIRONMENT)
        is_known = name in fields or name in _OTHER_VARIABLES or _SERVICE_VARIABLE.fullmatch(name)
        if variable.startswith(_ENVIRONMENT) and not is_known:
            meant = _meant(name, fields, _ENVIRONMENT)
            _log.warning("environment variable %s is not known and is ignored%s", variable, meant)


def _meant(name: str, known: list[str], prefix: str = "") -> str:
    """Returns a question for the nearest known name, if one is near."""
    nearest = difflib.get_close_matches(name, known, 1, 0.7)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


def _as_float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(name, value, "is larger than any number of seconds") from None


def _default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(PipelineConfig) if f.name == name)


def _parsed(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        truth = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in truth:
            raise ConfigError(name, text, "must be true or false")
        return truth[text.lower()]
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(name, text, f"must be {wanted}") from None


def fault_of(role: str, epoch: int) -> tuple[str, int, int] | None:
    """Returns (point, nth, signal) of a fault that a test wants in this life of a role.

    TOKENPIPE_FAULT = "ROLE[/EPOCH]:POINT:NTH:SIGNAL", more of them separated by commas; the points
    are those of cuda_ops/fault.hpp, and the first epoch is 1.
    """
    for spec in filter(None, os.environ.get(_ENVIRONMENT + "FAULT", "").split(",")):
        who, point, nth, signum = spec.split(":")
        wanted, _, life = who.partition("/")
        if wanted == role and int(life or 1) == epoch:
            return point, int(nth), int(signum)
    return None


def cuda_library() -> str:
    """Returns the name of the CUDA driver's library; TOKENPIPE_CUDA_LIBRARY names another."""
    return os.environ.get(_ENVIRONMENT + "CUDA_LIBRARY", "libcuda.so.1")


def is_plugin_disabled() -> bool:
    """Whether TOKENPIPE_DISABLE asks for FastDeploy's own token processor. Raises ConfigError."""
    return bool(_parsed("disable", os.environ.get(_ENVIRONMENT + "DISABLE") or "0", bool))


def usable_cores(cpu_max: str = "/sys/fs/cgroup/cpu.max") -> float:
    """Returns the cores that this process may use: its affinity, cut by the cgroup's quota
    (B83)."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        with open(cpu_max) as f:
            quota, period = f.read().split()
    except (OSError, ValueError):
        return cores  # no cgroup v2 quota to read here
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def default_decoders() -> int:
    """Returns how many decoders suit the usable cores: more than one pays from four cores on."""
    return 1 if usable_cores() < 4 else 2
