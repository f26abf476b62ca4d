"""Virtual time: actions run in order at their time, also in the middle of a cost."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.simulation.clock import VirtualClock, VirtualExecutor


@given(st.lists(st.floats(0, 10)), st.lists(st.floats(0, 3)))
def test_actions_run_once_at_their_time_and_in_order(times, advances):
    clock, happened = VirtualClock(), []

    def note(time: float, number: int) -> None:
        happened.append((time, number, clock.now))

    for number, time in enumerate(times):
        clock.at(time, partial(note, time, number))
    for seconds in (0.0, *advances):
        clock.advance(seconds)
    assert clock.now == pytest.approx(sum(advances))
    assert [(time, number) for time, number, _ in happened] == sorted(
        (time, number) for number, time in enumerate(times) if time <= clock.now
    )
    assert all(time == now for time, _, now in happened)
    assert clock.next_due == min((time for time in times if time > clock.now), default=float("inf"))


def test_an_action_scheduled_by_an_action_runs_in_the_same_advance():
    clock, happened = VirtualClock(), []
    clock.at(1.0, lambda: clock.at(2.0, lambda: happened.append(clock.now)))
    clock.advance(3.0)
    assert happened == [2.0] and clock.now == 3.0


def test_an_action_scheduled_in_the_past_runs_next():
    clock, happened = VirtualClock(), []
    clock.advance(5.0)
    clock.at(1.0, lambda: happened.append(clock.now))
    clock.advance(0.0)
    assert happened == [5.0]


def test_a_decision_takes_its_time_while_the_engines_run():
    clock = VirtualClock()
    future = VirtualExecutor(clock, 2.0, blocking=False).submit(lambda a: a + 1, 1)
    clock.advance(1.9)
    assert not future.done()
    clock.advance(0.2)
    assert future.result(timeout=0) == 2


def test_a_blocking_decision_advances_the_clock():
    clock = VirtualClock()
    future = VirtualExecutor(clock, 2.0, blocking=True).submit(lambda: "done")
    assert clock.now == 2.0 and future.result(timeout=0) == "done"


def test_a_failed_decision_is_reported():
    future = VirtualExecutor(VirtualClock(), 0.0, blocking=True).submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        future.result(timeout=0)
