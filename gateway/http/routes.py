"""What the serving port answers: an allow-list, and the gateway's own few routes.

Routes that are not listed here do not exist, so a route that vLLM adds stays closed until someone
opens it on purpose. `find_route` is called before the application is, and `close_other_routes`
removes the rest from the application as well.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import (
    MODEL_NOT_FOUND_MESSAGE,
    PARAMETERS,
    ApiError,
    api_error,
    parameter_in,
    strip_echo,
)
from gateway.http.body_guard import guard_bodies
from gateway.http.field_names import FieldNames, field_names
from gateway.http.messages_form import COUNT_TOKENS_PATH, MESSAGES_PATH

VLLM_ROUTES: Final[frozenset[tuple[str, str]]] = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", MESSAGES_PATH),
        ("POST", COUNT_TOKENS_PATH),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/version"),
    }
)
"""The routes of vLLM that stay open."""

MODEL_PATH = "/v1/models/{model:path}"
RESPONSE_PATH = "/v1/responses/{response}"
STORED_ROUTES: Final[frozenset[tuple[str, str]]] = frozenset(
    {
        *(("GET", RESPONSE_PATH), ("DELETE", RESPONSE_PATH), ("POST", f"{RESPONSE_PATH}/cancel")),
        ("GET", f"{RESPONSE_PATH}/input_items"),
    }
)
"""Routes of stored responses. None is stored, so each answers 404."""

OWN_ROUTES: Final[frozenset[tuple[str, str]]] = STORED_ROUTES | {
    *(("GET", "/health"), ("GET", "/ping"), ("GET", "/ready"), ("GET", MODEL_PATH)),
}

FILE_PATH = "/v1/files/{file}"
BATCH_PATH = "/v1/batches/{batch}"
BATCH_ROUTES: Final[frozenset[tuple[str, str]]] = frozenset(
    {
        *(("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", FILE_PATH), ("DELETE", FILE_PATH)),
        *(("GET", f"{FILE_PATH}/content"), ("POST", "/v1/batches"), ("GET", "/v1/batches")),
        *(("GET", BATCH_PATH), ("POST", f"{BATCH_PATH}/cancel")),
    }
)
"""The routes of files and batches, see `gateway.batches.api`."""

OPEN_PATHS: Final[frozenset[str]] = frozenset({"/health", "/ping", "/ready"})
"""Probes, which need no key."""

_ROUTES = VLLM_ROUTES | OWN_ROUTES | BATCH_ROUTES
_PATTERNS: Final = (
    (re.compile(r"/v1/models/.+()"), MODEL_PATH),
    (re.compile(r"/v1/responses/[^/]+(/cancel|/input_items)?"), RESPONSE_PATH),
    (re.compile(r"/v1/files/[^/]+(/content)?"), FILE_PATH),
    (re.compile(r"/v1/batches/[^/]+(/cancel)?"), BATCH_PATH),
)
"""Paths that contain a name, and their routes."""

_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)
_MODELS = b"/v1/models/"

_PLAIN_ERRORS = frozenset({"literal_error", "enum"})
"""Errors of pydantic that quote the allowed values; the others may quote the request."""

UNKNOWN_URL = "Unknown request URL: check the method and the path; docs/api.md lists all routes."
_ELSEWHERE: Final = (
    (
        frozenset(
            {
                *("embeddings", "embed", "rerank", "score", "pooling", "classify", "audio"),
                *("images", "videos", "moderations", "realtime"),
            }
        ),
        "This server generates text alone: it has no embeddings, scores, images and audio.",
    ),
    (
        frozenset({"assistants", "threads", "conversations", "vector_stores", "fine_tuning"}),
        "This server stores no conversations, documents and models: send the whole input.",
    ),
    (
        frozenset({"metrics", "admin"}),
        "Metrics and the admin API are on the admin port, 8001 unless another is set.",
    ),
)
"""First words of paths that others serve, and the sentence about them."""

OTHER_ROUTE = "other"
"""The name of all routes that do not exist."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now; `reason` is why not."""

    ready: bool
    reason: ApiError | None = None
    layout: str = ""
    epoch: int = 0


def takes_no_json(path: str) -> bool:
    """Return whether a POST to this path has no JSON body: its route reads the body."""
    return path == "/v1/files" or path.endswith("/cancel")


def find_route(method: str, path: str, raw_path: bytes = b"") -> ApiError | None:
    """Return None if the route exists, else the error.

    `raw_path` is the path as sent: this server decodes %2F to a slash, a proxy that filters paths
    may not. Only names of models may contain one.
    """
    if _ENCODED_SLASH.search(raw_path) and not raw_path.startswith(_MODELS):
        path = ""
    path = _named(path)
    methods = {known for known, route in _ROUTES if route == path}
    methods |= {"HEAD"} if "GET" in methods else set()
    if not methods:
        return api_error("unknown_url", _unknown(path))
    if method not in methods:
        allowed = ", ".join(sorted(methods))
        error = api_error("method_not_allowed", f"The method is not allowed here; use {allowed}.")
        return error.with_headers([(b"allow", allowed.encode())])
    return None


