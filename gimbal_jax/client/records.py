"""What the client returns and raises."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

import grpc
import numpy as np
from google.protobuf.message import Message

from gimbal_jax.scheduler.dispatch_decision import DispatchRecord
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.engine.request import TokenLogprobs
from gimbal_jax.serving.engine.status import EngineStatus, StepStatus
from gimbal_jax.serving.placement.records import PlacementRecord, PlacementTotals


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
    """The server at one moment."""

    now: float
    """Seconds on the server's monotonic clock."""
    state: str
    """warming, serving, draining, stopped or failed."""
    error: str
    """Reason of the failure; empty unless the server failed."""
    active_requests: int
    """Requests that are streaming."""
    central_queue: int
    """Requests that have no engine yet."""
    engines: tuple[EngineStatus, ...]
    steps: StepStatus
    placement: PlacementTotals

    @property
    def preemptions(self) -> int:
        """Preemptions of all engines."""
        return sum(engine.preemptions for engine in self.engines)


def record_of[T](cls: type[T], message: Message) -> T:
    """Return a dataclass with the values of the message's fields of the same names, messages in them included.

    An unset optional field is None.
    """
    types = get_type_hints(cls)

    def value(name: str) -> Any:
        field, found = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
        options = (types[name], *get_args(types[name]))
        if field.has_presence and NoneType in options and not message.HasField(name):
            return None
        if field.message_type is not None:
            nested: Any = next(option for option in options if is_dataclass(option))
            return tuple(record_of(nested, one) for one in found) if field.is_repeated else record_of(nested, found)
        return tuple(found) if field.is_repeated else found

    return cls(**{field.name: value(field.name) for field in fields(cls)})  # type: ignore[arg-type]
