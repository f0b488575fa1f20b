"""What the core adds to its parts; the rest of it is in the transcripts."""

import json

import msgspec
import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.core.core import Core
from coordinator.model.events import (
    GatewayClosed,
    GatewaySent,
    Level,
    Note,
    RankExited,
    RankOpened,
    RankReported,
    SwitchRecorded,
    SwitchWanted,
    Tick,
    ToGateway,
    ToRank,
)
from coordinator.model.records import Outcome
from coordinator.model.settings import LATE_OUT_MS, CoreSettings, QueueBounds, core_settings
from coordinator.protocol.config import CellConfig, Config, CoordinatorConfig, ModelConfig
from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    GatewayHello,
    Resubmit,
    StreamGap,
    TaskFailed,
)
from coordinator.protocol.messages.rank import Directive, GiveBack, Report, SwitchTimes
from coordinator.protocol.messages.tasks import HeldTask, TaskProgress
from coordinator.protocol.terms import Carry, Phase, Stage, TaskId, Tier
from tests.harness.coordinator.builders import header, hello, layout, report, submit
from tests.transcripts.cell import PAGES, Cell


def serving(text: str = "dp2", **settings: object) -> Cell:
    cell = Cell(text, **settings)
    cell.gateway()
    cell.serve()
    return cell


def test_settings_come_from_the_configuration() -> None:
    config = Config(
        model=ModelConfig(path="m"),
        cell=CellConfig(ranks=4, widths=(1, 2, 4), layout="tp2+dp2"),
        coordinator=CoordinatorConfig(lease_ms=700, lost_after_ms=900, default_carry="drain"),
    )
    settings = core_settings(config)
    assert (settings.world, settings.layout) == (4, layout("tp2+dp2"))
    assert (settings.lease_ms, settings.lost_after_ms, settings.recover_ms) == (700, 900, 900)
    assert settings.default_carry is Carry.DRAIN


def test_every_report_is_answered_with_a_directive() -> None:
    cell = serving()
    for rank in cell.ranks.values():
        effects = cell.core.handle(RankReported(rank.participant.rank, rank.report(50)), 50)
        (effect,) = [each for each in effects if isinstance(each, ToRank)]
        assert isinstance(effect.message, Directive)
        assert effect.message.answers_ms == rank.report(50).sent_at_ms
        assert effect.message.stage == Stage(1, Phase.SERVE)


def test_a_report_of_an_unknown_process_is_not_answered() -> None:
    core = Core(CoreSettings(world=2, layout=layout("dp2", 2)), "c", 0)
    assert core.handle(RankReported(Rank(0), report(0, Stage(0, Phase.PARK))), 0) == []
    core.handle(RankOpened(hello(0, 2)), 0)
    assert core.handle(RankReported(Rank(0), report(0, Stage(0, Phase.PARK))), 0) == []


def test_an_old_process_that_says_hello_is_noted_and_ignored() -> None:
    cell = serving()
    cell.restart(1)
    cell.open(1)
    cell.take()
    cell.event(RankOpened(hello(1, 1)))
    assert cell.take() == [Note(Level.WARNING, "rank_session_stale", {"rank": 1, "incarnation": 1})]


def test_a_switch_is_recorded_with_what_was_measured() -> None:
    cell = serving()
    cell.say(submit("a"))
    cell.now_ms = 30
    wanted = SwitchWanted(cell.layout("tp2"), Carry.RECOMPUTE, "operator", asked_ms=10)
    cell.event(wanted)
    for rank in (0, 1):
        times = SwitchTimes(2, park_us=1_500 + rank, swap_us=250, first_step_us=900)
        rank_report = cell.ranks[Rank(rank)].report(cell.now_ms)
        cell.event(RankReported(Rank(rank), _with(rank_report, times)))
    cell.now_ms = 40
    cell.settle()
    (recorded,) = [each for each in cell.take() if isinstance(each, SwitchRecorded)]
    record = recorded.record
    assert (record.epoch, record.from_layout, record.to_layout) == (2, "dp2", "tp2")
    assert (record.outcome, record.decide_ms, record.total_ms) == (Outcome.SERVED, 20, 10)
    cell.say(StreamGap(2, 12.5))
    (view,) = switches(cell)[-1:]
    assert (view["park_ms"], view["swap_ms"], view["first_step_ms"]) == (1.501, 0.25, 0.9)
    assert (view["gap_ms_max"], view["reshard_ms"], view["reshard_bytes"]) == (12.5, 0.0, 0)
    assert view["tasks"] == {"reshard": 0, "pause": 0, "drain": 0, "recompute": 0, "speculate": 0}


def _with(rank_report: Report, times: SwitchTimes) -> Report:
    return msgspec.structs.replace(rank_report, times=(times,))


def switches(cell: Cell) -> list[dict[str, object]]:
    found = cell.core.views.switches(10)["switches"]
    assert isinstance(found, list)
    return found


def test_views_are_plain_data() -> None:
    cell = serving("tp2+dp2")
    cell.say(submit("a"))
    cell.switch("dp4")
    for view in (
        cell.core.views.layout(),
        cell.core.views.ranks(cell.now_ms),
        cell.core.views.switches(5),
        cell.core.views.decisions(5),
        cell.core.views.queue(),
    ):
        assert json.loads(json.dumps(view)) is not None


