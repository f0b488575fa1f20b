"""Applies a changed configuration to a running coordinator.

On SIGHUP, when the file changes, and on demand of the admin port.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from coordinator.model.events import SettingsChanged
from coordinator.model.settings import core_settings
from coordinator.protocol.config import Config
from coordinator.protocol.config_file import CHECK_EVERY_S, ConfigFile, hash_of_config
from coordinator.protocol.logs import set_level
from coordinator.server.core_actor import CoreActor


class ConfigReload:
    """The configuration of one coordinator process."""

    def __init__(self, file: ConfigFile, owner: CoreActor) -> None:
        self._file = file
        self._owner = owner
        self._asked = asyncio.Event()
        self.on_change: Callable[[Config], None] = lambda _: None
        """Called with each new configuration, after the core has it."""

    def view(self) -> dict[str, Any]:
        """Return the part of `GET /admin/status` about the configuration."""
        read_at = datetime.fromtimestamp(self._file.read_s, UTC)
        return {
            "hash": hash_of_config(self._file.config),
            "read_at": read_at.isoformat(timespec="seconds"),
            "refusal": self._file.refusal or None,
        }

    def ask(self) -> None:
        """Read the file soon, changed or not."""
        self._asked.set()

    async def reload(self) -> None:
        """Read and apply the file now; raises `ConfigError`, and then nothing has changed."""
        await self._apply(await asyncio.to_thread(self._file.load))

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
        set_level(config.log.level)
        await self._owner.post(SettingsChanged(core_settings(config)))
        self.on_change(config)
