from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MeshConfig, PlacementConfig
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.eplb import hierarchical_rank_LE
from gimbal_jax.scheduler.objective import placement_cost_L
from gimbal_jax.scheduler.placement import assign_slots, propose, static_placement
from gimbal_jax.scheduler.traffic import far_share, imbalance_L, rank_of_expert, remote_share
from tests.scheduler.windows import mesh_of, one_node_SR, random_placement, skewed_counts, traffic

GIMBAL, EPLB, REFINED = PlacementConfig(), PlacementConfig(policy="eplb"), PlacementConfig(policy="gimbal_refined")
HIERARCHICAL = PlacementConfig(policy="eplb_hierarchical")


def test_static_placement_is_contiguous():
    slot_LE = static_placement(2, 4, 2)
    assert slot_LE.tolist() == [[0, 1, 2, 3]] * 2
    assert slot_LE.dtype == np.int32


def test_error_lists_the_possible_rank_counts():
    with pytest.raises(ValueError, match=r"12 experts .* 5 ranks .* possible: 1, 2, 3, 4, 6, 12$"):
        static_placement(2, 12, 5)
    with pytest.raises(ValueError, match=r"12 experts .* 5 ranks .* possible: 1, 2, 3, 4, 6, 12$"):
        propose(np.ones((1, 1, 12), dtype=np.int64), np.arange(12)[None], MeshConfig(1, 5), GIMBAL)
    with pytest.raises(ValueError, match="the counts are of 3 sources, the mesh has 2"):
        propose(np.ones((1, 3, 12), dtype=np.int64), np.arange(12)[None], MeshConfig(2, 2), GIMBAL)
    with pytest.raises(ValueError, match=r"4 ranks cannot be split over 3 nodes; possible: 1, 2, 4$"):
        propose(np.ones((1, 2, 12), dtype=np.int64), np.arange(12)[None], MeshConfig(2, 2, 3), GIMBAL)


