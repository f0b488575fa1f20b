"""Copies between KV memory and host pages beside steps: their order, limits and ends."""

import math
from dataclasses import dataclass, field

import pytest

from kvadaptor.geometry import Slots
from kvadaptor.host.page_copies import PageCopies
from worker.engine import host_lanes
from worker.engine.host_lanes import HostLanes

PAGE_BYTES = 1 << 20
S_PER_BYTE = 1e-9


@dataclass(eq=False)
class Copying:
    """Copies that are over when a test says so."""

    copies: PageCopies
    log: list[str]
    waits: bool = True
    over: bool = False

    def is_over(self) -> bool:
        return self.over

    def order(self) -> None:
        self.log.append(f"order {list(self.copies.pages)}")


@dataclass
class Copier:
    log: list[str]
    launched: list[Copying] = field(default_factory=list)

    def launch(self, copies: PageCopies, *, waits: bool = True) -> Copying:
        self.launched.append(Copying(copies, self.log, waits))
        return self.launched[-1]


@dataclass
class Lanes:
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own_loads, self.loads, self.stores = (Copier(self.log) for _ in range(3))
        self.lanes = HostLanes(self.own_loads, self.loads, self.stores, PAGE_BYTES, S_PER_BYTE)

    def store(self, *pages: int) -> None:
        self.lanes.store(of(*pages), lambda: self.log.append(f"done {list(pages)}"))


def of(*pages: int) -> PageCopies:
    return PageCopies(Slots(1, 1, 1, 1), 0, pages, pages)


@pytest.fixture
def made() -> Lanes:
    return Lanes()


def test_stores_are_done_in_order(made: Lanes) -> None:
    made.store(1)
    made.store(2, 3)
    made.stores.launched[1].over = True
    made.lanes.look()
    assert not made.log
    made.stores.launched[0].over = True
    made.lanes.look()
    assert made.log == ["done [1]", "done [2, 3]"]


def test_work_that_writes_waits_for_the_last_store(made: Lanes) -> None:
    made.lanes.order_stores()
    made.store(1)
    made.store(2)
    made.lanes.order_stores()
    assert made.log == ["order [2]"]


def test_a_backlog_leaves_blocks_out(made: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lanes, "STORE_BACKLOG_BYTES", 2 * PAGE_BYTES)
    made.store(1, 2, 3)  # There is no other, so these count whatever their size.
    made.store(4, 5)
    assert len(made.stores.launched) == 1
    assert made.lanes.late_blocks == 2
    made.stores.launched[0].over = True
    made.store(6)
    assert len(made.stores.launched) == 2


