"""The gateway's sockets: its port, and the ZeroMQ sockets with their event loop callbacks.

The ZeroMQ sockets belong to the loop's thread. Each message is received by a callback instead of a
task, because a push of tokens must be handled immediately and completely.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import zmq

from coordinator.protocol import wire
from coordinator.protocol.folders import UNIX_PATH_BYTES_MAX
from coordinator.protocol.token_curve import with_public_key
from gateway.engine.wire import ENGINE_IDENTITY
from gateway.relay.token_curve import TokenGuard

BURST_MESSAGES = 64
"""Most messages handled before the loop gets to run other work."""

TOKEN_PUSHES_MAX = 10_000
"""Unread pushes per leader after which its socket blocks further ones."""

LINGER_MS = 200

log = structlog.get_logger(__name__)


class Inbox:
    """Calls a handler for every message of a socket."""

    def __init__(
        self, socket: zmq.Socket[bytes], handle: Callable[[Sequence[bytes]], None]
    ) -> None:
        """Start immediately, in the running loop."""
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._drain)
        # The descriptor signals changes only, so fetch what has arrived already.
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop handling messages and close the socket."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _drain(self) -> None:
        for _ in range(BURST_MESSAGES):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(frames)
            except Exception:
                # One bad message must not end the loop that all streams depend on.
                log.exception("message_not_handled")
        self._loop.call_soon(self._drain)


class Sockets:
    """All ZeroMQ sockets of a gateway: to and from AsyncLLM, and from the leaders."""

    def __init__(self, run_dir: Path, token_listen: str, ranks_token: str = "") -> None:
        """Bind the token socket; raises OSError with a sentence if that is not possible.

        With `ranks_token`, the cell's shared token, the socket encrypts, takes connections of ranks
        alone, and its address names its public key.
        """
        self.input_address = _ipc_address(run_dir / "engine-in.sock")
        self.output_address = _ipc_address(run_dir / "engine-out.sock")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.tokens = self._context.socket(zmq.PULL)
        self.tokens.setsockopt(zmq.RCVHWM, TOKEN_PUSHES_MAX)
        # Disconnects a peer that sends a larger message, before it is read.
        self.tokens.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._guard = TokenGuard(self._context, ranks_token) if ranks_token else None
        key = None if self._guard is None else self._guard.protect(self.tokens)
        try:
            self.tokens.bind(token_listen)
        except zmq.ZMQError as error:
            raise OSError(f"gateway.token_listen: cannot bind {token_listen}: {error}.") from error
        address = self.tokens.get_string(zmq.LAST_ENDPOINT)
        self.token_address = address if key is None else with_public_key(address, key)
        self.requests = self._context.socket(zmq.DEALER)
        self.requests.setsockopt(zmq.IDENTITY, ENGINE_IDENTITY)
        self.requests.setsockopt(zmq.RCVHWM, 0)
        self.requests.connect(self.input_address)
        self.outputs = self._context.socket(zmq.PUSH)
        # Bounded by the open tasks' tokens; a blocked send would stop every stream.
        self.outputs.setsockopt(zmq.SNDHWM, 0)
        self.outputs.connect(self.output_address)

    def send_ready(self, frame: bytes) -> None:
        """Report the engine as ready to AsyncLLM, which may not have bound its socket yet."""
        self.requests.send(frame)

    def send_outputs(self, frames: Sequence[bytes]) -> None:
        """Answer a call of AsyncLLM."""
        self.outputs.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close what is still open."""
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=LINGER_MS)


def _ipc_address(path: Path) -> str:
    if len(str(path).encode()) > UNIX_PATH_BYTES_MAX:
        raise OSError(f"run_dir: {path} is too long for a Unix socket: use a shorter folder.")
    return f"ipc://{path}"


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind the serving port; several processes can bind a shared one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"gateway: cannot listen on {host}:{port}: {error.strerror}.") from error
    return listener
