"""Salts that keep the prefix caches of tenants apart.

vLLM hashes a request's `cache_salt` into its first block, so prompts with different salts share no
cached block, and neither latency nor `cached_tokens` shows what another tenant has sent. The salt
follows from the tenant and the cell's secret: every gateway makes the same one, and no client can
guess another tenant's. Gateways call this module. Pure.
"""

import hashlib
import hmac
from dataclasses import dataclass

SALT_CHARS = 32
"""Hexadecimal digits of a salt."""

_PURPOSE = b"aileron-prefix-cache-salt\0"


@dataclass(frozen=True, slots=True)
class CacheSalts:
    """Makes the salts of a gateway."""

    secret: str
    """The cell's token; gateways of a fleet have the same one."""

    def of(self, tenant: str, own: str | None) -> str | None:
        """Return the salt of a tenant's request, whose own salt parts its cache further.

        Without a tenant it is the request's own.
        """
        if not tenant:
            return own
        name = tenant.encode()
        text = b"%s%d\0%s\0%s" % (_PURPOSE, len(name), name, (own or "").encode("utf-8", "replace"))
        digest = hmac.new(self.secret.encode(), text, hashlib.sha256)
        return digest.hexdigest()[:SALT_CHARS]
