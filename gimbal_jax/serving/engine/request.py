"""Records between the frontend and the engines: requests in, token deltas out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, Protocol

import numpy as np

PRIORITY_KEY = "x-gimbal-priority"
"""gRPC metadata key of a request's priority, for which the protocol has no field."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. The frontend has validated it."""

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
    """Alternatives to report for each token in addition to the chosen one; None reports nothing."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output. The model's end tokens are among them unless the request ignores them."""
    frequency_penalty: float = 0.0
    """Value subtracted from a token's logit for each time that it occurs in the output."""
    presence_penalty: float = 0.0
    """Value subtracted once from the logit of every token that occurs in the output."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of the others, of tokens that occur in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), at most MAX_LOGIT_BIAS entries."""
    prompt_logprobs: int | None = None
    """Alternatives to report for each prompt token in addition to itself; None reports nothing."""

    @property
    def penalises(self) -> bool:
        """Whether the request has a penalty."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


class Grammar(Protocol):
    """Constraint on the output of one sequence, with its state. Only the engine thread uses it.

    An error of it ends its own request with an error.
    """

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next, at least one: bit t % 32 of element t // 32, int32 [ceil(V / 32)].

        If the output is complete, these are end tokens.
        """

    def accept(self, token_id: int) -> None:
        """Continue the output with this token, which is allowed."""


@dataclass(frozen=True)
class Request:
    """One sequence to generate."""

    id: str
    """Key in the core, unique among the requests that run or wait.

    An int would lie in memory among the ints of its prompt, and every new token would wait for it."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    engine: int | None = None
    """Engine that runs it; None if the core is to choose one (dispatch policy ``late``)."""
    sequence: int = 0
    """Number among the requests dispatched to its engine, from 1; 0 without an engine."""
    priority: int = 0
    """Lower runs first; 0 unless the queue policy is ``priority``."""
    grammar: Grammar | None = None
    page_hashes: tuple[bytes, ...] = ()
    """Hashes of the prompt's full pages (see ``prefix.page_hashes``); empty if no prefix is to be shared."""
    label: str = ""
    """The client's id of the request, for people."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of a token, and of the likeliest tokens in its place, best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing would make that five times slower
class TokenDelta:
    """New tokens of one request after a step, and the reason of its end if it ended."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids``; empty if the request did not ask for them."""
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    """Stop token or stop string that ended it. The token is not among ``token_ids``, those of the string are."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each prompt token but the first, if requested. Only set with the first tokens."""
    started: float | None = field(default=None, compare=False)
    """Time when its first step began, on the core's clock. Only set with the first tokens."""
    cached_tokens: int = field(default=0, compare=False)
    """Prompt tokens that the prefix cache held when it first got a row. Only set with the first tokens."""
    error: str = field(default="", compare=False)
    """Why it failed; empty unless ``finish_reason`` is "error"."""
    text: str = ""
    """Text that may be shown now; the engines leave it empty. It may come later than its tokens."""


def merge(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Return consecutive deltas of one request as one; at least one delta."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1:
        return first
    return TokenDelta(
        first.request_id,
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        finish_reason=last.finish_reason,
        stop=last.stop,
        prompt_logprobs=first.prompt_logprobs,
        started=first.started,
        cached_tokens=first.cached_tokens,
        error=last.error,
        text="".join(delta.text for delta in deltas),
    )


def reason_of(error: BaseException) -> str:
    """Return the text for clients about an exception: its type and first line, short enough for a gRPC status."""
    first_line, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {first_line[:300]}"
