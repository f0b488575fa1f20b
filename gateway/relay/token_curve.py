"""CURVE on the gateway's token socket: only ranks with the cell's shared token get in.

ZeroMQ's own authentication (ZAP) asks a thread of pyzmq for each connection, not for messages.
"""

from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from coordinator.protocol.token_curve import rank_secret_key

DOMAIN = "tokens"


class _RanksAlone:
    """Accepts the public key of the ranks."""

    def __init__(self, token: str) -> None:
        self._key = zmq.curve_public(z85.encode(rank_secret_key(token)))

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a client's key, as Z85 text, is the ranks'."""
        return key == self._key


class TokenGuard:
    """Decides which connections a context's token socket takes; close it before the context."""

    def __init__(self, context: "zmq.Context[Any]", token: str) -> None:
        """Start the thread that answers ZeroMQ."""
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, _RanksAlone(token))

    def protect(self, socket: "zmq.Socket[Any]") -> bytes:
        """Make a socket that is not bound yet a CURVE server; return its public key."""
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        return bytes(z85.decode(public))

    def close(self) -> None:
        """Stop the thread."""
        self._authenticator.stop()
