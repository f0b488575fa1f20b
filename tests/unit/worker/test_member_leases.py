"""What a rank keeps of the lease of a group that it has left."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages import Binding, LeaseKept
from kvadaptor.pages import PagePool
from worker.member import Member

RANKS = (Rank(0), Rank(1))
GROUP = Group(RANKS, Mode.TP)
BORN = 4


class Table:
    """Stands for the translation table; its slots are not looked at here."""

    def unmap(self, indices: Any) -> None:
        """Forget them."""


@pytest.fixture
def member() -> Member:
    """A follower that has leased all its pages to a group."""
    pages = PagePool(9)
    pages.lease(RANKS, 8)
    mode = SimpleNamespace(
        communicator=SimpleNamespace(ranks=RANKS), table=Table(), scheduler=None, key=None
    )
    engine = SimpleNamespace(
        pages=pages,
        modes={2: mode},
        boards={},
        spec=SimpleNamespace(rank=Rank(1)),
        block_hasher=None,
        structured_output=None,
        copy_aside=None,
        is_synchronous=False,
    )
    return Member(cast(Any, engine), 1, cast(Any, None))


def kept(*indices: int) -> list[LeaseKept]:
    return [LeaseKept(RANKS, 7, indices, BORN)]


def test_pages_that_the_leader_gave_up_are_freed(member: Member) -> None:
    assert member.apply_kept(kept(1, 2))
    assert member.engine.pages.lease_indices(RANKS).tolist() == [1, 2]
    assert not member.apply_kept(kept(1)), "the same version again says nothing new"


def test_pages_that_a_move_was_told_of_stay_until_it_is_decided(member: Member) -> None:
    """The plan counts on them: it may write there, and take them over when it is committed."""
    member.moving.left(Binding(GROUP, BORN + 1))
    assert not member.apply_kept(kept(1, 2))
    assert member.moving.ranks == RANKS
    assert len(member.engine.pages.lease_indices(RANKS)) == 8
    member.moving.joined()
    assert member.apply_kept(kept(1, 2)), "it is told again with every directive"
    assert member.engine.pages.lease_indices(RANKS).tolist() == [1, 2]


def test_pages_of_another_group_are_freed_during_a_move(member: Member) -> None:
    member.moving.left(Binding(Group((Rank(1),), Mode.DP), BORN + 1))
    assert member.apply_kept(kept(3))
    assert member.engine.pages.lease_indices(RANKS).tolist() == [3]
