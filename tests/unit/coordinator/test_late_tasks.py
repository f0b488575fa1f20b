"""Tasks that have missed their goal for the first token, and what they count for in a decision."""

from dataclasses import replace

import pytest

from comm_pool.layout import Rank
from coordinator.model.observation import TierObservation
from coordinator.model.policy_settings import TierGoal
from coordinator.policy.arrivals import Arrivals
from coordinator.policy.observe import observe_tiers
from coordinator.policy.predict import THROUGHPUT_WORTH, Demand, forecast
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.task import State, Task
from coordinator.tasks.task_table import TaskTable
from tests.harness.coordinator.policy import SETTINGS, observation, tier, verdict
from tests.simulation.policy_shapes import LLAMA_70B_FP8

GOAL_MS = 2_000
"""Of standard tasks."""


class Cell:
    """A task table and what the policy observes in it."""

    def __init__(self) -> None:
        self.table = TaskTable(ageing_ms=30_000)

    def add(self, name: str, tier: Tier, arrived_ms: int) -> Task:
        """A task that rank 0 has got at once."""
        header = TaskHeader(TaskId(name), "g0", "", 1_000, 200, tier)
        task = Task(header, len(name), arrived_ms, State.QUEUED, arrived_ms, payload=b"")
        self.table.add(task)
        self.table.queue.placed(task, arrived_ms)
        self.table.enter(task, State.PLACED, arrived_ms, Rank(0))
        return task

    def late(self, tier: Tier, now_ms: int) -> tuple[int, int]:
        """How many unstarted and running tasks of a tier are late."""
        seen: TierObservation = observe_tiers(self.table, Arrivals(), SETTINGS.goals, now_ms)[0][
            tier
        ]
        return seen.unstarted_late, seen.running_late


def test_a_task_is_late_once_its_goal_has_passed_without_a_token() -> None:
    cell = Cell()
    cell.add("waits", Tier.STANDARD, 1_000)
    assert cell.late(Tier.STANDARD, 1_000 + GOAL_MS) == (0, 0)
    assert cell.late(Tier.STANDARD, 1_001 + GOAL_MS) == (1, 0)


@pytest.mark.parametrize(("first_ms", "is_late"), [(GOAL_MS, 0), (GOAL_MS + 1, 1)])
def test_a_running_task_stays_what_it_was_at_its_first_token(first_ms: int, is_late: int) -> None:
    cell = Cell()
    task = cell.add("runs", Tier.STANDARD, 0)
    cell.table.grow(task, 1, first_ms)
    cell.table.grow(task, 50, 9_000)
    assert cell.late(Tier.STANDARD, 10_000) == (0, is_late)
    cell.table.enter(task, State.QUEUED, 11_000)
    assert cell.late(Tier.STANDARD, 12_000) == (is_late, 0), "to be computed again"


def test_a_tier_without_a_goal_for_the_first_token_has_no_late_tasks() -> None:
    cell = Cell()
    cell.add("waits", Tier.BATCH, 0)
    assert cell.late(Tier.BATCH, 10_000_000) == (0, 0)


def test_a_late_task_is_worth_no_more_than_any_that_is_served() -> None:
    demand = Demand(
        *(Tier.STANDARD, SETTINGS.goals[Tier.STANDARD], 0.0, (1_000,), 100.0),
        unstarted=16,
        unstarted_tokens=16_000,
        running=8,
        context=8_000,
        to_come=400,
    )
    cost = LLAMA_70B_FP8.groups["dp1"]
    (fresh,) = forecast(cost, 4, [demand], 8.0)
    (late,) = forecast(cost, 4, [replace(demand, unstarted_late=16, running_late=8)], 8.0)
    assert fresh.good == pytest.approx(fresh.asked)
    assert late.good == 0
    assert fresh.late == 0
    assert late.late == pytest.approx(late.asked)
    assert late.worth == pytest.approx(THROUGHPUT_WORTH * late.asked)
    assert (late.asked, late.ttft_s, late.cost) == (fresh.asked, fresh.ttft_s, fresh.cost)


def test_chats_get_a_group_of_their_own_once_a_backlog_is_late() -> None:
    """Before, groups that chats share with it serve most of both in time."""
    chats = tier(
        Tier.INTERACTIVE,
        rate=2.0,
        rate_age_s=15.0,
        running=6,
        context_tokens=6_000,
        to_come_tokens=450.0,
    )

    def choice(late: int) -> str:
        backlog = tier(
            Tier.STANDARD,
            prompts=(2_000,),
            output_tokens=50.0,
            unstarted=40,
            unstarted_tokens=80_000,
            unstarted_late=late,
        )
        return verdict(observation("dp4", chats, backlog)).choice.name

    assert choice(late=0) == "tp2+tp2"
    assert choice(late=40) == "dp2+tp2, 2 for interactive"


@pytest.mark.parametrize(("late_share", "layout"), [(0.0, "tp4"), (0.5, "tp4"), (1.0, "dp4")])
def test_an_overload_is_left_for_throughput_once_most_requests_are_lost(
    late_share: float, layout: str
) -> None:
    """With these goals tp4 alone can meet them, though not of all; dp4 serves more."""
    goals = {**SETTINGS.goals, Tier.INTERACTIVE: TierGoal(0.25, 0.015, weight=2.0)}
    chats = tier(
        Tier.INTERACTIVE,
        rate=12.0,
        rate_age_s=15.0,
        unstarted=32,
        unstarted_tokens=32_000,
        unstarted_late=round(32 * late_share),
        running=80,
        running_late=round(80 * late_share),
        context_tokens=80_000,
        to_come_tokens=6_000.0,
    )
    found = verdict(observation("tp4", chats), replace(SETTINGS, goals=goals))
    assert found.choice.name == layout
    if layout == "dp4":
        assert "less time" in found.reason
