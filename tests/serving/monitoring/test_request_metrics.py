"""Histograms of requests against counts by hand."""

import itertools

import pytest

from gimbal_jax.config import EngineConfig, MeshConfig, ServerConfig
from gimbal_jax.serving.monitoring.request_metrics import TEXTS, RequestHistograms, measured, token_bounds
from tests.serving.records import ended
from tests.serving.scrapes import busy_scrapes


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, (1,)), (4, (1, 2)), (100, (1, 2, 5, 10, 20, 50, 100)), (64, (1, 2, 5, 10, 20, 50))]
)
def test_token_bounds_are_vllms(most, bounds):
    assert token_bounds(most) == bounds


def test_complete_request_enters_every_histogram():
    assert measured(ended()) == {
        "time_to_first_token_seconds": 1.0,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.75,
        "request_decode_time_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 3.0,
        "request_prompt_tokens": 12,
        "request_generation_tokens": 5,
        "request_prefill_kv_computed_tokens": 4,
    }


@pytest.mark.parametrize("outcome", ["abort", "cancelled", "error"])
def test_incomplete_request_enters_the_histograms_it_reached(outcome):
    began = {"request_queue_time_seconds": 0.25}
    first = {"time_to_first_token_seconds": 1.0, "request_prefill_time_seconds": 0.75}
    assert measured(ended(outcome=outcome)) == began | first
    assert measured(ended(outcome=outcome, first_token_s=None)) == began
    assert measured(ended(outcome=outcome, queue_s=None, first_token_s=None)) == {}


def test_request_without_output_has_no_time_per_token():
    assert "request_time_per_output_token_seconds" not in measured(ended(output_tokens=1))
    silent = measured(ended(output_tokens=0, first_token_s=None, outcome="stop"))
    assert set(silent) == {
        "request_queue_time_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_prefill_kv_computed_tokens",
    }


def test_histograms_are_per_engine():
    histograms = RequestHistograms(ServerConfig(MeshConfig(dp=3), EngineConfig(max_model_len=100)))
    for record in (ended(engine=0), ended(engine=2), ended(engine=2, outcome="refused"), ended(engine=None)):
        histograms.observe(record)
    found = {(sample.name, *sample.labels.values()): sample.value for f in histograms.collect() for sample in f.samples}
    counts = [found["gimbal_engine_e2e_request_latency_seconds_count", engine] for engine in "012"]
    assert (counts, found["gimbal_e2e_request_latency_seconds_count",]) == ([1, 0, 1], 2)
    assert [found["gimbal_engine_request_success_total", engine, "length"] for engine in "012"] == [1, 0, 1]
    assert [found["gimbal_engine_requests_refused_total", engine] for engine in "012"] == [0, 0, 1]


@pytest.mark.parametrize("name", TEXTS)
def test_histograms_of_a_real_server_are_those_of_its_records(name):
    server, found = busy_scrapes()
    seen = 0
    for engine, record_of in [
        *((str(e), [r for r in server.records if r.engine == e]) for e in range(2)),
        (None, server.records),
    ]:
        values = [value for record in record_of if (value := measured(record).get(name)) is not None]
        labels, prefix = ((engine,), "gimbal_engine_") if engine else ((), "gimbal_")
        assert found[prefix + name + "_count", *labels] == len(values)
        assert found[prefix + name + "_sum", *labels] == pytest.approx(sum(values))
        buckets = {
            float(key[-1]): count
            for key, count in found.items()
            if key[0] == prefix + name + "_bucket" and key[1:-1] == labels
        }
        assert buckets == {bound: sum(value <= bound for value in values) for bound in buckets}
        assert len(buckets) > 5
        seen += len(values)
    assert seen >= 2 * 24


def test_times_and_lengths_have_different_bounds():
    histograms = RequestHistograms(ServerConfig(engine=EngineConfig(max_model_len=100)))
    bounds = {
        family.name: [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
        for family in itertools.islice(histograms.collect(), 2 * len(TEXTS))
        if "engine" not in family.name
    }
    assert bounds["gimbal_request_prompt_tokens"] == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
    assert bounds["gimbal_time_to_first_token_seconds"][:3] == ["0.001", "0.005", "0.01"]
    assert bounds["gimbal_request_time_per_output_token_seconds"][-2:] == ["80.0", "+Inf"]
    assert bounds["gimbal_e2e_request_latency_seconds"][0] == bounds["gimbal_request_decode_time_seconds"][0] == "0.3"
