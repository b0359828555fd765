"""The health endpoint against noise: it goes on answering, within bounds, and tells no secrets."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hostile import seeded

import tokenpipe as tp
from support import wait_until
from tokenpipe import health as health_module
from tokenpipe import limits
from tokenpipe.health import PATHS, HealthServer
from tokenpipe.segment import Segment

PROMPT_MARK, USER_MARK = "the-secret-of-the-prompt", "the-secret-user"
TOKEN_MARK = 1_073_741_789


class Served:
    """A `tokenpipe serve` whose stderr is kept."""

    def __init__(self, name: str, folder: Path, *flags: str) -> None:
        self.name = name
        self.log = folder / "stderr"
        command = [sys.executable, "-m", "tokenpipe", "serve", f"--name={name}"]
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--max-num-seqs=4", "--num-decoders=1", "--top-logprobs=0", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self.process.stdout is not None
        self.ready = json.loads(self.process.stdout.readline())
        self.pids = self.ready["pids"]
        self.url = self.ready["health_url"]
        self.port = int(self.url.rsplit(":", 1)[1].split("/")[0])
        self.address = ("127.0.0.1", self.port)

    def probe(self, path: str = "/livez") -> int:
        """What a probe gets that comes now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            answer.read()
            return int(answer.status)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def serve(name: str, folder: Path, *flags: str) -> Iterator[Served]:
    served = Served(name, folder, *flags)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            assert served.end() == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name = f"t{random.SystemRandom().getrandbits(64):x}"
    with serve(name, tmp_path_factory.mktemp("served")) as served:
        yield served


def noise(rng: random.Random) -> bytes:
    """A request that is none, or half of one, or several."""
    path = rng.choice((*PATHS, "/", "//", "/../etc/passwd", "/health?" + "a" * 300, "/\u00e9", "*"))
    method = rng.choice(
        ("GET", "GET", "get", "HEAD", "POST", "PUT", "DELETE", "TRACE", "\0", "G" * 3000)
    )
    version = rng.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/9.9", "HTTP/1.1.1", "", "ICY"))
    lines = [f"{method} {path} {version}"]
    for _ in range(rng.randrange(4)):
        lines.append(
            rng.choice(
                (
                    *("Host: x", "no colon", ": empty", "A: " + "b" * rng.randrange(20_000)),
                    *("Content-Length: -1", "Content-Length: 99999999999", "Expect: 100-continue"),
                    *("Transfer-Encoding: chunked", "Connection: keep-alive", "\0: \0", " folded"),
                )
            )
        )
    whole = ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "replace")
    choice = rng.randrange(6)
    if choice == 0:
        return rng.randbytes(rng.randrange(3000))
    if choice == 1:
        return whole[: rng.randrange(len(whole))]
    if choice == 2:
        return whole * rng.randrange(1, 50)  # pipelined
    if choice == 3:
        return whole + rng.randbytes(rng.randrange(500))
    if choice == 4:
        return b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * rng.randrange(200)
    return whole


def send(served: Served, data: bytes, rng: random.Random) -> None:
    with served.connect() as connection, suppress(OSError):
        connection.sendall(data)
        if rng.randrange(2):
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def fuzz(served: Served, requests: int) -> None:
    coordinator = psutil.Process(served.ready["pid"])
    with seeded() as rng:
        served.probe("/metrics")
        for i in range(requests):
            send(served, noise(rng), rng)
            if i % 10 == 0:
                assert served.probe(rng.choice(("/livez", "/health", "/status", "/metrics"))) == 200
        print(f"{requests} noisy requests, {requests // 10} probes answered meanwhile")
    assert coordinator.is_running()
    assert served.process.poll() is None
    assert "Traceback" not in served.said()
    wait_until(lambda: coordinator.num_threads() < 20, 60, coordinator.num_threads)


def test_noise_costs_no_probe(served: Served) -> None:
    fuzz(served, 300)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_noisy_requests_cost_no_probe(served: Served) -> None:
    fuzz(served, 10_000)


def open_connections(served: Served) -> int:
    process = psutil.Process(served.ready["pid"])
    return sum(
        c.laddr.port == served.port and c.status == psutil.CONN_ESTABLISHED
        for c in process.net_connections("tcp")
    )


def test_whoever_keeps_connections_open_keeps_no_probe_out(served: Served) -> None:
    """More connections than there is room for, half of them in the middle of a request."""
    num = 3 * limits.MAX_CONNECTIONS
    with ExitStack() as stack:
        for i in range(num):
            connection = stack.enter_context(served.connect())
            if i % 2:
                with suppress(OSError):
                    connection.sendall(b"GET /livez HTTP/1.1\r\nX: ")
            if i % 32 == 0:
                assert served.probe() == 200
                assert open_connections(served) <= limits.MAX_CONNECTIONS + 2
        assert served.probe("/metrics") == 200
    wait_until(lambda: open_connections(served) == 0, 60)


