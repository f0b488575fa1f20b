"""Identifies clients by their API key, looked up by hash, and limits wrong keys per address.

The key file is read again when it changes; if it cannot be read, the old keys stay and a log line
says so. A key expires at its time, without that. Called by the edge for every request but the
probes.
"""

import asyncio
import hmac
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import structlog
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter

from coordinator.protocol.config import ConfigError
from coordinator.protocol.file_stamp import Stamp, stamp_of
from coordinator.protocol.keys import ApiKey, hash_of, load_keys, warning_of
from gateway.errors import ApiError, api_error

RELOAD_S = 1.0
"""Interval of checks for a changed key file."""

KEY_CHARS_MAX = 512
"""A longer key is not even hashed."""

WRONG_KEYS_PER_MINUTE = 60
"""Wrong keys of one address answered with 401; further ones get 429. Right keys pass."""

log = structlog.get_logger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


class KeyRing:
    """The keys of a gateway; without a file every client is the same anonymous one."""

    def __init__(self, path: str, now: Callable[[], datetime] = _now) -> None:
        """Read the key file, if any; raises `ConfigError` with a sentence if that fails."""
        self._path = Path(path) if path else None
        self._now = now
        self._keys: Mapping[str, ApiKey] = {}
        self._by_id: Mapping[str, ApiKey] = {}
        self._stamp: Stamp | None = None
        self.refusal = ""
        """Why the file as it is now cannot be read, so that older keys are in use; or nothing."""
        self._wrong = FixedWindowRateLimiter(MemoryStorage())
        self._wrong_limit = RateLimitItemPerMinute(WRONG_KEYS_PER_MINUTE)
        if self._path is not None:
            self._stamp = stamp_of(self._path)
            self._take(load_keys(self._path))

    @property
    def count(self) -> int:
        """The number of keys in use."""
        return len(self._keys)

    @property
    def is_outdated(self) -> bool:
        """Whether the newest file could not be read, so that older keys are in use."""
        return bool(self.refusal)

    @property
    def warning(self) -> str:
        """Why operators should look at the file: it cannot be read, or accepts nobody."""
        if self.refusal or self._path is None:
            return self.refusal
        return warning_of(self._keys.values(), self._path, self._now())

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._path is None

    async def identify(
        self, headers: Mapping[str, str], address: str, own_header: str = ""
    ) -> ApiKey | ApiError | None:
        """Return the client's key, None for an anonymous one, or why it is refused.

        `own_header` also holds a key on routes whose clients send it there. It comes first: some
        clients send both headers, and only one with a key of this server.
        """
        if self.is_open:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        bearer = bearer.strip()
        sent = headers.get(own_header, "").strip()
        for secret in (sent, bearer if scheme.lower() == "bearer" else ""):
            if (key := self._find(secret)) is not None:
                return self._refusal(key) or key
        if not await self._wrong.hit(self._wrong_limit, address):
            text = "Too many wrong API keys came from this address: wait before the next try."
            return api_error("rate_limit_exceeded", text, retry_after_s=60)
        if not (bearer or sent):
            other = f" or `{own_header}: KEY`" if own_header else ""
            text = f"No API key was sent: send it as `Authorization: Bearer KEY`{other}."
        else:
            text = "The API key is not valid: check it, or ask the server's operator for one."
        return api_error("invalid_api_key", text)

    def _take(self, keys: Mapping[str, ApiKey]) -> None:
        self._keys = keys
        self._by_id = {key.id: key for key in keys.values()}

    def _refusal(self, key: ApiKey) -> ApiError | None:
        """Return why a known key is not accepted now; it is no guess, so it is not counted."""
        state = key.state(self._now())
        if state == "active":
            return None
        text = f"The API key is {state}: ask the server's operator for a new one."
        return api_error(f"api_key_{state}", text)

    def _find(self, secret: str) -> ApiKey | None:
        if not 0 < len(secret) <= KEY_CHARS_MAX:
            return None
        digest = hash_of(secret)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.hash, digest) else None

    def of_batch(self, key_id: str) -> ApiKey | ApiError | None:
        """Return what limits a line of a batch, which counts in no minute; or why it is refused.

        None for a batch or a gateway without keys.
        """
        if self.is_open or not key_id:
            return None
        key = self._by_id.get(key_id)
        if key is None:
            return api_error("api_key_revoked", "The API key of this batch is no longer there.")
        no_minutes = {"requests_per_minute": 0, "tokens_per_minute": 0}
        return self._refusal(key) or key.model_copy(update=no_minutes)

    async def watch(self) -> None:
        """Read the file again whenever it changes, until cancelled."""
        if self._path is None:
            return
        while True:
            await asyncio.sleep(RELOAD_S)
            stamp = await asyncio.to_thread(stamp_of, self._path)
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                self._take(await asyncio.to_thread(load_keys, self._path))
            except ConfigError as error:
                self.refusal = str(error)
                log.warning("keys_not_read", reason=str(error), keys=len(self._keys))
            else:
                self.refusal = ""
                log.info("keys_read", keys=len(self._keys))
