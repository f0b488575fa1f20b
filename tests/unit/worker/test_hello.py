"""What a rank says of what it holds when a session begins."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import Drop, RankHello
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import TaskId, Tier
from kvadaptor.pages import PagePool
from worker.rank.engine import EngineFacts
from worker.rank.hello import hello_of
from worker.rank.led_tasks import LedTask, LedTasks
from worker.spec import RankSpec

PAIR = (Rank(0), Rank(1))
SPEC = RankSpec(Rank(0), Rank(0), 4, (1, 2, 4), 4, "", 1)


def task(name: str, attempt: int) -> LedTask:
    header = TaskHeader(TaskId(name), "g", "tcp://here", 3, 9, Tier.STANDARD)
    return LedTask(header, attempt, Group(PAIR, Mode.TP), 2)


def hello(*deferred: Drop, whole_layers_taken: int | None = None, **of_spec: Any) -> RankHello:
    """Of a rank with two tasks, and pages in the lease of a pair."""
    pages = PagePool(9)
    pages.lease_pages(PAIR, 3)
    engine = SimpleNamespace(
        spec=replace(SPEC, **of_spec),
        facts=lambda: EngineFacts("cpu", 4, 128, 64, (), (), whole_layers_taken),
        kv=SimpleNamespace(
            geometry=SimpleNamespace(tokens_per_slot=16, num_kv_heads=8), num_pages=9
        ),
        pages=pages,
    )
    book = LedTasks()
    for each in (task("a", 1), task("b", 2)):
        book.open(each)
    migration = SimpleNamespace(ranks=(), epoch=0, adopted=())
    runtime = SimpleNamespace(book=book, migration=migration)
    what: Any = engine, runtime, SwitchParticipant(Rank(0), 1), deferred
    return hello_of(*cast(Any, what))


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
