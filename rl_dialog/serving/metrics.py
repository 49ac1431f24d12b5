"""What a server tells Prometheus (GET /metrics); README.md explains each name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from rl_dialog.serving.served import Models

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The numbers of one server process."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "serve_responses", "HTTP responses", ["route", "status"], registry=self.registry
        )
        self.open = Gauge(
            "serve_open_requests", "HTTP requests that are being answered", registry=self.registry
        )
        self.ttft = Histogram(
            "serve_ttft_seconds",
            "from a request to its first token",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.seconds = Histogram(
            "serve_reply_seconds",
            "from a request to the end of its reply",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(_Engines(models))

    def first_token(self, model: str, exchange: Any) -> None:
        """Notes when the first token came, once per exchange."""
        if not exchange.seen:
            exchange.seen = True
            self.ttft.labels(model).observe(time.monotonic() - exchange.began)

    def finished(self, model: str, exchange: Any) -> None:
        self.seconds.labels(model).observe(time.monotonic() - exchange.began)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """Reads the engines' own counters when asked."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def collect(self) -> Iterator[Metric]:
        served = list(self.models.served.values())
        gauges = {
            "serve_queue_depth": ("requests that wait for a slot", lambda engine: engine.depth()),
            "serve_running_rows": ("replies in the running batch", lambda engine: engine.running()),
            "serve_healthy": ("1 while the engine steps", lambda engine: int(engine.healthy())),
        }
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=["model"])
            for model in served:
                family.add_metric([model.name], read(model.engine))
            yield family
        for name in vars(served[0].engine.stats) if served else ():
            family = CounterMetricFamily(
                f"serve_{name}", f"{name.replace('_', ' ')} since the model was loaded", labels=["model"]
            )
            for model in served:
                family.add_metric([model.name], getattr(model.engine.stats, name))
            yield family
