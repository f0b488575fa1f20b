"""Which reports are answered: those whose answer is news, and one in each interval."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.terms import Phase
from coordinator.switching.directive_sender import DirectiveSender
from tests.harness.coordinator.builders import directive, target

INTERVAL_MS = 100
PARK = directive(target("dp4", 1), 2, Phase.PARK)
MOVE = directive(target("dp4", 1), 2, Phase.MOVE)


class Desk:
    """Answers of a coordinator that has this to say."""

    def __init__(self, interval_ms: int = INTERVAL_MS) -> None:
        self.says: Directive | None = PARK
        switcher = SimpleNamespace(directive_for=self._directive_for)
        self.answers = DirectiveSender(cast(Any, switcher), interval_ms)
        self.now_ms = 1_000

    def _directive_for(self, _rank: Rank) -> Directive | None:
        """Each one answers the newest report."""
        if self.says is None:
            return None
        return msgspec.structs.replace(self.says, answers_ms=self.now_ms)

    def answered(self, rank: int = 0, *, after_ms: int = 1) -> list[Directive]:
        self.now_ms += after_ms
        found = self.answers.answer(Rank(rank), self.now_ms)
        assert all(each.rank == rank for each in found)
        return [cast(Directive, each.message) for each in found]


def test_the_same_is_not_said_twice_within_the_interval() -> None:
    desk = Desk()
    assert [each.answers_ms for each in desk.answered()] == [1_001]
    assert desk.answered(after_ms=50) == []
    assert desk.answered(after_ms=49) == []
    assert [each.answers_ms for each in desk.answered()] == [1_101], "a lease is renewed"
    assert desk.answered(after_ms=99) == [], "counted from what was said last"


def test_news_is_said_at_once() -> None:
    desk = Desk()
    assert desk.answered()
    desk.says = MOVE
    assert [each.stage.phase for each in desk.answered()] == [Phase.MOVE]
    assert desk.answered() == []


def test_each_rank_is_told_by_itself() -> None:
    desk = Desk()
    assert desk.answered(0)
    assert desk.answered(1)
    assert desk.answered(0) == desk.answered(1) == []


def test_what_was_told_without_being_asked_is_not_said_again() -> None:
    desk = Desk()
    told = desk.answers.directives([Rank(0), Rank(1)], desk.now_ms)
    assert [each.rank for each in told] == [0, 1]
    assert desk.answered(0) == desk.answered(1) == []
    assert desk.answers.directives([Rank(0)], desk.now_ms), "who is to be told is told"


def test_a_new_session_has_heard_nothing() -> None:
    desk = Desk()
    assert desk.answered()
    desk.answers.opened(Rank(0))
    assert desk.answered()


def test_without_an_interval_all_reports_are_answered() -> None:
    desk = Desk(interval_ms=0)
    assert all(desk.answered(after_ms=0) for _ in range(3))


def test_who_is_told_nothing_gets_no_answer() -> None:
    desk = Desk()
    desk.says = None
    assert desk.answered() == []
    assert desk.answers.directives([Rank(0)], desk.now_ms) == []
