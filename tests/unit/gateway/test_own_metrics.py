"""A gateway's own metrics: what its loop published, its lag, and ports for several processes."""

import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.terms import Tier
from gateway.telemetry.meter import RequestMeter
from gateway.telemetry.own_metrics import GatewayState, OwnMetrics

TICK_S = 0.25


class Clock:
    """A clock that tests set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def served(port: int) -> dict[tuple[str, ...], float]:
    """Name and label values of each series -> its value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (each.name, *sorted(each.labels.values())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def free_ports_in_a_row(count: int) -> int:
    """The first of some ports that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first


def test_what_the_loop_publishes_is_served_with_its_lag() -> None:
    clock = Clock()
    metrics = OwnMetrics(TICK_S, clock)
    meter = RequestMeter()
    meter.answered("/v1/completions", Tier.STANDARD, 429, "rate_limit_exceeded", 0.1)
    first = free_ports_in_a_row(1)
    server = metrics.serve(f"127.0.0.1:{first}", 1)
    try:
        assert served(first)["aileron_gateway_ready",] == 0
        clock.now_s += TICK_S + 0.03
        metrics.tick(
            GatewayState(
                is_ready=True,
                open_requests=3,
                connections=7,
                cells=2,
                keys_are_outdated=True,
                requests=meter.requests(),
            )
        )
        clock.now_s += TICK_S + 4
        found = served(first)
    finally:
        server.close()
    assert found["aileron_gateway_ready",] == 1
    assert found["aileron_gateway_open_requests",] == 3
    assert found["aileron_gateway_connections",] == 7
    assert found["aileron_gateway_cells",] == 2
    assert found["aileron_gateway_keys_outdated",] == 1
    assert found["aileron_gateway_requests_total", "/v1/completions", "429", "standard"] == 1
    assert found["aileron_gateway_loop_lag_seconds_bucket", "0.02"] == 0
    assert found["aileron_gateway_loop_lag_seconds_bucket", "0.05"] == 1
    # The loop has not ticked for four seconds, and it shows.
    assert found["aileron_gateway_loop_late_seconds",] == pytest.approx(4)
    assert found["process_resident_memory_bytes",] > 0


def test_documentation_lists_every_name() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text()
    section = text.partition("## A gateway's own metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \((\w+)\) \|$", section, re.MULTILINE)
    metrics = OwnMetrics(TICK_S)
    metrics.tick(GatewayState(requests=RequestMeter().requests()))
    found = set()
    for family in metrics.registry.collect():
        if family.name.startswith("aileron_"):
            labels = {each for sample in family.samples for each in sample.labels} - {"le"}
            name = family.name + "_total" * (family.type == "counter")
            words = ", ".join(sorted(labels)) or "–"
            found.add((name, words, family.documentation, family.type))
    assert set(rows) == found


def test_processes_take_ports_in_a_row_and_say_when_none_is_left() -> None:
    first = free_ports_in_a_row(2)
    metrics = [OwnMetrics(TICK_S) for _ in range(3)]
    address = f"127.0.0.1:{first}"
    servers = [each.serve(address, 2) for each in metrics[:2]]
    try:
        assert [each.port for each in servers] == [first, first + 1]
        with pytest.raises(OSError, match=r"gateway\.metrics_listen"):
            metrics[2].serve(address, 2)
        # The port of one that ended is the next one's.
        servers.pop(0).close()
        servers.append(metrics[2].serve(address, 2))
        assert servers[-1].port == first
    finally:
        for each in servers:
            each.close()


@pytest.mark.parametrize("address", ["8004", "host:", ":8004", "host:port", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="metrics_listen must be host:port"):
        check_config({"model": {"path": "x"}, "gateway": {"metrics_listen": address}})
