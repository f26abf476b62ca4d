"""Records that the client returns, and errors that it raises."""

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
    """A failed call. ``code`` is its gRPC status, and the text is the server's error message."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details or code.name)
        self.code = code


class InvalidRequest(ClientError):
    """A field with a value that the server rejects. The text names the field and its range."""


class Unsupported(ClientError):
    """A field or method that the server does not support. The text names it."""


class Overloaded(ClientError):
    """A full queue, or a client with too many streams. Try again later."""


class Unavailable(ClientError):
    """No server, or a server that warms up, drains or has stopped."""


class Unauthenticated(ClientError):
    """A missing, wrong or expired API key."""


class DeadlineExceeded(ClientError):
    """A call that its ``timeout_s`` ended."""


class AlreadyRunning(ClientError):
    """A request id that belongs to a request that is still running."""


ERRORS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    # The server cancels calls that arrive while it closes. A cancellation by the caller is asyncio's error instead.
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyRunning,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}
"""Error class of each gRPC status; all others raise ClientError itself."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one output. The last chunk of each output has a finish_reason."""

    token_ids: tuple[int, ...]
    text: str
    """Text of the new tokens, without an end that may become a stop string; empty if the prompt was token ids."""
    logprobs: tuple[TokenLogprobs, ...]
    """Log probabilities of the new tokens; empty unless the request has ``logprobs``."""
    prompt_tokens: int
    """Number of prompt tokens."""
    completion_tokens: int
    """Number of output tokens so far, including the new ones."""
    cached_tokens: int = 0
    """Number of prompt tokens that the prefix cache held."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while there is more to come."""
    stop_token_id: int | None = None
    """Stop token that ended the output; None if another thing did."""
    stop_text: str | None = None
    """Stop string that ended the output; None if another thing did."""
    index: int = 0
    """Index of the output, in [0, n)."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of every prompt token but the first, with the first tokens if the request asks for them."""


@dataclass(frozen=True)
class Placement:
    """The placement of all experts: rank = slot // (experts // ranks), source = rank // (ranks // sources)."""

    slot_of_expert_LE: np.ndarray
    """Slot of each expert, int32 [MoE layers, experts]."""
    ranks: int
    """Number of ranks, each with an equal share of the slots."""
    sources: int
    """Number of engines, each with an equal share of the ranks."""


@dataclass(frozen=True)
class Traces:
    """The latest trace of each engine; none before the first."""

    now: float
    """Time of the answer, in seconds on the server's monotonic clock; traces and decisions use the same clock."""
    traces: tuple[Trace, ...]
    central_queue: int
    """Number of requests that have no engine yet."""


@dataclass(frozen=True)
class Decisions:
    """The last decisions of dispatch and of placement, oldest first."""

    now: float
    """Time of the answer, in seconds on the server's monotonic clock."""
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