def test_tokens_wait_for_few_stores_and_not_for_long(
    made: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr("time.sleep", sleeps.append)
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock) * host_lanes.STORE_WAIT_S / 3)
    made.store(1)
    made.lanes.wait_stores()
    assert sleeps, "it waits"
    assert len(sleeps) < 5
    sleeps.clear()
    made.lanes.wait_stores()
    assert not sleeps, "the last wait was not long enough"
    made.stores.launched[0].over = True
    made.lanes.wait_stores()
    made.store(2)
    made.lanes.wait_stores()
    assert sleeps, "stores were over in time since"
    made.stores.launched[1].over = True
    made.lanes.wait_stores()
    sleeps.clear()
    made.store(*range(2, 3 + host_lanes.WAIT_BYTES // PAGE_BYTES))
    made.lanes.wait_stores()
    assert not sleeps, "a prompt is too much"


def test_a_step_follows_loads_ahead_once_they_are_over(made: Lanes) -> None:
    made.lanes.load_ahead(7, of(1))
    assert not made.lanes.is_over(7)
    assert not made.lanes.is_over(8)
    made.loads.launched[0].over = True
    assert made.lanes.is_over(7)
    made.lanes.follow([7])
    assert made.log == ["order [1]"]
    assert not made.lanes.is_over(7), "it is forgotten"


def test_the_time_that_loads_still_take_is_known_by_parts(
    made: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lanes, "PART_BYTES", 2 * PAGE_BYTES)
    made.lanes.load_ahead(0, of(1, 2, 3))
    made.lanes.load_ahead(1, of(4))
    first, second, third = made.loads.launched
    page_s = PAGE_BYTES * S_PER_BYTE

    def left() -> list[float]:
        return [made.lanes.remaining_s(number) for number in (0, 1)]

    assert left() == pytest.approx([3 * page_s, 4 * page_s])
    first.over = True
    assert left() == pytest.approx([page_s, 2 * page_s])
    second.over = True
    assert left() == pytest.approx([0.0, page_s])
    third.over = True
    assert left() == [0.0, 0.0]
    assert made.lanes.remaining_s(2) == math.inf


def test_a_load_that_is_not_launched_to_its_end_takes_who_knows_how_long(
    made: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waits for it would wait for room in the driver's queue."""
    monkeypatch.setattr(host_lanes, "LOADS_UNDER_WAY", 1)
    monkeypatch.setattr(host_lanes, "PART_BYTES", PAGE_BYTES)
    made.lanes.load_ahead(0, of(1, 2))
    assert made.lanes.remaining_s(0) == math.inf
    made.loads.launched[0].over = True
    assert made.lanes.remaining_s(0) == pytest.approx(PAGE_BYTES * S_PER_BYTE)


def test_loads_ahead_are_launched_as_others_end(
    made: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the driver would wait if its queue were full."""
    monkeypatch.setattr(host_lanes, "LOADS_UNDER_WAY", 4)
    monkeypatch.setattr(host_lanes, "LOADS_AT_ONCE", 2)
    made.lanes.load_ahead(0, of(1, 2, 3, 4, 5))
    made.lanes.load_ahead(1, of(6))

    def launched() -> list[tuple[list[int], bool]]:
        return [(list(each.copies.pages), each.waits) for each in made.loads.launched]

    assert launched() == [([1, 2], True), ([3, 4], False)]
    made.loads.launched[0].over = made.loads.launched[1].over = True
    assert not made.lanes.is_over(0)
    assert launched()[2:] == [([5], False), ([6], False)]
    made.loads.launched[2].over = True
    assert made.lanes.is_over(0)
    assert not made.lanes.is_over(1)


def test_loads_ahead_wait_for_other_groups_and_for_stores(
    made: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the group's own steps have ended that touch the blocks."""
    monkeypatch.setattr(host_lanes, "LOADS_AT_ONCE", 1)

    def waits() -> list[bool]:
        found = [each.waits for each in made.loads.launched]
        for each in made.loads.launched:
            each.over = True
        made.loads.launched.clear()
        return found

    made.lanes.load_ahead(0, of(1, 2))
    assert waits() == [True, False], "the first one waits"
    made.lanes.load_ahead(1, of(3))
    assert waits() == [False]
    made.lanes.delay_loads()
    made.lanes.load_ahead(2, of(4, 5))
    made.lanes.load_ahead(3, of(6))
    assert waits() == [True, False, False], "the next one waits, whichever step brings it"
    made.lanes.stop()
    made.lanes.load_ahead(3, of(6))
    made.lanes.load_ahead(4, of(7))
    assert waits() == [True, False], "it leads or follows in another group"


def test_a_slower_member_launches_what_a_step_waits_for(
    made: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lanes, "LOADS_UNDER_WAY", 2)
    monkeypatch.setattr(host_lanes, "LOADS_AT_ONCE", 2)
    made.lanes.load_ahead(0, of(1, 2, 3, 4, 5))
    made.lanes.follow([0])
    assert [list(each.copies.pages) for each in made.loads.launched] == [[1, 2], [3, 4, 5]]
    assert made.log == ["order [3, 4, 5]"]
    for each in made.loads.launched:
        each.over = True
    made.lanes.load_ahead(1, of(6))
    assert len(made.loads.launched) == 3


def test_later_work_waits_for_all_loads_ahead(made: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lanes, "LOADS_UNDER_WAY", 2)
    monkeypatch.setattr(host_lanes, "LOADS_AT_ONCE", 2)
    made.lanes.order_loads()
    made.lanes.load_ahead(0, of(1, 2, 3))
    made.lanes.load_ahead(1, of(4))
    made.lanes.order_loads()
    assert [list(each.copies.pages) for each in made.loads.launched] == [[1, 2], [3], [4]]
    assert made.log == ["order [4]"]


def test_a_step_waits_for_its_own_loads(made: Lanes) -> None:
    made.lanes.load(of(4))
    assert made.log == ["order [4]"]


def test_a_rank_leaves_when_nothing_is_copied(made: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    made.store(1)
    made.lanes.load_ahead(0, of(2))
    flags = [*made.stores.launched, *made.loads.launched]

    def end_one(_: float) -> None:
        flags.pop().over = True

    monkeypatch.setattr("time.sleep", end_one)
    made.lanes.stop()
    assert not flags
    assert made.log == ["done [1]"]
    with pytest.raises(KeyError):
        made.lanes.follow([0])
