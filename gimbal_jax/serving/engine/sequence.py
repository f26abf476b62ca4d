"""One request in an engine: the request, and what the engine remembers of it outside the running batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gimbal_jax.scheduler.queue import QueueItem
from gimbal_jax.serving.engine.plan import Adjustment
from gimbal_jax.serving.engine.request import Request, TokenLogprobs

NO_ROW = -1
NO_OUTPUT = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class Sequence:
    """One request with its state. While it runs, its numbers are in its row of the running batch.

    The fields here change when it joins a queue, gets a row or loses it.
    """

    request: Request
    joined: int
    """Prefill tokens that its queue had processed when it joined (see ``QueueItem.waited_tokens``)."""
    page_names: list[bytes] = field(default_factory=list)
    """Hashes of its full pages, as far as they are known (see ``prefix.page_hashes``); empty if it shares no prefix."""
    cached: int = 0
    """Tokens of its prefix that the prefix cache held when it last joined the queue."""
    output: np.ndarray = field(default_factory=lambda: NO_OUTPUT)
    """int32 tokens that were chosen for it when it last lost its row."""
    row: int = NO_ROW
    """Its row in the running batch; NO_ROW while it waits."""
    key: tuple[float, ...] = ()
    """Its sort key in the queue while it waits."""
    key_until: float = -math.inf
    """Time from which ``key`` may have changed."""
    started: float | None = None
    """Time when it first got a row; None before."""
    found: int = 0
    """Tokens that the prefix cache held when it first got a row."""
    allowed: np.ndarray | None = None
    """Tokens that its grammar allows next; None without a grammar."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt tokens from the second on, as far as they are known."""

    @property
    def length(self) -> int:
        """Tokens that it has while it waits. It has to compute all of them before it decodes."""
        return len(self.request.prompt) + len(self.output)

    @property
    def age(self) -> tuple[int, float, int]:
        """Sort key by priority, then arrival; the last sequence in this order is preempted first."""
        return self.request.priority, self.request.arrival, self.request.sequence

    @property
    def adjusts(self) -> bool:
        """Whether anything other than ``min_tokens`` changes the logits of its tokens."""
        sampling = self.request.sampling
        return self.request.grammar is not None or sampling.penalises or bool(sampling.logit_bias)

    def queue_item(self, prefill_tokens: int, processed: int) -> QueueItem:
        """Return what the order of the queue depends on.

        ``prefill_tokens``: tokens that are left to compute. ``processed``: prefill tokens that its queue has processed.
        """
        request = self.request
        return QueueItem(request.arrival, prefill_tokens, processed - self.joined, request.priority)

    def adjustment(self, before: np.ndarray, too_short: bool) -> Adjustment | None:
        """Return how the logits of its next token change; None if they do not.

        ``before``: its tokens without the last one to compute. ``too_short``: stop tokens are not allowed yet.
        """
        sampling, allowed = self.request.sampling, self.allowed
        suppress = sampling.stop_token_ids if too_short else ()
        # A complete grammar allows only end tokens, which must not be suppressed then.
        if suppress and allowed is not None and _holds_only(suppress, allowed):
            suppress = ()
        if not suppress and not self.adjusts:
            return None
        history = before.copy() if sampling.penalises else None
        params = sampling if sampling.penalises or sampling.logit_bias else None
        return Adjustment(suppress, allowed, history, len(self.request.prompt), params)


def _holds_only(tokens: Iterable[int], allowed: np.ndarray) -> bool:
    """Return whether ``allowed`` (see ``Grammar``) has no other tokens than these."""
    others = allowed.view(np.uint32).copy()
    for token in tokens:
        others[token // 32] &= ~np.uint32(1 << token % 32)
    return not others.any()
