"""What travels between the frontend and the engines: requests in, outputs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PRIORITY_KEY = "x-gimbal-priority"
"""gRPC metadata key of a request's priority, for which the protocol has no field."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Already validated: the frontend does that."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    """Alternatives per token to report besides the chosen one; None reports nothing."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, the model's own end tokens included unless they are ignored."""


@dataclass(frozen=True)
class Request:
    """One sequence to generate; ``sequence`` numbers the requests dispatched to its engine from 1."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    engine: int | None
    """None: the server binds it to one (dispatch policy ``late``), and ``sequence`` is 0."""
    sequence: int
    priority: int = 0
    """Lower runs first; 0 unless the queue policy is ``priority``."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a chosen token, and of the likeliest ones, best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(slots=True)  # not frozen: one is made for every token, and that would take five times as long
class Output:
    """News of one request after a step: its new tokens, and how it ended if it did."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended it; it is not among the tokens."""
    error: str = field(default="", compare=False)
