"""Which ports are free, for processes that bind them only seconds later."""

import random
import socket
from collections import deque
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOW_PORT, HIGH_PORT = 20_000, 60_000
"""The range of ports to search, half open."""
ATTEMPTS_MAX = 200
REMEMBERED_MAX = 100
"""Number of ports given out last that are not given out again: they may not be bound yet."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: deque[int] = deque(maxlen=REMEMBERED_MAX)


class NoFreePortError(OSError):
    """Too few ports are free; the message is one sentence."""


def free_ports(count: int) -> tuple[int, ...]:
    """Return different loopback ports that nothing listens on now; raises `NoFreePortError`.

    They lie outside the kernel's range for outgoing connections, and are none of the last
    `REMEMBERED_MAX` that this process gave out, because their owners bind them only seconds later.
    """
    low, high = _ephemeral_range()
    taken = set(_given)
    allowed = [
        port for port in range(LOW_PORT, HIGH_PORT) if not low <= port <= high and port not in taken
    ]
    found: list[int] = []
    # Use a separate random source: a caller may have seeded the common one.
    for port in random.SystemRandom().sample(allowed, min(ATTEMPTS_MAX, len(allowed))):
        if bind_error(LOOPBACK, port) is None:
            found.append(port)
            if len(found) == count:
                _given.extend(found)
                return tuple(found)
    raise NoFreePortError(
        f"found fewer than {count} free ports from {LOW_PORT} to {HIGH_PORT} on {LOOPBACK}: "
        "stop processes that listen there."
    )


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return 0, -1
    # If a machine gives nearly the whole range away, any free port must do.
    return (low, high) if low > LOW_PORT + ATTEMPTS_MAX else (0, -1)


def bind_error(host: str, port: int) -> OSError | None:
    """Return why nothing can listen there; None if something can."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None
