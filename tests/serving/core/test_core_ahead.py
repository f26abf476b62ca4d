"""The server with a step enqueued before the results of the one before it: host and devices overlap."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.engine.meters import PHASES
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import TokenDelta
from tests.serving.core.ticked_core import CONFIG, FREE, new_core, open_core, request, tick, wait_for
from tests.serving.engine.fake_runner import FakeRunner
from tests.serving.fake_server import MODEL
from tests.serving.placement.windows import Windows
from tests.serving.statuses import per_engine


class Allowing:
    """A grammar that allows all, and every token once it has seen the one before."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.full(-(-MODEL.vocab_size // 32), -1, np.int32)

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)


def order_of(runner) -> list[str]:
    """Return a list that later calls of the runner add to: "enqueue", or "results" when results are fetched."""
    calls: list[str] = []
    enqueue = runner.enqueue

    def noted(plans, mark):
        calls.append("enqueue")
        return enqueue(plans, mark)

    runner.enqueue, runner.on_wait = noted, lambda results: calls.append("results")
    return calls


@pytest.mark.parametrize(
    ("ahead", "calls"), [(0, ["enqueue", "results"] * 3), (1, ["enqueue", *["enqueue", "results"] * 2, "results"])]
)
def test_a_step_is_enqueued_before_the_results_of_the_one_before_it(ahead, calls):
    with open_core(ahead=ahead) as (core, runner, outputs):
        made = order_of(runner)
        core.submit(request("a", max_tokens=3))
        tick(core, 5)
        assert made == calls
        assert outputs.tokens("a") == [4, 5, 6]


def test_a_grammar_waits_for_its_tokens_and_loses_no_step():
    with open_core(ahead=1) as (core, runner, outputs):
        made, grammar = order_of(runner), Allowing()
        core.submit(replace(request("a", max_tokens=3), grammar=grammar))
        core.submit(request("b", max_tokens=3, engine=1))
        tick(core, 4)
        assert made == ["enqueue", "results"] * 3
        assert outputs.tokens("a") == outputs.tokens("b") == [4, 5, 6]
        assert grammar.seen == [4, 5]


traffic = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 20), st.integers(1, 9), st.booleans()), max_size=10)


