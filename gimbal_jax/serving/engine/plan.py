"""What one engine wants to compute in a step, and what came of it: records between engine, batch and runner.

Sequences that decode are many and alike, so they travel as arrays [D], not as objects. An engine's *row* is the place
of a running sequence, from 0 to ``max_rows - 1``; it is the sequence's own as long as it runs. The devices keep the
token that each row chose last, so that a step can be enqueued before the host knows the tokens of the one before it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gimbal_jax.serving.engine.request import SamplingParams, TokenLogprobs

ON_DEVICE = -1
"""In place of a token to compute: the one that its row chose last, which the host does not know yet."""
NOT_FINITE = -1
"""In place of a chosen token: the logits are not numbers."""


@dataclass(frozen=True, eq=False)
class Adjustment:
    """What few requests ask for: how logits are changed before the next token is chosen."""

    suppress: tuple[int, ...] = ()
    """Tokens that must not be chosen yet (stop tokens before ``min_tokens``)."""
    allowed: np.ndarray | None = None
    """The only tokens that may be chosen, as ``Grammar.allowed`` gives them; None allows all."""
    history: np.ndarray | None = None
    """Where a penalty wants them: all tokens of the sequence before the last one to compute, which the step has."""
    prompt_tokens: int = 0
    """So many of the history and that last token are its prompt."""
    params: SamplingParams | None = None
    """Whose bias and penalties these are; None has neither."""


def pack_sampling(params: SamplingParams) -> np.ndarray:
    """Return the sampling settings as the device reads them, int32 [6]: one row of ``sampling_DX``.

    The columns are temperature, top_k, top_p, min_p, seed and logprobs, in the order of the fields of
    ``model.inputs.SamplingInputs``. Floats are stored as their bits.
    """
    # The device draws from the low 32 bits of the seed. -1 reports no log probabilities.
    seed, logprobs = params.seed & 0xFFFFFFFF, -1 if params.logprobs is None else params.logprobs
    packed = _SAMPLING.pack(params.temperature, params.top_k, params.top_p, params.min_p, seed, logprobs)
    return np.frombuffer(packed, np.int32)


_SAMPLING = struct.Struct("=fiffIi")
SAMPLING_COLUMNS = 6
SEED, LOGPROBS = 4, 5
"""Columns of ``sampling_DX``."""


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """One token each of the sequences that decode; arrays [D], each row once. All choose a next token."""

    row_D: np.ndarray
    """int32 engine rows."""
    token_D: np.ndarray
    """int32 token ids, or ON_DEVICE."""
    start_D: np.ndarray
    """int32 positions of these tokens."""
    page_table_DM: np.ndarray
    """int32 pages of each sequence in order, up to the token's own; 0 beyond. At least as wide as the longest."""
    sampling_DX: np.ndarray
    """int32 sampling settings of each row (see ``pack_sampling``)."""
    adjustments: tuple[tuple[int, Adjustment], ...] = ()
    """(index into D, what it asks for)."""

    def __len__(self) -> int:
        return len(self.row_D)


@dataclass(eq=False, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in its prefill; the host knows them all."""

    row: int
    tokens: np.ndarray
    """int32 token ids, at least one."""
    start: int
    """Position of the first one."""
    pages: np.ndarray
    """int32 pages of the sequence in order; they hold every position up to the last token's."""
    sampling: SamplingParams | None
    """How to choose the token after the last one; None in the middle of a prefill, where none is chosen."""
    adjustment: Adjustment | None = None
    targets: np.ndarray | None = None
    """Prompt tokens whose log probabilities are wanted: those after each of ``tokens``, as far as the prompt goes."""
    target_logprobs: int = 0
    """Alternatives to report for each of ``targets``."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Share of one engine in a step; without tokens the engine idles."""

    decode: DecodeRows
    prefill: tuple[Chunk, ...] = ()
    tiles: int = 0
    """Tiles that the prefill chunks fill; each chunk starts a new one."""
    logprobs: tuple[tuple[int, int, int], ...] = ()
    """Log probabilities to report, as ``wanted_logprobs`` returns them."""

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(len(chunk.tokens) for chunk in self.prefill)


def wanted_logprobs(decode: DecodeRows, prefill: Sequence[Chunk]) -> tuple[tuple[int, int, int], ...]:
    """Return (sequence, row, alternatives) for each chosen token whose log probabilities are to be reported.

    The sequences of a step are its decode rows followed by its prefill chunks.
    """
    counts_D = decode.sampling_DX[:, LOGPROBS]
    wanted = [(d, int(decode.row_D[d]), int(counts_D[d])) for d in np.flatnonzero(counts_D >= 0).tolist()]
    for sequence, chunk in enumerate(prefill, len(decode)):
        if chunk.sampling is not None and chunk.sampling.logprobs is not None:
            wanted.append((sequence, chunk.row, chunk.sampling.logprobs))
    return tuple(wanted)


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step gives for one engine's plan."""

    token_D: np.ndarray
    """int32 token after each decode row, or NOT_FINITE."""
    token_C: np.ndarray
    """int32, for each prefill chunk: NOT_FINITE, or the token after it, which means nothing if it chooses none."""
    logprobs: Mapping[int, TokenLogprobs]
    """Of the chosen tokens, by row, where wanted."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    """Of the chunks' ``targets``, by row."""
