from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetPlacementRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlacementResponse(_message.Message):
    __slots__ = ("layers", "experts", "ranks", "sources", "slot_of_expert_LE")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SLOT_OF_EXPERT_LE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    experts: int
    ranks: int
    sources: int
    slot_of_expert_LE: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[int] = ..., experts: _Optional[int] = ..., ranks: _Optional[int] = ..., sources: _Optional[int] = ..., slot_of_expert_LE: _Optional[_Iterable[int]] = ...) -> None: ...

class GetCountsRequest(_message.Message):
    __slots__ = ("scope",)
    class Scope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WINDOW: _ClassVar[GetCountsRequest.Scope]
        TOTAL: _ClassVar[GetCountsRequest.Scope]
    WINDOW: GetCountsRequest.Scope
    TOTAL: GetCountsRequest.Scope
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    scope: GetCountsRequest.Scope
    def __init__(self, scope: _Optional[_Union[GetCountsRequest.Scope, str]] = ...) -> None: ...

class GetCountsResponse(_message.Message):
    __slots__ = ("layers", "sources", "experts", "counts_LSE")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_LSE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    sources: int
    experts: int
    counts_LSE: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[int] = ..., sources: _Optional[int] = ..., experts: _Optional[int] = ..., counts_LSE: _Optional[_Iterable[int]] = ...) -> None: ...

class GetTracesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Trace(_message.Message):
    __slots__ = ("engine", "time", "seen", "running_prefill_tokens", "waiting_prefill_tokens", "kv_use", "expert_pressure", "running_requests", "waiting_requests", "kv_tokens", "waiting_tokens")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    RUNNING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine: int
    time: float
    seen: int
    running_prefill_tokens: int
    waiting_prefill_tokens: int
    kv_use: float
    expert_pressure: float
    running_requests: int
    waiting_requests: int
    kv_tokens: int
    waiting_tokens: int
    def __init__(self, engine: _Optional[int] = ..., time: _Optional[float] = ..., seen: _Optional[int] = ..., running_prefill_tokens: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., kv_use: _Optional[float] = ..., expert_pressure: _Optional[float] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...

class GetTracesResponse(_message.Message):
    __slots__ = ("now", "traces", "central_queue")
    NOW_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    CENTRAL_QUEUE_FIELD_NUMBER: _ClassVar[int]
    now: float
    traces: _containers.RepeatedCompositeFieldContainer[Trace]
    central_queue: int
    def __init__(self, now: _Optional[float] = ..., traces: _Optional[_Iterable[_Union[Trace, _Mapping]]] = ..., central_queue: _Optional[int] = ...) -> None: ...

class GetDecisionsRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: int
    def __init__(self, last: _Optional[int] = ...) -> None: ...

class Term(_message.Message):
    __slots__ = ("name", "values_S")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    values_S: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., values_S: _Optional[_Iterable[float]] = ...) -> None: ...

