"""Plans by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gimbal_jax.serving.engine.plan import (
    SAMPLING_COLUMNS,
    Adjustment,
    Chunk,
    DecodeRows,
    Plan,
    pack_sampling,
    wanted_logprobs,
)
from gimbal_jax.serving.engine.request import SamplingParams


def decode_rows(
    sequences: Sequence[tuple[int, int, int, Sequence[int], SamplingParams]],
    pages_per_row: int,
    adjustments: Sequence[tuple[int, Adjustment]] = (),
) -> DecodeRows:
    """Of (engine row, token, position of it, pages, settings) of each."""
    table_DM = np.zeros((len(sequences), pages_per_row), np.int32)
    for d, (*_, pages, _) in enumerate(sequences):
        table_DM[d, : len(pages)] = pages
    sampling_DX = np.array([pack_sampling(params) for *_, params in sequences], np.int32).reshape(-1, SAMPLING_COLUMNS)
    row_D, token_D, start_D = (np.array([s[i] for s in sequences], np.int32) for i in range(3))
    return DecodeRows(row_D, token_D, start_D, table_DM, sampling_DX, tuple(adjustments))


def plan_of(decode: DecodeRows, prefill: Sequence[Chunk] = (), *, tile: int) -> Plan:
    tiles = sum(-(-len(chunk.tokens) // tile) for chunk in prefill)
    return Plan(decode, tuple(prefill), tiles, wanted_logprobs(decode, prefill))
