"""The admin key, and the check that an address may open with it."""

from coordinator.protocol.addresses import is_loopback

ADMIN_KEY_ENV = "AILERON_ADMIN_KEY"
ADMIN_KEY_CHARS_MIN = 16


class AdminKeyError(ValueError):
    """The admin port must not open like this; the message is one sentence that says what to do."""


def require_key(host: str, key: str) -> None:
    """Raise `AdminKeyError` unless an admin port on `host` may open with `key` (empty: none)."""
    if key and len(key) < ADMIN_KEY_CHARS_MIN:
        raise AdminKeyError(f"{ADMIN_KEY_ENV} must have at least {ADMIN_KEY_CHARS_MIN} characters.")
    if not key and not is_loopback(host):
        raise AdminKeyError(
            f"admin.host {host} can be reached from other machines: set {ADMIN_KEY_ENV} to a "
            f"secret of at least {ADMIN_KEY_CHARS_MIN} characters, or bind to 127.0.0.1."
        )
