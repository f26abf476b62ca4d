"""Workloads: real pairs of lengths, shapes as described, requested rates, and equal workloads for equal seeds."""

import csv
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.simulation.workload import (
    SHAPE_BINS,
    SHAPES,
    TRACES,
    WorkloadConfig,
    bin_shares,
    length_bins,
    length_table,
    make_workload,
)
from tests.simulation.rig import ROUTER

RESHAPED = [shape for shape in SHAPES if shape != "random"]
ARRIVALS = ("poisson", "bursty", "trace", "at-once")
configs = st.builds(
    WorkloadConfig,
    lengths=st.sampled_from((*TRACES, *SHAPES)),
    requests=st.integers(1, 500),
    rate=st.floats(0.01, 1000),
    arrivals=st.sampled_from(ARRIVALS),
    burstiness=st.floats(0.2, 5),
)


def rows_of(name: str) -> list[tuple[int, int]]:
    """Return the usable (prompt, output) pairs of a file, read independently of the code under test."""
    with files("gimbal_jax").joinpath("data", name).open() as file:
        pairs = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [pair for pair in pairs if 0 not in pair]


PAIRS = {
    "azure-conv": rows_of("azure_llm_2023_conv.csv"),
    "azure-code": rows_of("azure_llm_2023_code.csv"),
    "burstgpt": rows_of("burstgpt_1_first400.csv"),
}


def times_of(config: WorkloadConfig, seed: int = 0) -> np.ndarray:
    return np.array([arrival.time_s for arrival in make_workload(config, ROUTER, seed)])


@pytest.mark.parametrize(
    ("trace", "rows", "mean_input", "mean_output"),
    [("azure-conv", 19366, 1155, 211), ("azure-code", 8819, 2048, 28), ("burstgpt", 383, 544, 289)],
)
def test_traces_equal_the_published_ones(trace, rows, mean_input, mean_output):
    table = length_table(trace)
    assert len(table.time_N) == rows
    assert table.input_N.mean() == pytest.approx(mean_input, abs=0.5)
    assert table.output_N.mean() == pytest.approx(mean_output, abs=0.5)
    assert (np.diff(table.time_N) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(configs, st.integers(0, 2**32))
def test_requests_are_real_pairs_by_rising_time(config, seed):
    arrivals = make_workload(config, ROUTER, seed)
    assert len(arrivals) == config.requests
    trace = config.lengths if config.lengths in TRACES else "burstgpt"
    assert {(a.input_tokens, a.output_tokens) for a in arrivals} <= set(PAIRS[trace])
    times = [a.time_s for a in arrivals]
    assert times[0] >= 0 and times == sorted(times)
    assert all(a.engine is None and a.topic in range(ROUTER.topics) for a in arrivals)
    assert make_workload(config, ROUTER, seed) == arrivals


def test_seeds_differ():
    config = WorkloadConfig("azure-conv", requests=20)
    assert make_workload(config, ROUTER, 0) != make_workload(config, ROUTER, 1)


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_another_rate_brings_the_same_requests_closer_together(arrivals):
    slow, fast = (
        make_workload(WorkloadConfig(requests=50, rate=rate, arrivals=arrivals), ROUTER, 3) for rate in (2, 8)
    )
    assert [(a.input_tokens, a.output_tokens, a.topic) for a in slow] == [
        (a.input_tokens, a.output_tokens, a.topic) for a in fast
    ]
    assert [a.time_s for a in slow] == pytest.approx([4 * a.time_s for a in fast])


@pytest.mark.parametrize(("arrivals", "cv"), [("poisson", 1.0), ("bursty", 3.0), ("bursty", 0.5)])
def test_gaps_have_the_rate_and_the_burstiness(arrivals, cv):
    count = 20_000
    times = times_of(WorkloadConfig(requests=count, rate=7.0, arrivals=arrivals, burstiness=cv))
    gaps = np.diff(times, prepend=0) * 7.0
    assert gaps.mean() == pytest.approx(1, abs=5 * cv / count**0.5)
    assert gaps.std() == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("trace", TRACES)
def test_a_trace_keeps_its_order_and_relative_gaps_at_exactly_the_rate(trace):
    config = WorkloadConfig(trace, requests=300, rate=5.0, arrivals="trace")
    arrivals = make_workload(config, ROUTER, 1)
    assert arrivals[-1].time_s == pytest.approx(300 / 5.0)
    table, pairs = length_table(trace), PAIRS[trace]
    came = [(a.input_tokens, a.output_tokens) for a in arrivals]
    first = next(i for i in range(len(pairs)) if [*pairs[i:], *pairs][:300] == came)
    inside = min(len(pairs) - first, 300) - 1  # gaps before the trace starts again, if it does
    gaps, ours = np.diff(table.time_N[first:])[:inside], np.diff([a.time_s for a in arrivals])[:inside]
    assert ours == pytest.approx(gaps * ours.sum() / gaps.sum(), abs=1e-6)


def test_all_requests_arrive_at_time_zero():
    assert not times_of(WorkloadConfig(arrivals="at-once", requests=9)).any()


@pytest.mark.parametrize("shape", RESHAPED)
def test_bins_have_the_shares_of_their_shape(shape):
    count = 20_000
    arrivals = make_workload(WorkloadConfig(shape, requests=count), ROUTER, 0)
    table, share = length_table(shape), bin_shares(shape)
    bin_of = dict(zip(table.input_N.tolist(), length_bins(table.input_N).tolist(), strict=True))
    found = np.bincount([bin_of[a.input_tokens] for a in arrivals], minlength=SHAPE_BINS) / count
    assert (np.abs(found - share) <= 5 * np.sqrt(share * (1 - share) / count) + 1e-12).all()
    # Inside a bin all pairs are alike.
    for one in range(SHAPE_BINS):
        weights = table.weight_N[length_bins(table.input_N) == one]
        assert weights == pytest.approx(np.full(len(weights), share[one] / len(weights)))


def test_shapes_match_their_names():
    shares = {shape: bin_shares(shape) for shape in RESHAPED}
    assert (np.diff(shares["descending"]) < 0).all()
    assert (np.diff(shares["central"])[: SHAPE_BINS // 2 - 1] > 0).all()
    assert shares["central"] == pytest.approx(shares["central"][::-1])
    assert shares["two-end"][[0, -1]].sum() > 0.6
    assert shares["average"] == pytest.approx(np.full(SHAPE_BINS, 1 / SHAPE_BINS))
    assert length_table("random").weight_N == pytest.approx(np.full(383, 1 / 383))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lengths", "gpt", "lengths must be one of azure-conv, azure-code"),
        ("arrivals", "uniform", "arrivals must be one of poisson, bursty"),
        ("requests", 0, "requests must be at least 1, not 0"),
        ("rate", 0.0, "rate must be above 0 and finite, not 0.0"),
        ("rate", float("nan"), "rate must be above 0"),
        ("burstiness", float("inf"), "burstiness must be above 0 and finite"),
    ],
)
def test_an_invalid_workload_is_rejected(name, value, message):
    with pytest.raises(ValueError, match=message):
        WorkloadConfig(**{name: value})