def test_arriving_experts_fill_vacated_slots_and_others_keep_theirs():
    # expert 0 leaves rank 0 (slot 2), expert 3 leaves rank 1 (slot 4); experts 1 and 4 stay put
    old_slot_LE = np.array([[2, 0, 1, 4, 3, 5]])
    new_slot_LE = assign_slots(np.array([[1, 0, 0, 0, 1, 1]]), old_slot_LE, 2)
    assert new_slot_LE.tolist() == [[4, 0, 1, 2, 3, 5]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_assigned_slots_are_a_permutation_on_the_given_ranks(layers, ranks, slots, seed):
    rng = np.random.default_rng(seed)
    old_slot_LE, wanted_LE = (random_placement(rng, layers, ranks * slots) for _ in range(2))
    rank_LE = rank_of_expert(wanted_LE, ranks)
    new_slot_LE = assign_slots(rank_LE, old_slot_LE, ranks)
    assert (np.sort(new_slot_LE, axis=1) == np.arange(ranks * slots)).all()
    assert (rank_of_expert(new_slot_LE, ranks) == rank_LE).all()
    stays_LE = rank_of_expert(old_slot_LE, ranks) == rank_LE
    assert (new_slot_LE[stays_LE] == old_slot_LE[stays_LE]).all()


@given(traffic(), st.sampled_from([GIMBAL, EPLB, HIERARCHICAL, REFINED, PlacementConfig(policy="static")]))
def test_proposals_are_placements_with_their_cost(case, config):
    counts_LSE, slot_LE, ranks = case
    proposal = propose(counts_LSE, slot_LE, mesh_of(counts_LSE, ranks), config)
    new_slot_LE = proposal.slot_of_expert_LE
    assert new_slot_LE.dtype == slot_LE.dtype
    assert (np.sort(new_slot_LE, axis=1) == np.arange(slot_LE.shape[1])).all()
    cost_L = placement_cost_L(counts_LSE, new_slot_LE, slot_LE, one_node_SR(counts_LSE, ranks), config)
    assert proposal.cost_after == pytest.approx(cost_L.mean())
    moved_LE = rank_of_expert(new_slot_LE, ranks) != rank_of_expert(slot_LE, ranks)
    assert proposal.experts_moved == moved_LE.sum() == (new_slot_LE != slot_LE).sum()
    assert moved_LE.any() or not proposal.apply
    assert config.policy != "static" or not moved_LE.any()
    assert not moved_LE[~counts_LSE.any(axis=(1, 2))].any()


@given(
    traffic(),
    st.sampled_from(["gimbal", "gimbal_refined"]),
    st.sampled_from([(1.0, 1.0, 0.1), (1.0, 0.0025, 1.0), (1.0, 1.0, 1.0), (1.0, 10.0, 0.0)]),
    st.sampled_from([min, max]),
)
def test_gimbal_never_costs_more_than_staying_in_any_layer(case, policy, weights, pick):
    counts_LSE, slot_LE, ranks = case
    mesh = mesh_of(counts_LSE, ranks, pick(n for n in range(1, ranks + 1) if ranks % n == 0))
    config = PlacementConfig(policy, *weights)
    proposal = propose(counts_LSE, slot_LE, mesh, config)
    apart_SR = distance_SR(mesh, config.far_distance)
    before_L = placement_cost_L(counts_LSE, slot_LE, slot_LE, apart_SR, config)
    after_L = placement_cost_L(counts_LSE, proposal.slot_of_expert_LE, slot_LE, apart_SR, config)
    assert (after_L <= before_L).all()
    assert proposal.cost_before == pytest.approx(before_L.mean())
    assert proposal.apply == (before_L.mean() - after_L.mean() > config.min_gain * before_L.mean())


def test_min_gain_decides_whether_to_apply():
    counts_LSE, slot_LE = np.array([[[8, 4, 2, 2]]]), static_placement(1, 4, 2)
    # ranks carry 12 and 4, then 10 and 6: load 0.25 -> 0.0625, two of four experts move for 0.05
    proposal = propose(counts_LSE, slot_LE, MeshConfig(1, 2), PlacementConfig(beta=1.0, gamma=0.1, min_gain=0.54))
    assert (proposal.cost_before, proposal.cost_after) == pytest.approx((0.25, 0.1125))
    assert proposal.slot_of_expert_LE.tolist() == [[0, 3, 2, 1]]
    assert (proposal.apply, proposal.experts_moved) == (True, 2)
    assert proposal.reason == "gain 55.00% exceeds min_gain 54.00%"
    refused = propose(counts_LSE, slot_LE, MeshConfig(1, 2), PlacementConfig(beta=1.0, gamma=0.1, min_gain=0.56))
    assert not refused.apply
    assert refused.reason == "gain 55.00% does not exceed min_gain 56.00%"


def test_refined_saves_more_than_greedy_without_more_moves():
    rng = np.random.default_rng(7)
    counts_LSE, slot_LE = skewed_counts(rng, 8, 2, 128, 30_000), static_placement(8, 128, 4)
    greedy, refined = (propose(counts_LSE, slot_LE, MeshConfig(2, 2), config) for config in (GIMBAL, REFINED))
    assert refined.cost_after < 0.995 * greedy.cost_after
    assert refined.experts_moved <= greedy.experts_moved


@pytest.mark.parametrize("policy", ["gimbal", "gimbal_refined"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_change_no_decision_between_equal_sources(policy, nodes):
    """Then no placement is nearer than another, and an uneven load must weigh what it does on one node."""
    counts_LSE = np.repeat(skewed_counts(np.random.default_rng(7), 4, 1, 64, 20_000), 4, axis=1)
    slot_LE, config = static_placement(4, 64, 8), PlacementConfig(policy)
    one, several = (propose(counts_LSE, slot_LE, MeshConfig(4, 2, n), config) for n in (1, nodes))
    assert one.apply and several.apply
    assert several.slot_of_expert_LE.tolist() == one.slot_of_expert_LE.tolist()
    assert (several.cost_before, several.cost_after) == pytest.approx((one.cost_before, one.cost_after))


def test_experts_go_to_the_node_that_uses_them_most_in_total():
    # Of 100 tokens of each expert one source has 40, but the two of the other node have 60 together.
    counts_LSE = np.repeat(np.array([[[40, 30], [0, 30], [30, 40], [30, 0]]]), 8, axis=2)
    slot_LE, mesh = static_placement(1, 16, 4), MeshConfig(4, 1, nodes=2)
    assert far_share(counts_LSE, slot_LE, mesh) == 0.6
    near_LE = propose(counts_LSE, slot_LE, mesh, REFINED).slot_of_expert_LE
    assert far_share(counts_LSE, near_LE, mesh) == 0.4
    assert imbalance_L(counts_LSE, near_LE, 4).tolist() == [1.0]
    on_one_node = propose(counts_LSE, slot_LE, MeshConfig(4, 1), REFINED)
    assert far_share(counts_LSE, on_one_node.slot_of_expert_LE, mesh) > 0.45


def test_hierarchical_eplb_packs_by_node():
    counts_LSE = skewed_counts(np.random.default_rng(7), 4, 2, 64, 20_000)
    slot_LE = static_placement(4, 64, 8)
    proposal = propose(counts_LSE, slot_LE, MeshConfig(2, 4, nodes=2), HIERARCHICAL)
    assert (proposal.apply, proposal.reason) == (True, "the packing differs")
    rank_LE = rank_of_expert(proposal.slot_of_expert_LE, 8)
    packed_LE = hierarchical_rank_LE(counts_LSE.sum(axis=1), 8, 2)
    for rank_E, packed_E in zip(rank_LE, packed_LE, strict=True):  # ranks of one source may have other names
        assert (rank_E // 4 == packed_E // 4).all()
        assert ((rank_E[:, None] == rank_E) == (packed_E[:, None] == packed_E)).all()
    on_one_node = (propose(counts_LSE, slot_LE, MeshConfig(2, 4), config) for config in (HIERARCHICAL, EPLB))
    assert len({proposal.slot_of_expert_LE.tobytes() for proposal in on_one_node}) == 1


def test_eplb_applies_every_placement_that_differs():
    slot_LE, mesh = static_placement(1, 4, 2), MeshConfig(1, 2)
    proposal = propose(np.array([[[5, 5, 5, 5]]]), slot_LE, mesh, EPLB)  # perfect already, and still it moves
    assert (proposal.apply, proposal.experts_moved, proposal.cost_before) == (True, 2, 0.0)
    again = propose(np.array([[[5, 5, 5, 5]]]), proposal.slot_of_expert_LE, mesh, EPLB)
    assert (again.apply, again.reason) == (False, "no expert would move")


@pytest.mark.parametrize("config", [GIMBAL, EPLB, HIERARCHICAL])
def test_an_empty_window_proposes_nothing(config):
    slot_LE = np.array([[2, 1, 0, 3]], dtype=np.int32)
    proposal = propose(np.zeros((1, 2, 4), dtype=np.int64), slot_LE, MeshConfig(2, 1), config)
    assert (proposal.apply, proposal.reason) == (False, "the window is empty")
    assert proposal.slot_of_expert_LE.tolist() == slot_LE.tolist()


def test_skewed_window_is_balanced_and_brought_closer_to_its_sources():
    rng = np.random.default_rng(7)
    slot_LE, ranks = static_placement(8, 128, 4), 4
    counts_LSE = skewed_counts(rng, 8, 2, 128, 30_000)
    proposal = propose(counts_LSE, slot_LE, MeshConfig(2, 2), GIMBAL)
    assert proposal.apply
    assert imbalance_L(counts_LSE, slot_LE, ranks).mean() > 1.15
    assert imbalance_L(counts_LSE, proposal.slot_of_expert_LE, ranks).mean() < 1.05
    assert remote_share(counts_LSE, proposal.slot_of_expert_LE, ranks) < 0.9 * remote_share(counts_LSE, slot_LE, ranks)
    assert proposal.experts_moved < 0.35 * slot_LE.size
    # and the next window of the same kind finds little left to do
    again = propose(counts_LSE, proposal.slot_of_expert_LE, MeshConfig(2, 2), replace(GIMBAL, min_gain=0.0))
    assert again.experts_moved < 0.2 * proposal.experts_moved


def test_uncalibrated_paper_weights_leave_a_balanced_mixture_alone():
    rng = np.random.default_rng(7)
    counts_LSE = np.repeat(skewed_counts(rng, 4, 1, 64, 20_000), 2, axis=1)  # both sources alike: only load to gain
    config = PlacementConfig(alpha=1.0, beta=0.0025, gamma=1.0)
    assert propose(counts_LSE, static_placement(4, 64, 4), MeshConfig(2, 2), config).reason == "no expert would move"
