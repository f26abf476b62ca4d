import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gimbal_jax.scheduler.traffic import imbalance_L, remote_share
from gimbal_jax.serving.frontend import Frontend
from gimbal_jax.serving.metrics import serve_metrics
from gimbal_jax.serving.request import SamplingParams
from tests.serving.fake_server import FakeCore, running_server, trace


def scrape(port):
    """Samples by (name, value of the only label or None)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    return {
        (sample.name, next(iter(sample.labels.values()), None)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def served(core, *, now=100.0, use=None):
    """One scrape of a frontend whose clock stands at ``now``, after ``use(frontend)``."""

    async def main():
        async with asyncio.timeout(10):
            times = iter([0.0])  # the server's start; then it is now
            frontend = Frontend(core, lambda: next(times, now))
            with serve_metrics(core, frontend, 0) as port:
                if use is not None:
                    await use(frontend)
                return await asyncio.to_thread(scrape, port)

    return asyncio.run(main())


def test_engines_and_their_aggregate():
    core = FakeCore()
    core.traces = (
        trace(0, at=90.0, running=2, waiting=1, prefill=40, kv_use=0.5),
        trace(1, at=95.0, running=3, prefill=2),
    )
    core.central_queue = 4
    samples = served(core)
    assert samples["gimbal_central_queue_requests", None] == 4
    assert [samples["gimbal_engine_running_requests", engine] for engine in "01"] == [2, 3]
    assert samples["gimbal_running_requests", None] == 5
    assert samples["gimbal_waiting_requests", None] == 1
    assert samples["gimbal_prefill_tokens", None] == 42
    assert samples["gimbal_engine_kv_tokens", "1"] == 30
    assert samples["gimbal_kv_tokens", None] == 50
    assert samples["gimbal_waiting_tokens", None] == 42
    assert samples["gimbal_expert_pressure", None] == 3
    assert [samples["gimbal_engine_kv_use", engine] for engine in "01"] == [0.5, 0.25]
    assert samples["gimbal_oldest_trace_age_seconds", None] == 10
    assert [samples["gimbal_engine_free_pages", engine] for engine in "01"] == [30, 31]
    assert samples["gimbal_free_pages", None] == 61
    assert samples["gimbal_engine_computed_tokens_total", "1"] == 12
    assert samples["gimbal_computed_tokens_total", None] == 23


def test_the_loop():
    core = FakeCore(state="draining")
    samples = served(core)
    status = core.status()
    traffic = status.window_counts_LSE, status.slot_of_expert_LE, 4
    assert samples["gimbal_rank_imbalance", None] == pytest.approx(imbalance_L(*traffic).mean())
    assert samples["gimbal_remote_share", None] == pytest.approx(remote_share(*traffic))
    assert (samples["gimbal_state", "draining"], samples["gimbal_state", "serving"]) == (1, 0)
    assert samples["gimbal_steps_total", None] == 7
    assert samples["gimbal_preemptions_total", None] == 1
    assert samples["gimbal_experts_moved_total", None] == 3
    assert samples["gimbal_moved_bytes_total", None] == 4096
    assert samples["gimbal_compiles_after_warmup_total", None] == 0
    assert samples["gimbal_windows_written_total", None] == 5
    assert samples["gimbal_windows_lost_total", None] == 2
    assert samples["gimbal_last_placement_decision_age_seconds", None] == 99


def test_age_of_the_last_rebalance_runs_from_the_start_until_there_is_one():
    core = FakeCore()
    assert served(core)["gimbal_last_rebalance_age_seconds", None] == 100
    core.last_rebalance = 70.0
    assert served(core)["gimbal_last_rebalance_age_seconds", None] == 30


def test_silent_engines_are_infinitely_old():
    assert served(FakeCore())["gimbal_oldest_trace_age_seconds", None] == float("inf")


def test_requests_are_counted():
    async def use(frontend):
        for id in ("a", "b"):
            async for _ in frontend.generate(id, (1, 2), SamplingParams(max_tokens=3), engine=0):
                pass

    with FakeCore() as core:
        samples = served(core, use=use)
    assert samples["gimbal_requests_total", "length"] == 2
    assert samples["gimbal_dispatches_total", "pinned"] == 2
    assert samples["gimbal_prompt_tokens_total", None] == 4
    assert samples["gimbal_generated_tokens_total", None] == 6
    assert samples["gimbal_time_to_first_token_seconds_count", None] == 2
    assert samples["gimbal_active_requests", None] == 0


def test_server_serves_metrics_until_it_stops():
    async def main(port):
        async with asyncio.timeout(10):
            async with running_server(FakeCore(), metrics_port=port):
                assert (await asyncio.to_thread(scrape, port))["gimbal_state", "serving"] == 1
            with pytest.raises(OSError):
                await asyncio.to_thread(scrape, port)

    core = FakeCore()

    async def free_port():
        frontend = Frontend(core, lambda: 0.0)
        with serve_metrics(core, frontend, 0) as port:
            return port

    asyncio.run(main(asyncio.run(free_port())))
