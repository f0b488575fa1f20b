"""API keys: a YAML file of their hashes and of what each key may do.

Keys are long and random, so one SHA-256 protects them at rest. `aileron key` writes the file; the
gateway reads it again when it changes. Pure, except for reading a path.
"""

import hashlib
import re
import secrets
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from coordinator.protocol.config import ConfigError
from coordinator.protocol.mistakes import sentences_of

KEY_PREFIX = "sk-aileron-"
KEY_BYTES = 32
"""Random bytes of a key."""
KEYS_MAX = 100_000
HASH_PREFIX = "sha256:"

_HASH = re.compile(HASH_PREFIX + "[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

TierName = Literal["interactive", "standard", "batch"]


class ApiKey(BaseModel):
    """One key and its limits; a limit of 0 means none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hash: str
    tenant: str
    max_tier: TierName = "interactive"
    """The most urgent tier that its requests may use."""
    default_tier: TierName = "standard"
    """The tier of requests that name none."""
    requests_per_minute: int = Field(default=0, ge=0)
    tokens_per_minute: int = Field(default=0, ge=0)
    """Prompt and generated tokens together."""

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

    @property
    def id(self) -> str:
        """A short name for logs and limits that does not reveal the key."""
        return self.hash.removeprefix(HASH_PREFIX)[:16]


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[ApiKey, ...] = Field(default=(), max_length=KEYS_MAX)


def new_secret() -> str:
    """Return a new key; it is shown once."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(secret: str) -> str:
    """Return the form of a key that the file stores."""
    return HASH_PREFIX + hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def load_keys(path: Path) -> dict[str, ApiKey]:
    """Read the file's keys by hash; raises `ConfigError` with one sentence per mistake."""
    try:
        data = yaml.safe_load(path.read_bytes())
        keys = _KeyFile.model_validate(data or {}).keys
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML.") from error
    except ValidationError as error:
        # Without the values: a key pasted in place of its hash must not reach a log.
        raise ConfigError(f"{path}: {sentences_of(error, _KeyFile)}") from error
    by_hash = {key.hash: key for key in keys}
    if len(by_hash) < len(keys):
        raise ConfigError(f"{path}: the same hash is listed twice; remove one entry.")
    return by_hash


def dump_key(key: ApiKey) -> str:
    """Return the YAML of one entry of the file's list."""
    entry = yaml.safe_dump([key.model_dump(exclude_defaults=True)], sort_keys=False)
    return "".join(f"  {line}\n" for line in entry.splitlines())
