import socket
from dataclasses import replace

import pytest

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import (
    Processes,
    check_command_tls,
    explicit_processes,
    join_processes,
    nodes_of,
)
from gimbal_jax.config import MeshConfig
from gimbal_jax.serving.network.ports import address_of, check_free


def test_options_name_processes_coordinator_and_command_port():
    options = ServeOptions("m", coordinator="10.0.0.1:1234", processes=4, process=2)
    assert explicit_processes(options) == Processes(4, 2, ("10.0.0.1", 1234), 1235)
    at_the_end = ServeOptions("m", coordinator="[::1]:65535", processes=2, process=0)
    assert explicit_processes(at_the_end) == Processes(2, 0, ("::1", 65535), 65534)
    assert explicit_processes(at_the_end).leads
    named = ServeOptions("m", coordinator="leader:7", processes=1, process=0, command_port=9)
    assert explicit_processes(named).command_port == 9


def test_an_ipv6_address_has_brackets():
    assert address_of("::1", 5) == "[::1]:5"
    assert address_of("host", 5) == "host:5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "host"}, "--coordinator host: must be HOST:PORT, or auto"),
        ({"coordinator": ":80"}, "--coordinator :80: must be HOST:PORT, or auto"),
        ({"coordinator": "host:70000"}, "--coordinator host:70000: must be HOST:PORT, or auto"),
        ({"coordinator": "host:1"}, "--coordinator host:1 needs --processes and --process"),
        ({"coordinator": "host:1", "processes": 2}, "needs --processes and --process"),
        ({"coordinator": "host:1", "processes": 2, "process": 2}, "--process 2: must be below --processes 2"),
    ],
)
def test_bad_options_are_rejected_with_their_name(options, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        explicit_processes(ServeOptions("m", **options))


def test_options_for_several_processes_need_a_coordinator(tmp_path):
    assert join_processes(ServeOptions("m")) is None
    for name, value in [("processes", 2), ("process", 0), ("secret_file", tmp_path), ("command_port", 5)]:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} needs --coordinator"):
            join_processes(ServeOptions("m", **{name: value}))
    with pytest.raises(ValueError, match="--coordinator needs --secret-file"):
        join_processes(ServeOptions("m", coordinator="auto"))


@pytest.mark.parametrize("coordinator", ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "localhost:1"])
def test_commands_within_a_host_need_no_tls(coordinator):
    options = ServeOptions("m", coordinator=coordinator, processes=2, process=1)
    check_command_tls(options, explicit_processes(options))


@pytest.mark.parametrize("coordinator", ["10.0.0.1:1", "[fe80::1]:1", "leader:1", "auto"])
def test_commands_between_hosts_need_tls_or_a_trusted_network(coordinator, tmp_path):
    options = ServeOptions("m", coordinator=coordinator, processes=2, process=1, secret_file=tmp_path / "secret")
    with pytest.raises(ValueError, match=r"need TLS\. Give all processes --command-cert.* --trusted-network on"):
        join_processes(options)
    processes = None if coordinator == "auto" else explicit_processes(options)
    check_command_tls(replace(options, trusted_network="on"), processes)
    check_command_tls(replace(options, command_cert=tmp_path / "cert"), processes)


def test_a_port_in_use_is_reported_before_the_leader_waits(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServeOptions(
            "m", coordinator=f"127.0.0.1:{port}", processes=2, process=0, secret_file=tmp_path / "secret"
        )
        with pytest.raises(OSError, match=f"process 0 cannot listen on 127.0.0.1:{port}: .*in use"):
            join_processes(options)
    check_free("127.0.0.1", port)


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        (["a"], 1),
        (["a", "a"], 1),
        (["a", "b"], 2),
        (["a", "a", "b", "b"], 2),
        (["a", "b", "a", "b"], 1),  # not in order
        (["a", "a", "a", "b"], 1),  # not evenly
        (["a", "b", "c"], 1),  # 4 ranks do not spread over 3
    ],
)
def test_nodes_are_counted_by_the_hosts_of_the_processes(hosts, nodes):
    assert nodes_of(hosts, MeshConfig(2, 2)) == nodes
