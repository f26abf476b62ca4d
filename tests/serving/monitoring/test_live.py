"""The live view of a running server."""

import asyncio
import base64
import hashlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring import live
from gimbal_jax.serving.monitoring.live import PAGE, PAGE_POLICY, LiveView
from tests.serving.core.ticked_core import wait_for
from tests.serving.fake_server import FakeCore
from tests.serving.live_server import live_server
from tests.serving.monitoring.test_live_snapshot import RECORD


def view_of(core, clock, model="m"):
    """Return a view of an idle frontend."""

    async def make():
        return LiveView(Frontend(core, clock), model)

    return asyncio.run(make())


class Clock:
    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


class SlowCore(FakeCore):
    """A core whose status waits, as during a long step."""

    def __init__(self):
        super().__init__()
        self.asked = 0
        self.go = threading.Event()
        self.go.set()

    def status(self):
        self.asked += 1
        assert self.go.wait(60)
        return super().status()


def test_snapshot_of_a_served_load_equals_a_recount(monkeypatch):
    monkeypatch.setattr(live, "FRESH_S", 0.0)
    with live_server("a model") as server:
        prompts = {f"r{number}": tuple(range(number + 1)) for number in range(12)}
        for future in [server.generate(name, prompt, max_tokens=5, client="me") for name, prompt in prompts.items()]:
            future.result(60)
        wait_for(lambda: server.view.snapshot()["placement"]["decisions"])
        wait_for(lambda: not any(engine["running"] for engine in server.view.snapshot()["engines"]))
        snapshot = server.view.snapshot()
        status = server.server.status()
    assert (snapshot["model"], snapshot["state"], snapshot["streaming"]) == ("a model", "serving", 0)
    assert snapshot["latency"]["outcomes"] == {"length": 12}
    assert sum(snapshot["dispatch"]["total"].values()) == 12
    assert sum(engine["dispatched"] for engine in snapshot["engines"]) == 12
    rows = {row["id"]: row for row in snapshot["requests"]}
    assert {name: row["prompt_tokens"] for name, row in rows.items()} == {n: len(p) for n, p in prompts.items()}
    assert {row["output_tokens"] for row in rows.values()} == {5}
    assert {row["client"] for row in rows.values()} == {"me"}
    times = sorted(row["first_token_s"] for row in rows.values())
    assert snapshot["latency"]["ttft"] == {"p50": times[5], "p99": times[11]}
    # All tokens of the last window: each goes to as many experts as the model says.
    tokens_LP = np.array(snapshot["experts"]["tokens_LP"])
    assert snapshot["experts"]["scope"] == "last window"
    assert tokens_LP.sum() == status.placement.window_counts_LSE.sum() > 0
    assert len(snapshot["placement"]["imbalance_W"]) == len(status.placement.records)


@pytest.mark.parametrize("state", ["warming", "serving", "draining", "failed", "stopped"])
def test_every_state_can_be_shown(state):
    snapshot = view_of(FakeCore(state=state), Clock()).snapshot()
    assert snapshot["state"] == state
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert len(snapshot["engines"]) == 2
    assert snapshot["rates"] == {"prompt": 0, "generated": 0}


def test_many_viewers_cost_one():
    core, clock = SlowCore(), Clock()
    view = view_of(core, clock)
    with ThreadPoolExecutor(16) as executor:
        snapshots = list(executor.map(lambda _: view.snapshot(), range(64)))
    assert core.asked == 1
    assert all(snapshot is snapshots[0] for snapshot in snapshots)
    clock.now += live.FRESH_S
    assert view.snapshot()["time"] == clock.now
    assert core.asked == 2


def test_only_one_viewer_waits_for_a_long_step():
    core, clock = SlowCore(), Clock()
    view = view_of(core, clock)
    before = view.snapshot()
    clock.now += 10
    core.go.clear()
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(view.snapshot)
        wait_for(lambda: core.asked == 2)
        assert [view.snapshot() for _ in range(10)] == [before] * 10
        assert not waiting.done()
        core.go.set()
        assert waiting.result(60)["time"] == clock.now
    assert core.asked == 2


def test_long_request_text_does_not_enlarge_the_snapshot():
    view = view_of(FakeCore(), Clock(), model="m" * 10**6)
    small = len(json.dumps(view.snapshot()))
    view = view_of(FakeCore(), Clock(), model="m" * 10**6)
    for _ in range(live.ROWS + 5):
        view.observe(replace(RECORD, request_id="x" * 10**5, error="y" * 10**5))
    snapshot = view.snapshot()
    assert len(snapshot["requests"]) == live.ROWS
    assert len(json.dumps(snapshot)) < small + live.ROWS * 1000


def test_history_needs_no_viewer():
    clock, core = Clock(1000.0), FakeCore()

    async def make():
        frontend = Frontend(core, clock)
        return frontend, LiveView(frontend)

    frontend, view = asyncio.run(make())
    for second in range(20):  # a request ends each second; the first half brings 30 tokens each
        clock.now += 1
        frontend.counters.generated_tokens += 30 * (second < 10)
        view.observe(replace(RECORD, arrival=clock.now - 3.0))
    snapshot = view.snapshot()
    assert snapshot["history"]["generated"] == [0.0] * 56 + [30.0] * 2 + [0.0] * 2
    assert snapshot["history"]["ttft_p50"][-3:] == [1.0] * 3
    assert snapshot["rates"]["generated"] == 0
    assert snapshot["requests"][0]["age_s"] == 0.0


def test_page_is_self_contained_and_its_policy_allows_nothing_else():
    page = PAGE.decode()
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in PAGE_POLICY
    assert PAGE_POLICY.startswith("default-src 'none';")
    assert "unsafe" not in PAGE_POLICY
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert " style=" not in page and " onclick" not in page and "innerHTML" not in page
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}
