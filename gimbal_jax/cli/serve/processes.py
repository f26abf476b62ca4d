"""The processes that serve together: the index of this one, and jax.distributed between them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.terminal import console
from gimbal_jax.config import MeshConfig
from gimbal_jax.serving.network.ports import address_of, check_free, is_loopback

AUTO = "auto"
JOIN_S = 300
"""Seconds until all processes must have joined jax.distributed."""
SHUTDOWN_S = 10
"""Seconds that all processes have to leave jax.distributed together."""
HIGHEST_PORT = 65535


@dataclass(frozen=True)
class Processes:
    """The processes of one server, as one of them sees them."""

    count: int
    index: int
    """Index of this process. Process 0 leads."""
    coordinator: tuple[str, int]
    """Host and port of process 0 for jax.distributed."""
    command_port: int
    """Port of process 0 for commands, on the same host."""

    @property
    def leads(self) -> bool:
        return self.index == 0


def join_processes(options: ServeOptions) -> Processes | None:
    """Join the processes that the options name, before jax finds its devices. Return None if they name none.

    Return when all processes have joined. Raise ValueError for options that contradict each other, OSError if a port
    is taken.
    """
    if options.coordinator is None:
        for name in ("processes", "process", "secret_file", "command_port", "command_cert", "command_key"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --coordinator")
        return None
    if options.secret_file is None:
        raise ValueError("--coordinator needs --secret-file: a file with the same secret for all processes")
    processes = None if options.coordinator == AUTO else explicit_processes(options)
    check_command_tls(options, processes)
    if processes is not None and processes.leads:
        for port in (processes.coordinator[1], processes.command_port):
            _check_free(processes.coordinator[0], port)
    return _join(processes, options)


def explicit_processes(options: ServeOptions) -> Processes:
    """Return the processes of options that name a coordinator. Raise ValueError that names the option."""
    assert options.coordinator is not None
    host, separator, port = options.coordinator.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) <= HIGHEST_PORT:
        raise ValueError(f"--coordinator {options.coordinator}: must be HOST:PORT, or {AUTO}")
    if options.processes is None or options.process is None:
        raise ValueError(f"--coordinator {options.coordinator} needs --processes and --process")
    if options.process >= options.processes:
        raise ValueError(f"--process {options.process}: must be below --processes {options.processes}")
    coordinator = host.strip("[]"), int(port)
    return Processes(options.processes, options.process, coordinator, _command_port(options, int(port)))


def check_command_tls(options: ServeOptions, processes: Processes | None) -> None:
    """Raise ValueError if commands would cross a network without TLS, unless the user trusts the network.

    ``processes`` is None if a launcher names the coordinator, which is then taken for another host.
    """
    on_this_host = processes is not None and is_loopback(processes.coordinator[0])
    if options.command_cert is None and options.trusted_network == "off" and not on_this_host:
        raise ValueError(
            f"--coordinator {options.coordinator}: commands to other hosts need TLS. Give all processes "
            "--command-cert, and process 0 --command-key. On a network where every host is trusted, "
            "--trusted-network on allows commands without TLS"
        )


def _check_free(host: str, port: int) -> None:
    """Raise OSError if process 0 cannot listen. A host name may not resolve yet, so it stands for every address."""
    try:
        check_free(host if _ip(host) else "", port)
    except OSError as error:
        raise OSError(f"process 0 {error}") from error


def nodes_of(hosts: Sequence[str], mesh: MeshConfig) -> int:
    """Return how many hosts the ranks of a mesh are spread over, given the host of each process in order.

    Return 1 if they are not spread evenly and in order, because the distances of ranks are then unknown.
    """
    sizes = [len(list(group)) for _, group in groupby(hosts)]
    even = len(set(sizes)) == 1 and len(sizes) == len(set(hosts)) and mesh.ranks % len(sizes) == 0
    return len(sizes) if even else 1


def _command_port(options: ServeOptions, coordinator_port: int) -> int:
    if options.command_port is not None:
        return options.command_port
    return coordinator_port + 1 if coordinator_port < HIGHEST_PORT else coordinator_port - 1


def _join(processes: Processes | None, options: ServeOptions) -> Processes:
    import jax

    if processes is not None:
        console.print(f"process {processes.index}: waiting for all {processes.count} at {options.coordinator}")
    # jax's preemption service would catch SIGTERM, which drains the server.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # With a folder that not all processes see, some would compile and wait for the others (see ``serving.programs``).
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        jax.distributed.initialize(
            coordinator_address=address_of(*processes.coordinator) if processes else None,
            num_processes=processes.count if processes else None,
            process_id=processes.index if processes else None,
            # jax would take one device per process from what it detects.
            local_device_ids=[],
            cluster_detection_method="deactivate" if processes else None,
            initialization_timeout=JOIN_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=_bind_address(processes.coordinator) if processes else None,
        )
    except ValueError as error:
        raise ValueError(f"--coordinator {options.coordinator}: jax finds no other processes here: {error}") from error
    if processes is not None:
        return processes
    from jax._src import distributed  # jax has no public function for what it detected

    found = distributed.global_state
    assert found.coordinator_address is not None
    host, _, port = found.coordinator_address.rpartition(":")
    return Processes(found.num_processes, found.process_id, (host, int(port)), _command_port(options, int(port)))


def _bind_address(coordinator: tuple[str, int]) -> str | None:
    """Return the address where the coordinator listens. None stands for all addresses.

    A host name stands for all addresses, because it may not name this host's own address.
    """
    return address_of(*coordinator) if _ip(coordinator[0]) else None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
