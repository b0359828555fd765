"""Who may reach a pipeline from outside, and with what: sockets, files, pages, packages."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
from fake_engine import FakeEngine, token_of
from inprocess import InProcess
from test_supervision import SERVE, get, request, serve

import tokenpipe as tp
from support import wait_until
from tokenpipe.segment import core_name

ROOT = Path(__file__).resolve().parents[1]
ROWS = 8


def steps_arrive(pipe: tp.Pipeline, writer: tp.EngineWriter, name: str) -> None:
    """Fails unless a request gets every token, in each decoder's rows."""
    engine = FakeEngine(writer, ROWS)
    admissions = [pipe.submit(request(f"{name}-{i}", max_tokens=3)) for i in range(ROWS)]
    for admission in admissions:
        engine.run(admission)
    for _ in range(3):
        engine.step()
    tokens: dict[int, list[int]] = {}
    ended = 0
    for batch in pipe.batches(timeout_s=60):
        for output in batch:
            row = next(a.row for a in admissions if a.request_id == output.request_id)
            tokens.setdefault(row, []).extend(output.outputs.token_ids)
            ended += output.finished
        if ended == ROWS:
            break
    assert tokens == {
        a.row: [token_of(a.row, a.generation, p) for p in range(3)] for a in admissions
    }


def test_only_the_health_port_listens_and_silent_readers_hold_nothing_up(
    unique_name: str,
) -> None:
    """B85: an internal socket for everybody, and a publisher that a silent subscriber stops."""
    with (
        serve(unique_name) as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
        tp.EngineWriter.attach(unique_name) as writer,
        ExitStack() as connections,
    ):
        url = urlsplit(ready["health_url"])
        listening = []
        for pid in (process.pid, *ready["pids"].values()):
            for found in psutil.Process(pid).net_connections("all"):
                if found.status == psutil.CONN_LISTEN or found.family == socket.AF_UNIX:
                    listening.append((found.laddr.ip, found.laddr.port))
        assert listening == [("127.0.0.1", url.port)]
        for i in range(200):
            silent = socket.create_connection((url.hostname, url.port), timeout=20)
            connections.enter_context(silent)
            if i % 2:  # it asks for much, and never reads the answer
                silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        steps_arrive(pipe, writer, "beside")
        assert get(ready["health_url"])[0] == 200


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._marker),)


def bomb(marker: Path) -> bytes:
    """What makes `marker` when it is unpickled, as a protocol that is plain text."""
    import pickle

    text = pickle.dumps(_Bomb(marker), 0)
    assert not marker.exists()
    pickle.loads(text)
    marker.rmdir()  # it does
    return text


def test_a_pickle_is_bytes_like_any_other(unique_name: str) -> None:
    """B84: through every door, and nothing unpickles it."""
    marker = Path("/tmp") / unique_name  # short: the whole bomb has to fit a request id
    text = bomb(marker)
    with (
        serve(unique_name, "--max-pooling-floats=64") as (_process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
        tp.EngineWriter.attach(unique_name) as writer,
    ):
        admission = pipe.submit(request(text.decode(), max_tokens=len(text)))
        stamp = np.zeros(ROWS, np.int32)
        stamp[admission.row] = admission.generation
        for byte in text:
            writer.save_output(np.full(ROWS, byte), generations=stamp)
        got: list[int] = []
        for batch in pipe.batches(timeout_s=60):
            assert batch.request_ids == [text.decode()] * batch.num_rows
            got += batch.token_ids.tolist()
            if batch.num_finals:
                break
        assert bytes(got) == text
        pooled = pipe.submit(request("vectors"))
        stamp[pooled.row] = pooled.generation
        vector = np.frombuffer(text.ljust(256, b"."), np.float32)
        writer.save_pooling([vector], rows=[pooled.row], generations=[pooled.generation])
        assert next(pipe.batches(timeout_s=60)).kind == "pooling"
        url = urlsplit(ready["health_url"])
        for head in (b"POST /health HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n", b""):
            with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
                length = b"Content-Length: %d\r\n\r\n" % len(text)
                connection.sendall(head + (length if head else b"") + text)
        steps_arrive(pipe, writer, "after")
        assert not marker.exists()
    for variable in ("TOKENPIPE_NAME", "TOKENPIPE_RING_SLOTS"):
        environment = {**os.environ, variable: text.decode()}
        ended = subprocess.run(SERVE, env=environment, capture_output=True, timeout=60)
        assert ended.returncode == tp.ExitCode.BAD_CONFIG
    assert not marker.exists()


STRAY_WRITE = """
import sys
from tokenpipe import _native
from tokenpipe.segment import Segment
segment = Segment.attach(sys.argv[1])
segment.core.protect_slots()
segment.core_memory[segment.config.plan()["commands"]] = 0  # what is not protected
print("protected", flush=True)
segment.core_memory[segment.config.plan()["slots"] + 8] = 0
print("written", flush=True)
"""


def test_a_stray_write_into_a_protected_slot_ends_its_process(unique_name: str) -> None:
    """B87: not the data of all others."""
    with InProcess(tp.PipelineConfig(name=unique_name, max_num_seqs=4)) as pipe:
        slots = pipe.config.plan()["slots"]
        before = pipe.segment.core_memory[slots : slots + 64]
        command = [sys.executable, "-c", STRAY_WRITE, unique_name]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "protected\n")
        assert pipe.segment.core_memory[slots : slots + 64] == before


def test_decoders_may_only_read_the_ring(unique_name: str) -> None:
    """B87: their successors, too."""
    with tp.Pipeline(tp.PipelineConfig(name=unique_name, num_decoders=2)) as pipe:
        plan = pipe.config.plan()
        ring = (plan["slots"], plan["slot_bytes"] * pipe.config.ring_slots)

        def read_only(pid: int) -> list[tuple[int, int]]:
            found = []
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if core_name(unique_name) in line and line.split()[1] == "r--s":
                    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                    found.append((int(line.split()[2], 16), end - begin))
            return found

        assert read_only(pipe.pids["decoder-0"]) == [ring]
        assert read_only(pipe.pids["reader"]) == []
        first = pipe.pids["decoder-1"]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: pipe.pids["decoder-1"] not in (0, first))
        wait_until(lambda: read_only(pipe.pids["decoder-1"]) == [ring])


def test_the_package_needs_little_and_says_why() -> None:
    """B89: what is not there need not be audited."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.findall(r'"([\w-]+)"', re.search(r"^dependencies = (\[.*?\])", text, re.M)[1])  # type: ignore[index]
    assert len(needed) == 4
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    why = readme.split("## Dependencies, and why")[1]
    assert all(f"{name} (" in why for name in needed)
    assert re.search(r'^include = \["tokenpipe", "tokenpipe\.\*"\]', text, re.M)
