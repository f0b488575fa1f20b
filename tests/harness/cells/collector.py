"""A collector of OpenTelemetry: takes OTLP over HTTP, decodes the protobuf and keeps the spans."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

SEEN_LIMIT_S = 60


@dataclass(frozen=True)
class Seen:
    """A span as it came, its ids in hex."""

    service: str
    instance: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, int, dict[str, Any]], ...]
    links: frozenset[str]
    is_error: bool


@dataclass
class Collector:
    """What came so far."""

    url: str = ""
    spans: list[Seen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    waiting: int = 0
    """Exports that are kept waiting."""
    answers: threading.Event = field(default_factory=threading.Event)
    """Cleared: exports are taken and never answered."""

    def of(self, trace: str) -> list[Seen]:
        """Spans of a trace."""
        return [each for each in list(self.spans) if each.trace == trace]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition holds; return what it gave."""
        deadline = time.monotonic() + SEEN_LIMIT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, [(s.service, s.name, s.trace) for s in self.spans]
            time.sleep(0.02)
        return value

    def take(self, body: bytes) -> bytes:
        """Take an export and return the answer to it."""
        self.bodies.append(body)
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _plain(one.resource.attributes)
            for scope in one.scope_spans:
                self.spans += [_seen(span, about) for span in scope.spans]
        return bytes(ExportTraceServiceResponse().SerializeToString())


def _seen(span: Any, about: dict[str, Any]) -> Seen:
    return Seen(
        service=about["service.name"],
        instance=about.get("service.instance.id", ""),
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        events=tuple((e.name, e.time_unix_nano, _plain(e.attributes)) for e in span.events),
        links=frozenset(link.trace_id.hex() for link in span.links),
        is_error=span.status.code == 2,
    )


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    """Run one on a free port of loopback."""
    running = Collector()
    running.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not running.answers.is_set():
                running.waiting += 1
                running.answers.wait()
                return
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            said = running.take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    running.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()
