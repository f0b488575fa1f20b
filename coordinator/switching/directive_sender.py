"""Sends directives to ranks, and decides which of their reports are answered with one. Pure.

An answer renews a rank's time lease and shows that its coordinator lives; answers at intervals are
enough for both. In a switch each rank reports several times within milliseconds: answers without
news would cost reading time while others wait for that rank.
"""

from collections.abc import Iterable

import msgspec

from comm_pool.layout import Rank
from coordinator.model.events import ToRank
from coordinator.protocol.messages.rank import Directive
from coordinator.switching.switcher import Switcher


class DirectiveSender:
    """The last directive sent to each rank, and when."""

    __slots__ = ("_interval_ms", "_sent", "_switcher")

    def __init__(self, switcher: Switcher, interval_ms: int) -> None:
        """`interval_ms` is the least time between identical directives; 0 answers every report."""
        self._switcher = switcher
        self._interval_ms = interval_ms
        self._sent: dict[Rank, tuple[Directive, int]] = {}

    def opened(self, rank: Rank) -> None:
        """The rank has a new session: directives of the old one may not have arrived."""
        self._sent.pop(rank, None)

    def directives(self, ranks: Iterable[Rank], now_ms: int) -> list[ToRank]:
        """Return the current directives of these ranks."""
        return [
            self._tell(rank, directive, now_ms)
            for rank in ranks
            if (directive := self._switcher.directive_for(rank)) is not None
        ]

    def answer(self, rank: Rank, now_ms: int) -> list[ToRank]:
        """Return the answer to a rank's report, if it is due."""
        directive = self._switcher.directive_for(rank)
        if directive is None or not self._is_due(rank, directive, now_ms):
            return []
        return [self._tell(rank, directive, now_ms)]

    def _is_due(self, rank: Rank, directive: Directive, now_ms: int) -> bool:
        sent, at_ms = self._sent.get(rank, (None, 0))
        if sent is None or now_ms - at_ms >= self._interval_ms:
            return True
        return msgspec.structs.replace(directive, answers_ms=sent.answers_ms) != sent

    def _tell(self, rank: Rank, directive: Directive, now_ms: int) -> ToRank:
        self._sent[rank] = directive, now_ms
        return ToRank(rank, directive)
