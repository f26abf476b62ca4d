from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.serving.engine.meters import Histogram, HistogramRecord, total

BOUNDS = (0.5, 1, 2, 10)


@given(st.lists(st.sampled_from([0, 0.25, 0.5, 0.75, 1, 1.5, 2, 5, 10, 11, 1e9])))
def test_every_observation_is_in_the_first_bucket_that_holds_it(values):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    record = histogram.record()
    for index, bound in enumerate(BOUNDS):
        assert sum(record.counts[: index + 1]) == sum(value <= bound for value in values)
    assert sum(record.counts) == len(values)
    assert record.sum == sum(values)


def test_total_adds_buckets_and_sums():
    one, other = HistogramRecord((1, 2), (1, 2, 3), 10.5), HistogramRecord((1, 2), (4, 0, 1), 1.0)
    assert total([one]) == one
    assert total([one, other]) == HistogramRecord((1, 2), (5, 2, 4), 11.5)
