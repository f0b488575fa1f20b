"""The adaptive policy within the core: it asks for switches, gives way to operators, explains."""

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from comm_pool.layout import Rank
from coordinator.model.events import (
    ForecastMade,
    Observed,
    SettingsChanged,
    SwitchWanted,
    Tick,
    ToLauncher,
)
from coordinator.model.policy_settings import PolicyStart
from coordinator.model.settings import CoreSettings
from coordinator.protocol.messages.rank import RankHello
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.protocol.terms import Carry
from tests.harness.coordinator.policy_cells import SETTINGS, TIMES, decisions, serving, wait
from tests.transcripts.cell import Cell, ObedientRank


def test_an_idle_cell_goes_wide_by_itself_and_says_why() -> None:
    cell = serving()
    wait(cell, 3_000)
    assert cell.core.views.layout()["target"] == "tp4"
    changed = [each for each in decisions(cell) if each["changes"]]
    assert [each["choice"] for each in changed] == ["tp4"]
    assert changed[0]["cause"] == "policy"
    assert "less time" in changed[0]["reason"]
    assert {each["layout"] for each in changed[0]["candidates"]} >= {"dp4", "tp2+tp2", "tp4"}
    switches: Any = cell.core.views.switches(1)["switches"]
    assert switches[0]["cause"] == "policy"


DP_CURVE = (
    *((1, 4_700), (4, 4_700), (16, 4_750), (64, 5_000), (256, 6_600)),
    *((1_024, 28_500), (2_048, 56_000), (4_096, 112_000), (8_192, 225_000)),
)
TP_CURVE = (
    *((1, 3_400), (4, 3_420), (16, 3_450), (64, 3_600), (256, 4_500)),
    *((1_024, 15_500), (2_048, 29_000), (4_096, 57_000), (8_192, 115_000)),
)
SP_CURVE = (
    *((1, 4_900), (4, 4_900), (16, 4_950), (64, 5_000), (256, 6_300)),
    *((1_024, 14_500), (2_048, 27_000), (4_096, 52_000), (8_192, 102_000)),
)
"""About what steps of an 8B model take on two H200s, in microseconds by tokens."""


def test_an_idle_cell_goes_wide_by_what_its_ranks_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without given step times, and before any step was served."""
    curves = (("tp", TP_CURVE), ("sp", SP_CURVE))
    times = (WidthTimes(1, (("dp", DP_CURVE),)), WidthTimes(2, curves, 2_048))
    plain = ObedientRank.hello

    def hello(rank: ObedientRank, *given: Any, **named: Any) -> RankHello:
        found = structs.replace(plain(rank, *given, **named), max_tasks=256, step_times=times)
        tokens = found.pages_total << 16
        memory = (("weights", 15 << 30), ("kv", tokens << 17))
        return structs.replace(found, tokens_per_slot=1 << 16, memory=memory)

    monkeypatch.setattr(ObedientRank, "hello", hello)
    cell = Cell("dp2", policy=PolicyStart(SETTINGS, (1, 2), {}))
    cell.gateway()
    cell.serve()
    wait(cell, 3_000)
    changed = [each for each in decisions(cell) if each["changes"]]
    assert [each["choice"] for each in changed] == ["shift2"]
    tpot_ms = {
        each["layout"]: each["tiers"]["standard"]["tpot_ms"] for each in changed[0]["candidates"]
    }
    assert tpot_ms["dp2"] == pytest.approx(4.7, rel=0.2)
    assert tpot_ms["shift2"] == pytest.approx(3.4, rel=0.2)


def test_a_closed_group_is_no_candidate_and_ranks_are_renewed_for_it_while_nobody_waits() -> None:
    settings = {"policy": PolicyStart(SETTINGS, (1, 2, 4), TIMES), "renew_idle_ms": 5_000}
    cell = Cell("dp4", **settings)
    cell.gateway()
    cell.ranks[Rank(2)].closed = (tuple(map(Rank, range(4))),)
    cell.serve()
    wait(cell, 3_000)
    assert cell.core.views.layout()["target"] == "tp2+tp2"
    candidates = [name for each in decisions(cell) for name in each["candidates"]]
    assert "tp4" not in {each["layout"] for each in candidates}
    assert not [each for each in cell.take() if isinstance(each, ToLauncher)]
    wait(cell, 5_000)
    assert len([each for each in cell.take() if isinstance(each, ToLauncher)]) == 1


def test_an_operators_layout_is_left_alone_for_a_while() -> None:
    cell = serving()
    cell.event(SwitchWanted(cell.layout("dp4"), Carry.RESHARD, "operator"))
    wait(cell, 15_000)
    assert cell.core.views.layout()["target"] == "dp4"
    assert "an operator chose" in decisions(cell)[-1]["reason"]
    wait(cell, 8_000)
    assert cell.core.views.layout()["target"] == "tp4"


def test_decisions_to_stay_are_remembered_as_one() -> None:
    cell = serving()
    wait(cell, 60_000)
    assert len(decisions(cell)) < 10
    last = decisions(cell)[-1]
    assert not last["changes"]
    assert last["time"] > last["since"]


def test_every_look_can_be_logged() -> None:
    cell = serving()
    effects = cell.core.handle(Tick(), cell.now_ms + 1_000)
    assert sum(isinstance(effect, Observed) for effect in effects) >= 1


def test_what_the_serving_layout_promises_is_told_also_where_an_operator_chose() -> None:
    cell = serving()
    cell.event(SwitchWanted(cell.layout("dp4"), Carry.RESHARD, "operator"))
    wait(cell, 2_000)
    effects = cell.core.handle(Tick(), cell.now_ms + 1_000)
    (foreseen,) = [effect for effect in effects if isinstance(effect, ForecastMade)]
    layout: Any = cell.core.views.layout()
    assert foreseen.epoch == layout["epoch"]
    assert "an operator chose" in decisions(cell)[-1]["reason"]
    (idle,) = foreseen.tiers
    assert idle.tier == "standard"
    assert 0.0216 <= idle.tpot_s < 0.03, "a step of one task, by the step times given"
    assert idle.attainment > 0.9


def test_other_settings_of_the_policy_hold_from_now_on() -> None:
    cell = serving()
    cell.event(SwitchWanted(cell.layout("dp4"), Carry.RESHARD, "operator"))
    shorter = dataclasses.replace(SETTINGS, pin_ms=1_000)
    start = PolicyStart(shorter, (1, 2, 4))
    cell.event(SettingsChanged(CoreSettings(world=4, layout=cell.layout("dp4"), policy=start)))
    cell.event(SwitchWanted(cell.layout("dp4"), Carry.RESHARD, "operator"))
    wait(cell, 800)
    assert cell.core.views.layout()["target"] == "dp4"
    wait(cell, 3_000)
    assert cell.core.views.layout()["target"] == "tp4", "it has still the step times of its start"
