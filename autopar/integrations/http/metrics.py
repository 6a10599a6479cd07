"""Numbers for Prometheus: the engine's, read when they are asked for, and the times of requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from autopar.integrations.http.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The numbers of one server."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers(engine))
        made: dict[str, Any] = {"registry": self._registry}
        self._first = Histogram(
            "autopar_time_to_first_token_seconds", "From a request to its first token", buckets=_SECONDS, **made
        )
        self._between = Histogram(
            "autopar_time_between_tokens_seconds", "Between two tokens of a choice", buckets=_SECONDS, **made
        )
        self._whole = Histogram(
            "autopar_request_seconds", "From a request to the end of a choice", buckets=_SECONDS, **made
        )
        self._prompt = Counter("autopar_prompt_tokens", "Tokens of prompts of finished choices", **made)
        self._generated = Counter("autopar_generated_tokens", "Generated tokens", **made)
        self._finished = Counter("autopar_choices", "Ended choices", ["finish_reason"], **made)
        self._refused = Counter("autopar_errors", "Requests that ended with an error", ["status"], **made)

    def token(self, seconds: float, first: bool) -> None:
        """A token came, this long after the one before it, or after its request."""
        (self._first if first else self._between).observe(seconds)
        self._generated.inc()

    def finished(self, reason: str, prompt: int, generated: int, seconds: float) -> None:
        """A choice is complete."""
        self.ended(reason)
        self._prompt.inc(prompt)
        self._whole.observe(seconds)

    def ended(self, reason: str) -> None:
        """A choice has ended; "abort": its client has left."""
        self._finished.labels(reason).inc()

    def refused(self, status: int) -> None:
        """A request ended with an error."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """All numbers in the format of Prometheus."""
        return generate_latest(self._registry)


class _EngineNumbers:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        for name, value in self._engine.metrics().items():
            total = name.endswith("_total")
            made: Any = CounterMetricFamily if total else GaugeMetricFamily
            yield made(f"autopar_{name.removesuffix('_total')}", name.replace("_", " "), value=value)
