"""Raw bytes against uvicorn with our connections, around a small application."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, cast

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.http import connection
from gateway.http.connection import HEADER_BYTES_MAX, HEADERS_MAX, Connection, ConnectionLimits

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
Talk = Callable[..., Awaitable[bytes]]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read the body unless the path says not to; say how long it was."""
    request = Request(scope, receive)
    if scope["path"] == "/refuse":
        await JSONResponse({"refused": True}, 413)(scope, receive, send)
        return
    if scope["path"] == "/stream":

        async def events() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"data: x\n\n"
                await asyncio.sleep(0.01)

        await StreamingResponse(events())(scope, receive, send)
        return
    body = await request.body()
    await Response(f"got {len(body)}")(scope, receive, send)


class Served:
    def __init__(self) -> None:
        self.limits = ConnectionLimits(1_000)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=cast(type[Connection], partial(Connection, limits=self.limits)),
                lifespan="off",
                log_config=None,
                access_log=False,
                ws="none",
            )
        )
        self.listener = listener

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    work = asyncio.create_task(made.server.serve(sockets=[made.listener]))
    while not made.server.started:
        await asyncio.sleep(0.01)
    yield made
    made.server.should_exit = True
    await work


@pytest.fixture
def talk(served: Served) -> Talk:
    async def talk(*parts: bytes, pause_s: float = 0.0, limit_s: float = 30.0) -> bytes:
        """Send parts, then read until the server closes or says nothing more."""
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
            answer = b""
            while True:
                try:
                    more = await asyncio.wait_for(reader.read(65_536), limit_s)
                except TimeoutError:
                    return answer + b"<open>"
                if not more:
                    return answer
                answer += more
        except ConnectionError:
            return b"<reset>"
        finally:
            writer.close()

    return talk


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def refusal(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


async def test_plain_requests_pass(talk: Talk) -> None:
    first = POST + b"Content-Length: 3\r\n\r\nabc"
    second = GET + b"Connection: close\r\n\r\n"
    answer = await talk(first + second)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"got 3" in answer


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"X-%d: 1\r\n" % n for n in range(HEADERS_MAX + 1)),
        b"X-Long: " + b"a" * HEADER_BYTES_MAX + b"\r\n",
        b"X-Long: " + b"a" * 100 * 1024 + b"\r\n",
        b"".join(b"X-%d: %s\r\n" % (n, b"a" * 1_000) for n in range(40)),
    ],
)
async def test_too_many_or_too_large_headers_are_refused(talk: Talk, headers: bytes) -> None:
    assert refusal(await talk(GET + headers + b"\r\n")) == (431, "headers_too_large")


