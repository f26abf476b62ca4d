"""Records between engine and runner: the plan of one engine for a step, and its results.

There are many decoding sequences, so they travel as arrays [D], not as objects. An engine's *row* is the place of a
running sequence, from 0 to ``max_rows - 1``; the sequence keeps it as long as it runs. The devices keep the token that
each row chose last, so a step can be enqueued before the host knows the tokens of the step before it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gimbal_jax.serving.engine.request import SamplingParams, TokenLogprobs

ON_DEVICE = -1
"""Stands for a token to compute that its row chose last and the host does not know yet."""
NOT_FINITE = -1
"""Stands for a chosen token if the logits are not finite."""


@dataclass(frozen=True, eq=False)
class Adjustment:
    """How the logits of a sequence are changed before its next token is chosen. Few requests need it."""

    suppress: tuple[int, ...] = ()
    """Tokens that must not be chosen yet: stop tokens before ``min_tokens``."""
    allowed: np.ndarray | None = None
    """The only tokens that may be chosen, as ``Grammar.allowed`` returns them; None allows all."""
    history: np.ndarray | None = None
    """int32 tokens of the sequence before the last one to compute; None without a penalty."""
    prompt_tokens: int = 0
    """Length of the prompt, which ``history`` begins with."""
    params: SamplingParams | None = None
    """Bias and penalties; None if the request has neither."""


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
    """One token of each decoding sequence, as arrays [D]; each row occurs once. Every sequence chooses a next token."""

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
    """(index into D, adjustment) of the rows whose logits change."""

    def __len__(self) -> int:
        return len(self.row_D)


@dataclass(eq=False, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in its prefill. The host knows all of them."""

    row: int
    tokens: np.ndarray
    """int32 token ids, at least one."""
    start: int
    """Position of the first token."""
    pages: np.ndarray
    """int32 pages of the sequence in order; they hold every position up to the last token's."""
    sampling: SamplingParams | None
    """How to choose the token after the chunk; None if the prefill continues and none is chosen."""
    adjustment: Adjustment | None = None
    """How the logits of that token change; None if they do not."""
    targets: np.ndarray | None = None
    """Prompt tokens whose log probabilities are wanted: the one after each of ``tokens``, up to the prompt's end."""
    target_logprobs: int = 0
    """Alternatives to report for each of ``targets``."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Work of one engine in a step; without tokens the engine idles."""

    decode: DecodeRows
    prefill: tuple[Chunk, ...] = ()
    tiles: int = 0
    """Tiles that the prefill chunks fill; each chunk starts a new one."""
    logprobs: tuple[tuple[int, int, int], ...] = ()
    """Log probabilities to report, as ``wanted_logprobs`` returns them."""

    @property
    def tokens(self) -> int:
        """Tokens that the step computes for this engine."""
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
    """Results of one engine's plan."""

    token_D: np.ndarray
    """int32 token after each decode row, or NOT_FINITE."""
    token_C: np.ndarray
    """int32 token after each prefill chunk, or NOT_FINITE; meaningless if the chunk chooses none."""
    logprobs: Mapping[int, TokenLogprobs]
    """Log probabilities of chosen tokens, by row; only if wanted."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    """Log probabilities of the chunks' ``targets``, by row."""
