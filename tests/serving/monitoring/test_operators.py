"""The operators' HTTP on a socket, with normal, slow and broken clients."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from gimbal_jax.scheduler.trace import idle_trace
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring import operators
from gimbal_jax.serving.monitoring.live import PAGE, PAGE_POLICY, LiveView
from gimbal_jax.serving.monitoring.operators import HUNG_S, serve_operators
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from tests.serving.core.ticked_core import wait_for
from tests.serving.fake_server import FakeCore

READY, NOT_READY = (lambda: True), (lambda: False)


@contextlib.contextmanager
def serving(core=None, ready=READY, host="127.0.0.1", port=0, live=None):
    core = core or FakeCore()

    async def frontend():
        return Frontend(core, time.monotonic)

    made = asyncio.run(frontend())
    live = live or LiveView(made, "tiny")
    with serve_operators(made, live, RequestHistograms(core.config), host, port, ready) as taken:
        yield taken


def ask(port, path, method="GET", host="127.0.0.1", **headers):
    """Send a request; return status, headers and body."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()


def test_metrics_come_as_text_and_as_openmetrics():
    with serving() as port:
        status, headers, body = ask(port, "/metrics")
        assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
        assert b'gimbal_state{state="serving"} 1.0' in body and b"process_resident_memory_bytes" in body
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        _, headers, body = ask(port, "/metrics?a=b", Accept=accept)
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("state", "status"), [("warming", 200), ("serving", 200), ("draining", 200), ("stopped", 503), ("failed", 503)]
)
def test_health_follows_the_state(state, status):
    with serving(FakeCore(state=state)) as port:
        assert ask(port, "/health")[::2] == (status, f"{state}\n".encode())


def test_health_fails_if_a_step_hangs():
    core = FakeCore()
    with serving(core) as port:
        core.traces = (idle_trace(0, time.monotonic() - HUNG_S / 2),)
        assert ask(port, "/health")[0] == 200
        core.traces = (idle_trace(0, time.monotonic()), idle_trace(1, time.monotonic() - HUNG_S - 1))
        status, _, body = ask(port, "/health")
        assert status == 503 and b"no step has ended for 61 s" in body


def test_ready_follows_the_server():
    with serving(ready=READY) as port:
        assert ask(port, "/ready")[::2] == (200, b"ready\n")
    with serving(FakeCore(state="warming"), NOT_READY) as port:
        assert ask(port, "/ready")[::2] == (503, b"not ready: the server is warming\n")


def test_dashboard_page_and_data_are_served():
    with serving() as port:
        status, headers, body = ask(port, "/dashboard")
        assert (status, body, headers["Content-Type"]) == (200, PAGE, "text/html; charset=utf-8")
        assert headers["Content-Security-Policy"] == PAGE_POLICY
        assert "unsafe-eval" not in PAGE_POLICY and "default-src 'none'" in PAGE_POLICY
        status, headers, body = ask(port, "/dashboard/data")
        assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
        assert isinstance(json.loads(body), dict)
        assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers


def test_head_has_headers_and_no_body():
    with serving() as port:
        status, headers, body = ask(port, "/dashboard", "HEAD")
        assert (status, headers["Content-Length"], body) == (200, str(len(PAGE)), b"")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(b"HEAD /health HTTP/1.0\r\n\r\n")
            assert connection.makefile("rb").read().endswith(b"\r\n\r\n")


def test_other_paths_and_methods_are_rejected():
    with serving() as port:
        status, _, body = ask(port, "/nothing")
        assert status == 404 and b"/metrics, /health, /ready, /dashboard" in body
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, headers, _ = ask(port, "/metrics", method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")
        assert ask(port, "/metrics", "BREW")[0] == 501
        assert ask(port, "/health")[0] == 200


@pytest.mark.parametrize("snapshot", [lambda: 1 // 0, lambda: {"age": float("inf")}])
def test_failing_route_is_logged_and_the_others_work(snapshot, caplog):
    with serving(live=SimpleNamespace(snapshot=snapshot)) as port:
        status, _, body = ask(port, "/dashboard/data")
        assert (status, body) == (500, b"internal error; see the server's log\n")
        assert "/dashboard/data failed" in caplog.text
        assert ask(port, "/health")[0] == 200


def test_port_in_use_raises():
    with (
        serving() as port,
        pytest.raises(OSError, match=rf"operators' HTTP on 127.0.0.1:{port}: .*in use"),
        serving(port=port),
    ):
        pass


def test_port_is_free_after_the_block():
    with serving() as port:
        assert ask(port, "/health")[0] == 200
    with pytest.raises(OSError):
        ask(port, "/health")
    with serving(port=port):
        assert ask(port, "/health")[0] == 200


def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(host="::1") as port:
        assert ask(port, "/health", host="::1")[0] == 200


def test_slow_clients_are_dropped_and_delay_no_other(monkeypatch):
    monkeypatch.setattr(operators, "CONNECTION_S", 2.0)
    monkeypatch.setattr(operators, "POLL_S", 0.05)
    monkeypatch.setattr(operators, "MAX_CONNECTIONS", 4)
    with serving() as port:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        for connection in slow:
            connection.sendall(b"GET /health HT")
        wait_for(lambda: sum(thread.name.endswith("(process_request_thread)") for thread in threading.enumerate()) == 4)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(port, "/health")  # one too many
        for connection in slow:
            connection.settimeout(60)
            assert connection.recv(100) == b""
            connection.close()
        wait_for(lambda: not any("process_request_thread" in thread.name for thread in threading.enumerate()))
        assert ask(port, "/health")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n\r\n", b"\x00\xff\x16\x03\x01\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET\r\n\r\n",
     b"GET /metrics HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"],
)  # fmt: skip
def test_invalid_requests_do_not_stop_the_server(sent):
    with serving() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert b"200 OK" not in connection.recv(10_000)
        assert ask(port, "/health")[0] == 200
