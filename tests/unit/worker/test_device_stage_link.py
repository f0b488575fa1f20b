"""Links between pipeline stages on CUDA: the order of what devices do, with threads as devices."""

import ctypes
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_pool.cpu.shared_plane import SEQUENCE_BITS
from comm_pool.formations import Formations, PeerLostError
from worker.engine.runners import stage_link
from worker.engine.runners.stage_link import PIECES, DeviceStageLink

ALIVE: list[object] = []
"""What a device may still use when a test is over."""

LIMIT_S = 30.0
BORN = 7
PIECE_BYTES = 64


class ThreadQueue:
    """A device that does one thing after the other, whenever it gets to it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for(self, word: int, value: int) -> None:
        place = ctypes.c_int64.from_address(word)
        self._work.put(lambda: until(lambda: place.value >= value))

    def set_word(self, word: int, value: int) -> None:
        def write() -> None:
            ctypes.c_int64.from_address(word).value = value

        self._work.put(write)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        def move() -> None:
            ctypes.memmove(target, source, num_bytes)

        self._work.put(move)

    def synchronize(self) -> None:
        over = threading.Event()
        self._work.put(over.set)
        assert over.wait(LIMIT_S)

    def is_idle(self) -> bool:
        """Whether all that was given is done, after some time."""
        over = threading.Event()
        self._work.put(over.set)
        return over.wait(0.1)

    def done(self) -> Callable[[], bool]:
        over = threading.Event()
        self._work.put(over.set)
        return over.is_set

    def stop(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.00001)


class Ends:
    """Both ends of a link, in two processes as it were."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE + PIECES * PIECE_BYTES)
        ALIVE.append(self.memory)
        self.aborted: set[int] = set()
        """What the group says."""
        self.of_sender, self.of_receiver = Formations(), Formations()
        self.sending, self.receiving = ThreadQueue(), ThreadQueue()
        self.sender, self.receiver = (
            DeviceStageLink(
                self.memory, formations, self.aborted.__contains__, sends=sends, queue=of_end
            )
            for sends, formations, of_end in (
                (True, self.of_sender, self.sending),
                (False, self.of_receiver, self.receiving),
            )
        )
        self.enter(BORN)

    def enter(self, formation: int) -> None:
        self.of_sender.enter(formation)
        self.of_receiver.enter(formation)

    def send(self, *tensors: torch.Tensor) -> None:
        ALIVE.extend(tensors)
        self.sender.send(tensors)

    def receive(self, *tensors: torch.Tensor) -> None:
        ALIVE.extend(tensors)
        self.receiver.receive(tensors)

    def synchronize(self) -> None:
        self.sending.synchronize()
        self.receiving.synchronize()

    def words(self) -> list[tuple[int, int]]:
        """The formation and the pieces of each end."""
        words = memoryview(self.memory).cast("q")[:2]
        return [divmod(word, 1 << SEQUENCE_BITS) for word in words]

    def stop(self) -> None:
        self.sending.stop()
        self.receiving.stop()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(stage_link, "PIECE_BYTES", PIECE_BYTES)
    made = Ends()
    yield made
    made.stop()


def message(sizes: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]


def empty(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(each) for each in tensors]


def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def release(ends: Ends) -> None:
    """Release the receiver, as a watchdog does: while its device still waits."""

    def is_out() -> bool:
        ends.receiver.release()
        return ends.receiving.is_idle()

    until(is_out)


SIZES = st.lists(st.integers(0, 3 * PIECES * PIECE_BYTES), min_size=1, max_size=3)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SIZES, min_size=1, max_size=6), st.booleans())
def test_messages_come_out_as_they_were_sent(
    ends: Ends, messages: list[list[int]], sends_first: bool
) -> None:
    """Both ends launch all at once, whichever is first: only their devices wait."""
    ends.enter(ends.of_sender.formation + 1)
    sent = [message(sizes, number) for number, sizes in enumerate(messages)]
    received = [empty(each) for each in sent]

    def send() -> None:
        for each in sent:
            ends.send(*each)

    def receive() -> None:
        for each in received:
            ends.receive(*each)

    first, second = (send, receive) if sends_first else (receive, send)
    first()
    second()
    ends.synchronize()
    assert all(equal(found, wanted) for found, wanted in zip(received, sent, strict=True))


