from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MeshConfig, PlacementConfig
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.objective import window_objective
from gimbal_jax.scheduler.placement import assign_slots, propose, static_placement
from gimbal_jax.scheduler.relabel import fewest_moves_rank_LE
from tests.scheduler.windows import skewed_counts


def test_ranks_of_one_source_are_permuted_to_save_moves():
    old_LE, two_SR = np.array([[0, 0, 1, 1, 2, 2, 3, 3]]), np.array([[0, 0, 1, 1], [1, 1, 0, 0]])
    # ranks 0 and 1 have changed places; so have 0 and 2, but those belong to different sources
    assert fewest_moves_rank_LE(np.array([[1, 1, 0, 0, 2, 2, 3, 3]]), old_LE, two_SR).tolist() == old_LE.tolist()
    across_LE = np.array([[2, 2, 1, 1, 0, 0, 3, 3]])
    assert fewest_moves_rank_LE(across_LE, old_LE, two_SR).tolist() == across_LE.tolist()
    assert fewest_moves_rank_LE(across_LE, old_LE, np.zeros((1, 4))).tolist() == old_LE.tolist()


def test_eplb_that_only_renames_ranks_moves_nothing():
    # by falling load 9 -> rank 0, 8 -> rank 1, 2 -> rank 1, 1 -> rank 0: what is in force, under other names
    slot_LE = assign_slots(np.array([[1, 0, 1, 0]]), static_placement(1, 4, 2), 2)
    proposal = propose(np.array([[[9, 8, 1, 2]]]), slot_LE, MeshConfig(1, 2), PlacementConfig(policy="eplb"))
    assert (proposal.experts_moved, proposal.reason) == (0, "no expert would move")


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.data())
def test_no_permutation_moves_fewer_experts_and_costs_stay_equal(sources, tp, slots, data):
    """On any nodes: only ranks that are equally far from every source may take each other's names."""
    ranks = sources * tp
    nodes = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    mesh = MeshConfig(sources, tp, nodes)
    apart_SR = distance_SR(mesh, 9.0)
    experts = ranks * slots
    old_slot_LE = rng.permuted(static_placement(2, experts, ranks), axis=1)
    old_LE, new_LE = old_slot_LE // slots, rng.permuted(np.tile(np.arange(experts) // slots, (2, 1)), axis=1)
    named_LE = fewest_moves_rank_LE(new_LE, old_LE, apart_SR)
    kinds = {tuple(column): np.flatnonzero((column == apart_SR.T).all(axis=1)) for column in apart_SR.T}
    assert nodes > 1 or len(kinds) == sources
    for named_E, new_E, old_E in zip(named_LE, new_LE, old_LE, strict=True):
        for alike in kinds.values():
            here_E = np.isin(new_E, alike)
            place_E = np.searchsorted(alike, new_E[here_E])
            fewest = min((np.array(order)[place_E] != old_E[here_E]).sum() for order in permutations(alike))
            assert (named_E[here_E] != old_E[here_E]).sum() == fewest
            assert np.isin(named_E[here_E], alike).all()
        # the same sets of experts share a rank
        assert ((named_E[:, None] == named_E) == (new_E[:, None] == new_E)).all()
    counts_LSE = skewed_counts(rng, 2, sources, experts, 500)
    objective = window_objective(counts_LSE, old_slot_LE, apart_SR, PlacementConfig())
    assert objective.comm_L(named_LE) == pytest.approx(objective.comm_L(new_LE))
    assert (objective.cost_L(named_LE) <= objective.cost_L(new_LE) + 1e-12).all()
