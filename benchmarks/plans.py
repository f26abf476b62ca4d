"""Decode rows for steps that are planned by hand."""

from __future__ import annotations

import numpy as np

from gimbal_jax.serving.engine.plan import DecodeRows, pack_sampling
from gimbal_jax.serving.engine.request import SamplingParams


def greedy_rows(token_D: np.ndarray, start_D: np.ndarray, page_table_DM: np.ndarray) -> DecodeRows:
    """Return greedy decode rows for the first engine rows.

    Args, all int32: the last token of each sequence, its position, and the KV pages of the sequence.
    """
    rows = len(token_D)
    sampling_DX = np.tile(pack_sampling(SamplingParams(max_tokens=1, temperature=0.0)), (rows, 1))
    return DecodeRows(np.arange(rows, dtype=np.int32), token_D, start_D, page_table_DM, sampling_DX)
