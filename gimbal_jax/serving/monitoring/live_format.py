"""The JSON of /dashboard/data. Ages and times are in seconds.

Text that clients or exceptions chose is cut to ``TEXT`` characters.
"""

from __future__ import annotations

from typing import TypedDict

TEXT = 200


class QueueHeadRow(TypedDict):
    """The waiting request that an engine would run first."""

    id: str
    waited_s: float
    prefill_tokens: int


class EngineRow(TypedDict):
    """One engine: its work, and its score in tokens as Gimbal's dispatch would compute it now."""

    trace_age_s: float | None
    """Age of the latest trace; None before the first, when the engine is shown idle."""
    running: int
    waiting: int
    kv_use: float
    """Share of KV pages in use, from the same moment as ``free_pages``."""
    kv_tokens: int
    free_pages: int
    cached_pages: int
    prefix_hit_rate: float
    """Share of looked-up prompt tokens that the prefix cache held, since start."""
    waiting_tokens: int
    expert_pressure: float
    terms: dict[str, float]
    """Summands of the score."""
    score: float
    queue_head: QueueHeadRow | None
    dispatched: int
    """Requests sent to this engine in the last minute."""


class LastDispatch(TypedDict):
    """The last dispatch decision."""

    engine: int | None
    rule: str
    age_s: float


class DispatchSummary(TypedDict):
    """Dispatch decisions by rule."""

    total: dict[str, int]
    """Decisions since start."""
    recent: dict[str, int]
    """Decisions of the last minute."""
    last: LastDispatch | None


class ExpertMap(TypedDict):
    """Expert tokens by MoE layer and slot under the current placement. The slots of a rank are neighbours."""

    scope: str
    """``last window``, or ``since start`` until the first window has closed."""
    layers: list[int]
    """Index of each MoE layer in the model."""
    tokens_LP: list[list[int]]
    expert_LP: list[list[int]]
    """Expert in each slot."""
    imbalance_L: list[float]
    """Max over mean rank load."""
    remote_L: list[float]
    """Share of expert tokens that leave their engine's ranks."""
    imbalance: float
    """Mean over layers."""
    worst_layer: int
    """Index of the most uneven layer in the model."""
    remote_share: float
    """Share over all layers."""


class PlacementRow(TypedDict):
    """One placement decision; several in a row that moved nothing are one."""

    times: int
    age_s: float
    step: int
    outcome: str
    reason: str
    gain: float
    """Predicted share of the objective that the decision saves."""
    imbalance_before: float
    imbalance_after: float
    remote_before: float
    remote_after: float
    far_before: float
    far_after: float
    experts_moved: int
    seconds: float
    """Time that the decision took."""


class PlacementSummary(TypedDict):
    """The placement loop. Gains are shares of the objective."""

    decisions: list[PlacementRow]
    """The last decisions, newest first."""
    imbalance_W: list[float]
    """Imbalance that each of the last decisions saw, oldest first."""
    experts_moved: int
    bytes_moved: int
    changed_age_s: float | None
    """Time since the last applied placement was complete; None before the first."""
    predicted_gain: float | None
    achieved_gain: float | None
    failed: int
    """Decisions and migrations that failed."""


class Percentiles(TypedDict):
    """Median and 99th percentile; None without values."""

    p50: float | None
    p99: float | None


class LatencySummary(TypedDict):
    """Requests that ended in the last minute."""

    outcomes: dict[str, int]
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles


class History(TypedDict):
    """One value per bucket, oldest first. Rates are tokens per second; latencies are None without requests."""

    bucket_s: float
    """Seconds of a bucket."""
    prompt: list[float]
    generated: list[float]
    ttft_p50: list[float | None]
    ttft_p99: list[float | None]
    tpot_p50: list[float | None]
    tpot_p99: list[float | None]
    e2e_p50: list[float | None]
    e2e_p99: list[float | None]


class RequestRow(TypedDict):
    """One request that has ended."""

    id: str
    client: str
    age_s: float
    engine: int | None
    rule: str
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    outcome: str
    error: str
    queue_s: float | None
    first_token_s: float | None
    token_s: float | None
    total_s: float


class MeshShape(TypedDict):
    """The mesh of the server."""

    dp: int
    tp: int
    ranks: int


class Snapshot(TypedDict):
    """The server at one moment."""

    time: float
    """Time of the snapshot on the server's clock."""
    model: str
    version: str
    state: str
    uptime_s: float
    warnings: list[str]
    mesh: MeshShape
    policies: dict[str, str]
    """Policy of dispatch, queue and placement."""
    token_budget: int
    """Tokens of a step, per engine."""
    close_tokens: float
    """Difference of scores, in tokens, within which dispatch takes two engines for equal."""
    step: int
    streaming: int
    central_queue: int
    preemptions: int
    engines: list[EngineRow]
    dispatch: DispatchSummary
    rates: dict[str, float]
    """Tokens per second, ``prompt`` and ``generated``."""
    latency: LatencySummary
    history: History
    experts: ExpertMap
    placement: PlacementSummary
    requests: list[RequestRow]
    """The last requests that ended, newest first."""
