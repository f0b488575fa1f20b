"""One rank's copies of a step to and from host pages: what goes before what."""

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry
from kvadaptor.host.page_copies import PageCopies
from worker.engine import host_lanes
from worker.engine.host_kv import HostTier
from worker.engine.host_lanes import HostLanes
from worker.engine.scheduling.block_copies import BlockCopies

GEOMETRY = PageGeometry(1, 2, 1, 1, 1, 16)


class Copying:
    """Copies of which nobody learns that they are over."""

    def is_over(self) -> bool:
        return False

    def order(self) -> None:
        """The device would wait for them."""


@dataclass
class Stream:
    """A copy engine that copies as soon as it may."""

    kv: dict[int, int]

    def launch(self, copies: PageCopies, *, waits: bool = True) -> Copying:
        self.kv |= dict(zip(copies.numbers, copies.pages, strict=True))
        return Copying()


@dataclass
class Member:
    """A follower in a group of two; block n of it has the page that `kv` says."""

    kv: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own, ahead, stores = Stream(self.kv), Stream(self.kv), Stream({})
        self.lanes = HostLanes(own, ahead, stores, GEOMETRY.page_bytes)
        unused: Any = None
        self.tier = HostTier(unused, GEOMETRY, own, stores, self.lanes)

    def run(self, **copies: Any) -> None:
        begin, _ = self.tier.copies(BlockCopies(**copies), (Rank(0), Rank(1)), 1, None)
        begin()


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    """A member whose queue has room for one share of a load ahead."""
    monkeypatch.setattr(host_lanes, "LOADS_UNDER_WAY", 1)
    monkeypatch.setattr(host_lanes, "LOADS_AT_ONCE", 1)
    return Member()


def test_a_step_loads_into_blocks_of_a_load_that_nobody_wants_any_more(member: Member) -> None:
    member.run(ahead=[(0, 3)], ahead_blocks=[4, 5, 6], ahead_pages=[1, 2, 3])
    assert member.kv == {4: 1}, "the rest waits"
    member.run(load_blocks=[5], load_pages=[50], awaits=[0])
    assert member.kv == {4: 1, 5: 50, 6: 3}


def test_blocks_may_be_given_to_others_after_all_loads(member: Member) -> None:
    """The leader sets pages aside whose load it has given up, and has copied itself."""
    member.run(ahead=[(0, 3)], ahead_blocks=[4, 5, 6], ahead_pages=[1, 2, 3])
    member.tier.order_loads()
    member.kv[5] = 50
    member.lanes.look()
    member.run(awaits=[0])
    assert member.kv == {4: 1, 5: 50, 6: 3}
