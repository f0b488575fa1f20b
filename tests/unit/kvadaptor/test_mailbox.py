"""Boards of a move: what is published is read whole, rounds are counted, no name is left."""

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvadaptor.transfer import mailbox
from kvadaptor.transfer.mailbox import (
    FOLDER,
    GAVE_UP,
    MAILBOX_BYTES,
    SETTLED_SHARE,
    MailboxFullError,
    RankMailbox,
    open_mailboxes,
)


class Gathering:
    """All ranks' threads meet and learn what each gave."""

    def __init__(self, ranks: int) -> None:
        self._given: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def of(self, rank: int) -> Any:
        def gather(own: Any) -> list[Any]:
            self._given[rank] = own
            self._barrier.wait(10)
            told = list(self._given)
            self._barrier.wait(10)
            return told

        return gather


def boards_of(ranks: int) -> list[tuple[RankMailbox, ...]]:
    """Every rank's view of all boards."""
    gathering, opened = Gathering(ranks), dict[int, tuple[RankMailbox, ...]]()

    def run(rank: int) -> None:
        opened[rank] = open_mailboxes(rank, gathering.of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [opened[rank] for rank in range(ranks)]


@pytest.fixture
def mailboxes() -> list[tuple[RankMailbox, ...]]:
    return boards_of(3)


def test_peers_read_what_a_rank_publishes(mailboxes: list[tuple[RankMailbox, ...]]) -> None:
    assert [mailbox.epoch for view in mailboxes for mailbox in view] == [0] * 9
    mailboxes[1][1].publish(7, b"seven")
    for view in mailboxes:
        assert (view[1].epoch, view[1].message, view[1].round) == (7, b"seven", 0)
        assert view[0].epoch == view[2].epoch == 0


def test_a_later_message_replaces_the_earlier_one(mailboxes: list[tuple[RankMailbox, ...]]) -> None:
    mailboxes[0][0].publish(3, b"a long message")
    mailboxes[0][0].finish_round(2)
    mailboxes[0][0].publish(4, b"short")
    seen = mailboxes[2][0]
    assert (seen.epoch, seen.message, seen.round) == (4, b"short", 0)


def test_rounds_and_giving_up_are_told(mailboxes: list[tuple[RankMailbox, ...]]) -> None:
    mailboxes[0][0].publish(3, b"")
    for number in (1, 2, GAVE_UP):
        mailboxes[0][0].finish_round(number)
        assert mailboxes[1][0].round == number
    assert mailboxes[1][0].message == b""


def test_a_rank_adds_what_its_last_step_has_brought(
    mailboxes: list[tuple[RankMailbox, ...]],
) -> None:
    own, seen = mailboxes[0][0], mailboxes[1][0]
    own.publish(3, b"what I have")
    assert [seen.is_settled] == [False]
    own.settle(b"and one more")
    assert [seen.is_settled] == [True]
    assert (seen.message, seen.settled_message) == (b"what I have", b"and one more")
    own.publish(4, b"another move")
    assert not seen.is_settled, "that was of the move before"


def test_a_board_has_to_hold_both_messages() -> None:
    mailbox = RankMailbox(memoryview_of(256))
    mailbox.publish(3, b"x" * 100)
    with pytest.raises(MailboxFullError, match="93 more bytes"):
        mailbox.settle(b"y" * 93)
    assert not mailbox.is_settled


def test_a_peer_cannot_write_on_another_ones_board(
    mailboxes: list[tuple[RankMailbox, ...]],
) -> None:
    with pytest.raises(TypeError):
        mailboxes[0][1].publish(3, b"mine")
    with pytest.raises(TypeError):
        mailboxes[0][1].finish_round(1)


def test_a_message_that_is_too_long_is_refused_and_changes_nothing() -> None:
    mailbox = RankMailbox(memoryview_of(256))
    most = 256 - 64 - 256 // SETTLED_SHARE
    mailbox.publish(3, b"x" * most)
    with pytest.raises(MailboxFullError, match=f"{most + 1} bytes does not fit"):
        mailbox.publish(4, b"y" * (most + 1))
    assert (mailbox.epoch, mailbox.message) == (3, b"x" * most)
    mailbox.settle(b"z" * (256 // SETTLED_SHARE))
    assert mailbox.settled_message == b"zzzz"


def memoryview_of(size: int) -> Any:
    import mmap

    return mmap.mmap(-1, size)


def test_no_name_is_left_and_no_memory_taken_for_what_is_not_written() -> None:
    before = set(FOLDER.iterdir())
    used = os.statvfs(FOLDER).f_bfree
    opened = boards_of(2)
    assert set(FOLDER.iterdir()) <= before
    assert (used - os.statvfs(FOLDER).f_bfree) * os.statvfs(FOLDER).f_frsize < MAILBOX_BYTES
    assert len(opened[0]) == 2


def test_a_failed_start_leaves_no_name() -> None:
    def gather(own: Any) -> Any:
        raise RuntimeError("a peer died")

    before = set(Path(mailbox.FOLDER).iterdir())
    with pytest.raises(RuntimeError, match="a peer died"):
        open_mailboxes(0, gather)
    assert set(Path(mailbox.FOLDER).iterdir()) <= before


def _publish_many(mailbox: RankMailbox, epochs: int) -> None:
    for epoch in range(1, epochs + 1):
        mailbox.publish(epoch, bytes([epoch % 251]) * (1000 + epoch))
    mailbox.finish_round(GAVE_UP)


def test_whoever_reads_an_epoch_finds_its_message_whole() -> None:
    """A reader that looks twice at the epoch sees no mixture, however fast the writer is."""
    (views,) = [boards_of(1)[0]]
    mailbox = views[0]
    writer = multiprocessing.get_context("fork").Process(target=_publish_many, args=(mailbox, 3000))
    writer.start()
    whole = 0
    is_over = False
    while not is_over:
        is_over = mailbox.round == GAVE_UP  # Then once more.
        assert mailbox.round in (0, GAVE_UP), "a word is written at once"
        epoch = mailbox.epoch
        message = mailbox.message
        if epoch and mailbox.epoch == epoch:
            assert message == bytes([epoch % 251]) * (1000 + epoch)
            whole += 1
    writer.join(10)
    assert whole > 0


def test_the_expected_end_stands_through_all_messages(
    mailboxes: list[tuple[RankMailbox, ...]],
) -> None:
    mailboxes[0][0].expect_end(123)
    mailboxes[0][0].publish(7, b"message")
    mailboxes[0][0].settle(b"tokens")
    assert (mailboxes[1][0].ends_ns, mailboxes[1][0].message, mailboxes[2][1].ends_ns) == (
        123,
        b"message",
        0,
    )
