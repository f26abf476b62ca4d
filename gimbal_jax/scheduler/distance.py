"""How far each rank is from each source (paper 5.2; the form is ours).

Axes: S sources (DP engines), R ranks.
"""

from __future__ import annotations

import numpy as np

from gimbal_jax.config import MeshConfig


def away_SR(mesh: MeshConfig) -> np.ndarray:
    """Share of each source's tokens that cross the network on their way to each rank, float64.

    0 on the source's node, 1 on other nodes. A source whose own ranks are on several nodes has an
    even part of its tokens on each of them, so there it is the share of its ranks on other nodes.
    Raises ValueError where the ranks do not divide over the nodes.
    """
    if mesh.nodes < 1 or mesh.ranks % mesh.nodes:
        possible = ", ".join(str(n) for n in range(1, mesh.ranks + 1) if mesh.ranks % n == 0)
        raise ValueError(f"{mesh.ranks} ranks cannot be split over {mesh.nodes} nodes; possible: {possible}")
    node_R = np.arange(mesh.ranks) // mesh.ranks_per_node
    away_RR = node_R[:, None] != node_R
    return away_RR.reshape(mesh.dp, mesh.tp, mesh.ranks).mean(axis=1)


def distance_SR(mesh: MeshConfig, far: float) -> np.ndarray:
    """Distance of each rank from each source, float64: 0 if it is its own, on other nodes ``far`` times that on its.

    Scaled so that the mean of all but its own is 1 (ours). So on one node they are 1, and on any mesh the objective's
    terms have the sizes that its weights and ``min_gain`` were chosen for. With 1 and ``far`` themselves, communication
    that no placement saves would be nearly all of the objective, and a hot rank less than ``min_gain`` of it.

    A source's own ranks are at 0 on whatever node they are, as tp within an engine is paid for
    anyway; to the ranks of others it has the mean distance of its own. ``far`` is
    ``PlacementConfig.far_distance``.
    Raises ValueError where the ranks do not divide over the nodes, or where ``far`` is below 1.
    """
    if not 1 <= far < np.inf:
        raise ValueError(f"far_distance must be a number of at least 1, not {far}")
    cross_SR = away_SR(mesh)
    other_SR = np.arange(mesh.dp)[:, None] != np.arange(mesh.ranks) // mesh.tp
    apart_SR = np.where(other_SR, (1 - cross_SR) + far * cross_SR, 0.0)
    return apart_SR * (other_SR.sum() / apart_SR.sum()) if mesh.dp > 1 else apart_SR
