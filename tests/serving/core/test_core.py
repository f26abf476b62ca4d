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
from gimbal_jax.serving.engine.plan import NOT_FINITE
from tests.serving.core.ticked_server import CONFIG, FREE, new_server, open_server, request, tick, wait_for
from tests.serving.fake_server import MODEL, running_server, until
from tests.serving.statuses import per_engine

AHEAD = pytest.mark.parametrize("ahead", [0, 1])

# -- ticks --------------------------------------------------------------------


@AHEAD
def test_requests_of_both_engines_run_in_one_step(ahead):
    with open_server(ahead=ahead) as (server, _, outputs):
        server.submit(request("a", [1, 2, 3], max_tokens=3, engine=0))
        server.submit(request("b", [10], max_tokens=2, engine=1))
        tick(server, 3 + ahead)
        assert outputs.tokens("a") == [4, 5, 6]
        assert outputs.tokens("b") == [11, 12]
        assert outputs.ends() == {"a": ("length", ""), "b": ("length", "")}
        status = server.status()
        assert (status.steps.count, per_engine(status, "tokens_computed")) == (3, (5, 2))
        assert per_engine(status, "free_pages") == FREE


@AHEAD
def test_counts_are_tokens_computed_times_k(ahead):
    with open_server(ahead=ahead) as (server, _, _):
        server.submit(request("cancelled", range(1, 30)))
        tick(server, 1)
        server.cancel("cancelled")
        for i in range(12):
            server.submit(request(f"r{i}", range(1, 8), max_tokens=6, engine=i % 2, sequence=i // 2 + 1))
        tick(server, 60)
        status = server.status()
        assert np.array_equal(
            status.placement.total_counts_LSE.sum(axis=2),
            np.tile(np.array(per_engine(status, "tokens_computed")) * MODEL.experts_per_token, (2, 1)),
        )
        # Of the 29 tokens of the cancelled one a step took 16.
        assert per_engine(status, "tokens_computed") == (16 + 6 * (7 + 5), 6 * (7 + 5))
        assert per_engine(status, "free_pages") == FREE


def test_idle_ticks_run_no_step():
    with open_server() as (server, _, _):
        tick(server, 5)
        assert server.status().steps.count == 0


def test_traces_are_published_at_their_period_also_by_idle_engines():
    config = replace(CONFIG, dispatch=replace(CONFIG.dispatch, trace_period_s=0.5))
    with open_server(config) as (server, _, _):
        assert server.traces == ()
        times = []
        for now in (0.0, 0.2, 0.4, 0.6, 0.8, 1.2):
            server.tick(now)
            times.append(server.traces[1].time)
        assert times == [0.0, 0.0, 0.0, 0.6, 0.6, 1.2]
        server.submit(request("a", [1] * 20, engine=1, sequence=7))
        server.tick(2.0)
        assert [(t.engine, t.seen, t.running_requests) for t in server.traces] == [(0, 0, 0), (1, 7, 1)]
        assert server.traces[1].kv_use > 0 == server.traces[0].kv_use
        # 16 of its tokens ran, with two experts each: 16 on experts 1 and 2 in either layer, which engine 0's ranks
        # hold up to expert 1.
        assert [t.expert_pressure for t in server.traces] == [8.0, 8.0]


def test_a_change_of_cache_use_alone_is_published():
    with open_server() as (server, _, _):
        server.submit(request("a", [1] * 4, max_tokens=20))
        server.tick(0.0)
        before = server.traces[0]
        for now in (0.02, 0.04, 0.06, 0.08, 0.2):  # the last one is the ninth token, on a page of its own
            server.tick(now)
        assert (before.time, before.kv_use, before.kv_tokens) == (0.0, 2 / 16, 4)
        after = replace(before, time=0.2, kv_use=3 / 16, kv_tokens=9)
        assert replace(server.traces[0], expert_pressure=before.expert_pressure) == after


# -- admission and cancellation -------------------------------------------------


def test_full_queue_refuses_until_there_is_room():
    config = replace(CONFIG, engine=replace(CONFIG.engine, max_queue=3))
    with open_server(config) as (server, _, _):
        for i in range(3):
            server.submit(request(f"r{i}"))
        with pytest.raises(QueueFull, match=r"engine 0: 3 requests wait \(max_queue\)"):
            server.submit(request("refused"))
        server.submit(request("other engine", engine=1))
        tick(server, 1)
        server.submit(request("accepted"))


def test_queue_bound_counts_what_arrives_during_a_tick():
    config = replace(CONFIG, engine=replace(CONFIG.engine, max_queue=2))
    with open_server(config) as (server, runner, _):
        runner.on_wait = lambda results: server.submit(request("b"))
        server.submit(request("a"))
        tick(server, 1)
        server.submit(request("c"))
        with pytest.raises(QueueFull):
            server.submit(request("d"))


def test_cancelled_in_the_instant_it_was_submitted():
    with open_server() as (server, _, outputs):
        server.submit(request("a"))
        server.cancel("a")
        tick(server, 3)
        assert outputs.all == []
        assert per_engine(server.status(), "free_pages") == FREE
        assert all(engine.idle for engine in server.engines)


@AHEAD
def test_cancel_frees_pages_within_one_tick(ahead):
    with open_server(ahead=ahead) as (server, _, outputs):
        server.submit(request("a", max_tokens=50))
        server.submit(request("b", max_tokens=5))
        tick(server, 2)
        assert per_engine(server.status(), "free_pages") < FREE
        server.cancel("a")
        server.cancel("unknown")
        tick(server, 1)
        assert len(outputs.tokens("a")) == 2 - ahead
        tick(server, 5)
        assert outputs.ends() == {"b": ("length", "")}
        assert per_engine(server.status(), "free_pages") == FREE


@AHEAD
def test_what_was_accepted_runs_although_preempted_sequences_fill_the_queue(ahead):
    # Eight pages for two sequences that grow to six each, and room for one request that waits.
    small = replace(CONFIG.engine, num_pages=8, max_queue=1)
    with open_server(replace(CONFIG, engine=small), ahead) as (server, _, outputs):
        for sequence, name in enumerate(("old", "young"), start=1):
            server.submit(request(name, range(8), max_tokens=16, sequence=sequence))
            tick(server, 1)
        server.submit(request("waits", range(8), sequence=3))
        tick(server, 15)
        assert server.status().preemptions > 0
        with pytest.raises(QueueFull):
            server.submit(request("refused"))
        tick(server, 60)
        assert outputs.ends() == dict.fromkeys(("old", "young", "waits"), ("length", ""))
        assert outputs.tokens("young") == list(range(8, 24))


def test_takes_requests_only_while_serving():
    with new_server() as (server, _, _):
        with pytest.raises(NotServing, match="warming"):
            server.submit(request("a"))
        server.open()
        server.submit(request("a"))
        server.drain()
        with pytest.raises(NotServing, match="draining"):
            server.submit(request("b"))
        server.open()
        assert server.state == "draining"


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
    with open_server(config, ahead) as (server, _, outputs):
        server.submit(request("before"))
        server.submit(replace(request("broken", max_tokens=9), grammar=BrokenGrammar(good_steps)))
        server.submit(request("after"))
        tick(server, 8)
        ends = outputs.ends()
        assert ends.keys() == {"before", "broken", "after"}
        assert ends["before"] == ends["after"] == ("length", "")
        assert outputs.tokens("before") == outputs.tokens("after") == [4, 5, 6, 7]
        assert ends["broken"][0] == "error" and reason in ends["broken"][1] and "no such rule" in ends["broken"][1]
        assert per_engine(server.status(), "free_pages") == FREE and server.state == "serving"


@AHEAD
def test_a_sequence_for_which_no_token_could_be_chosen_fails_alone(ahead):
    with open_server(ahead=ahead) as (server, runner, outputs):
        enqueue, in_flight = runner.enqueue, []

        def note_the_plan(plans, mark):
            ids = server.engines[0]._batch.request_id_R
            in_flight.append((plans[0], ids.index("poisoned") if "poisoned" in ids else -1))
            return enqueue(plans, mark)

        def poison(results):
            found, (plan, row) = results[0], in_flight.pop(0)
            found.token_D[plan.decode.row_D == row] = NOT_FINITE
            found.token_C[[chunk.row == row for chunk in plan.prefill]] = NOT_FINITE

        runner.enqueue, runner.on_wait = note_the_plan, poison
        for name in ("a", "poisoned", "b"):
            server.submit(request(name))
        tick(server, 6)
        assert outputs.ends() == {
            "a": ("length", ""),
            "b": ("length", ""),
            "poisoned": ("error", "its logits are not finite"),
        }
        assert outputs.tokens("a") == outputs.tokens("b") == [4, 5, 6, 7]
        assert per_engine(server.status(), "free_pages") == FREE


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
def test_a_clock_that_jumps_or_stands_still_starves_nobody(policy, began, ticks, at_last, ahead):
    """Each tick has a jump before it, and maybe a new prompt; at last they go on alike until all requests ended."""
    config = replace(CONFIG, dispatch=DispatchConfig(policy=policy))
    dispatcher = Dispatcher(2, config.dispatch, config.engine.token_budget)
    now, submitted = began, 0
    with open_server(config, ahead) as (server, _, outputs):
        for jump, prompt_tokens in itertools.chain(ticks, itertools.repeat((at_last, None), 200)):
            if prompt_tokens is not None:
                engine, sequence = submitted % 2, submitted // 2 + 1
                one = request(f"r{submitted}", range(prompt_tokens), engine=engine, sequence=sequence)
                server.submit(replace(one, arrival=now, engine=None if policy == "late" else engine))
                submitted += 1
            now += jump
            server.tick(now)
            # What the dispatcher sees after a tick is never too old to count, nor negative.
            dispatcher.observe(server.traces)
            assert dispatcher.view(now).traces == server.traces
            for trace in server.traces:
                assert 0 <= now - trace.time <= config.dispatch.trace_period_s
                assert 0 <= trace.kv_use <= 1
                assert trace.waiting_prefill_tokens >= 0 and trace.running_prefill_tokens >= 0
        assert len(outputs.ends()) == submitted and set(outputs.ends().values()) <= {("length", "")}
        assert per_engine(server.status(), "free_pages") == FREE


# -- the engine thread ----------------------------------------------------------


@AHEAD
def test_drains_what_runs_and_stops(ahead):
    with new_server(ahead=ahead) as (server, _, outputs):
        ended = threading.Event()
        server.start(on_end=ended.set)
        wait_for(lambda: server.state == "serving")
        server.submit(request("a", max_tokens=50))
        server.drain()
        wait_for(lambda: "a" in outputs.ends())
        assert outputs.tokens("a") == list(range(4, 54))
        server.stop()
        assert ended.is_set()
        assert server.state == "stopped"
        with pytest.raises(NotServing, match="stopped"):
            server.submit(request("b"))


@AHEAD
def test_stop_ends_what_is_left(ahead):
    with new_server(ahead=ahead) as (server, runner, outputs):
        stepping, go_on = threading.Event(), threading.Event()

        def hold(results):
            stepping.set()
            assert go_on.wait(60)

        runner.on_wait = hold
        server.start()
        wait_for(lambda: server.state == "serving")
        server.submit(request("running", max_tokens=50))
        assert stepping.wait(60)
        server.submit(request("in the inbox"))
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        wait_for(lambda: server._stopping)
        go_on.set()
        stopper.join(60)
        ends = outputs.ends()
        assert ends == dict.fromkeys(("running", "in the inbox"), ("error", "the server has stopped"))
        assert per_engine(server.status(), "free_pages") == FREE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_who_is_abandoned_has_failed_for_that_reason_and_is_not_waited_for(fails):
    with new_server() as (server, runner, _):
        stepping, go_on, over = threading.Event(), threading.Event(), threading.Event()

        def hold(results):
            stepping.set()
            assert go_on.wait(60)
            if fails:
                raise RuntimeError("connection closed by peer")

        runner.on_wait = hold
        server.start(on_end=over.set)
        wait_for(lambda: server.state == "serving")
        server.submit(request("running", max_tokens=50))
        assert stepping.wait(60)
        server.abandon("process 1 is gone")
        server.stop()  # although the step hangs
        with pytest.raises(NotServing, match="failed"):
            server.submit(request("late"))
        go_on.set()
        assert over.wait(60)
        assert (server.state, server.error) == ("failed", "process 1 is gone")


def test_status_while_warming_up():
    with new_server() as (server, _, _):
        warming, go_on = threading.Event(), threading.Event()

        def warm_up():
            warming.set()
            assert go_on.wait(60)

        server.start(warm_up)
        assert warming.wait(60)
        status = server.status()
        assert (status.state, status.steps.count, status.traces) == ("warming", 0, ())
        assert (per_engine(status, "free_pages"), status.steps.compiles_after_warmup) == (FREE, 0)
        go_on.set()
        wait_for(lambda: server.state == "serving")


def test_status_is_not_starved_by_a_busy_engine_thread():
    with new_server() as (server, runner, outputs):
        runner.on_wait = lambda results: time.sleep(0.01)
        server.start()
        wait_for(lambda: server.state == "serving")
        for i in range(40):
            server.submit(request(f"r{i}", max_tokens=50, engine=i % 2, sequence=i // 2 + 1))
        steps = [server.status().steps.count for _ in range(10)]
        assert len(outputs.ends()) < 40, "the engines were idle"
        assert steps[-1] - steps[0] < 100


def test_idle_server_publishes_and_rebalances():
    with new_server() as (server, _, _):
        server.start()
        wait_for(lambda: len(server.traces) == 2)
        first = server.traces[0].time
        wait_for(lambda: server.traces[0].time > first)
        server.rebalance()
        wait_for(lambda: server.status().placement.records)


# -- failure ----------------------------------------------------------------------

thread_fails = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@AHEAD
@thread_fails
def test_failed_step_ends_every_request(ahead):
    config = replace(CONFIG, engine=replace(CONFIG.engine, max_rows=1))
    with new_server(config, ahead=ahead) as (server, runner, outputs):
        runner.steps_left = 5
        server.open()
        for i in range(4):
            server.submit(request(f"r{i}", max_tokens=60, engine=i % 2, sequence=i // 2 + 1))
        ended = threading.Event()
        server.start(on_end=ended.set)
        assert ended.wait(60)
        assert len(outputs.tokens("r0")) == 5
        reason = "RuntimeError: device lost"
        assert outputs.ends() == {f"r{i}": ("error", reason) for i in range(4)}
        assert (server.state, server.error) == ("failed", reason)
        with pytest.raises(NotServing, match="failed"):
            server.submit(request("late"))
        status = server.status()  # although the devices have lost their counters
        assert (status.state, status.error, per_engine(status, "free_pages")) == ("failed", reason, FREE)
        server.stop()
        assert server.state == "failed"


@thread_fails
def test_failed_warm_up():
    with new_server() as (server, _, _):
        ended = threading.Event()
        server.start(lambda: 1 // 0, on_end=ended.set)
        assert ended.wait(60)
        assert server.state == "failed"
        assert "ZeroDivisionError" in server.error


def test_a_warm_up_that_is_not_needed_any_more_ends_early():
    with new_server() as (server, _, _):
        warming, ended = threading.Event(), threading.Event()

        def warm_up():
            while True:
                server.check_warming()
                warming.set()
                time.sleep(0.001)

        server.start(warm_up, on_end=ended.set)
        assert warming.wait(60)
        server.drain()
        assert ended.wait(60)
        assert (server.state, server.error) == ("stopped", "")


@thread_fails
def test_streams_over_grpc_end_when_the_engine_fails():
    async def main(server, runner):
        async with asyncio.timeout(120), running_server(server) as (client, _, stop, serving):
            loop, all_in, submitted = asyncio.get_running_loop(), threading.Event(), []
            submit = server.submit

            def submit_and_count(request):
                submit(request)
                submitted.append(request)

            def wait_for_all(results):
                assert all_in.wait(60)

            async def stream(engine):
                return [chunk async for chunk in client.generate(token_ids=[1], max_tokens=60, engine=engine)]

            server.submit, runner.on_wait, runner.steps_left = submit_and_count, wait_for_all, 3
            server.start(on_end=lambda: loop.call_soon_threadsafe(stop.set))
            await until(lambda: server.state == "serving")
            streams = asyncio.gather(*(stream(i % 2) for i in range(12)), return_exceptions=True)
            await until(lambda: len(submitted) == 12)
            all_in.set()
            found = {(getattr(error, "code", None), str(error)) for error in await streams}
            assert found == {(StatusCode.UNAVAILABLE, "RuntimeError: device lost")}
            await serving

    with new_server() as (server, runner, _):
        asyncio.run(main(server, runner))
