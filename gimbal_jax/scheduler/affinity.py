"""How far the experts of a prompt are from each source, learned online from the traffic (ours).

In the spirit of Sem-MoE's profile of tokens and experts, without one: nothing is known before the first step. Token ids
fall into buckets, id modulo ``BUCKETS``. Every source is an observation at each collection of counts: the tokens that
it computed by bucket, and how far their experts are from every source. A linear model of the second by the first tells
buckets apart although requests are batched. It needs no table of experts: all layers count, at a few numbers a bucket.
After experts have moved it learns anew, from where it was.

Axes: L MoE layers, S sources (DP engines), E experts, B buckets. In ``SS`` the first source is the one that has the
traffic, the second the one that distances are from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gimbal_jax.scheduler.traffic import rank_of_expert

BUCKETS = 2048
"""Frequent tokens have low ids in most vocabularies, and so a bucket each that they share with rare ones only."""
RATE = 0.03
"""Weight of the latest collection in the running means, once there are more."""
DOUBT_TOKENS = 1000.0
"""An observation of so many tokens that is quite unlike the mean is believed by half."""
PROMPT_SAMPLE = 4096
"""Tokens of a prompt that are looked at, at most: evenly spread ones."""


@dataclass(frozen=True, eq=False)
class Profile:
    """What was learned so far. Shares and means are of all traffic, of late."""

    share_B: np.ndarray
    """Tokens of each bucket."""
    mean_S: np.ndarray
    """Distance of a token's experts from each source."""
    farther_BS: np.ndarray
    """Of a bucket's tokens, by how much more."""
    spread: float = 0.0
    """Mean square of how far the distances of a source's traffic were from the mean."""
    missed: float = 0.0
    """The same from what had been expected of its tokens."""
    collections: int = 0


def new_profile(sources: int) -> Profile:
    """Nothing is known."""
    return Profile(np.zeros(BUCKETS, np.float32), np.zeros(sources), np.zeros((BUCKETS, sources), np.float32))


def bucket_of[T: (int, np.ndarray)](token_id: T) -> T:
    """Bucket of a token id, also for arrays."""
    return token_id % BUCKETS


def distance_LES(slot_of_expert_LE: np.ndarray, distance_SR: np.ndarray) -> np.ndarray:
    """Distance of each expert from each source, float32; ``distance_SR`` as ``scheduler.distance`` gives it."""
    rank_LE = rank_of_expert(slot_of_expert_LE, distance_SR.shape[1])
    return distance_SR.T.astype(np.float32)[rank_LE]


def learn(
    profile: Profile, tokens_SB: np.ndarray, counts_LSE: np.ndarray, distance_LES: np.ndarray, moved: bool = False
) -> Profile:
    """Take in one collection: the tokens that each source computed, and the experts that exactly these chose.

    The correction is the least one that explains the new observations, as far as they are believed (an affine
    projection, the normalised least mean squares of several observations at a time). A bucket is corrected by how
    unusually often it occurred, relative to its share: so what is in every text explains nothing.
    ``moved``: experts have moved since the last one, and so has the mean distance.
    """
    tokens_S, pairs_S = tokens_SB.sum(axis=1), counts_LSE.sum(axis=(0, 2))
    seen_S = (tokens_S > 0) & (pairs_S > 0)
    if not seen_S.any():
        return profile
    distance_SS = np.matmul(counts_LSE.astype(np.float32), distance_LES).sum(axis=0, dtype=np.float64)
    if not seen_S.all():
        tokens_SB, tokens_S, pairs_S, distance_SS = (
            each[seen_S] for each in (tokens_SB, tokens_S, pairs_S, distance_SS)
        )
    rate = max(RATE, 1 / (profile.collections + 1))
    share_B = _towards(profile.share_B, tokens_SB.sum(axis=0) / tokens_S.sum(), rate)
    mean_S = _towards(profile.mean_S, distance_SS.sum(axis=0) / pairs_S.sum(), 1 if moved else rate)

    unusual_SB = tokens_SB * (1 / tokens_S[:, None]).astype(np.float32) - share_B
    relative_SB = unusual_SB / (share_B + np.float32(1 / BUCKETS))
    spread_SS = distance_SS / pairs_S[:, None] - mean_S
    missed_SS = spread_SS - unusual_SB @ profile.farther_BS
    alike_SS = relative_SB @ unusual_SB.T + np.diag(DOUBT_TOKENS / tokens_S)
    correction_SS = np.linalg.solve(alike_SS, missed_SS).astype(np.float32)
    return Profile(
        share_B,
        mean_S,
        profile.farther_BS + relative_SB.T @ correction_SS,
        profile.spread + rate * (float((spread_SS**2).mean()) - profile.spread),
        profile.missed + rate * (float((missed_SS**2).mean()) - profile.missed),
        profile.collections + 1,
    )


def table_BS(profile: Profile) -> np.ndarray:
    """How much farther than all traffic's the experts of each bucket's tokens are from each source.

    float32, as shares of the mean distance; below 0 is nearer, and what never occurred is at 0. All is scaled by the
    share of the spread that the profile has explained of late, before it had learned from it: what is noise, or holds
    no longer since experts have moved, does not count.
    """
    if profile.missed >= profile.spread:
        return np.zeros_like(profile.farther_BS)
    scale = (1 - profile.missed / profile.spread) / profile.mean_S.mean()
    table_BS: np.ndarray = profile.farther_BS * np.float32(scale)
    return table_BS


def prompt_distance_S(table_BS: np.ndarray | None, prompt: Sequence[int]) -> tuple[float, ...]:
    """How much farther than all traffic's a prompt's experts are from each source: the mean over its tokens.

    Empty without a table.
    """
    if table_BS is None:
        return ()
    sample = prompt[:: -(-len(prompt) // PROMPT_SAMPLE)]
    tokens_B = np.bincount(bucket_of(np.array(sample)), minlength=BUCKETS)
    return tuple((tokens_B.astype(np.float32) @ table_BS / len(sample)).tolist())


def _towards(mean: np.ndarray, value: np.ndarray, rate: float) -> np.ndarray:
    moved: np.ndarray = (mean + rate * (value - mean)).astype(mean.dtype)
    return moved
