"""Plans for steps that are made by hand."""

from __future__ import annotations

import numpy as np

from gimbal_jax.serving.engine.plan import DecodeRows, pack_sampling
from gimbal_jax.serving.engine.request import SamplingParams


def greedy_rows(token_D: np.ndarray, start_D: np.ndarray, page_table_DM: np.ndarray) -> DecodeRows:
    """The first engine rows decode, greedily: int32 tokens, their positions, and the pages of their sequences."""
    rows = len(token_D)
    sampling_DX = np.tile(pack_sampling(SamplingParams(max_tokens=1, temperature=0.0)), (rows, 1))
    return DecodeRows(np.arange(rows, dtype=np.int32), token_D, start_D, page_table_DM, sampling_DX)
