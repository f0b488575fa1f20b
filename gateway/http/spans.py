"""The spans of a gateway: one for each HTTP request, and below it one for each of its tasks.

A request's span has HTTP attributes; a task's has those of OpenTelemetry's conventions for
generative AI. The request id is the only client text in them. Only sampled requests have spans; the
others have None.
"""

from starlette.types import Scope

from coordinator.protocol import trace_context as words
from coordinator.protocol.metrics_wire import CHAT
from coordinator.protocol.terms import TaskId, Tier
from coordinator.protocol.tracing import Span, Tracing
from gateway.admission.tiers import tier_name
from gateway.errors import RequestState
from gateway.http.routes import OTHER_ROUTE, route_name
from gateway.open_requests import OpenRequest
from gateway.telemetry.meter import OPERATION_OF_ROUTE, operation_of

CROSSINGS_MAX = 64
"""Most switches recorded in one task's span."""


class RequestSpans:
    """Begins the spans of requests."""

    def __init__(self, tracing: Tracing) -> None:
        """Use a process's tracing."""
        self._tracing = tracing

    def begin(self, scope: Scope, traceparent: str, request_id: str) -> "RequestSpan | None":
        """Begin a request's span, or return None if not sampled; accepts any `traceparent`."""
        parent = words.read_traceparent(traceparent)
        if not self._tracing.is_sampled(parent):
            return None
        method, route = scope["method"], route_name(scope["method"], scope["path"])
        is_known = route != OTHER_ROUTE
        about = {
            words.HTTP_METHOD: method if is_known else "_OTHER",
            words.HTTP_ROUTE: route,
            words.URL_SCHEME: scope.get("scheme", "http"),
            "aileron.request_id": request_id,
        }
        if route in OPERATION_OF_ROUTE:
            about[words.OPERATION] = OPERATION_OF_ROUTE[route]
        name = f"{method} {route}" if is_known else "HTTP"
        return RequestSpan(self._tracing.start(name, parent, about, kind="server"))

    def begin_line(self, path: str) -> "RequestSpan | None":
        """Begin the span of a batch's line, which no client waits for; None if not sampled."""
        if not self._tracing.is_sampled(None):
            return None
        about = {words.OPERATION: OPERATION_OF_ROUTE.get(path, CHAT)}
        return RequestSpan(self._tracing.start("batch line", None, about))


class RequestSpan:
    """The span of a request that is being answered."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Span) -> None:
        """Wrap a span."""
        self._span = span
        self.traceparent = span.traceparent

    def end(self, status: int, error_code: str, tier: Tier, request: RequestState) -> None:
        """End the span with the request's outcome."""
        about: dict[str, str | int | list[str]] = {words.HTTP_STATUS: status}
        about["aileron.tier"] = tier_name(tier)
        if request.generated_tokens:
            about[words.OUTPUT_TOKENS] = request.generated_tokens
        if request.finish_reasons:
            about[words.FINISH_REASONS] = list(request.finish_reasons)
        self._span.set(about)
        error = error_code or (str(status) if status >= 500 else "")
        # By OpenTelemetry's conventions, a client's mistake is not a server error.
        is_ours = status >= 500 or (error_code and status == 200)
        if error and not is_ours:
            self._span.set({words.ERROR_TYPE: error})
        self._span.end(error=error if is_ours else "")


class TaskSpans:
    """Begins the spans of tasks."""

    def __init__(self, tracing: Tracing, model: str) -> None:
        """Use a process's tracing; `model` is the served name."""
        self._tracing = tracing
        self._model = model

    def begin(
        self, task: TaskId, parent: str, *, tier: Tier, prompt_tokens: int, max_tokens: int
    ) -> "TaskSpan":
        """Begin the span of a task of a sampled request."""
        operation = operation_of(task)
        about: dict[str, str | int] = {
            words.OPERATION: operation,
            words.PROVIDER_NAME: words.PROVIDER,
            words.REQUEST_MODEL: self._model,
            words.RESPONSE_MODEL: self._model,
            words.REQUEST_MAX_TOKENS: max_tokens,
            words.INPUT_TOKENS: prompt_tokens,
            "aileron.task": task,
            "aileron.tier": tier_name(tier),
        }
        return TaskSpan(self._tracing.start(f"{operation} {self._model}", parent, about))


class TaskSpan:
    """The span of a task, from its arrival at the relay until its last token is delivered."""

    __slots__ = ("_crossings", "_error", "_span", "traceparent")

    def __init__(self, span: Span) -> None:
        """Wrap a span."""
        self._span = span
        self._crossings = 0
        self._error = ""
        self.traceparent = span.traceparent

    def crossed(self, epoch: int, pause_s: float) -> None:
        """Record a switch: the first token of `epoch` arrived after a pause of `pause_s`."""
        self._crossings += 1
        if self._crossings <= CROSSINGS_MAX:
            about = {"aileron.epoch": epoch, "aileron.pause_seconds": pause_s}
            self._span.event(words.SWITCH_EVENT, about)

    def failed(self, error_code: str) -> None:
        """Record why the task will end; a cancelled task has no error."""
        self._error = error_code

    def ended(self, task: OpenRequest) -> None:
        """End the span with the number of delivered tokens and their times."""
        count = len(task.delivered)
        about: dict[str, int | float] = {
            words.OUTPUT_TOKENS: count,
            "aileron.switches": self._crossings,
        }
        if count:
            about[words.FIRST_CHUNK] = task.first_token_at_s - task.opened_at_s
        if count > 1:
            lasted_s = task.last_token_at_s - task.first_token_at_s
            about["aileron.time_per_output_token"] = lasted_s / (count - 1)
        self._span.set(about)
        self._span.end(error=self._error)

    def refused(self, error_code: str) -> None:
        """End the span of a task that was never opened."""
        self._span.end(error=error_code)
