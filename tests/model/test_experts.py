"""Moves of experts between ranks: the table of a round, and the round on devices."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gimbal_jax.config import MeshConfig
from gimbal_jax.model.experts import exchange_table, move_experts
from gimbal_jax.model.sharding import RANKS, make_mesh
from gimbal_jax.scheduler.migration import plan_rounds

SLOTS, RANK_COUNT, ROWS_PER_PAIR = 16, 4, 2
MESH = make_mesh(MeshConfig(2, 2))
move = jax.jit(partial(move_experts, mesh=MESH), donate_argnums=0)


def table(src: list[int], dst: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return exchange_table(np.array(src, np.int32), np.array(dst, np.int32), SLOTS, RANK_COUNT, ROWS_PER_PAIR)


def weights(seed: int) -> tuple[list[np.ndarray], tuple[jax.Array, ...]]:
    """Return two arrays in slot order and of different types, on the host and on the mesh."""
    rng = np.random.default_rng(seed)
    host = [rng.normal(size=(SLOTS, 3, 5)).astype(np.float32), rng.integers(0, 100, (SLOTS, 2)).astype(np.int8)]
    return host, tuple(jax.device_put(array.copy(), NamedSharding(MESH, P(RANKS))) for array in host)


def test_table_by_hand():
    """Slots 0-3 belong to rank 0 and 4-7 to rank 1. The moves are 0 -> 5, 5 -> 6 -> 0 and 1 -> 7 -> 1."""
    send, receive = table([0, 5, 6, 1, 7], [5, 6, 0, 7, 1])
    none = [0, 0], [4, 4]
    wanted = {(0, 1): ([0, 1], [1, 3]), (1, 1): ([1, 0], [2, 4]), (1, 0): ([2, 3], [0, 1])}
    for pair in np.ndindex(RANK_COUNT, RANK_COUNT):
        assert (send[pair].tolist(), receive[pair].tolist()) == wanted.get(pair, none), pair


def test_table_rejects_more_rows_than_fit():
    with pytest.raises(ValueError, match="more than 2 rows from rank 0 to rank 3"):
        table([0, 1, 2], [12, 13, 14])


@pytest.mark.parametrize("seed", range(8))
def test_rounds_equal_a_permutation_of_the_rows(seed):
    """After each round of a plan, each slot holds the expert of the round's placement."""
    rng = np.random.default_rng(seed)
    old, new = (rng.permutation(SLOTS).astype(np.int32) for _ in range(2))
    host, placed = weights(seed)
    by_expert = [array[old] for array in host]
    rounds = plan_rounds(old, new, RANK_COUNT, ROWS_PER_PAIR)
    for moves in rounds:
        placed = move(placed, *table(moves.src_slot.tolist(), moves.dst_slot.tolist()))
        for array, experts in zip(placed, by_expert, strict=True):
            np.testing.assert_array_equal(np.asarray(array)[moves.slot_of_expert_E], experts)
            assert array.sharding.is_equivalent_to(NamedSharding(MESH, P(RANKS)), array.ndim)
    np.testing.assert_array_equal(rounds[-1].slot_of_expert_E, new)


def test_an_empty_round_changes_nothing():
    host, placed = weights(0)
    for array, before in zip(move(placed, *table([], [])), host, strict=True):
        np.testing.assert_array_equal(array, before)


def test_weights_are_updated_in_place():
    """The result has the donated buffers, so a move needs no second copy of a layer."""
    _, placed = weights(0)
    placed = move(placed, *table([], []))  # the first buffers may be numpy's, which cannot be donated
    before = [[shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards] for array in placed]
    moved = move(placed, *table([0, 5], [5, 0]))
    assert all(array.is_deleted() for array in placed)
    assert [[shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards] for array in moved] == before


def test_only_moved_rows_travel():
    """A gather over the sharded axis would copy the whole layer to every device."""
    _, placed = weights(0)
    program = move.lower(placed, *table([0, 5], [5, 0])).compile().as_text()
    assert program is not None and "all-to-all" in program
    assert "all-gather" not in program
