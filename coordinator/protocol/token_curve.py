"""CURVE encryption of pushed tokens: the ranks' key, and a gateway's key in its reply address.

Each gateway process has a key pair of its own, and its reply address names the public key. All
ranks have one key pair, which follows from the cell's shared token, so that a gateway knows whom to
let in. Without I/O and without ZeroMQ.
"""

import hashlib
import hmac

KEY_BYTES = 32
"""Size of a public or secret key of Curve25519."""

_PURPOSE = b"aileron: CURVE secret key of ranks"
_SEPARATOR = "?curve="


def rank_secret_key(token: str) -> bytes:
    """Return the secret key of all ranks whose cell has this shared token."""
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).digest()


def with_public_key(address: str, key: bytes) -> str:
    """Return the reply address of a gateway whose socket has this public key."""
    return f"{address}{_SEPARATOR}{key.hex()}"


def split_address(reply_to: str) -> tuple[str, bytes | None]:
    """Return the ZeroMQ address and the gateway's public key, or None where it does not encrypt.

    Raises ValueError if there is a key of another size.
    """
    address, separator, text = reply_to.partition(_SEPARATOR)
    if not separator:
        return address, None
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{reply_to} has a key of {len(key)} bytes instead of {KEY_BYTES}.")
    return address, key
