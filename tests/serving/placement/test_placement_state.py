import numpy as np
import pytest

from gimbal_jax.config import MeshConfig
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.placement.files import PlacementState
from tests.e2e.rig import EXPERTS, LAYERS, MODEL

MESH = MeshConfig(2, 2)


def test_the_last_placement_is_found_again(tmp_path):
    path = tmp_path / "new" / "placement.npz"
    first = PlacementState(path, MODEL, MESH)
    assert first.found_LE is None
    static_LE = static_placement(LAYERS, EXPERTS, MESH.ranks)
    first.keep(static_LE)
    first.keep(static_LE[:, ::-1].copy())
    first.close()
    second = PlacementState(path, MODEL, MESH)
    np.testing.assert_array_equal(second.found_LE, static_LE[:, ::-1])
    second.close()


def test_a_file_of_another_mesh_is_refused(tmp_path):
    path = tmp_path / "placement.npz"
    state = PlacementState(path, MODEL, MESH)
    state.keep(static_placement(LAYERS, EXPERTS, MESH.ranks))
    state.close()
    with pytest.raises(ValueError, match=r"on 4 ranks, not .* on 2 ranks"):
        PlacementState(path, MODEL, MeshConfig(1, 2))


def test_a_disk_that_fails_is_said_and_stops_nothing(tmp_path, caplog):
    path = tmp_path / "placement.npz"
    state = PlacementState(path, MODEL, MESH)
    path.mkdir()
    state.keep(static_placement(LAYERS, EXPERTS, MESH.ranks))
    state.close()
    assert "the placement is not kept" in caplog.text
