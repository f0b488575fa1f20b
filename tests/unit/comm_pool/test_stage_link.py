"""Links between pipeline stages whose ends are threads, or processes, with the same memory."""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_pool.cpu import stage_link
from comm_pool.cpu.shared_plane import SEQUENCE_BITS
from comm_pool.cpu.stage_link import PIECE_BYTES, PIECES, StageLink, link_bytes
from comm_pool.formations import Formations, PeerLostError

LIMIT_S = 60.0
BORN = 7
FLOATS = PIECE_BYTES // 4
"""Of one piece."""


class Ends:
    """Both ends of a link; each `begin` is another thread, as stages are other processes."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, link_bytes())
        self._words = memoryview(self.memory).cast("q")[:2]
        self.group_aborted: set[int] = set()
        """What the plane of the group says."""
        self._threads = ThreadPoolExecutor(max_workers=2)
        self.replace(sends=True)
        self.replace(sends=False)
        self.enter(BORN)

    def replace(self, *, sends: bool) -> None:
        """A new process maps the memory, as this end of the link."""
        formations = Formations()
        link = StageLink(self.memory, formations, self.group_aborted.__contains__, sends=sends)
        if sends:
            self.sender, self.of_sender = link, formations
        else:
            self.receiver, self.of_receiver = link, formations

    def enter(self, formation: int) -> None:
        self.of_sender.enter(formation)
        self.of_receiver.enter(formation)

    def send(self, *tensors: torch.Tensor) -> "Future[None]":
        return self._threads.submit(self.sender.send, tensors)

    def receive(self, *tensors: torch.Tensor) -> "Future[None]":
        return self._threads.submit(self.receiver.receive, tensors)

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send a message, and return what comes out."""
        received = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        both = [self.send(*tensors), self.receive(*received)]
        for each in both:
            each.result(LIMIT_S)
        return received

    def written(self) -> tuple[int, int]:
        """The formation of the sender's word, and its pieces."""
        return divmod(self._words[0], 1 << SEQUENCE_BITS)

    def until_written(self, formation: int, pieces: int) -> None:
        until(lambda: self.written() == (formation, pieces))

    def until_read(self, formation: int, pieces: int) -> None:
        until(lambda: divmod(self._words[1], 1 << SEQUENCE_BITS) == (formation, pieces))


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def lost(future: "Future[None]", formation: int = BORN) -> bool:
    with pytest.raises(PeerLostError, match=f"formation {formation} has lost a member"):
        future.result(LIMIT_S)
    return True


def waits(future: "Future[None]") -> bool:
    time.sleep(0.05)
    return not future.done()


