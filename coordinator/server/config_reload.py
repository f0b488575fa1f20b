"""Applies a changed configuration to a running coordinator.

On SIGHUP, when the file changes, and on demand of the admin port. A demand also waits for those who
read before and after the coordinator: `aileron up`, which makes the file from one of the user, and
the gateways that run with the same configuration.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.model.events import SettingsChanged
from coordinator.model.settings import core_settings
from coordinator.protocol.config import Config, ConfigError
from coordinator.protocol.config_file import CHECK_EVERY_S, ConfigFile
from coordinator.protocol.config_origin import ConfigOrigin, read_origin
from coordinator.protocol.logs import set_level
from coordinator.server.core_actor import CoreActor

ORIGIN_LIMIT_S = 10.0
"""How long a reload waits for `aileron up`."""
GATEWAYS_LIMIT_S = 10.0
"""How long a reload waits for gateways."""
LOOK_S = 0.05
EARLIER_MAX = 16
"""Configurations of the past by which gateways are known that will follow."""


class ConfigReload:
    """The configuration of one coordinator process."""

    def __init__(self, file: ConfigFile, owner: CoreActor) -> None:
        self._file = file
        self._owner = owner
        self._asked = asyncio.Event()
        self._earlier = deque((file.hash,), EARLIER_MAX)
        self.on_change: Callable[[Config], None] = lambda _: None
        """Called with each new configuration, after the core has it."""

    def view(self) -> dict[str, Any]:
        """Return the part of `GET /admin/status` about the configuration."""
        read_at = datetime.fromtimestamp(self._file.read_s, UTC)
        return {
            "hash": self._file.hash,
            "read_at": read_at.isoformat(timespec="seconds"),
            "refusal": self._refusal() or None,
        }

    def ask(self) -> None:
        """Read the file soon, changed or not."""
        self._asked.set()

    async def reload(self) -> None:
        """Read and apply the file now, and return when everybody who shares it has done so.

        Raises `ConfigError`: nothing has changed then, unless the sentence names gateways.
        """
        await self._await_origin()
        await self._apply(await asyncio.to_thread(self._file.load))
        await self._await_gateways()

    def _refusal(self) -> str:
        origin = read_origin(self._file.path)
        return (origin.refusal if origin is not None else "") or self._file.refusal

    async def _await_origin(self) -> None:
        """Wait until the file follows from the user's, if there is one."""
        until_s = time.monotonic() + ORIGIN_LIMIT_S
        while True:
            origin = await asyncio.to_thread(read_origin, self._file.path)
            if origin is None or await asyncio.to_thread(_is_settled, origin):
                return
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"`aileron up` has not read {origin.file} within {ORIGIN_LIMIT_S:.0f} s: see "
                    "its terminal."
                )
            await asyncio.sleep(LOOK_S)

    async def _await_gateways(self) -> None:
        """Wait for the gateways that ran with a configuration that this process had before."""
        until_s = time.monotonic() + GATEWAYS_LIMIT_S
        while lagging := self._lagging():
            refusals = {each for each in lagging.values() if each}
            if refusals:
                raise ConfigError(
                    f"the coordinator applies the file, but {len(lagging)} gateways do not: "
                    f"{' '.join(sorted(refusals))}"
                )
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"the coordinator applies the file, but {len(lagging)} gateways have not read "
                    f"it within {GATEWAYS_LIMIT_S:.0f} s: see their logs."
                )
            await asyncio.sleep(LOOK_S)

    def _lagging(self) -> dict[str, str]:
        """Return the gateways with a former configuration, and why they keep it if they say so."""
        present = self._owner.gateway_outboxes
        return {
            name: files.config_refusal
            for name, files in self._owner.gateway_files.items()
            if name in present
            and files.config_hash != self._file.hash
            and files.config_hash in self._earlier
        }

    async def run(self) -> None:
        """Apply the file whenever it changes, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._asked.wait()
            except TimeoutError:
                pass
            is_forced = self._asked.is_set()
            self._asked.clear()
            new = await asyncio.to_thread(self._file.poll, forced=is_forced)
            if new is not None:
                await self._apply(new)

    async def _apply(self, config: Config) -> None:
        self._earlier.append(self._file.hash)
        set_level(config.log.level)
        await self._owner.post(SettingsChanged(core_settings(config)))
        self.on_change(config)


def _is_settled(origin: ConfigOrigin) -> bool:
    """Return whether the user's file is read as it is now; raises `ConfigError` if it is of no use.

    A file that is away stays unread: `aileron up` goes on with the last one.
    """
    try:
        Path(origin.file).stat()
    except OSError as error:
        raise ConfigError(f"cannot read {origin.file}: {error.strerror}.") from error
    if not origin.is_read:
        return False
    if origin.refusal:
        raise ConfigError(origin.refusal)
    return True
