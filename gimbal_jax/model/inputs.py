"""Inputs and outputs of one step: plain arrays for S engines, laid out in groups and sequences.

A step has ``T = rows + tiles * tile`` token places per engine. The decode rows come first, with one token each, then
the prefill tiles, with ``tile`` tokens each. A *group* is one row or one tile (``G = rows + tiles``). It holds
consecutive tokens of one sequence, which attend to the pages of that sequence. Long chunks take several tiles. Places
that a group does not fill are padding. Padding is not routed, not counted and not written.

The *sequences* C of a step are its decode rows, in order, followed by those whose prefill is in its tiles. The host
packs their data into one array (see ``unpack``), because each array of a call has a cost.
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
    """Tokens of S engines with their positions and pages; all arrays are int32."""

    tokens_ST: Array
    """Token of each place."""
    positions_ST: Array
    """Position of each token in its sequence."""
    write_ST: Array
    """Flat KV place of each token, page * page_size + offset; num_pages * page_size for padding."""
    page_table_SGM: Array
    """Pages of each group's sequence in order; 0 for unused entries."""
    start_SG: Array
    """Position of the group's first token."""
    count_SG: Array
    """Tokens in the group; 0 for an empty group."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """Settings by which the sequences of a step choose their next tokens."""

    temperature_SC: Array
    """float32 temperature; 0 is greedy."""
    top_k_SC: Array
    """int32 number of likeliest tokens to keep; 0 keeps all."""
    top_p_SC: Array
    """float32 total probability of the likeliest tokens to keep; 1 keeps all."""
    min_p_SC: Array
    """float32 least probability to keep, relative to the best token; 0 keeps all."""
    seed_SC: Array
    """uint32 seed. The draw depends on it and on the position of the new token, not on the rest of the batch."""
    logprobs_SC: Array
    """int32 number of alternatives to report; -1 if no log probabilities are wanted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedInputs:
    """Data that the host sends for one step; in numpy these are parts of one int32 array [S, X]."""

    tokens_ST: Array
    """Token of each place. -1 in a decode row stands for the token that its engine row chose last, on the devices."""
    start_SG: Array
    """Position of the group's first token."""
    count_SG: Array
    """Tokens in the group; 0 for an empty group."""
    sequence_SN: Array
    """Sequence of each tile."""
    page_table_SCM: Array
    """Pages of each sequence in order; 0 for unused entries."""
    last_SC: Array
    """Token place of each sequence's last token."""
    row_SC: Array
    """Engine row of each sequence that chooses a token; max_rows for one that chooses none."""
    sampling: SamplingInputs
    """Settings of each sequence."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RareInputs:
    """Settings that few requests use, most of them large arrays, by engine row; integers are int32.

    The shapes are equal in all steps of a server. One default set stays on the devices, and replaces the arrays that no
    sequence of a step uses.
    """

    suppress_SRK: Array
    """Tokens that are not allowed yet (min_tokens); -1 for unused entries."""
    bias_ids_SRK: Array
    """Tokens whose logits are biased; -1 for unused entries."""
    bias_SRK: Array
    """float32 bias of each of them."""
    allowed_SRW: Array
    """Mask of the only allowed tokens: token t is bit t % 32 of element t // 32."""
    history_SRN: Array
    """Tokens of a sequence with a penalty, without the last one to compute; 0 for unused entries."""
    prompt_tokens_SR: Array
    """Length of the prompt; tokens after it are output."""
    repetition_SR: Array
    """float32 repetition penalty; 1 is none."""
    frequency_SR: Array
    """float32 frequency penalty; 0 is none."""
    presence_SR: Array
    """float32 presence penalty; 0 is none."""
    targets_ST: Array
    """Tokens whose log probabilities are wanted, one for each place of the prefill tiles; 0 for unused places."""
    adjusts: Array
    """bool scalar: at least one sequence's logits must be changed."""
    penalises: Array
    """bool scalar: at least one sequence has a penalty."""
    want_targets: Array
    """bool scalar: at least one place has a target."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of tokens [...] and of the K likeliest alternatives to each; zeros unless wanted."""

    chosen: Array
    """float32 log probability of each token, [...]."""
    top_ids: Array
    """int32 likeliest tokens, best first, [..., K]."""
    top_values: Array
    """float32 log probabilities of ``top_ids``, [..., K]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """Results of a step. On the host, log probabilities are None if no request wants them."""

    token_SC: Array
    """The token after each sequence's last one; -1 if the logits are not finite."""
    logprobs: Logprobs | None
    """Log probabilities of ``token_SC``."""
    prompt_logprobs: Logprobs | None
    """Log probabilities of ``targets_ST``; None in a step without tiles."""


