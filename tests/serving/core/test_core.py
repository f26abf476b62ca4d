"""The server over a fake runner: ticked by hand, or on its own thread."""

import asyncio
import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.config import DispatchConfig
from gimbal_jax.exceptions import NotServing, QueueFull
from gimbal_jax.scheduler.dispatcher import Dispatcher
from gimbal_jax.serving.core.core import TickNews
from tests.serving.core.ticked_core import CONFIG, FREE, new_core, open_core, request, tick, wait_for
from tests.serving.fake_server import MODEL, running_server, until
from tests.serving.statuses import per_engine

AHEAD = pytest.mark.parametrize("ahead", [0, 1])

# -- ticks --------------------------------------------------------------------


@AHEAD
def test_requests_of_both_engines_run_in_one_step(ahead):
    with open_core(ahead=ahead) as (core, _, outputs):
        core.submit(request("a", [1, 2, 3], max_tokens=3, engine=0))
        core.submit(request("b", [10], max_tokens=2, engine=1))
        tick(core, 3 + ahead)
        assert outputs.tokens("a") == [4, 5, 6]
        assert outputs.tokens("b") == [11, 12]
        assert outputs.ends() == {"a": ("length", ""), "b": ("length", "")}
        status = core.status()
        assert (status.steps.count, per_engine(status, "tokens_computed")) == (3, (5, 2))
        assert per_engine(status, "free_pages") == FREE


