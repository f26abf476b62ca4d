"""What one step takes and gives: plain arrays for S engines, laid out in groups.

A step has ``T = rows + tiles * tile`` token places per engine: first the decode rows
of one token each, then the prefill tiles of ``tile`` tokens each. A *group* is one row
or one tile (``G = rows + tiles``): consecutive tokens of one sequence, which attend to
that sequence's pages. Long chunks take several tiles. Places that a group does not
fill are padding: they route nowhere, count nowhere and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

Array = Any
"""jax.Array inside a step, numpy.ndarray outside."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Work of one step for S engines; all integers are int32."""

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
    sampling: SamplingInputs
    rare: RareInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """How to choose the token after each group's last one."""

    temperature_SG: Array
    """float32; 0 is greedy."""
    top_k_SG: Array
    """0 keeps every token."""
    top_p_SG: Array
    min_p_SG: Array
    seed_SG: Array
    """uint32; with the position of the new token it fixes the draw, whatever else is in the batch."""
    plain: Array
    """bool scalar: every row is greedy, and nothing changes its logits."""
    truncates: Array
    """bool scalar: some row sets top_k, top_p or min_p."""
    want_logprobs: Array
    """bool scalar: some row wants log probabilities."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RareInputs:
    """What few requests ask for, much of it large: C rows per engine for the sequences whose logits are to be changed.

    The shapes are the same in all steps of a server. One blank set stays on the devices, and stands for whatever
    nobody in a step asks for.
    """

    group_SC: Array
    """The group whose next token is chosen; -1 in unused rows."""
    suppress_SCK: Array
    """Tokens that must not come yet (min_tokens); -1 where unused."""
    bias_ids_SCK: Array
    """Tokens whose logits get something added; -1 where unused."""
    bias_SCK: Array
    """float32: what they get."""
    allowed_SCW: Array
    """The only tokens that may come: bit t % 32 of element t // 32."""
    history_SCN: Array
    """Tokens of the sequence so far, if it has a penalty; 0 where unused."""
    prompt_tokens_SC: Array
    """Tokens of its prompt: those after them are output."""
    repetition_SC: Array
    """float32 penalty; 1 is none."""
    frequency_SC: Array
    presence_SC: Array
    """float32 penalties; 0 is none."""
    targets_ST: Array
    """Tokens whose log probabilities are wanted, for each place of the prefill tiles; 0 where unused."""
    adjusts: Array
    """bool scalar: some row is used."""
    penalises: Array
    """bool scalar: some row has a penalty."""
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

    token_SG: Array
    """The token after each group's last one."""
    finite_SG: Array
    """False where that token means nothing, because the logits are not numbers."""
    logprobs: Logprobs | None
    """Of ``token_SG``."""
    prompt_logprobs: Logprobs | None
    """Of ``targets_ST``; None in a step without tiles."""


def group_sizes(decode_rows: int, tiles: int, tile: int) -> tuple[int, int]:
    """(T, G) of a step with this many decode rows and prefill tiles."""
    return decode_rows + tiles * tile, decode_rows + tiles


def rows_and_tiles(tokens: int, groups: int, tile: int) -> tuple[int, int]:
    """(decode rows, prefill tiles) of a step with T tokens and G groups: the inverse of ``group_sizes``."""
    tiles = (tokens - groups) // (tile - 1)
    return groups - tiles, tiles
