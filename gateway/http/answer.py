"""One answer to a client: its headers, its error shape, and the delayed start of a stream.

Called by the edge; `Answer.send` takes the place of the ASGI server's `send`.
"""

import asyncio
from collections.abc import Generator
from enum import Enum
from functools import partial
from typing import Any, Final

from starlette.types import Message, Send

from coordinator.protocol.terms import Tier
from gateway.admission.idempotency import StoredAnswer
from gateway.admission.shared_storage import WaitBudget
from gateway.admission.tiers import service_tier_name, tier_name
from gateway.errors import (
    SERVER_ERROR_MESSAGE,
    ApiError,
    RequestState,
    api_error,
    shape_error,
)
from gateway.http.jitter import with_jitter
from gateway.http.spans import RequestSpan
from gateway.http.stream_forms import StreamForm, stream_form

KEEP_ALIVE_S = 15.0
"""Silence in a stream after which a comment is sent, so that proxies keep it open."""

KEEP_ALIVE = b": keep-alive\n\n"

SEND_STALL_S = 60.0
"""Longest time without a read by the client, before its request ends."""

ERROR_BODY_BYTES_MAX = 1024**2
"""Most bytes of the application's error body that are read to reshape it."""

_ENDED: Final = object()
"""What an await that has ended waits for; one that yields waits for None."""

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class ClientStalledError(Exception):
    """The client does not read its answer."""


class _Phase(Enum):
    BEFORE = 0
    """Nothing was sent; a start message may be held."""
    ERROR = 1
    """An error's body is being collected."""
    OPEN = 2
    """The start was sent; the body passes through."""
    STREAM = 3
    """The start of an event stream was sent; events pass, an error ends it."""
    CLOSED = 4
    """The answer is complete; later messages are ignored."""