@AHEAD
def test_counts_are_tokens_computed_times_k(ahead):
    with open_core(ahead=ahead) as (core, _, _):
        core.submit(request("cancelled", range(1, 30)))
        tick(core, 1)
        core.cancel("cancelled")
        for i in range(12):
            core.submit(request(f"r{i}", range(1, 8), max_tokens=6, engine=i % 2, sequence=i // 2 + 1))
        tick(core, 60)
        status = core.status()
        assert np.array_equal(
            status.placement.total_counts_LSE.sum(axis=2),
            np.tile(np.array(per_engine(status, "tokens_computed")) * MODEL.experts_per_token, (2, 1)),
        )
        # Of the 29 tokens of the cancelled one a step took 16.
        assert per_engine(status, "tokens_computed") == (16 + 6 * (7 + 5), 6 * (7 + 5))
        assert per_engine(status, "free_pages") == FREE


def test_every_subscriber_gets_the_news_of_a_tick_until_it_unsubscribes():
    with open_core() as (core, _, outputs):
        others: list[TickNews] = []
        unsubscribe = core.subscribe(others.append)
        core.submit(request("a"))
        tick(core, 2)
        unsubscribe()
        tick(core, 3)
        assert others == outputs.news[:2] and len(outputs.news) == 4


def test_idle_ticks_run_no_step():
    with open_core() as (core, _, _):
        tick(core, 5)
        assert core.status().steps.count == 0


def test_traces_are_published_at_their_period_also_by_idle_engines():
    config = replace(CONFIG, dispatch=replace(CONFIG.dispatch, trace_period_s=0.5))
    with open_core(config) as (core, _, _):
        assert core.traces == ()
        times = []
        for now in (0.0, 0.2, 0.4, 0.6, 0.8, 1.2):
            core.tick(now)
            times.append(core.traces[1].time)
        assert times == [0.0, 0.0, 0.0, 0.6, 0.6, 1.2]
        core.submit(request("a", [1] * 20, engine=1, sequence=7))
        core.tick(2.0)
        assert [(t.engine, t.seen, t.running_requests) for t in core.traces] == [(0, 0, 0), (1, 7, 1)]
        assert core.traces[1].kv_use > 0 == core.traces[0].kv_use
        # 16 of its tokens ran, with two experts each: 16 on experts 1 and 2 in either layer, which engine 0's ranks
        # hold up to expert 1.
        assert [t.expert_pressure for t in core.traces] == [8.0, 8.0]


def test_a_change_of_cache_use_alone_is_published():
    with open_core() as (core, _, _):
        core.submit(request("a", [1] * 4, max_tokens=20))
        core.tick(0.0)
        before = core.traces[0]
        for now in (0.02, 0.04, 0.06, 0.08, 0.2):  # the last one is the ninth token, on a page of its own
            core.tick(now)
        assert (before.time, before.kv_use, before.kv_tokens) == (0.0, 2 / 16, 4)
        after = replace(before, time=0.2, kv_use=3 / 16, kv_tokens=9)
        assert replace(core.traces[0], expert_pressure=before.expert_pressure) == after


# -- admission and cancellation -------------------------------------------------


def test_a_full_queue_rejects_requests_until_there_is_room():
    config = replace(CONFIG, engine=replace(CONFIG.engine, max_queue=3))
    with open_core(config) as (core, _, _):
        for i in range(3):
            core.submit(request(f"r{i}"))
        with pytest.raises(QueueFull, match=r"engine 0: 3 requests wait \(max_queue\)"):
            core.submit(request("refused"))
        core.submit(request("other engine", engine=1))
        tick(core, 1)
        core.submit(request("accepted"))


def test_queue_bound_counts_what_arrives_during_a_tick():
    config = replace(CONFIG, engine=replace(CONFIG.engine, max_queue=2))
    with open_core(config) as (core, runner, _):
        runner.on_wait = lambda results: core.submit(request("b"))
        core.submit(request("a"))
        tick(core, 1)
        core.submit(request("c"))
        with pytest.raises(QueueFull):
            core.submit(request("d"))


def test_a_request_can_be_cancelled_before_its_first_tick():
    with open_core() as (core, _, outputs):
        core.submit(request("a"))
        core.cancel("a")
        tick(core, 3)
        assert outputs.all == []
        assert per_engine(core.status(), "free_pages") == FREE
        assert all(engine.idle for engine in core.engines)


@AHEAD
def test_cancel_frees_pages_within_one_tick(ahead):
    with open_core(ahead=ahead) as (core, _, outputs):
        core.submit(request("a", max_tokens=50))
        core.submit(request("b", max_tokens=5))
        tick(core, 2)
        assert per_engine(core.status(), "free_pages") < FREE
        core.cancel("a")
        core.cancel("unknown")
        tick(core, 1)
        assert len(outputs.tokens("a")) == 2 - ahead
        tick(core, 5)
        assert outputs.ends() == {"b": ("length", "")}
        assert per_engine(core.status(), "free_pages") == FREE


@AHEAD
def test_accepted_requests_run_even_if_preempted_sequences_fill_the_queue(ahead):
    # Eight pages for two sequences that grow to six each, and room for one request that waits.
    small = replace(CONFIG.engine, num_pages=8, max_queue=1)
    with open_core(replace(CONFIG, engine=small), ahead) as (core, _, outputs):
        for sequence, name in enumerate(("old", "young"), start=1):
            core.submit(request(name, range(8), max_tokens=16, sequence=sequence))
            tick(core, 1)
        core.submit(request("waits", range(8), sequence=3))
        tick(core, 15)
        assert core.status().preemptions > 0
        with pytest.raises(QueueFull):
            core.submit(request("refused"))
        tick(core, 60)
        assert outputs.ends() == dict.fromkeys(("old", "young", "waits"), ("length", ""))
        assert outputs.tokens("young") == list(range(8, 24))


def test_requests_are_accepted_only_while_serving():
    with new_core() as (core, _, _):
        with pytest.raises(NotServing, match="warming"):
            core.submit(request("a"))
        core.open()
        core.submit(request("a"))
        core.drain()
        with pytest.raises(NotServing, match="draining"):
            core.submit(request("b"))
        core.open()
        assert core.state == "draining"


class BrokenGrammar:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def allowed(self) -> np.ndarray:
        if self.steps == 0:
            raise ValueError("no such rule")
        return np.full(-(-MODEL.vocab_size // 32), -1, np.int32)

    def accept(self, token_id: int) -> None:
        self.steps -= 1


@AHEAD
@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, dispatch=DispatchConfig(policy="late"))], ids=["gimbal", "late"]
)
@pytest.mark.parametrize(
    ("good_steps", "reason"), [(0, "could not be admitted: ValueError"), (2, "its grammar failed")]
)
def test_a_request_whose_grammar_raises_fails_alone(config, good_steps, reason, ahead):
    with open_core(config, ahead) as (core, _, outputs):
        core.submit(request("before"))
        core.submit(replace(request("broken", max_tokens=9), grammar=BrokenGrammar(good_steps)))
        core.submit(request("after"))
        tick(core, 8)
        ends = outputs.ends()
        assert ends.keys() == {"before", "broken", "after"}
        assert ends["before"] == ends["after"] == ("length", "")
        assert outputs.tokens("before") == outputs.tokens("after") == [4, 5, 6, 7]
        assert ends["broken"][0] == "error" and reason in ends["broken"][1] and "no such rule" in ends["broken"][1]
        assert per_engine(core.status(), "free_pages") == FREE and core.state == "serving"


# -- clocks that jump -----------------------------------------------------------

DAY_S = 86_400.0


jumps = st.sampled_from([0.0, 0.0, 0.01, 0.2, 10.0, 30 * DAY_S])


@AHEAD
@pytest.mark.parametrize("policy", ["gimbal", "late"])
@given(
    began=st.sampled_from([0.0, 5 * DAY_S]),
    ticks=st.lists(st.tuples(jumps, st.none() | st.integers(1, 30)), max_size=40),
    at_last=jumps,
)
@settings(max_examples=40)
def test_a_clock_that_jumps_or_stops_starves_no_request(policy, began, ticks, at_last, ahead):
    """Each tick has a jump before it, and maybe a new prompt; at last they go on alike until all requests ended."""
    config = replace(CONFIG, dispatch=DispatchConfig(policy=policy))
    dispatcher = Dispatcher(2, config.dispatch, config.engine.token_budget)
    now, submitted = began, 0
    with open_core(config, ahead) as (core, _, outputs):
        for jump, prompt_tokens in itertools.chain(ticks, itertools.repeat((at_last, None), 200)):
            if prompt_tokens is not None:
                engine, sequence = submitted % 2, submitted // 2 + 1
                one = request(f"r{submitted}", range(prompt_tokens), engine=engine, sequence=sequence)
                core.submit(replace(one, arrival=now, engine=None if policy == "late" else engine))
                submitted += 1
            now += jump
            core.tick(now)
            # What the dispatcher sees after a tick is never too old to count, nor negative.
            dispatcher.observe(core.traces)
            assert dispatcher.view(now).traces == core.traces
            for trace in core.traces:
                assert 0 <= now - trace.time <= config.dispatch.trace_period_s
                assert 0 <= trace.kv_use <= 1
                assert trace.waiting_prefill_tokens >= 0 and trace.running_prefill_tokens >= 0
        assert len(outputs.ends()) == submitted and set(outputs.ends().values()) <= {("length", "")}
        assert per_engine(core.status(), "free_pages") == FREE


# -- the engine thread ----------------------------------------------------------


@AHEAD
def test_drain_lets_running_requests_end(ahead):
    with new_core(ahead=ahead) as (core, _, outputs):
        ended = threading.Event()
        core.start(on_end=ended.set)
        wait_for(lambda: core.state == "serving")
        core.submit(request("a", max_tokens=50))
        core.drain()
        wait_for(lambda: "a" in outputs.ends())
        assert outputs.tokens("a") == list(range(4, 54))
        core.stop()
        assert ended.is_set()
        assert core.state == "stopped"
        with pytest.raises(NotServing, match="stopped"):
            core.submit(request("b"))


@AHEAD
def test_stop_fails_the_requests_that_are_left(ahead):
    with new_core(ahead=ahead) as (core, runner, outputs):
        stepping, go_on = threading.Event(), threading.Event()

        def hold(results):
            stepping.set()
            assert go_on.wait(60)

        runner.on_wait = hold
        core.start()
        wait_for(lambda: core.state == "serving")
        core.submit(request("running", max_tokens=50))
        assert stepping.wait(60)
        core.submit(request("in the inbox"))
        stopper = threading.Thread(target=core.stop)
        stopper.start()
        wait_for(lambda: core._stopping)
        go_on.set()
        stopper.join(60)
        ends = outputs.ends()
        assert ends == dict.fromkeys(("running", "in the inbox"), ("error", "the server has stopped"))
        assert per_engine(core.status(), "free_pages") == FREE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_abandon_sets_the_reason_and_does_not_wait(fails):
    with new_core() as (core, runner, _):
        stepping, go_on, over = threading.Event(), threading.Event(), threading.Event()

        def hold(results):
            stepping.set()
            assert go_on.wait(60)
            if fails:
                raise RuntimeError("connection closed by peer")

        runner.on_wait = hold
        core.start(on_end=over.set)
        wait_for(lambda: core.state == "serving")
        core.submit(request("running", max_tokens=50))
        assert stepping.wait(60)
        core.abandon("process 1 is gone")
        core.stop()  # although the step hangs
        with pytest.raises(NotServing, match="failed"):
            core.submit(request("late"))
        go_on.set()
        assert over.wait(60)
        assert (core.state, core.error) == ("failed", "process 1 is gone")


def test_status_works_while_warming_up():
    with new_core() as (core, _, _):
        warming, go_on = threading.Event(), threading.Event()

        def warm_up():
            warming.set()
            assert go_on.wait(60)

        core.start(warm_up)
        assert warming.wait(60)
        status = core.status()
        assert (status.state, status.steps.count, status.traces) == ("warming", 0, ())
        assert (per_engine(status, "free_pages"), status.steps.compiles_after_warmup) == (FREE, 0)
        go_on.set()
        wait_for(lambda: core.state == "serving")


def test_status_is_not_starved_by_a_busy_engine_thread():
    with new_core() as (core, runner, outputs):
        runner.on_wait = lambda results: time.sleep(0.01)
        core.start()
        wait_for(lambda: core.state == "serving")
        for i in range(40):
            core.submit(request(f"r{i}", max_tokens=50, engine=i % 2, sequence=i // 2 + 1))
        steps = [core.status().steps.count for _ in range(10)]
        assert len(outputs.ends()) < 40, "the engines were idle"
        assert steps[-1] - steps[0] < 100


def test_idle_server_publishes_and_rebalances():
    with new_core() as (core, _, _):
        core.start()
        wait_for(lambda: len(core.traces) == 2)
        first = core.traces[0].time
        wait_for(lambda: core.traces[0].time > first)
        core.rebalance()
        wait_for(lambda: core.status().placement.records)


# -- failure ----------------------------------------------------------------------

thread_fails = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@AHEAD
@thread_fails
def test_failed_step_ends_every_request(ahead):
    config = replace(CONFIG, engine=replace(CONFIG.engine, max_rows=1))
    with new_core(config, ahead=ahead) as (core, runner, outputs):
        runner.steps_left = 5
        core.open()
        for i in range(4):
            core.submit(request(f"r{i}", max_tokens=60, engine=i % 2, sequence=i // 2 + 1))
        ended = threading.Event()
        core.start(on_end=ended.set)
        assert ended.wait(60)
        assert len(outputs.tokens("r0")) == 5
        reason = "RuntimeError: device lost"
        assert outputs.ends() == {f"r{i}": ("error", reason) for i in range(4)}
        assert (core.state, core.error) == ("failed", reason)
        with pytest.raises(NotServing, match="failed"):
            core.submit(request("late"))
        status = core.status()  # although the devices have lost their counters
        assert (status.state, status.error, per_engine(status, "free_pages")) == ("failed", reason, FREE)
        core.stop()
        assert core.state == "failed"


@thread_fails
def test_a_failed_warm_up_fails_the_server():
    with new_core() as (core, _, _):
        ended = threading.Event()
        core.start(lambda: 1 // 0, on_end=ended.set)
        assert ended.wait(60)
        assert core.state == "failed"
        assert "ZeroDivisionError" in core.error


def test_drain_ends_a_warm_up_early():
    with new_core() as (core, _, _):
        warming, ended = threading.Event(), threading.Event()

        def warm_up():
            while True:
                core.check_warming()
                warming.set()
                time.sleep(0.001)

        core.start(warm_up, on_end=ended.set)
        assert warming.wait(60)
        core.drain()
        assert ended.wait(60)
        assert (core.state, core.error) == ("stopped", "")


@thread_fails
def test_streams_over_grpc_end_when_the_engine_fails():
    async def main(core, runner):
        async with asyncio.timeout(120), running_server(core) as (client, _, stop, serving):
            loop, all_in, submitted = asyncio.get_running_loop(), threading.Event(), []
            submit = core.submit

            def submit_and_count(request):
                submit(request)
                submitted.append(request)

            def wait_for_all(results):
                assert all_in.wait(60)

            async def stream(engine):
                return [chunk async for chunk in client.generate(token_ids=[1], max_tokens=60, engine=engine)]

            core.submit, runner.on_wait, runner.steps_left = submit_and_count, wait_for_all, 3
            core.start(on_end=lambda: loop.call_soon_threadsafe(stop.set))
            await until(lambda: core.state == "serving")
            streams = asyncio.gather(*(stream(i % 2) for i in range(12)), return_exceptions=True)
            await until(lambda: len(submitted) == 12)
            all_in.set()
            found = {(getattr(error, "code", None), str(error)) for error in await streams}
            assert found == {(StatusCode.UNAVAILABLE, "RuntimeError: device lost")}
            await serving

    with new_core() as (core, runner, _):
        asyncio.run(main(core, runner))
