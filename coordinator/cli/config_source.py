"""The user's `--config` file of `aileron up`: what its processes read follows it.

The processes read a file of the run, which holds the command line's options as well. They refuse
what needs a restart. Beside it lies what became of the user's file, for `aileron reload` and
`aileron status`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.errors import CliError
from coordinator.protocol.config import Config, dump_config
from coordinator.protocol.config_origin import ConfigOrigin, remove_origin, write_origin
from coordinator.protocol.file_stamp import Stamp, stamp_of

CHECK_EVERY_S = 0.2
"""Interval of looks at the file; `aileron reload` waits for one."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The user's file, and how to build the configuration of the run from it."""

    path: Path
    build: Callable[[], Config]
    stamp: Stamp | None
    """Of the file before it was read for the start."""


def start_following(source: ConfigSource | None, target: Path) -> None:
    """Record which file of the user the processes' file follows, if any; raises OSError."""
    if source is None:
        remove_origin(target)
    else:
        write_origin(target, ConfigOrigin(str(source.path.absolute()), source.stamp))


async def follow(source: ConfigSource | None, target: Path, say: Callable[[str], None]) -> None:
    """Write the configuration again whenever the user's file changes, until cancelled."""
    if source is None:
        return
    before = source.stamp
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        stamp = await asyncio.to_thread(stamp_of, source.path)
        if stamp is None or stamp == before:
            continue
        before = stamp
        refusal = await asyncio.to_thread(_renew, source, target, stamp)
        if refusal:
            say(f"the old configuration stays: {refusal}")


def _renew(source: ConfigSource, target: Path, stamp: Stamp) -> str:
    """Write what follows from the file as it is; return why it cannot be used, or nothing."""
    refusal = ""
    try:
        write_config(target, source.build())
    except (CliError, OSError) as error:
        refusal = str(error)
    try:
        write_origin(target, ConfigOrigin(str(source.path.absolute()), stamp, refusal))
    except OSError as error:
        return refusal or str(error)
    return refusal


def write_config(path: Path, config: Config) -> None:
    """Write a configuration that only this user can read, in one step."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(dump_config(config))
    fresh.replace(path)
