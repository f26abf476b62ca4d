"""Prometheus families from plain values.

A metric of engines has one series per engine, ``gimbal_engine_*``, and an aggregate over all engines, ``gimbal_*``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from gimbal_jax.serving.engine.meters import HistogramRecord, total


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one series for each value of a label."""
    return _labelled(GaugeMetricFamily(name, text, labels=[label]), values)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with one series for each value of a label. ``name`` goes without ``_total``."""
    return _labelled(CounterMetricFamily(name, text, labels=[label]), values)


def engine_gauges(name: str, text: str, values_S: Sequence[float], aggregate: float | None = None) -> Iterator[Metric]:
    """Yield the gauge ``gimbal_engine_NAME`` of each engine, and ``gimbal_NAME``, by default their sum."""
    yield gauges(f"gimbal_engine_{name}", text, "engine", by_engine(values_S))
    yield GaugeMetricFamily(f"gimbal_{name}", f"{text} All engines.", sum(values_S) if aggregate is None else aggregate)


def engine_counters(name: str, text: str, values_S: Sequence[float]) -> Iterator[Metric]:
    """Yield the counter ``gimbal_engine_NAME_total`` of each engine, and ``gimbal_NAME_total``, their sum."""
    yield counters(f"gimbal_engine_{name}", text, "engine", by_engine(values_S))
    yield CounterMetricFamily(f"gimbal_{name}", f"{text} All engines.", sum(values_S))


def histogram(name: str, text: str, record: HistogramRecord) -> Metric:
    """Return one histogram."""
    family = HistogramMetricFamily(name, text)
    family.add_metric([], _buckets(record), record.sum)
    return family


def engine_histograms(name: str, text: str, records_S: Sequence[HistogramRecord]) -> Iterator[Metric]:
    """Yield the histogram ``gimbal_engine_NAME`` of each engine, and ``gimbal_NAME`` of all observations."""
    family = HistogramMetricFamily(f"gimbal_engine_{name}", text, labels=["engine"])
    for engine, record in enumerate(records_S):
        family.add_metric([str(engine)], _buckets(record), record.sum)
    yield family
    yield histogram(f"gimbal_{name}", f"{text} All engines.", total(records_S))


def by_engine(values_S: Sequence[float]) -> dict[str, float]:
    """Return values by engine, as label values."""
    return {str(engine): value for engine, value in enumerate(values_S)}


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _buckets(record: HistogramRecord) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, record.bounds), "+Inf"]
    return list(zip(bounds, accumulate(record.counts), strict=True))
