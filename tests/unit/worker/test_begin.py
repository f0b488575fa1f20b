"""What a rank waits for before anything is written to the pages of a group that begins."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("vllm")

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages import Binding
from kvadaptor.pages import PagePool
from worker.member import Member
from worker.step_queue import Begin

RANKS = (Rank(0), Rank(1))


@pytest.fixture(autouse=True)
def collections_go_on() -> Iterator[None]:
    """A rank that leaves its group pauses them for its process, which is that of all tests."""
    yield
    gc.enable()


WIDE = Binding(Group(RANKS, Mode.TP), 4)
ALONE = Binding(Group(RANKS[:1], Mode.DP), 5)


class Stage:
    """Rank 0, which leads, and in which order it does things."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.sent: list[Any] = []
        queue = SimpleNamespace(enqueue=lambda message, timeout: self.send(message))
        self.modes = {width: self.mode(width, queue) for width in (1, 2)}
        engine = SimpleNamespace(
            pages=PagePool(9),
            modes=self.modes,
            boards={},
            spec=SimpleNamespace(rank=RANKS[0]),
            block_hasher=None,
            structured_output=None,
            copy_aside=None,
            is_synchronous=False,
            communicators=SimpleNamespace(
                is_aborted=lambda *_: False, of=lambda _: self.modes[2].communicator
            ),
            select=lambda width, born: self.modes[width],
            of_width=lambda width: self.modes[width],
            meet=lambda _: self.done.append("meet"),
        )
        self.member = Member(cast(Any, engine), 1, cast(Any, None))
        rounds = self.member.moving._rounds
        for name in ("go_before", "end_all"):
            setattr(rounds, name, lambda name=name: self.done.append(name))

    def mode(self, width: int, queue: Any) -> Any:
        scheduler = SimpleNamespace(
            grant=lambda _: self.done.append("grant"),
            idle=True,
            requests={},
            holders_of=lambda _: (),
        )
        table = SimpleNamespace(map=lambda *_: None, unmap=lambda _: None) if width > 1 else None
        communicator = SimpleNamespace(
            ranks=RANKS[:width], group=SimpleNamespace(mq_broadcaster=queue)
        )
        return SimpleNamespace(communicator=communicator, table=table, scheduler=scheduler)

    def send(self, message: Any) -> None:
        self.done.append("send")
        self.sent.append(message)

    def has_moved_to(self, binding: Binding, *, ends_late: bool) -> None:
        """A committed move has prepared this group."""
        self.member.moving._meets_in = binding.group.ranks if ends_late else ()
        self.member.prepared(binding, np.zeros(0, dtype=np.int64))
        self.member.join(binding)


def test_members_meet_behind_their_copies_before_pages_can_be_written() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=True)
    stage.member.serve(WIDE, (), 3)
    assert stage.done == ["send", "go_before", "meet", "grant"]
    assert [(type(each), each.meets) for each in stage.sent] == [(Begin, True)]


def test_a_group_whose_copies_are_over_meets_nobody() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=False)
    stage.member.serve(WIDE, (), 3)
    assert stage.done == ["send", "end_all", "grant"]
    assert not stage.sent[0].meets


def test_a_rank_alone_waits_for_the_copies_of_a_move_that_came_to_nothing() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=True)
    stage.member.unbind()
    stage.member.join(ALONE)
    stage.member.begin(3, (), -1)
    assert stage.done == ["end_all", "grant"]


def test_members_meet_once() -> None:
    stage = Stage()
    stage.has_moved_to(WIDE, ends_late=True)
    stage.member.serve(WIDE, (), 1)
    stage.member.unbind()
    stage.member.join(WIDE)
    stage.member.serve(WIDE, (), 1)
    assert [each.meets for each in stage.sent] == [True, False]


def test_a_follower_does_what_its_leader_says() -> None:
    stage = Stage()
    stage.member.join(WIDE)
    told = iter([Begin(WIDE.born, (), 3, -1, meets=True)])
    queue = SimpleNamespace(dequeue=lambda timeout: next(told))
    stage.modes[2].communicator.group.mq_broadcaster = queue
    stage.modes[2].scheduler = None
    stage.member.follow(WIDE)
    assert stage.done == ["go_before", "meet"]
