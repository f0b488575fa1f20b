"""A cell among others: it says in the registry that it is there, and leaves without losing tasks.

Both only if the configuration names a fleet. Redis that is slow or away costs the cell nothing but
its announcements: gateways go on with the cells that they know. Called by the process.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import structlog

from coordinator.protocol.config import Config
from coordinator.protocol.registry import (
    ANNOUNCEMENTS_PER_LEASE,
    ANSWER_LIMIT_S,
    CellRegistry,
    RedisRegistry,
    RegistryAwayError,
)

LEAVE_LIMIT_S = 5.0
"""How long gateways may take to get their tasks to other cells."""
LOOK_S = 0.05

log = structlog.get_logger()


class RegistryLease:
    """Keeps a cell's lease until it leaves."""

    def __init__(self, registry: CellRegistry, name: str, address: str, every_s: float) -> None:
        """Announce the cell of that name at that address, so often."""
        self._registry = registry
        self._name = name
        self._address = address
        self._every_s = every_s
        self._work: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Announce the cell from now on."""
        self._work = asyncio.create_task(self._announce())

    async def leave(self) -> None:
        """Stop announcing the cell, and say so if the registry answers."""
        if self._work is None:
            return
        work, self._work = self._work, None
        work.cancel()
        # It also ends by itself, should the driver have kept the cancellation to itself.
        await asyncio.wait({work}, timeout=ANSWER_LIMIT_S)
        # Nobody finds the cell once its lease has run out, if this fails.
        with contextlib.suppress(RegistryAwayError):
            await self._registry.withdraw(self._name, self._address)
        await self._registry.close()

    async def _announce(self) -> None:
        was_heard: bool | None = None
        while self._work is not None:
            try:
                await self._registry.announce(self._name, self._address)
            except RegistryAwayError as error:
                if was_heard is not False:
                    log.warning("registry_away", reason=str(error))
                was_heard = False
            else:
                if was_heard is not True:
                    log.info("cell_announced", name=self._name, address=self._address)
                was_heard = True
            await asyncio.sleep(self._every_s)


def announcer_of(config: Config, port: int) -> RegistryLease | None:
    """Return who announces this cell, whose coordinator has this port; None without a registry."""
    fleet, host = config.fleet, socket.gethostname()
    if not fleet.redis:
        return None
    own = f"{config.coordinator.listen.rpartition(':')[0]}:{port}"
    address = fleet.advertise.replace("{host}", host) or own
    registry = RedisRegistry(fleet.redis, config.served_model_name, fleet.lease_ms, asyncio.timeout)
    every_s = fleet.lease_ms / 1_000 / ANNOUNCEMENTS_PER_LEASE
    return RegistryLease(registry, fleet.cell_name or host, address, every_s)


async def leave(announcer: RegistryLease | None, tasks: Callable[[], int]) -> None:
    """Be found no more, and wait until gateways have taken away what they can."""
    if announcer is not None:
        await announcer.leave()
    for _ in range(int(LEAVE_LIMIT_S / LOOK_S)):
        if not tasks():
            return
        await asyncio.sleep(LOOK_S)
    log.warning("cell_left_with_tasks", tasks=tasks())
