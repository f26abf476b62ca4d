import pytest

from gimbal_jax.serving.engine.meters import PHASES, TICKS, PhaseTimer


def tick(timer: PhaseTimer, clock: list[float], **seconds: float) -> None:
    timer.begin()
    for name, duration in seconds.items():
        clock[0] += duration
        timer.mark(name)


def test_phases_add_up_to_the_ticks():
    clock = [5.0]
    timer = PhaseTimer(lambda: clock[0])
    assert timer.times() == ()
    for wait in (1.0, 2.0, 9.0):
        tick(timer, clock, other=0.25, schedule=0.5, wait=wait)
        clock[0] += 0.25
        timer.mark("other")  # once more in the same tick
        timer.end()
        tick(timer, clock, other=100.0)  # without a step
    times = {phase.name: phase for phase in timer.times()}
    assert tuple(times) == PHASES
    assert (times["wait"].mean_s, times["wait"].p50_s) == (4.0, 2.0)
    assert 2.0 < times["wait"].p99_s <= 9.0
    assert (times["schedule"].mean_s, times["other"].mean_s, times["emit"].mean_s) == (0.5, 0.5, 0.0)


def test_only_the_last_ticks_count():
    clock = [0.0]
    timer = PhaseTimer(lambda: clock[0])
    for number in range(TICKS + 10):
        tick(timer, clock, emit=1000.0 if number < 10 else 1.0)
        timer.end()
    emit = next(phase for phase in timer.times() if phase.name == "emit")
    assert (emit.mean_s, emit.p99_s) == (1.0, 1.0)


def test_an_unknown_phase_is_an_error():
    timer = PhaseTimer(lambda: 0.0)
    timer.begin()
    with pytest.raises(KeyError):
        timer.mark("sleep")
