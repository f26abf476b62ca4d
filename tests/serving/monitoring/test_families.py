from prometheus_client.metrics_core import Metric

from gimbal_jax.serving.engine.meters import HistogramRecord
from gimbal_jax.serving.monitoring.families import counters, engine_counters, engine_gauges, engine_histograms, gauges


def values(*families: Metric) -> dict[tuple[str, ...], float]:
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_labelled_family_has_one_series_per_value():
    assert values(gauges("a", "", "kind", {"x": 1, "y": 2})) == {("a", "x"): 1, ("a", "y"): 2}
    assert values(counters("a", "", "kind", {"x": 1})) == {("a_total", "x"): 1}


def test_engine_family_has_a_sum_or_another_aggregate():
    each = {("gimbal_engine_a", "0"): 3, ("gimbal_engine_a", "1"): 4}
    assert values(*engine_gauges("a", "", [3, 4])) == each | {("gimbal_a",): 7}
    assert values(*engine_gauges("a", "", [3, 4], aggregate=0)) == each | {("gimbal_a",): 0}
    assert values(*engine_counters("a", "", [3, 4])) == {
        ("gimbal_engine_a_total", "0"): 3,
        ("gimbal_engine_a_total", "1"): 4,
        ("gimbal_a_total",): 7,
    }


def test_histogram_buckets_are_cumulative_and_summed_over_engines():
    found = values(
        *engine_histograms("a", "", [HistogramRecord((1, 2), (3, 0, 1), 9.0), HistogramRecord((1, 2), (0, 5, 0), 8.0)])
    )
    assert [found["gimbal_engine_a_bucket", "0", bound] for bound in ("1.0", "2.0", "+Inf")] == [3, 3, 4]
    assert [found["gimbal_engine_a_bucket", "1", bound] for bound in ("1.0", "2.0", "+Inf")] == [0, 5, 5]
    assert [found["gimbal_a_bucket", bound] for bound in ("1.0", "2.0", "+Inf")] == [3, 8, 9]
    assert (found["gimbal_a_count",], found["gimbal_a_sum",]) == (9, 17)
