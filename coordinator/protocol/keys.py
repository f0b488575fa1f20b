"""API keys: a YAML file of their hashes and of what each key may do.

Keys are long and random, so one SHA-256 protects them at rest. `aileron key` writes the file; the
gateway reads it again when it changes. Pure, except for reading a path.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Final, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from coordinator.protocol.config import ConfigError
from coordinator.protocol.settings_file import NO_SETTINGS, check_text

KEY_PREFIX = "sk-aileron-"
KEY_BYTES = 32
"""Random bytes of a key."""
KEYS_MAX = 100_000
HASH_PREFIX = "sha256:"
PREFIX_CHARS = len(KEY_PREFIX) + 6
"""First characters of a key that the file stores, so that a person can tell keys apart; the rest is
still far too long to guess."""
PREFIX_CHARS_MAX = 32

_HASH = re.compile(HASH_PREFIX + "[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

TierName = Literal["interactive", "standard", "batch"]
URGENCY: Final[tuple[TierName, ...]] = ("batch", "standard", "interactive")
"""Tiers, the least urgent first."""
State = Literal["active", "expired", "revoked"]


class ApiKey(BaseModel):
    """One key and its limits; without a limit the value is 0, which nobody may write."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hash: str
    tenant: str
    name: str = ""
    """What people call the key; empty in files of earlier versions."""
    prefix: str = ""
    """The key's first characters."""
    created: datetime | None = None
    expires: datetime | None = None
    """From this time on the key is refused; a date alone means 00:00 UTC of that day."""
    revoked: datetime | None = None
    """Since when the key is refused."""
    max_tier: TierName = "interactive"
    """The most urgent tier that its requests may use."""
    default_tier: TierName = "standard"
    """The tier of requests that name none."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and generated tokens together."""
    tokens_per_day: int = 0
    """The same for a day, which begins at 00:00 UTC."""
    max_parallel: int = 0
    """Most requests that one gateway process answers at once."""

    @field_validator("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_parallel")
    @classmethod
    def _check_limit(cls, value: int) -> int:
        # This runs for what somebody wrote: 0 looks like "nothing allowed".
        if value < 1:
            raise ValueError("must be 1 or more; leave it out for no limit.")
        return value

    @field_validator("hash")
    @classmethod
    def _check_hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError("must be sha256: and 64 hexadecimal digits, as `aileron key` prints.")
        return value

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("must be 1 to 64 letters, digits, dots, dashes and underscores.")
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError("must be 1 to 64 letters, digits, dots, dashes and underscores.")
        return value

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, value: str) -> str:
        # A whole key pasted here would be readable by everyone who may read the hashes.
        if len(value) > PREFIX_CHARS_MAX or not value.isprintable():
            raise ValueError(f"must be at most the first {PREFIX_CHARS_MAX} characters of the key.")
        return value

    @field_validator("created", "expires", "revoked", mode="before")
    @classmethod
    def _read_moment(cls, value: object) -> object:
        return None if value is None else moment_of(value)

    @field_validator("default_tier")
    @classmethod
    def _check_default_tier(cls, value: TierName, info: ValidationInfo) -> TierName:
        highest: TierName = info.data.get("max_tier", "interactive")
        if URGENCY.index(value) > URGENCY.index(highest):
            raise ValueError(f"{value} is more urgent than max_tier {highest}: lower it.")
        return value

    def state(self, now: datetime) -> State:
        """Return whether the key is accepted at a time, or why not."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "active"

    @property
    def id(self) -> str:
        """A short name for logs and limits that does not reveal the key."""
        return self.hash.removeprefix(HASH_PREFIX)[:16]


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[ApiKey, ...] = Field(default=(), max_length=KEYS_MAX)

    @field_validator("keys", mode="before")
    @classmethod
    def _read_nothing(cls, value: object) -> object:
        return () if value is None else value


def moment_of(value: object) -> datetime:
    """Read a time as YAML or a person writes it; without a zone it is UTC. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        # Not a TypeError: pydantic makes a sentence of a ValueError only.
        raise ValueError(  # noqa: TRY004
            "must be a date or a time such as 2027-01-31 or 2027-01-31T12:00:00Z."
        )
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def new_secret() -> str:
    """Return a new key; it is shown once."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def prefix_of(secret: str) -> str:
    """Return the part of a new key that the file stores as it is."""
    return secret[:PREFIX_CHARS]


def hash_of(secret: str) -> str:
    """Return the form of a key that the file stores."""
    return HASH_PREFIX + hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def load_keys(path: Path) -> dict[str, ApiKey]:
    """Read the file's keys by hash; raises `ConfigError` with one sentence per mistake."""
    try:
        return read_keys(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}.") from error


def read_keys(text: bytes | str, path: Path) -> dict[str, ApiKey]:
    """Read a file's text; the path is for errors, which are those of `load_keys`."""
    # No fault quotes a value: a key pasted in place of its hash must not reach a log.
    reading = check_text(text, _KeyFile)
    if reading.value is None and not reading.is_empty:
        raise ConfigError(f"{path}: {_in_words_of_keys(' '.join(map(str, reading.faults)))}")
    keys = reading.value.keys if reading.value is not None else ()
    by_hash = {key.hash: key for key in keys}
    if len(by_hash) < len(keys):
        raise ConfigError(f"{path}: the same hash is listed twice; remove one entry.")
    return by_hash


def _in_words_of_keys(faults: str) -> str:
    """Return faults of a file in words for keys, not for a configuration."""
    faults = faults.replace(
        NO_SETTINGS, "it has no list of keys: `aileron key new --file` writes one."
    )
    faults = faults.replace("keys must be a list", "keys must be a list of entries, each with hash")
    return re.sub(r"\bsetting(s?)\b", r"field\1", faults)


def warning_of(keys: Iterable[ApiKey], path: Path, now: datetime) -> str:
    """Return what to do if a file accepts nobody at a time; nothing if it accepts somebody."""
    if any(key.state(now) == "active" for key in keys):
        return ""
    return (
        f"{path} has no key that is accepted, so every request gets 401: add one with "
        f"`aileron key new --tenant NAME --file {path}`."
    )


def dump_key(key: ApiKey, indent: int = 2) -> str:
    """Return the YAML of one entry of the file's list, indented by some blanks."""
    fields = key.model_dump(mode="json", exclude_defaults=True)
    entry = yaml.safe_dump([fields], sort_keys=False)
    return "".join(f"{' ' * indent}{line}\n" for line in entry.splitlines())