def test_the_ranks_view_shows_who_is_there() -> None:
    cell = serving("dp2")
    cell.restart(1)
    cell.open(1)
    cell.now_ms += 100
    ranks = cell.core.views.ranks(cell.now_ms)["ranks"]
    assert isinstance(ranks, list)
    first, second = ranks
    assert (first["phase"], first["heartbeat_age_ms"], first["available"]) == ("serve", 100, True)
    assert (first["pages"]["free"], first["lease_left_ms"]) == (0, 9_900)
    groups = cell.core.views.layout()["groups"]
    assert isinstance(groups, list)
    assert first["pages_free"] == groups[0]["pages_free"] > 0, "its group has leased all of them"
    assert second["pages_free"] is None
    assert (second["phase"], second["restarts"], second["degraded"]) == ("never reported", 1, True)


def test_a_manual_switch_is_a_decision_with_its_reason() -> None:
    cell = serving()
    cell.switch("tp2", Carry.PAUSE)
    cell.event(SwitchWanted(cell.layout("dp2"), Carry.DRAIN, "low load"))
    decisions = cell.core.views.decisions(5)["decisions"]
    assert [(each["choice"], each["reason"]) for each in decisions] == [  # type: ignore[attr-defined]
        ("tp2", "asked by operator"),
        ("dp2", "low load"),
    ]
    assert cell.core.views.decisions(0) == {"decisions": []}


def test_ranks_that_come_and_go_are_decisions_with_their_times() -> None:
    cell = serving()
    cell.switch("tp2")
    cell.tick(1_000)
    lost_ms = cell.now_ms
    cell.event(RankExited(Rank(1)))
    cell.tick(8_000)
    cell.restart(1)
    back_ms = cell.now_ms
    cell.open(1)
    cell.report(1)
    for _ in range(5):
        cell.tick(1_000)
    decisions = cell.core.views.decisions(9)["decisions"]
    assert isinstance(decisions, list)
    asked, lost, back, *again = decisions
    assert asked["reason"] == "asked by operator"
    assert (lost["time"], lost["choice"], lost["cause"]) == (lost_ms, "dp1+off1", "ranks")
    assert lost["reason"] == "rank 1 lost"
    assert (back["time"], back["choice"], back["cause"]) == (back_ms, "dp2", "ranks")
    assert back["reason"] == "rank 1 joined"
    assert all(each["cause"] != "ranks" for each in again), "nothing is listed twice"


def test_gateways_hear_of_the_cell_when_it_changes() -> None:
    cell = serving()
    cell.tick(100)
    assert cell.take() == []
    cell.event(RankExited(Rank(1)))
    states = [each.message for each in cell.take() if isinstance(each, ToGateway)]
    assert [(each.layout, each.ranks_alive) for each in states if isinstance(each, CellState)] == [
        ("dp1+off1", 1)
    ]


def test_the_length_of_the_queue_is_told_on_ticks_only() -> None:
    cell = serving("dp1")
    for number in range(6):
        cell.say(submit(str(number)))
    assert not [each for each in cell.take() if isinstance(each, ToGateway)]
    cell.tick(100)
    (told,) = [each.message for each in cell.take() if isinstance(each, ToGateway)]
    assert isinstance(told, CellState)
    assert told.queued == 2


def test_tasks_that_no_layout_can_hold_any_more_fail() -> None:
    cell = serving("dp2")
    for rank in (0, 1):
        for number in range(4):
            cell.say(submit(f"{rank}{number}"))
    cell.say(submit("long", prompt=200))
    cell.take()
    cell.event(RankExited(Rank(1)))
    failures = [each.message for each in cell.take() if isinstance(each, ToGateway)]
    assert [each.code for each in failures if isinstance(each, TaskFailed)] == [
        "context_length_exceeded"
    ]


def test_pages_that_came_free_are_used_by_forming_the_group_anew() -> None:
    cell = serving("dp2")
    cell.ranks[Rank(1)].pages_free = 5
    cell.report(1)
    cell.tick(100)
    cell.settle()
    assert [view["cause"] for view in switches(cell)] == ["start", "pages became free"]
    assert cell.core.views.is_serving
    assert cell.ranks[Rank(0)].participant.binding != cell.ranks[Rank(1)].participant.binding
    cell.tick(100)
    assert cell.core.views.epoch == 2


@pytest.mark.parametrize(
    ("free_pages", "prompt_tokens", "formed_anew"), [(2, 130, 1), (2, 90, 0), (0, 130, 0)]
)
def test_a_group_is_formed_anew_for_a_task_that_fits_only_then(
    free_pages: int, prompt_tokens: int, formed_anew: int
) -> None:
    """Rank 0 began without the pages of a paused task, and they are too few to matter otherwise."""
    cell = serving("dp1")
    rank = cell.ranks[Rank(0)]
    rank.blocks_total = PAGES - 2
    rank.pages_free = free_pages
    cell.report(0)
    cell.say(submit("long", prompt=prompt_tokens))
    fits_now = prompt_tokens < 16 * (PAGES - 2)
    assert placed_tasks(cell) == ["placed"] * fits_now
    for _ in range(3):
        cell.tick(100)
        cell.settle()
    causes = [view["cause"] for view in switches(cell)]
    assert causes == ["start", *["pages became free"] * formed_anew]
    assert placed_tasks(cell) == ["placed"] * (fits_now or formed_anew)


