"""The server of the serving port: uvicorn, with or without TLS.

Called by the process, which handles signals itself.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import cast

import uvicorn

from coordinator.protocol.certificate import (
    CHECK_EVERY_S,
    HANDSHAKE_LIMIT_S,
    ServerCertificate,
)
from gateway.http.connection import Connection


class Server(uvicorn.Server):
    """Uvicorn without its own signal handlers; reports when it accepts requests."""

    def __init__(
        self,
        started: Callable[[], None],
        config: uvicorn.Config,
        certificate: ServerCertificate | None,
    ) -> None:
        super().__init__(config)
        self._on_started = started
        self._certificate = certificate

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report that."""
        # Uvicorn would leave 60 s to a handshake, during which no limit counts the connection.
        await super().startup(sockets if self._certificate is None else [])
        if self.started and self._certificate is not None:
            await self._listen(sockets or [], self._certificate)
        if self.started:
            self._on_started()

    async def _listen(
        self, sockets: Sequence[socket.socket], certificate: ServerCertificate
    ) -> None:
        """Accept connections with TLS."""
        protocol = partial(
            cast(type[Connection], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for each in sockets:
            server = await asyncio.get_running_loop().create_server(
                protocol,
                sock=each,
                ssl=certificate.context,
                ssl_handshake_timeout=HANDSHAKE_LIMIT_S,
                backlog=self.config.backlog,
            )
            self.servers.append(server)


async def renew(certificate: ServerCertificate) -> None:
    """Take the certificate's files again whenever they change, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        if await asyncio.to_thread(certificate.has_changed):
            certificate.follow()
