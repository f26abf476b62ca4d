"""Results and errors of the client."""

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
    """Failure of a call. ``code`` is its gRPC status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details or code.name)
        self.code = code


class InvalidRequest(ClientError):
    """A field has an invalid value. The text names the field and its range."""


class Unsupported(ClientError):
    """The server does not support a field or method. The text names it."""


class Overloaded(ClientError):
    """The queue is full. Try again later."""


class Unavailable(ClientError):
    """There is no server, or it warms up, drains or has stopped."""


class Unauthenticated(ClientError):
    """The server requires an API key, and the client has none or a wrong one."""


class DeadlineExceeded(ClientError):
    """The timeout of the call has passed."""


class AlreadyRunning(ClientError):
    """A request with the same id is still running."""


ERRORS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    # A call that arrives while the server closes. A cancellation by the caller raises asyncio's error instead.
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyRunning,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


@dataclass(frozen=True)
class Chunk:
    """New tokens of one output. The last chunk of an output has its finish reason."""

    token_ids: tuple[int, ...]
    text: str
    """Text that the new tokens complete; an end that may become a stop string is withheld.

    Empty for a request by token ids.
    """
    logprobs: tuple[TokenLogprobs, ...]
    prompt_tokens: int
    completion_tokens: int
    """Output tokens so far, including these."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None if more chunks follow."""
    stop_token_id: int | None = None
    stop_text: str | None = None
    """Stop string that ended the output; None if there was none."""
    index: int = 0
    """Index of the output, of n."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of all prompt tokens except the first; only in the first chunk, and only if requested."""


@dataclass(frozen=True)
class Placement:
    """Slot of each expert, by MoE layer. Rank = slot // (experts // ranks), source = rank // (ranks // sources)."""

    slot_of_expert_LE: np.ndarray
    ranks: int
    sources: int


@dataclass(frozen=True)
class Traces:
    """The latest published traces, one per engine; empty before the first."""

    now: float
    """Current time in seconds on the server's monotonic clock, which all times of traces and decisions use."""
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
