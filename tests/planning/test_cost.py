"""What steps cost: by hand, and against counting."""

from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig, PlacementConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.memory import kv_bytes_per_token, weight_bytes
from gimbal_jax.model.sizes import expert_bytes
from gimbal_jax.planning.cost import (
    decode_seconds,
    exchange_bytes,
    far_copies,
    far_exchange_bytes,
    flops_per_token,
    link_seconds,
    migration_cost,
    prefill_seconds,
    remote_ranks,
    tensor_parallel_bytes,
    weights_read,
)
from gimbal_jax.planning.hardware import gpu_kinds, link_kinds
from gimbal_jax.scheduler.migration import plan_rounds

QWEN = PRESETS["Qwen3-30B-A3B"]
H100 = gpu_kinds()["H100"]
IB400 = link_kinds()["ib400"]


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_ranks_that_a_token_needs_are_those_of_random_choices(ranks):
    rng = np.random.default_rng(0)
    chosen = rng.permuted(np.tile(np.arange(128), (20_000, 1)), axis=1)[:, :8]
    needed = (chosen[..., None] // (128 // ranks) == np.arange(1, ranks)).any(axis=1).sum(axis=1)
    assert remote_ranks(QWEN, ranks, "sparse") == pytest.approx(needed.mean(), rel=0.01)
    assert remote_ranks(QWEN, ranks, "gather") == ranks - 1


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (16, 2), (16, 4), (64, 8)])
def test_bytes_across_nodes_are_those_of_random_choices_under_a_random_placement(ranks, nodes):
    rng = np.random.default_rng(0)
    rank_of_expert = rng.permutation(128) * ranks // 128
    near = far = 0
    tokens = 4000
    for _ in range(tokens):
        home = rng.integers(ranks)
        for rank in {int(rank_of_expert[e]) for e in rng.choice(128, 8, replace=False)} - {home}:
            if rank // (ranks // nodes) == home // (ranks // nodes):
                near += 1
            else:
                far += 1
    one = 2 * 4096 + 8 * 8
    crossing = far_exchange_bytes(QWEN, ranks, nodes, "sparse")
    assert crossing == pytest.approx(far / tokens * one, rel=0.02)
    assert exchange_bytes(QWEN, ranks, "sparse") - crossing == pytest.approx(near / tokens * one, rel=0.04)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (16, 2), (64, 8), (8, 8)])
def test_gather_crosses_once_for_each_other_node_and_the_rest_is_passed_on_within(ranks, nodes):
    # Each other node gets a token once, and passes it on to the others of its GPUs; so does the token's own.
    per_node = ranks // nodes
    assert far_copies(QWEN, ranks, nodes, "gather") == nodes - 1
    assert remote_ranks(QWEN, ranks, "gather") - (nodes - 1) == nodes * (per_node - 1)


@pytest.mark.parametrize("form", ["gather", "sparse"])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_nothing_crosses_one_node(form, ranks):
    assert far_copies(QWEN, ranks, 1, form) == 0


def test_bytes_over_links_by_hand():
    # 3 other ranks: 2048 numbers there and back; slot, weight and position of 8 experts.
    assert exchange_bytes(QWEN, 4, "gather") == 3 * (2 * 4096 + 12 * 8)
    # None of 8 experts is among the 32 of a rank: 96 / 128 * 95 / 127 * ...
    missed = np.prod([(96 - i) / (128 - i) for i in range(8)])
    assert exchange_bytes(QWEN, 4, "sparse") == pytest.approx(3 * (1 - missed) * (2 * 4096 + 8 * 8))
    assert exchange_bytes(QWEN, 1, "gather") == exchange_bytes(QWEN, 1, "sparse") == 0
    # All-reduce: 2 * (tp - 1) / tp of a token on each of tp devices; all-gather: half of that.
    assert tensor_parallel_bytes(QWEN, 4) == 3 * 3 * 4096
    assert tensor_parallel_bytes(QWEN, 1) == 0