async def test_as_many_headers_as_allowed_pass(talk: Talk) -> None:
    headers = b"".join(b"X-%d: %s\r\n" % (n, b"a" * 100) for n in range(HEADERS_MAX - 2))
    answer = await talk(GET + headers + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_long_url_is_refused_before_it_ends(talk: Talk) -> None:
    assert refusal(await talk(b"GET /" + b"a" * 100_000)) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\nGET /x",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        POST + b"Content-Length: +3\r\n\r\nabc",
        POST + b"Content-Length: 3, 3\r\n\r\nabc",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 99999999999999999999\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        GET + b"X-Folded: a\r\n b\r\n\r\n",
        GET + b"X-Nul: a\x00b\r\n\r\n",
        GET + b"X-Bare: a\rb\r\n\r\n",
        GET + b"No colon\r\n\r\n",
        GET + b": no name\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_not_one_clear_request_is_refused(talk: Talk, request_bytes: bytes) -> None:
    """Each of these is read differently by some other server: nothing may be smuggled behind it."""
    answer = await talk(request_bytes)
    assert refusal(answer) == (400, "invalid_http")
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1


@pytest.mark.parametrize(
    "chunk", [b"zz\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"3\r\nabcd\r\n"]
)
async def test_broken_chunks_end_the_connection(talk: Talk, chunk: bytes) -> None:
    answer = await talk(POST + b"Transfer-Encoding: chunked\r\n\r\n", chunk, pause_s=0.05)
    assert b"200 OK" not in answer
    assert not answer.endswith(b"<open>")


async def test_late_headers_are_not_waited_for(
    talk: Talk, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_WAIT_S", 1.0)
    assert refusal(await talk(GET + b"X-Slow: ")) == (408, "request_timeout")
    assert await talk() == b"", "a connection that says nothing is closed without an answer"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    answer = asyncio.create_task(reader.read())
    writer.write(GET + b"X-Slow: ")
    async with asyncio.timeout(30):
        while not answer.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
    writer.close()
    assert refusal(await answer) == (408, "request_timeout")


async def test_second_request_of_a_connection_has_the_same_time(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_WAIT_S", 1.0)
    answer = await talk(GET + b"\r\n", GET, pause_s=1.2)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 408" in answer


async def test_idle_connection_outlives_the_time_for_headers(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADER_WAIT_S", 1.0)
    again = GET + b"Connection: close\r\n\r\n"
    assert (await talk(GET + b"\r\n", again, pause_s=1.2)).count(b"HTTP/1.1 200 OK") == 2


async def test_refused_client_that_is_still_sending_gets_the_answer(talk: Talk) -> None:
    head = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n"
    answer = await talk(head, b"a" * 100_000, b"a" * 100_000, pause_s=0.05)
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b'{"refused":true}')


async def test_a_body_behind_its_answer_does_not_cost_the_connection(talk: Talk) -> None:
    """A client that was not told of an end sends its next request on the same connection."""
    head = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
    last = GET + b"Connection: close\r\n\r\n"
    answer = await talk(head, b"ab", b"cd", head, b"abcd", last, pause_s=0.1)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"413", b"413", b"200"]


async def test_a_body_that_does_not_end_behind_its_answer_does(talk: Talk) -> None:
    head = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
    answer = await talk(head, b"ab")
    assert answer.startswith(b"HTTP/1.1 413")
    assert not answer.endswith(b"<open>")


async def test_refused_client_that_never_stops_sending_is_cut_off(
    talk: Talk, served: Served
) -> None:
    head = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n"
    await talk(head, *[b"a" * 100_000] * 120, pause_s=0.001)
    await until(lambda: not served.open)


async def test_garbage_behind_a_request_never_reaches_its_answer(talk: Talk) -> None:
    answer = await talk(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\x01garbage", pause_s=0.1)
    assert b"HTTP/1.1 400" not in answer
    assert not answer.endswith(b"0\r\n\r\n"), "cut off is not complete"


async def test_connections_are_bounded(served: Served, talk: Talk) -> None:
    served.limits.connections_max = 2
    first, second = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
    for _, writer in (first, second):
        writer.write(GET + b"\r\n")
    await until(lambda: served.open == 2)
    assert refusal(await talk(GET + b"\r\n")) == (503, "too_many_connections")
    refusals = [await talk(GET + b"\r\n") for _ in range(50)]
    waits_ms = {answer.partition(b"retry-after-ms: ")[2].split()[0] for answer in refusals}
    assert len(waits_ms) > 10, "who is refused together does not come again together"
    for _, writer in (first, second):
        writer.close()
    await until(lambda: not served.open)
    assert (await talk(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_connections_of_one_address_are_bounded(served: Served, talk: Talk) -> None:
    served.limits.per_address_max = 1
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(GET + b"\r\n")
    await until(lambda: served.open == 1)
    assert refusal(await talk(GET + b"\r\n")) == (503, "too_many_connections")
    writer.close()
    await until(lambda: not served.open)
    assert (await talk(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await until(lambda: not served.limits.addresses)


async def test_thousand_connections_that_come_and_go_leave_nothing(served: Served) -> None:
    for _ in range(10):
        pairs = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", served.port) for _ in range(100))
        )
        for number, (_, writer) in enumerate(pairs):
            writer.write((GET + b"\r\n", GET, b"", b"\x00")[number % 4])
            writer.transport.abort()
    await until(lambda: not served.open)
    assert not served.limits.addresses
    assert not served.server.server_state.tasks


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
"""What Java's HttpClient sends with its first request."""
OFFERS = [
    H2C,
    b"connection: upgrade\r\nupgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    b"Upgrade: TLS/1.0\r\nConnection: keep-alive, Upgrade\r\n",
]


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("pieces", [1, 2, 50])
async def test_an_offer_of_another_protocol_is_declined(
    talk: Talk, offer: bytes, pieces: int
) -> None:
    """The request is served with its body, and so is the next one on the connection."""
    sized = POST + offer + b"Content-Length: 5\r\n\r\nhello"
    chunked = POST + offer + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    plain = GET + offer + b"\r\n"
    data = sized + chunked + plain + GET + b"Connection: close\r\n\r\n"
    size = -(-len(data) // pieces)
    answer = await talk(*(data[at : at + size] for at in range(0, len(data), size)))
    assert re.findall(rb"got \d", answer) == [b"got 5", b"got 3", b"got 0", b"got 0"]
    assert answer.count(b"HTTP/1.1 200 OK") == 4


async def test_an_offer_with_close_closes(talk: Talk) -> None:
    answer = await talk(GET + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer


@pytest.mark.parametrize("path", [b"/stream", b"/"])
@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"])
async def test_clients_of_http_1_0_get_no_chunks(talk: Talk, path: bytes, keep: bytes) -> None:
    head, _, body = (await talk(b"GET %s HTTP/1.0\r\n%s\r\n" % (path, keep))).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert body == (b"data: x\n\n" * 100 if path == b"/stream" else b"got 0")


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000000\r\n", b"Transfer-Encoding: chunked\r\n"]
)
async def test_an_answer_before_a_long_body_says_that_the_connection_closes(
    talk: Talk, framing: bytes
) -> None:
    answer = await talk(POST.replace(b"/ ", b"/refuse ") + framing + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer


async def test_many_offers_at_once_are_refused(talk: Talk) -> None:
    """Each offer costs a new parser, so a client cannot have thousands of them for nothing."""
    answer = await talk((GET + b"Upgrade: a\r\nConnection: upgrade\r\n\r\n") * 4_000)
    assert answer.count(b"HTTP/1.1 200 OK") <= connection.OFFERS_MAX or answer == b"<reset>"


async def test_a_connection_is_not_open_for_ever_after_a_late_body(
    served: Served, talk: Talk
) -> None:
    served.server.config.timeout_keep_alive = 1
    head = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
    answer = await talk(head, b"ab", b"cd", pause_s=0.1, limit_s=5)
    assert answer.startswith(b"HTTP/1.1 413")
    assert not answer.endswith(b"<open>")
