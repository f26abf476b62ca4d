import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MeshConfig
from gimbal_jax.scheduler.distance import away_SR, distance_SR

meshes = st.builds(
    lambda dp, tp, pick: MeshConfig(dp, tp, pick([n for n in range(1, dp * tp + 1) if dp * tp % n == 0])),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([min, max, lambda numbers: numbers[len(numbers) // 2]]),
)


def test_distances_worked_example():
    # Two engines of two ranks on each of two nodes. Of the others two ranks are near and four are far:
    # 2 * 1 + 4 * 4 = 18, so the mean is 3.
    apart_SR = distance_SR(MeshConfig(dp=4, tp=2, nodes=2), far=4.0)
    near, far = 1 / 3, 4 / 3
    assert apart_SR.tolist() == [
        pytest.approx([0, 0, near, near, far, far, far, far]),
        pytest.approx([near, near, 0, 0, far, far, far, far]),
        pytest.approx([far, far, far, far, 0, 0, near, near]),
        pytest.approx([far, far, far, far, near, near, 0, 0]),
    ]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 4), (4, 1), (3, 2)])
def test_on_one_node_mean_distance_equals_the_remote_share_exactly(dp, tp):
    apart_SR = distance_SR(MeshConfig(dp, tp), 9.1)
    assert apart_SR.dtype == np.float64
    assert apart_SR.tolist() == (1 - np.kron(np.eye(dp), np.ones(tp))).tolist()


def test_engine_on_several_nodes_has_the_mean_distance_of_its_ranks():
    # Ranks 0 1 | 2 3 | 4 5 on three nodes; source 0 has the first three, source 1 the others.
    mesh = MeshConfig(dp=2, tp=3, nodes=3)
    assert away_SR(mesh)[0] == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1])
    apart_SR = distance_SR(mesh, 7.0)
    assert (apart_SR[0, :3] == 0).all() and (apart_SR[1, 3:] == 0).all()
    assert apart_SR[0, 3] / apart_SR[0, 4] == pytest.approx((1 / 3 * 1 + 2 / 3 * 7) / 7)
    assert not distance_SR(MeshConfig(dp=1, tp=4, nodes=2), 9.0).any()


@given(meshes, st.floats(1, 100))
def test_far_ratio_is_kept_and_the_mean_of_other_ranks_is_one(mesh, far):
    apart_SR = distance_SR(mesh, far)
    links = {}
    for s, r in np.ndindex(apart_SR.shape):
        if r // mesh.tp == s:
            assert apart_SR[s, r] == 0
        else:
            own = range(s * mesh.tp, (s + 1) * mesh.tp)
            links[s, r] = np.mean([1 if q // mesh.ranks_per_node == r // mesh.ranks_per_node else far for q in own])
    scale = np.mean(list(links.values())) if links else 1.0
    for at, link in links.items():
        assert apart_SR[at] == pytest.approx(link / scale)


@pytest.mark.parametrize("far", [0.9, -1.0, float("nan"), float("inf")])
def test_rejects_a_far_distance_below_one(far):
    with pytest.raises(ValueError, match=r"far_distance .*: must be a finite number of at least 1"):
        distance_SR(MeshConfig(2, 2), far)


@pytest.mark.parametrize("nodes", [0, 3, 8])
def test_rejects_ranks_that_do_not_divide_over_the_nodes(nodes):
    with pytest.raises(ValueError, match=f"4 ranks cannot be split over {nodes} nodes; possible: 1, 2, 4$"):
        distance_SR(MeshConfig(2, 2, nodes), 9.0)
