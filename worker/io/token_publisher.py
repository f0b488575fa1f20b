"""Pushes new tokens straight to the gateways that wait for them.

One ZeroMQ PUSH socket per reply address; a message is the encoded `TokenBatch` header and the
frames of vLLM's outputs. Tokens never pass through the coordinator. A push is not answered, so the
sockets' heartbeats say whether a gateway can be reached; what follows is decided in `links`.

The stepping thread pushes itself: a push only puts frames into a socket's queue, which ZeroMQ's own
thread sends. A thread of ours in between had to get the interpreter back from the next step for
each frame, which was most of what a rank added to the time to the first token.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from coordinator.protocol.messages.rank import LinkCut, TokenBatch
from coordinator.protocol.wire import encode
from worker.io.gateway_breakers import GatewayBreakers

log = structlog.get_logger()

Encoder = Callable[[Sequence[Any]], Sequence[bytes]]

GATEWAYS_MAX = 256
"""Open sockets to gateways; the one that was used longest ago is closed beyond that."""

UNSENT_BATCHES_MAX = 100_000
"""Batches that wait in one socket for a gateway that does not read; more are dropped."""

LINGER_MS = 1_000
"""How long a closing socket tries to send what is left."""

WATCH_S = 0.1
"""How often it is looked whether links have changed."""

HEARTBEAT_MS = 500
SILENCE_MAX_MS = 1_500
"""A gateway's socket that does not answer a heartbeat for so long is not reached any more; ZeroMQ's
own threads answer, so that a busy gateway is not a silent one."""

FORGOTTEN_BY_GATEWAYS_MS = 10_000
"""Silence of a rank after which a gateway's socket closes the connection, too."""

RECONNECT_MS = 200
RECONNECT_MAX_MS = 1_000
"""First and longest pause between two attempts to connect."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A socket to one gateway, and where it tells how its connection is."""

    push: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"

    def close(self) -> None:
        self.push.disable_monitor()
        self.monitor.close(linger=0)
        self.push.close(linger=LINGER_MS)


class TokenPublisher:
    """The sockets to all gateways; everything is called by the stepping thread, nothing blocks."""

    def __init__(self, encoder: Encoder, tell: Callable[[tuple[LinkCut, ...]], None]) -> None:
        """`tell` is called by `watch` when links break, and when they are used again."""
        self._encoder = encoder
        self._tell = tell
        self._told: tuple[LinkCut, ...] = ()
        self._links = GatewayBreakers()
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._context = zmq.Context(io_threads=1)
        self._watch_at_s = 0.0

    def push(self, reply_to: str, header: TokenBatch, outputs: Sequence[Any]) -> None:
        """Send `outputs[i]`, described by `header.spans[i]`, to the gateway at `reply_to`."""
        frames = [encode(header), *self._encoder(outputs)]
        try:
            self._line(reply_to).push.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
            # Where cores are few, ZeroMQ's thread would wait behind the next step on this one.
            os.sched_yield()
        except zmq.Again:
            log.warning("tokens_dropped", reply_to=reply_to, reason="the gateway reads nothing")

    def watch(self) -> None:
        """Take what the sockets tell of their connections, and say what follows; called often."""
        now_s = time.monotonic()
        if now_s < self._watch_at_s:
            return
        self._watch_at_s = now_s + WATCH_S
        for reply_to, line in self._lines.items():
            while line.monitor.poll(0):
                if recv_monitor_message(line.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._links.came_up(reply_to, now_s)
                else:
                    self._links.went_down(reply_to, now_s)
        for reply_to in self._links.tick(now_s):
            self._close(reply_to)
        if (told := self._links.told()) != self._told:
            self._told = told
            self._tell(told)

    def close(self) -> None:
        """Close all sockets once what waits in them is sent, or after `LINGER_MS`."""
        for line in self._lines.values():
            line.close()
        self._context.term()

    def _line(self, reply_to: str) -> _Line:
        line = self._lines.get(reply_to)
        if line is None:
            if len(self._lines) >= GATEWAYS_MAX:
                self._close(next(iter(self._lines)))
            line = self._lines[reply_to] = _connect(self._context, reply_to)
            self._links.added(reply_to, time.monotonic())
        self._lines.move_to_end(reply_to)
        return line

    def _close(self, reply_to: str) -> None:
        self._lines.pop(reply_to).close()
        self._links.removed(reply_to)


def _connect(context: zmq.Context[Any], reply_to: str) -> _Line:
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, UNSENT_BATCHES_MAX)
    push.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    push.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MAX_MS)
    push.setsockopt(zmq.HEARTBEAT_TTL, FORGOTTEN_BY_GATEWAYS_MS)
    # A way that swallows everything takes connections and answers nothing.
    push.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MAX_MS)
    push.setsockopt(zmq.CONNECT_TIMEOUT, SILENCE_MAX_MS)
    push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    push.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    monitor = push.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    push.connect(reply_to)
    return _Line(push, monitor)
