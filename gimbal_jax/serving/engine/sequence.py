"""One request in an engine: what is asked for it, and what the engine remembers of it beside ``rows``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gimbal_jax.serving.engine.plan import Adjustment
from gimbal_jax.serving.engine.request import Request, TokenLogprobs

NO_ROW = -1
NO_OUTPUT = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class Sequence:
    """One request with its state. While it runs its numbers are in its row; these change when it joins or leaves."""

    request: Request
    joined: int
    """Prefill tokens that its queue had processed when it joined; see ``QueueItem.waited_tokens``."""
    page_names: list[bytes]
    """Of its full pages, as far as they are known (see ``prefix.page_hashes``); empty where it shares nothing."""
    cached: int = 0
    """Tokens of its beginning that the prefix cache held when it last joined the queue."""
    output: np.ndarray = field(default_factory=lambda: NO_OUTPUT)
    """Tokens that it had chosen when it last lost its row, int32."""
    row: int = NO_ROW
    key: tuple[float, ...] = ()
    key_until: float = -math.inf
    """While it waits: its sort key in the queue, and when that is no longer sure to hold."""
    started: float | None = None
    """When it first got a row."""
    found: int = 0
    """Tokens that the prefix cache held then."""
    allowed: np.ndarray | None = None
    """Tokens that its grammar allows next; None without one."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens from the second on, as far as they are known."""

    @property
    def length(self) -> int:
        """While it waits: its tokens, all of which it has to compute before it decodes."""
        return len(self.request.prompt) + len(self.output)

    @property
    def age(self) -> tuple[int, float, int]:
        """Order of arrival among requests of one priority; what comes last is preempted first."""
        return self.request.priority, self.request.arrival, self.request.sequence

    @property
    def adjusts(self) -> bool:
        """Whether something but ``min_tokens`` changes the logits of its tokens."""
        sampling = self.request.sampling
        return self.request.grammar is not None or sampling.penalises or bool(sampling.logit_bias)

    def adjustment(self, before: np.ndarray, too_short: bool) -> Adjustment | None:
        """How the logits of its next token change; None if they do not.

        ``before`` are its tokens but the last one to compute; ``too_short`` that no stop token may come yet.
        """
        sampling, allowed = self.request.sampling, self.allowed
        suppress = sampling.stop_token_ids if too_short else ()
        if suppress and allowed is not None and _holds_only(suppress, allowed):
            suppress = ()  # its grammar is complete: end tokens are all that it can go on with
        if not suppress and not self.adjusts:
            return None
        history = before.copy() if sampling.penalises else None
        params = sampling if sampling.penalises or sampling.logit_bias else None
        return Adjustment(suppress, allowed, history, len(self.request.prompt), params)


def _holds_only(tokens: Iterable[int], allowed: np.ndarray) -> bool:
    """Whether ``allowed`` (see ``Grammar``) has none but ``tokens``."""
    others = allowed.view(np.uint32).copy()
    for token in tokens:
        others[token // 32] &= ~np.uint32(1 << token % 32)
    return not others.any()
