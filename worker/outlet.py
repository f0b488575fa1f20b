"""Pushes new tokens straight to the gateways that wait for them, off the stepping thread.

One ZeroMQ PUSH socket per reply address; a message is the encoded `TokenBatch` header and the
frames of vLLM's outputs. Tokens never pass through the coordinator.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import zmq

from coordinator.protocol.messages import TokenBatch
from coordinator.protocol.wire import encode

log = structlog.get_logger()

Encoder = Callable[[Sequence[Any]], Sequence[bytes]]

GATEWAYS_MAX = 256
"""Open sockets to gateways; the one that was used longest ago is closed beyond that."""

UNSENT_BATCHES_MAX = 100_000
"""Batches that wait in one socket for a gateway that does not read; more are dropped."""

LINGER_MS = 1_000
"""How long a closing socket tries to send what is left."""


class Outlet:
    """A thread that encodes and sends; `push` never blocks the caller."""

    def __init__(self, make_encoder: Callable[[], Encoder]) -> None:
        self._batches: queue.SimpleQueue[tuple[str, TokenBatch, Sequence[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._make_encoder = make_encoder
        self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
        self._thread.start()

    def push(self, reply_to: str, header: TokenBatch, outputs: Sequence[Any]) -> None:
        """Send `outputs[i]`, described by `header.spans[i]`, to the gateway at `reply_to`."""
        self._batches.put((reply_to, header, outputs))

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._batches.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        encoder = self._make_encoder()
        context = zmq.Context(io_threads=1)
        sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        while (item := self._batches.get()) is not None:
            reply_to, header, outputs = item
            socket = self._socket(context, sockets, reply_to)
            try:
                socket.send_multipart(
                    [encode(header), *encoder(outputs)], flags=zmq.NOBLOCK, copy=False
                )
            except zmq.Again:
                log.warning("tokens_dropped", reply_to=reply_to, reason="the gateway reads nothing")
        for socket in sockets.values():
            socket.close(linger=LINGER_MS)
        context.term()

    @staticmethod
    def _socket(
        context: zmq.Context[Any], sockets: "OrderedDict[str, zmq.Socket[bytes]]", reply_to: str
    ) -> "zmq.Socket[bytes]":
        socket = sockets.get(reply_to)
        if socket is None:
            if len(sockets) >= GATEWAYS_MAX:
                sockets.popitem(last=False)[1].close(linger=LINGER_MS)
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, UNSENT_BATCHES_MAX)
            socket.connect(reply_to)
            sockets[reply_to] = socket
        sockets.move_to_end(reply_to)
        return socket
