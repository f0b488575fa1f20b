"""A leader that has lost its link to a gateway: which tasks go on elsewhere, and what waits."""

from collections.abc import Sequence

from comm_pool.layout import Rank
from coordinator.model.events import Note
from coordinator.protocol.messages.gateway import Resubmit
from coordinator.protocol.messages.rank import Drop, LinkCut, Place, Report
from coordinator.protocol.terms import Phase, Stage, TaskId
from coordinator.ranks.roster import Roster
from coordinator.tasks.task import LOSSES_MAX, State
from coordinator.tasks.task_pool import TaskPool
from tests.harness.coordinator import builders
from tests.harness.coordinator.builders import hello, submit
from tests.harness.coordinator.pools import TWO, ZERO, A, B, ended, group, messages, pool, state

HERE, THERE = "tcp://here", "tcp://there"


def two_gateways(*more: str) -> TaskPool:
    """Tasks of two gateways, all at one leader."""
    tasks = pool()
    tasks.submit(submit("a", reply_to=HERE), 0)
    tasks.submit(submit("b", reply_to=THERE, gateway="other"), 0)
    for name in more:
        tasks.submit(submit(name, reply_to=HERE), 0)
    assert len(tasks.place([group(ZERO)], 0)) == 2 + len(more)
    return tasks


def report(*links: LinkCut, incarnation: int = 1) -> Report:
    return builders.report(0, Stage(1, Phase.SERVE), incarnation=incarnation, links=links)


def roster_of(*incarnations: int) -> Roster:
    roster = Roster(4)
    for each in incarnations:
        roster.on_hello(hello(0, each), 0)
    return roster


def told(roster: Roster, tasks: TaskPool, *links: LinkCut) -> Sequence[object]:
    cuts = roster.take_cuts(report(*links))
    effects = tasks.on_broken_links(Rank(0), cuts, 1)
    assert all(isinstance(each, Note) for each in effects[:1]), "said before it is acted on"
    return messages(effects)


def test_only_tasks_of_that_link_are_taken_up_and_fenced() -> None:
    tasks, roster = two_gateways(), roster_of(1)
    assert told(roster, tasks, LinkCut(HERE, 1, is_open=True)) == [Drop(A, 1), Resubmit(A, 2)]
    assert (state(tasks, A), state(tasks, B)) == (State.ASKED, State.PLACED)
    assert tasks.submit(submit("a", reply_to=HERE, delivered=[7, 8], attempt=2), 2) == []
    assert messages(tasks.place([group(ZERO, cut_off=HERE)], 3)) == []
    (place,) = messages(tasks.place([group(ZERO, cut_off=HERE), group(TWO)], 3))
    assert isinstance(place, Place)
    assert (place.attempt, place.generated_tokens) == (3, (7, 8))
    assert tasks.tasks[A].leader == TWO


def test_a_break_is_acted_on_once_and_the_next_one_again() -> None:
    tasks, roster = two_gateways("c"), roster_of(1)
    assert told(roster, tasks, LinkCut(HERE, 4, is_open=True))
    assert not told(roster, tasks, LinkCut(HERE, 4, is_open=True))
    for name, attempt in (("a", 2), ("c", 2)):
        tasks.submit(submit(name, reply_to=HERE, attempt=attempt), 2)
    assert len(tasks.place([group(ZERO)], 3)) == 2
    assert not told(roster, tasks, LinkCut(HERE, 4, is_open=False))
    assert told(roster, tasks, LinkCut(HERE, 6, is_open=False)) == [
        Drop(A, 3),
        Resubmit(A, 4),
        Drop(TaskId("c"), 3),
        Resubmit(TaskId("c"), 4),
    ], "it broke and came back between two reports"


def test_a_new_process_counts_its_breaks_anew() -> None:
    tasks, roster = two_gateways(), roster_of(1)
    roster.take_cuts(report(LinkCut(HERE, 9, is_open=True)))
    roster.on_hello(hello(0, 2), 0)
    assert roster.take_cuts(report(LinkCut(HERE, 1, is_open=True), incarnation=2)) == [HERE]
    assert state(tasks, A) is State.PLACED


def test_a_finished_task_whose_last_tokens_went_over_the_link_is_asked_for() -> None:
    tasks, roster = two_gateways(), roster_of(1)
    tasks.ended(ZERO, ended(A, 1))
    tasks.ended(ZERO, ended(B, 1))
    assert told(roster, tasks, LinkCut(HERE, 1, is_open=True)) == [Resubmit(A, 2)]
    assert tasks.submit(submit("a", reply_to=HERE, delivered=[7], attempt=2), 2) == []
    assert state(tasks, A) is State.QUEUED
    assert state(tasks, B) is None


def test_links_that_break_often_cost_no_task_its_life() -> None:
    """A task is blamed for ranks that end under it, not for wires."""
    tasks, roster = two_gateways(), roster_of(1)
    for number in range(1, LOSSES_MAX + 3):
        *_, asked = told(roster, tasks, LinkCut(HERE, number, is_open=False))
        assert isinstance(asked, Resubmit)
        tasks.submit(submit("a", reply_to=HERE, attempt=asked.attempt), 2)
        assert len(tasks.place([group(ZERO)], 3)) == 1
    assert tasks.tasks[A].losses == 0


def test_tasks_that_no_leader_can_answer_wait_and_stand_in_nobodys_way() -> None:
    tasks = pool()
    for name in ("a", "b"):
        tasks.submit(submit(name, reply_to=HERE), 0)
    tasks.submit(submit("c", reply_to=THERE), 0)
    (place,) = messages(tasks.place([group(ZERO, cut_off=HERE, max_tasks=1)], 1))
    assert isinstance(place, Place)
    assert place.header.task == TaskId("c")
    assert state(tasks, A) is state(tasks, B) is State.QUEUED
    assert len(messages(tasks.place([group(Rank(1))], 2))) == 2
