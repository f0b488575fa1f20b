"""Spans of one process, exported to an OpenTelemetry collector; off unless configured.

One thread sends queued spans in batches over OTLP/HTTP. A slow or absent collector costs spans,
never a request: the bounded queue drops what does not fit. opentelemetry is imported only when
tracing is on, and its global provider is left alone. vLLM's own tracing (`--otlp-traces-endpoint`)
is not used: it makes one span per finished request, by another provider, without queue or switches.
"""

import logging
import random
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import structlog

from coordinator.protocol.trace_context import ERROR_TYPE, TraceContext, read_traceparent
from coordinator.protocol.tracing_config import TracingConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext, Tracer

BATCH_SPANS_MAX = 256
SEND_EVERY_MS = 1_000
SEND_LIMIT_S = 5.0
"""Limit for sending one batch, retries included."""
FLUSH_LIMIT_S = 2.0
"""How long an ending process waits for its last spans to be sent."""
COMPLAIN_EVERY_S = 60.0

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server"]

log = structlog.get_logger(__name__)


class Span:
    """A recorded span; `traceparent` makes spans in any process its children."""

    __slots__ = ("_span", "context", "traceparent")

    def __init__(self, span: "OtelSpan") -> None:
        """Wrap a span of the SDK."""
        self._span = span
        span_context = span.get_span_context()
        self.context = TraceContext(span_context.trace_id, span_context.span_id)
        self.traceparent = str(self.context)

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Record an event now."""
        self._span.add_event(name, attributes)

    def end(self, *, error: str = "", at_ns: int | None = None) -> None:
        """End the span now, or at nanoseconds since 1970, and queue it for export.

        `error` is a code, never a message: messages may quote requests.
        """
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(at_ns)


class Tracing:
    """Makes the spans of a process."""

    def __init__(self, tracer: "Tracer", processor: "BatchSpanProcessor", ratio: float) -> None:
        """Record `ratio` of the traces that begin here."""
        self._tracer = tracer
        self._processor = processor
        self._ratio = ratio
        # vLLM may seed Python's own generator equally in every process.
        self._random = random.SystemRandom()

    def is_sampled(self, parent: TraceContext | None) -> bool:
        """Return whether to record a trace: the caller's choice, else by chance."""
        return parent.is_sampled if parent is not None else self._random.random() < self._ratio

    def start(
        self,
        name: str,
        parent: TraceContext | str | None,
        attributes: Attributes,
        *,
        kind: Kind = "internal",
        at_ns: int | None = None,
        links: Iterable[TraceContext] = (),
    ) -> Span:
        """Begin a span now, or at nanoseconds since 1970; without a parent, begin a trace."""
        from opentelemetry import trace

        if isinstance(parent, str):
            parent = read_traceparent(parent)
        context = None
        if parent is not None:
            context = trace.set_span_in_context(trace.NonRecordingSpan(_remote(parent)))
        span = self._tracer.start_span(
            name,
            context=context,
            kind=trace.SpanKind.SERVER if kind == "server" else trace.SpanKind.INTERNAL,
            attributes=attributes,
            links=[trace.Link(_remote(each)) for each in links],
            start_time=at_ns,
        )
        return Span(span)

    def close(self) -> None:
        """Send queued spans, within `FLUSH_LIMIT_S`; blocks."""
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        sending.join(FLUSH_LIMIT_S)


def ago_ns(milliseconds: float) -> int:
    """Return the time `milliseconds` ago, in nanoseconds since 1970."""
    return time.time_ns() - int(milliseconds * 1e6)


def start_tracing(
    config: TracingConfig, role: str, *, version: str = "", instance: str = ""
) -> Tracing | None:
    """Return the tracing of a process, or None if none is configured.

    Call it after the process's last fork. The environment variables of OpenTelemetry's exporter
    (`OTEL_EXPORTER_OTLP_HEADERS`, `…_CERTIFICATE`) and `OTEL_RESOURCE_ATTRIBUTES` apply.
    """
    if not config.endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    # A line per lost batch floods the log; `_sender` logs the losses at intervals.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    processor = BatchSpanProcessor(
        _sender(OTLPSpanExporter(endpoint=config.traces_url, timeout=SEND_LIMIT_S)),
        max_queue_size=config.queue_spans_max,
        max_export_batch_size=min(BATCH_SPANS_MAX, config.queue_spans_max),
        schedule_delay_millis=SEND_EVERY_MS,
    )
    about = {"service.name": f"aileron-{role}", "service.namespace": "aileron"}
    optional = {"service.version": version, "service.instance.id": instance}
    provider = TracerProvider(
        sampler=ALWAYS_ON,  # Only sampled spans are begun.
        resource=Resource.create(about | {key: text for key, text in optional.items() if text}),
        id_generator=_ids(),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return Tracing(provider.get_tracer("aileron"), processor, config.sample_ratio)


def _remote(context: TraceContext) -> "SpanContext":
    from opentelemetry import trace

    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags)


def _ids() -> "IdGenerator":
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class OsIds(IdGenerator):
        """Ids from the operating system: vLLM seeds Python's generator equally in every rank."""

        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1

        def generate_trace_id(self) -> int:
            return secrets.randbits(128) or 1

    return OsIds()


def _sender(inner: "SpanExporter") -> "SpanExporter":
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Sender(SpanExporter):
        """Sends batches, and logs at intervals if none gets through."""

        def __init__(self) -> None:
            self._lost = 0
            self._due_s = 0.0

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            result = inner.export(spans)
            if result is not SpanExportResult.SUCCESS:
                self._lost += len(spans)
                if time.monotonic() >= self._due_s:
                    self._due_s = time.monotonic() + COMPLAIN_EVERY_S
                    log.warning("spans_lost", spans=self._lost, reason="the collector took none")
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    return Sender()
