import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.scheduler.baselines.redundant_experts import replicated_placement
from gimbal_jax.scheduler.eplb import packed_rank_LE
from tests.scheduler.windows import traffic


def test_equals_the_published_example():
    # github.com/deepseek-ai/EPLB, README, "Interface and Example": two layers of 12 experts with 16 replicas,
    # in 4 groups on 2 nodes with 4 GPUs each.
    load_LE = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    placement = replicated_placement(load_LE, slots=16, ranks=8, groups=4, nodes=2)
    assert placement.expert_of_slot_LP.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert placement.replicas_LE.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]


def test_replicas_worked_example():
    # 12, 6, 2, 2: expert 0 gets a second replica (6 each), then, of those with 6, expert 0 a third (4 each).
    # By load: 1 (6) -> rank 0, 0 (4) -> rank 1, 0 (4) -> rank 1, 0 (4) -> rank 0, 2 -> rank 1, 3 -> rank 0.
    placement = replicated_placement(np.array([[12, 6, 2, 2]]), slots=6, ranks=2)
    assert placement.replicas_LE.tolist() == [[3, 1, 1, 1]]
    assert placement.expert_of_slot_LP.tolist() == [[1, 0, 3, 0, 0, 2]]
    assert placement.expert_of_slot_LP.dtype == np.int32


@given(traffic(), st.integers(0, 3))
def test_every_expert_has_a_slot_and_replicas_go_to_the_highest_load(case, redundant_per_rank):
    counts_LSE, _, ranks = case
    load_LE = counts_LSE.sum(axis=1)
    experts = load_LE.shape[1]
    placement = replicated_placement(load_LE, experts + redundant_per_rank * ranks, ranks)
    for load_E, expert_P, replicas_E in zip(load_LE, placement.expert_of_slot_LP, placement.replicas_LE, strict=True):
        assert (np.bincount(expert_P, minlength=experts) == replicas_E).all() and replicas_E.min() >= 1
        # The one that got the last replica had the highest load per replica, so no expert without one has more.
        share_before_E = load_E / np.maximum(replicas_E - 1, 1)
        assert (load_E / replicas_E).max() <= share_before_E[replicas_E > 1].min(initial=np.inf) + 1e-9
    if not redundant_per_rank:
        slot_LE = np.argsort(placement.expert_of_slot_LP, axis=1)
        assert (slot_LE // (experts // ranks) == packed_rank_LE(load_LE, ranks)).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"slots": 9, "ranks": 2}, "9 slots cannot be split into 2"),
        ({"slots": 6, "ranks": 2}, "8 experts need at least as many slots, not 6"),
        ({"slots": 8, "ranks": 2, "groups": 3}, "8 experts cannot be split into 3"),
        ({"slots": 8, "ranks": 2, "groups": 2, "nodes": 4}, "2 groups cannot be split into 4"),
        ({"slots": 12, "ranks": 6, "groups": 4, "nodes": 4}, "6 ranks cannot be split into 4"),
    ],
)
def test_rejects_sizes_that_do_not_divide(sizes, message):
    with pytest.raises(ValueError, match=message):
        replicated_placement(np.ones((1, 8), np.int64), **sizes)