def _unknown(path: str) -> str:
    """Return the sentence about a path that is no route; it quotes routes, not the request."""
    words = [word for word in path.lower().split("/") if word not in ("", "v1")]
    plain = "/".join(words)
    known = sorted(
        route for _, route in _ROUTES if route in (f"/v1/{plain}", f"/{plain}") and "{" not in route
    )
    if known:
        return f"Unknown request URL: did you mean {known[0]}?"
    for names, sentence in _ELSEWHERE:
        if words and words[0] in names:
            return sentence
    return UNKNOWN_URL


def route_name(method: str, path: str) -> str:
    """Name the route in metrics: an existing route, or "other"."""
    if find_route(method, path) is not None:
        return OTHER_ROUTE
    return _named(path)


def _named(path: str) -> str:
    """Replace the name in a path by the route's placeholder."""
    for pattern, named in _PATTERNS:
        if found := pattern.fullmatch(path):
            return named + (found.group(1) or "")
    return path


def close_other_routes(app: FastAPI) -> None:
    """Leave only vLLM's listed routes in the application; raises if one of them is missing."""
    plain = [route for route in app.router.routes if isinstance(route, Route)]
    open_routes = [route for route in plain if _names(route) and _names(route) <= VLLM_ROUTES]
    missing = VLLM_ROUTES - {name for route in open_routes for name in _names(route)}
    if missing:
        raise RuntimeError(f"this vLLM lacks the routes {sorted(missing)}.")
    app.router.routes[:] = open_routes


def _names(route: Route) -> set[tuple[str, str]]:
    return {(method, route.path) for method in route.methods or ()}


def add_own_routes(app: FastAPI, readiness: Callable[[], Readiness]) -> None:
    """Add liveness, readiness, the retrieval of one model, and 404s for stored responses."""

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        now = readiness()
        if now.reason is not None:
            return _respond(now.reason)
        return JSONResponse({"status": "ready", "layout": now.layout, "epoch": now.epoch})

    async def retrieve_model(request: Request) -> Response:
        name = request.path_params["model"]
        models = await request.app.state.openai_serving_models.show_available_models()
        for card in models.data:
            if card.id == name:
                return JSONResponse(card.model_dump())
        return _respond(api_error("model_not_found", MODEL_NOT_FOUND_MESSAGE, "model"))

    async def find_response(_: Request) -> Response:
        text = "There is no such response: this server stores none, so send the whole input."
        return _respond(api_error("not_found", text, "response_id"))

    app.router.routes += [
        *(Route(path, find_response, methods=[method]) for method, path in STORED_ROUTES),
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route(MODEL_PATH, retrieve_model, methods=["GET"]),
    ]
    for route in app.router.routes:
        if isinstance(route, APIRoute):
            guard_bodies(route)
    names = _body_fields(app)

    async def refuse_request(_: Request, error: RequestValidationError) -> Response:
        return _respond(_invalid_request(error, names))

    app.exception_handler(RequestValidationError)(refuse_request)
    # vLLM's app may have been assembled already, with the handlers of that time.
    app.middleware_stack = None


def _body_fields(app: FastAPI) -> FieldNames:
    """Return the fields of all bodies that the application's routes take."""
    bodies = [route.body_field for route in app.router.routes if isinstance(route, APIRoute)]
    kinds: list[Any] = [body.field_info.annotation for body in bodies if body is not None]
    return field_names(TypeAdapter(kind).core_schema for kind in kinds)


def _invalid_request(error: RequestValidationError, names: FieldNames) -> ApiError:
    """Describe the fault in a request's body in one sentence."""
    first = error.errors()[0] if error.errors() else "The request is not valid."
    if not isinstance(first, dict):
        return api_error("invalid_value", str(first))
    text = str(first.get("msg", "")).removeprefix("Value error, ")
    named = getattr(first.get("ctx", {}).get("error"), "parameter", None) or parameter_in(text)
    if first.get("type") not in _PLAIN_ERRORS:
        text = strip_echo(text) or "the value is not valid"
    if first.get("type") == "json_invalid":
        return api_error("invalid_json", "The request's body is not valid JSON.")
    param = names.path_to(first.get("loc", ())[1:]) or (named if named in PARAMETERS else None)
    return api_error("invalid_value", f"{param}: {text}" if param else text, param)


def _respond(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), status_code=error.status, headers=headers)
