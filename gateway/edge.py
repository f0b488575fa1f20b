"""The outermost ASGI layer: what every request passes before vLLM's app, and every answer after it.

It opens only listed routes, bounds requests and bodies, resolves the tier and hands it to vLLM,
names the request, and gives every error OpenAI's shape. A stream's status line is held back until
its first event, so that a request that fails before its first token still gets a proper status.
"""

import asyncio
import re
import uuid
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.protocol.messages import Tier
from gateway.answer import Answer, ClientStalledError
from gateway.errors import ApiError, RequestState, api_error, current_request
from gateway.routes import find_route
from gateway.tiers import (
    PRIORITY_OF_TIER,
    TIER_HEADER,
    VLLM_PRIORITY_HEADER,
    tier_of_body,
    tier_of_header,
)

REQUESTS_MAX = 4_096
"""Most requests that are answered at once; one more is refused with 429."""

BODY_BYTES_MAX = 32 * 1024**2
"""Largest body of a request."""

BODY_WAIT_S = 60.0
"""How long a client may take to send its body."""

REQUEST_ID_HEADER = "x-request-id"

Headers = list[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_OWN_HEADERS = frozenset(
    name.encode()
    for name in (REQUEST_ID_HEADER, VLLM_PRIORITY_HEADER, "x-data-parallel-rank", "content-length")
)
"""Headers that reach vLLM only as the gateway sets them."""

log = structlog.get_logger(__name__)


class ClientGoneError(Exception):
    """The client went away before its request was complete."""


class Edge:
    """Wraps vLLM's app; `uvicorn` calls it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.requests = 0
        """Requests with a body that are being answered, until their last byte."""
        self.idle = asyncio.Event()
        """Set while there are none of them."""
        self.idle.set()
        self.draining = False
        """Whether new requests are refused because the process ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = _decode(scope["headers"])
        request_id = _request_id(headers.get(REQUEST_ID_HEADER, ""))
        answer = Answer(send, request_id)
        try:
            error = await self._serve(scope, receive, answer, headers)
            if error is not None:
                await answer.refuse(error)
        except (ClientGoneError, ClientStalledError) as gone:
            log.info("client_lost", request_id=request_id, reason=type(gone).__name__)
        except Exception:
            # The last resort for every bug of ours and of vLLM's: the client gets a 500.
            log.exception("request_failed", request_id=request_id, path=scope["path"])
            await answer.fail()
        finally:
            answer.close()

    async def _serve(
        self, scope: Scope, receive: Receive, answer: Answer, headers: dict[str, str]
    ) -> ApiError | None:
        """Pass the request to the app, or return why not."""
        method = scope["method"]
        if method == "OPTIONS" and "access-control-request-method" in headers:
            method = headers["access-control-request-method"]
        if (error := find_route(method, scope["path"])) is not None:
            return error
        if scope["method"] != "POST":
            await self._app(scope, receive, answer.send)
            return None
        if self.draining:
            return api_error("draining", "This server is shutting down.")
        if self.requests >= REQUESTS_MAX:
            return api_error("queue_full", "The gateway serves as many requests as it can.")
        self.requests += 1
        self.idle.clear()
        try:
            return await self._serve_body(scope, receive, answer, headers)
        finally:
            self.requests -= 1
            if not self.requests:
                self.idle.set()

    async def _serve_body(
        self, scope: Scope, receive: Receive, answer: Answer, headers: dict[str, str]
    ) -> ApiError | None:
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return api_error("unsupported_media_type", "The body must be application/json.")
        body = await _read_body(receive, headers)
        if isinstance(body, ApiError):
            return body
        resolved = _resolve_tier(headers, body)
        if isinstance(resolved, ApiError):
            return resolved
        answer.tier, body = resolved
        answer.request = RequestState()
        inner = {**scope, "headers": _headers_for_vllm(scope["headers"], answer, len(body))}
        token = current_request.set(answer.request)
        try:
            await self._app(inner, _Replay(body, receive), answer.send)
        finally:
            current_request.reset(token)
        return None


class _Replay:
    """Gives the body that was read already, then what the client does next."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _read_body(receive: Receive, headers: dict[str, str]) -> bytes | ApiError:
    too_large = api_error(
        "request_too_large", f"A request's body may have {BODY_BYTES_MAX} bytes at most."
    )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > BODY_BYTES_MAX:
        return too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > BODY_BYTES_MAX:
                    return too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return api_error("request_timeout", "The request's body did not arrive in time.")


def _resolve_tier(headers: dict[str, str], body: bytes) -> tuple[Tier, bytes] | ApiError:
    """The header wins over the body's `service_tier`, which must be valid all the same."""
    of_body = tier_of_body(body)
    if isinstance(of_body, ApiError) or TIER_HEADER not in headers:
        return of_body
    tier = tier_of_header(headers[TIER_HEADER])
    return tier if isinstance(tier, ApiError) else (tier, of_body[1])


def _headers_for_vllm(headers: Headers, answer: Answer, length: int) -> Headers:
    kept = [(name, value) for name, value in headers if name.lower() not in _OWN_HEADERS]
    own = {
        REQUEST_ID_HEADER: answer.request_id,
        VLLM_PRIORITY_HEADER: str(PRIORITY_OF_TIER[answer.tier]),
        "content-length": str(length),
    }
    return kept + [(name.encode(), value.encode()) for name, value in own.items()]


def _decode(headers: Any) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def _request_id(wanted: str) -> str:
    return wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
