"""Which groups are open to tasks, and the longest context that any of them could hold."""

from comm_pool.layout import Rank
from coordinator.protocol.terms import Phase, TaskId
from coordinator.ranks.roster import Roster
from coordinator.tasks.placement import Loads, max_context_tokens
from tests.harness.coordinator.builders import hello, submit
from tests.transcripts.cell import Cell

EVERYONE = tuple(map(Rank, range(4)))


def roster(**fields: object) -> Roster:
    made = Roster(4)
    for rank in EVERYONE:
        made.on_hello(hello(rank, **fields), 0)  # type: ignore[arg-type]
    return made


def placed(cell: Cell) -> list[str]:
    """Who was given a task, and in which formation, since the last look."""
    return [
        f"{effect.rank}@{effect.message.binding.formation}"  # type: ignore[union-attr]
        for effect in cell.take()
        if type(getattr(effect, "message", None)).__name__ == "Place"
    ]


def test_a_context_grows_with_the_width_up_to_the_models_limit() -> None:
    assert max_context_tokens(roster(widths=(1,)), EVERYONE) == 10 * 16
    assert max_context_tokens(roster(widths=(1, 2)), EVERYONE) == 2 * 10 * 16
    assert max_context_tokens(roster(), EVERYONE) == 4 * 10 * 16
    assert max_context_tokens(roster(pages_total=101), EVERYONE) == 1_000


def test_a_context_shrinks_with_the_ranks_that_are_left() -> None:
    assert max_context_tokens(roster(), EVERYONE[:3]) == 2 * 10 * 16
    assert max_context_tokens(roster(), (Rank(1), Rank(2))) == 10 * 16
    assert max_context_tokens(roster(), ()) == 0
    ranks = roster()
    ranks.on_hello(hello(1, 2, widths=(1,), cohort=1), 0)
    assert max_context_tokens(ranks, EVERYONE) == 2 * 10 * 16, "only ranks 2 and 3 can pair"


def test_loads_are_counted_per_leader() -> None:
    loads = Loads()
    loads.count(Rank(0), TaskId("a"), 10)
    loads.count(Rank(0), TaskId("a"), 15)
    loads.count(Rank(0), TaskId("b"), 1)
    assert (loads.tokens(Rank(0)), loads.tasks(Rank(0))) == (16, 2)
    loads.remove(Rank(0), TaskId("a"))
    loads.remove(Rank(0), TaskId("a"))
    assert (loads.tokens(Rank(0)), loads.tasks(Rank(0)), loads.tasks(Rank(1))) == (1, 1, 0)


def test_groups_that_a_switch_does_not_change_are_given_tasks_during_it() -> None:
    cell = Cell("dp4")
    cell.serve()
    cell.switch("tp2+dp2")
    for name in "abc":
        cell.say(submit(name))
    assert placed(cell) == ["2@1", "3@1", "2@1"]
    cell.settle()
    cell.take()
    cell.say(submit("d"))
    assert placed(cell) == ["0@2"]


def test_a_group_is_given_tasks_when_its_leader_serves_and_not_before() -> None:
    cell = Cell("dp2")
    cell.serve()
    cell.switch("tp2")
    cell.say(submit("a"))
    cell.settle(0)
    assert placed(cell) == []
    while cell.ranks[Rank(0)].participant.stage.phase is not Phase.SERVE:
        assert placed(cell) == []
        cell.settle(1, 0)
    assert placed(cell) == ["0@2"]
