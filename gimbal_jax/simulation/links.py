"""Time on the links: the MoE exchange in both forms, collectives of an engine, and moves of experts.

Collectives are priced by the bytes that the busiest GPU sends or receives over its links. NCCL was measured on 2 and 4
GPUs. More GPUs of one node take as long as 4 GPUs that carry the same bytes each, and count as outside. Traffic across
nodes runs in parallel with traffic within nodes, at the rate of each GPU's own network card. The longer of the two
counts, plus the network latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gimbal_jax.simulation.kernel_table import Curve, Prices, curve

STACK = "nccl-2.27.3"
MEASURED_GPUS = (2, 4)
COLLECTIVES = ("nccl_all_gather", "nccl_reduce_scatter", "nccl_alltoall")
ELEMENT_BYTES = 2
INDEX_BYTES = 4
"""Bytes of a place, a weight or a count that travels with the tokens."""


def link_curves() -> dict[str, Curve]:
    """Return times of the collectives by bytes over each GPU's links. Unlike nccl-tests it counts no local bytes."""
    curves = {}
    for op in COLLECTIVES:
        for gpus in MEASURED_GPUS:
            whole = curve(op, STACK, "elements_fp16", gpus=gpus)
            curves[f"{op}_{gpus}"] = Curve(whole.size * ELEMENT_BYTES * (gpus - 1) / gpus, whole.seconds)
    return curves