@dataclass(frozen=True)
class StepShape:
    """Sizes for which a step is compiled, of each engine."""

    rows: int
    """Decode rows of the step."""
    tiles: int
    """Prefill tiles of the step."""
    tile: int
    """Tokens of a prefill tile."""
    max_rows: int
    """Rows of an engine; a step computes some of them."""
    pages_per_row: int
    """Entries of a sequence's page table."""

    @property
    def tokens(self) -> int:
        """Token places T."""
        return self.rows + self.tiles * self.tile

    @property
    def groups(self) -> int:
        """Groups G."""
        return self.rows + self.tiles

    @property
    def sequences(self) -> int:
        """Most sequences C in a step. Each chooses at most one token, so a step computes the logits of C places."""
        return max(self.rows, min(self.max_rows, self.groups))

    @property
    def packed(self) -> int:
        """Elements X of an engine's packed inputs."""
        return sum(map(prod, _packed_shapes(self).values()))


def step_shape(engine: EngineConfig, bucket: Bucket) -> StepShape:
    """Return the shape of an engine's step of this bucket."""
    return StepShape(*bucket, engine.tile, engine.max_rows, engine.pages_per_row)


def unpack(packed_SX: Array, shape: StepShape) -> PackedInputs:
    """Return the parts of a packed array [S, X].

    The numpy parts are views, so the host fills the array through them. Floats are stored as their bits.
    """
    parts, at = {}, 0
    # Parts follow each other in the packed array in the order of the table.
    for name, sizes in _packed_shapes(shape).items():
        part = packed_SX[:, at : at + prod(sizes)].reshape(len(packed_SX), *sizes)
        parts[name] = part.view(_PACKED_TYPES[name]) if name in _PACKED_TYPES else part
        at += prod(sizes)
    sampling = SamplingInputs(**{name: parts.pop(name) for name in SamplingInputs.__dataclass_fields__})
    return PackedInputs(**parts, sampling=sampling)


def sampling_block(packed_SX: np.ndarray, shape: StepShape) -> np.ndarray:
    """Return the view [S, fields of SamplingInputs, C] of packed inputs that holds the sampling settings."""
    sizes = {name: prod(size) for name, size in _packed_shapes(shape).items()}
    names, fields = list(sizes), list(SamplingInputs.__dataclass_fields__)
    at = sum(sizes[name] for name in names[: names.index(fields[0])])
    block_SX = packed_SX[:, at : at + len(fields) * shape.sequences]
    return block_SX.reshape(len(packed_SX), len(fields), shape.sequences)


def empty_inputs(engines: int, shape: StepShape) -> np.ndarray:
    """Return packed inputs [S, X] of a step without tokens."""
    packed_SX = np.zeros((engines, shape.packed), np.int32)
    parts = unpack(packed_SX, shape)
    parts.row_SC[:] = shape.max_rows
    parts.sampling.logprobs_SC[:] = -1
    return packed_SX


# Types of the parts that are not int32.
_PACKED_TYPES = {
    "temperature_SC": np.float32,
    "top_p_SC": np.float32,
    "min_p_SC": np.float32,
    "seed_SC": np.uint32,
}


def _packed_shapes(shape: StepShape) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each part of one engine's packed inputs, in order."""
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
    """Return (T, G) of a step with this many decode rows and prefill tiles."""
    return decode_rows + tiles * tile, decode_rows + tiles


def rows_and_tiles(tokens: int, groups: int, tile: int) -> tuple[int, int]:
    """Return (decode rows, prefill tiles) of a step with T tokens and G groups; the inverse of ``group_sizes``."""
    tiles = (tokens - groups) // (tile - 1)
    return groups - tiles, tiles
