"""Metrics of one gateway process on a port of its own: `/metrics` for Prometheus.

They show a gateway while no coordinator answers, and while its event loop stands still: a thread
serves what the loop last published, and the loop's present lag. Labels are listed routes, tiers and
status codes. Called by the process on its ticks.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.protocol.metrics_wire import Family

LAG_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What a gateway publishes on a tick."""

    is_ready: bool = False
    is_draining: bool = False
    open_requests: int = 0
    """Requests being answered, until their last byte."""
    open_requests_max: int = 0
    connections: int = 0
    connections_max: int = 0
    cells: int = 0
    """Cells with a session."""
    keys: int = 0
    """API keys in use."""
    keys_are_outdated: bool = False
    """Whether the newest key file could not be read, so that older keys are in use."""
    batches: int = 0
    """Batches that this gateway runs."""
    requests: Family = field(default_factory=lambda: Family("", "", (), (), ()))
    """Answered requests by route, tier and code."""


class OwnMetrics:
    """The registry of one gateway process."""

    def __init__(self, tick_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`tick_s` is the time between two ticks of a loop that is not late."""
        self._tick_s = tick_s
        self._clock = clock
        self._ticked_at_s = clock()
        self._state = GatewayState()
        self.registry = CollectorRegistry()
        self._lag = Histogram(
            "aileron_gateway_loop_lag_seconds",
            "How late the gateway's event loop was for its ticks.",
            buckets=LAG_BOUNDS_S,
            registry=self.registry,
        )
        self.registry.register(_StateCollector(self))
        ProcessCollector(registry=self.registry)

    def tick(self, state: GatewayState) -> None:
        """Publish the state, and measure how late this tick is."""
        now_s = self._clock()
        self._lag.observe(max(0.0, now_s - self._ticked_at_s - self._tick_s))
        self._ticked_at_s = now_s
        self._state = state

    @property
    def state(self) -> GatewayState:
        """The last published state."""
        return self._state

    @property
    def late_s(self) -> float:
        """How late the loop's next tick is already, in seconds."""
        return max(0.0, self._clock() - self._ticked_at_s - self._tick_s)

    def serve(self, address: str, processes: int) -> "MetricsServer":
        """Serve at `host:port`; several processes take the ports from there, each a free one.

        Raises OSError if none of them is free.
        """
        host, _, first = address.rpartition(":")
        problem: OSError | None = None
        for port in range(int(first), int(first) + processes):
            try:
                server, thread = start_http_server(port, host.strip("[]"), self.registry)
            except OSError as error:
                problem = error
                continue
            found = server.server_address[1]
            log.info("gateway_metrics_served", host=host, port=found)
            return MetricsServer(found, server, thread)
        raise OSError(
            f"gateway.metrics_listen {address}: no port from there is free "
            f"({problem and problem.strerror}): name another one, or leave it empty."
        ) from problem


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A thread that serves metrics."""

    port: int
    _server: WSGIServer
    _thread: threading.Thread

    def close(self) -> None:
        """Stop serving; blocks for half a second at most."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _StateCollector(Collector):
    def __init__(self, metrics: OwnMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names are unique by construction."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the published state."""
        state = self._metrics.state
        for name, text, value in (
            ("ready", "1 if a request that arrives now can be served.", state.is_ready),
            ("draining", "1 while the gateway lets its last requests end.", state.is_draining),
            ("open_requests", "Requests being answered.", state.open_requests),
            ("open_requests_max", "Most requests in progress.", state.open_requests_max),
            ("connections", "Open connections of clients.", state.connections),
            ("connections_max", "Most open connections.", state.connections_max),
            ("cells", "Cells with a session.", state.cells),
            ("keys", "API keys in use.", state.keys),
            (
                "keys_outdated",
                "1 if the newest key file could not be read, so that older keys are in use.",
                state.keys_are_outdated,
            ),
            ("batches", "Batches that this gateway runs.", state.batches),
            (
                "loop_late_seconds",
                "How late the event loop is at this moment.",
                self._metrics.late_s,
            ),
        ):
            yield GaugeMetricFamily(f"aileron_gateway_{name}", text, value=value)
        requests = CounterMetricFamily(
            "aileron_gateway_requests",
            "Requests that this gateway answered; the code 499 means that the client disconnected.",
            labels=state.requests.labels,
        )
        for series in state.requests.series:
            requests.add_metric(series.labels, series.value)
        yield requests
