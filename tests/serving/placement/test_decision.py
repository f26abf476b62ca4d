"""One decision over two nodes, where distances differ."""

import numpy as np
import pytest

from gimbal_jax.config import MeshConfig, PlacementConfig, ServerConfig
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.objective import placement_cost_L
from gimbal_jax.scheduler.placement import propose, static_placement
from gimbal_jax.scheduler.traffic import far_share, imbalance_L, remote_share
from gimbal_jax.serving.placement.decision import decide, gain_of

MESH = MeshConfig(dp=4, tp=1, nodes=2)
CONFIG = ServerConfig(MESH, placement=PlacementConfig("gimbal_refined"))
OLD_LE = static_placement(2, 16, 4)
# Each node as a whole uses the other node's experts most, but no single source does.
COUNTS_LSE = np.repeat(np.array([[[40, 30], [0, 30], [30, 40], [30, 0]]] * 2), 8, axis=2)


def test_decision_uses_node_distances_and_measures_far_share():
    decision = decide(propose, COUNTS_LSE, OLD_LE, CONFIG, COUNTS_LSE, None)
    new_LE = propose(COUNTS_LSE, OLD_LE, MESH, CONFIG.placement).slot_of_expert_LE
    assert np.array_equal(decision.proposal.slot_of_expert_LE, new_LE)
    for found, slots_LE in (decision.before, OLD_LE), (decision.after, new_LE):
        placed = COUNTS_LSE, slots_LE
        assert found.far_share == far_share(*placed, MESH)
        assert found.remote_share == remote_share(*placed, 4)
        assert found.imbalance == imbalance_L(*placed, 4).mean()
    assert (decision.before.far_share, decision.after.far_share) == (0.6, 0.4)
    assert decision.achieved_gain is None


def test_achieved_gain_uses_node_distances():
    new_LE = propose(COUNTS_LSE, OLD_LE, MESH, CONFIG.placement).slot_of_expert_LE
    apart_SR = distance_SR(MESH, CONFIG.placement.far_distance)
    before, after = (
        placement_cost_L(COUNTS_LSE, slots_LE, OLD_LE, apart_SR, CONFIG.placement).mean()
        for slots_LE in (OLD_LE, new_LE)
    )
    gain = gain_of(COUNTS_LSE, new_LE, OLD_LE, CONFIG)
    gain_on_one_node = gain_of(COUNTS_LSE, new_LE, OLD_LE, ServerConfig(MeshConfig(4, 1), placement=CONFIG.placement))
    assert gain == pytest.approx(1 - after / before)
    assert gain is not None and gain_on_one_node is not None and gain > 0.15 > gain_on_one_node
    judged = decide(propose, COUNTS_LSE, new_LE, CONFIG, COUNTS_LSE, OLD_LE)
    assert judged.achieved_gain == gain


def test_invalid_far_distance_raises():
    with pytest.raises(ValueError, match=r"far_distance 0.*: must be a finite number of at least 1"):
        decide(
            propose, COUNTS_LSE, OLD_LE, ServerConfig(MESH, placement=PlacementConfig(far_distance=0)), COUNTS_LSE, None
        )