def test_a_request_that_drips_in_is_ended_in_the_time_of_one(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte after byte does not prolong it; the bound is of the request, not of the byte."""
    monkeypatch.setattr(health_module, "_REQUEST_TIMEOUT_S", 0.3)
    config = tp.PipelineConfig(name=unique_name, max_num_seqs=4, num_decoders=1)
    with ExitStack() as stack:
        server = stack.enter_context(HealthServer(stack.enter_context(Segment.create(config))))
        connection = stack.enter_context(socket.create_connection((server.host, server.port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(0.02)

        def is_ended() -> bool:
            try:
                connection.sendall(b"a")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_ended, 60)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\n" + b"X: " + b"y" * (1 << 20),
        b"GET /" + b"a" * (1 << 20),
        b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * (1 << 18),
        b"\0" * (1 << 20),
        b"GET /livez HTTP/1.1\r\n" + (b"X: " + b"y" * 1000 + b"\r\n") * 60 + b"\r\n",
    ],
    ids=["a header", "a path", "headers", "zeros", "nothing too much but all together"],
)
def test_a_request_without_an_end_is_not_kept(head: bytes, served: Served) -> None:
    """It is read up to a limit; then the connection ends, whatever more would come."""
    with served.connect() as connection:
        with suppress(OSError):
            connection.sendall(head)
        answer = b""
        with suppress(ConnectionError):
            while more := connection.recv(65536):
                answer += more
    assert b"HTTP/1.1 200" not in answer
    assert served.probe() == 200


def test_pipelined_requests_are_answered_in_their_order(served: Served) -> None:
    paths = ["/livez", "/nowhere", "/metrics", "/readyz"] * 5
    heads = [f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for path in paths[:-1]]
    last = f"GET {paths[-1]} HTTP/1.1\r\nConnection: close\r\n\r\n".encode()
    with served.connect() as connection:
        connection.sendall(b"".join(heads) + last)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    codes = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    assert codes == [b"404" if path == "/nowhere" else b"200" for path in paths]


def test_many_at_once_are_all_answered(served: Served) -> None:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(served.probe())) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [200] * 64


def test_only_the_endpoint_listens_and_on_loopback_alone(served: Served) -> None:
    for pid in (served.ready["pid"], *served.pids.values()):
        listening = [
            c.laddr
            for c in psutil.Process(pid).net_connections("all")
            if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
        ]
        found = [tuple(address) for address in listening]
        assert found == ([("127.0.0.1", served.port)] if pid == served.ready["pid"] else [])


def test_the_log_of_a_run_tells_no_prompt_and_no_token(unique_name: str, tmp_path: Path) -> None:
    """At the default level, with a role killed, an abort without an answer, and bad HTTP."""
    with serve(unique_name, tmp_path, "--abort-timeout-s=0.05", "--drain-timeout-s=0") as served:
        with tp.Pipeline.attach(unique_name) as pipe, pipe.engine_writer() as engine:
            request: Any = tp.Request(
                "r1",
                [TOKEN_MARK] * 3,
                [TOKEN_MARK + 1],
                prompt=PROMPT_MARK,
                user=USER_MARK,
                trace_carrier={"k": USER_MARK},
            )
            first = pipe.submit(request)
            second = pipe.submit(tp.Request("r2", [TOKEN_MARK], [TOKEN_MARK + 1]))
            tokens = np.full(2, TOKEN_MARK + 2, np.int64)
            generations = np.array([first.generation, second.generation], np.int32)
            rows = np.array([first.row, second.row], np.int32)
            engine.save_output(tokens, generations=generations, rows=rows)
            os.kill(served.pids["decoder-0"], signal.SIGKILL)
            wait_until(lambda: pipe.health()["state"] != "degraded", 60)
            wait_until(lambda: "is back as pid" in served.said(), 60)
            pipe.abort("r1")
            send(served, f"GET /{USER_MARK} HTTP/1.1\r\n\r\n".encode(), random.Random(1))
            wait_until(lambda: "has not come in time" in served.said(), 60)
            got = [o for batch in pipe.batches(timeout_s=0.5) for o in batch]
            assert got
        assert served.end() == 0
        said = served.said()
        assert "decoder-0" in said, "the log is there"
        marks = (PROMPT_MARK, USER_MARK, *(str(TOKEN_MARK + i) for i in range(3)))
        assert not [mark for mark in marks if mark in said]
        assert "Traceback" not in said
