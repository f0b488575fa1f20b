"""When a leader lets its group compute the probe before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.terms import Binding
from worker.rank.quarantine_probe import QuarantineProbe

RANKS = (Rank(0), Rank(1))
TP2, SP2 = Group(RANKS, Mode.TP), Group(RANKS, Mode.SP)
START = {Rank(0): 100, Rank(1): 100}


class Probed:
    """A rank that leads tp2 and sp2, and a probe that says how often it was computed."""

    def __init__(
        self, together: dict[Rank, int], *, joins: bool = False, after_switch: bool = False
    ) -> None:
        self.computed: list[str] = []
        self.is_full = False
        self.is_aborted = False
        self._modes = {width: self._mode(width) for width in (1, 2)}
        values = (-1.0, -2.0)
        engine: Any = SimpleNamespace(
            spec=SimpleNamespace(together=together, joins=joins),
            probe=SimpleNamespace(run=self._run, error_max_nats=0.1),
            probed={
                (1, Mode.DP): (values, 7),
                (2, Mode.TP): (values, 7),
                (2, Mode.SP): (values, 7),
            },
            of_width=lambda width: self._modes[width],
            communicators=SimpleNamespace(is_aborted=lambda *_: self.is_aborted),
        )
        self.probing = QuarantineProbe(engine, after_switch=after_switch)

    def _mode(self, width: int) -> Any:
        return SimpleNamespace(
            width=width,
            ranks=RANKS[:width],
            is_leader=True,
            scheduler=SimpleNamespace(is_full=False),
            execute=lambda plan: plan,
        )

    def _run(self, execute: Any, mode: Mode) -> tuple[float, ...]:
        self.computed.append(str(mode))
        return (-1.0, -2.0)

    def formed(self, group: Group, incarnations: dict[Rank, int], epoch: int = 5) -> list[str]:
        """Form a group of these processes; what was computed of the probe."""
        self.computed.clear()
        member: Any = SimpleNamespace(mode_of=lambda group: self._modes[group.width])
        directive: Any = SimpleNamespace(
            members=tuple(incarnations.items()), stage=SimpleNamespace(epoch=epoch)
        )
        self.probing.formed(member, Binding(group, epoch), directive)
        return list(self.computed)

    def fill(self) -> None:
        self._modes[2].scheduler.is_full = True


def test_what_a_probe_gave_in_a_lost_group_says_nothing_of_the_mode() -> None:
    rank = Probed(START)
    before = rank.probing.results
    rank.is_aborted = True
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
    rank._modes[2].scheduler.is_full = False
    assert rank.formed(TP2, new) == ["tp"]
