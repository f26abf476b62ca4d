"""Which device holds what is what the shards hold."""

from dataclasses import replace

import jax
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.model.sharding import make_mesh, sharding_for
from gimbal_jax.model.step import abstract_model
from gimbal_jax.planning.picture import draw_mesh
from gimbal_jax.planning.show import ranges, shard_table, shards

QWEN = replace(PRESETS["Qwen3-30B-A3B"], num_layers=1, moe_layers=(0,))
IN_PLACE = np.arange(128)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4), (4, 1), (1, 1)])
def test_parts_are_those_of_the_shardings(dp, tp):
    mesh = make_mesh(MeshConfig(dp, tp))
    held = shards(QWEN, MeshConfig(dp, tp), IN_PLACE)
    _, weights = abstract_model(QWEN, QWEN.dtype, mesh)
    flat = dict(nnx.to_flat_state(weights))
    cache = sharding_for((None, "kv_heads"), (1, 4), mesh).devices_indices_map((1, 4))

    def part(path: tuple, axis: int, device: jax.Device) -> list[int]:
        value = flat[path].get_value()
        return list(range(*value.sharding.devices_indices_map(value.shape)[device][axis].indices(value.shape[axis])))

    layer = ("layers", 0)
    for shard, device in zip(held, mesh.devices.flat, strict=True):
        assert shard.engine == shard.rank // tp
        assert list(shard.heads) == part((*layer, "attention", "o"), 0, device)
        assert list(shard.vocabulary) == part(("embed",), 0, device)
        assert list(shard.experts) == part((*layer, "mlp", "gate_up"), 0, device)
        assert list(shard.kv_heads) == list(range(*cache[device][1].indices(4)))


@pytest.mark.parametrize("tp", [8, 16])
def test_kv_heads_are_where_their_query_heads_are(tp):
    for shard in shards(QWEN, MeshConfig(1, tp), IN_PLACE):
        assert list(shard.kv_heads) == sorted({head // 8 for head in shard.heads})
        assert shard.kv_copies == tp // 4


def test_nodes_hold_ranks_in_order():
    held = shards(QWEN, MeshConfig(4, 2, 2), IN_PLACE)
    assert [shard.node for shard in held] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [shard.engine for shard in held] == [0, 0, 1, 1, 2, 2, 3, 3]
    one_node = shards(QWEN, MeshConfig(4, 2), IN_PLACE)
    assert [replace(shard, node=0) for shard in held] == one_node
    headers = [[column.header for column in shard_table("title", of).columns] for of in (held, one_node)]
    assert headers[0] == ["node", *headers[1]]


def test_experts_are_by_the_placement():
    slots_E = np.random.default_rng(0).permutation(128)
    held = shards(QWEN, MeshConfig(2, 2), slots_E)
    assert sorted(expert for shard in held for expert in shard.experts) == list(range(128))
    for shard in held:
        assert [slots_E[expert] for expert in shard.experts] == list(range(32 * shard.rank, 32 * shard.rank + 32))


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="num_experts = 128 must be divisible"):
        shards(QWEN, MeshConfig(3, 1), IN_PLACE)
    with pytest.raises(ValueError, match="nodes = 3 must divide the 8 devices"):
        shards(QWEN, MeshConfig(4, 2, 3), IN_PLACE)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([0, 1, 2, 3], "0-3"), ([5], "5"), ([0, 2, 3, 9], "0, 2-3, 9"), (range(4, 8), "4-7"), (range(4, 5), "4")],
)
def test_runs_are_drawn_together(numbers, text):
    assert ranges(numbers) == text


def test_one_row_and_one_card_a_device(tmp_path):
    moved = shards(QWEN, MeshConfig(2, 2), np.random.default_rng(0).permutation(128))
    assert shard_table("title", moved).row_count == 4
    pixels = []
    for name, held in [("still", shards(QWEN, MeshConfig(2, 2), IN_PLACE)), ("moved", moved)]:
        draw_mesh("title", QWEN, held, tmp_path / f"{name}.png")
        pixels.append(matplotlib.image.imread(tmp_path / f"{name}.png"))
    assert pixels[0].shape == pixels[1].shape and min(pixels[0].shape[:2]) > 400
    # Frames of experts that have moved.
    still, framed = ((picture[..., :3].sum(axis=-1) < 0.1).sum() for picture in pixels)
    assert framed > 1.5 * still


def test_nodes_are_frames_around_their_cards(tmp_path):
    shares = {}
    for mesh in (MeshConfig(2, 2), MeshConfig(2, 2, 2), MeshConfig(1, 4, 4)):  # the last: an engine over four nodes
        path = tmp_path / f"{mesh.nodes}.png"
        draw_mesh("title", QWEN, shards(QWEN, mesh, IN_PLACE), path)
        picture = matplotlib.image.imread(path)[..., :3]
        tinted = (abs(picture - np.array([0xE8, 0xEE, 0xF7]) / 255) < 0.004).all(axis=-1)
        shares[mesh.nodes] = tinted.mean()
        if mesh.nodes > 1:  # rows of pixels with a frame, in one run for each node
            framed = np.concatenate([[False], tinted.mean(axis=1) > 0.01, [False]])
            assert (framed[1:] & ~framed[:-1]).sum() == mesh.nodes
    assert shares[1] == 0 and min(shares[2], shares[4]) > 0.05
