"""The health endpoint: /livez /readyz /health /status /metrics, from the segments alone.

It runs in threads of the coordinator's process, so it answers also while the coordinator's loop
hangs, and says so. It reads; it decides nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from tokenpipe.errors import ConfigError, PortInUseError
from tokenpipe.layout import PipelineState
from tokenpipe.metrics import CONTENT_TYPE, Exporter
from tokenpipe.segment import Segment
from tokenpipe.status import Verdict, View, judge, status_of

_log = logging.getLogger("tokenpipe.health")

_CONNECTION_TIMEOUT_S = 5.0
_MAX_THREADS = 512
_READY = (PipelineState.IDLE, PipelineState.RUNNING)


def is_live(verdict: Verdict) -> bool:
    """Returns whether a restart of this pipeline would not help: DESIGN section 8, table of
    states."""
    if verdict.state is PipelineState.STALLED:
        return verdict.role in ("engine", "client")
    return verdict.state not in (PipelineState.FAILED, PipelineState.STOPPED)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _CONNECTION_TIMEOUT_S

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

    def __init__(self, address: tuple[str, int], segment: Segment) -> None:
        self.segment = segment
        self.exporter = Exporter(segment)
        self._slots = threading.BoundedSemaphore(_MAX_THREADS)
        super().__init__(address, _Handler)

    def process_request(self, request: _Connection, client_address: object) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)  # idle connections must not hold up the accept loop
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: _Connection, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: _Connection, client_address: object) -> None:
        _log.debug("connection of %s broke", client_address, exc_info=True)


class HealthServer:
    """Serves the endpoint until the `with` ends. Raises PortInUseError (host, port), ConfigError
    where no server can listen."""

    def __init__(self, segment: Segment) -> None:
        config = segment.config
        port = config.health_port
        if segment.is_adopted:  # probes and dashboards know the port that was bound
            port = int(View(segment).header["health_port"]) or port
        try:
            self._server = _Server((config.health_host, port), segment)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise PortInUseError(config.health_host, port) from None
            if e.errno in (errno.EACCES, errno.EPERM):
                raise ConfigError("health_port", port, str(e)) from None
            if isinstance(e, socket.gaierror) or e.errno == errno.EADDRNOTAVAIL:
                raise ConfigError("health_host", config.health_host, str(e)) from None
            raise
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
