"""Spans of requests and tasks: what they say, and that each of them ends once."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse

from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from coordinator.protocol.trace_context import TraceContext, read_traceparent
from coordinator.protocol.tracing import start_tracing
from coordinator.protocol.tracing_config import TracingConfig
from gateway.errors import ApiError, RequestState, current_request
from gateway.http.edge import Edge
from gateway.http.line_call import LineCall
from gateway.http.spans import CROSSINGS_MAX, RequestSpans, TaskSpan, TaskSpans
from gateway.open_requests import GapMeter, OpenRequests
from tests.harness.cells.collector import Collector, Seen, collector
from tests.harness.gateway.edge_app import Browser

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """The spans of a gateway, and what came of them at the collector's."""

    def __init__(self, told: Collector) -> None:
        tracing = start_tracing(TracingConfig(endpoint=told.url), "gateway")
        assert tracing is not None
        self._tracing, self._told = tracing, told
        self.requests = RequestSpans(tracing)
        self.tasks = TaskSpans(tracing, "demo")

    def sent(self) -> list[Seen]:
        self._tracing.close()
        return sorted(self._told.spans, key=lambda each: each.began_ns)

    def task(self, name: str) -> TaskSpan:
        where = {"tier": Tier.BATCH, "prompt_tokens": 7, "max_tokens": 9}
        return self.tasks.begin(TaskId(name), PARENT, **where)  # type: ignore[arg-type]


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collector() as told:
        yield Spans(told)


def opened(book: OpenRequests, spans: Spans, name: str) -> None:
    span = spans.task(name)
    header = TaskHeader(TaskId(name), "g", "r", 7, 9, trace=span.traceparent)
    assert not isinstance(book.open(header, b"", 0.0, span), ApiError)


def test_a_task_ends_once_however_it_leaves(spans: Spans) -> None:
    book = OpenRequests()
    for name in ("chatcmpl-finished", "0_cmpl-failed", "1_cmpl-failed", "cmpl-left"):
        opened(book, spans, name)
    finished = book.get(TaskId("chatcmpl-finished"))
    failed = book.get(TaskId("0_cmpl-failed"))
    assert finished is not None and failed is not None and failed.trace is not None
    gaps = GapMeter()
    for number, epoch in enumerate((1, 1, 2, *range(3, 3 + 2 * CROSSINGS_MAX))):
        gaps.tokens_arrived(finished, epoch, number * 0.5)
        finished.delivered.append(5)
    finished.first_token_at_s = 0.25
    book.finish(finished.id)
    failed.trace.failed("internal_error")
    book.fail(failed.id)
    book.cancel([TaskId("cmpl-left"), TaskId("cmpl-left")])
    found = spans.sent()
    assert [each.name for each in found] == ["chat demo", *["text_completion demo"] * 3]
    assert {each.parent for each in found} == {"b7ad6b7169203331"}
    assert [each.is_error for each in found] == [False, True, False, False]
    first = found[0].attributes
    assert first["gen_ai.response.time_to_first_chunk"] == 0.25
    assert first["gen_ai.usage.output_tokens"] == 3 + 2 * CROSSINGS_MAX
    assert first["aileron.switches"] == 1 + 2 * CROSSINGS_MAX
    assert first["aileron.tier"] == "batch"
    events = [(name, about) for name, _, about in found[0].events]
    assert events[0] == ("aileron.switch", {"aileron.epoch": 2, "aileron.pause_seconds": 0.5})
    assert len(events) == CROSSINGS_MAX
    assert found[1].attributes["error.type"] == "internal_error"


@pytest.mark.parametrize(
    ("status", "code", "says", "is_error"),
    [
        (200, "", None, False),
        (404, "model_not_found", "model_not_found", False),
        (499, "", None, False),
        (503, "no_healthy_workers", "no_healthy_workers", True),
        (500, "", "500", True),
        # A stream that began well and ended with an error event.
        (200, "internal_error", "internal_error", True),
    ],
)
def test_only_our_own_failures_are_errors(
    spans: Spans, status: int, code: str, says: str | None, is_error: bool
) -> None:
    scope: dict[str, Any] = {"method": "POST", "path": "/v1/completions", "scheme": "https"}
    span = spans.requests.begin(scope, PARENT, "request-1")
    assert span is not None
    span.end(status, code, Tier.STANDARD, RequestState())
    (found,) = spans.sent()
    assert found.name == "POST /v1/completions"
    assert found.attributes["http.response.status_code"] == status
    assert found.attributes["url.scheme"] == "https"
    assert (found.attributes.get("error.type"), found.is_error) == (says, is_error)


def test_unknown_paths_are_not_told(spans: Spans) -> None:
    scope: dict[str, Any] = {"method": "BREW", "path": "/my/secret"}
    span = spans.requests.begin(scope, "nonsense", "request-1")
    assert span is not None
    span.end(404, "unknown_url", Tier.STANDARD, RequestState())
    assert spans.requests.begin(scope, PARENT[:-1] + "0", "request-2") is None
    (found,) = spans.sent()
    assert (found.name, found.parent) == ("HTTP", "")
    assert found.attributes["http.request.method"] == "_OTHER"
    assert "secret" not in str(found) and "BREW" not in str(found)


async def test_the_edge_hands_the_spans_context_to_the_application(spans: Spans) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = current_request.get()
        if scope["path"] != "/health":
            assert state is not None
            seen.append(state.trace)
            state.finish_reasons = ("stop",)
        await JSONResponse({})(scope, receive, send)

    edge = Edge(app, spans=spans.requests)
    browser = Browser({"model": "demo", "prompt": "secret"})
    await edge(browser.scope("/v1/completions"), browser.receive, browser.send)
    line = LineCall("/v1/chat/completions", b'{"model": "demo", "messages": []}', "tenant", 1_000)
    assert (await edge.answer_line(line)).status == 200
    await edge(browser.scope("/health"), browser.receive, browser.send)
    request, batch = spans.sent()
    assert [request.name, batch.name] == ["POST /v1/completions", "batch line"]
    assert [read_traceparent(text) for text in seen] == [
        TraceContext(int(each.trace, 16), int(each.id, 16)) for each in (request, batch)
    ]
    for each in (request, batch):
        assert each.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert "secret" not in str(each) and "tenant" not in str(each)


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/responses", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/messages/count_tokens", None),
        ("/v1/completions", "text_completion"),
    ],
)
def test_a_request_names_its_operation(spans: Spans, path: str, operation: str | None) -> None:
    scope: dict[str, Any] = {"method": "POST", "path": path, "scheme": "http"}
    span = spans.requests.begin(scope, PARENT, "request-1")
    assert span is not None
    span.end(200, "", Tier.STANDARD, RequestState())
    (found,) = spans.sent()
    assert found.name == f"POST {path}"
    assert found.attributes.get("gen_ai.operation.name") == operation
