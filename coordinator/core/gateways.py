"""Which gateways are present, and since when the others are away. Pure; the core calls it."""


class Gateways:
    """The gateways of a cell, each with the time at which its session ended, if it did."""

    __slots__ = ("_closed_ms",)

    def __init__(self) -> None:
        self._closed_ms: dict[str, int | None] = {}

    def heard(self, gateway: str) -> None:
        """Record that a gateway is present."""
        self._closed_ms[gateway] = None

    def closed(self, gateway: str, now_ms: int) -> None:
        """Record that its session ended."""
        self._closed_ms[gateway] = now_ms

    def present(self) -> list[str]:
        """Return the gateways with a session."""
        return [name for name, closed_ms in self._closed_ms.items() if closed_ms is None]

    def take_gone(self, now_ms: int, limit_ms: int) -> list[str]:
        """Forget and return gateways that have been away for longer than `limit_ms`."""
        gone = [
            name
            for name, closed_ms in self._closed_ms.items()
            if closed_ms is not None and now_ms - closed_ms > limit_ms
        ]
        for name in gone:
            del self._closed_ms[name]
        return gone
