"""Pushes new tokens straight to the gateways that wait for them, not through the coordinator.

One ZeroMQ PUSH socket per reply address; a message is the encoded `TokenBatch` header and the
frames of vLLM's outputs. Pushes are unanswered, so the sockets' heartbeats show whether a gateway
is reachable; `gateway_breakers` decides which links to use. The stepping thread pushes itself: it
only queues frames, which ZeroMQ's own thread sends. A Python thread in between would wait for the
interpreter lock during the next step, once per frame; that was most of a rank's share of time to
first token.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from coordinator.protocol.messages.rank import LinkCut, TokenBatch
from coordinator.protocol.token_curve import rank_secret_key, split_address
from coordinator.protocol.wire import encode
from worker.io.gateway_breakers import GatewayBreakers

log = structlog.get_logger()

Encoder = Callable[[Sequence[Any]], Sequence[bytes]]

GATEWAYS_MAX = 256
"""Maximum open sockets to gateways; beyond it the least recently used one is closed."""

UNSENT_BATCHES_MAX = 100_000
"""Maximum batches queued in a socket for a gateway that does not read; more are dropped."""

LINGER_MS = 1_000
"""Maximum time that a closing socket tries to send its queued batches."""

WATCH_S = 0.1
"""How often links are checked for changes."""

HEARTBEAT_MS = 500
SILENCE_MAX_MS = 1_500
"""A gateway's socket that leaves a heartbeat unanswered for this long is unreachable.

ZeroMQ's own threads answer, so a busy gateway is not silent.
"""

FORGOTTEN_BY_GATEWAYS_MS = 10_000
"""Silence of a rank after which a gateway's socket also closes the connection."""

RECONNECT_MS = 200
RECONNECT_MAX_MS = 1_000
"""First and longest pause between two attempts to connect."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A socket to one gateway, and its monitor, which reports connection events."""

    push: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"

    def close(self) -> None:
        self.push.disable_monitor()
        self.monitor.close(linger=0)
        self.push.close(linger=LINGER_MS)


class TokenPublisher:
    """The sockets to all gateways; the stepping thread makes all calls, and none blocks."""

    def __init__(
        self, encoder: Encoder, tell: Callable[[tuple[LinkCut, ...]], None], token: str
    ) -> None:
        """`watch` calls `tell` when links break and when they are used again.

        The cell's shared `token` opens the sockets of gateways that encrypt.
        """
        self._encoder = encoder
        self._tell = tell
        self._secret_key = z85.encode(rank_secret_key(token))
        self._link_cuts: tuple[LinkCut, ...] = ()
        self._links = GatewayBreakers()
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._context = zmq.Context(io_threads=1)
        self._watch_at_s = 0.0

    def push(self, reply_to: str, header: TokenBatch, outputs: Sequence[Any]) -> None:
        """Send `outputs[i]`, described by `header.spans[i]`, to the gateway at `reply_to`."""
        frames = [encode(header), *self._encoder(outputs)]
        try:
            self._line(reply_to).push.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
            # With few cores, ZeroMQ's thread would wait for this core until after the next step.
            os.sched_yield()
        except zmq.Again:
            log.warning("tokens_dropped", reply_to=reply_to, reason="the gateway reads nothing")

    def watch(self) -> None:
        """Process the sockets' connection events and report changed links; call it often."""
        now_s = time.monotonic()
        if now_s < self._watch_at_s:
            return
        self._watch_at_s = now_s + WATCH_S
        for reply_to, line in self._lines.items():
            while line.monitor.poll(0):
                if recv_monitor_message(line.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._links.mark_up(reply_to, now_s)
                else:
                    self._links.mark_down(reply_to, now_s)
        for reply_to in self._links.tick(now_s):
            self._close(reply_to)
        if (link_cuts := self._links.link_cuts()) != self._link_cuts:
            self._link_cuts = link_cuts
            self._tell(link_cuts)

    def close(self) -> None:
        """Close all sockets after their queues are sent, or after `LINGER_MS`."""
        for line in self._lines.values():
            line.close()
        self._context.term()

    def _line(self, reply_to: str) -> _Line:
        line = self._lines.get(reply_to)
        if line is None:
            if len(self._lines) >= GATEWAYS_MAX:
                self._close(next(iter(self._lines)))
            line = self._lines[reply_to] = _connect(self._context, reply_to, self._secret_key)
            self._links.add(reply_to, time.monotonic())
        self._lines.move_to_end(reply_to)
        return line

    def _close(self, reply_to: str) -> None:
        self._lines.pop(reply_to).close()
        self._links.remove(reply_to)


def _connect(context: zmq.Context[Any], reply_to: str, secret_key: bytes) -> _Line:
    address, gateway_key = split_address(reply_to)
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, UNSENT_BATCHES_MAX)
    push.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    push.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MAX_MS)
    push.setsockopt(zmq.HEARTBEAT_TTL, FORGOTTEN_BY_GATEWAYS_MS)
    # A black hole accepts connections and answers nothing.
    push.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MAX_MS)
    push.setsockopt(zmq.CONNECT_TIMEOUT, SILENCE_MAX_MS)
    push.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    push.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    monitor = push.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    if gateway_key is not None:
        push.setsockopt(zmq.CURVE_SERVERKEY, gateway_key)
        push.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        push.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret_key))
    push.connect(address)
    return _Line(push, monitor)
