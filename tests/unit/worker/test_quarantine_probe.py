"""When a leader lets its group compute the probe before the first step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Mode, Rank, StepMode
from comm_pool.mixed import Staged
from coordinator.protocol.terms import Binding, Phase
from kvadaptor.group_directory import GroupDirectory
from tests.harness.coordinator.builders import directive, target
from tests.harness.worker.fake_engine import FakeCell, FakeProbe
from tests.harness.worker.fake_rank import FakeRank
from tests.harness.worker.fake_scheduler import FakeScheduler, fake_payload
from worker.rank.quarantine_probe import QuarantineProbe

RANKS = (Rank(0), Rank(1))
TP2, SP2 = Group(RANKS, Mode.TP), Group(RANKS, Mode.SP)
START = {Rank(0): 100, Rank(1): 100}


class LostProbe(FakeProbe):
    """A probe during which the group loses a member, if the test says so."""

    def __init__(self, rank: FakeRank) -> None:
        super().__init__()
        self.rank = rank
        self.loses = False

    def run(self, execute: Callable[[Any], Any], mode: StepMode) -> tuple[float, ...]:
        values = super().run(execute, mode)
        if self.loses:
            engine = self.rank.engine
            assert engine.selected is not None
            engine.communicators.abort(engine.selected.ranks, engine.formation)
        return values


class Probed:
    """A rank that leads tp2 and sp2, and a probe that says how often it was computed."""

    def __init__(
        self, together: dict[Rank, int], *, joins: bool = False, after_switch: bool = False
    ) -> None:
        self.rank = FakeRank(FakeCell(2))
        self.engine = self.rank.engine
        self.engine.spec = replace(self.engine.spec, together=together, joins=joins)
        self.engine.probe = self.probe = LostProbe(self.rank)
        self.engine.probed[2, Mode.SP] = self.engine.probed[2, Mode.TP]
        self.probing = QuarantineProbe(self.engine, after_switch=after_switch)

    def formed(self, group: Group, incarnations: dict[Rank, int], epoch: int = 5) -> list[str]:
        """Form a group of these processes; what was computed of the probe."""
        self.probe.computed.clear()
        binding, runtime = Binding(group, epoch), self.rank.runtime
        runtime.join(binding)
        members = {int(rank): born for rank, born in incarnations.items()}
        wanted = target("tp2", epoch, world=2)
        order = directive(wanted, epoch, Phase.SERVE, members=members)
        if self.probing.is_due(binding, order):
            self.probing.run(runtime, binding, order)
        return [str(each) for each in self.probe.computed]

    @property
    def scheduler(self) -> FakeScheduler:
        """The scheduler of the pair."""
        scheduler = self.engine.of_width(2).scheduler
        assert scheduler is not None
        return scheduler

    def fill(self) -> None:
        for number in range(self.engine.facts().max_tasks):
            payload = fake_payload(f"task {number}", [1], 1)
            self.scheduler.add_task(self.engine.intake.request(payload), [])


def test_what_a_probe_gave_in_a_lost_group_says_nothing_of_the_mode() -> None:
    rank = Probed(START)
    before = rank.probing.results
    rank.probe.loses = True
    with pytest.raises(PeerLostError):
        rank.formed(TP2, {**START, Rank(1): 130}, epoch=8)
    assert rank.probing.results == before


def test_processes_that_started_together_have_proved_all_modes() -> None:
    rank = Probed(START)
    assert rank.formed(TP2, START) == []
    assert rank.formed(SP2, START) == []


def test_a_group_with_a_new_process_proves_each_mode_once() -> None:
    rank = Probed(START)
    new = {**START, Rank(1): 130}
    assert rank.formed(TP2, new) == ["tp"]
    assert rank.formed(TP2, new) == []
    assert rank.formed(SP2, new) == ["sp"]
    newer = {**START, Rank(1): 160}
    assert rank.formed(TP2, newer, epoch=9) == ["tp"]
    told = {(each.mode, each.epoch) for each in rank.probing.results}
    assert told == {("dp1", 0), ("tp2", 9), ("sp2", 5)}


def test_who_joins_others_tells_of_wide_modes_when_it_has_computed_them() -> None:
    rank = Probed({Rank(0): 130}, joins=True)
    assert [each.mode for each in rank.probing.results] == ["dp1"]
    present = {Rank(0): 130, Rank(1): 100}
    assert rank.formed(TP2, present) == ["tp"]
    assert {each.mode for each in rank.probing.results} == {"dp1", "tp2"}


def test_alone_there_is_nobody_who_could_be_new() -> None:
    alone = Group(RANKS[:1], Mode.DP)
    assert Probed({}).formed(alone, {Rank(0): 130}) == []
    assert Probed({}, after_switch=True).formed(alone, {Rank(0): 130}) == ["dp"]


def test_a_group_without_room_is_probed_when_it_is_formed_again() -> None:
    rank = Probed(START)
    new = {**START, Rank(1): 130}
    rank.fill()
    assert rank.formed(TP2, new) == []
    rank.scheduler.take_back(list(rank.scheduler.requests))
    rank.scheduler.plan_step()  # It tells the runner that they have ended.
    assert rank.formed(TP2, new) == ["tp"]


def test_a_stage_that_drifts_takes_nothing_from_the_group_of_tp() -> None:
    """They have the same ranks, and the directory is that of tp."""
    rank = FakeRank(FakeCell(2, pipelines=(Staged(2),)))
    directory = Mock(GroupDirectory)
    rank.engine.directories[RANKS] = directory
    rank.engine.probed[2, Staged(2)] = ((-9.0, -9.0), 7)
    probing = QuarantineProbe(rank.engine, after_switch=False)
    drifts = {each.mode: each.has_drifted for each in probing.results}
    assert drifts == {"dp1": False, "tp2": False, "pp2": True}
    directory.give_up.assert_not_called()
