"""docs/api.md, from the gateway's routes, tiers and errors and the admin port's routes.

What the code cannot say, a sentence on each route and error, stands here. A route or a code without
a sentence ends the generation, and so does a sentence without one.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from fastapi.routing import APIRoute

from coordinator.admin.access import OPEN_PATHS as OPEN_ADMIN_PATHS
from coordinator.admin.app import AdminContext, build_admin
from coordinator.admin.key import AdminKeys
from coordinator.protocol.config import TiersConfig
from coordinator.protocol.policy_config import SloConfig
from coordinator.protocol.terms import Tier
from gateway.admission.tiers import _TIER_OF_SERVICE_TIER, TIER_HEADER, tier_name
from gateway.errors import CODES, RETRY_AFTER_MAX_S, api_error
from gateway.http.routes import BATCH_ROUTES, OPEN_PATHS, OWN_ROUTES, VLLM_ROUTES
from tests.harness.docs.tables import table

ROUTES = {
    "POST /v1/chat/completions": "Chat, whole or as a stream of server-sent events.",
    "POST /v1/completions": "Completion of one prompt or of several.",
    "POST /v1/responses": "OpenAI's Responses API. Nothing is stored: send the whole input.",
    "POST /v1/messages": "Anthropic's Messages API.",
    "POST /v1/messages/count_tokens": "The number of tokens of such a request.",
    "GET /v1/models": "The names of the model that is served.",
    "GET /v1/models/{model:path}": "One of these names.",
    "POST /tokenize": "Text or messages to token ids.",
    "POST /detokenize": "Token ids to text.",
    "GET /version": "vLLM's version.",
    "GET /health": "200 while the process lives.",
    "GET /ping": "The same.",
    "GET /ready": "200 while requests can be served, also during a switch; else 503 and the reason.",
    "GET /v1/responses/{response}": "404: no response is stored.",
    "DELETE /v1/responses/{response}": "404: no response is stored.",
    "POST /v1/responses/{response}/cancel": "404: no response is stored.",
    "GET /v1/responses/{response}/input_items": "404: no response is stored.",
    "POST /v1/files": "Upload the input of a batch.",
    "GET /v1/files": "List the tenant's files.",
    "GET /v1/files/{file}": "One file's record.",
    "DELETE /v1/files/{file}": "Delete a file that no batch needs.",
    "GET /v1/files/{file}/content": "Its content.",
    "POST /v1/batches": "Start a batch.",
    "GET /v1/batches": "List the tenant's batches.",
    "GET /v1/batches/{batch}": "One batch, with its counts.",
    "POST /v1/batches/{batch}/cancel": "End a batch; its finished lines stay.",
}
ADMIN = {
    "GET /": "The live page.",
    "GET /health": "200 while the process lives.",
    "GET /metrics": "Prometheus metrics of the cell: aileron's, vLLM's and OpenTelemetry's names.",
    "GET /admin/layout": "The layout, its epoch and its groups, with running and waiting tasks.",
    "POST /admin/layout": 'Switch: `{"layout": "tp2", "carry": "reshard"}`. `?wait=1` waits until '
    "it serves.",
    "GET /admin/ranks": "Each rank: process, phase, lease, pages, memory, restarts.",
    "GET /admin/switches": "The last switches: what they cost and which tasks they moved. `?last=N`",
    "GET /admin/decisions": "Why the layout is what it is, with the candidates. `?last=N`",
    "GET /admin/status": "All that `aileron status` shows.",
    "GET /admin/live": "What the live page reads.",
    "GET /admin/usage": "Requests and tokens of each tenant and tier, by hour. See logs.md.",
    "POST /admin/reload": "Read the configuration file again, and wait for who shares it: `slo`, `policy`, bounds and "
    "`log` apply.",
    "POST /admin/put-back": 'Return a mode to service: `{"mode": "tp2"}`.',
    "POST /admin/renew": 'Restart all ranks, or those of one group: `{"ranks": [0, 1]}`.',
}
REQUEST_HEADERS = {
    "Authorization": "`Bearer KEY`: the API key, where the gateway has a file of keys.",
    "x-api-key": "The key of Anthropic's clients, on their routes.",
    "X-Priority-Tier": "The tier: `interactive`, `standard` or `batch`; at most the key's highest.",
    "X-Request-Deadline-Ms": "End the request with 504 if it is not answered in this time.",
    "Idempotency-Key": "The same key again gets the first answer, for 24 h, unless it is a stream.",
    "X-Request-Id": "Your name for the request; the answer has it. Letters, digits and `._:-`, at "
    "most 128. `X-Client-Request-Id` is read where it is missing.",
    "x-gateway-inference-objective": "An objective that `gateway.objectives` maps to a tier; "
    "`x-llm-d-inference-objective` is the same.",
    "x-gateway-inference-fairness-id": "Without keys: the tenant, which a proxy in front names; "
    "`x-llm-d-inference-fairness-id` is the same.",
    "traceparent": "The trace that the request belongs to, with `tracing.endpoint`.",
    "Content-Encoding": "`gzip`, `deflate` or `zstd` of the body.",
}
ANSWER_HEADERS = {
    "X-Request-Id": "The request's name, in logs and traces too.",
    "X-Priority-Tier": "The tier that the request ran in.",
    "X-Queue-Wait-Ms": "How long it waited for a group.",
    "openai-processing-ms": "How long the answer, or its beginning, took.",
    "x-ratelimit-limit-requests": "The key's requests per minute; also `-remaining-requests`, "
    "`-reset-requests`, and the three for `tokens`.",
    "Retry-After": f"Seconds until another try is worth it, 1 to {RETRY_AFTER_MAX_S}; "
    "`retry-after-ms` is finer.",
    "x-should-retry": "`false`: another try cannot help. OpenAI's clients obey it.",
    "idempotent-replayed": "`true`: this is the first answer to the same `Idempotency-Key`.",
}
ADVICE = {
    "invalid_http": "The request is no valid HTTP/1.1, or repeats a header: mend the client.",
    "invalid_json": "The body is no JSON: mend the client.",
    "invalid_value": "A parameter has a wrong value; `param` names it.",
    "unsupported_parameter": "The parameter is known and not served; `param` names it: leave it out.",
    "context_length_exceeded": "Prompt and answer do not fit the context: shorten the prompt, or "
    "lower `max_tokens`.",
    "invalid_api_key": "The key is missing, wrong, or no longer in the file of keys.",
    "api_key_expired": "The key's `expires` has passed: ask for a new one.",
    "api_key_revoked": "The key was revoked: ask for a new one.",
    "parallel_limit_exceeded": "As many requests of the key as it may have are in progress.",
    "token_budget_exceeded": "The key has used its tokens of this day, which ends at 00:00 UTC.",
    "permission_denied": "The key may not do this.",
    "model_not_found": "`GET /v1/models` lists what is served.",
    "unknown_url": "The path is not served.",
    "not_found": "The file, batch or response does not exist, or belongs to another tenant.",
    "method_not_allowed": "The header `Allow` lists the methods.",
    "request_timeout": "The body came too slowly, or not at all: send it again.",
    "conflict": "The file or batch is in a state that does not allow this.",
    "request_in_progress": "The first request with this `Idempotency-Key` still runs: wait for it.",
    "request_too_large": "The body is above `gateway.body_bytes_max`, or needs more tokens than the "
    "key has in a minute.",
    "unsupported_media_type": "The `Content-Type` or `Content-Encoding` is not read: send JSON.",
    "headers_too_large": "The headers are too large: send fewer.",
    "quota_exceeded": "The tenant has as many files or batches as it may: delete some.",
    "rate_limit_exceeded": "The key has used its requests or tokens of this minute.",
    "queue_full": "The queue of the tier is full, or the gateway is: wait, or add capacity.",
    "tier_capacity": "The lower tiers may use a part of the room, and it is full.",
    "internal_error": "A fault of the server: try once more, then report it with the request id.",
    "worker_lost": "The request lost its rank four times: it may be what ends them. Do not repeat it.",
    "not_implemented": "This gateway has no files and batches: set `batches.data_dir`.",
    "no_healthy_workers": "No cell can be reached: the gateway waits for one, and so should you.",
    "not_serving": "The cell serves no layout at present, as while it starts.",
    "storage_full": "The server has no room for more files and batches.",
    "storage_unavailable": "The store of files and batches is away.",
    "draining": "This gateway shuts down: another one takes the request.",
    "too_many_connections": "The gateway, or your address, has all the connections that it may.",
    "switching_timeout": "No layout served in time: see `aileron status`.",
    "deadline_exceeded": "The request's own deadline has passed.",
}
HEAD = """# HTTP API

