"""sources/zmq.py and all that follows from a wire without sequence and generations: real sockets,
real processes, and a peer that sends what FastDeploy's worker would."""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from stand_ins import candidates, record
from zmq_peer import Worker

import tokenpipe as tp
from support import wait_until
from tokenpipe.errors import ConfigError, ExitCode, SocketTakenError, WrongSourceError
from tokenpipe.objects import GAP_TEXT
from tokenpipe.records import AnyOutput
from tokenpipe.socket_file import remove_stale


class Setup:
    """A running pipeline, its worker, and the outputs so far."""

    def __init__(self, leaves_stale_file: bool = False, **settings: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tpz")
        self.path = f"{self.folder.name}/rank0.socket"
        if leaves_stale_file:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(self.path)
        defaults: dict[str, Any] = {
            "source": "zmq",
            "zmq_socket": self.path,
            "max_num_seqs": 8,
            "top_logprobs": 4,
            "max_draft_tokens": 3,
            "max_pooling_floats": 8,
            "num_decoders": 2,
            "abort_timeout_s": 60.0,
        }
        self.pipe = tp.Pipeline(tp.PipelineConfig(**(defaults | settings)))
        self.worker = Worker(self.path)
        self.outputs: list[AnyOutput] = []

    def submit(self, name: str, **more: Any) -> int:
        request = tp.Request(name, prompt_token_ids=[1], eos_token_ids=[2], **more)
        return self.pipe.submit(request).row

    def until_ended(self, count: int) -> dict[str, AnyOutput]:
        """Reads until `count` requests have ended; returns their last outputs."""
        return wait_until(lambda: self._ended(count), timeout_s=60, describe=lambda: self.outputs)

    def until_tokens(self, count: int) -> list[int]:
        """Reads until `count` tokens have come."""
        return wait_until(lambda: self._tokens(count), timeout_s=60, describe=lambda: self.outputs)

    def _read(self) -> None:
        for batch in self.pipe.batches(timeout_s=0.05):
            self.outputs += batch.objects()

    def _ended(self, count: int) -> dict[str, AnyOutput] | None:
        self._read()
        ended = {o.request_id: o for o in self.outputs if o.finished}
        return ended if len(ended) >= count else None

    def _tokens(self, count: int) -> list[int] | None:
        self._read()
        tokens = [t for o in self.outputs for t in getattr(o.outputs, "token_ids", [])]
        return tokens if len(tokens) >= count else None

    def reader_pid(self) -> int:
        return int(self.pipe.status()["roles"]["reader"]["pid"])

    def counter(self, name: str) -> int:
        return int(self.pipe.status()["counters"][name])

    def close(self) -> None:
        self.worker.close()
        self.pipe.close()
        left = os.listdir(self.folder.name)
        self.folder.cleanup()
        assert not left, "the socket file is removed with its pipeline"


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    try:
        yield setup
    finally:
        setup.close()


# --- what comes out


def test_rows_of_every_kind_end_as_the_wire_says(setup: Setup) -> None:
    names = ["plain", "recovered", "pooled", "with logprobs", "drafted"]
    rows = {name: setup.submit(name, max_tokens=1) for name in names}
    prompt = candidates([[1, 9], [3, 8]], [[0.5, 0.25]] * 2, [1, 2])
    one = candidates([[7, 6, 5, 4, 3]], [[0, -1, -2, -3, -4]], [1])
    setup.worker.send(
        record(rows["plain"], 5),
        record(rows["recovered"], 6),
        record(rows["with logprobs"], 7, logprobs=one, prompt_logprobs=prompt),
    )
    setup.worker.send(record(rows["pooled"], pooler_output=np.array([0.5, 2.0], np.float32)))
    setup.worker.send(record(rows["drafted"], [8, 9, 10]))
    setup.worker.send(record(rows["recovered"], -3), *(record(rows[n], 2) for n in names[3:]))
    setup.worker.send(record(rows["plain"], [11, 2, 12]))
    ended = setup.until_ended(len(names))
    assert {n: o.finish_reason for n, o in ended.items() if n != "pooled"} == {
        "plain": "stop",
        "recovered": "recovery",
        "with logprobs": "stop",
        "drafted": "stop",
    }, "max_tokens is the engine's on this wire"
    tokens: dict[str, list[int]] = {}
    for output in setup.outputs:
        tokens.setdefault(output.request_id, []).extend(getattr(output.outputs, "token_ids", []))
    assert tokens["plain"] == [5, 11, 2]
    assert tokens["recovered"] == [6]
    assert tokens["drafted"] == [8, 9, 10, 2]
    assert ended["pooled"].outputs.data == [0.5, 2.0]  # type: ignore[union-attr]
    first: Any = next(o for o in setup.outputs if o.request_id == "with logprobs")
    assert first.outputs.top_logprobs.logprob_token_ids == [[7, 6, 5, 4, 3]]
    assert first.outputs.logprob == 0.0
    assert first.prompt_logprobs.logprob_token_ids == [[1, 9], [3, 8]]


def test_an_abort_waits_for_its_acknowledgement(setup: Setup) -> None:
    row = setup.submit("a")
    setup.worker.send(record(row, 5))
    setup.until_tokens(1)
    setup.pipe.abort("a")
    assert setup.until_ended(1)["a"].finish_reason == "abort"
    setup.worker.send(record(row, 6))
    wait_until(lambda: setup.counter("dropped_finished") == 1)
    assert setup.pipe.status()["rows"]["live"] == 1, "the engine has not let go of the row"
    setup.worker.send(record(row, -9))
    wait_until(lambda: setup.pipe.status()["rows"]["live"] == 0)


# --- what does not belong there


def test_hostile_messages_are_counted_and_the_next_good_one_is_right(setup: Setup) -> None:
    row = setup.submit("a")
    setup.worker.send(record(row, 5))
    setup.worker.send_bytes(b"")
    setup.worker.send_bytes(b"cos\nsystem\n(S'false'\ntR.")
    setup.worker.send_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93.")
    setup.worker.send_bytes(b"\0" * 100_000)
    setup.worker.send(record(row, 6), record(99, 1))
    other = setup.submit("b")
    ended = setup.until_ended(1)
    assert ended["a"].finish_reason == "error", "its token was in a refused message"
    setup.worker.send(record(other, 2))
    assert setup.until_ended(2)["b"].outputs.token_ids == [2]  # type: ignore[union-attr]
    assert (setup.counter("bad_message"), setup.counter("bad_rows")) == (4, 1)


def test_candidates_wider_than_configured_end_their_request(setup: Setup) -> None:
    wide, narrow = setup.submit("wide"), setup.submit("idle")
    six = candidates([[1] * 6], [[0] * 6], [1])
    setup.worker.send(record(wide, 1, logprobs=six), record(narrow, -1))
    assert setup.until_ended(1)["wide"].error_code == 500
    setup.worker.send(record(narrow, 2))
    assert setup.until_ended(2)["idle"].finish_reason == "stop"
    assert setup.counter("bad_width") == 1


def test_a_message_larger_than_the_limit_is_not_received() -> None:
    setup = Setup(zmq_max_message_bytes=4096)
    try:
        row = setup.submit("a")
        setup.worker.send_bytes(b"\0" * 5000)
        setup.worker.close()  # zmq drops the connection, and with it what was sent behind
        setup.worker = Worker(setup.path)
        setup.worker.send(record(row, 2))
        setup.until_ended(1)
        assert setup.counter("bad_message") == 0
    finally:
        setup.close()


# --- death and restart


def test_a_reader_that_dies_leaves_a_gap_which_ends_its_requests(setup: Setup) -> None:
    rows = [setup.submit(name) for name in ("a", "b")]
    setup.worker.send(*(record(row, 5) for row in rows))
    setup.until_tokens(2)
    pid = setup.reader_pid()
    os.kill(pid, signal.SIGKILL)
    ended: Any = setup.until_ended(2)
    assert {(o.finish_reason, o.error_code, o.error_msg) for o in ended.values()} == {
        ("error", 500, GAP_TEXT)
    }
    assert GAP_TEXT.startswith("source_gap")
    wait_until(lambda: setup.reader_pid() not in (0, pid))
    row = setup.submit("c")  # admitted behind the gap
    setup.worker.send(record(row, 2))
    assert setup.until_ended(3)["c"].finish_reason == "stop"


def test_nobody_is_replaced_while_a_reader_waits_and_it_stops_at_once(setup: Setup) -> None:
    beats = {int(setup.pipe.status()["roles"]["reader"]["turns"])}
    wait_until(lambda: beats.add(setup.pipe.status()["roles"]["reader"]["turns"]) or len(beats) > 3)
    assert setup.pipe.status()["roles"]["reader"]["waits_for"] == "input"
    assert setup.pipe.status()["roles"]["reader"]["epoch"] == 1


# --- whose socket it is


def test_the_socket_is_its_owners_alone(setup: Setup) -> None:
    mode = os.lstat(setup.path).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_second_reader_is_refused(setup: Setup) -> None:
    with pytest.raises(SocketTakenError, match=r"rank0\.socket") as caught:
        tp.Pipeline(tp.PipelineConfig(source="zmq", zmq_socket=setup.path))
    assert caught.value.exit_code == ExitCode.NAME_TAKEN
    row = setup.submit("a")
    setup.worker.send(record(row, 2))
    setup.until_ended(1)


def test_a_stale_socket_file_is_taken_over() -> None:
    setup = Setup(leaves_stale_file=True)
    try:
        setup.worker.send(record(setup.submit("a"), 2))
        setup.until_ended(1)
    finally:
        setup.close()


def test_what_is_no_stale_socket_is_left_alone(tmp_path: Path) -> None:
    file, live = tmp_path / "file", str(tmp_path / "live")
    file.write_text("mine")
    with pytest.raises(SocketTakenError):
        remove_stale(str(file))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(live)
        listener.listen(1)
        with pytest.raises(SocketTakenError):
            remove_stale(live)
    remove_stale(live)
    remove_stale(live)
    assert file.read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


# --- configuration


def test_the_socket_is_where_fastdeploys_worker_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_MSG_QUEUE_ID", "8123")
    config = tp.PipelineConfig(source="zmq")
    assert config.zmq_socket == "/dev/shm/get_save_output_rank0_8123.socket"


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("zmq_socket", {"source": "zmq", "zmq_socket": "here.socket"}),
        ("zmq_socket", {"source": "zmq", "zmq_socket": "/" + 107 * "a"}),
        ("zmq_socket", {"zmq_socket": "/dev/shm/x"}),
        ("zmq_max_message_bytes", {"source": "zmq", "zmq_max_message_bytes": 100}),
        ("zmq_max_message_bytes", {"source": "sysv", "zmq_max_message_bytes": 1 << 20}),
        ("source", {"source": "carrier pigeon"}),
    ],
)
def test_settings_that_cannot_work_are_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        tp.PipelineConfig(**settings)
    assert caught.value.field == field


def test_sync_is_not_offered(setup: Setup) -> None:
    with pytest.raises(WrongSourceError, match="zmq"):
        setup.pipe.sync(1.0)


def test_the_reader_is_the_only_role_with_the_socket_library(setup: Setup) -> None:
    pids = [p.pid for p in psutil.Process().children(recursive=True)]
    loaded = {pid for pid in pids if "libzmq" in Path(f"/proc/{pid}/maps").read_text()}
    assert loaded == {setup.reader_pid()}
