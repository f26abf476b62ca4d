"""Distance of each rank from each source (paper 5.2; the form is ours).

Axes: S sources (DP engines), R ranks.
"""

from __future__ import annotations

import numpy as np

from gimbal_jax.config import MeshConfig


def away_SR(mesh: MeshConfig) -> np.ndarray:
    """Return the share of each source's tokens that cross the network on their way to each rank, float64.

    The share is 0 on the source's node and 1 on other nodes. If the source's own ranks are on several nodes, each rank
    has an equal part of the source's tokens, so the share is that of the ranks on other nodes.
    Raises ValueError if the ranks do not divide over the nodes.
    """
    if mesh.nodes < 1 or mesh.ranks % mesh.nodes:
        possible = ", ".join(str(n) for n in range(1, mesh.ranks + 1) if mesh.ranks % n == 0)
        raise ValueError(f"{mesh.ranks} ranks cannot be split over {mesh.nodes} nodes; possible: {possible}")
    node_R = np.arange(mesh.ranks) // mesh.ranks_per_node
    away_RR = node_R[:, None] != node_R
    return away_RR.reshape(mesh.dp, mesh.tp, mesh.ranks).mean(axis=1)


def distance_SR(mesh: MeshConfig, far: float) -> np.ndarray:
    """Return the distance of each rank from each source, float64.

    The distance is 0 for a source's own ranks. The distance of ranks on other nodes is ``far`` times that of other
    sources' ranks on the same node; ``far`` is ``PlacementConfig.far_distance``.

    The distances are scaled so that the mean over other sources' ranks is 1 (ours). So on one node they are 1, and on
    any mesh the terms of the objective have the sizes that its weights and ``min_gain`` were chosen for. Without the
    scale, communication that no placement can save would be nearly all of the objective, and a hot rank would be
    less than ``min_gain`` of it.

    A source's own ranks have distance 0 on any node, because tensor parallelism pays for traffic within an engine
    anyway. If a source's ranks are on several nodes, the distance to another source's rank is the mean over its own.
    Raises ValueError if the ranks do not divide over the nodes, or if ``far`` is below 1 or not finite.
    """
    if not 1 <= far < np.inf:
        raise ValueError(f"far_distance {far}: must be a finite number of at least 1")
    cross_SR = away_SR(mesh)
    other_SR = np.arange(mesh.dp)[:, None] != np.arange(mesh.ranks) // mesh.tp
    apart_SR = np.where(other_SR, (1 - cross_SR) + far * cross_SR, 0.0)
    return apart_SR * (other_SR.sum() / apart_SR.sum()) if mesh.dp > 1 else apart_SR