@pytest.mark.parametrize("reports", [True, False])
def test_a_rank_that_only_says_hello_to_a_new_coordinator_is_lost(*, reports: bool) -> None:
    """Its tasks go on elsewhere, although it is in no layout that could lose it."""
    cell = serving("dp2", lost_after_ms=400, lease_ms=200)
    cell.say(submit("a"))
    cell.start()
    cell.gateway()
    cell.say(submit("a", delivered=[7], attempt=1))
    cell.open(0, [HeldTask(header("a"), 1, Group((Rank(0),), Mode.DP), 1, False)])
    cell.open(1)
    for _ in range(10):
        for rank in (0, 1) if reports else (1,):
            cell.report(rank)
        cell.tick(50)
    asked = [each.message for each in cell.take() if isinstance(each, ToGateway)]
    resubmits = [each for each in asked if isinstance(each, Resubmit)]
    assert resubmits == ([] if reports else [Resubmit(TaskId("a"), 2)])


def test_a_gateway_that_is_heard_is_there() -> None:
    cell = serving(gateway_gone_ms=100)
    cell.say(submit("a"))
    cell.event(GatewayClosed("g"))
    cell.say(submit("b"))
    for _ in range(5):
        cell.tick(100)
    assert len(placed_tasks(cell)) == 2


def placed_tasks(cell: Cell) -> list[str]:
    counts = cell.core.views.queue()["tasks"]
    assert isinstance(counts, dict)
    return ["placed"] * counts["placed"]


def test_a_second_hello_within_a_session_is_noted() -> None:
    cell = serving()
    cell.say(GatewayHello(1, "g"))
    assert cell.take() == [Note(Level.WARNING, "gateway_hello_repeated", {"gateway": "g"})]


def test_tasks_that_lost_their_room_get_it_back_without_a_queue() -> None:
    cell = serving("dp1")
    for name, tier in (("batch", Tier.BATCH), ("urgent", Tier.INTERACTIVE)):
        cell.say(submit(name, prompt=40, max_tokens=110, tier=tier))
    cell.settle()
    cell.take()
    assert placed_tasks(cell) == ["placed"] * 2
    cell.now_ms = 1_000
    grown = TaskProgress(TaskId("batch"), 100, paused=False)
    known = cell.ranks[Rank(0)].report(cell.now_ms, progress=[grown])
    cell.event(RankReported(Rank(0), msgspec.structs.replace(known, urgent_waiting=1)))
    assert placed_tasks(cell) == ["placed"] * 2
    cell.event(Tick())
    asked = [e.message for e in cell.take() if isinstance(e, ToRank)]
    assert GiveBack(TaskId("batch")) in asked


def test_ten_thousand_tasks_are_no_burden() -> None:
    cell = serving("dp2", queue=QueueBounds(20_000))
    messages = [submit(str(number)) for number in range(10_000)]
    for message in messages:
        cell.core.handle(GatewaySent("g", message), 0)
    view = cell.core.views.queue()["tasks"]
    assert isinstance(view, dict)
    assert (view["queued"], view["placed"]) == (9_992, 8)
    for message in messages:
        cell.core.handle(GatewaySent("g", Cancel(message.header.task)), 0)
    cell.core.integrity()
    assert len(placed_tasks(cell)) == 0


@pytest.mark.parametrize("text", ["sp2", "off2"])
def test_a_refused_switch_changes_nothing(text: str) -> None:
    cell = serving()
    assert cell.core.why_unreachable(cell.layout(text))
    cell.switch(text)
    assert (cell.core.views.epoch, cell.core.views.decisions(9)) == (1, {"decisions": []})


def test_a_rank_that_had_no_room_is_left_out_for_a_while_and_its_tasks_go_on() -> None:
    cell = serving("dp4")
    for number in range(4):
        cell.say(submit(str(number)))
    cell.take()
    told = cell.ranks[Rank(1)]
    formation = told.participant.binding.formation if told.participant.binding is not None else 0
    short = msgspec.structs.replace(told.report(cell.now_ms), oom_formation=formation)
    cell.event(RankReported(Rank(1), short))
    asked = [each.message for each in cell.take() if isinstance(each, ToGateway)]
    assert len([each for each in asked if isinstance(each, Resubmit)]) == 1
    cell.event(RankReported(Rank(1), short))
    cell.settle()
    assert [view["cause"] for view in switches(cell)][1:] == ["rank 1 ran out of memory"]
    assert not cell.core.views.is_available(Rank(1))
    assert told.participant.binding is None, "it is told to leave its group"
    for _ in range(LATE_OUT_MS[0] // 500 + 1):
        cell.tick(500)
    cell.settle()
    assert cell.core.views.is_available(Rank(1))
