"""Boards of a move: what is published is read whole, rounds are counted, no name is left."""

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from comm_pool import mailbox as board_module
from comm_pool.mailbox import (
    BOARD_BYTES,
    FOLDER,
    GAVE_UP,
    SETTLED_SHARE,
    MailboxFullError,
    RankMailbox,
    open_boards,
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
        opened[rank] = open_boards(rank, gathering.of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [opened[rank] for rank in range(ranks)]


@pytest.fixture
def boards() -> list[tuple[RankMailbox, ...]]:
    return boards_of(3)


def test_peers_read_what_a_rank_publishes(boards: list[tuple[RankMailbox, ...]]) -> None:
    assert [board.epoch for view in boards for board in view] == [0] * 9
    boards[1][1].publish(7, b"seven")
    for view in boards:
        assert (view[1].epoch, view[1].message, view[1].round) == (7, b"seven", 0)
        assert view[0].epoch == view[2].epoch == 0


def test_a_later_message_replaces_the_earlier_one(boards: list[tuple[RankMailbox, ...]]) -> None:
    boards[0][0].publish(3, b"a long message")
    boards[0][0].finish_round(2)
    boards[0][0].publish(4, b"short")
    seen = boards[2][0]
    assert (seen.epoch, seen.message, seen.round) == (4, b"short", 0)


def test_rounds_and_giving_up_are_told(boards: list[tuple[RankMailbox, ...]]) -> None:
    boards[0][0].publish(3, b"")
    for number in (1, 2, GAVE_UP):
        boards[0][0].finish_round(number)
        assert boards[1][0].round == number
    assert boards[1][0].message == b""


def test_a_rank_adds_what_its_last_step_has_brought(boards: list[tuple[RankMailbox, ...]]) -> None:
    own, seen = boards[0][0], boards[1][0]
    own.publish(3, b"what I have")
    assert [seen.is_settled] == [False]
    own.settle(b"and one more")
    assert [seen.is_settled] == [True]
    assert (seen.message, seen.settled_message) == (b"what I have", b"and one more")
    own.publish(4, b"another move")
    assert not seen.is_settled, "that was of the move before"


def test_a_board_has_to_hold_both_messages() -> None:
    board = RankMailbox(memoryview_of(256))
    board.publish(3, b"x" * 100)
    with pytest.raises(MailboxFullError, match="93 bytes more"):
        board.settle(b"y" * 93)
    assert not board.is_settled


def test_a_peer_cannot_write_on_another_ones_board(boards: list[tuple[RankMailbox, ...]]) -> None:
    with pytest.raises(TypeError):
        boards[0][1].publish(3, b"mine")
    with pytest.raises(TypeError):
        boards[0][1].finish_round(1)


def test_a_message_that_is_too_long_is_refused_and_changes_nothing() -> None:
    board = RankMailbox(memoryview_of(256))
    most = 256 - 64 - 256 // SETTLED_SHARE
    board.publish(3, b"x" * most)
    with pytest.raises(MailboxFullError, match=f"{most + 1} bytes is too long"):
        board.publish(4, b"y" * (most + 1))
    assert (board.epoch, board.message) == (3, b"x" * most)
    board.settle(b"z" * (256 // SETTLED_SHARE))
    assert board.settled_message == b"zzzz"


def memoryview_of(size: int) -> Any:
    import mmap

    return mmap.mmap(-1, size)


def test_no_name_is_left_and_no_memory_taken_for_what_is_not_written() -> None:
    before = set(FOLDER.iterdir())
    used = os.statvfs(FOLDER).f_bfree
    opened = boards_of(2)
    assert set(FOLDER.iterdir()) <= before
    assert (used - os.statvfs(FOLDER).f_bfree) * os.statvfs(FOLDER).f_frsize < BOARD_BYTES
    assert len(opened[0]) == 2


def test_a_failed_start_leaves_no_name() -> None:
    def gather(own: Any) -> Any:
        raise RuntimeError("a peer died")

    before = set(Path(board_module.FOLDER).iterdir())
    with pytest.raises(RuntimeError, match="a peer died"):
        open_boards(0, gather)
    assert set(Path(board_module.FOLDER).iterdir()) <= before


def _publish_many(board: RankMailbox, epochs: int) -> None:
    for epoch in range(1, epochs + 1):
        board.publish(epoch, bytes([epoch % 251]) * (1000 + epoch))
    board.finish_round(GAVE_UP)


def test_whoever_reads_an_epoch_finds_its_message_whole() -> None:
    """A reader that looks twice at the epoch sees no mixture, however fast the writer is."""
    (views,) = [boards_of(1)[0]]
    board = views[0]
    writer = multiprocessing.get_context("fork").Process(target=_publish_many, args=(board, 3000))
    writer.start()
    whole = 0
    is_over = False
    while not is_over:
        is_over = board.round == GAVE_UP  # Then once more.
        assert board.round in (0, GAVE_UP), "a word is written at once"
        epoch = board.epoch
        message = board.message
        if epoch and board.epoch == epoch:
            assert message == bytes([epoch % 251]) * (1000 + epoch)
            whole += 1
    writer.join(10)
    assert whole > 0


def test_the_expected_end_stands_through_all_messages(
    boards: list[tuple[RankMailbox, ...]],
) -> None:
    boards[0][0].expect_end(123)
    boards[0][0].publish(7, b"message")
    boards[0][0].settle(b"tokens")
    assert (boards[1][0].ends_ns, boards[1][0].message, boards[2][1].ends_ns) == (
        123,
        b"message",
        0,
    )