def numbers(count: int, first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Bytes that name their place."""
    of_bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return (torch.arange(first, first + count) * 7).to(of_bits).view(dtype)


def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    # Threads of a failed test come out too.
    made.group_aborted.update(range(BORN + 9))


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 256), (3, 256)),
        ((1, 1), (7,), ()),
        ((0, 256), (0, 256)),
        ((PIECES * FLOATS + 1,), (5,)),
        ((3 * PIECES, FLOATS + 3), (2, PIECES, FLOATS)),
    ],
    ids=["a step", "small", "empty", "a ring and one", "three rings"],
)
def test_messages_come_out_as_they_were_sent(
    ends: Ends, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]
) -> None:
    message = [torch.randn(shape).to(dtype) for shape in shapes]
    for _ in range(3):
        assert equal(ends.pass_on(message), message)


@settings(max_examples=30)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from((torch.float32, torch.bfloat16)),
                st.one_of(
                    st.integers(0, 40),
                    st.integers(FLOATS - 2, 2 * FLOATS + 2),
                    st.integers(PIECES * FLOATS - 2, PIECES * FLOATS + 2),
                ),
            ),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_messages_come_in_order(messages: list[list[tuple[torch.dtype, int]]]) -> None:
    """The sender is as far ahead as the ring lets it be."""
    ends, place = Ends(), 0
    sent: list[list[torch.Tensor]] = []
    for lengths in messages:
        sent.append([])
        for dtype, length in lengths:
            sent[-1].append(numbers(length, place, dtype))
            place += length
    received = [[torch.empty_like(each) for each in message] for message in sent]

    def send_all() -> None:
        for each in sent:
            ends.sender.send(each)

    sending = ends._threads.submit(send_all)
    for message, wanted in zip(received, sent, strict=True):
        ends.receive(*message).result(LIMIT_S)
        assert equal(message, wanted)
    sending.result(LIMIT_S)


def test_what_is_not_contiguous_is_sent_as_it_is_read_and_not_received(ends: Ends) -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert torch.equal(ends.pass_on([whole.t()])[0], whole.t())
    ends.sender.send([whole])
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        ends.receiver.receive([torch.empty(4, 3).t()])


def test_ends_that_were_made_in_a_step_work_outside_of_it_and_back(ends: Ends) -> None:
    def in_a_step(do: Callable[[list[torch.Tensor]], None], tensor: torch.Tensor) -> None:
        with torch.inference_mode():
            do([tensor])

    with torch.inference_mode():
        ends.replace(sends=True)
        ends.replace(sends=False)
    ends.enter(BORN)
    for is_in_step in (True, False, True):
        received = torch.zeros(4)
        pairs = ((ends.sender.send, torch.ones(4)), (ends.receiver.receive, received))
        for do, tensor in pairs:
            in_a_step(do, tensor) if is_in_step else do([tensor])
        assert received.tolist() == [1.0] * 4


def test_a_sender_that_is_ahead_waits_until_a_piece_is_read(ends: Ends) -> None:
    message = numbers((PIECES + 2) * FLOATS)
    sending = ends.send(message)
    ends.until_written(BORN, PIECES)
    assert waits(sending)
    first = torch.empty(FLOATS)
    ends.receive(first).result(LIMIT_S)
    ends.until_written(BORN, PIECES + 1)
    assert waits(sending), "room for one piece is room for one"
    rest = torch.empty((PIECES + 1) * FLOATS)
    ends.receive(rest).result(LIMIT_S)
    sending.result(LIMIT_S)
    assert equal([torch.cat([first, rest])], [message])


def test_a_stage_that_is_ahead_does_not_wait_while_there_is_room(ends: Ends) -> None:
    for number in range(PIECES):
        ends.sender.send([torch.full((8,), float(number))])
    for number in range(PIECES):
        received = torch.empty(8)
        ends.receiver.receive([received])
        assert received.tolist() == [float(number)] * 8


# ---------------------------------------------------------------------- losses


def abort_own(ends: Ends) -> None:
    ends.of_sender.abort(BORN)
    ends.of_receiver.abort(BORN)


def abort_group(ends: Ends) -> None:
    ends.group_aborted.add(BORN)


@pytest.mark.parametrize("abort", [abort_own, abort_group])
def test_an_abort_calls_both_ends_out_of_their_waits(
    ends: Ends, abort: Callable[[Ends], None]
) -> None:
    receiving = ends.receive(torch.empty(4))
    assert waits(receiving)
    abort(ends)
    assert lost(receiving)
    other = Ends()
    sending = other.send(torch.empty((PIECES + 1) * FLOATS))
    other.until_written(BORN, PIECES)
    assert waits(sending)
    abort(other)
    assert lost(sending)


def test_no_message_begins_in_an_aborted_formation(ends: Ends) -> None:
    ends.sender.send([torch.ones(4)])
    abort_own(ends)
    with pytest.raises(PeerLostError):
        ends.sender.send([torch.ones(4)])
    with pytest.raises(PeerLostError):
        ends.receiver.receive([torch.ones(4)])
    assert ends.written() == (BORN, 1)


def test_another_formation_is_not_aborted(ends: Ends) -> None:
    for formation in (BORN - 1, BORN + 1):
        ends.of_sender.abort(formation)
        ends.of_receiver.abort(formation)
        ends.group_aborted.add(formation)
    message = [numbers((PIECES + 3) * FLOATS)]
    assert equal(ends.pass_on(message), message)


@pytest.mark.parametrize("lead", [0, 3, PIECES])
def test_a_new_formation_begins_at_0_whatever_is_in_the_ring(ends: Ends, lead: int) -> None:
    ends.pass_on([numbers(3 * FLOATS)])
    for number in range(lead):
        ends.sender.send([torch.full((9,), -1.0 - number)])
    for formation in (BORN + 1, BORN + 5):
        ends.enter(formation)
        message = [numbers((PIECES + 1) * FLOATS, formation), torch.randn(3).bfloat16()]
        assert equal(ends.pass_on(message), message)
        assert ends.written() == (formation, PIECES + 2)


def check_starts_level(ends: Ends, waiting: "Future[None]") -> None:
    """An end that an abort has called out passes on messages of the next formation."""
    abort_group(ends)
    assert lost(waiting)
    ends.enter(BORN + 1)
    message = [numbers(2 * FLOATS + 7, 99)]
    assert equal(ends.pass_on(message), message)


def test_a_sender_that_was_called_out_in_mid_message_starts_level(ends: Ends) -> None:
    sending = ends.send(numbers((PIECES + 5) * FLOATS))
    ends.receive(torch.empty(2 * FLOATS)).result(LIMIT_S)
    ends.until_written(BORN, PIECES + 2)
    check_starts_level(ends, sending)


def test_a_receiver_that_was_called_out_in_mid_message_starts_level(ends: Ends) -> None:
    receiving = ends.receive(torch.empty(5 * FLOATS))
    ends.sender.send([numbers(2 * FLOATS)])
    ends.until_read(BORN, 2)
    check_starts_level(ends, receiving)


def test_a_receiver_that_comes_too_late_learns_that_the_sender_is_elsewhere(ends: Ends) -> None:
    """Also with a whole message of its formation in the ring: the sender may overwrite it."""
    ends.sender.send([torch.ones(4)])
    ends.of_sender.enter(BORN + 1)
    ends.sender.send([torch.full((4,), 2.0)])
    assert lost(ends.receive(torch.empty(4)))
    ends.of_receiver.enter(BORN + 1)
    received = torch.empty(4)
    ends.receiver.receive([received])
    assert received.tolist() == [2.0] * 4


def test_a_sender_that_comes_too_late_learns_that_the_receiver_is_elsewhere(ends: Ends) -> None:
    ends.pass_on([torch.ones(4)])
    ends.of_receiver.enter(BORN + 1)
    received = torch.empty(4)
    ahead = ends.receive(received)
    ends.until_read(BORN + 1, 0)
    assert lost(ends.send(torch.ones(4)))
    assert waits(ahead), "it takes nothing of an earlier formation"
    ends.of_sender.enter(BORN + 1)
    ends.sender.send([torch.full((4,), 3.0)])
    ahead.result(LIMIT_S)
    assert received.tolist() == [3.0] * 4


def test_bytes_are_void_if_the_sender_has_gone_on_while_they_were_read(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.sender.send([torch.ones(4)])

    class Piece:
        """Memory that takes long to copy to."""

        def numel(self) -> int:
            return 16

        def copy_(self, source: torch.Tensor) -> None:
            assert source.view(torch.float32).tolist() == [1.0] * 4
            ends.of_sender.enter(BORN + 1)
            ends.sender.send([torch.full((4,), 2.0)])

    def pieces(_: Sequence[torch.Tensor]) -> Iterator[Any]:
        yield from StageLink._cut(ends.receiver, [])
        yield Piece()

    monkeypatch.setattr(ends.receiver, "_cut", pieces)
    with pytest.raises(PeerLostError):
        ends.receiver.receive([])


@pytest.mark.parametrize("lead", [0, 2, PIECES])
def test_a_sender_of_an_earlier_formation_is_waited_for(ends: Ends, lead: int) -> None:
    for _ in range(lead):
        ends.sender.send([torch.ones(4)])
    ends.of_receiver.enter(BORN + 1)
    received = torch.empty(4)
    receiving = ends.receive(received)
    assert waits(receiving)
    ends.of_sender.enter(BORN + 1)
    ends.sender.send([torch.full((4,), 5.0)])
    receiving.result(LIMIT_S)
    assert received.tolist() == [5.0] * 4


def test_a_receiver_of_an_earlier_formation_is_waited_for(ends: Ends) -> None:
    """However much it had read: a ring's worth of pieces fits, and no more."""
    for _ in range(3):
        ends.pass_on([numbers(PIECES * FLOATS)])
    ends.of_sender.enter(BORN + 1)
    message = numbers((PIECES + 1) * FLOATS)
    sending = ends.send(message)
    ends.until_written(BORN + 1, PIECES)
    assert waits(sending)
    ends.of_receiver.enter(BORN + 1)
    received = torch.empty_like(message)
    ends.receive(received).result(LIMIT_S)
    sending.result(LIMIT_S)
    assert equal([received], [message])


# ---------------------------------------------------------------------- successors


@pytest.mark.parametrize("sends", [True, False], ids=["sender", "receiver"])
def test_a_new_process_takes_the_place_of_a_lost_one(ends: Ends, *, sends: bool) -> None:
    """It finds the words that the lost one has written in the middle of a message."""
    ends.pass_on([numbers(3 * FLOATS)])
    living = ends.receive(torch.empty(5 * FLOATS)) if sends else ends.send(numbers(12 * FLOATS))
    if not sends:
        ends.until_written(BORN, 3 + PIECES)
    # A lost process has no thread that could write.
    ends.replace(sends=sends)
    assert waits(living), "the successor's word is none of the lost one's formation"
    abort_group(ends)
    assert lost(living)
    ends.enter(BORN + 1)
    message = [numbers(9 * FLOATS, 5), torch.randn(4, 5).bfloat16()]
    assert equal(ends.pass_on(message), message)


def test_nobody_takes_what_lost_ends_wrote_for_words_of_their_successors(ends: Ends) -> None:
    """Epochs can begin anew when ranks and coordinator were lost one after the other."""
    for _ in range(3):
        ends.sender.send([torch.ones(4)])
    ends.replace(sends=True)
    ends.replace(sends=False)
    ends.enter(BORN)
    received = torch.empty(4)
    early = ends.receive(received)
    assert waits(early)
    ends.sender.send([torch.full((4,), 4.0)])
    early.result(LIMIT_S)
    assert received.tolist() == [4.0] * 4


def test_ends_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other sends over the same memory, and is killed in mid-message."""
    monkeypatch.setattr(stage_link, "LOOKS", 0)
    ends = Ends()
    for formation in (BORN, BORN + 1, BORN + 2):
        ends.enter(formation)
        pid = os.fork()
        if pid == 0:
            try:
                # No kernel of several threads runs in a forked child.
                torch.set_num_threads(1)
                ends.replace(sends=True)
                ends.of_sender.enter(formation)
                ends.sender.send([torch.full((PIECE_BYTES + 1,), float(formation))])
                ends.sender.send([torch.ones(20 * FLOATS)])
            finally:
                os._exit(1)
        received = torch.empty(PIECE_BYTES + 1)
        ends.receive(received).result(LIMIT_S)
        assert received[0] == received[-1] == formation
        ends.until_written(formation, 4 + 1 + PIECES)
        os.kill(pid, 9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        pending = ends.receive(torch.empty(20 * FLOATS))
        assert waits(pending)
        ends.of_receiver.abort(formation)
        assert lost(pending, formation)
