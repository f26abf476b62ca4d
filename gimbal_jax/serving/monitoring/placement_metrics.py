"""Prometheus metrics of the placement loop: balance of the expert load, decisions, moves and gains."""

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
from gimbal_jax.serving.monitoring.families import counters, gauges
from gimbal_jax.serving.placement.records import PlacementStatus


def traffic_metrics(model: ModelConfig, mesh: MeshConfig, placement: PlacementStatus) -> Iterator[Metric]:
    """Yield metrics of the last window's counts under the current placement; a layer without traffic is even."""
    counts_LSE, slot_LE = placement.window_counts_LSE, placement.slot_of_expert_LE
    layer_imbalance_L = imbalance_L(counts_LSE, slot_LE, mesh.ranks)
    layers = [str(layer) for layer in model.moe_layers]
    yield gauges(
        "gimbal_layer_imbalance",
        "Max over mean rank load of each MoE layer, for the last window under the current placement.",
        "layer",
        dict(zip(layers, layer_imbalance_L.tolist(), strict=True)),
    )
    worst = int(layer_imbalance_L.argmax())
    yield GaugeMetricFamily(
        "gimbal_rank_imbalance",
        "Max over mean rank load, mean over MoE layers, for the last window under the current placement.",
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
        "Mean over max rank load of all MoE layers, as vLLM and as SGLang define it; 1 is even.",
        "definition",
        {
            "vllm": balancedness_vllm(counts_LSE, slot_LE, mesh.ranks),
            "sglang": balancedness_sglang(counts_LSE, slot_LE, mesh.ranks),
        },
    )
    yield GaugeMetricFamily(
        "gimbal_remote_share",
        "Share of the last window's expert tokens that leave their engine's ranks, under the current placement.",
        remote_share(counts_LSE, slot_LE, mesh.ranks),
    )
    yield GaugeMetricFamily(
        "gimbal_far_share",
        "Share of the last window's expert tokens that leave their engine's node, under the current placement.",
        far_share(counts_LSE, slot_LE, mesh),
    )


def loop_metrics(placement: PlacementStatus, now: float, start: float) -> Iterator[Metric]:
    """Yield metrics of decisions, moves and gains. An age runs from ``start`` until its event has happened once."""
    totals = placement.totals
    yield counters(
        "gimbal_placement_decisions",
        "Placement decisions by outcome.",
        "outcome",
        {
            "kept": totals.kept,
            "applied": totals.applied,
            "decision_failed": totals.failed_decisions,
            "migration_failed": totals.failed_migrations,
        },
    )
    yield CounterMetricFamily(
        "gimbal_placement_decision_seconds",
        "Seconds spent on placement decisions, in parallel with the steps.",
        totals.decision_seconds,
    )
    yield CounterMetricFamily(
        "gimbal_migration_seconds", "Seconds between steps spent on moving experts.", totals.migration_seconds
    )
    yield CounterMetricFamily("gimbal_experts_moved", "Experts that changed their rank.", totals.experts_moved)
    yield CounterMetricFamily("gimbal_moved_bytes", "Bytes of moved experts.", totals.bytes_moved)
    yield GaugeMetricFamily(
        "gimbal_placement_predicted_gain",
        "Predicted gain of the last applied placement, as a share of the objective, moves included.",
        totals.predicted_gain,
    )
    yield GaugeMetricFamily(
        "gimbal_placement_achieved_gain",
        "Gain of the last applied placement on the first window after it, which its decision had not seen.",
        totals.achieved_gain,
    )
    decided = placement.records[-1].time if placement.records else start
    yield GaugeMetricFamily(
        "gimbal_last_placement_decision_age_seconds",
        "Seconds since the last placement decision, applied or not; since start before the first.",
        now - decided,
    )
    yield GaugeMetricFamily(
        "gimbal_last_rebalance_age_seconds",
        "Seconds since the last new placement was complete; since start before the first.",
        now - (start if totals.last_rebalance is None else totals.last_rebalance),
    )
    yield CounterMetricFamily("gimbal_windows_written", "Traffic windows written to files.", placement.windows_written)
    yield CounterMetricFamily(
        "gimbal_windows_lost", "Traffic windows that could not be written to files.", placement.windows_lost
    )
