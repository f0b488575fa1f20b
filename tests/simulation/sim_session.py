"""A simulated rank's session with its coordinator: what `RankSession` does, on the world's network.

It goes on while the rank's main loop waits in a step: heartbeats repeat the last report.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.protocol.messages.rank import RankHello, Report
from tests.simulation.network import Session
from worker.io.session import HelloWanted, merge_reports

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank

HEARTBEAT_TICKS = 5
NOTHING: dict[str, Any] = dict.fromkeys(("ended", "returned", "times", "cached"), ())


class SimSession:
    """See `RankSession`."""

    def __init__(self, process: "SimRank") -> None:
        self._process = process
        self.link: Session | None = None
        self._latest: Report | None = None
        self._has_greeted = False
        self._due = 0

    @property
    def is_open(self) -> bool:
        return self.link is not None and self.link.is_open

    @property
    def awaits_hello(self) -> bool:
        return self.is_open and not self._has_greeted

    def opened(self, link: Session) -> None:
        """Ask the main loop for a hello; earlier reports come after it."""
        self.link, self._has_greeted = link, False
        self._process.inbox.put(HelloWanted())

    def publish(self, report: Report) -> None:
        """See `RankSession`, as all that follows."""
        self._latest = merge_reports(self._latest, report)
        self._send()

    def hello(self, hello: RankHello) -> None:
        if self.link is not None and self.link.is_open and not self._has_greeted:
            self._has_greeted = True
            self._process.world.rank_says(self._process, self.link, hello)
            self._send()

    def beat(self) -> None:
        """Repeat the last report now and then."""
        if self._process.world.now >= self._due:
            self._send()

    def _send(self) -> None:
        report, link = self._latest, self.link
        if report is None or link is None or not (link.is_open and self._has_greeted):
            return
        self._due = self._process.world.now + HEARTBEAT_TICKS
        sent_at_ms = self._process.host.now_ns() // 1_000_000
        sent = msgspec.structs.replace(report, sent_at_ms=sent_at_ms)
        self._latest = msgspec.structs.replace(report, **NOTHING)
        self._process.world.rank_says(self._process, link, sent)
