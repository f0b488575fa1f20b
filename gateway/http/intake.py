"""Reads a request: its headers, once, and its body, within limits.

Called by the edge. Faults of the request are returned as an `ApiError`.
"""

import asyncio
import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Message, Receive, Scope

from gateway.admission.tiers import PRIORITY_OF_TIER, VLLM_PRIORITY_HEADER
from gateway.errors import ApiError, api_error
from gateway.http.answer import Answer
from gateway.http.content_encoding import (
    ENCODING_HEADER,
    BadEncodingError,
    Decoder,
    find_decoder,
)
from gateway.http.messages_form import API_KEY_HEADER

BODY_WAIT_S = 30.0
"""Longest time for a client to send its body."""

BODY_GRACE_S = 5.0
BODY_RATE_MIN = 1_024
"""Bytes per second that a body must average after the grace period."""

DEADLINE_MS_MAX = 86_400_000

ANSWER_ID_CHARS = 12
"""Characters that tell answers to one request id apart."""
REQUEST_ID_HEADER = "x-request-id"
CLIENT_REQUEST_ID_HEADER = "x-client-request-id"
DEADLINE_HEADER = "x-request-deadline-ms"
RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""Number of earlier tries by an OpenAI client. `x-stainless-timeout` is not read: it bounds each
read, not the answer, and a client that gives up closes its connection, which frees its permit."""
FAIRNESS_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")

SINGLE_HEADERS: Final[frozenset[str]] = frozenset(
    {
        *("host", "content-type", "content-length", "authorization", "transfer-encoding"),
        *("content-encoding", "x-priority-tier", REQUEST_ID_HEADER, DEADLINE_HEADER),
        *(API_KEY_HEADER, *FAIRNESS_HEADERS),
        *("x-gateway-inference-objective", "x-llm-d-inference-objective"),
    }
)
"""Headers that two readers would interpret differently if they were repeated."""

_INNER_PREFIXES = (b"x-vllm-", b"x-aileron-", b"x-gateway-", b"x-llm-d-", b"x-data-parallel-")
"""Headers that steer servers after the gateway; a client's are never forwarded."""

_DROPPED = frozenset(
    {
        *(REQUEST_ID_HEADER.encode(), b"content-length", b"authorization", b"x-priority-tier"),
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authorization", b"proxy-connection", b"expect", b"content-encoding"),
        API_KEY_HEADER.encode(),
    }
)
"""Headers meant for the gateway alone, and hop-by-hop headers."""
_OF_THE_BODY = (b"content-length", b"content-encoding")
"""Headers that a route needs which reads the body itself."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_FAIRNESS_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")

Headers = list[tuple[bytes, bytes]]


class ClientGoneError(Exception):
    """The client went away before its request was complete."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The headers of a request, by lower-case name."""

    headers: Mapping[str, str]
    repeated: frozenset[str]
    request_id: str
    answer_id: str
    """Ends the id of the answer's object; unique, even if clients repeat a request id."""
    address: str
    """The client's IP address, or that of the proxy in front."""

    def check(self, http_version: str) -> ApiError | None:
        """Return the error in the headers themselves, if any."""
        if self.repeated & SINGLE_HEADERS:
            return api_error(
                "invalid_http", "The request repeats a header that must be unique: send it once."
            )
        if http_version == "1.1" and not self.headers.get("host"):
            return api_error("invalid_http", "HTTP/1.1 requests need a Host header.")
        return None

    def deadline_ms(self) -> int | ApiError:
        """Return the milliseconds after which the answer is useless; 0 is never."""
        value = self.headers.get(DEADLINE_HEADER, "0").strip()
        if not (value.isascii() and value.isdecimal()) or len(value) > len(str(DEADLINE_MS_MAX)):
            return _bad_deadline()
        return _bad_deadline() if int(value) > DEADLINE_MS_MAX else int(value)

    @property
    def is_retry(self) -> bool:
        """Whether an OpenAI client marks the request as a retry."""
        count = self.headers.get(RETRY_COUNT_HEADER, "0")
        return count.isascii() and count.isdecimal() and count.strip("0") != ""

    def fairness_id(self) -> str:
        """Return the tenant that a proxy in front names; to be trusted only without API keys."""
        for name in FAIRNESS_HEADERS:
            if _FAIRNESS_ID.fullmatch(self.headers.get(name, "")):
                return self.headers[name]
        return ""


