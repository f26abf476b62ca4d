import pytest

from gimbal_jax.serving.engine import meters as step_profile
from gimbal_jax.serving.engine.meters import PHASES, StepProfile


def tick(profile: StepProfile, clock: list[float], **seconds: float) -> None:
    profile.begin()
    for name, duration in seconds.items():
        clock[0] += duration
        profile.lap(name)


def test_phases_add_up_to_the_ticks():
    clock = [5.0]
    profile = StepProfile(lambda: clock[0])
    assert profile.times() == ()
    for wait in (1.0, 2.0, 9.0):
        tick(profile, clock, other=0.25, schedule=0.5, wait=wait)
        clock[0] += 0.25
        profile.lap("other")  # once more in the same tick
        profile.end()
        tick(profile, clock, other=100.0)  # without a step
    times = {phase.name: phase for phase in profile.times()}
    assert tuple(times) == PHASES
    assert (times["wait"].mean_s, times["wait"].p50_s) == (4.0, 2.0)
    assert 2.0 < times["wait"].p99_s <= 9.0
    assert (times["schedule"].mean_s, times["other"].mean_s, times["emit"].mean_s) == (0.5, 0.5, 0.0)


def test_only_the_last_ticks_count():
    clock = [0.0]
    profile = StepProfile(lambda: clock[0])
    for number in range(step_profile.TICKS + 10):
        tick(profile, clock, emit=1000.0 if number < 10 else 1.0)
        profile.end()
    emit = next(phase for phase in profile.times() if phase.name == "emit")
    assert (emit.mean_s, emit.p99_s) == (1.0, 1.0)


def test_an_unknown_phase_is_an_error():
    profile = StepProfile(lambda: 0.0)
    profile.begin()
    with pytest.raises(KeyError):
        profile.lap("sleep")