def test_links_carry_each_layer_and_the_logits_evenly():
    tokens, chosen = 1000, 10
    total = tokens * 48 * (exchange_bytes(QWEN, 4, "gather") + 3 * 4096) + chosen * 151936 * 4
    seconds = link_seconds(QWEN, MeshConfig(2, 2), H100, "gather", tokens, chosen)
    assert seconds == pytest.approx(total / 4 / 450e9)


@pytest.mark.parametrize(("form", "waits"), [("gather", 2), ("sparse", 3)])
@pytest.mark.parametrize("bandwidth", [12.5e9, 450e9])
def test_what_crosses_goes_beside_what_stays(form, waits, bandwidth):
    mesh, link = MeshConfig(4, 4, 2), replace(IB400, bandwidth=bandwidth)
    far = far_exchange_bytes(QWEN, 16, 2, form)
    near = exchange_bytes(QWEN, 16, form) - far
    each = 1000 * 48 / 16  # tokens and layers of a GPU
    within = each * 3 * 3 * 4096 / 450e9  # of engines: all-reduces and all-gathers of 4
    seconds = within + each * max(near / 450e9, far / bandwidth) + 48 * waits * 0.6e-6
    assert (far / bandwidth > near / 450e9) == (bandwidth == 12.5e9 or form == "sparse")
    assert link_seconds(QWEN, mesh, H100, form, 1000, 0, link) == pytest.approx(seconds)


def test_a_slower_network_takes_longer_and_one_node_needs_none():
    mesh, one = MeshConfig(4, 2, 2), MeshConfig(4, 2)
    for form in ("gather", "sparse"):
        of_kinds = [link_kinds()[name] for name in ("ib400", "ib200", "eth100")]
        for time in (
            lambda link, form=form: decode_seconds(QWEN, mesh, H100, form, 128, 2000, link),
            lambda link, form=form: prefill_seconds(QWEN, mesh, H100, form, 8192, 1000, link),
        ):
            times = [time(link) for link in of_kinds]
            assert times == sorted(times) and times[0] < times[-1]
        assert link_seconds(QWEN, one, H100, form, 100, 10, IB400) == link_seconds(QWEN, one, H100, form, 100, 10)


def test_several_nodes_without_a_network_have_no_times():
    with pytest.raises(ValueError, match="link: several nodes need a network between them, one of ib400"):
        prefill_seconds(QWEN, MeshConfig(4, 2, 2), H100, "gather", 8192, 1000)
    with pytest.raises(ValueError, match="link: several nodes need a network"):
        migration_cost(QWEN, 8, H100, PlacementConfig(), nodes=2)


def test_a_network_is_no_faster_than_the_gpu_s_own_link():
    l40s = gpu_kinds()["L40S"]
    mesh, slow = MeshConfig(4, 1, 2), replace(IB400, bandwidth=l40s.link_bandwidth)
    assert link_seconds(QWEN, mesh, l40s, "sparse", 100, 1, IB400) == link_seconds(
        QWEN, mesh, l40s, "sparse", 100, 1, slow
    )


def test_experts_that_no_token_chose_are_not_read():
    mesh, weights = MeshConfig(2, 2), weight_bytes(QWEN, MeshConfig(2, 2))
    rest = weights.total - weights.experts
    # One token reads 8 experts of each layer, 2 on each GPU.
    assert weights_read(QWEN, mesh, 1) == pytest.approx(rest + 48 * 2 * expert_bytes(QWEN))
    assert weights_read(QWEN, mesh, 10_000) == pytest.approx(weights.total)
    rng = np.random.default_rng(0)
    active = [len(np.unique([rng.permutation(128)[:8] for _ in range(16)])) for _ in range(300)]
    read = rest + weights.experts * np.mean(active) / 128
    assert weights_read(QWEN, mesh, 16) == pytest.approx(read, rel=0.01)


