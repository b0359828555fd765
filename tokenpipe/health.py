"""The health endpoint: /livez /readyz /health /status /metrics, from the segments alone.

It runs in threads of the coordinator's process, so it answers also while the coordinator's loop
hangs, and says so. It reads; it decides nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING

from tokenpipe.errors import ConfigError, PortInUseError
from tokenpipe.layout import PipelineState
from tokenpipe.limits import MAX_CONNECTIONS
from tokenpipe.metrics import CONTENT_TYPE, Exporter
from tokenpipe.segment import Segment
from tokenpipe.status import Verdict, View, judge, status_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

_log = logging.getLogger("tokenpipe.health")

_REQUEST_TIMEOUT_S = 5.0
"""From the first wait for a request to its last byte; as long again for the answer."""
_MAX_REQUEST_BYTES = 32768
_MAKE_ROOM_S = 1.0
_READY = (PipelineState.IDLE, PipelineState.RUNNING)


def is_live(verdict: Verdict) -> bool:
    """Returns whether a restart of this pipeline would not help: DESIGN section 8, table of
    states."""
    if verdict.state is PipelineState.STALLED:
        return verdict.role in ("engine", "client")
    return verdict.state not in (PipelineState.FAILED, PipelineState.STOPPED)


class _Incoming(io.RawIOBase):
    """What a connection sends, within the time and the bytes of one request after the other: bytes
    that drip in hold nobody up for longer than silence."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin_request()

    def begin_request(self) -> None:
        self._until = time.monotonic() + _REQUEST_TIMEOUT_S
        self._left_bytes = _MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0 or self._left_bytes <= 0:
            raise TimeoutError("a request takes too long, or is too long")
        self._connection.settimeout(left_s)
        got = self._connection.recv_into(buffer)
        self._left_bytes -= got
        return got


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.begin_request()
        super().handle_one_request()

    def send_response(self, code: int, message: str | None = None) -> None:
        self.connection.settimeout(_REQUEST_TIMEOUT_S)
        super().send_response(code, message)

    def do_GET(self) -> None:  # the name is http.server's
        path = self.path.split("?", 1)[0]
        try:
            code, content_type, body = self._answer(path)
        except Exception:
            _log.exception("GET %s", path)
            code, content_type, body = 500, "text/plain", b"internal error, see the log\n"
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if code == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        segment = self.server.segment
        if path == "/metrics":
            return 200, CONTENT_TYPE, self.server.exporter.scrape()
        if path == "/status":
            return 200, "application/json", _json(status_of(segment))
        verdict = judge(segment)
        is_good = {
            "/livez": is_live(verdict),
            "/readyz": verdict.state in _READY,
            "/health": verdict.state in _READY,
        }.get(path)
        if is_good is None:
            return 404, "application/json", _json({"error": "unknown path", "paths": PATHS})
        body = {"state": verdict.state.name.lower(), "role": verdict.role, "reason": verdict.reason}
        return (200 if is_good else 503), "application/json", _json(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)


PATHS = ["/livez", "/readyz", "/health", "/status", "/metrics"]


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


_Connection = socket.socket | tuple[bytes, socket.socket]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], segment: Segment, max_connections: int) -> None:
        self.segment = segment
        self.exporter = Exporter(segment)
        self._room = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # oldest first
        super().__init__(address, _Handler)

    def process_request(self, request: _Connection, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        # Whoever keeps connections open must not keep a probe out: the oldest makes room.
        if not self._room.acquire(blocking=False):
            self._end_the_oldest()
            if not self._room.acquire(timeout=_MAKE_ROOM_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started: the caller closes the connection
            self._room.release()
            raise

    def _end_the_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._open), None)
            if oldest is not None:
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has gone by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end

    def process_request_thread(self, request: _Connection, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def close_request(self, request: _Connection) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            self._open.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: _Connection, client_address: object) -> None:
        _log.debug("connection of %s broke", client_address, exc_info=True)


class HealthServer:
    """Serves the endpoint until the `with` ends, over `max_connections` at once. Raises
    PortInUseError (host, port), ConfigError where no server can listen."""

    def __init__(self, segment: Segment, max_connections: int = MAX_CONNECTIONS) -> None:
        config = segment.config
        port = config.health_port
        if segment.is_adopted:  # probes and dashboards know the port that was bound
            port = int(View(segment).header["health_port"]) or port
        try:
            self._server = _Server((config.health_host, port), segment, max_connections)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise PortInUseError(config.health_host, port) from None
            if e.errno in (errno.EACCES, errno.EPERM):
                raise ConfigError("health_port", port, str(e)) from None
            if isinstance(e, socket.gaierror) or e.errno == errno.EADDRNOTAVAIL:
                raise ConfigError("health_host", config.health_host, str(e)) from None
            raise
        except UnicodeError as e:  # a host's name with a part that is empty or too long
            raise ConfigError("health_host", config.health_host, str(e)) from None
        self.host = config.health_host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where /health answers."""
        return f"http://{self.host}:{self.port}/health"

    def __enter__(self) -> HealthServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
