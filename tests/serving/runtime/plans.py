"""Plans by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gimbal_jax.serving.engine.plan import Adjustment, Chunk, DecodeRows, Plan, SamplingRows
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
    settings = [params for *_, params in sequences]

    def column(values: Any, dtype: Any) -> np.ndarray:
        return np.array(list(values), dtype)

    sampling = SamplingRows(
        temperature_D=column((p.temperature for p in settings), np.float32),
        top_k_D=column((p.top_k for p in settings), np.int32),
        top_p_D=column((p.top_p for p in settings), np.float32),
        min_p_D=column((p.min_p for p in settings), np.float32),
        seed_D=column((p.seed & 0xFFFFFFFF for p in settings), np.uint32),
        logprobs_D=column((-1 if p.logprobs is None else p.logprobs for p in settings), np.int32),
    )
    row_D, token_D, start_D = (column((s[i] for s in sequences), np.int32) for i in range(3))
    return DecodeRows(row_D, token_D, start_D, table_DM, sampling, tuple(adjustments))


def plan_of(decode: DecodeRows, prefill: Sequence[Chunk] = (), *, tile: int) -> Plan:
    return Plan(decode, tuple(prefill), sum(-(-len(chunk.tokens) // tile) for chunk in prefill))