class Dispatch(_message.Message):
    __slots__ = ("request_id", "time", "engine", "rule", "terms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    time: float
    engine: int
    rule: str
    terms: _containers.RepeatedCompositeFieldContainer[Term]
    def __init__(self, request_id: _Optional[str] = ..., time: _Optional[float] = ..., engine: _Optional[int] = ..., rule: _Optional[str] = ..., terms: _Optional[_Iterable[_Union[Term, _Mapping]]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("time", "step", "policy", "outcome", "reason", "cost_before", "cost_after", "imbalance_before", "imbalance_after", "remote_share_before", "remote_share_after", "experts_moved", "seconds", "far_share_before", "far_share_after")
    TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    COST_AFTER_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_AFTER_FIELD_NUMBER: _ClassVar[int]
    REMOTE_SHARE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    REMOTE_SHARE_AFTER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAR_SHARE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FAR_SHARE_AFTER_FIELD_NUMBER: _ClassVar[int]
    time: float
    step: int
    policy: str
    outcome: str
    reason: str
    cost_before: float
    cost_after: float
    imbalance_before: float
    imbalance_after: float
    remote_share_before: float
    remote_share_after: float
    experts_moved: int
    seconds: float
    far_share_before: float
    far_share_after: float
    def __init__(self, time: _Optional[float] = ..., step: _Optional[int] = ..., policy: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., cost_before: _Optional[float] = ..., cost_after: _Optional[float] = ..., imbalance_before: _Optional[float] = ..., imbalance_after: _Optional[float] = ..., remote_share_before: _Optional[float] = ..., remote_share_after: _Optional[float] = ..., experts_moved: _Optional[int] = ..., seconds: _Optional[float] = ..., far_share_before: _Optional[float] = ..., far_share_after: _Optional[float] = ...) -> None: ...

class GetDecisionsResponse(_message.Message):
    __slots__ = ("now", "dispatches", "placements")
    NOW_FIELD_NUMBER: _ClassVar[int]
    DISPATCHES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    now: float
    dispatches: _containers.RepeatedCompositeFieldContainer[Dispatch]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    def __init__(self, now: _Optional[float] = ..., dispatches: _Optional[_Iterable[_Union[Dispatch, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QueueHead(_message.Message):
    __slots__ = ("request_id", "waited_s", "prefill_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    waited_s: float
    prefill_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., waited_s: _Optional[float] = ..., prefill_tokens: _Optional[int] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("tokens_computed", "prefill_tokens", "preemptions", "free_pages", "cached_pages", "prefix_queries", "prefix_hits", "queue_head")
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_HEAD_FIELD_NUMBER: _ClassVar[int]
    tokens_computed: int
    prefill_tokens: int
    preemptions: int
    free_pages: int
    cached_pages: int
    prefix_queries: int
    prefix_hits: int
    queue_head: QueueHead
    def __init__(self, tokens_computed: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., queue_head: _Optional[_Union[QueueHead, _Mapping]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "mean_s", "p50_s", "p99_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEAN_S_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    mean_s: float
    p50_s: float
    p99_s: float
    def __init__(self, name: _Optional[str] = ..., mean_s: _Optional[float] = ..., p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class StepStatus(_message.Message):
    __slots__ = ("count", "compiles_after_warmup", "seconds", "tokens", "phases")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPILES_AFTER_WARMUP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    count: int
    compiles_after_warmup: int
    seconds: Histogram
    tokens: Histogram
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    def __init__(self, count: _Optional[int] = ..., compiles_after_warmup: _Optional[int] = ..., seconds: _Optional[_Union[Histogram, _Mapping]] = ..., tokens: _Optional[_Union[Histogram, _Mapping]] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ...) -> None: ...

class PlacementTotals(_message.Message):
    __slots__ = ("kept", "applied", "failed_decisions", "failed_migrations", "decision_seconds", "migration_seconds", "experts_moved", "bytes_moved", "predicted_gain", "achieved_gain", "last_rebalance")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    FAILED_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    FAILED_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    DECISION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_GAIN_FIELD_NUMBER: _ClassVar[int]
    ACHIEVED_GAIN_FIELD_NUMBER: _ClassVar[int]
    LAST_REBALANCE_FIELD_NUMBER: _ClassVar[int]
    kept: int
    applied: int
    failed_decisions: int
    failed_migrations: int
    decision_seconds: float
    migration_seconds: float
    experts_moved: int
    bytes_moved: int
    predicted_gain: float
    achieved_gain: float
    last_rebalance: float
    def __init__(self, kept: _Optional[int] = ..., applied: _Optional[int] = ..., failed_decisions: _Optional[int] = ..., failed_migrations: _Optional[int] = ..., decision_seconds: _Optional[float] = ..., migration_seconds: _Optional[float] = ..., experts_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., predicted_gain: _Optional[float] = ..., achieved_gain: _Optional[float] = ..., last_rebalance: _Optional[float] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("now", "state", "error", "active_requests", "central_queue", "engines", "steps", "placement")
    NOW_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CENTRAL_QUEUE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    now: float
    state: str
    error: str
    active_requests: int
    central_queue: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    steps: StepStatus
    placement: PlacementTotals
    def __init__(self, now: _Optional[float] = ..., state: _Optional[str] = ..., error: _Optional[str] = ..., active_requests: _Optional[int] = ..., central_queue: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., steps: _Optional[_Union[StepStatus, _Mapping]] = ..., placement: _Optional[_Union[PlacementTotals, _Mapping]] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
