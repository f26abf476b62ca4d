"""Prices of steps, migrations and decisions on H100s, composed of measured kernels.

Engines step in lockstep. A layer takes the slowest engine's time before the experts, then the exchange, then the
expert products of the fullest rank. No padding is priced.

Attention kernels were measured for rows of one length. So decode rows cost as much as the same number of rows of their
mean length. A prefill chunk costs the difference between prompts up to its end and prompts up to its start, in a batch
as large as the step's number of chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gimbal_jax.config import Exchange, MeshConfig, ModelConfig, PlacementPolicy
from gimbal_jax.model.sizes import ITEM_BYTES, expert_bytes
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.simulation.cost_sets import COST_SETS, DECISION_SECONDS, GRAPH, Assumptions
from gimbal_jax.simulation.cost_sets import CostSet as CostSet
from gimbal_jax.simulation.expert_kernel import CHOICES, EXPERTS, fit_expert_kernel
from gimbal_jax.simulation.kernel_table import Curve, Grid, Prices, curve, grid
from gimbal_jax.simulation.links import Links, link_curves
from gimbal_jax.simulation.shapes import (
    DERIVED,
    HEAD_COLUMNS,
    HIDDEN,
    QKV_COLUMNS,
    TP,
    Shares,
    check_shapes,
    is_measured,
    shares,
)
from gimbal_jax.simulation.work import Costs, EngineWork, StepWork

VLLM = "vllm-0.24.0"
DECIDED_LAYERS, DECIDED_RANKS = 48, 4
"""Numbers of layers and ranks for which ``DECISION_SECONDS`` were measured."""


def h100_costs(name: CostSet, model: ModelConfig, mesh: MeshConfig, exchange: Exchange) -> Costs:
    """Return the prices of a named cost set.

    Raises ValueError for an unknown name, or for a model or mesh whose prices do not follow from measured kernels.
    """
    if name not in COST_SETS:
        raise ValueError(f"cost set {name!r}: must be one of {', '.join(COST_SETS)}")
    return H100Costs(COST_SETS[name], model, mesh, exchange)


class H100Costs:
    """Prices of a model with any number of layers on a mesh (implements ``work.Costs``).

    The prices of Qwen3-30B-A3B are as measured. The prices of another model follow by the rules of ``shapes``. Every
    price that a rule takes part in counts as outside of what was measured.
    """

    def __init__(self, assumptions: Assumptions, model: ModelConfig, mesh: MeshConfig, exchange: Exchange) -> None:
        check_shapes(model, mesh)
        self._set, self._model, self._mesh, self._exchange = assumptions, model, mesh, exchange
        self._measured, self._shares = is_measured(model), shares(model, mesh.tp)
        self._experts = fit_expert_kernel().scaled(self._shares.expert, self._shares.depth)
        kernels = h100_kernels(self._shares, mesh.tp, assumptions.all_reduce_stack)
        self._prices = Prices(kernels, frozenset() if self._measured else DERIVED)
        network = assumptions.network_bandwidth, assumptions.network_latency_s
        self._links = Links(self._prices, mesh.ranks, mesh.tp, mesh.nodes, *network)
        self._hidden_bytes = model.hidden_size * ITEM_BYTES[model.dtype]
        self._launching = assumptions.launches * model.num_layers * launch_seconds()

    @property
    def outside(self) -> Mapping[str, int]:
        return self._prices.outside

    def step_parts(self, work: StepWork) -> Mapping[str, float]:
        tokens_S = np.array([engine.tokens for engine in work.engines_S])
        # All engines wait for the slowest one before the exchange, so only its parts count.
        parts = self._slowest_engine(work.engines_S, tokens_S)
        parts["exchange"], parts["experts"] = self._moe(work, tokens_S)
        parts["logits"] = self._logits(max(engine.chosen for engine in work.engines_S))
        parts["host"] = self._set.host_s
        # The host launches ahead of the device, so only launch time beyond the other parts counts.
        if self._launching:
            parts["launch"] = max(0.0, self._launching - sum(parts.values()))
        if self._set.layer_s:
            parts["constant"] = self._set.layer_s * self._model.num_layers
        return {part: self._set.stretch * seconds for part, seconds in parts.items()}

    def migration_seconds(self, moves: Round, overlapped: bool) -> float:
        row_bytes, slots = expert_bytes(self._model), self._model.num_experts // self._mesh.ranks
        src_rank, dst_rank = moves.src_slot // slots, moves.dst_slot // slots
        if overlapped:  # only the copy out of the arrival buffer delays a step: one read and one write
            arrived = np.bincount(dst_rank, minlength=self._mesh.ranks).max() * row_bytes
            return self._set.round_s + 2 * arrived / self._set.hbm_bandwidth
        return self._set.migration_stretch * (
            self._set.round_s + self._links.move_seconds(src_rank, dst_rank, row_bytes)
        )

    def decision_seconds(self, policy: PlacementPolicy) -> float:
        if self._measured:
            return DECISION_SECONDS[policy]
        # Decisions are assumed proportional to layers times ranks.
        size = self._model.num_layers * self._mesh.ranks / (DECIDED_LAYERS * DECIDED_RANKS)
        return size * DECISION_SECONDS[policy]

    def far_bytes(self, work: StepWork) -> float:
        if self._exchange == "sparse":
            return self._links.sparse_far_bytes(work.copies_LSR, self._hidden_bytes, CHOICES)
        tokens = sum(engine.tokens for engine in work.engines_S)
        m, layers = self._model, len(work.pairs_LSP)
        return layers * self._links.gather_far_bytes(tokens, self._hidden_bytes, CHOICES, m.num_experts)

    def _slowest_engine(self, engines_S: tuple[EngineWork, ...], tokens_S: np.ndarray) -> dict[str, float]:
        """Return the times by part, over all layers, of the engine that takes longest outside of the experts."""
        tp, seconds = self._mesh.tp, self._prices.seconds
        hidden_S = tokens_S * self._hidden_bytes
        own_S = -(-tokens_S // tp)  # tokens of one rank: each rank of an engine routes its own share
        parts_S = {
            "attention": self._decode_attention(engines_S) + self._prefill_attention(engines_S),
            "projections": seconds("qkv_and_output", tokens_S) + seconds("router", own_S),
            "all_reduce": seconds("all_reduce", tokens_S * self._model.hidden_size) if tp > 1 else 0.0 * tokens_S,
            "all_gather": self._links.collective("nccl_all_gather", tp, hidden_S * (tp - 1) / tp),
            "small_kernels": self._small_kernels(tokens_S),
        }
        slowest = int(np.argmax(sum(parts_S.values())))
        if tp != TP:
            self._prices.count(f"shapes of tp {tp}")
        return {part: self._model.num_layers * float(seconds_S[slowest]) for part, seconds_S in parts_S.items()}

    def _decode_attention(self, engines_S: tuple[EngineWork, ...]) -> np.ndarray:
        rows_S = np.array([len(engine.decode_contexts) for engine in engines_S])
        context_S = np.array([engine.decode_contexts.sum() for engine in engines_S]) / np.maximum(rows_S, 1)
        # The row's own token is not part of the table's context. The least measured context is 2.
        return self._prices.seconds("decode_attention", rows_S * self._shares.kv_heads, np.maximum(context_S - 1, 2))

    def _prefill_attention(self, engines_S: tuple[EngineWork, ...]) -> np.ndarray:
        chunks_S = np.array([len(engine.prefill) for engine in engines_S])
        engine_N = np.repeat(np.arange(len(engines_S)), chunks_S)
        if not len(engine_N):
            return np.zeros(len(engines_S))
        start_N, tokens_N = np.array([chunk for engine in engines_S for chunk in engine.prefill]).T
        # The time of one token, the least that was measured, stands for the launch and for an empty start.
        lengths = np.stack([start_N + tokens_N, np.maximum(start_N, 1), np.ones_like(start_N)])
        batch_N = (chunks_S * self._shares.query_heads)[engine_N]
        # The time up to the end minus the time up to the start has no launch, so the launch is added.
        end_N, before_N, launch_N = self._prices.seconds("prefill_attention", batch_N, lengths)
        return np.bincount(engine_N, launch_N + end_N - before_N, len(engines_S)) / np.maximum(chunks_S, 1)

    def _small_kernels(self, tokens_S: np.ndarray) -> np.ndarray:
        """Return the time of a layer's other kernels: a least time for each, and the bytes that they move."""
        m = self._model
        # Two norms read and write the state and the residual; norm and rope read and write queries and keys.
        rotated = (m.num_heads + m.num_kv_heads) * m.head_dim / self._mesh.tp
        moved = ITEM_BYTES[m.dtype] * (8 * m.hidden_size + 4 * rotated)
        bandwidth = self._set.hbm_share * self._set.hbm_bandwidth
        return np.where(
            tokens_S > 0, self._set.small_kernels * self._set.small_kernel_s + tokens_S * moved / bandwidth, 0.0
        )

    def _moe(self, work: StepWork, tokens_S: np.ndarray) -> tuple[float, float]:
        """Return the times of the exchange and of the expert products, over all layers."""
        m, layers, ranks = self._model, len(work.pairs_LSP), self._mesh.ranks
        if self._exchange == "gather":
            tokens = int(tokens_S.sum())
            exchange = layers * self._links.gather_seconds(tokens, self._hidden_bytes, CHOICES, m.num_experts)
            tokens_LR = np.full((layers, ranks), tokens)  # every rank gets every token
        else:
            copies = work.copies_LSR
            exchange_L = self._links.sparse_seconds_L(copies, self._hidden_bytes, CHOICES, m.num_experts)
            exchange, tokens_LR = float(exchange_L.sum()), copies.sum(axis=1)
        load_LRP = work.pairs_LSP.sum(axis=1).reshape(layers, ranks, -1)
        # If a rule scaled the expert kernel, all of its prices count as outside.
        outside = self._experts.outside(load_LRP, tokens_LR) if self._measured else layers * ranks
        self._prices.count("experts", outside)
        return exchange, float(self._experts.seconds(load_LRP, tokens_LR).max(axis=1).sum())

    def _logits(self, chosen: int) -> float:
        """Return the time of output head, all-gather and sampling, for the engine with the most new tokens."""
        tp, logits_bytes = self._mesh.tp, np.array(4.0 * chosen * self._model.vocab_size)
        head = self._prices.seconds("head", np.array(chosen)) * self._model.vocab_size / tp / HEAD_COLUMNS
        gathered = self._links.collective("nccl_all_gather", tp, logits_bytes * (tp - 1) / tp)
        passes = self._set.sampling_passes * logits_bytes / (self._set.hbm_share * self._set.hbm_bandwidth)
        kernels = self._set.sampling_kernels * self._set.small_kernel_s
        return float(head + gathered + passes + kernels) if chosen else 0.0