class Answer:
    """The state of one answer."""

    def __init__(
        self, send: Send, request_id: str, path: str = "", answer_id: str | None = None
    ) -> None:
        """`send` is the ASGI server's; the answer's object is named by `answer_id`."""
        self._send = send
        self._form: StreamForm = stream_form(path, request_id)
        self._lock = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._began_s = asyncio.get_running_loop().time()
        self._sent_at_s = 0.0
        self._last: bytes = b""
        # Events of a stream that are held until there is a token.
        self._preface: list[bytes] = []
        self._stalled = False
        self._patience: asyncio.Timeout | None = None
        """Time limit of the send in progress; None if there is none."""
        self._phase = _Phase.BEFORE
        self._start: Message = {}
        self._error_body = bytearray()
        self.request_id = request_id
        self.answer_id = answer_id or request_id
        self.status = 0
        """The status that was sent; 0 before that."""
        self.error_code = ""
        """Code of the error that the answer is, or that ended it."""
        self.is_abandoned = False
        """Whether the client left before the answer was complete."""
        self.tier = Tier.STANDARD
        self.request = RequestState()
        self.tenant: str | None = None
        """The tenant that the request belongs to; None if its client is not identified."""
        self.key_id = ""
        """The id of the request's key; empty without one."""
        self.model: str | None = None
        """The model that the request names; None before its body is read."""
        self.span: RequestSpan | None = None
        """The request's span, if it is traced."""
        self.echoes_tier = False
        """Whether the body names the tier, because the request's body did."""
        self.stored: StoredAnswer | None = None
        """The whole answer, after it was sent in one piece without an error."""
        self._budget, self._budget_after = WaitBudget(), WaitBudget()
        self.headers: list[tuple[bytes, bytes]] = []
        """Extra headers of this answer."""

    async def send(self, message: Message) -> None:
        """Take a message of the app; raises `ClientStalledError` to end it."""
        if self._stalled:
            raise ClientStalledError
        if message["type"] == "http.response.body":
            async with self._lock:
                await self._send_body(message)
        elif message["type"] == "http.response.start":
            self._start = message
            if message["status"] >= 400:
                self._phase = _Phase.ERROR
            elif _is_stream(message):
                self._keeper = asyncio.create_task(self._keep_alive())

    @property
    def wait_budget(self) -> WaitBudget:
        """Remaining wait for Redis; a separate one after the last byte, when no client waits."""
        return self._budget_after if self._phase is _Phase.CLOSED else self._budget

    @property
    def began_s(self) -> float:
        """When the request arrived, on the event loop's clock, which is also the relay's."""
        return self._began_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return asyncio.get_running_loop().time() - self._began_s

    def client_gone(self) -> None:
        """Record that the client no longer reads."""
        self.is_abandoned |= self._phase is not _Phase.CLOSED

    def give_up(self) -> None:
        """End a stream whose client does not read, without waiting any longer."""
        if self._patience is not None and self._phase is _Phase.STREAM:
            self._patience.reschedule(0)

    def close(self) -> None:
        """Stop the keep-alive comments: the app has returned."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun."""
        if self._phase in (_Phase.BEFORE, _Phase.ERROR):
            await self._send_error(error)

    async def repeat(self, stored: StoredAnswer) -> None:
        """Replay the stored answer of an earlier request."""
        await self._send_start(stored.status, [*stored.headers, (b"idempotent-replayed", b"true")])
        await self._send_last(stored.body)

    async def fail(self) -> None:
        """End the answer after an exception: with an error event or an error answer."""
        error = self.request.failure or api_error("internal_error", SERVER_ERROR_MESSAGE)
        if self._phase is _Phase.STREAM:
            await self._send_error_event(error)
        else:
            await self.refuse(error)

    async def _send_body(self, message: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        match self._phase:
            case _Phase.ERROR:
                self._error_body += body[: ERROR_BODY_BYTES_MAX - len(self._error_body)]
                if not more:
                    status = self._start["status"]
                    error = shape_error(status, bytes(self._error_body), self.request.failure)
                    await self._send_error(error)
            case _Phase.BEFORE if _is_stream(self._start):
                await self._begin_stream(message)
            case _Phase.BEFORE:
                await self._begin_whole(message)
            case _Phase.STREAM:
                await self._send_event(message)
            case _Phase.OPEN:
                await self._out(message)
                if not more:
                    self._phase = _Phase.CLOSED
            case _Phase.CLOSED:
                pass

    async def _keep_alive(self) -> None:
        """Send a comment whenever a stream is silent; vLLM's way needs a task per event."""
        clock = asyncio.get_running_loop().time
        self._sent_at_s = clock()
        comment = {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
        while self._phase in (_Phase.BEFORE, _Phase.STREAM):
            wait_s = self._sent_at_s + KEEP_ALIVE_S - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            try:
                await self.send(comment)
            except ClientStalledError:
                return

    async def _begin_whole(self, message: Message) -> None:
        headers, more = self._start["headers"], message.get("more_body", False)
        body = message.get("body", b"")
        if self._tier_name and not more and body:
            body = self._form.whole(body, self._tier_name)
            headers = [pair for pair in headers if pair[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            message = {**message, "body": body}
        if not more:
            self.stored = StoredAnswer(self._start["status"], headers, message.get("body", b""))
        await self._send_start(self._start["status"], headers)
        self._phase = _Phase.OPEN if more else _Phase.CLOSED
        await self._out(message)

    @property
    def _tier_name(self) -> str:
        """The tier's name for the body; empty if the body does not name it."""
        named = self.echoes_tier or self._form.always_names_tier
        return service_tier_name(self.tier) if named else ""

    async def _send_event(self, message: Message) -> None:
        """Pass an event on; a stream without its last event must not look complete."""
        body, more = message.get("body", b""), message.get("more_body", False)
        error = self._form.find_error(bytes(body), self.request)
        if error is not None:
            await self._send_error_event(error)
            return
        if not more and not self._form.is_end(bytes(body or self._last)):
            await self._send_error_event(_broken_off(), bytes(body))
            return
        if not more:
            self._phase = _Phase.CLOSED
        elif body is not KEEP_ALIVE:
            self._last = body = self._form.event(bytes(body), self._tier_name, self.request)
            message = {**message, "body": body}
        if self._preface:
            message = {**message, "body": b"".join([*self._preface, bytes(body)])}
            self._preface = []
        await self._out(message)

    async def _begin_stream(self, message: Message) -> None:
        body, more = bytes(message.get("body", b"")), message.get("more_body", False)
        error = self._form.find_error(body, self.request)
        if error is None and self._preface and not (body or more):
            error = _broken_off()
        if error is not None:
            await self._send_error(error)
            return
        if more and self._form.is_preface(body):
            self._last = self._form.event(body, self._tier_name, self.request)
            self._preface.append(self._last)
            return
        await self._send_start(200, self._start["headers"] + _STREAM_HEADERS)
        self._phase = _Phase.STREAM
        await self._send_event(message)

    async def _send_error_event(self, error: ApiError, suffix: bytes = b"") -> None:
        self.error_code = error.code
        await self._send_last(suffix + self._form.error_event(error, suffix or bytes(self._last)))

    async def _send_error(self, error: ApiError) -> None:
        self.error_code = error.code
        error = with_jitter(error)
        body = self._form.error_body(error)
        headers = [*error.headers(), (b"content-length", str(len(body)).encode())]
        if error.code == "draining":
            headers.append((b"connection", b"close"))
        if not any(name in dict(headers) for name, _ in self.headers):
            headers += self.headers
        self.headers = []
        await self._send_start(error.status, headers)
        await self._send_last(body)

    async def _send_last(self, body: bytes) -> None:
        self._phase = _Phase.CLOSED
        await self._out({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        own = [
            (b"x-request-id", self.request_id.encode()),
            (b"x-priority-tier", tier_name(self.tier).encode()),
            (b"openai-processing-ms", str(round(self.elapsed_s * 1_000)).encode()),
            *self._form.headers(),
            *self.headers,
        ]
        if self.request.queue_wait_ms is not None:
            own.append((b"x-queue-wait-ms", str(self.request.queue_wait_ms).encode()))
        self.status = status
        await self._out(
            {"type": "http.response.start", "status": status, "headers": [*headers, *own]}
        )

    async def _out(self, message: Message) -> None:
        sending = self._send(message).__await__()
        try:
            # Nearly every send ends at once: a time limit for each would be a tenth of its cost.
            waits_for = next(sending, _ENDED)
            if waits_for is not _ENDED:
                async with asyncio.timeout(SEND_STALL_S) as self._patience:
                    await _Rest(sending, waits_for)
            self._sent_at_s = asyncio.get_running_loop().time()
        except TimeoutError:
            self._stalled = True
            raise ClientStalledError from None
        finally:
            self._patience = None


class _Rest:
    """The rest of an await that has begun and waits for `first`."""

    def __init__(self, begun: Generator[Any, None, Any], first: Any) -> None:
        self._begun = begun
        self._first = first

    def __await__(self) -> Generator[Any, None, None]:
        waits_for = self._first
        while True:
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 -- a cancellation is passed on as well
                step = partial(self._begun.throw, error)
            else:
                step = partial(next, self._begun)
            try:
                waits_for = step()
            except StopIteration:
                return


def _broken_off() -> ApiError:
    return api_error("internal_error", "The stream ended early: send the request again.")


def _is_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )
