import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.scheduler.eplb import hierarchical_rank_LE, packed_rank_LE
from tests.scheduler.windows import traffic


def test_packing_worked_example():
    # 8 -> rank 0, 4 -> rank 1 (4 < 8), 2 -> rank 1 (4 < 8), which is full, 2 -> rank 0
    assert packed_rank_LE(np.array([[8, 4, 2, 2]]), 2).tolist() == [[0, 1, 1, 0]]
    assert packed_rank_LE(np.array([[2, 8, 2, 4], [1, 1, 1, 1]]), 2).tolist() == [[1, 0, 0, 1], [0, 1, 0, 1]]
    # With one expert on each rank there is nothing to balance.
    assert packed_rank_LE(np.array([[1, 2, 3]]), 3).tolist() == [[0, 1, 2]]


@given(traffic())
def test_packing_equals_balanced_packing_layer_by_layer(case):
    counts_LSE, _, ranks = case
    load_LE = counts_LSE.sum(axis=1)
    room = load_LE.shape[1] // ranks
    for load_E, rank_E in zip(load_LE, packed_rank_LE(load_LE, ranks), strict=True):
        packs: list[list[int]] = [[] for _ in range(ranks)]
        order = np.arange(len(load_E)) if room == 1 else np.argsort(-load_E, kind="stable")
        for expert in order.tolist():
            # Packs that were filled first are full first where each holds one.
            pack = min((pack for pack in packs if len(pack) < room), key=lambda pack: load_E[pack].sum())
            pack.append(expert)
        assert [np.flatnonzero(rank_E == rank).tolist() for rank in range(ranks)] == [sorted(pack) for pack in packs]


def pack(load: dict[int, int], packs: int) -> list[list[int]]:
    """Items in each pack: by falling load, each to the lightest pack that has room; single ones in order."""
    room = len(load) // packs
    if room == 1:
        return [[item] for item in load]
    packed: list[list[int]] = [[] for _ in range(packs)]
    for item in sorted(load, key=lambda item: -load[item]):
        min((p for p in packed if len(p) < room), key=lambda p: sum(load[i] for i in p)).append(item)
    return packed


@given(traffic(), st.data())
def test_hierarchical_packs_nodes_then_their_ranks(case, data):
    counts_LSE, _, ranks = case
    nodes = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    load_LE = counts_LSE.sum(axis=1)
    rank_LE = hierarchical_rank_LE(load_LE, ranks, nodes)
    for load_E, rank_E in zip(load_LE.tolist(), rank_LE, strict=True):
        of_nodes = pack(dict(enumerate(load_E)), nodes) if nodes > 1 else [list(range(len(load_E)))]
        of_ranks = [p for experts in of_nodes for p in pack({e: load_E[e] for e in experts}, ranks // nodes)]
        assert [np.flatnonzero(rank_E == rank).tolist() for rank in range(ranks)] == [sorted(p) for p in of_ranks]
    if nodes == 1:
        assert (rank_LE == packed_rank_LE(load_LE, ranks)).all()


def test_hierarchical_balances_nodes_before_ranks():
    # Global: 9 -> rank 0, 8 -> 1, 7 -> 2, 6 -> 3, 1, 1 -> 3 and so on: the two nodes get 9 + 8 and 7 + 6.
    load_LE = np.array([[9, 8, 7, 6, 1, 1, 1, 1]])
    node_E = hierarchical_rank_LE(load_LE, 4, 2)[0] // 2
    assert np.bincount(node_E, weights=load_LE[0]).tolist() == [17, 17]
    assert np.bincount(packed_rank_LE(load_LE, 4)[0] // 2, weights=load_LE[0]).tolist() == [19, 15]


def test_hierarchical_rejects_nodes_that_do_not_divide():
    with pytest.raises(ValueError, match="6 ranks cannot be split into 4"):
        hierarchical_rank_LE(np.ones((1, 24), np.int64), 6, 4)
    with pytest.raises(ValueError, match="6 experts cannot be split into 4"):
        hierarchical_rank_LE(np.ones((1, 6), np.int64), 4, 4)