def launch_seconds() -> float:
    """Return the measured time to launch one kernel: small all-reduces of 2 GPUs without minus with CUDA graphs."""
    eager, graph = (
        curve("allreduce_custom_bf16", f"{VLLM}:vllm_{form}", "elements", gpus=2).seconds[:8]
        for form in ("eager", "graph")
    )
    return float(np.median(eager - graph))


def h100_kernels(of: Shares, tp: int, all_reduce_stack: str = GRAPH.all_reduce_stack) -> dict[str, Curve | Grid]:
    """Return measured times by kernel name, without the expert products. Products are scaled by the shares ``of``."""
    qkv, output = (curve("gemm_bf16", VLLM, "m", n=n) for n in (QKV_COLUMNS, HIDDEN))
    router, head = (curve("gemm_bf16", VLLM, "m", n=n) for n in (EXPERTS, HEAD_COLUMNS))
    kernels: dict[str, Curve | Grid] = {
        "qkv_and_output": Curve(qkv.size, qkv.seconds * of.qkv + output.at(qkv.size) * of.output),
        "router": Curve(router.size, router.seconds * of.depth),
        "head": Curve(head.size, head.seconds * of.depth),
        "decode_attention": grid("attn_decode_16q2kv", VLLM, "batch", "ctx"),
        "prefill_attention": grid("attn_prefill_16q2kv", VLLM, "batch", "isl"),
        **link_curves(),
    }
    if tp > 1:
        kernels["all_reduce"] = curve("allreduce_custom_bf16", all_reduce_stack, "elements", gpus=tp)
    return kernels
