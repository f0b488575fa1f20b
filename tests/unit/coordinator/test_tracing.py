"""Trace contexts and configuration, and what becomes of spans that nobody takes."""

import threading
import time
from collections.abc import Iterator

import pytest

from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.trace_context import TraceContext, read_traceparent
from coordinator.protocol.tracing import FLUSH_LIMIT_S, SEND_LIMIT_S, start_tracing
from coordinator.protocol.tracing_config import TracingConfig
from tests.harness.cells.collector import collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def ended_threads() -> Iterator[None]:
    """Wait for the threads a test leaves: one that still sends draws from Python's own generator,
    and Hypothesis takes that for a strategy of the next test which does."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(4 * SEND_LIMIT_S)
        assert not thread.is_alive(), f"{thread.name} still sends"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        # A later version may say more behind what is known.
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_a_traceparent_is_read(text: str, sampled: bool) -> None:
    context = read_traceparent(text)
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled)
    assert str(context) == f"00-{TRACE}-{SPAN}-{int(sampled):02x}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "00", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-01-more"),
        *(f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01"),
        *(
            f"00-{TRACE}-{'0' * 16}-01",
            f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
            "\u0660" * 55,
        ),
        "00-" + "a" * 100_000,
    ],
)
def test_what_is_no_traceparent_is_ignored(text: str) -> None:
    assert read_traceparent(text) is None


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://otel.example/tenant/spans", "https://otel.example/tenant/spans"),
    ],
)
def test_the_path_is_otlps_unless_the_endpoint_has_one(endpoint: str, url: str) -> None:
    assert TracingConfig(endpoint=endpoint).traces_url == url


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "/x"])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="collector, such as"):
        check_config({"model": {"path": "m"}, "tracing": {"endpoint": endpoint}})


def test_callers_decide_before_chance_does() -> None:
    with collector() as told:
        tracing = start_tracing(TracingConfig(endpoint=told.url, sample_ratio=0.25), "test")
        assert tracing is not None
        assert tracing.is_sampled(TraceContext(1, 1))
        assert not tracing.is_sampled(TraceContext(1, 1, is_sampled=False))
        by_chance = sum(tracing.is_sampled(None) for _ in range(4_000))
        assert 700 < by_chance < 1_300
        tracing.start("kept", None, {}).end(error="internal_error")
        tracing.close()
        (span,) = told.spans
    assert (span.name, span.service, span.is_error) == ("kept", "aileron-test", True)
    assert span.attributes == {"error.type": "internal_error"}


@pytest.mark.usefixtures("ended_threads")
def test_spans_that_nobody_takes_are_dropped_and_delay_nothing() -> None:
    with collector() as told:
        told.answers.clear()
        tracing = start_tracing(TracingConfig(endpoint=told.url, queue_spans_max=64), "test")
        assert tracing is not None
        threads = threading.active_count()
        for _ in range(10_000):
            tracing.start("lost", None, {}).end()
        assert threading.active_count() <= threads + 2, "spans wait in no thread"
        told.until(lambda: told.waiting)
        started = time.monotonic()
        tracing.close()
        assert time.monotonic() - started < FLUSH_LIMIT_S + 10
        assert not told.spans
