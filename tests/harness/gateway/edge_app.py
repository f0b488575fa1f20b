"""A small application behind the edge, and an ASGI server's side of one request."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from gateway.errors import api_error, current_request

CHAT = "/v1/chat/completions"
FAILURE = api_error("queue_full", "Full.")


class Broken(Exception):
    pass


async def echo(request: Request) -> Response:
    """Tell what reached the application."""
    body = await request.body()
    return JSONResponse({"headers": dict(request.headers), "body": body.decode()})


async def stream(request: Request) -> Response:
    """Send what the body says; `fail` notes a task's failure, `raise` is a bug."""

    items = json.loads(await request.body())["events"]

    async def events() -> AsyncIterator[str]:
        for item in items:
            if item == "fail":
                state = current_request.get()
                assert state is not None
                state.failure = FAILURE
                yield 'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
            elif item == "raise":
                raise Broken
            else:
                yield f"{item}\n\n" if item.startswith("event: ") else f"data: {item}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def tokenize(request: Request) -> Response:
    """Answer as the body says."""
    asked = json.loads(await request.body())
    if asked.get("raise"):
        raise Broken
    return JSONResponse(asked["answer"], status_code=asked["status"])


def application() -> Starlette:
    routes = [
        Route(CHAT, echo, methods=["POST"]),
        Route("/v1/completions", stream, methods=["POST"]),
        Route("/v1/responses", stream, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/version", echo, methods=["GET"]),
        Route("/metrics", echo, methods=["GET"]),
    ]
    return Starlette(routes=routes)


def error_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert response.headers["x-request-id"]
    assert response.headers["x-priority-tier"]
    return response.status_code, error["code"]


class Browser:
    """An ASGI server's side of one request, under the test's control."""

    def __init__(self, body: dict[str, Any], *, reads: bool = True) -> None:
        self.sent: list[Message] = []
        self._body = json.dumps(body).encode()
        self._asked = 0
        self._reads = reads

    async def receive(self) -> Message:
        self._asked += 1
        if self._asked == 1:
            return {"type": "http.request", "body": self._body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if not self._reads:
            await asyncio.Event().wait()

    def scope(self, path: str) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"host", b"gateway")]
        return {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
