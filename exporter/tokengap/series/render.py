"""One view as a page: each of the two exposition formats, as it is and gzipped, made once per beat.

A scrape then costs a look-up and a write, with 10 streams or 10,000, and two scrapers of one beat get the same bytes.
Rendering takes about 7 us a series and format, too long for the event loop at a thousand series: call it in a thread.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Metric, exposition
from prometheus_client.core import CounterMetricFamily, GaugeHistogramMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from tokengap.series import SERIES
from tokengap.series.declare import Distribution, Sample, Series
from tokengap.view import View


@dataclass(frozen=True, slots=True)
class Page:
    """The bytes of one beat: text format 0.0.4 and OpenMetrics 1.0.0."""

    text: bytes
    text_gzip: bytes
    openmetrics: bytes
    openmetrics_gzip: bytes


class ViewCollector(Collector):
    """What prometheus_client collects from a view.

    The families are made anew for each page and carry no ``_created`` samples, which Prometheus would store as one
    more series per child. :meth:`describe` is there because a registry asks it for names: without it ``name[]``
    would filter everything away.
    """

    def __init__(self, view: View, series: Sequence[Series] = SERIES):
        self._view = view
        self._series = series

    def collect(self) -> Iterable[Metric]:
        """Yield every family with its samples."""
        return (_family(series, series.read(self._view)) for series in self._series)

    def describe(self) -> Iterable[Metric]:
        """Yield every family without samples."""
        return (_family(series, ()) for series in self._series)


def render(view: View, also: Iterable[Collector] = (), series: Sequence[Series] = SERIES) -> Page:
    """Return the page of ``view``, followed by what the collectors ``also`` give (the process, for one)."""
    registry = _registry(view, also, series)
    text, open_metrics = _as_text(registry), _as_openmetrics(registry)
    return Page(text, compress(text), open_metrics, compress(open_metrics))


def render_named(
    view: View,
    names: Iterable[str],
    *,
    as_openmetrics: bool,
    also: Iterable[Collector] = (),
    series: Sequence[Series] = SERIES,
) -> bytes:
    """Return the page with only the samples of these names (``name[]`` of a scrape), in one format, not gzipped."""
    chosen = _registry(view, also, series).restricted_registry(names)
    return _as_openmetrics(chosen) if as_openmetrics else _as_text(chosen)


def compress(page: bytes) -> bytes:
    """Return ``page`` gzipped, at level 1: 17 times faster than the default 9 and nearly as small on such text."""
    return gzip.compress(page, compresslevel=1, mtime=0)


def _as_text(families: Collector) -> bytes:
    return exposition.generate_latest(families)


def _as_openmetrics(families: Collector) -> bytes:
    page: bytes = openmetrics.generate_latest(families)  # type: ignore[no-untyped-call]  # the library leaves it untyped
    return page


def _registry(view: View, also: Iterable[Collector], series: Sequence[Series]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)  # for collectors of the library, which have no describe()
    for collector in (ViewCollector(view, series), *also):
        registry.register(collector)
    return registry


def _family(series: Series, samples: Iterable[Sample]) -> Metric:
    """Return the samples of one series as prometheus_client's family of its kind."""
    family: CounterMetricFamily | GaugeMetricFamily | GaugeHistogramMetricFamily
    match series.kind:
        case "gaugehistogram":
            family = GaugeHistogramMetricFamily(series.name, series.help, labels=series.labels)
        case "counter":
            family = CounterMetricFamily(series.name, series.help, labels=series.labels)
        case "gauge":
            family = GaugeMetricFamily(series.name, series.help, labels=series.labels)
    for labels, value in samples:
        if isinstance(value, Distribution):
            assert isinstance(family, GaugeHistogramMetricFamily)
            family.add_metric(labels, _buckets(value), value.sum)
        else:
            assert not isinstance(family, GaugeHistogramMetricFamily)
            family.add_metric(labels, value)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return (``le``, cumulated count) pairs up to ``+Inf``; bounds as OpenMetrics spells floats (``8.0``)."""
    bounds = [*(str(float(bound)) for bound in distribution.bounds), "+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))
