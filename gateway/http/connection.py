"""One client connection: uvicorn's httptools protocol with limits added.

Bounds the number, size and time of headers and the number of connections, answers broken HTTP in
OpenAI's shape, and lets a client that is refused while it sends its body read the answer. The edge
bounds bodies. uvicorn creates one instance per connection.
"""

import asyncio
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.errors import ApiError, api_error
from gateway.http.jitter import with_jitter
from gateway.http.stream_forms import stream_form

_OFFER: Final = (b"upgrade", b"http2-settings")
"""Headers that offer another protocol, and the options of `Connection` that name them."""

OFFERS_MAX = 8
"""Most requests with such an offer that are read at once."""

HEADERS_MAX = 64
HEADER_BYTES_MAX = 32 * 1024
"""Most bytes of a request line and its headers together."""

HEADER_WAIT_S = 10.0
"""Longest time from a request's first byte to the end of its headers."""

LINGER_S = 1.0
"""How long a refused client's input is discarded, so that it can read the answer."""

LINGER_BYTES_MAX = 8 * 1024**2

REST_BYTES_MAX = 256 * 1024
"""Most bytes of a body that are read after its answer to keep the connection."""


@dataclass(slots=True)
class ConnectionLimits:
    """Limits on connections, and the open connections of each address."""

    connections_max: int
    per_address_max: int = 0
    addresses: Counter[str] = field(default_factory=Counter)


