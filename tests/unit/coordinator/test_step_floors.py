"""The least time of steps that borrow, as the policy counts on it: that of the ranks of now."""

import pytest
from msgspec.structs import replace

from comm_pool.layout import Mode, Rank
from coordinator.model.cost_model import floors_us
from coordinator.policy.knowledge import Knowledge
from coordinator.protocol.messages.rank import RankHello
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.ranks.roster import Roster
from tests.harness.coordinator.builders import hello


def borrower(rank: int, incarnation: int = 1, **floors_us: int) -> RankHello:
    """A rank whose steps have these floors in dp1, and in sp2 and tp2."""
    dp = tuple((mode, us) for mode, us in floors_us.items() if mode == "dp")
    wide = tuple((mode, us) for mode, us in floors_us.items() if mode != "dp")
    curve = ((1, 20_000), (1_024, 93_000))
    return replace(
        hello(rank, incarnation, widths=(1, 2)),
        step_times=(
            WidthTimes(1, ((Mode.DP, curve),), floor_us=dp),
            WidthTimes(2, ((Mode.TP, curve), (Mode.SP, curve)), floor_us=wide),
        ),
    )


class Cell:
    """The hellos of two ranks, as the policy gets them."""

    def __init__(self, *hellos: RankHello) -> None:
        self.roster, self.knowledge = Roster(2), Knowledge((1, 2), {})
        for each in hellos:
            self.greet(each)

    def greet(self, message: RankHello) -> None:
        self.roster.on_hello(message, 0)
        self.knowledge.on_hello(message)

    def floor_ms(self, name: str, *alive: int) -> float:
        costs = self.knowledge.costs(self.roster, tuple(map(Rank, alive or (0, 1))))
        return costs.groups[name].floor_s * 1e3


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_with_the_longest_loans_decides_about_the_floor(first: int) -> None:
    """A source of weights has none, and may report first or last."""
    hellos = borrower(0), borrower(1, dp=80_000, sp=81_000)
    cell = Cell(hellos[first], hellos[1 - first])
    assert cell.floor_ms("dp1") == pytest.approx(80)
    assert cell.floor_ms("sp2") == pytest.approx(81)
    assert cell.floor_ms("tp2") == 0


def test_a_floor_follows_a_rank_that_restarts() -> None:
    cell = Cell(borrower(0, dp=30_000), borrower(1, dp=80_000))
    assert cell.floor_ms("dp1") == pytest.approx(80)
    cell.greet(borrower(1, 2, dp=50_000))
    assert cell.floor_ms("dp1") == pytest.approx(50)
    cell.greet(borrower(1, 3, dp=10_000))
    assert cell.floor_ms("dp1") == pytest.approx(30), "now rank 0 has the longest loans"
    cell.greet(borrower(0, 2))
    cell.greet(borrower(1, 4))
    assert cell.floor_ms("dp1") == 0, "all have all layers"


def test_the_floor_of_a_rank_that_is_gone_does_not_count() -> None:
    cell = Cell(borrower(0, dp=30_000), borrower(1, dp=80_000))
    assert cell.floor_ms("dp1", 0) == pytest.approx(30)
    assert cell.floor_ms("dp1", 0, 1) == pytest.approx(80), "it is back"


def test_floors_are_per_mode_and_width() -> None:
    times = [*borrower(0, dp=3, sp=4).step_times, *borrower(1, sp=5).step_times]
    assert floors_us(times, 1) == {"dp": 3}
    assert floors_us(times, 2) == {"sp": 5}
    assert floors_us([], 2) == {}
