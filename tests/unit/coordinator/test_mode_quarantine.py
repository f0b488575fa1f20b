"""Modes whose probe drifted are left, refused and put back; ranks that compute wrongly are out."""

from typing import Any

import pytest
from msgspec.structs import replace

from comm_pool.layout import Group, Layout, Mode, Rank, parse_layout
from coordinator.model.events import Note, RankReported, ReinstateMode
from coordinator.model.step_line import StepLine
from coordinator.policy.knowledge import Knowledge
from coordinator.protocol.messages.rank import Probed
from coordinator.ranks.mode_quarantine import ModeQuarantine
from coordinator.telemetry import exposition
from tests.harness.coordinator.builders import width_times
from tests.harness.coordinator.switchers import serving_cell
from tests.transcripts.cell import Cell

LIMIT = 0.25


def probed(mode: str, *ranks: int, error: float = 9.0, epoch: int = 3) -> Probed:
    return Probed(tuple(map(Rank, ranks)), mode, epoch, error, LIMIT, took_us=1_500)


def guard(*drifted: Probed) -> ModeQuarantine:
    made = ModeQuarantine()
    made.take(drifted)
    return made


def layout(text: str) -> Layout:
    return parse_layout(text, 4, (1, 2, 4))


@pytest.mark.parametrize(
    ("error", "has_drifted"),
    [(0.0, False), (LIMIT, False), (0.2501, True), (1e6, True), (float("nan"), True)],
)
def test_what_counts_as_drift(error: float, has_drifted: bool) -> None:
    assert probed("tp2", 0, 1, error=error).has_drifted is has_drifted


@pytest.mark.parametrize(
    ("drifted", "before", "after"),
    [
        ([], "shift2+tp2", "shift2+tp2"),
        ([probed("tp2", 2, 3)], "tp2+tp2", "tp2+dp2"),
        ([probed("sp2", 0, 1)], "shift2+shift2", "tp2+shift2"),
        ([probed("sp2", 0, 1)], "sp2+dp2", "tp2+dp2"),
        ([probed("sp2", 0, 1), probed("tp2", 0, 1)], "sp2+dp2", "dp4"),
        ([probed("tp2", 0, 1)], "shift2+dp2", "dp4"),
        ([probed("sp2tp2", 0, 1, 2, 3)], "shift2tp2", "tp4"),
        ([probed("sp4", 0, 1, 2, 3)], "shift2tp2", "shift2tp2"),
        ([probed("dp1", 1)], "dp4", "dp1+off1+dp2"),
        ([probed("dp1", 1)], "tp2+dp2", "tp2+dp2"),
        ([probed("tp2", 0, 1), probed("dp1", 1)], "tp2+dp2", "dp1+off1+dp2"),
        ([probed("dp1", rank) for rank in range(4)], "dp4", "dp1+off3"),
        ([probed("dp1", rank) for rank in range(3)], "dp4", "off3+dp1"),
    ],
)
def test_what_is_left_of_a_layout(drifted: list[Probed], before: str, after: str) -> None:
    assert guard(*drifted).remaining(layout(before)) == layout(after)


def test_a_group_whose_ranks_hold_parts_of_the_weights_serves_on() -> None:
    """Nobody else could."""
    drifted = guard(probed("tp4", 0, 1, 2, 3))
    assert drifted.remaining(layout("tp4"), 4) == layout("tp4")
    assert drifted.remaining(layout("tp4")) == layout("dp4")
    assert guard(probed("sp2tp2", 0, 1, 2, 3)).remaining(layout("sp2tp2"), 4) == layout("tp4")


def test_what_was_seen_already_bars_nothing_anew() -> None:
    made = guard(probed("tp2", 0, 1))
    assert made.take_unreported() == [probed("tp2", 0, 1)]
    assert made.put_back("tp2")
    made.take([probed("tp2", 0, 1)])
    assert not made.barred
    made.take([probed("tp2", 0, 1, epoch=5)])
    assert made.modes_out() == {"tp2"}
    assert not made.put_back("sp2")
    assert [each.epoch for each in made.newest()] == [5]


def test_a_good_probe_puts_nothing_back_by_itself() -> None:
    made = guard(probed("tp2", 0, 1), probed("tp2", 0, 1, error=0.0, epoch=4))
    assert made.why_not(Group((Rank(0), Rank(1)), Mode.TP)) == probed("tp2", 0, 1)


def test_a_new_process_begins_with_a_clean_sheet() -> None:
    made = guard(probed("tp2", 0, 1), probed("tp2", 2, 3), probed("dp1", 1))
    made.renewed(Rank(1))
    assert list(made.barred) == [((2, 3), "tp2")]
    made.take([probed("tp2", 0, 1)])
    assert len(made.barred) == 1, "its old leader goes on telling of what was"
    made.renewed(Rank(0))
    made.take([probed("tp2", 0, 1)])
    assert len(made.barred) == 2, "a new leader's word is new, even if it says the same"


def tell(cell: Cell, rank: int, *what: Probed) -> None:
    """Let a rank report with its newest probes."""
    report = replace(cell.ranks[Rank(rank)].report(cell.now_ms), probed=what)
    cell.event(RankReported(Rank(rank), report))


def view(cell: Cell) -> Any:
    return cell.core.views.layout()


