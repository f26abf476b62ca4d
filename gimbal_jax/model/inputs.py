"""What one step takes and gives: plain arrays for S engines, laid out in groups and sequences.

A step has ``T = rows + tiles * tile`` token places per engine: first the decode rows of one token each, then the
prefill tiles of ``tile`` tokens each. A *group* is one row or one tile (``G = rows + tiles``): consecutive tokens of
one sequence, which attend to that sequence's pages. Long chunks take several tiles. Places that a group does not fill
are padding: they route nowhere, count nowhere and write nothing.

The *sequences* C of a step are its decode rows, in order, and after them those whose prefill is in its tiles. The host
packs what a step needs of them into one array, since each array of a call has its price (``pack``, ``unpack``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from gimbal_jax.config import EngineConfig

Array = Any
"""jax.Array inside a step, numpy.ndarray outside."""
Bucket = tuple[int, int]
"""(decode rows, prefill tiles): the shape of one compiled step."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Tokens of S engines and where they belong; all integers are int32."""

    tokens_ST: Array
    positions_ST: Array
    """Place of each token in its sequence."""
    write_ST: Array
    """Flat KV place, page * page_size + offset; num_pages * page_size for padding."""
    page_table_SGM: Array
    """Pages of each group's sequence in order; 0 where unused."""
    start_SG: Array
    """Position of the group's first token."""
    count_SG: Array
    """Tokens in the group; 0 for an empty one."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """How the sequences of a step choose their next tokens."""

    temperature_SC: Array
    """float32; 0 is greedy."""
    top_k_SC: Array
    """0 keeps every token."""
    top_p_SC: Array
    min_p_SC: Array
    seed_SC: Array
    """uint32; with the position of the new token it fixes the draw, whatever else is in the batch."""
    logprobs_SC: Array
    """Alternatives to report; -1 where no log probabilities are wanted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedInputs:
    """What the host says of one step; in numpy these are parts of one int32 array [S, X]."""

    tokens_ST: Array
    """-1 for a decode row's: the token that its engine row chose last, which the devices know."""
    start_SG: Array
    count_SG: Array
    """As in ``StepInputs``."""
    sequence_SN: Array
    """Sequence of each tile."""
    page_table_SCM: Array
    """Pages of each sequence in order; 0 where unused."""
    last_SC: Array
    """Token place of each sequence's last token."""
    row_SC: Array
    """Engine row of each sequence that chooses a token; max_rows where none does."""
    sampling: SamplingInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RareInputs:
    """What few requests ask for, much of it large: by engine row.

    The shapes are the same in all steps of a server. One blank set stays on the devices, and stands for whatever
    nobody in a step asks for.
    """

    suppress_SRK: Array
    """Tokens that must not come yet (min_tokens); -1 where unused."""
    bias_ids_SRK: Array
    """Tokens whose logits get something added; -1 where unused."""
    bias_SRK: Array
    """float32: what they get."""
    allowed_SRW: Array
    """The only tokens that may come: bit t % 32 of element t // 32."""
    history_SRN: Array
    """Tokens of the sequence before the last one to compute, if it has a penalty; 0 where unused."""
    prompt_tokens_SR: Array
    """Tokens of its prompt: those after them are output."""
    repetition_SR: Array
    """float32 penalty; 1 is none."""
    frequency_SR: Array
    presence_SR: Array
    """float32 penalties; 0 is none."""
    targets_ST: Array
    """Tokens whose log probabilities are wanted, for each place of the prefill tiles; 0 where unused."""
    adjusts: Array
    """bool scalar: some sequence's logits are to be changed."""
    penalises: Array
    """bool scalar: some sequence has a penalty."""
    want_targets: Array
    """bool scalar: some place has a target."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of tokens, and of the K likeliest in place of each, best first; zeros unless wanted."""

    chosen: Array
    top_ids: Array
    top_values: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """What a step found. On the host log probabilities are missing where nobody wanted them."""

    token_SC: Array
    """The token after each sequence's last one; -1 where the logits are not numbers."""
    logprobs: Logprobs | None
    """Of ``token_SC``."""
    prompt_logprobs: Logprobs | None
    """Of ``targets_ST``; None in a step without tiles."""


@dataclass(frozen=True)
class StepShape:
    """Sizes that a step is compiled for, of each engine."""

    rows: int
    tiles: int
    tile: int
    max_rows: int
    pages_per_row: int

    @property
    def tokens(self) -> int:
        return self.rows + self.tiles * self.tile

    @property
    def groups(self) -> int:
        return self.rows + self.tiles

    @property
    def sequences(self) -> int:
        """Most sequences that have a part in a step. No more than these choose a token, so no more logits are made."""
        return max(self.rows, min(self.max_rows, self.groups))

    @property
    def packed(self) -> int:
        """Elements X of an engine's packed inputs."""
        return sum(map(prod, _packed_shapes(self).values()))


def step_shape(engine: EngineConfig, bucket: Bucket) -> StepShape:
    return StepShape(*bucket, engine.tile, engine.max_rows, engine.pages_per_row)


def unpack(packed_SX: Array, shape: StepShape) -> PackedInputs:
    """The parts of a packed array. In numpy they are views, by which it is filled; floats stand there bit by bit."""
    parts, at = {}, 0
    for name, sizes in _packed_shapes(shape).items():
        part = packed_SX[:, at : at + prod(sizes)].reshape(len(packed_SX), *sizes)
        parts[name] = part.view(_PACKED_TYPES[name]) if name in _PACKED_TYPES else part
        at += prod(sizes)
    sampling = SamplingInputs(**{name: parts.pop(name) for name in SamplingInputs.__dataclass_fields__})
    return PackedInputs(**parts, sampling=sampling)


def unused(engines: int, shape: StepShape) -> np.ndarray:
    """Packed inputs [S, X] of a step without tokens."""
    packed_SX = np.zeros((engines, shape.packed), np.int32)
    parts = unpack(packed_SX, shape)
    parts.row_SC[:] = shape.max_rows
    parts.sampling.logprobs_SC[:] = -1
    return packed_SX


_PACKED_TYPES = {
    "temperature_SC": np.float32,
    "top_p_SC": np.float32,
    "min_p_SC": np.float32,
    "seed_SC": np.uint32,
}


def _packed_shapes(shape: StepShape) -> Mapping[str, tuple[int, ...]]:
    """Of one engine."""
    by_sequence = ("last_SC", "row_SC", *SamplingInputs.__dataclass_fields__)
    return {
        "tokens_ST": (shape.tokens,),
        "start_SG": (shape.groups,),
        "count_SG": (shape.groups,),
        "sequence_SN": (shape.tiles,),
        **dict.fromkeys(by_sequence, (shape.sequences,)),
        "page_table_SCM": (shape.sequences, shape.pages_per_row),
    }


def group_sizes(decode_rows: int, tiles: int, tile: int) -> tuple[int, int]:
    """(T, G) of a step with this many decode rows and prefill tiles."""
    return decode_rows + tiles * tile, decode_rows + tiles


def rows_and_tiles(tokens: int, groups: int, tile: int) -> tuple[int, int]:
    """(decode rows, prefill tiles) of a step with T tokens and G groups: the inverse of ``group_sizes``."""
    tiles = (tokens - groups) // (tile - 1)
    return groups - tiles, tiles
