"""What travels between the frontend and the engines: requests in, outputs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

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
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the output has it."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the output has."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it where positive, else multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), at most MAX_LOGIT_BIAS."""
    prompt_logprobs: int | None = None
    """Alternatives to report for each prompt token besides its own log probability; None reports nothing."""

    @property
    def penalises(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


class Grammar(Protocol):
    """What an output must look like, and how far it has come. One sequence's own, used by the engine thread only.

    Whatever it raises ends that one request with an error.
    """

    def allowed(self) -> np.ndarray:
        """Tokens that may come next, as bits: bit t % 32 of element t // 32, int32 [ceil(V / 32)]; at least one.

        Where the output is complete these are end tokens.
        """

    def accept(self, token_id: int) -> None:
        """The output goes on with this token, one of those allowed."""


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
    grammar: Grammar | None = None
    page_hashes: tuple[bytes, ...] = ()
    """Of the prompt's full pages (see ``prefix.page_hashes``); empty where no prefix is to be shared."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a token, and of the likeliest ones in its place, best first."""

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
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first tokens, if they were asked for: of every prompt token but the first."""
    started: float | None = field(default=None, compare=False)
    """With the first tokens: when its first step began, on the server's clock."""
    cached_tokens: int = field(default=0, compare=False)
    """With the first tokens: prompt tokens that the prefix cache held when it first got a row."""
    error: str = field(default="", compare=False)


def reason_of(error: BaseException) -> str:
    """What clients are told of an exception: its kind and its first line, which fits into a gRPC status."""
    first_line, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {first_line[:300]}"