@dataclass(frozen=True)
class Links:
    """Links between ``ranks`` spread over ``nodes``, with one network card for each GPU."""

    prices: Prices
    ranks: int
    tp: int
    nodes: int
    network_bandwidth: float
    """Bytes per second of one GPU's network card."""
    network_latency_s: float

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @cached_property
    def _source_R(self) -> np.ndarray:
        return np.arange(self.ranks) // self.tp

    @cached_property
    def _node_R(self) -> np.ndarray:
        return np.arange(self.ranks) // self.ranks_per_node

    @cached_property
    def _same_node_SR(self) -> np.ndarray:
        return self._node_R[:: self.tp, None] == self._node_R

    def collective(self, op: str, gpus: int, moved: np.ndarray) -> np.ndarray:
        """Return the time of a collective among ``gpus`` of a node, whose busiest GPU sends or gets ``moved`` bytes."""
        if gpus == 1:
            return np.zeros(np.shape(moved))
        if gpus not in MEASURED_GPUS:
            self.prices.count(f"{op} on {gpus} GPUs", int(np.count_nonzero(moved)))
        return self.prices.seconds(f"{op}_{2 if gpus == 2 else 4}", moved)

    def among_all(self, op: str, buffer: np.ndarray) -> np.ndarray:
        """Return the time of an all-gather or a reduce-scatter of ``buffer`` bytes over all ranks."""
        near = self.collective(op, self.ranks_per_node, buffer * (self.ranks_per_node - 1) / self.ranks_per_node)
        # The cards of a node share the bytes of the other nodes evenly.
        far = buffer * (self.nodes - 1) / self.nodes / self.ranks_per_node
        return self._both(near, far)

    def gather_seconds(self, tokens: int, hidden_bytes: int, choices: int, experts: int) -> float:
        """Return the exchange time of one layer if every token goes to every rank.

        It consists of all-gathers of tokens and of their slots, weights, positions and counts, and a reduce-scatter of
        results.
        """
        if tokens == 0 or self.ranks == 1:
            return 0.0
        numbers = INDEX_BYTES * (3 * choices * tokens + self.ranks * experts)
        sent = self.among_all("nccl_all_gather", np.array([tokens * hidden_bytes, numbers]))
        return float(sent.sum() + self.among_all("nccl_reduce_scatter", np.array(tokens * hidden_bytes)))

    def sparse_seconds_L(self, copies_LSR: np.ndarray, hidden_bytes: int, choices: int, experts: int) -> np.ndarray:
        """Return the exchange time [L] if tokens go to the ranks that hold their experts.

        Counts go to all ranks. Then tokens, and places with weights, go to the ranks, and results return.
        ``copies_LSR`` has the tokens of each source that go to each rank.
        """
        if self.ranks == 1 or not copies_LSR.any():
            return np.zeros(len(copies_LSR))
        counts = self.among_all("nccl_all_gather", np.array(INDEX_BYTES * self.ranks * (experts + self.ranks)))
        near_L, far_L = self.busiest_rows_L(copies_LSR)
        # Three all-to-alls: tokens, places with weights, results.
        row_bytes = np.array([[hidden_bytes], [2 * INDEX_BYTES * choices], [hidden_bytes]])
        near = self.collective("nccl_alltoall", self.ranks_per_node, near_L * row_bytes)
        return self._both(near, far_L * row_bytes).sum(axis=0) + counts

    def gather_far_bytes(self, tokens: int, hidden_bytes: int, choices: int, experts: int) -> float:
        """Return the bytes that cross nodes in the exchange of one layer if every token goes to every rank.

        Every node gets the bytes of the other nodes once, as ``among_all`` prices it.
        """
        numbers = INDEX_BYTES * (3 * choices * tokens + self.ranks * experts)
        return float((self.nodes - 1) * (2 * tokens * hidden_bytes + numbers)) if tokens else 0.0

    def sparse_far_bytes(self, copies_LSR: np.ndarray, hidden_bytes: int, choices: int) -> float:
        """Return the bytes that cross nodes in all layers if tokens go to the ranks that hold their experts.

        They are tokens with places and weights, and results. Counts are not included, because their bytes do not
        depend on the placement.
        """
        row_bytes = 2 * hidden_bytes + 2 * INDEX_BYTES * choices
        return float((copies_LSR * ~self._same_node_SR).sum() * row_bytes)

    def busiest_rows_L(self, copies_LSR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that the busiest rank of each layer sends or receives: within its node, and across nodes.

        Each rank of a source holds the same share of its tokens. Tokens that stay on their rank do not travel.
        """
        source_R, same_SR = self._source_R, self._same_node_SR
        stay_LR = copies_LSR[:, source_R, np.arange(self.ranks)] / self.tp
        near_LSR = copies_LSR * same_SR
        # A rank is as busy as the larger of the rows that it sends and those that it receives.
        near_sent_LR = near_LSR.sum(axis=2)[:, source_R] / self.tp - stay_LR
        near_L = np.maximum(near_sent_LR, near_LSR.sum(axis=1) - stay_LR).max(axis=1)
        if self.nodes == 1:
            return near_L, np.zeros_like(near_L)
        far_LSR = copies_LSR * ~same_SR
        far_sent_LS, far_got_LR = far_LSR.sum(axis=2) / self.tp, far_LSR.sum(axis=1)
        return near_L, np.maximum(far_sent_LS.max(axis=1), far_got_LR.max(axis=1))

    def move_seconds(self, src_rank: np.ndarray, dst_rank: np.ndarray, row_bytes: int) -> float:
        """Return the time to move rows, each from one rank to another, all in parallel."""
        sent_RR = np.zeros((self.ranks, self.ranks))
        np.add.at(sent_RR, (src_rank, dst_rank), float(row_bytes))
        np.fill_diagonal(sent_RR, 0.0)  # rows that stay on their rank do not use a link
        same_RR = self._node_R[:, None] == self._node_R
        near, far = (
            np.maximum(part_RR.sum(axis=0), part_RR.sum(axis=1)).max()
            for part_RR in (sent_RR * same_RR, sent_RR * ~same_RR)
        )
        return float(self._both(self.collective("nccl_alltoall", self.ranks_per_node, near), far))

    def _both(self, near_seconds: np.ndarray, far: np.ndarray) -> np.ndarray:
        """Combine the time within nodes with ``far`` bytes that each GPU sends across nodes at the same time."""
        crossing = np.maximum(near_seconds, far / self.network_bandwidth) + self.network_latency_s
        return np.where(far > 0, crossing, near_seconds)
