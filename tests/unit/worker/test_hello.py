"""What a rank says of what it holds when a session begins."""

from dataclasses import replace
from typing import Any

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import Drop, RankHello
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import TaskId, Tier
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank
from worker.rank.led_tasks import LedTask
from worker.rank.reports import hello_of

PAIR = (Rank(0), Rank(1))


def task(name: str, attempt: int) -> LedTask:
    header = TaskHeader(TaskId(name), "g", "tcp://here", 3, 9, Tier.STANDARD)
    return LedTask(header, attempt, Group(PAIR, Mode.TP), 2)


def hello(*deferred: Drop, whole_layers_taken: int | None = None, **of_spec: Any) -> RankHello:
    """Of a rank with two tasks, and pages in the lease of a pair."""
    rank = FakeRank(FakeCell(4))
    engine, runtime = rank.engine, rank.runtime
    engine.spec = replace(engine.spec, **of_spec)
    engine.whole_layers = whole_layers_taken
    engine.pages.lease_pages(PAIR, 3)
    for each in (task("a", 1), task("b", 2)):
        runtime.book.open(each)
    return hello_of(engine, runtime, SwitchParticipant(Rank(0), 1), deferred)


def held(message: RankHello) -> list[tuple[str, int]]:
    return [(each.header.task, each.attempt) for each in message.held]


def test_it_tells_its_tasks_and_whose_pages_it_has() -> None:
    message = hello()
    assert held(message) == [("a", 1), ("b", 2)]
    assert message.leases == (PAIR,)


def test_a_task_that_is_to_be_dropped_is_not_told() -> None:
    """A coordinator that has just started would take it for one that runs."""
    assert held(hello(Drop(TaskId("a"), 1))) == [("b", 2)]
    assert held(hello(Drop(TaskId("b"), 1))) == [("a", 1), ("b", 2)], "that was another attempt"


def test_it_tells_what_part_of_the_weights_it_holds_and_what_it_borrows() -> None:
    message = hello()
    assert (message.part, message.parts, message.borrow, message.whole_layers) == (0, 1, "none", 0)
    assert message.widths == (1, 2, 4)
    message = hello(rank=Rank(6), parts=2, borrow="ffn", whole_layers=3)
    assert (message.part, message.parts, message.borrow, message.whole_layers) == (1, 2, "ffn", 3)
    assert hello(rank=Rank(6), parts=4).part == 2
    assert hello(parts=2).widths == (1, 4), "narrower groups lack parts"
    auto = hello(parts=2, borrow="ffn", whole_layers="auto", whole_layers_taken=7)
    assert auto.whole_layers == 7
    assert hello(parts=2, borrow="ffn", whole_layers="auto").whole_layers == 0
