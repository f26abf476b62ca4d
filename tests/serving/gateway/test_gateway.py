"""The gateway's log and who may call its port; the real one runs in tests/e2e/test_gateway.py."""

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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"level": "WARN", "message": "slow", "target": "smg::x"}, "gateway: warn: slow"),
        (
            {"level": "ERROR", "message": "lost", "target": "smg::x", "timestamp": 1, "url": "grpc://h:1"},
            "gateway: error: lost url=grpc://h:1",
        ),
        ({"level": "INFO", "message": "hello", "target": "smg::x"}, None),
        ({"level": "ERROR", "message": "request failed", "target": "smg::response"}, None),
        ({"level": "WARN", "message": "Step failed", "target": "wfaas::event", "will_retry": True}, None),
        ("Traceback (most recent call last):", "gateway: Traceback (most recent call last):"),
        ({"level": "WARN", "message": "no", "target": "x", "model": "a\nb\x1b[2J"}, "gateway: warn: no model=a?b?[2J"),
        ("[1]", "gateway: [1]"),
        ("", None),
    ],
)
def test_its_log_is_ours_with_a_prefix(line, said):
    assert log_line(line if isinstance(line, str) else json.dumps(line)) == said


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
def test_only_processes_of_our_user_are_our_own(tmp_path, peer, rows, own):
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n" + rows
    )
    assert is_own_peer(peer, 50051, table) is own


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc")
def test_a_real_connection_of_ours_is_our_own():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            peer = client.getsockname()[1]
            assert is_own_peer(f"ipv4:127.0.0.1:{peer}", port)
        server.accept()[0].close()
    assert not is_own_peer("ipv4:127.0.0.1:1", port)


def test_one_that_hangs_is_killed_and_started_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway, "CHILD", "tests.serving.gateway.hanging_gateway")
    monkeypatch.setattr(gateway, "HUNG_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said: list[str] = []
    again = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        if sum("answers on" in one for one in said) == 2:
            again.set()

    async def run() -> None:
        running = asyncio.create_task(Gateway(GatewayConfig(tmp_path, port), say).run(1))
        await asyncio.wait_for(again.wait(), 30)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert said[1] == "the HTTP gateway has not answered for 0.5 s: it is killed"
    assert said[2].startswith("the HTTP gateway ended (killed by SIGKILL); it starts again")
