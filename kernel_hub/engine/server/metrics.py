"""What Prometheus reads: the engine's own counts, and requests as clients see them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .worker import Worker

GAUGES = {"running", "waiting", "pages_used", "pages_total"}  # the engine's other numbers grow
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Of one server; `num_open` is how many requests are being answered."""

    def __init__(self, worker: Worker) -> None:
        self.num_open = 0
        self._worker = worker
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._requests = Counter("kernel_hub_requests", "Requests by route and status.",
                                 ["route", "status"], registry=self.registry)  # fmt: skip
        self._seconds = Histogram("kernel_hub_request_seconds", "From the head of a request to the "
                                  "end of its answer.", ["route"], buckets=SECONDS,
                                  registry=self.registry)  # fmt: skip

    def count(self, route: str, status: int, since: float) -> None:
        """One answered; `status` 499 where the client went away."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(time.monotonic() - since)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers after its last step."""
        for name, value in self._worker.stats.items():
            kind: Any = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield kind(f"kernel_hub_engine_{name}", f"{name} of the engine", value=value)
