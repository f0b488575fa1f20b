"""The gateway's sessions with all known cells, and the source of the list of cells.

The cells come from the configuration (one cell, or a list) or from a registry. The registry is read
at an interval, never while a request waits: while it is slow, full or unreachable, the gateway
keeps the cells it knows. Called by the process.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from coordinator.protocol.cell_tls import CellTls, cell_tls_of
from coordinator.protocol.config import Config
from coordinator.protocol.messages.gateway import GatewayDown, GatewayUp
from coordinator.protocol.registry import RedisRegistry, RegistryAwayError
from gateway.fleet.placement import preferred
from gateway.fleet.roster import CellRoster
from gateway.relay.session import CoordinatorSession

LOOKS_PER_LEASE = 5
"""Reads of the registry per lease time of a cell."""

log = structlog.get_logger(__name__)


class Listener(Protocol):
    """Receives the events of all cells' sessions."""

    def session_opened(self, cell: str) -> Iterable[GatewayUp]:
        """A cell answered; return the messages to send first."""

    def session_closed(self, cell: str) -> None:
        """Nothing can be sent to the cell until its next session."""

    def on_coordinator_message(self, message: GatewayDown, cell: str) -> None:
        """A message from a cell arrived."""


class _Link:
    """One cell's session; adds the cell's name to its events."""

    def __init__(
        self,
        cell: str,
        session: CoordinatorSession,
        listener: Listener,
        greeting: Callable[[], Iterable[GatewayUp]],
    ) -> None:
        self._cell = cell
        self._listener = listener
        self._greeting = greeting
        self.session = session
        self.work = asyncio.create_task(session.run(self))

    def session_opened(self) -> Iterable[GatewayUp]:
        """Forward with the cell's name."""
        return (*self._greeting(), *self._listener.session_opened(self._cell))

    def session_closed(self) -> None:
        """Forward with the cell's name."""
        self._listener.session_closed(self._cell)

    def on_coordinator_message(self, message: GatewayDown) -> None:
        """Forward with the cell's name."""
        self._listener.on_coordinator_message(message, self._cell)


class CellSessions:
    """Keeps a session open with every cell of a roster until it is cancelled."""

    def __init__(
        self,
        cells: CellRoster,
        token: str,
        gateway: str,
        registry: RedisRegistry | None = None,
        look_every_s: float = 1.0,
        away: Callable[[], None] = lambda: None,
        tls: CellTls | None = None,
    ) -> None:
        """Take cells from `registry`; None keeps those the roster starts with.

        `away` is called each time the registry does not answer.
        """
        self.cells = cells
        self._token = token
        self._gateway = gateway
        self._tls = tls
        self._registry = registry
        self._look_every_s = look_every_s
        self._away = away
        self._links: dict[str, _Link] = {}
        self._standing: GatewayUp | None = None

    @property
    def home(self) -> CoordinatorSession | None:
        """The session with the cell that gets messages of no cell; None if no cell is up.

        Each gateway prefers its own home, which distributes a fleet's gateways over the cells.
        """
        up = self.cells.up
        return self.session(preferred(self._gateway, up)) if up else None

    def session(self, cell: str) -> CoordinatorSession | None:
        """Return the session with a cell while it is up, else None."""
        link = self._links.get(cell)
        return link.session if link is not None and link.session.up else None

    def send(self, message: GatewayUp, cell: str) -> None:
        """Send to a cell soon and in order; drop the message if its session is down."""
        if (link := self._links.get(cell)) is not None:
            link.session.send(message)

    def broadcast(self, message: GatewayUp) -> None:
        """Send to all cells whose sessions are up."""
        for link in self._links.values():
            link.session.send(message)

    def hold_out(self, message: GatewayUp) -> None:
        """Send to all cells now, and first in each later session, until it is replaced."""
        if message != self._standing:
            self._standing = message
            self.broadcast(message)

    def _greeting(self) -> Iterable[GatewayUp]:
        return () if self._standing is None else (self._standing,)

    async def flush(self) -> None:
        """Return when everything is sent to all cells with a session."""
        await asyncio.gather(*(link.session.flush() for link in self._links.values()))

    async def run(self, listener: Listener) -> None:
        """Keep sessions open; raises what a session raises."""
        try:
            while True:
                await self._look()
                if (own := asyncio.current_task()) is not None and own.cancelling():
                    # The Redis driver swallowed the cancellation.
                    return
                self._hold(listener)
                await asyncio.sleep(self._look_every_s)
        finally:
            work = [link.work for link in self._links.values()]
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            if self._registry is not None:
                await self._registry.close()

    async def _look(self) -> None:
        if self._registry is None:
            return
        try:
            found = await self._registry.cells()
        except RegistryAwayError as error:
            # Registry loss says nothing about the cells: keep them.
            self._away()
            log.warning("registry_away", reason=str(error), cells=len(self._links))
        else:
            self.cells.found(found, time.monotonic())

    def _hold(self, listener: Listener) -> None:
        """Open sessions with new cells; end those of forgotten cells."""
        known = set(self.cells)
        for cell in known - self._links.keys():
            session = CoordinatorSession(cell, self._token, self._gateway, self._tls)
            self._links[cell] = _Link(cell, session, listener, self._greeting)
        for cell in self._links.keys() - known:
            self._links.pop(cell).work.cancel()
        for link in self._links.values():
            if link.work.done():
                link.work.result()


def set_up_fleet(
    config: Config, token: str, gateway: str, away: Callable[[], None]
) -> CellSessions:
    """Return the sessions of the configured fleet, none opened yet."""
    fleet, tls = config.fleet, cell_tls_of(config.cell_tls)
    if not fleet.is_on:
        return CellSessions(CellRoster.alone(config.coordinator.listen), token, gateway, tls=tls)
    cells = CellRoster(fleet.cells, fleet.dead_after_ms / 1_000, in_fleet=True)
    if not fleet.redis:
        return CellSessions(cells, token, gateway, tls=tls)
    registry = RedisRegistry(fleet.redis, config.served_model_name, fleet.lease_ms, asyncio.timeout)
    look_every_s = fleet.lease_ms / 1_000 / LOOKS_PER_LEASE
    return CellSessions(cells, token, gateway, registry, look_every_s, away, tls)
