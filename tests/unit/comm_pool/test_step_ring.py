"""The step queue of CPU ranks: order, room, long messages, and new processes of members."""

import mmap
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from comm_pool.cpu.step_ring import SLOT_BYTES, SLOTS, StepRing, ring_bytes

WIDTH = 3
LONG = b"x" * (SLOT_BYTES + 1)


class Ring:
    """A leader and its followers over one memory."""

    def __init__(self, width: int = WIDTH) -> None:
        self.memory = mmap.mmap(-1, ring_bytes(width))
        self.width = width
        self.leader, *self.followers = (self.member(place) for place in range(width))

    def member(self, place: int) -> StepRing:
        return StepRing(self.memory, place, self.width)

    def tell(self, *messages: Any) -> None:
        for each in messages:
            self.leader.enqueue(each, timeout=0.0)


def unread(queue: StepRing) -> list[Any]:
    found = []
    while True:
        try:
            found.append(queue.dequeue(timeout=0.0))
        except TimeoutError:
            return found


def test_all_followers_read_all_messages_in_order() -> None:
    ring = Ring()
    for start in range(0, 4 * SLOTS, SLOTS):
        messages = [{"step": start + number} for number in range(SLOTS)]
        ring.tell(*messages)
        assert [unread(each) for each in ring.followers] == [messages] * 2


def test_there_is_room_when_the_last_follower_has_read() -> None:
    ring = Ring()
    ring.tell(*range(SLOTS))
    assert unread(ring.followers[0]) == list(range(SLOTS))
    with pytest.raises(TimeoutError):
        ring.tell("one too many")
    assert ring.followers[1].dequeue(timeout=0.0) == 0
    ring.tell("there is room")
    assert unread(ring.followers[0]) == ["there is room"]


def test_members_wait_for_each_other() -> None:
    ring = Ring(2)
    heard: list[Any] = []

    def follow() -> None:
        heard.extend(ring.followers[0].dequeue(timeout=20.0) for _ in range(3 * SLOTS))

    follower = threading.Thread(target=follow)
    follower.start()
    for number in range(3 * SLOTS):
        time.sleep(0.01 * (number == 0))
        ring.leader.enqueue(number, timeout=20.0)
    follower.join(20.0)
    assert heard == list(range(3 * SLOTS))


@pytest.mark.parametrize("length", [SLOT_BYTES - 64, SLOT_BYTES, len(LONG), 3 * SLOT_BYTES])
def test_a_message_may_be_longer_than_a_slot(length: int) -> None:
    ring = Ring()
    message = os.urandom(1 << 12) * (length >> 12)
    ring.tell("before", message, "behind")
    assert [unread(each) for each in ring.followers] == [["before", message, "behind"]] * 2


def test_files_of_long_messages_are_closed() -> None:
    ring = Ring(2)

    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    for _ in range(3 * SLOTS):
        ring.tell(LONG)
        assert unread(ring.followers[0]) == [LONG]
    assert files() <= before + SLOTS
    ring.tell(*range(SLOTS))
    assert files() == before


def test_a_new_follower_reads_what_comes_from_now_on() -> None:
    ring = Ring()
    ring.tell(*range(SLOTS))
    unread(ring.followers[1])
    ring.followers[0] = ring.member(1)
    ring.tell("new")
    assert [unread(each) for each in ring.followers] == [["new"]] * 2


def test_a_new_leader_goes_on_behind_what_is_written() -> None:
    ring = Ring()
    ring.tell("old", "older")
    # The lost one was in the middle of a message.
    ring.leader._put(2, 1, pickle.dumps("half"))
    ring.leader = ring.member(0)
    ring.tell("new")
    assert [unread(each) for each in ring.followers] == [["old", "older", "new"]] * 2


def test_a_long_message_of_a_leader_that_has_ended_is_left_out() -> None:
    ring = Ring(2)
    pid = os.fork()
    if pid == 0:
        StepRing(ring.memory, 0, 2).enqueue(LONG)
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(TimeoutError):
        ring.followers[0].dequeue(timeout=0.0)
    ring.member(0).enqueue("new")
    assert unread(ring.followers[0]) == ["new"]


def test_nobody_elses_file_is_taken_for_a_long_message() -> None:
    ring = Ring(2)
    ring.tell(LONG)
    (file,) = ring.leader._long.values()
    other = os.memfd_create("other")
    os.write(other, pickle.dumps("not of this cell"))
    os.dup2(other, file)
    os.close(other)
    with pytest.raises(TimeoutError):
        ring.followers[0].dequeue(timeout=0.0)
    ring.tell("new")
    assert unread(ring.followers[0]) == ["new"]
