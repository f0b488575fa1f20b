"""A small OpenAI server with known latencies and faults, for tests of the load generator.

Real aiohttp on 127.0.0.1; the model's name in a request chooses what the server does with it.
"""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FIRST_TOKEN_S = 0.08
GAP_S = 0.02
PAUSE_S = 0.4

Body = dict[str, Any]
Behaviour = Callable[["Stream"], Awaitable[None]]


@dataclass
class FakeServer:
    """What came in, and where it listens."""

    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    came_at_s: list[float] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    switches: list[Body] = field(default_factory=list)
    admin_headers: list[dict[str, str]] = field(default_factory=list)
    admin_status: int = 200
    on_request: Callable[[], None] = lambda: None


@dataclass
class Stream:
    """One streaming answer that a behaviour writes."""

    body: Body
    is_chat: bool
    response: web.StreamResponse
    request: web.Request

    async def event(self, body: object) -> None:
        await self.response.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    async def token(self, text: str = "word ", finish: str | None = None) -> None:
        content = {"delta": {"content": text}} if self.is_chat else {"text": text}
        await self.event({"choices": [{"index": 0, "finish_reason": finish, **content}]})

    async def tokens(self, count: int, *, pause_before: int | None = None) -> None:
        await asyncio.sleep(FIRST_TOKEN_S)
        if self.is_chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            await self.event({"choices": [role]})
        for number in range(count):
            if number:
                await asyncio.sleep(PAUSE_S if number == pause_before else GAP_S)
            last = number == self.body["max_tokens"] - 1
            await self.token(finish="length" if last else None)

    async def ending(self) -> None:
        usage = {"prompt_tokens": 11, "completion_tokens": self.body["max_tokens"]}
        await self.event({"choices": [], "usage": usage})
        await self.response.write(b"data: [DONE]\n\n")


async def steady(stream: Stream) -> None:
    await stream.response.write(b": keep-alive\n\n")
    await stream.tokens(stream.body["max_tokens"])
    await stream.ending()


async def paused(stream: Stream) -> None:
    await stream.tokens(stream.body["max_tokens"], pause_before=2)
    await stream.ending()


async def opens_early(stream: Stream) -> None:
    """Chunks without text at once, as from a server whose parser waits; then text."""
    for _ in range(3):
        await stream.token("")
    await asyncio.sleep(PAUSE_S)
    await stream.token("word ", "length")
    await stream.ending()


async def pairs(stream: Stream) -> None:
    """Two tokens in each chunk."""
    count = stream.body["max_tokens"]
    for number in range(0, count, 2):
        await asyncio.sleep(GAP_S if number else FIRST_TOKEN_S)
        await stream.token("two words ", "length" if number + 2 >= count else None)
    await stream.ending()


async def truncated(stream: Stream) -> None:
    await stream.tokens(3)


async def in_band(stream: Stream) -> None:
    await stream.tokens(2)
    await stream.event({"error": {"message": "lost", "type": "x", "code": "switching_timeout"}})
    await stream.response.write(b"data: [DONE]\n\n")


async def stuck(stream: Stream) -> None:
    await stream.tokens(1)
    await asyncio.sleep(30)


async def cut(stream: Stream) -> None:
    await stream.tokens(2)
    transport = stream.request.transport
    assert transport is not None
    transport.abort()


async def no_usage(stream: Stream) -> None:
    await stream.tokens(stream.body["max_tokens"])
    await stream.response.write(b"data: [DONE]\n\n")


async def long_wait(stream: Stream) -> None:
    await asyncio.sleep(1.5)
    await stream.token(finish="stop")
    await stream.ending()


BEHAVIOURS: dict[str, Behaviour] = {
    "steady": steady,
    "paused": paused,
    "opens-early": opens_early,
    "pairs": pairs,
    "truncated": truncated,
    "in-band": in_band,
    "stuck": stuck,
    "cut": cut,
    "no-usage": no_usage,
    "long-wait": long_wait,
}
REFUSALS = {
    "busy": (429, {"error": {"message": "full", "type": "t", "code": "queue_full"}}),
    "draining": (503, {"error": {"message": "no", "type": "t", "code": "draining"}}),
    "missing": (404, {"error": {"message": "no", "type": "t", "code": "model_not_found"}}),
    "vllm-busy": (503, {"error": {"message": "no", "type": "t", "code": 503}}),
}
MIXED = ("steady", "truncated", "in-band", "busy", "cut")


def build_app(server: FakeServer) -> web.Application:
    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "steady"}, {"id": "other"}]})

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        server.on_request()
        server.came_at_s.append(time.monotonic())
        server.bodies.append(body)
        server.headers.append(dict(request.headers))
        model = body["model"]
        if model == "mixed":
            model = MIXED[(len(server.bodies) - 1) % len(MIXED)]
        if model in REFUSALS:
            status, answer = REFUSALS[model]
            return web.json_response(answer, status=status)
        if model == "not-a-stream":
            return web.json_response({"choices": [{"text": "all at once"}]})
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "X-Request-Id": request.headers["X-Request-Id"],
                "X-Priority-Tier": "standard",
            }
        )
        await response.prepare(request)
        server.in_flight += 1
        server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            stream = Stream(body, request.path.endswith("chat/completions"), response, request)
            await BEHAVIOURS[model](stream)
        finally:
            server.in_flight -= 1
        return response

    async def admin(request: web.Request) -> web.Response:
        server.admin_headers.append(dict(request.headers))
        if request.path.endswith("layout"):
            return web.json_response({"layout": "dp2", "epoch": 1})
        return web.json_response({"switches": server.switches}, status=server.admin_status)

    app = web.Application()
    app.router.add_get("/admin/layout", admin)
    app.router.add_get("/admin/switches", admin)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", generate)
    app.router.add_post("/v1/chat/completions", generate)
    return app


async def serve(server: FakeServer, ready: threading.Event, stop: asyncio.Event) -> None:
    runner = web.AppRunner(build_app(server), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    ready.set()
    await stop.wait()
    await runner.cleanup()