The serving port (8000) has OpenAI's and Anthropic's routes by an allow-list: vLLM's routes that are not listed do not
exist here. The admin port (8001) has the state of the cell. `python -m tests.harness.docs` writes this page from the
code's tables.

## Routes of the serving port

Every route but the probes needs a key where the gateway has a file of keys.

"""
TIERS = """
## Tiers

The tier of a request is its header `{header}`, else its objective, else its `service_tier`, else the default of its
key. It is at most the key's highest tier. Goals and queues are the defaults of [`slo`](configuration.md#slo) and
[`coordinator.tiers`](configuration.md#coordinatortiers).

"""
ERRORS = """
## Errors

Every error has OpenAI's shape, on Anthropic's routes theirs:

```json
{"error": {"message": "…", "type": "rate_limit_error", "param": null, "code": "queue_full"}}
```

A stream that cannot continue ends with an event of this shape. Branch on `code`; messages may change. *Again*
shows if the same request may help; OpenAI's and Anthropic's clients follow it by themselves.

"""
ADMIN_HEAD = """
## Routes of the admin port

On loopback it answers this machine's programs and the live page. With `AILERON_ADMIN_KEY` in the coordinator's
environment every call but {open} needs it: `Authorization: Bearer KEY`.

"""


def page() -> str:
    """The whole page."""
    served = {f"{method} {path}" for method, path in VLLM_ROUTES | OWN_ROUTES | BATCH_ROUTES}
    _check(ROUTES, served, "a route")
    _check(ADMIN, admin_routes(), "a route of the admin port")
    _check(ADVICE, set(CODES), "an error's code")
    open_paths = " and ".join(f"`{path}`" for path in sorted(OPEN_ADMIN_PATHS))
    return "".join(
        [
            HEAD + table(("route", "answer"), _routes(ROUTES, OPEN_PATHS)),
            "\n## Headers of requests\n\n" + table(("header", "meaning"), _named(REQUEST_HEADERS)),
            "\n## Headers of answers\n\n" + table(("header", "meaning"), _named(ANSWER_HEADERS)),
            TIERS.format(header="X-Priority-Tier") + table(TIER_HEAD, _tiers()),
            ERRORS + table(("status", "code", "again", "what it means"), _errors()),
            ADMIN_HEAD.format(open=open_paths),
            table(("route", "answer"), _routes(ADMIN, frozenset())),
        ]
    )


TIER_HEAD = (
    "tier",
    "`service_tier`",
    "goal: first token",
    "goal: per token",
    "queue",
    "longest wait",
)


def _check(texts: dict[str, str], known: set[str], what: str) -> None:
    if odd := sorted(known ^ set(texts)):
        raise SystemExit(f"{what} without a text here, or a text without one: {odd}.")


def admin_routes() -> set[str]:
    """The routes of the admin port; nothing is asked, so the state that they answer is absent."""
    state: Any = SimpleNamespace(core=None, clock=None)
    guard = build_admin(cast("AdminContext", state), AdminKeys({}))
    routes = [route for route in cast("Any", guard)._app.routes if isinstance(route, APIRoute)]
    return {f"{method} {route.path}" for route in routes for method in route.methods}


def _routes(texts: dict[str, str], open_paths: frozenset[str]) -> Iterator[tuple[str, str]]:
    for name, text in texts.items():
        is_open = name.partition(" ")[2] in open_paths
        yield f"`{name.replace(':path', '')}`", f"{text}{' Needs no key.' if is_open else ''}"


def _named(texts: dict[str, str]) -> list[tuple[str, str]]:
    return [(f"`{name}`", text) for name, text in texts.items()]


def _tiers() -> Iterator[tuple[str, ...]]:
    goals, queues = SloConfig(), TiersConfig()
    assert TIER_HEADER == "x-priority-tier"
    for tier in Tier:
        name = tier_name(tier)
        words = [f"`{each}`" for each, of in _TIER_OF_SERVICE_TIER.items() if of is tier]
        goal, queue = getattr(goals, name), getattr(queues, name)
        first, each = (
            "none" if value is None else f"{value:,.0f} ms"
            for value in (goal.ttft_ms, goal.tpot_ms)
        )
        wait = f"{queue.wait_ms / 1_000:,.0f} s"
        yield f"`{name}`", ", ".join(words), first, each, f"{queue.queue_tasks_max:,}", wait


def _errors() -> Iterator[tuple[str, ...]]:
    for code, (status, _) in sorted(CODES.items(), key=lambda each: each[1][0]):
        yield str(status), f"`{code}`", _again(code, status), ADVICE[code]


def _again(code: str, status: int) -> str:
    headers = dict(api_error(code, "").headers())
    if b"x-should-retry" in headers:
        return "no"
    if b"retry-after" in headers:
        return "after `Retry-After`"
    return "once" if (status >= 500 and code != "not_implemented") or status == 408 else "no"
