"""One rank's copies of a step to and from host pages: what goes before what."""

import mmap
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from comm_pool.layout import Mode, Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.host.layout import SHARES_MAX, HostMemoryError
from kvadaptor.host.page_copies import PageCopier, PageCopies
from kvadaptor.transfer.boxes import HostCopyError
from worker.engine import host_lanes
from worker.engine.block_sources import connect_sources
from worker.engine.config import ModeKey
from worker.engine.host_kv import HostTier, open_tier
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
    waits: list[bool] = field(default_factory=list)

    def launch(self, copies: PageCopies, *, waits: bool = True) -> Copying:
        self.waits.append(waits)
        self.kv |= dict(zip(copies.numbers, copies.pages, strict=True))
        return Copying()


@dataclass
class Member:
    """A follower in a group of two; block n of it has the page that `kv` says."""

    kv: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own, self.ahead, stores = Stream(self.kv), Stream(self.kv), Stream({})
        self.lanes = HostLanes(own, self.ahead, stores, GEOMETRY.page_bytes, 0.0)
        unused: Any = None
        self.tier = HostTier(unused, GEOMETRY, own, stores, self.lanes)

    def run(self, **copies: Any) -> None:
        ranks = Rank(0), Rank(1)
        begin, _ = self.tier.copies(BlockCopies(**copies), ranks, Split(1, 2), 1, None)
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


def test_a_load_waits_for_stores_whose_blocks_a_step_before_has_freed(member: Member) -> None:
    """The leader forgets them with that step, and may give some of the blocks to a later load."""
    member.lanes.load_ahead(0, PageCopies(GEOMETRY.slots(Split(1, 2)), 1, [1], [1]))
    member.run(frees_stores=True)
    member.run(awaits=[0], ahead=[(1, 1)], ahead_blocks=[11], ahead_pages=[2])
    member.lanes._under_way.clear()
    member.lanes._under_way_shares = 0
    member.lanes.look()
    assert member.ahead.waits == [True, True]


def test_blocks_may_be_given_to_others_after_all_loads(member: Member) -> None:
    """The leader sets pages aside whose load it has given up, and has copied itself."""
    member.run(ahead=[(0, 3)], ahead_blocks=[4, 5, 6], ahead_pages=[1, 2, 3])
    member.tier.order_loads()
    member.kv[5] = 50
    member.lanes.look()
    member.run(awaits=[0])
    assert member.kv == {4: 1, 5: 50, 6: 3}


def test_a_rank_serves_without_host_pages_that_nobody_asked_for() -> None:
    kv: Any = SimpleNamespace(geometry=GEOMETRY, raw=SimpleNamespace(device="cpu"))
    with mmap.mmap(-1, 4_096) as memory:
        with pytest.raises(HostMemoryError, match="hold no KV page"):
            open_tier(memory, 2, 0, kv)
        assert open_tier(memory, 2, 0, kv, is_optional=True) is None


def test_a_trial_that_fails_leaves_the_pages_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.arange(8 * GEOMETRY.page_bytes, dtype=torch.int64).to(torch.int8)
    kv: Any = SimpleNamespace(geometry=GEOMETRY, raw=raw, num_pages=8)
    before = raw.clone()

    def fail(self: PageCopier, copies: PageCopies, **_: bool) -> None:
        raw[: GEOMETRY.page_bytes] = 0
        raise HostCopyError("no copy.")

    monkeypatch.setattr(PageCopier, "launch", fail)
    with mmap.mmap(-1, 1 << 20) as memory:
        assert open_tier(memory, 2, 0, kv, is_optional=True) is None
    assert (raw == before).all()


@pytest.mark.parametrize("width", [SHARES_MAX, 2 * SHARES_MAX])
def test_groups_of_more_members_than_share_a_page_use_none(width: int, member: Member) -> None:
    """`SHARES_MAX` members at most mark their shares of a page."""
    sources: list[Any] = []
    unused: Any = None
    tier = HostTier(member.tier.directory, PageGeometry(1, 32, 1, 1, 1, 16), unused, unused)
    key = ModeKey(Mode.TP, width)
    mode: Any = SimpleNamespace(host=tier, lost=None, directory=None, ranks=(0,), key=key)
    scheduler: Any = SimpleNamespace(block_size=16, use_connector=sources.append)
    connect_sources(scheduler, mode)
    assert len(sources) == (width == SHARES_MAX)
