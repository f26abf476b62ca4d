"""One server in several processes: the same tokens as in one, through migrations, drain, loss and restart."""

import asyncio
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from gimbal_jax.model.orbax_checkpoint import is_orbax
from gimbal_jax.scheduler.counts_file import load_placement
from tests.e2e.rig import LAYERS, TOP_K
from tests.multihost.rig import Cluster, answer, answers, cluster, exit_codes, printed
from tests.serving.statuses import per_engine

REQUESTS = 64
NOTICED_S = 10.0
END_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Programs that one test compiles are there for the next."""
    return tmp_path_factory.mktemp("multihost")


@pytest.fixture(scope="module")
def expected(folder):
    """What one process with four devices answers."""

    async def one_process():
        async with cluster(folder, 1, 4, 2, 2) as alone:
            return await answers(alone.client, REQUESTS)

    found = asyncio.run(one_process())
    assert {end for _, end in found} == {"length"}
    return found


async def served_through_migrations(served: Cluster) -> list[tuple[list[int], str]]:
    """The answers, with placement decisions meanwhile; all routed tokens are counted, and nothing was compiled."""
    client = served.client

    async def rebalance() -> None:
        while True:
            await client.rebalance()
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(rebalance())
    found = await answers(client, REQUESTS)
    asking.cancel()
    status = await client.status()
    assert status.placement.experts_moved > 0
    assert status.steps.compiles_after_warmup == 0
    counts_LSE = await client.counts("total")
    tokens_S = per_engine(status, "tokens_computed")
    np.testing.assert_array_equal(counts_LSE.sum(axis=2), np.tile(tokens_S, (LAYERS, 1)) * TOP_K)
    return found


async def settled(served: Cluster) -> np.ndarray:
    """The placement when nothing moves any more."""
    before_LE = None
    while True:
        placement_LE = (await served.client.placement()).slot_of_expert_LE
        if before_LE is not None and np.array_equal(placement_LE, before_LE):
            return placement_LE
        before_LE = placement_LE
        await asyncio.sleep(1.0)


async def under_load(served: Cluster) -> list[asyncio.Task[tuple[list[int], str]]]:
    """Streams that have begun and are far from their ends: there are rows for four of them at a time."""
    before = (await served.client.status()).steps.count
    streams = [asyncio.create_task(answer(served.client, i, 60)) for i in range(24)]
    while (await served.client.status()).steps.count < before + 3:
        await asyncio.sleep(0.01)
    return streams


async def first_life(folder, expected, options) -> np.ndarray:
    """Learns a placement, drains and saves; returns the placement."""
    async with cluster(folder, 2, 2, 2, 2, *options, "--save", str(folder / "saved")) as served:
        assert await served_through_migrations(served) == expected
        placement_LE = await settled(served)
        streams = await under_load(served)
        for process in served.processes[::-1]:  # as a manager of jobs does, followers too
            process.popen.send_signal(signal.SIGTERM)
        assert {(len(tokens), end) for tokens, end in await asyncio.gather(*streams)} == {(60, "length")}
        assert await exit_codes(served.processes, END_S) == [0, 0], printed(served.processes)
        assert "commands to each of 1 processes" in served.leader.output()
        assert "process 0 says when to end" in served.processes[1].output()
    assert is_orbax(folder / "saved")
    return placement_LE


async def lost(served: Cluster, index: int) -> None:
    """One process dies under load: clients are told, and the other one ends with an error."""
    streams = await under_load(served)
    served.processes[index].popen.kill()
    began = time.monotonic()
    codes = await exit_codes(served.processes, NOTICED_S)
    assert codes[1 - index] == 1, printed(served.processes)
    assert time.monotonic() - began < NOTICED_S
    ends = [end for _, end in await asyncio.gather(*streams)]
    assert all(end == "length" or end.startswith("UNAVAILABLE") for end in ends), ends
    assert any(end.startswith("UNAVAILABLE") for end in ends)
    said = f"process {index} is gone", f"process {index} (127.0.0.1) is gone"
    assert any(text in served.processes[1 - index].output() for text in said)
    if index == 1:
        assert any(text in end for end in ends for text in said), ends


def test_two_processes_of_two_devices(folder, expected):
    options = ("--placement-state", str(folder / "placement.npz"))

    async def lives():
        placement_LE = await first_life(folder, expected, options)
        np.testing.assert_array_equal(load_placement(folder / "placement.npz")[0], placement_LE)
        for index in (1, 0):
            async with cluster(folder, 2, 2, 2, 2, *options) as served:
                found = await served.client.placement()
                np.testing.assert_array_equal(found.slot_of_expert_LE, placement_LE)
                assert await answer(served.client, 3) == expected[3]
                await lost(served, index)

    asyncio.run(lives())


def command_tls(folder) -> tuple[str, ...]:
    """Options for a certificate as docs/multihost.md makes it; none without openssl."""
    if shutil.which("openssl") is None:
        return ()
    key, cert = folder / "command.key", folder / "command.crt"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650")
    words = ("openssl", "req", "-x509", *new_key, "-subj", "/CN=gimbal", "-keyout", str(key), "-out", str(cert))
    subprocess.run(words, check=True, capture_output=True)
    return "--command-cert", str(cert), "--command-key", str(key)


def test_four_processes_of_one_device_that_slurm_started(folder, expected):
    async def life():
        async with cluster(folder, 4, 1, 2, 2, *command_tls(folder), slurm=True) as served:
            assert await served_through_migrations(served) == expected
            served.leader.popen.send_signal(signal.SIGTERM)
            assert await exit_codes(served.processes, END_S) == [0] * 4, printed(served.processes)

    asyncio.run(life())
