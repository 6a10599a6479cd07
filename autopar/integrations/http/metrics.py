"""Metrics in the format of Prometheus: those of the engine, read at each scrape, and counts of error responses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from autopar.integrations.http.engine import Engine
from autopar.serving.metrics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "running": "Requests that run",
    "waiting": "Requests that wait",
    "pages_used": "Pages of the cache in use",
    "pages_free": "Pages of the cache that are free",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that were in the cache",
    "generated_tokens": "Generated tokens",
    "preempted": "Running requests that had to wait again",
    "steps": "Steps of the model",
}
_DURATIONS = {
    "first_token": "From a request to its first token",
    "next_token": "Between two tokens of a request",
}


class PrometheusMetrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._errors = Counter(
            "autopar_errors", "Requests that ended with an error", ["status"], registry=self._registry
        )
        self._registry.register(self)

    def error(self, status: int) -> None:
        """A request ended with an error."""
        self._errors.labels(str(status)).inc()

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)

    def describe(self) -> list[Any]:
        """Part of a prometheus_client collector: no metric is declared ahead of a scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        """Part of a prometheus_client collector: the current values."""
        now = self._engine.metrics()
        for name, words in _GAUGES.items():
            yield GaugeMetricFamily(f"autopar_{name}", words, getattr(now, name))
        for name, words in _COUNTERS.items():
            yield CounterMetricFamily(f"autopar_{name}", words, getattr(now, name))
        finished = CounterMetricFamily("autopar_requests", "Finished requests", labels=["finish_reason"])
        for reason, count in sorted(now.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        for name, words in _DURATIONS.items():
            yield _histogram(f"autopar_{name}_seconds", words, getattr(now, name))


def _histogram(name: str, words: str, durations: Histogram) -> HistogramMetricFamily:
    totals = itertools.accumulate(durations.counts)
    bounds = [*map(str, durations.bounds), "+Inf"]
    return HistogramMetricFamily(name, words, buckets=[*zip(bounds, totals)], sum_value=durations.sum)
