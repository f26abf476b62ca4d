"""Several processes as one: which of them this is, and jax.distributed between them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.terminal import console
from gimbal_jax.config import MeshConfig
from gimbal_jax.serving.network.ports import address_of, check_free

AUTO = "auto"
JOIN_S = 300
"""For all processes to be there."""
SHUTDOWN_S = 10
"""For all of them to leave together."""
HIGHEST_PORT = 65535


@dataclass(frozen=True)
class Processes:
    """Where this process stands among those that serve together."""

    count: int
    index: int
    """0 leads."""
    coordinator: tuple[str, int]
    """Host and port of process 0 for jax.distributed."""
    command_port: int
    """Of process 0, on the same host."""

    @property
    def leads(self) -> bool:
        return self.index == 0


def join_processes(options: ServeOptions) -> Processes | None:
    """Join the processes that the options speak of; None where they speak of none. Must come before jax's devices.

    Returns when all are there. Raises ValueError for options that do not go together, OSError where a port is taken.
    """
    if options.coordinator is None:
        for name in ("processes", "process", "secret_file", "command_port", "command_cert", "command_key"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --coordinator")
        return None
    if options.secret_file is None:
        raise ValueError("--coordinator needs --secret-file: a file with the same secret for all processes")
    processes = None if options.coordinator == AUTO else explicit_processes(options)
    if processes is not None and processes.leads:
        for port in (processes.coordinator[1], processes.command_port):
            _check_free(processes.coordinator[0], port)
    return _join(processes, options)


def explicit_processes(options: ServeOptions) -> Processes:
    """What the options say without jax's help; raises ValueError by name."""
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


def _check_free(host: str, port: int) -> None:
    """Raise OSError if process 0 cannot listen. A host name may not resolve yet, so it stands for every address."""
    try:
        check_free(host if _ip(host) else "", port)
    except OSError as error:
        raise OSError(f"process 0 {error}") from error


def nodes_of(hosts: Sequence[str], mesh: MeshConfig) -> int:
    """Machines that the ranks of a mesh are spread over, by the host of each process in order.

    1 where they are not spread evenly and in order: then nothing is known of their distances.
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
    # It would catch SIGTERM, which is ours to drain by.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A folder that not all see would have some compile, and wait for those that do not (see ``serving.programs``).
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        jax.distributed.initialize(
            coordinator_address=address_of(*processes.coordinator) if processes else None,
            num_processes=processes.count if processes else None,
            process_id=processes.index if processes else None,
            # Of what jax finds by itself it must not take the devices: one for each process.
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
    from jax._src import distributed  # the only place that tells what was found

    found = distributed.global_state
    assert found.coordinator_address is not None
    host, _, port = found.coordinator_address.rpartition(":")
    return Processes(found.num_processes, found.process_id, (host, int(port)), _command_port(options, int(port)))


def _bind_address(coordinator: tuple[str, int]) -> str | None:
    """Where process 0 listens: at this address alone, unless it is a name, which may not be this machine's own."""
    return address_of(*coordinator) if _ip(coordinator[0]) else None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
