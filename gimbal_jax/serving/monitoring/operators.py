"""HTTP for operators: metrics, health and the live view. It only reads, and runs on threads of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.exposition import choose_encoder

from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring.live import PAGE, PAGE_POLICY, LiveView
from gimbal_jax.serving.monitoring.metrics import metrics_registry
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms

MAX_CONNECTIONS = 64
"""Open connections. A further one is closed immediately."""
CONNECTION_S = 30.0
"""Seconds after which a connection is closed, however slowly its client sends or reads."""
POLL_S = 0.1
"""Seconds between looks at open connections and at shutdown."""
HUNG_S = 60.0
"""Seconds without a new trace after which an engine counts as hanging. No step takes as long."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """Answer to one GET."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Route = Callable[[str], Response]
"""Function from the Accept header to the answer."""


def routes(
    frontend: Frontend, live: LiveView, histograms: RequestHistograms, ready: Callable[[], bool]
) -> dict[str, Route]:
    """Return the routes by path. Any thread may call them."""
    registry = metrics_registry(frontend, histograms)

    def metrics(accept: str) -> Response:
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), content_type)

    def health(accept: str) -> Response:
        state = frontend.core.state
        age = max((frontend.clock() - trace.time for trace in frontend.core.traces), default=0.0)
        if state in ("serving", "draining") and age > HUNG_S:
            return Response(f"{state}, but no step has ended for {age:.0f} s\n".encode(), status=503)
        return Response(f"{state}\n".encode(), status=503 if state in ("failed", "stopped") else 200)

    def readiness(accept: str) -> Response:
        if ready():
            return Response(b"ready\n")
        return Response(f"not ready: the server is {frontend.core.state}\n".encode(), status=503)

    def page(accept: str) -> Response:
        return Response(PAGE, "text/html; charset=utf-8", headers={"Content-Security-Policy": PAGE_POLICY})

    def data(accept: str) -> Response:
        return Response(json.dumps(live.snapshot(), allow_nan=False).encode(), "application/json")

    return {
        "/metrics": metrics,
        "/health": health,
        "/ready": readiness,
        "/dashboard": page,
        "/dashboard/data": data,
    }


@contextlib.contextmanager
def serve_operators(
    frontend: Frontend,
    live: LiveView,
    histograms: RequestHistograms,
    host: str,
    port: int,
    ready: Callable[[], bool],
) -> Iterator[int]:
    """Serve until the block ends. Yields the port; for ``port`` 0 that is a free one. Raises OSError if it is taken."""
    try:
        server = _Server(host, port, routes(frontend, live, histograms, ready))
    except OSError as error:
        raise OSError(error.errno, f"operators' HTTP on {host}:{port}: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="operators", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, TCPServer):
    """Serves each connection on a thread of its own. Connections are few, and none lasts long."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, routes: dict[str, Route]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes = routes
        self._open: dict[Any, float] = {}  # open connections with the time of their arrival
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        now = time.monotonic()
        for request, began in list(self._open.items()):
            if now - began > CONNECTION_S:
                with contextlib.suppress(OSError):  # it may just have ended
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("connection of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "gimbal", ""
    timeout = 10.0
    """Seconds for one read or write."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        route = self.server.routes.get(path)
        if route is None:
            self._send(Response(f"not found; the paths are {', '.join(self.server.routes)}\n".encode(), status=404))
            return
        try:
            response = route(self.headers.get("Accept", ""))
        except Exception:
            _log.exception("%s failed", path)
            response = Response(b"internal error; see the server's log\n", status=500)
        self._send(response)

    do_HEAD = do_GET

    def _reject(self) -> None:
        self._send(Response(b"only GET and HEAD are supported\n", status=405, headers={"Allow": "GET, HEAD"}))

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _reject

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        headers = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            **response.headers,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
