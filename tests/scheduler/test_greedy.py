from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import PlacementConfig
from gimbal_jax.scheduler.greedy import greedy_rank_LE
from gimbal_jax.scheduler.objective import window_objective
from gimbal_jax.scheduler.placement import assign_slots, static_placement
from gimbal_jax.scheduler.traffic import rank_of_expert
from tests.scheduler.windows import any_SR, one_node_SR, traffic


def greedy(counts_SE: list[list[int]], old_rank_E: list[int], ranks: int, **weights: float) -> list[int]:
    config = PlacementConfig(**weights)  # type: ignore[arg-type]
    old_slot_LE = assign_slots(np.array([old_rank_E]), static_placement(1, len(old_rank_E), ranks), ranks)
    counts_LSE = np.array([counts_SE])
    return greedy_rank_LE(window_objective(counts_LSE, old_slot_LE, one_node_SR(counts_LSE, ranks), config))[0].tolist()


def test_load_moves_from_the_fuller_rank():
    # The mean rank load is 8. Expert 0 (w = 1) sees 0.5 projected on both ranks: it stays. Expert 1 (w = 0.5) scores
    # 0.625 at home and 0.375 + 0.025 on rank 1: it moves. Expert 2 stays, rank 1 is full, expert 3 must go to rank 0.
    assert greedy([[8, 4, 2, 2]], [0, 0, 1, 1], 2, beta=1.0, gamma=0.1) == [0, 1, 1, 0]
    # A move that costs more than it brings is not made.
    assert greedy([[8, 4, 2, 2]], [0, 0, 1, 1], 2, beta=1.0, gamma=1.0) == [0, 0, 1, 1]


def test_experts_go_to_the_source_that_uses_them():
    counts_SE = [[0, 5, 8, 0], [10, 0, 0, 5]]
    assert greedy(counts_SE, [0, 0, 1, 1], 2, alpha=1.0, beta=0.0, gamma=0.1) == [1, 0, 0, 1]
    assert greedy(counts_SE, [0, 0, 1, 1], 2, alpha=0.0, beta=0.0, gamma=0.1) == [0, 0, 1, 1]


def test_ties_stay_then_go_to_the_emptier_rank():
    # Source 1 owns ranks 2 and 3 and pulls experts 0 and 1 over: one each. The others are idle and stay while
    # there is room; experts 5 and 7 find their ranks full and go to rank 0, the emptiest.
    counts_SE = [[0] * 8, [10, 9, 0, 0, 0, 0, 0, 0]]
    old_rank_E = [0, 0, 1, 1, 2, 2, 3, 3]
    assert greedy(counts_SE, old_rank_E, 4, beta=0.0, gamma=0.0) == [2, 3, 1, 1, 2, 0, 3, 0]


def full_cost(counts_SE: np.ndarray, rank_E: np.ndarray, old_rank_E: np.ndarray, apart_SR: np.ndarray, config) -> float:
    """The objective of one layer, term by term, for any assignment, full ranks or not."""
    ranks, total = apart_SR.shape[1], max(counts_SE.sum(), 1)
    comm = sum(counts_SE[s, e] * apart_SR[s, rank_E[e]] for s, e in np.ndindex(counts_SE.shape)) / total
    load_R = np.bincount(rank_E, weights=counts_SE.sum(axis=0), minlength=ranks) * ranks / total
    load = np.mean((load_R - 1) ** 2) if config.load_term == "square" else load_R.max() - 1
    return config.alpha * comm + config.beta * load + config.gamma * np.mean(rank_E != old_rank_E)


def naive_greedy(counts_SE: np.ndarray, old_rank_E: np.ndarray, apart_SR: np.ndarray, config) -> np.ndarray:
    """Tries every rank for every expert and looks at the whole objective each time."""
    experts, ranks = counts_SE.shape[1], apart_SR.shape[1]
    rank_E, placed = old_rank_E.copy(), [0] * ranks
    for e in np.argsort(-counts_SE.sum(axis=0), kind="stable"):
        score: dict[int, float] = {}
        for rank in (rank for rank in range(ranks) if placed[rank] < experts // ranks):
            rank_E[e] = rank
            score[rank] = full_cost(counts_SE, rank_E, old_rank_E, apart_SR, config)
        tied = [rank for rank in score if score[rank] <= min(score.values()) + 1e-12]
        rank_E[e] = min(tied, key=lambda rank: (rank != old_rank_E[e], placed[rank]))
        placed[rank_E[e]] += 1
    return rank_E


@given(
    traffic(),
    st.sampled_from([(1.0, 1.0, 0.1), (1.0, 0.0025, 1.0), (1.0, 10.0, 0.0)]),
    st.sampled_from(["square", "max"]),
    st.sampled_from([one_node_SR, partial(any_SR, seed=0), partial(any_SR, seed=1)]),
)
def test_scores_are_the_marginal_objective(case, weights, term, distances):
    counts_LSE, slot_LE, ranks = case
    apart_SR = distances(counts_LSE, ranks)
    config = PlacementConfig(alpha=weights[0], beta=weights[1], gamma=weights[2], load_term=term)
    old_rank_LE = rank_of_expert(slot_LE, ranks)
    rank_LE = greedy_rank_LE(window_objective(counts_LSE, slot_LE, apart_SR, config))
    for rank_E, counts_SE, old_rank_E in zip(rank_LE, counts_LSE, old_rank_LE, strict=True):
        if counts_SE.any():  # an empty layer has no load to balance
            assert rank_E.tolist() == naive_greedy(counts_SE, old_rank_E, apart_SR, config).tolist()
