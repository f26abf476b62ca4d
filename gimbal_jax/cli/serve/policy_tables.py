"""The tables ``[dispatch]``, ``[queue]`` and ``[placement]`` of the configuration file of ``gimbal serve``.

Each table has the fields of one record of ``config.py``. Some of its fields have a flag, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

from gimbal_jax.config import DispatchConfig, PlacementConfig, QueueConfig


@dataclass(frozen=True)
class Setting:
    """One field of a table. Its type and default are those of the record."""

    help: str
    low: float | None = None
    high: float | None = None
    flag: str | None = None
    """Name of its flag, with underscores; None if it has none."""


RECORDS = {"dispatch": DispatchConfig, "queue": QueueConfig, "placement": PlacementConfig}
"""Record of each table."""

TABLES: dict[str, dict[str, Setting]] = {
    "dispatch": {
        "policy": Setting("Which engine gets a request.", flag="dispatch"),
        "trace_period_s": Setting("Seconds between two traces that an engine publishes.", low=0),
        "trace_max_age_s": Setting("Seconds after which a trace counts as missing.", low=0),
        "high_kv": Setting("Share of KV pages in use above which KV use alone may decide.", low=0, high=1),
        "kv_gap": Setting("Difference of KV use between engines above which it decides then.", low=0, high=1),
        "lambda_kv": Setting("Weight of KV use in the score, times the token budget.", low=0),
        "lambda_moe": Setting("Weight of excess expert pressure in the score, times the token budget.", low=0),
        "expert_pressure": Setting("Pressure of an engine: the sum of its ranks, or the fullest rank of each layer."),
        "close_scores": Setting("Difference of equal scores, as a share of the token budget.", low=0),
    },
    "queue": {
        "policy": Setting("Which request an engine runs first.", flag="queue"),
        "aging_s": Setting("Seconds of waiting after which a request runs before all younger ones.", low=0),
    },
    "placement": {
        "policy": Setting("Which rank holds each expert.", flag="placement"),
        "alpha": Setting("Weight of communication.", low=0),
        "beta": Setting("Weight of uneven load.", low=0),
        "gamma": Setting("Weight of moves.", low=0),
        "far_distance": Setting("Distance to a rank on another node; 1 is that to another engine of the node.", low=1),
        "load_term": Setting("Measure of uneven load: mean square of deviations, or the fullest rank."),
        "min_gain": Setting(
            "Least share of the objective that a new placement must save.", low=0, high=1, flag="min_gain"
        ),
        "window_steps": Setting("Steps of traffic before each placement decision.", low=1, flag="window_steps"),
        "smoothing": Setting(
            "Weight that earlier windows keep in a placement decision.", low=0, high=0.99, flag="smoothing"
        ),
        "rows_per_pair": Setting("Most experts that one migration call moves from a rank to another.", low=1),
        "migrate_bytes_per_tick": Setting("Most bytes of experts that move between two steps.", low=1),
    },
}


def kind_of(table: str, field: str) -> Any:
    """Return the type of a field."""
    return get_type_hints(RECORDS[table])[field]
