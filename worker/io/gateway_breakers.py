"""Circuit breakers for the links over which a rank pushes tokens to gateways. Pure.

One breaker per link, as in Nygard's "Release It!". It opens when a link breaks or does not come up
in time: tokens in flight may be lost, so its tasks must resume elsewhere. The connection's own
heartbeats probe it (half-open), at no cost to streams. It closes when the link has held for a
while: longer the more often it broke, so an unstable link stays open. Times are seconds of the
publisher's clock.
"""

from dataclasses import dataclass

from coordinator.protocol.messages.rank import LinkCut

CONNECT_LIMIT_S = 2.0
"""Maximum time for a new link to come up before it counts as broken."""

HOLDS_S = (1.0, 10.0, 30.0, 60.0)
"""How long a link must hold before it is used again, after its first, second ... break."""

FORGIVEN_AFTER_S = 120.0
"""A link used for this long without a break counts as one that never broke."""

GONE_AFTER_S = 120.0
"""A link that is down for this long is given up: the gateway has ended, or will reconnect."""


@dataclass(slots=True)
class _Link:
    since_s: float
    """When it entered its current state: up, down, used again."""
    is_up: bool = False
    is_open: bool = False
    breaks: int = 0
    """The number of recent breaks."""
    number: int = 0
    """The number of its last break, counted over all links; 0 before the first one."""


class GatewayBreakers:
    """All links of one rank's process, by the address of a gateway's socket."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._cuts = 0

    def add(self, address: str, now_s: float) -> None:
        """Note that a connection is being made."""
        self._links[address] = _Link(now_s)

    def remove(self, address: str) -> None:
        """Note that the connection is closed for good."""
        del self._links[address]

    def mark_up(self, address: str, now_s: float) -> None:
        """Note that both ends have agreed on the connection."""
        link = self._links[address]
        link.is_up, link.since_s = True, now_s

    def mark_down(self, address: str, now_s: float) -> None:
        """Note that the connection is lost, refused, or silent for too long."""
        link = self._links[address]
        if link.is_up:
            link.is_up = False
            self._break(link, now_s)

    def tick(self, now_s: float) -> list[str]:
        """Advance time; return the addresses to give up."""
        for link in self._links.values():
            held_s = now_s - link.since_s
            if not link.is_up:
                if not link.is_open and held_s >= CONNECT_LIMIT_S:
                    self._break(link, now_s)
            elif link.is_open and held_s >= HOLDS_S[min(link.breaks, len(HOLDS_S)) - 1]:
                link.is_open, link.since_s = False, now_s
            elif not link.is_open and link.breaks and held_s >= FORGIVEN_AFTER_S:
                link.breaks = 0
        return [
            address
            for address, link in self._links.items()
            if not link.is_up and now_s - link.since_s >= GONE_AFTER_S
        ]

    def link_cuts(self) -> tuple[LinkCut, ...]:
        """Return what to report: every link that broke and is not forgiven yet."""
        return tuple(
            LinkCut(address, link.number, link.is_open)
            for address, link in self._links.items()
            if link.breaks
        )

    def _break(self, link: _Link, now_s: float) -> None:
        link.since_s = now_s
        if link.is_open:
            return  # The link has not been used since the last break.
        self._cuts += 1
        link.number = self._cuts
        link.breaks += 1
        link.is_open = True
