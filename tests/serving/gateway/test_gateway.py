"""The gateway's log, its restarts and the callers of its port. The real gateway runs in tests/e2e/test_gateway.py."""

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from gimbal_jax.serving.gateway import gateway
from gimbal_jax.serving.gateway.config import GatewayConfig
from gimbal_jax.serving.gateway.gateway import Gateway, is_own_peer, log_line
from gimbal_jax.serving.network.ports import free_port


@pytest.mark.parametrize(
    ("line", "logged"),
    [
        ({"level": "WARN", "message": "slow", "target": "smg::x"}, "gateway: warn: slow"),
        (
            {"level": "ERROR", "message": "lost", "target": "smg::x", "timestamp": 1, "url": "grpc://h:1"},
            "gateway: error: lost url=grpc://h:1",
        ),
        ({"level": "INFO", "message": "hello", "target": "smg::x"}, None),
        ({"level": "ERROR", "message": "request failed", "target": "smg::response"}, None),
        ({"level": "WARN", "message": "SECURITY POSTURE: ...", "target": "smg::posture"}, None),
        ({"level": "WARN", "message": "Step failed", "target": "wfaas::event", "will_retry": True}, None),
        ("Traceback (most recent call last):", "gateway: Traceback (most recent call last):"),
        ({"level": "WARN", "message": "no", "target": "x", "model": "a\nb\x1b[2J"}, "gateway: warn: no model=a?b?[2J"),
        ("[1]", "gateway: [1]"),
        ("", None),
    ],
)
def test_gateway_log_gets_a_prefix_and_is_filtered(line, logged):
    assert log_line(line if isinstance(line, str) else json.dumps(line)) == logged


def row(local: int, remote: int, uid: int, local_host: str = "0100007F") -> str:
    return f"  7: {local_host}:{local:04X} 0100007F:{remote:04X} 01 00000000:00000000 02:000A 00000000 {uid} 0 42 2\n"


@pytest.mark.parametrize(
    ("peer", "rows", "own"),
    [
        ("ipv4:127.0.0.1:40000", row(40000, 50051, os.getuid()), True),
        ("ipv4:127.0.0.1:40000", row(40000, 50051, 0), True),
        ("ipv4:127.0.0.1:40000", row(40000, 50051, os.getuid() + 1), False),
        ("ipv4:127.0.0.1:40000", row(50051, 40000, os.getuid()), False),  # our own end of it
        ("ipv4:127.0.0.1:40000", row(40000, 50052, os.getuid()), False),
        ("ipv4:127.0.0.1:40000", row(40000, 50051, os.getuid(), "0200007F"), False),
        ("ipv4:127.0.0.1:40000", "", False),
        ("ipv4:10.0.0.1:40000", row(40000, 50051, os.getuid()), False),
        ("unix:/tmp/socket", row(40000, 50051, os.getuid()), False),
    ],
)
def test_only_processes_of_our_user_and_root_are_our_own(tmp_path, peer, rows, own):
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n" + rows
    )
    assert is_own_peer(peer, 50051, table) is own


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc")
def test_real_connection_of_this_process_is_our_own():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            peer = client.getsockname()[1]
            assert is_own_peer(f"ipv4:127.0.0.1:{peer}", port)
        server.accept()[0].close()
    assert not is_own_peer("ipv4:127.0.0.1:1", port)


def test_gateway_that_hangs_is_killed_and_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway, "CHILD", "tests.serving.gateway.hanging_gateway")
    monkeypatch.setattr(gateway, "HUNG_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    port = free_port()
    lines: list[str] = []
    restarted = asyncio.Event()

    def log(line: str) -> None:
        lines.append(line)
        if sum("answers on" in one for one in lines) == 2:
            restarted.set()

    async def run() -> None:
        running = asyncio.create_task(Gateway(GatewayConfig(tmp_path, port), log).run(1))
        await asyncio.wait_for(restarted.wait(), 60)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert lines[1] == "the HTTP gateway has not answered for 0.5 s: it is killed"
    assert lines[2].startswith("the HTTP gateway ended (killed by SIGKILL); it starts again")
