"""Write deploy/grafana/gimbal.json, the Grafana dashboard, from the panels below."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "deploy" / "grafana" / "gimbal.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, PER_ROW = 8, 7, 3
"""Size of a panel on Grafana's grid of 24 columns, and panels per row."""


@dataclass(frozen=True)
class Panel:
    """One graph. ``lines`` are (legend, expression); $s stands for the selected servers and $e for the engines."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    text: str = ""
    kind: str = "timeseries"
    maximum: float | None = None


def rate(metric: str, by: str = "", where: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({metric}{{$s{where}}}[$__rate_interval]))"


def quantile(share: float, buckets: str, by: str = "le", where: str = "") -> str:
    return f"histogram_quantile({share}, {rate(buckets, by, where)})"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    shares = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    return tuple((name, quantile(share, f"gimbal_{metric}_bucket")) for name, share in shares)


def by_engine(metric: str) -> tuple[tuple[str, str], ...]:
    return (("{{instance}} {{engine}}", f"gimbal_engine_{metric}{{$s, $e}}"),)


def total(legend: str, metric: str) -> tuple[str, str]:
    return legend, f"sum (gimbal_{metric}{{$s}})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests ended",
            "reqps",
            (("{{finished_reason}}", rate("gimbal_request_success_total", "finished_reason")),),
        ),
        Panel(
            "Requests now",
            "short",
            (
                total("running", "num_requests_running"),
                total("waiting", "num_requests_waiting"),
                total("without an engine", "central_queue_requests"),
                total("streaming", "active_requests"),
            ),
        ),
        Panel(
            "Tokens",
            "short",
            (
                ("prompt tokens/s", rate("gimbal_prompt_tokens_total")),
                ("output tokens/s", rate("gimbal_generation_tokens_total")),
            ),
        ),
        Panel("Rejected", "reqps", (("rejected", rate("gimbal_requests_refused_total")),), "Mostly by full queues."),
        Panel("Prompt lengths", "short", quantiles("request_prompt_tokens")),
        Panel("Output lengths", "short", quantiles("request_generation_tokens")),
    ),
    "Latency": (
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Time per output token", "s", quantiles("request_time_per_output_token_seconds")),
        Panel("Whole request", "s", quantiles("e2e_request_latency_seconds")),
        Panel("Queue", "s", quantiles("request_queue_time_seconds"), "From arrival to the first step."),
        Panel("Prefill", "s", quantiles("request_prefill_time_seconds"), "From the first step to the first token."),
        Panel("Decode", "s", quantiles("request_decode_time_seconds"), "From the first token to the end."),
    ),
    "Engines": (
        Panel("Running requests", "short", by_engine("num_requests_running")),
        Panel("Waiting requests", "short", by_engine("num_requests_waiting")),
        Panel("KV pages in use", "percentunit", by_engine("kv_cache_usage_perc"), maximum=1),
        Panel(
            "Prefix cache hits",
            "percentunit",
            (
                (
                    "{{instance}} {{engine}}",
                    f"{rate('gimbal_engine_prefix_cache_hits_total', 'instance, engine', ', $e')} / "
                    f"{rate('gimbal_engine_prefix_cache_queries_total', 'instance, engine', ', $e')}",
                ),
            ),
            "Share of prompt tokens that the prefix cache held.",
            maximum=1,
        ),
        Panel("Prefill tokens left", "short", by_engine("prefill_tokens")),
        Panel(
            "Expert pressure",
            "short",
            by_engine("expert_pressure"),
            "Expert tokens per step on an engine's ranks, in token equivalents.",
        ),
        Panel(
            "Computed tokens",
            "short",
            (("{{instance}} {{engine}}", rate("gimbal_engine_computed_tokens_total", "instance, engine", ", $e")),),
        ),
        Panel(
            "First token by engine, p95",
            "s",
            (
                (
                    "{{engine}}",
                    quantile(0.95, "gimbal_engine_time_to_first_token_seconds_bucket", "engine, le", ", $e"),
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "short",
            (("{{instance}} {{engine}}", rate("gimbal_engine_num_preemptions_total", "instance, engine", ", $e")),),
        ),
        Panel("Step", "s", quantiles("step_seconds"), "Seconds of a step on the devices."),
        Panel(
            "Parts of a tick",
            "s",
            (("{{phase}}", 'max by (phase) (gimbal_tick_phase_seconds{$s, statistic="mean"})'),),
            "Mean over the last ticks. All parts except wait are the host's own work.",
        ),
    ),
    "Dispatch": (
        Panel(
            "Decisions by rule",
            "reqps",
            (("{{rule}}", rate("gimbal_dispatches_total", "rule")),),
            "Many decisions by missing or stale mean that traces do not arrive.",
        ),
        Panel("Age of traces", "s", by_engine("trace_age_seconds")),
        Panel(
            "Compensation",
            "short",
            by_engine("dispatch_compensation_tokens"),
            "Prefill tokens sent to an engine that its latest trace does not include.",
        ),
        Panel(
            "Scores of the last decision",
            "short",
            (("{{engine}} {{term}}", "gimbal_engine_dispatch_score{$s, $e}"),),
            "Summands of the scores. The engine with the smallest sum is chosen.",
        ),
    ),
    "Placement": (
        Panel(
            "Imbalance",
            "short",
            (
                ("mean {{instance}}", "gimbal_rank_imbalance{$s}"),
                ("worst layer {{instance}}", "gimbal_worst_layer_imbalance{$s}"),
            ),
            "Max over mean rank load of the last window, under the current placement; 1 is even.",
        ),
        Panel(
            "Imbalance by layer",
            "short",
            (("{{layer}}", "max by (layer) (gimbal_layer_imbalance{$s})"),),
            kind="bargauge",
        ),
        Panel("Most uneven layer", "short", (("{{instance}}", "gimbal_worst_layer{$s}"),)),
        Panel(
            "Balancedness",
            "percentunit",
            (("{{definition}} {{instance}}", "gimbal_balancedness{$s}"),),
            "Mean over max rank load, as vLLM and as SGLang define it.",
            maximum=1,
        ),
        Panel(
            "Remote share",
            "percentunit",
            (("{{instance}}", "gimbal_remote_share{$s}"),),
            "Share of expert tokens that leave their engine's ranks.",
            maximum=1,
        ),
        Panel(
            "Gain of the last placement",
            "percentunit",
            (
                ("predicted {{instance}}", "gimbal_placement_predicted_gain{$s}"),
                ("achieved {{instance}}", "gimbal_placement_achieved_gain{$s}"),
            ),
            "Share of the objective saved, moves included: predicted, and achieved on the next window.",
        ),
        Panel(
            "Decisions",
            "short",
            (("{{outcome}}", "sum by (outcome) (increase(gimbal_placement_decisions_total{$s}[$__range]))"),),
            kind="bargauge",
        ),
        Panel(
            "Experts moved",
            "short",
            (("experts/s", rate("gimbal_experts_moved_total")),),
        ),
        Panel("Bytes moved", "Bps", (("bytes/s", rate("gimbal_moved_bytes_total")),)),
        Panel(
            "Time spent",
            "percentunit",
            (
                ("deciding, in parallel with steps", rate("gimbal_placement_decision_seconds_total")),
                ("moving, between steps", rate("gimbal_migration_seconds_total")),
            ),
            "Share of time.",
        ),
        Panel(
            "Ages",
            "s",
            (
                ("rebalance {{instance}}", "gimbal_last_rebalance_age_seconds{$s}"),
                ("decision {{instance}}", "gimbal_last_placement_decision_age_seconds{$s}"),
            ),
        ),
    ),
    "Process": (
        Panel("State", "short", (("{{instance}} {{state}}", "gimbal_state{$s} == 1"),), kind="stat"),
        Panel("Version", "short", (("{{instance}} {{version}}", "gimbal_build_info{$s}"),), kind="stat"),
        Panel("Memory", "bytes", (("{{instance}}", "process_resident_memory_bytes{$s}"),)),
        Panel(
            "CPU",
            "percentunit",
            (("{{instance}}", rate("process_cpu_seconds_total", "instance")),),
            "Share of one core.",
        ),
        Panel("Open files", "short", (("{{instance}}", "process_open_fds{$s}"),)),
        Panel(
            "Should stay 0",
            "short",
            (
                ("compiled while serving", "sum (gimbal_compiles_after_warmup_total{$s})"),
                ("windows lost", "sum (gimbal_windows_lost_total{$s})"),
            ),
        ),
        Panel("Steps", "short", (("{{instance}} steps/s", rate("gimbal_steps_total", "instance")),)),
        Panel("Tokens of a step", "short", quantiles("step_tokens")),
        Panel("Windows written", "short", (("windows/s", rate("gimbal_windows_written_total")),)),
    ),
}


def expression(text: str) -> str:
    return text.replace("$s", 'job=~"$job", instance=~"$instance"').replace("$e", 'engine=~"$engine"')


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": {"axisSoftMin": 0}}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
    options["tooltip"] = {"mode": "multi", "sort": "desc"}
    if panel.kind != "timeseries":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "auto"}
    if panel.kind == "stat":
        options["textMode"] = "name"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression(text), "legendFormat": legend}
            for index, (legend, text) in enumerate(panel.lines)
        ],
    }


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        grid = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []}
        )
        y += 1
        for index, panel in enumerate(row):
            x = WIDTH * (index % PER_ROW)
            panels.append(panel_json(panel, len(panels) + 1, x, y + HEIGHT * (index // PER_ROW)))
        y += HEIGHT * -(-len(row) // PER_ROW)
    return {
        "uid": "gimbal",
        "title": "gimbal_jax",
        "tags": ["llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                variable("job", "label_values(gimbal_state, job)"),
                variable("instance", 'label_values(gimbal_state{job=~"$job"}, instance)'),
                variable("engine", 'label_values(gimbal_engine_free_pages{instance=~"$instance"}, engine)'),
            ]
        },
        "panels": panels,
    }


def main() -> None:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()
