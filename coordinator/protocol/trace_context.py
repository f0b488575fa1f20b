"""W3C trace context: the `traceparent` of a request, and the names of span attributes. Pure.

Source: https://www.w3.org/TR/trace-context/ version 00. `tracestate` is not passed on: it is
private to other systems. Attribute names follow OpenTelemetry's conventions for HTTP and generative
AI where those have one.
"""

import re
from dataclasses import dataclass
from typing import Final

TRACEPARENT_HEADER: Final = "traceparent"

SAMPLED: Final = 1
"""The only flag of version 00: the caller records its part of the trace."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

PROVIDER: Final = "aileron"
OPERATION: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_SCHEME: Final = "url.scheme"

SWITCH_EVENT: Final = "aileron.switch"
"""A stream's first tokens of a later epoch: the stream has crossed a switch."""
FIRST_TOKEN_EVENT: Final = "aileron.first_token"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace and the parent span of a new span."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    def __str__(self) -> str:
        """Format it as a `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def read_traceparent(text: str) -> TraceContext | None:
    """Return the context in a header's value, or None if it is missing or unusable."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & SAMPLED))
    return context if context.trace_id and context.span_id else None