def test_a_sender_waits_for_room(ends: Ends) -> None:
    (sent,) = message([(PIECES + 1) * PIECE_BYTES])
    ends.send(sent)
    assert not ends.sending.is_idle()
    assert ends.words()[0] == (BORN, PIECES)
    received = torch.zeros_like(sent)
    ends.receive(received)
    ends.synchronize()
    assert torch.equal(received, sent)
    assert ends.words() == [(BORN, PIECES + 1)] * 2


def test_a_receiver_waits_for_each_piece(ends: Ends) -> None:
    (received,) = empty(message([2 * PIECE_BYTES]))
    ends.receive(received)
    assert not ends.receiving.is_idle()
    (sent,) = message([PIECE_BYTES], 1)
    ends.send(sent)
    ends.sending.synchronize()
    until(lambda: ends.words()[1] == (BORN, 1))
    assert not ends.receiving.is_idle()
    assert torch.equal(received[:PIECE_BYTES], sent)
    ends.send(sent)
    ends.synchronize()
    assert torch.equal(received[PIECE_BYTES:], sent)


def test_each_formation_counts_from_zero(ends: Ends) -> None:
    """Also if the one before moved more pieces."""
    for formation, count in ((BORN, 9), (BORN + 3, 2)):
        ends.enter(formation)
        (sent,) = message([count * PIECE_BYTES], formation)
        received = torch.zeros_like(sent)
        ends.receive(received)
        ends.send(sent)
        ends.synchronize()
        assert torch.equal(received, sent)
        assert ends.words() == [(formation, count)] * 2


@pytest.mark.parametrize("by_group", [False, True], ids=["by this rank", "by another"])
def test_devices_go_on_once_an_aborted_formation_is_released(ends: Ends, by_group: bool) -> None:
    (lost,) = message([(PIECES + 2) * PIECE_BYTES])
    ends.send(lost)
    ends.receive(torch.zeros(20 * PIECE_BYTES, dtype=torch.uint8))
    ends.sending.synchronize()
    assert not ends.receiving.is_idle()
    ends.receiver.release()
    assert not ends.receiving.is_idle(), "nobody has aborted it"
    if by_group:
        ends.aborted.add(BORN)
    else:
        ends.of_receiver.abort(BORN)
        ends.of_sender.abort(BORN)
    # What a device has under way may set an older word: it is repeated while it is wanted.
    release(ends)
    for end in (ends.send, ends.receive):
        with pytest.raises(PeerLostError, match=f"formation {BORN} has lost a member"):
            end(lost)


def test_a_sender_that_waits_for_a_lost_stage_is_not_done_before_it_is_released(
    ends: Ends,
) -> None:
    """So its rank stays in the group until then: the next formation would wait after it."""
    ends.send(*message([(PIECES + 2) * PIECE_BYTES]))
    is_done = ends.sender.done()
    assert not ends.sending.is_idle() and not is_done()
    ends.aborted.add(BORN)

    def is_out() -> bool:
        ends.sender.release()
        return is_done()

    until(is_out)


def test_the_next_formation_begins_after_a_released_one(ends: Ends) -> None:
    ends.receive(torch.zeros(PIECE_BYTES, dtype=torch.uint8))
    ends.aborted.add(BORN)
    release(ends)
    ends.enter(BORN + 1)
    (sent,) = message([3 * PIECES * PIECE_BYTES])
    received = torch.zeros_like(sent)
    ends.receive(received)
    assert not ends.receiving.is_idle(), "words of the old formation are no words of this one"
    ends.send(sent)
    ends.synchronize()
    assert torch.equal(received, sent)


def test_a_formation_in_service_is_never_released(ends: Ends) -> None:
    """The watchdog may speak of an older one."""
    ends.aborted.add(BORN)
    ends.enter(BORN + 1)
    (sent,) = message([PIECE_BYTES])
    received = torch.zeros_like(sent)
    ends.receive(received)
    ends.receiver.release()
    assert not ends.receiving.is_idle()
    ends.send(sent)
    ends.synchronize()
    assert torch.equal(received, sent)


def test_a_new_process_begins_at_zero(ends: Ends) -> None:
    ends.receive(*empty(message([PIECE_BYTES])))
    ends.send(*message([PIECE_BYTES]))
    ends.synchronize()
    DeviceStageLink(
        ends.memory, Formations(), ends.aborted.__contains__, sends=True, queue=ends.sending
    )
    assert ends.words() == [(0, 0), (BORN, 1)]
