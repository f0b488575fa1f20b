"""The HTTP request of one planned request: path, headers and JSON body. Pure.

Bodies always ask for a stream with usage, because that is what the client measures.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loadgen.client.answer import Endpoint
from loadgen.workload.plan import PlannedRequest
from loadgen.workload.prompts import History, PromptStyle, make_messages, make_prompt

TIER_HEADER = "X-Priority-Tier"
REQUEST_ID_HEADER = "X-Request-Id"
PATHS = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class BodyStyle:
    """The fields that are the same in every request body of a run."""

    endpoint: Endpoint
    model: str
    prompt: PromptStyle
    temperature: float
    ignore_eos: bool


def request_body(style: BodyStyle, planned: PlannedRequest, history: History = ()) -> bytes:
    """Return the JSON body; with a temperature above 0 it has the request's own seed."""
    body: dict[str, object] = {
        "model": style.model,
        "max_tokens": planned.output_tokens,
        "temperature": style.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if style.endpoint is Endpoint.CHAT:
        body["messages"] = make_messages(style.prompt, planned, history)
    else:
        body["prompt"] = make_prompt(style.prompt, planned, history)
    if style.ignore_eos:
        body["ignore_eos"] = True
    if style.temperature > 0:
        body["seed"] = style.prompt.seed + planned.index
    return json.dumps(body, separators=(",", ":")).encode()


def made_ahead(
    plan: Iterable[PlannedRequest],
    make: Callable[[PlannedRequest, History], bytes],
    bytes_max: int,
) -> Callable[[PlannedRequest, History], bytes]:
    """Return a `make` with the plan's first bodies prepared, at most `bytes_max` bytes in all.

    Each is used once. Making a long prompt takes milliseconds, in which no token could be timed.
    Later turns of a session hold answers, so their bodies cannot be prepared.
    """
    ready: dict[int, bytes] = {}
    remaining_bytes = bytes_max
    for planned in plan:
        if planned.turn:
            continue
        body = make(planned, ())
        remaining_bytes -= len(body)
        if remaining_bytes < 0:
            break
        ready[planned.index] = body

    def take(planned: PlannedRequest, history: History) -> bytes:
        body = ready.pop(planned.index, None)
        return make(planned, history) if body is None else body

    return take


def request_headers(planned: PlannedRequest) -> dict[str, str]:
    """Return content type, request id, and the tier if the run uses tiers."""
    headers = {"Content-Type": "application/json", REQUEST_ID_HEADER: planned.request_id}
    if planned.tier is not None:
        headers[TIER_HEADER] = planned.tier
    return headers