@settings(max_examples=60, deadline=None)
@given(traffic, st.integers(6, 16))
def test_overlap_changes_no_token_and_counts_are_conserved(requests, pages):
    """Some cancelled, some with a grammar, few pages: windows hold whole steps, and all is counted in the end."""
    config = replace(
        CONFIG,
        engine=replace(CONFIG.engine, num_pages=max(pages, 8)),
        placement=replace(CONFIG.placement, policy="static", window_steps=3),
    )
    with open_core(config, ahead=1) as (core, _, outputs):
        core.rebalancer.windows = windows = Windows()
        for now in range(200):
            for i, (at, prompt, tokens, constrained) in enumerate(requests):
                if at == now:
                    grammar = Allowing() if constrained else None
                    one = request(f"r{i}", range(prompt), tokens, engine=i % 2, sequence=i // 2 + 1)
                    core.submit(replace(one, grammar=grammar))
                if at + 3 == now and i % 4 == 3:
                    core.cancel(f"r{i}")
            core.tick(float(now))
        status = core.status()
        for i, (_, prompt, tokens, _) in enumerate(requests):
            if i % 4 != 3:
                assert outputs.tokens(f"r{i}") == list(range(prompt, prompt + tokens))
        tokens_S = np.array(per_engine(status, "tokens_computed"))
        assert (status.placement.total_counts_LSE.sum(axis=2) == tokens_S * MODEL.experts_per_token).all()
        assert per_engine(status, "free_pages") == (config.engine.num_pages,) * 2
        assert all(window.steps >= 3 for window in windows.closed)
        assert sum(window.steps for window in windows.closed) + core.rebalancer.open_steps == status.steps.count


def test_windows_hold_exactly_their_steps_while_steps_are_in_flight():
    config = replace(CONFIG, placement=replace(CONFIG.placement, policy="static", window_steps=5))
    with open_core(config, ahead=1) as (core, _, _):
        core.rebalancer.windows = windows = Windows()
        core.submit(request("a", max_tokens=40))
        tick(core, 38)
        core.stop()  # its decisions take a thread
        assert windows.closed[0].steps == 5
        first = windows.closed[0]
        assert (first.step, int(first.counts_LSE.sum())) == (5, (3 + 4) * 2 * 2)  # layers and experts of each token


def test_status_waits_for_no_step():
    with open_core(ahead=1) as (core, runner, _):
        core.submit(request("a", max_tokens=9))
        tick(core, 3)
        assert runner.enqueued - runner.fetched == 1
        fetched = runner.fetched
        status = core.status()
        assert (status.steps.count, runner.fetched) == (fetched, fetched)
        tick(core, 20)
        assert core.status().placement.total_counts_LSE.sum() == (3 + 8) * 2 * 2


def test_pressure_is_published_with_every_trace_while_steps_are_in_flight():
    with open_core(ahead=1) as (core, _, _):
        core.submit(request("a", max_tokens=40))
        pressures = []
        for now in range(8):
            core.tick(float(now))
            pressures.append(sum(trace.expert_pressure for trace in core.traces))
        # Of a step of three tokens, then of one; the first trace is out before a step has run.
        assert pressures == [0.0, 3.0, *[1.0] * 6]


def test_stop_delivers_the_steps_in_flight():
    with new_core(ahead=1) as (core, runner, outputs):
        core.start()
        wait_for(lambda: core.state == "serving")
        core.submit(request("a", max_tokens=55))
        wait_for(lambda: outputs.tokens("a"))
        core.stop()
        assert runner.enqueued == runner.fetched == len(outputs.tokens("a"))


def test_cache_events_come_with_their_tick_and_a_flush_removes_the_pages():
    with open_core(ahead=1) as (core, _, outputs):
        prompt, hashes = tuple(range(9)), page_hashes(range(9), CONFIG.engine.page_size)
        core.submit(replace(request("a", prompt, 2, engine=1), page_hashes=hashes))
        tick(core, 4)
        ((stored, first),) = [(news.pages[0], news) for news in outputs.news if news.pages]
        assert first is outputs.news[0], "pages come with the first token or before it"
        assert (stored.engine, [page.hash for page in stored.stored]) == (1, list(hashes))
        core.submit(replace(request("b", prompt, 1, engine=1, sequence=2), page_hashes=hashes))
        tick(core, 3)
        status = core.status()
        assert per_engine(status, "prefix_queries") == (0, 18)
        assert per_engine(status, "prefix_hits") == (0, 8)
        assert per_engine(status, "cached_pages") == (0, 2)
        assert [output.cached_tokens for output in outputs.all if output.started is not None] == [0, 8]
        core.flush_cache()
        tick(core, 1)
        assert set(outputs.news[-1].pages[0].removed) == set(hashes)
        assert per_engine(core.status(), "cached_pages") == (0, 0)
        assert per_engine(core.status(), "free_pages") == FREE


class SlowRunner(FakeRunner):
    """A step takes 3 s from when it is enqueued or the one before it ends; enqueueing takes 1 s, half for the batch."""

    def __init__(self, config, clock: list[float]) -> None:
        super().__init__(MODEL, config, ahead=1)
        self.clock, self.done = clock, [0.0]
        self.on_wait = self._wait

    def enqueue(self, plans, mark):
        self.clock[0] += 0.5
        pending = super().enqueue(plans, mark)
        self.done.append(max(self.done[-1], self.clock[0]) + 3.0)
        self.clock[0] += 0.5
        return pending

    def _wait(self, results):
        self.clock[0] = max(self.clock[0], self.done[self.fetched + 1])


def test_phase_times_add_up_and_a_step_is_timed_from_its_start_on_the_devices():
    clock, emitted = [0.0], list[TokenDelta]()
    core = EngineCore(MODEL, CONFIG, SlowRunner(CONFIG, clock), clock=lambda: clock[0])

    def emit(news):
        emitted.extend(news.outputs)
        clock[0] += 0.25

    core.subscribe(emit)
    core.open()
    core.submit(request("a", max_tokens=9))
    for _ in range(12):
        core.tick(clock[0])
    status = core.status()
    means = {phase.name: phase.mean_s for phase in status.steps.phases}
    assert tuple(means) == PHASES
    assert (means["batch"], means["enqueue"]) == (0.5, 0.5)
    assert means["emit"] == pytest.approx(0.25 * 8 / 9)  # the ninth token comes in a tick without a step
    assert means["schedule"] == means["commit"] == means["other"] == 0.0
    # 3 s each, of which the host sees the first one 0.5 s longer: from before its arrays are made.
    assert sum(status.steps.seconds.counts) == 9
    assert status.steps.seconds.sum == pytest.approx(clock[0] - 0.25 * 1)
    core.stop()
