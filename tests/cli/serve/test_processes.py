import socket

import pytest

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import (
    Processes,
    explicit_processes,
    join_processes,
    nodes_of,
)
from gimbal_jax.config import MeshConfig
from gimbal_jax.serving.network.ports import address_of, check_free


def test_what_the_options_say():
    options = ServeOptions("m", coordinator="10.0.0.1:1234", processes=4, process=2)
    assert explicit_processes(options) == Processes(4, 2, ("10.0.0.1", 1234), 1235)
    at_the_end = ServeOptions("m", coordinator="[::1]:65535", processes=2, process=0)
    assert explicit_processes(at_the_end) == Processes(2, 0, ("::1", 65535), 65534)
    assert explicit_processes(at_the_end).leads
    named = ServeOptions("m", coordinator="leader:7", processes=1, process=0, command_port=9)
    assert explicit_processes(named).command_port == 9


def test_addresses_are_written_as_urls_have_them():
    assert address_of("::1", 5) == "[::1]:5"
    assert address_of("host", 5) == "host:5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"coordinator": "host"}, "--coordinator host: must be HOST:PORT, or auto"),
        ({"coordinator": ":80"}, "--coordinator :80: must be HOST:PORT, or auto"),
        ({"coordinator": "host:70000"}, "--coordinator host:70000: must be HOST:PORT, or auto"),
        ({"coordinator": "host:1"}, "--coordinator host:1 needs --processes and --process"),
        ({"coordinator": "host:1", "processes": 2}, "needs --processes and --process"),
        ({"coordinator": "host:1", "processes": 2, "process": 2}, "--process 2: must be below --processes 2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        explicit_processes(ServeOptions("m", **options))


def test_options_of_many_processes_need_a_coordinator(tmp_path):
    assert join_processes(ServeOptions("m")) is None
    for name, value in [("processes", 2), ("process", 0), ("secret_file", tmp_path), ("command_port", 5)]:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} needs --coordinator"):
            join_processes(ServeOptions("m", **{name: value}))
    with pytest.raises(ValueError, match="--coordinator needs --secret-file"):
        join_processes(ServeOptions("m", coordinator="auto"))


def test_a_port_that_is_taken_is_said_before_anybody_waits(tmp_path):
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
def test_machines_are_told_by_the_hosts_of_the_processes(hosts, nodes):
    assert nodes_of(hosts, MeshConfig(2, 2)) == nodes
