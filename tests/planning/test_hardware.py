"""The GPU kinds of gpus.toml and the networks of links.toml, and how users name them."""

import pytest

from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.planning.hardware import Gpu, Link, gpu_kinds, link_kinds, parse_gpus, parse_link

KINDS, LINKS = gpu_kinds(), link_kinds()


def test_the_kinds_that_users_rent_are_there():
    assert list(KINDS) == ["H100", "H200", "A100-80", "B200", "L40S"]


@pytest.mark.parametrize("gpu", KINDS.values(), ids=KINDS)
def test_facts_are_plausible(gpu: Gpu):
    assert gpu.description.startswith("NVIDIA ")
    assert 40e9 < gpu.memory_bytes < 300e9
    # A wrong unit is off by at least eight.
    assert 10 < gpu.memory_bytes / gpu.bandwidth * 1e3 < 80  # ms to read it all
    assert 100 < gpu.bf16_flops / gpu.bandwidth < 500  # FLOP per byte
    assert 5 < gpu.bandwidth / gpu.link_bandwidth < 30
    assert 900 < gpu.bf16_flops / (gpu.cores * gpu.clock_ghz * 1e9) < 9000  # FLOP per clock and core
    assert 30e6 < gpu.l2_bytes < 200e6
    # A block may have all of a core's shared memory but the 1 KiB that CUDA keeps.
    assert gpu.shared_memory_per_core - gpu.shared_memory_per_block == 1024


def test_link_bandwidth_is_of_one_direction():
    assert {name: gpu.link_bandwidth / 1e9 for name, gpu in KINDS.items()} == {
        "H100": 450,
        "H200": 450,
        "A100-80": 300,
        "B200": 900,
        "L40S": 32,
    }


@pytest.mark.parametrize("gpu", KINDS.values(), ids=KINDS)
def test_backend_is_what_a_device_of_that_kind_runs(gpu: Gpu):
    class Device:
        platform = "gpu"
        compute_capability = "{}.{}".format(*gpu.compute_capability)

    assert gpu.backend == backend_of(Device())


@pytest.mark.parametrize(
    ("text", "name", "count", "nodes"),
    [
        ("4xH100", "H100", 4, 1),
        ("8xL40S", "L40S", 8, 1),
        ("16xa100-80", "A100-80", 16, 2),  # nodes of eight, unless the user says otherwise
        ("24xH100", "H100", 24, 3),
        ("1x16xH100", "H100", 16, 1),
        ("2x8xH100", "H100", 16, 2),
        ("1x8xh200", "H200", 8, 1),
        ("3x4xA100-80", "A100-80", 12, 3),
    ],
)
def test_nodes_number_and_kind(text, name, count, nodes):
    assert parse_gpus(text) == (KINDS[name], count, nodes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100", "--gpus H100: must be a number and a kind, as in 4xH100"),
        ("0xH100", "--gpus 0xH100: must be a number and a kind"),
        ("4 x H100", "--gpus 4 x H100: must be a number"),
        ("2x0xH100", "--gpus 2x0xH100: must be a number"),
        ("0x8xH100", "--gpus 0x8xH100: must be a number"),
        (
            "12xH100",
            "--gpus 12xH100: a node has 8 GPUs, which do not divide 12. Give whole nodes",
        ),
        ("2x2x8xH100", "--gpus 2x2x8xH100: the kind must be one of"),
        ("2x8xV100", "--gpus 2x8xV100: the kind must be one of"),
        ("4xV100", "--gpus 4xV100: the kind must be one of H100, H200, A100-80, B200, L40S"),
    ],
)
def test_what_is_not_understood_is_refused(text, message):
    with pytest.raises(ValueError) as refused:
        parse_gpus(text)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_rates_are_what_names_say(link: Link):
    gigabits = int(link.name.lstrip("ibroceth"))
    assert link.bandwidth == gigabits * 1e9 / 8
    assert f"{gigabits} Gb/s per GPU" in link.description


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_facts_of_links_are_plausible(link: Link):
    # A wrong unit is off by at least eight; no card is as fast as NVLink.
    assert 12e9 < link.bandwidth < min(gpu_kinds()[name].link_bandwidth for name in ("H100", "A100-80"))
    assert 0.5e-6 <= link.latency_s < 2e-6


def test_a_name_in_any_case_and_none_in_a_node():
    assert parse_link("IB400", 2) == LINKS["ib400"]
    assert parse_link(None, 1) is None


@pytest.mark.parametrize(
    ("text", "nodes", "message"),
    [
        (None, 2, "--link: 2 nodes need a network between them, one of ib400, ib200, roce400, roce200, eth100"),
        ("ib800", 2, "--link ib800: must be one of ib400, ib200, roce400, roce200, eth100"),
        ("ib400", 1, "--link ib400: --gpus is one node, which needs no network"),
    ],
)
def test_links_that_are_not_known_are_rejected(text, nodes, message):
    with pytest.raises(ValueError) as refused:
        parse_link(text, nodes)
    assert str(refused.value).startswith(message)
