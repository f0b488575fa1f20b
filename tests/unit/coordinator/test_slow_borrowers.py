"""Which ranks are left out as slow where steps take at least as long as their loans.

A small model of a cell: a step of a rank takes as long as its loans, each at the pace of its
lender's link, or as long as it computes. Ranks report by the worker's own log of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from comm_pool.layout import Mode, Rank
from comm_pool.loans import loan_plan
from coordinator.model.settings import OutlierSettings
from coordinator.protocol.messages.rank import RankHello
from coordinator.protocol.messages.steps import ServedSteps, WidthTimes
from coordinator.protocol.terms import Carry, Phase, Stage
from coordinator.ranks.outliers import (
    WINDOW_MS,
    WINDOWS,
    OutlierDetector,
    paces_of,
    usual_floors,
)
from tests.harness.coordinator.builders import hello, layout, report
from tests.harness.coordinator.switchers import Ranks
from worker.rank.step_log import StepLog

LAYERS = 32
LOAN_S = 0.002
"""What a loan takes over a link as it should be: 64 ms for all layers of one other part."""
COMPUTE_S, TOKEN_S = 0.015, 0.000_05
STEPS = 20


@dataclass
class Plan:
    tokens: int
    context: int = 0
    mode: Mode = Mode.DP


@dataclass
class BorrowingCell:
    """Ranks that share out parts; `links` and `computes` are how many times slower some are."""

    parts: int
    ranks: int = 4
    whole: Sequence[int] = (0, 0, 0, 0)
    links: Mapping[int, float] = field(default_factory=dict)
    computes: Mapping[int, float] = field(default_factory=dict)
    tokens: Mapping[int, int] = field(default_factory=dict)

    def loans_s(self, rank: int, links: Mapping[int, float]) -> float:
        whole = range(self.whole[rank])
        plan = loan_plan(rank, self.ranks, self.parts, LAYERS, whole=whole)
        return sum(LOAN_S * links.get(loan.lender, 1.0) for loan in plan)

    def served(self, rank: int, floor_us: int) -> tuple[ServedSteps, ...]:
        """Return what the rank reports of a window."""
        log, now_ns = StepLog(), 0
        for number in range(STEPS):
            tokens = self.tokens.get(rank, 4) + number % 3
            computed_s = (COMPUTE_S + TOKEN_S * tokens) * self.computes.get(rank, 1.0)
            took_ns = round(1e9 * max(self.loans_s(rank, self.links), computed_s))
            log.ended(Plan(tokens), 1, now_ns, now_ns + took_ns, floor_us)
            now_ns += took_ns
        return log.take()

    def hello(self, rank: int, links: Mapping[int, float] | None = None) -> RankHello:
        """Return what the rank tells at start-up, measured over these links."""
        floor_us = round(1e6 * self.loans_s(rank, links or {}))
        points = tuple(
            (tokens, max(floor_us, round(1e6 * (COMPUTE_S + TOKEN_S * tokens))))
            for tokens in (1, 512)
        )
        floors = ((Mode.DP.value, floor_us),) if floor_us else ()
        times = WidthTimes(1, ((Mode.DP.value, points),), floor_us=floors)
        said = hello(rank)
        others = tuple(each for each in said.step_times if each.width > 1)
        return msgspec.structs.replace(
            said, step_times=(times, *others), parts=self.parts, whole_layers=self.whole[rank]
        )

    def left_out(self, at_start: Mapping[int, float] | None = None) -> list[Rank]:
        """Return who is left out; start-up measured over the links `at_start`."""
        hellos = [self.hello(rank, at_start) for rank in range(self.ranks)]
        health = OutlierDetector(OutlierSettings(), self.ranks)
        everyone = [each.rank for each in hellos]
        found: list[Rank] = []
        for window in range(1, WINDOWS + 1):
            for each in hellos:
                floor_us = dict(each.step_times[0].floor_us).get(Mode.DP, 0)
                said = report(each.rank, Stage(1, Phase.SERVE))
                served = self.served(each.rank, floor_us)
                health.on_report(msgspec.structs.replace(said, served=served), everyone, 0)
            found += [out.rank for out in health.slow(everyone, window * WINDOW_MS, hellos)]
        return found


def test_a_slow_rank_is_left_out_though_all_others_are_at_their_floor() -> None:
    assert BorrowingCell(2, computes={2: 40.0}).left_out() == [2]


def test_a_rank_whose_computation_hides_behind_its_loans_delays_nobody() -> None:
    assert BorrowingCell(2, computes={2: 4.0}).left_out() == []


def test_who_borrows_over_a_slow_link_is_left_out_and_not_its_lender() -> None:
    """Rank 1 borrows from rank 3, which lends in any case: without rank 1 all steps are short."""
    assert loan_plan(1, 4, 2, 1)[0].lender == 3
    assert BorrowingCell(2, links={3: 10.0}).left_out() == [1]


def test_a_link_that_was_slow_at_start_up_already_is_found_too() -> None:
    slow = {3: 10.0}
    assert BorrowingCell(2, links=slow).left_out(at_start=slow) == [1]


def test_a_lender_that_slows_all_others_takes_nobody_out() -> None:
    """With as many parts as ranks all read from it; only groups that borrow nothing help."""
    assert BorrowingCell(4, links={3: 20.0}).left_out() == []


@pytest.mark.parametrize("whole", [(32, 32, 32, 0), (32, 0, 32, 0), (32, 16, 8, 0)])
def test_who_borrows_more_than_others_is_not_slow(whole: tuple[int, ...]) -> None:
    """Loans of a rank with few whole layers take 5 times as long as what the others compute."""
    cell = BorrowingCell(4, whole=whole)
    assert cell.loans_s(3, {}) > 5 * COMPUTE_S
    assert cell.left_out() == []


def test_prompts_beside_decodes_at_the_floor_are_not_slow() -> None:
    assert BorrowingCell(2, tokens={1: 8_192}).left_out() == []


def test_too_few_borrowers_are_compared_with_their_own_floor() -> None:
    cell = BorrowingCell(2, whole=(0, 0, 32, 32), links={3: 10.0})
    hellos = [cell.hello(rank, {3: 10.0}) for rank in range(4)]
    assert usual_floors(hellos) == pytest.approx({Rank(0): 0.064, Rank(1): 0.64})


def test_steps_at_the_floor_count_for_the_pace() -> None:
    """Without them there is nobody to compare the slow rank with."""
    cell = BorrowingCell(2, computes={2: 40.0})
    served = {Rank(rank): cell.served(rank, 64_000)[0] for rank in range(4)}
    assert [each.sums.steps for each in served.values()] == [0, 0, STEPS, 0]
    assert [each.at_floor.steps for each in served.values()] == [STEPS, STEPS, 0, STEPS]
    assert paces_of({rank: each.sums for rank, each in served.items()}).keys() == {2}


def test_the_switcher_tells_the_detector_of_loans() -> None:
    cell = BorrowingCell(4, whole=(32, 32, 32, 0))
    ranks = Ranks()
    for rank in range(4):
        ranks.roster[Rank(rank)].hello = cell.hello(rank)
    ranks.serve()
    ranks.switcher.retarget(layout("dp4"), Carry.RECOMPUTE, "test", 0)
    for _ in Phase:
        ranks.acknowledge()
    lost: tuple[Rank, ...] = ()
    for _ in range(WINDOWS + 1):
        for rank in range(4):
            floor_us = round(1e6 * cell.loans_s(rank, {}))
            ranks.hear(rank, ranks.switcher.stage)
            said = report(rank, ranks.switcher.stage, target=ranks.switcher.target)
            said = msgspec.structs.replace(said, served=cell.served(rank, floor_us))
            ranks.switcher.on_report(said, ranks.now_ms)
        ranks.now_ms += WINDOW_MS - 1_000
        for rank in range(4):
            ranks.hear(rank, ranks.switcher.stage)
        lost += ranks.tick(1_000)
    assert lost == ()