def test_a_drifted_group_falls_back_and_is_refused_until_it_is_put_back() -> None:
    cell = serving_cell("tp2+dp2")
    tell(cell, 0, probed("tp2", 0, 1))
    effects = cell.take()
    notes = [each.event for each in effects if isinstance(each, Note)]
    assert notes == ["mode_out_of_service"]
    cell.settle()
    assert (view(cell)["layout"], view(cell)["serving"]) == ("dp4", True)
    decisions: Any = cell.core.views.decisions(1)["decisions"]
    assert (decisions[-1]["cause"], decisions[-1]["carry"]) == ("guard", "recompute")
    assert "tp2" in decisions[-1]["reason"]
    refused = cell.core.why_unreachable(cell.layout("tp2+dp2"))
    assert refused is not None
    assert "aileron put-back tp2" in refused
    assert cell.core.why_unreachable(cell.layout("dp2+tp2")) is None, "other ranks compute rightly"
    assert cell.core.why_unreachable(cell.layout("tp4")) is None
    cell.switch("tp2+dp2")
    assert view(cell)["target"] == "dp4"
    (out,) = view(cell)["out_of_service"]
    assert (out["mode"], out["ranks"], out["error_nats"], out["took_ms"]) == (
        *("tp2", [0, 1]),
        *(9.0, 1.5),
    )
    cell.event(ReinstateMode("tp2"))
    cell.switch("tp2+dp2")
    cell.settle()
    assert view(cell)["layout"] == "tp2+dp2"
    assert view(cell)["out_of_service"] == []


def test_a_rank_that_computes_wrongly_is_left_out_and_comes_back_when_it_is_put_back() -> None:
    cell = serving_cell("dp4")
    tell(cell, 2, probed("dp1", 2))
    cell.settle()
    assert view(cell)["layout"] == "dp2+off1+dp1"
    cell.tick(100)
    cell.settle()
    assert view(cell)["target"] == "dp2+off1+dp1", "it goes on reporting"
    cell.event(ReinstateMode("dp1"))
    cell.settle()
    assert view(cell)["layout"] == "dp4"


def test_a_rank_that_computes_wrongly_comes_back_as_a_new_process() -> None:
    cell = serving_cell("dp4")
    tell(cell, 2, probed("dp1", 2))
    cell.settle()
    cell.restart(2)
    cell.open(2)
    cell.settle()
    assert view(cell)["layout"] == "dp4"


def test_the_last_rank_serves_on_and_another_returns_if_it_ends() -> None:
    cell = serving_cell("dp2")
    tell(cell, 1, probed("dp1", 1))
    tell(cell, 0, probed("dp1", 0))
    cell.settle()
    assert view(cell)["layout"] == "dp1+off1"
    assert len(view(cell)["out_of_service"]) == 2
    cell.core.handle(_exited(0), cell.now_ms)
    cell.settle(1)
    assert view(cell)["layout"] == "off1+dp1"


def _exited(rank: int) -> Any:
    from coordinator.model.events import RankExited

    return RankExited(Rank(rank))


def test_a_new_coordinator_learns_what_is_out_from_the_ranks() -> None:
    cell = serving_cell("tp2+dp2")
    cell.start()
    for rank in cell.ranks:
        cell.open(rank)
        tell(cell, rank, *([probed("tp2", 0, 1)] if rank == 0 else []))
    cell.tick()
    cell.settle()
    assert view(cell)["layout"] == "dp4"


def test_the_policy_chooses_no_width_that_is_out() -> None:
    cell = serving_cell("dp4")
    roster = cell.core._roster
    knowledge = Knowledge((1, 2, 4), {f"tp{width}": StepLine(1, 1, 1) for width in (2, 4)})
    everyone = tuple(roster)
    assert set(knowledge.modes(roster, everyone)) == {1, 2, 4}
    roster.guard.take([probed("tp2", 0, 1)])
    assert set(knowledge.modes(roster, everyone)) == {1, 4}


def test_the_policy_pins_tp_where_sp_is_out() -> None:
    cell = serving_cell("dp4")
    roster, times = cell.core._roster, width_times(4)
    for seen in map(roster.__getitem__, roster):
        seen.hello = replace(seen.hello, step_times=(replace(times, sp_from_tokens=100),))
    knowledge = Knowledge((1, 4), {})
    assert knowledge.modes(roster, tuple(roster))[4] is Mode.SHIFT
    roster.guard.take([probed("sp4", 0, 1, 2, 3)])
    assert knowledge.modes(roster, tuple(roster))[4] is Mode.TP


def test_metrics_name_what_is_out() -> None:
    cell = serving_cell("tp2+dp2")
    tell(cell, 0, probed("tp2", 0, 1))
    tell(cell, 3, probed("dp1", 3, error=0.01))
    layout_view: Any = cell.core.views.layout()
    ranks_view: Any = cell.core.views.ranks(cell.now_ms)
    families = exposition.probe_metrics(ranks_view["probes"], layout_view["out_of_service"])
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["aileron_mode_out_of_service", "tp2", "0-1"] == 1
    assert samples["aileron_mode_out_of_service", "dp1", "3"] == 0
    assert samples["aileron_probe_error_nats", "dp1", "3"] == 0.01
    assert samples["aileron_probe_error_max_nats", "tp2", "0-1"] == LIMIT
    assert samples["aileron_probe_seconds", "tp2", "0-1"] == 0.0015
