"""What one engine wants to compute in a step, and what came of it: records between engine, batch and runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gimbal_jax.serving.request import SamplingParams, TokenLogprobs

# Chunk and NextToken are made for every token: frozen, they would take five times as long.


@dataclass(eq=False, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute; a decode row is a chunk of one token."""

    request_id: str
    tokens: np.ndarray
    """int32 token ids, at least one."""
    start: int
    """Position of the first one."""
    pages: np.ndarray
    """int32 pages of the sequence in order; they hold every position up to the last token's."""
    sampling: SamplingParams | None
    """How to choose the token after the last one; None in the middle of a prefill, where none is chosen."""
    suppress: tuple[int, ...] = ()
    """Tokens that must not be chosen yet (stop tokens before ``min_tokens``)."""
    history: np.ndarray | None = None
    """All tokens of the sequence so far, where a penalty wants them; the first ``prompt_tokens`` are its prompt."""
    prompt_tokens: int = 0
    allowed: np.ndarray | None = None
    """The only tokens that may be chosen, as ``Grammar.allowed`` gives them; None allows all."""
    targets: np.ndarray | None = None
    """Prompt tokens whose log probabilities are wanted: those after each of ``tokens``, as far as the prompt goes."""
    target_logprobs: int = 0
    """Alternatives to report for each of ``targets``."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Share of one engine in a step; without chunks the engine idles."""

    decode: tuple[Chunk, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    tiles: int = 0
    """Tiles that the prefill chunks fill; each chunk starts a new one."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.decode + self.prefill

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(len(chunk.tokens) for chunk in self.prefill)


@dataclass(slots=True)
class NextToken:
    """What a step gives for a chunk: the token after it, with its log probabilities if the request wants them."""

    token_id: int | None
    """None after a chunk that chooses none, in the middle of a prefill."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the chunk's ``targets``."""
    error: str = ""
    """Why no token could be chosen for this sequence, where others of the step go on."""
