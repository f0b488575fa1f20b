"""The user's `--config` file of `aileron up`: what its processes read follows it.

The processes read a file of the run, which holds the command line's options as well. They refuse
what needs a restart.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.errors import CliError
from coordinator.protocol.config import Config, dump_config
from coordinator.protocol.file_stamp import stamp_of

CHECK_EVERY_S = 1.0
"""Interval of looks at the file."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The user's file, and how to build the configuration of the run from it."""

    path: Path
    build: Callable[[], Config]


async def follow(source: ConfigSource | None, target: Path, say: Callable[[str], None]) -> None:
    """Write the configuration again whenever the user's file changes, until cancelled."""
    if source is None:
        return
    before = stamp_of(source.path)
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        stamp = await asyncio.to_thread(stamp_of, source.path)
        if stamp is None or stamp == before:
            continue
        before = stamp
        try:
            await asyncio.to_thread(lambda: write_config(target, source.build()))
        except (CliError, OSError) as error:
            say(f"the old configuration stays: {error}")


def write_config(path: Path, config: Config) -> None:
    """Write a configuration that only this user can read, in one step."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(dump_config(config))
    fresh.replace(path)
