import numpy as np
from hypothesis import given

from gimbal_jax.scheduler.eplb import packed_rank_LE
from tests.scheduler.windows import traffic


def test_worked_example():
    # 8 -> rank 0, 4 -> rank 1 (4 < 8), 2 -> rank 1 (4 < 8), which is full, 2 -> rank 0
    assert packed_rank_LE(np.array([[8, 4, 2, 2]]), 2).tolist() == [[0, 1, 1, 0]]
    assert packed_rank_LE(np.array([[2, 8, 2, 4], [1, 1, 1, 1]]), 2).tolist() == [[1, 0, 0, 1], [0, 1, 0, 1]]


@given(traffic())
def test_equals_balanced_packing_one_layer_at_a_time(case):
    counts_LSE, _, ranks = case
    load_LE = counts_LSE.sum(axis=1)
    room = load_LE.shape[1] // ranks
    for load_E, rank_E in zip(load_LE, packed_rank_LE(load_LE, ranks), strict=True):
        packs: list[list[int]] = [[] for _ in range(ranks)]
        for expert in np.argsort(-load_E, kind="stable").tolist():
            pack = min((pack for pack in packs if len(pack) < room), key=lambda pack: load_E[pack].sum())
            pack.append(expert)
        assert [np.flatnonzero(rank_E == rank).tolist() for rank in range(ranks)] == [sorted(pack) for pack in packs]
