"""What the client returns and raises."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from gimbal_jax.scheduler.dispatch_decision import DispatchRecord
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.meters import PhaseTimes
from gimbal_jax.serving.engine.request import TokenLogprobs
from gimbal_jax.serving.placement.records import PlacementRecord


class ClientError(Exception):
    """A call failed. ``code`` is its gRPC status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details or code.name)
        self.code = code


class InvalidRequest(ClientError):
    """A field has a value that the server cannot serve; the text names the field and its range."""


class Unsupported(ClientError):
    """The server does not do this; the text names the field or method."""


class Overloaded(ClientError):
    """The queue is full: try again later."""


class Unavailable(ClientError):
    """No server, or one that warms up, drains or has stopped."""


class Unauthenticated(ClientError):
    """The server wants an API key, and this is none of its own."""


class DeadlineExceeded(ClientError):
    """The call's timeout passed."""


class AlreadyRunning(ClientError):
    """A request of the same id is still running."""


ERRORS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    # A call that arrives while the server closes; a caller's own cancellation is asyncio's error.
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyRunning,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


@dataclass(frozen=True)
class Chunk:
    """New tokens of one output; the last chunk of each says how it ended."""

    token_ids: tuple[int, ...]
    text: str
    """What the new tokens complete, but for what may become a stop string; empty for a request by token ids."""
    logprobs: tuple[TokenLogprobs, ...]
    prompt_tokens: int
    completion_tokens: int
    """Tokens so far, these included."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while there is more to come."""
    stop_token_id: int | None = None
    stop_text: str | None = None
    """The stop string that ended it."""
    index: int = 0
    """Which of the n outputs."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first tokens, if they were asked for: of every prompt token but the first."""


@dataclass(frozen=True)
class Placement:
    """Where each expert is: rank = slot // (experts // ranks), source = rank // (ranks // sources)."""

    slot_of_expert_LE: np.ndarray
    ranks: int
    sources: int


@dataclass(frozen=True)
class Traces:
    """The latest published traces, one per engine; none before the first."""

    now: float
    """Seconds on the server's monotonic clock, as all times of traces and decisions."""
    traces: tuple[Trace, ...]
    central_queue: int
    """Requests that have no engine yet."""


@dataclass(frozen=True)
class Decisions:
    """The last decisions, oldest first."""

    now: float
    dispatches: tuple[DispatchRecord, ...]
    placements: tuple[PlacementRecord, ...]


@dataclass(frozen=True)
class ServerStatus:
    """The server at one moment, in numbers; per engine where a name ends in S."""

    now: float
    state: str
    error: str
    step: int
    tokens_computed_S: tuple[int, ...]
    free_pages_S: tuple[int, ...]
    preemptions: int
    experts_moved: int
    bytes_moved: int
    compiles_after_warmup: int
    last_rebalance: float | None
    active_requests: int
    central_queue: int
    prefix_queries_S: tuple[int, ...]
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits_S: tuple[int, ...]
    """Those of them that it held."""
    cached_pages_S: tuple[int, ...]
    """KV pages that hold a known beginning, in use or not."""
    phases: tuple[PhaseTimes, ...]
    """The host's work per step, over the last ticks."""


def record_of[T](cls: type[T], message: Message) -> T:
    """A dataclass from the message with the same field names."""

    def value(name: str) -> Any:
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.has_presence and not message.HasField(name):
            return None
        return tuple(getattr(message, name)) if field.is_repeated else getattr(message, name)

    return cls(**{field.name: value(field.name) for field in fields(cls)})  # type: ignore[arg-type]
