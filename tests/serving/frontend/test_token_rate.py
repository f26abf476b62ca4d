from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.serving.frontend.counters import TokenRate


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 1), st.integers(0, 5)), max_size=20), st.floats(0, 12))
def test_counts_of_the_last_whole_second(events, later):
    rate = TokenRate(2)
    events = sorted(event for event in events if event[0] <= later)
    for time, engine, tokens in events:
        rate.add(engine, tokens, time)
    expected = [sum(n for time, e, n in events if e == engine and int(time) == int(later) - 1) for engine in (0, 1)]
    assert rate.per_second(later) == tuple(expected)