def test_flops_are_twice_the_active_parameters_and_attention():
    # Of 48 layers: attention, router and 8 experts.
    attention = 2048 * 128 * (32 + 32 + 4 + 4)
    active = 48 * (attention + 2048 * 128 + 8 * 3 * 2048 * 768)
    assert flops_per_token(QWEN, 0) == 2 * active
    # Each token of context costs a product with its key and one with its value, in every head.
    assert flops_per_token(QWEN, 1000) - flops_per_token(QWEN, 0) == 48 * 1000 * 2 * 2 * 32 * 128
    half = replace(QWEN, moe_layers=tuple(range(0, 48, 2)))
    moe, dense = 2048 * 128 + 8 * 3 * 2048 * 768, 3 * 2048 * 6144
    assert flops_per_token(half, 0) == 2 * (48 * attention + 24 * moe + 24 * dense)


def test_floors_add_memory_and_links():
    mesh = MeshConfig(2, 2)
    links = link_seconds(QWEN, mesh, H100, "gather", 128, 128)
    # Each engine decodes 64 requests, and each of its GPUs holds half of their cache.
    read = weights_read(QWEN, mesh, 128) + 64 * 2000 * kv_bytes_per_token(QWEN) / 2
    assert decode_seconds(QWEN, mesh, H100, "gather", 128, 2000) == pytest.approx(read / 3.35e12 + links)

    links = link_seconds(QWEN, mesh, H100, "gather", 8192, 8)
    compute = 8192 * flops_per_token(QWEN, 500) / 4 / 989e12
    assert prefill_seconds(QWEN, mesh, H100, "gather", 8192, 1000) == pytest.approx(compute + links)
    # A few tokens wait for weights, not for the tensor cores.
    few = prefill_seconds(QWEN, mesh, H100, "gather", 32, 32) - link_seconds(QWEN, mesh, H100, "gather", 32, 1)
    assert few == pytest.approx(weights_read(QWEN, mesh, 32) / 3.35e12)


def test_migration_by_hand():
    cost = migration_cost(QWEN, 4, H100, PlacementConfig(rows_per_pair=2, migrate_bytes_per_tick=64 * 2**20))
    expert = 9_437_184
    # A full round moves 2 experts over each of 12 links, more than the limit.
    assert cost.step_bytes == 24 * expert
    assert cost.step_seconds == pytest.approx(6 * expert / 450e9)
    assert cost.layer_seconds == pytest.approx(32 * expert / 450e9)
    assert cost.layer_steps == 16
    assert migration_cost(QWEN, 1, H100, PlacementConfig()).step_bytes == 0


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (4, 2), (8, 3), (16, 16)])
def test_a_layer_passed_on_takes_the_steps_of_its_rounds(ranks, rows):
    here_E = np.arange(128)
    rounds = plan_rounds(here_E, (here_E + 128 // ranks) % 128, ranks, rows)
    limit = 40 * expert_bytes(QWEN)
    steps, moved = 0, limit
    for one in rounds:
        if moved >= limit:
            steps, moved = steps + 1, 0
        moved += len(one.src_slot) * expert_bytes(QWEN)
    placement = PlacementConfig(rows_per_pair=rows, migrate_bytes_per_tick=limit)
    assert migration_cost(QWEN, ranks, H100, placement).layer_steps == steps


def test_migration_across_nodes_by_hand():
    placement = PlacementConfig(rows_per_pair=2, migrate_bytes_per_tick=64 * 2**20)
    near, cost = (migration_cost(QWEN, 16, H100, placement, *of) for of in ((), (2, IB400)))
    expert = 9_437_184
    # A full round moves 2 experts from each of 16 GPUs to each of the 8 of the other node.
    assert cost.far_step_bytes == 16 * 8 * 2 * expert
    assert (cost.step_bytes, cost.layer_steps) == (near.step_bytes, near.layer_steps)
    assert cost.step_seconds == pytest.approx(8 * 2 * expert / 50e9 + 0.6e-6)
    # The last GPU of a node passes its 8 experts on to the next node.
    assert cost.layer_seconds == pytest.approx(8 * expert / 50e9 + 0.6e-6)
    assert near.far_step_bytes == 0
