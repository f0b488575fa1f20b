"""A request of a batch, called in this process as a server would call it for a client.

The edge makes the call; the runner chooses it and gets the answer a client would have got.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Message

TENANT_KEY: Final = "aileron.tenant"
"""Key of the ASGI scope under which the edge names the tenant to the gateway's own routes."""
KEY_ID: Final = "aileron.key"
"""The same for the id of the API key; empty without keys."""


@dataclass(frozen=True, slots=True)
class LineCall:
    """A request of a batch."""

    path: str
    body: bytes
    tenant: str
    deadline_ms: int
    """Milliseconds after which its answer is useless."""
    key: str = ""
    """The id of the key that made the batch; empty for one that was made without keys."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """An answer as a client would have got it."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float = 0.0


class LineProgress:
    """Collects an answer's messages in place of a server."""

    def __init__(self) -> None:
        self._start: Message = {"status": 500, "headers": []}
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Stand in for ASGI's `send`."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def answer(self, request_id: str) -> LineAnswer:
        """Return the whole answer."""
        headers = {name.lower(): value for name, value in self._start["headers"]}
        wait = headers.get(b"retry-after", b"")
        wait_s = float(wait) if wait.isdigit() else 0.0
        return LineAnswer(self._start["status"], bytes(self._body), request_id, wait_s)


def line_scope(call: LineCall) -> dict[str, Any]:
    """Return the ASGI scope of a call."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"batch"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }


async def never() -> Message:
    """Stand in for ASGI's `receive` of a client that stays."""
    waiting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await waiting
