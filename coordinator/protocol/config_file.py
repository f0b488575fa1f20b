"""The configuration file of a running process: read again on demand or when it changes.

Some settings apply at once; a file that changes another one is refused as a whole, and the old
configuration stays. Calls read the disk: make them in a thread.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from coordinator.protocol.config import Config, ConfigError, dump_config
from coordinator.protocol.file_stamp import stamp_of

RELOADABLE = (
    *("slo", "policy", "coordinator.tiers", "coordinator.queue_tasks_max"),
    *("coordinator.ageing_ms", "log.level", "log.requests"),
)
"""Settings, and sections of settings, that apply without a restart."""
NOT_RELOADABLE = (
    *("policy.name", "policy.step_times", "policy.observation_log"),
    "policy.observation_log_bytes_max",
)
"""Settings within these sections that do not."""
CHECK_EVERY_S = 1.0
"""Interval of looks at the file."""
HASH_CHARS = 12

log = structlog.get_logger(__name__)


class RestartNeededError(ConfigError):
    """The file changes settings that apply only after a restart; `fields` are their names."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields = fields
        super().__init__(
            f"the configuration changes {', '.join(fields)}: restart to apply that, or take it "
            "back to apply the rest."
        )


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The names of the settings in which two configurations differ."""

    reloadable: tuple[str, ...]
    others: tuple[str, ...]


def change_between(old: Config, new: Config) -> ConfigChange:
    """Compare two configurations."""
    before, after = (dict(_leaves(each.model_dump(mode="json"))) for each in (old, new))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    reloadable = tuple(name for name in names if is_reloadable(name))
    return ConfigChange(reloadable, tuple(name for name in names if name not in reloadable))


def is_reloadable(name: str) -> bool:
    """Return whether a setting, such as `slo.standard.ttft_ms`, applies without a restart."""
    if name in NOT_RELOADABLE:
        return False
    return any(name == each or name.startswith(f"{each}.") for each in RELOADABLE)


def hash_of_config(config: Config) -> str:
    """Return a short text that differs between configurations."""
    return hashlib.sha256(dump_config(config).encode()).hexdigest()[:HASH_CHARS]


class ConfigFile:
    """The file of one process, and the configuration that it runs with."""

    def __init__(
        self, path: Path, config: Config, read: Callable[[Path], Config], process: str
    ) -> None:
        """`process` is a name for log lines.

        `read` turns the file into a configuration as the process did at start.
        """
        self._process = process
        self.path = path
        self._read = read
        self._stamp = stamp_of(path)
        self.config = config
        self.hash = hash_of_config(config)
        """Of the configuration, computed once: it takes milliseconds."""
        self.read_s = time.time()
        """When the configuration was read, in Unix seconds."""
        self.refusal = ""
        """Why the file as it is now does not apply; empty if it does."""

    def poll(self, *, forced: bool = False) -> Config | None:
        """Return the file's configuration if it has changed, or if forced; None if it is refused.

        Logs the outcome.
        """
        stamp = stamp_of(self.path)
        has_changed = stamp is not None and stamp != self._stamp
        if not (has_changed or forced):
            return None
        try:
            return self.load()
        except ConfigError as error:
            log.warning("config_refused", process=self._process, reason=str(error))
            return None

    def load(self) -> Config:
        """Read and accept the file; raises `ConfigError`, and then the old configuration stays."""
        self._stamp = stamp_of(self.path)
        try:
            new = self._read(self.path)
            change = change_between(self.config, new)
            if change.others:
                raise RestartNeededError(change.others)
        except ConfigError as error:
            self.refusal = str(error)
            raise
        self.config, self.read_s, self.refusal = new, time.time(), ""
        self.hash = hash_of_config(new)
        log.info(
            "config_read",
            process=self._process,
            changed=list(change.reloadable),
            hash=self.hash,
        )
        return new


def _leaves(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
