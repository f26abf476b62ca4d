"""The placement loop for Prometheus: how even the experts' load is, what was decided and moved, and what it brought."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gimbal_jax.config import MeshConfig, ModelConfig
from gimbal_jax.scheduler.traffic import (
    balancedness_sglang,
    balancedness_vllm,
    far_share,
    imbalance_L,
    remote_share,
)
from gimbal_jax.serving.core.status import Status
from gimbal_jax.serving.monitoring.families import counters, gauges


def traffic_metrics(model: ModelConfig, mesh: MeshConfig, status: Status) -> Iterator[Metric]:
    """Of the last window's counts under today's placement; without traffic every layer is even."""
    traffic = status.window_counts_LSE, status.slot_of_expert_LE, mesh.ranks
    layer_imbalance_L = imbalance_L(*traffic)
    layers = [str(layer) for layer in model.moe_layers]
    yield gauges(
        "gimbal_layer_imbalance",
        "Max over mean rank load of each MoE layer, of the last window under today's placement.",
        "layer",
        dict(zip(layers, layer_imbalance_L.tolist(), strict=True)),
    )
    worst = int(layer_imbalance_L.argmax())
    yield GaugeMetricFamily(
        "gimbal_rank_imbalance",
        "Max over mean rank load, mean over layers, of the last window under today's placement.",
        float(layer_imbalance_L.mean()),
    )
    yield GaugeMetricFamily(
        "gimbal_worst_layer_imbalance",
        "Max over mean rank load of the most uneven MoE layer.",
        float(layer_imbalance_L[worst]),
    )
    yield GaugeMetricFamily("gimbal_worst_layer", "Index of the most uneven MoE layer.", model.moe_layers[worst])
    yield gauges(
        "gimbal_balancedness",
        "Mean over max rank load as vLLM and as SGLang define it for all layers; 1 is even.",
        "definition",
        {"vllm": balancedness_vllm(*traffic), "sglang": balancedness_sglang(*traffic)},
    )
    yield GaugeMetricFamily(
        "gimbal_remote_share",
        "Share of the last window's expert tokens that leave their engine's ranks, under today's placement.",
        remote_share(*traffic),
    )
    yield GaugeMetricFamily(
        "gimbal_far_share",
        "Share of the last window's expert tokens that leave their engine's machine, under today's placement.",
        far_share(status.window_counts_LSE, status.slot_of_expert_LE, mesh),
    )


def loop_metrics(status: Status, now: float, start: float) -> Iterator[Metric]:
    """Decisions, moves and gains; ages run from ``start`` where nothing has happened yet."""
    totals = status.placement_totals
    yield counters(
        "gimbal_placement_decisions",
        "Placement decisions by what became of them.",
        "outcome",
        {
            "kept": totals.kept,
            "applied": totals.applied,
            "decision_failed": totals.failed_decisions,
            "migration_failed": totals.failed_migrations,
        },
    )
    yield CounterMetricFamily(
        "gimbal_placement_decision_seconds", "Time that decisions took, beside the steps.", totals.decision_seconds
    )
    yield CounterMetricFamily(
        "gimbal_migration_seconds", "Time between steps that went to moving experts.", totals.migration_seconds
    )
    yield CounterMetricFamily("gimbal_experts_moved", "Experts that changed their rank.", status.experts_moved)
    yield CounterMetricFamily("gimbal_moved_bytes", "Bytes of moved experts.", status.bytes_moved)
    yield GaugeMetricFamily(
        "gimbal_placement_predicted_gain",
        "Share of the objective that the last placement applied was to save, its moves included.",
        totals.predicted_gain,
    )
    yield GaugeMetricFamily(
        "gimbal_placement_achieved_gain",
        "Share that it saved on the first window closed since, which its decision had not seen.",
        totals.achieved_gain,
    )
    decided = status.placements[-1].time if status.placements else start
    rebalanced = start if status.last_rebalance is None else status.last_rebalance
    yield GaugeMetricFamily(
        "gimbal_last_placement_decision_age_seconds",
        "Time since a placement was last decided on, applied or not; since start before the first.",
        now - decided,
    )
    yield GaugeMetricFamily(
        "gimbal_last_rebalance_age_seconds",
        "Time since a new placement was last complete; since start before the first.",
        now - rebalanced,
    )
    yield CounterMetricFamily("gimbal_windows_written", "Traffic windows written to files.", status.windows_written)
    yield CounterMetricFamily("gimbal_windows_lost", "Windows that could not be written.", status.windows_lost)
