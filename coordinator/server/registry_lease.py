"""A cell's lease in the registry of its fleet, and its departure without lost tasks.

Used only if the configuration names a fleet. A slow or absent Redis costs the cell nothing but its
announcements: gateways continue with the cells that they know. The process calls this module.
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
    RedisRegistry,
    RegistryAwayError,
)

LEAVE_LIMIT_S = 5.0
"""How long gateways may take to move their tasks to other cells."""
LOOK_S = 0.05

log = structlog.get_logger()


class RegistryLease:
    """Renews a cell's lease until the cell leaves."""

    def __init__(self, registry: RedisRegistry, name: str, address: str, every_s: float) -> None:
        """Announce the cell `name` at `address`, every `every_s` seconds."""
        self._registry = registry
        self._name = name
        self._address = address
        self._every_s = every_s
        self._work: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Announce the cell from now on."""
        self._work = asyncio.create_task(self._announce())

    async def leave(self) -> None:
        """Stop announcing the cell, and withdraw it if the registry answers."""
        if self._work is None:
            return
        work, self._work = self._work, None
        work.cancel()
        # The loop also ends by itself if the driver swallows the cancellation.
        await asyncio.wait({work}, timeout=ANSWER_LIMIT_S)
        # If this fails, the cell disappears when its lease ends.
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
    """Return the registry lease of a cell whose coordinator has this port, or None."""
    fleet, host = config.fleet, socket.gethostname()
    if not fleet.redis:
        return None
    own = f"{config.coordinator.listen.rpartition(':')[0]}:{port}"
    address = fleet.advertise.replace("{host}", host) or own
    registry = RedisRegistry(fleet.redis, config.served_model_name, fleet.lease_ms, asyncio.timeout)
    every_s = fleet.lease_ms / 1_000 / ANNOUNCEMENTS_PER_LEASE
    return RegistryLease(registry, fleet.cell_name or host, address, every_s)


async def leave(announcer: RegistryLease | None, tasks: Callable[[], int]) -> None:
    """Withdraw from the registry, and wait until gateways have moved their tasks."""
    if announcer is not None:
        await announcer.leave()
    for _ in range(int(LEAVE_LIMIT_S / LOOK_S)):
        if not tasks():
            return
        await asyncio.sleep(LOOK_S)
    log.warning("cell_left_with_tasks", tasks=tasks())
