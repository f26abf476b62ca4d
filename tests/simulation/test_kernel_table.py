"""Kernel times: exact at measured points, interpolated between them, and counted beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.simulation.costs import h100_kernels
from gimbal_jax.simulation.kernel_table import Curve, Grid, Prices, curve, grid, measured_kernels
from gimbal_jax.simulation.shapes import MEASURED, TP, shares

DECODE = "attn_decode_16q2kv", "vllm-0.24.0", "batch", "ctx"
PREFILL = "attn_prefill_16q2kv", "vllm-0.24.0", "batch", "isl"
PRODUCT = curve("gemm_bf16", "vllm-0.24.0", "m", n=2560)


@pytest.mark.parametrize("n", [128, 2048, 2560, 65536])
def test_a_curve_is_exact_at_measured_points(n):
    rows = [k for k in measured_kernels() if k.op == "gemm_bf16" and k.params["n"] == str(n)]
    times = curve("gemm_bf16", "vllm-0.24.0", "m", n=n)
    np.testing.assert_allclose(times.at(np.array([float(k.params["m"]) for k in rows])), [k.seconds for k in rows])
    assert len(rows) == len(times.size) == 74


@pytest.mark.parametrize("table", [DECODE, PREFILL])
def test_a_grid_is_exact_at_measured_points_and_counts_none_as_outside(table):
    op, stack, batch, length = table
    rows = [k for k in measured_kernels() if (k.op, k.stack) == (op, stack)]
    at = np.array([[float(k.params[batch]), float(k.params[length])] for k in rows]).T
    seconds, outside = grid(*table).look_up(*at)
    np.testing.assert_allclose(seconds, [k.seconds for k in rows])
    assert not outside.any()


def test_a_point_measured_twice_has_the_mean_time():
    rows = [
        k for k in measured_kernels() if k.op == "nccl_alltoall" and k.params == {"gpus": "4", "elements_fp16": "256"}
    ]
    assert len(rows) == 2
    times = curve("nccl_alltoall", "nccl-2.27.3", "elements_fp16", gpus=4)
    assert times.at(np.array(256.0)) == pytest.approx(np.mean([k.seconds for k in rows]))


@given(st.floats(1, 32768))
def test_time_between_two_points_is_between_their_times(m):
    i = int(np.clip(np.searchsorted(PRODUCT.size, m, side="right") - 1, 0, len(PRODUCT.size) - 2))
    ends = PRODUCT.seconds[i : i + 2]
    assert ends.min() * (1 - 1e-12) <= PRODUCT.at(np.array(m)) <= ends.max() * (1 + 1e-12)


@given(st.integers(1, 2048), st.integers(1, 131072), st.integers(1, 131072))
def test_longer_contexts_never_cost_much_less(batch, length, more):
    """Neighbouring points are noisy by up to 7 % below the knee, so the bound is no tighter."""
    (short, long), _ = grid(*DECODE).look_up(np.full(2, batch), np.array([length, length + more]))
    assert long > 0.93 * short


def test_the_last_line_continues_beyond_the_ends_and_is_counted():
    times = Curve(np.array([2.0, 4.0, 8.0]), np.array([3.0, 4.0, 8.0]))
    prices = Prices({"kernel": times})
    sizes = np.array([0.0, 1.0, 2.0, 8.0, 10.0, 20.0])
    np.testing.assert_allclose(prices.seconds("kernel", sizes), [0.0, 2.5, 3.0, 8.0, 10.0, 20.0])
    assert prices.outside == {"kernel": 3}, "size 0 is nothing to do, not an extrapolation"


def test_times_do_not_fall_beyond_a_noisy_end():
    times = Curve(np.array([1.0, 2.0, 4.0]), np.array([5.0, 4.0, 3.0]))
    np.testing.assert_allclose(times.at(np.array([0.0, 100.0])), [5.0, 3.0])


def test_lengths_that_a_batch_was_not_measured_at_are_counted():
    times = grid(*DECODE)  # batch 1024 goes to 512, batch 512 to 1024
    seconds, outside = times.look_up(np.array([512, 600, 600, 1024, 1024]), np.array([1024, 1024, 512, 512, 1024]))
    assert outside.tolist() == [False, True, False, False, True]
    assert seconds[4] > seconds[3]


def test_a_left_out_point_is_predicted_on_a_line_but_not_at_a_bend():
    assert Curve(np.array([1.0, 2.0, 5.0]), np.array([3.0, 5.0, 11.0])).leave_one_out() == pytest.approx([0.0])
    assert Curve(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 3.0])).leave_one_out() == pytest.approx([1.0])


def test_lines_of_a_grid_hold_measured_points_only():
    times = grid(*DECODE)
    assert isinstance(times, Grid)
    by_length = times.lines()[: len(times.batch)]
    assert sum(len(line.size) for line in by_length) == sum(k.op == DECODE[0] for k in measured_kernels())


def test_every_table_is_finite_and_positive():
    for name, times in h100_kernels(shares(PRESETS[MEASURED], TP), TP).items():
        assert np.isfinite(times.seconds).all() and (times.seconds > 0).all(), name


def test_an_unmeasured_kernel_is_rejected():
    with pytest.raises(ValueError, match="no kernel gemm_bf16"):
        curve("gemm_bf16", "vllm-0.24.0", "m", n=77)
