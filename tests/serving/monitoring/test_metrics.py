"""Scrapes of a fake core, field by field, and of a real server, against naive recounts."""

import asyncio
import math
import shutil
import subprocess

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gimbal_jax.scheduler.dispatch_decision import Decision
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring.metrics import STATES, metrics_registry
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from tests.serving.core.ticked_core import new_core
from tests.serving.fake_server import FakeCore, trace
from tests.serving.scrapes import busy_scrapes, samples, scraped


def registry_of(core, *, now=100.0, use=None):
    """Return the registry of a frontend made at time 0, with its clock at ``now``, after ``use(frontend)``."""

    async def main():
        times = iter([0.0])
        frontend = Frontend(core, lambda: next(times, now))
        registry = metrics_registry(frontend, RequestHistograms(core.config))
        if use is not None:
            use(frontend)
        return registry

    return asyncio.run(main())


def scrape(core, **options):
    return samples(generate_latest(registry_of(core, **options)).decode())


# -- a fake core, field by field ----------------------------------------------


def test_engine_metrics_have_series_and_aggregate():
    core = FakeCore()
    core.traces = (
        trace(0, at=90.0, running=2, waiting=1, prefill=40, kv_use=0.5),
        trace(1, at=95.0, running=3, prefill=2),
    )
    core.central_queue = 4
    found = scrape(core)

    def both(name):
        return [found[f"gimbal_engine_{name}", engine] for engine in "01"], found[f"gimbal_{name}",]

    assert both("num_requests_running") == ([2, 3], 5)
    assert both("num_requests_waiting") == ([1, 0], 5)  # four more have no engine yet
    assert found["gimbal_central_queue_requests",] == 4
    assert both("prefill_tokens") == ([40, 2], 42)
    assert both("kv_tokens") == ([20, 30], 50)
    assert both("waiting_tokens") == ([40, 2], 42)
    assert both("expert_pressure") == ([1, 2], 3)
    assert both("trace_age_seconds") == ([10, 5], 10)
    assert both("free_pages") == ([30, 31], 61)
    assert both("kv_cache_usage_perc") == ([2 / 32, 1 / 32], pytest.approx(3 / 64))
    assert both("num_preemptions_total") == ([1, 0], 1)
    assert both("computed_tokens_total") == ([11, 12], 23)
    assert both("prefill_tokens_computed_total") == ([5, 6], 11)
    assert both("cached_pages") == ([9, 3], 12)
    assert both("prefix_cache_queries_total") == ([100, 200], 300)
    assert both("prefix_cache_hits_total") == ([40, 0], 40)


def test_step_metrics():
    found = scrape(FakeCore())
    assert found["gimbal_steps_total",] == 7
    assert [found["gimbal_step_seconds_bucket", bound] for bound in ("0.01", "0.1", "+Inf")] == [4, 6, 7]
    assert (found["gimbal_step_seconds_count",], found["gimbal_step_seconds_sum",]) == (7, 0.5)
    assert found["gimbal_step_tokens_sum",] == 23
    assert found["gimbal_compiles_after_warmup_total",] == 0
    assert {key[1:]: value for key, value in found.items() if key[0] == "gimbal_tick_phase_seconds"} == {
        ("schedule", "mean"): 0.0002,
        ("schedule", "p50"): 0.0001,
        ("schedule", "p99"): 0.0009,
        ("wait", "mean"): 0.02,
        ("wait", "p50"): 0.01,
        ("wait", "p99"): 0.05,
    }


@pytest.mark.parametrize("state", STATES)
def test_every_state_can_be_scraped(state):
    found = scrape(FakeCore(state=state))
    assert {name[1] for name, value in found.items() if name[0] == "gimbal_state" and value} == {state}
    assert not any(math.isnan(value) for value in found.values())


def test_engine_without_trace_is_idle_and_infinitely_old():
    core = FakeCore()
    core.traces = (trace(1, at=99.0, running=3),)
    found = scrape(core)
    assert [found["gimbal_engine_num_requests_running", engine] for engine in "01"] == [0, 3]
    assert [found["gimbal_engine_trace_age_seconds", engine] for engine in "01"] == [math.inf, 1]
    assert found["gimbal_trace_age_seconds",] == math.inf


