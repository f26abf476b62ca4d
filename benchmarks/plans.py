"""Plans for steps that are made by hand."""

from __future__ import annotations

import numpy as np

from gimbal_jax.serving.engine.plan import DecodeRows, SamplingRows


def greedy_rows(token_D: np.ndarray, start_D: np.ndarray, page_table_DM: np.ndarray) -> DecodeRows:
    """The first engine rows decode, greedily: int32 tokens, their positions, and the pages of their sequences."""
    rows = len(token_D)
    nothing, zeros = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    sampling = SamplingRows(zeros, nothing, zeros + 1, zeros, nothing.astype(np.uint32), nothing - 1)
    return DecodeRows(np.arange(rows, dtype=np.int32), token_D, start_D, page_table_DM, sampling)
