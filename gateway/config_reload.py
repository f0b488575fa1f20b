"""Applies a changed configuration to a running gateway: on SIGHUP, and when the file changes."""

import asyncio
from collections.abc import Mapping

from coordinator.protocol.config import Config
from coordinator.protocol.config_file import CHECK_EVERY_S, ConfigFile
from coordinator.protocol.messages.gateway import GatewayFiles
from coordinator.protocol.policy_config import SloConfig, SloTarget
from coordinator.protocol.terms import Tier
from gateway.telemetry.logs import set_level
from gateway.telemetry.meter import RequestMeter
from gateway.telemetry.request_log import RequestLog


class ConfigReload:
    """The configuration of one gateway process."""

    def __init__(self, file: ConfigFile, meter: RequestMeter, request_log: RequestLog) -> None:
        self._file = file
        self._meter = meter
        self._request_log = request_log
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Read the file soon, changed or not."""
        self._asked.set()

    def files(self, keys_warning: str) -> GatewayFiles:
        """Return what operators should know of this process's files."""
        return GatewayFiles(self._file.hash, self._file.refusal, keys_warning)

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
                self._apply(new)

    def _apply(self, config: Config) -> None:
        set_level(config.log.level)
        self._request_log.configure(config.log)
        self._meter.targets = targets_of(config.slo)


def targets_of(slo: SloConfig) -> Mapping[Tier, SloTarget]:
    """Return the objectives of each tier."""
    return {tier: getattr(slo, tier.name.lower()) for tier in Tier}
