"""Sends one request over aiohttp and times its stream. Thin: `answer` judges it.

Never raises for faults of a server or a network: every outcome is a `RequestRecord`. No retries and
no redirects, so that each failure counts once. Callers stop a request by cancelling it, which is
passed on.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from loadgen.client.answer import MAX_MESSAGE_CHARS, AnswerReader, Endpoint, error_in
from loadgen.client.meter import Meter
from loadgen.client.payload import PATHS, REQUEST_ID_HEADER, TIER_HEADER, request_headers
from loadgen.report.records import MS_PER_S, Failure, FailureKind, Reply, RequestRecord
from loadgen.workload.plan import PlannedRequest

MAX_ERROR_BODY_BYTES = 64 * 1024
# After [DONE] only the end of the body is missing; waiting for it keeps the connection usable.
LINGER_S = 1.0
# Below the 5 s after which uvicorn closes idle connections, so that none is used as it closes.
IDLE_CONNECTION_S = 2.0
REFUSED_STATUSES = frozenset({429, 503})

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and the longest time from a request's send to its last byte."""

    base_url: str
    endpoint: Endpoint
    timeout_s: float


def open_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """Return a session with these headers and no limits: the loops bound requests in flight."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests of one run to one target; `clock` gives seconds since the run began."""

    session: aiohttp.ClientSession
    target: Target
    clock: Clock
    meter: Meter

    async def send(self, planned: PlannedRequest, body: bytes) -> RequestRecord:
        """Send one request and follow its stream to the end, a failure or the timeout."""
        exchange = _Exchange(AnswerReader(self.target.endpoint))
        sent_s = self.clock()
        failure = await self._guarded(planned, body, exchange, sent_s)
        answer = exchange.reader.answer()
        if exchange.reader.ended:
            # After the stream has reported its end, faults of the connection do not matter.
            failure = exchange.reader.failure_at_end()
        ended_s = self.clock() if answer.ended_s is None else answer.ended_s
        return RequestRecord(planned, sent_s, ended_s, exchange.reply, answer, failure)

    async def _guarded(
        self, planned: PlannedRequest, body: bytes, exchange: "_Exchange", sent_s: float
    ) -> Failure | None:
        """Run the exchange; turn network errors into a failure."""
        timeout_s = self.target.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(planned, body, exchange, sent_s)
        except TimeoutError:
            return Failure(FailureKind.TIMEOUT, "timeout", f"no end within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Failure(FailureKind.CONNECTION_ERROR, type(error).__name__, _excerpt(str(error)))

    async def _exchange(
        self, planned: PlannedRequest, body: bytes, exchange: "_Exchange", sent_s: float
    ) -> Failure | None:
        async with self.session.post(
            self.target.base_url + PATHS[self.target.endpoint],
            data=body,
            headers=request_headers(planned),
            allow_redirects=False,
        ) as response:
            exchange.reply = Reply(
                response.status,
                response.headers.get(REQUEST_ID_HEADER),
                response.headers.get(TIER_HEADER),
            )
            if response.status != 200:
                return _status_failure(response.status, await _start_of_body(response))
            if response.content_type != "text/event-stream":
                text = f"the answer is {response.content_type}, not text/event-stream"
                return Failure(FailureKind.BAD_STREAM, "content_type", text)
            await self._follow(response, exchange.reader, sent_s)
            return exchange.reader.failure_at_end()

    async def _follow(
        self, response: aiohttp.ClientResponse, reader: AnswerReader, sent_s: float
    ) -> None:
        """Read the stream to its end, timing each chunk on arrival."""
        async for chunk in response.content.iter_any():
            now_s = self.clock()
            is_first = not reader.has_text
            count = reader.feed(chunk, now_s)
            if count:
                self.meter.chunks(count, now_s)
                if is_first:
                    self.meter.first_token((now_s - sent_s) * MS_PER_S, now_s)
            if reader.ended:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(response.content.readany(), LINGER_S)
                return


@dataclass(slots=True)
class _Exchange:
    """The state of a running request, outside its call so that no exception loses it."""

    reader: AnswerReader
    reply: Reply | None = None


async def _start_of_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an error, at most about `MAX_ERROR_BODY_BYTES`."""
    body = b""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= MAX_ERROR_BODY_BYTES:
            break
    return body


def _status_failure(status: int, body: bytes) -> Failure:
    """Return the failure for a status other than 200, with the server's code if it sent one."""
    kind = FailureKind.REFUSED if status in REFUSED_STATUSES else FailureKind.HTTP_ERROR
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    error = error_in(parsed) if isinstance(parsed, dict) else None
    if error is None:
        return Failure(kind, str(status), _excerpt(body.decode("utf-8", errors="replace")))
    # vLLM repeats the status as the code; once is enough.
    code = str(status) if error.code in (str(status), "unknown") else f"{status} {error.code}"
    return Failure(kind, code, error.message)


def _excerpt(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE_CHARS]