class Connection(HttpToolsProtocol):
    """A connection with limits."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._limits = limits
        self._address = ""
        self._header_bytes = 0
        self._is_new = True
        self._in_headers = True
        self._in_body = False
        self._refusal: ApiError | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._discarded_bytes: int | None = None
        """Bytes discarded since the answer was complete; None while input is still read."""
        self._rest_timer: asyncio.TimerHandle | None = None
        """Runs while an answer is complete and its request's body is not."""
        self._rest_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        counts = self._limits.addresses
        counts[self._address] += 1
        per_address = self._limits.per_address_max
        if len(self.connections) > self._limits.connections_max:
            self._refuse(
                api_error(
                    "too_many_connections",
                    "The server is at its limit of connections: try again later.",
                )
            )
        elif per_address and counts[self._address] > per_address:
            text = f"One address may hold {per_address} connections at most: close some."
            self._refuse(api_error("too_many_connections", text))
        else:
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the counts."""
        super().connection_lost(exc)
        self._stop_header_timer()
        self._stop_rest_timer()
        self._limits.addresses[self._address] -= 1
        if not self._limits.addresses[self._address]:
            del self._limits.addresses[self._address]

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        if self._discarded_bytes is not None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES_MAX:
                self.transport.abort()
            return
        if self._rest_timer is not None:
            self._rest_bytes += len(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_timer is None:
                self._start_header_timer()
        super().data_received(data)
        if self._rest_timer is not None and self._rest_bytes > REST_BYTES_MAX:
            self._rest_is_too_much()
        if self._in_headers and self._header_bytes > HEADER_BYTES_MAX:
            self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self._in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        super().on_header(name, value)
        if len(self.headers) > HEADERS_MAX:
            self._refusal = _headers_too_large()
            # The parser turns this into its error, and uvicorn into a call of send_400_response.
            raise httptools.HttpParserInvalidMethodError

    def on_headers_complete(self) -> None:
        """Start answering."""
        if len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers) > HEADER_BYTES_MAX:
            self._refusal = _headers_too_large()
            raise httptools.HttpParserInvalidMethodError
        if any(n == b"transfer-encoding" and v.lower() != b"chunked" for n, v in self.headers):
            # The parser would notice too, but only after the application was called.
            raise httptools.HttpParserInvalidMethodError
        if self._offers_upgrade:
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" or self._body_is_long():
            self.cycle.send = _Send(self.cycle)  # type: ignore[method-assign]
        self._is_new = False
        self._in_headers, self._in_body = False, True
        self._header_bytes = 0
        self._stop_header_timer()
        # Closing after an answer must not cut off a client that is still sending.
        self.cycle.transport = cast(asyncio.Transport, _Ending(self.transport, self))

    def on_message_complete(self) -> None:
        """Record that the body is complete."""
        if self._offers_upgrade:
            return
        super().on_message_complete()
        self._stop_rest_timer()
        self._in_headers, self._in_body = True, False
        if self.cycle.response_complete and not self.transport.is_closing():
            # The rest of the body, after its answer, has stopped the timer of an idle connection.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _body_is_long(self) -> bool:
        """Return whether the body may be longer than what is read after an answer."""
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"0")
        return b"transfer-encoding" in headers or int(length) > REST_BYTES_MAX

    @property
    def _offers_upgrade(self) -> bool:
        """Whether the parser stops after these headers, because they offer another protocol."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def head_without_offer(self) -> bytes | None:
        """Return the request's head without its offer of another protocol; None for CONNECT."""
        if not self._offers_upgrade:
            return None
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [each.strip() for each in value.split(b",")]
                rest = [each for each in options if each.lower() not in _OFFER]
                lines += [b"connection: " + b", ".join(rest)] if rest else []
            elif name not in _OFFER:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"\r\n"])

    def on_response_complete(self) -> None:
        """Keep the connection for the next request, if this one ends soon.

        A client that got no `Connection: close` may reuse the connection. Closing it because the
        body arrived after the answer would fail that next request.
        """
        if self._discarded_bytes is not None:
            # The connection is closing already; no more input is read.
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._rest_bytes = 0
            self._rest_timer = self.loop.call_later(LINGER_S, self._rest_is_too_much)

    def _rest_is_too_much(self) -> None:
        self._stop_rest_timer()
        if not self.transport.is_closing():
            self.close_gently()

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 -- uvicorn's own words
        """Answer invalid HTTP, or abort if an answer is in progress."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        error = self._refusal or api_error("invalid_http", "The request is not valid HTTP/1.1.")
        self._refuse(error)

    def close_gently(self) -> None:
        """Close after the client had time to read the answer."""
        if self._discarded_bytes is not None:
            return
        if not self._in_body:
            self.transport.close()
            return
        self._discarded_bytes = 0
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        if self.transport.is_closing() or self._discarded_bytes is not None:
            return
        self._stop_header_timer()
        error = with_jitter(error)
        request_id = uuid.uuid4().hex
        form = stream_form(self._path(), request_id)
        body = form.error_body(error)
        headers = [
            *error.headers(),
            *form.headers(),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self._in_body = True
        self.close_gently()

    def _path(self) -> str:
        """Return the path of the request that is read; empty before it is known."""
        url = getattr(self, "url", b"")
        return url.partition(b"?")[0].decode("latin-1")

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_WAIT_S, self._headers_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing() or not self._in_headers:
            return
        if self._header_bytes:
            text = f"The request's headers did not arrive within {HEADER_WAIT_S:.0f} s."
            self._refuse(api_error("request_timeout", text))
        elif self._is_new:
            self.transport.close()


class _Parser(httptools.HttpRequestParser):
    """A parser that declines every offer of another protocol, as RFC 9110 (7.8) lets a server do.

    httptools takes a request that offers one (`Upgrade: h2c`) to end at its headers. This parser
    feeds the head again without the offer, and then the body, to a successor.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        # As uvicorn does: some clients send a line break after a request that closes.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        """Parse bytes; calls the connection's methods."""
        connection, rest = self._connection, memoryview(data)
        parser = self
        for _ in range(OFFERS_MAX):
            try:
                super(_Parser, parser).feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                head = connection.head_without_offer()
                if head is None:
                    raise
                rest = rest[offer.args[0] :]
                connection.parser = parser = _Parser(connection)
                super(_Parser, parser).feed_data(head)
            else:
                return
        raise httptools.HttpParserInvalidMethodError


class _Send:
    """Sends an answer whose head depends on the connection.

    HTTP/1.0 knows no chunks: the end of the connection ends a body without a Content-Length. An
    answer that comes before a long body was read says that the connection closes.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._is_unsized = False

    async def __call__(self, message: Any) -> None:
        """Take the place of the cycle's `send`."""
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if self._cycle.scope["http_version"] == "1.0":
                self._is_unsized = all(name.lower() != b"content-length" for name, _ in headers)
            if self._is_unsized:
                self._cycle.chunked_encoding = False
            if self._cycle.more_body:
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
        elif self._is_unsized:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(self._cycle, message)


class _Ending:
    """The transport that answers see: closing waits for the client."""

    __slots__ = ("_connection", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._connection = connection
        # Bound once: an answer writes for every token.
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        """Close soon."""
        self._connection.close_gently()


def _headers_too_large() -> ApiError:
    text = f"Send {HEADERS_MAX} headers with {HEADER_BYTES_MAX} bytes at most."
    return api_error("headers_too_large", text)