def test_compensation_and_scores_of_the_last_decision():
    def use(frontend):
        frontend.dispatcher.dispatch("a", 10, 0.0, engine=1)
        frontend.dispatcher.dispatch("b", 5, 0.0, engine=1)
        frontend.dispatcher.record(
            "c", 0.0, Decision(0, "fewer_of_two", {"in_flight": (1, 2), "4 * x": (0.5, math.inf)})
        )

    found = scrape(FakeCore(), use=use)
    assert [found["gimbal_engine_dispatch_compensation_tokens", engine] for engine in "01"] == [0, 15]
    assert found["gimbal_dispatch_compensation_tokens",] == 15
    assert [found["gimbal_engine_dispatch_score", engine, "in_flight"] for engine in "01"] == [1, 2]
    assert found["gimbal_engine_dispatch_score", "1", "4 * x"] == math.inf


def test_rejected_requests_are_not_counted_as_ended():
    def use(frontend):
        frontend.counters.outcomes.update({"stop": 2, "refused": 3})

    found = scrape(FakeCore(), use=use)
    assert found["gimbal_requests_refused_total",] == 3
    assert found["gimbal_request_success_total", "stop"] == 2
    assert found["gimbal_request_success_total", "abort"] == 0
    assert ("gimbal_request_success_total", "refused") not in found


# -- a real server ------------------------------------------------------------


def test_counts_of_a_real_server():
    server, found = busy_scrapes()
    prompts = sum(record.prompt_tokens for record in server.records)
    assert len(server.records) == 30
    assert found["gimbal_prompt_tokens_total",] == found["gimbal_prefill_tokens_computed_total",] == prompts
    assert found["gimbal_generation_tokens_total",] == len(server.tokens)
    assert sum(value for name, value in found.items() if name[0] == "gimbal_request_success_total") == 30
    assert sum(value for name, value in found.items() if name[0] == "gimbal_dispatches_total") == 30
    assert found["gimbal_step_tokens_sum",] == found["gimbal_computed_tokens_total",]
    assert (
        found["gimbal_step_tokens_count",] == found["gimbal_step_seconds_count",] == found["gimbal_steps_total",] > 10
    )
    assert found["gimbal_active_requests",] == found["gimbal_num_requests_running",] == 0


def test_running_requests_are_counted_while_they_run():
    server, _ = busy_scrapes()
    running = [samples(text)["gimbal_num_requests_running",] for text in server.texts]
    assert 0 < max(running) <= 5


def test_counters_never_fall():
    server, _ = busy_scrapes()
    before: dict[tuple, float] = {}
    for text in server.texts:
        counters: dict[tuple, float] = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            if family.type in ("counter", "histogram") and family.name.startswith("gimbal_")
            for sample in family.samples
        }
        assert before.keys() <= counters.keys()
        assert all(counters[name] >= value for name, value in before.items())
        before = counters
    assert len(server.texts) > 20


def test_promtool_accepts_the_scrape():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    server, _ = busy_scrapes()
    for text in (server.texts[0], server.texts[-1]):
        done = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_openmetrics_has_the_same_values():
    registry = registry_of(FakeCore())
    plain = samples(generate_latest(registry).decode())
    families = parse_openmetrics(generate_openmetrics(registry).decode())
    found = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    assert {name: value for name, value in found.items() if name[0].startswith("gimbal_")} == {
        name: value for name, value in plain.items() if name[0].startswith("gimbal_")
    }


def test_warming_and_stopped_servers_can_be_scraped():
    async def main():
        with new_core() as (server, _, _):
            frontend = Frontend(server, lambda: 0.0)
            registry = metrics_registry(frontend, RequestHistograms(server.config))
            warming = generate_latest(registry).decode()
            server.start()
            server.stop()
            return warming, generate_latest(registry).decode()

    warming, stopped = asyncio.run(main())
    assert samples(warming)["gimbal_state", "warming"] == samples(stopped)["gimbal_state", "stopped"] == 1
    assert "NaN" not in warming + stopped


def test_failed_server_can_be_scraped():
    async def main():
        with scraped() as server:
            server.runner.steps_left = 2  # then the runner's counters are gone too
            with pytest.raises(RuntimeError, match="device lost"):
                await server.run(server.request("a", (1, 2, 3), 9))
            server.server._end("failed", "device lost")
            return server.scrape()

    found = asyncio.run(main())
    assert found["gimbal_state", "failed"] == 1
    assert found["gimbal_steps_total",] == 2
