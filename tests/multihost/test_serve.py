"""One server in several processes: the same tokens as in one process, with migrations, drain, loss and restart."""

import asyncio
import shutil
import signal
import subprocess

import numpy as np
import pytest

from gimbal_jax.model.orbax_checkpoint import is_orbax
from gimbal_jax.scheduler.counts_file import load_placement
from tests.e2e.rig import LAYERS, TOP_K
from tests.multihost.rig import Cluster, answer, answers, cluster, exit_codes, printed
from tests.serving.statuses import per_engine

REQUESTS = 64
END_S = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of compiled programs, shared by all tests."""
    return tmp_path_factory.mktemp("multihost")


@pytest.fixture(scope="module")
def expected(folder):
    """The answers of one process with four devices."""

    async def one_process():
        async with cluster(folder, 1, 4, 2, 2) as alone:
            return await answers(alone.client, REQUESTS)

    found = asyncio.run(one_process())
    assert {end for _, end in found} == {"length"}
    return found


async def check_migrations(served: Cluster, expected) -> None:
    """Check answers while experts move. All routed tokens must be counted, and nothing may be compiled."""
    client = served.client

    async def rebalance() -> None:
        while True:
            await client.rebalance()
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(rebalance())
    async with asyncio.timeout(END_S):
        assert await answers(client, REQUESTS) == expected
        while not (await client.status()).placement.experts_moved:  # the first decision takes long on a busy host
            assert await answers(client, REQUESTS) == expected
        asking.cancel()
        status = await client.status()
        wanted_LS = np.tile(per_engine(status, "tokens_computed"), (LAYERS, 1)) * TOP_K
        while (counts_LSE := await client.counts("total")).sum() < wanted_LS.sum():  # counts follow the tokens
            await asyncio.sleep(0.01)
    np.testing.assert_array_equal(counts_LSE.sum(axis=2), wanted_LS)
    assert status.steps.compiles_after_warmup == 0


async def under_load(served: Cluster) -> list[asyncio.Task[tuple[list[int], str]]]:
    """Streams that have begun and are far from their ends, because only four of them run at a time."""
    before = (await served.client.status()).steps.count
    streams = [asyncio.create_task(answer(served.client, i, 60)) for i in range(24)]
    while (await served.client.status()).steps.count < before + 3:
        await asyncio.sleep(0.01)
    return streams


async def first_life(folder, expected, options) -> None:
    """Learn a placement, drain and save."""
    async with cluster(folder, 2, 2, 2, 2, *options, "--save", str(folder / "saved")) as served:
        await check_migrations(served, expected)
        streams = await under_load(served)
        for process in served.processes[::-1]:  # job managers signal followers too
            process.popen.send_signal(signal.SIGTERM)
        assert {(len(tokens), end) for tokens, end in await asyncio.gather(*streams)} == {(60, "length")}
        assert await exit_codes(served.processes, END_S) == [0, 0], printed(served.processes)
        assert "commands to each of 1 processes" in served.leader.output()
        assert "process 0 decides when to end" in served.processes[1].output()
    assert is_orbax(folder / "saved")


async def lost(served: Cluster, index: int) -> None:
    """Kill one process under load. Clients get an error, and the other process exits with 1."""
    streams = await under_load(served)
    served.processes[index].popen.kill()
    codes = await exit_codes(served.processes, END_S)
    assert codes[1 - index] == 1, printed(served.processes)
    ends = [end for _, end in await asyncio.gather(*streams)]
    assert all(end == "length" or end.startswith("UNAVAILABLE") for end in ends), ends
    assert any(end.startswith("UNAVAILABLE") for end in ends)
    reason = "process 0 is gone" if index == 0 else "process 1 (127.0.0.1) is gone"
    assert reason in served.processes[1 - index].output()
    if index == 1:
        assert any(reason in end for end in ends), ends


def test_two_processes_serve_drain_lose_each_other_and_restart_with_their_placement(folder, expected):
    options = ("--placement-state", str(folder / "placement.npz"))

    async def lives():
        await first_life(folder, expected, options)
        placement_LE, _ = load_placement(folder / "placement.npz")
        for index in (1, 0):
            async with cluster(folder, 2, 2, 2, 2, *options) as served:
                found = await served.client.placement()
                np.testing.assert_array_equal(found.slot_of_expert_LE, placement_LE)
                assert await answer(served.client, 3) == expected[3]
                await lost(served, index)

    asyncio.run(lives())


def command_tls(folder) -> tuple[str, ...]:
    """Options for a certificate as docs/multihost.md makes it. Without openssl, an option for plain TCP."""
    if shutil.which("openssl") is None:
        return "--trusted-network", "on"
    key, cert = folder / "command.key", folder / "command.crt"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650")
    words = ("openssl", "req", "-x509", *new_key, "-subj", "/CN=gimbal", "-keyout", str(key), "-out", str(cert))
    subprocess.run(words, check=True, capture_output=True)
    return "--command-cert", str(cert), "--command-key", str(key)


def test_four_processes_started_by_slurm_serve_with_tls_between_them(folder, expected):
    async def life():
        async with cluster(folder, 4, 1, 2, 2, *command_tls(folder), slurm=True) as served:
            await check_migrations(served, expected)
            served.leader.popen.send_signal(signal.SIGTERM)
            assert await exit_codes(served.processes, END_S) == [0] * 4, printed(served.processes)

    asyncio.run(life())