def read_head(scope: Scope) -> RequestHead:
    """Read the headers of an ASGI scope."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    headers = {name.lower(): value for name, value in pairs}
    counts = Counter(name.lower() for name, _ in pairs) if len(headers) < len(pairs) else {}
    client = scope.get("client")
    sent_id = _sent_request_id(headers)
    own_id = uuid.uuid4().hex
    return RequestHead(
        headers=headers,
        repeated=frozenset(name for name, count in counts.items() if count > 1),
        request_id=sent_id or own_id,
        answer_id=f"{sent_id}-{own_id[:ANSWER_ID_CHARS]}" if sent_id else own_id,
        address=client[0] if client else "",
    )


class BodyReader:
    """Reads and decodes a body piece by piece, at most `most` bytes and at a minimum rate.

    `most` limits the bytes that arrive and the bytes that they decode to.
    """

    def __init__(
        self, receive: Receive, headers: Mapping[str, str], most: int, wait_s: float = BODY_WAIT_S
    ) -> None:
        self._receive = receive
        self._length = headers.get("content-length", "")
        self._most = most
        self._wait_s = wait_s
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._bytes = 0
        self._decoded_bytes = 0
        self._decoder = find_decoder(headers)
        self._pieces: Iterator[bytes] = iter(())
        """What is decoded of the last bytes that arrived."""
        self._has_all = False
        self.is_complete = False
        """Whether the whole body was read."""

    def check_head(self) -> ApiError | None:
        """Return the error of an unknown encoding or of a Content-Length that is too large."""
        if isinstance(self._decoder, ApiError):
            return self._decoder
        length = self._length
        if length and (len(length) > 15 or not length.isdecimal() or int(length) > self._most):
            return self._too_large()
        return None

    async def read(self) -> bytes | ApiError:
        """Return the next piece; raises `ClientGoneError`."""
        if not isinstance(self._decoder, Decoder):
            return await self._receive_piece()
        try:
            # Decoding takes no turn of the event loop, however much the bytes decode to.
            await asyncio.sleep(0)
            piece = next(self._pieces, b"")
            if not piece and not self._has_all:
                arrived = await self._receive_piece()
                if isinstance(arrived, ApiError):
                    return arrived
                self._pieces = self._decoder.decode(arrived)
                piece = next(self._pieces, b"")
            if not piece and self._has_all:
                self._decoder.finish()
        except BadEncodingError:
            text = "The body is not in the format that its Content-Encoding names."
            return api_error("invalid_http", text, ENCODING_HEADER)
        self.is_complete = self._has_all and not piece
        self._decoded_bytes += len(piece)
        return self._too_large() if self._decoded_bytes > self._most else piece

    async def _receive_piece(self) -> bytes | ApiError:
        earned_s = BODY_GRACE_S + self._bytes / BODY_RATE_MIN
        try:
            async with asyncio.timeout_at(self._began_s + min(earned_s, self._wait_s)):
                message = await self._receive()
        except TimeoutError:
            text = f"The body must arrive within {self._wait_s:.0f} s, at {BODY_RATE_MIN} bytes/s."
            return api_error("request_timeout", text)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        self._bytes += len(piece)
        self._has_all = self.is_complete = not message.get("more_body", False)
        return self._too_large() if self._bytes > self._most else piece

    def _too_large(self) -> ApiError:
        text = f"A request's body may have {self._most} bytes at most."
        return api_error("request_too_large", text)


async def read_body(receive: Receive, headers: Mapping[str, str], most: int) -> bytes | ApiError:
    """Read a body of at most `most` bytes; raises `ClientGoneError`."""
    reader = BodyReader(receive, headers, most)
    if (error := reader.check_head()) is not None:
        return error
    body = bytearray()
    while not reader.is_complete:
        piece = await reader.read()
        if isinstance(piece, ApiError):
            return piece
        body += piece
    return bytes(body)


class BufferedBody:
    """Replays a body that was already read, then passes on the client's further messages."""

    def __init__(self, body: bytes, receive: Receive, gone: Callable[[], None]) -> None:
        """`gone` is called when the client leaves."""
        self._body: bytes | None = body
        self._receive = receive
        self._gone = gone
        self.length = len(body)

    def digest(self) -> bytes:
        """Return the body's hash; call it before the body is replayed."""
        return hashlib.sha256(self._body or b"").digest()

    async def wait_for_leave(self, limit_s: float) -> bool:
        """Return whether the client leaves within a time; call it before the body is replayed."""
        try:
            async with asyncio.timeout(limit_s):
                message = await self._receive()
        except TimeoutError:
            return False
        return bool(message["type"] == "http.disconnect")

    async def __call__(self) -> Message:
        """Stand in for ASGI's `receive`."""
        if self._body is None:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone()
            return message
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def inner_scope(scope: Scope, answer: Answer, length: int | None) -> dict[str, Any]:
    """Return the scope for vLLM; without `length` the client's Content-Length stays."""
    forwarded: Headers = [
        (name, value)
        for name, value in scope["headers"]
        if name.lower() not in _DROPPED and not name.lower().startswith(_INNER_PREFIXES)
    ]
    own = {
        REQUEST_ID_HEADER: answer.answer_id,
        VLLM_PRIORITY_HEADER: str(PRIORITY_OF_TIER[answer.tier]),
    }
    if length is None:
        forwarded += [pair for pair in scope["headers"] if pair[0].lower() in _OF_THE_BODY]
    else:
        own["content-length"] = str(length)
    headers = forwarded + [(name.encode(), value.encode()) for name, value in own.items()]
    # The server drops the body of an answer to HEAD.
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "headers": headers, "method": method}


def _sent_request_id(headers: Mapping[str, str]) -> str:
    """Return the request id that a client or a proxy has sent; empty if there is none."""
    for name in (REQUEST_ID_HEADER, CLIENT_REQUEST_ID_HEADER):
        if _REQUEST_ID.fullmatch(headers.get(name, "")):
            return headers[name]
    return ""


def _bad_deadline() -> ApiError:
    text = f"X-Request-Deadline-Ms must be milliseconds, {DEADLINE_MS_MAX} at most."
    return api_error("invalid_value", text, DEADLINE_HEADER)
