"""Collectives of members that are threads with the same memory, and how they are aborted."""

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from comm_pool.cpu import shared_plane
from comm_pool.cpu.shared_plane import HALF_BYTES, SEQUENCE_BITS, SharedPlane
from comm_pool.formations import ABORTED_MAX, Formations, PeerLostError

LIMIT_S = 60.0
BORN = 7


class Members:
    """The members of one group; `together` lets all of them do something at the same time."""

    def __init__(self, width: int) -> None:
        self._memory = memory = mmap.mmap(-1, shared_plane.plane_bytes(width))
        self._words = memoryview(memory).cast("q")
        self.formations = [Formations() for _ in range(width)]
        self.planes = [
            SharedPlane(memory, place, width, formations)
            for place, formations in enumerate(self.formations)
        ]
        self._threads = ThreadPoolExecutor(max_workers=width)
        self.enter(BORN)

    def replace(self, place: int, *, rehearses: bool = False) -> None:
        """A new process takes the place of this member."""
        self.formations[place] = Formations()
        width = len(self.planes)
        self.planes[place] = SharedPlane(
            self._memory, place, width, self.formations[place], rehearses=rehearses
        )

    def formation_of(self, place: int) -> int:
        """The formation of the member's last collective."""
        return self._words[place] >> SEQUENCE_BITS

    def enter(self, formation: int) -> None:
        for each in self.formations:
            each.enter(formation)

    def begin(self, do: Callable[[int, SharedPlane], Any], *places: int) -> list[Any]:
        """Futures of what these members do."""
        return [self._threads.submit(do, place, self.planes[place]) for place in places]

    def together(self, do: Callable[[int, SharedPlane], Any]) -> list[Any]:
        futures = self.begin(do, *range(len(self.planes)))
        return [each.result(LIMIT_S) for each in futures]

    def abort(self, place: int, formation: int) -> None:
        """As the pool does it."""
        self.formations[place].abort(formation)
        self.planes[place].abort(formation)


def reduced(place: int, plane: SharedPlane, shape: tuple[int, ...] = (3, 5)) -> Any:
    tensor = torch.full(shape, float(2**place))
    plane.all_reduce(tensor, group=None)
    return tensor


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_members_get_the_sum(width: int, dtype: Any) -> None:
    members = Members(width)
    # Small enough for sums of 8 to be exact in bfloat16, in whatever order.
    parts = [torch.randint(-20, 20, (4, 6)).to(dtype) for _ in range(width)]

    def reduce(place: int, plane: SharedPlane) -> list[Any]:
        tensors = [parts[place].clone() + number for number in range(5)]
        for tensor in tensors:
            plane.all_reduce(tensor)
        return tensors

    for tensors in members.together(reduce):
        for number, tensor in enumerate(tensors):
            assert torch.equal(tensor, sum(parts) + width * number)


def test_sums_are_the_same_bits_everywhere_and_exact_in_half_precision() -> None:
    parts = [torch.randn(1000) for _ in range(4)]
    found = Members(4).together(lambda place, plane: _sum(plane, parts[place]))
    assert all(torch.equal(found[0], each) for each in found)
    halves = [part.bfloat16() for part in parts]
    for each in Members(4).together(lambda place, plane: _sum(plane, halves[place])):
        whole = halves[0].float() + halves[1].float() + halves[2].float() + halves[3].float()
        assert torch.equal(each, whole.bfloat16())


def _sum(plane: SharedPlane, part: Any) -> Any:
    tensor = part.clone()
    plane.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("width", [2, 4])
def test_members_whose_first_collective_is_in_a_step_meet_outside_of_steps(width: int) -> None:
    members = Members(width)

    def in_a_step(place: int, plane: SharedPlane) -> Any:
        with torch.inference_mode():
            return reduced(place, plane)

    for do in (in_a_step, reduced, in_a_step):
        assert [float(each[0, 0]) for each in members.together(do)] == [2.0**width - 1] * width


def test_what_is_longer_than_the_memory_goes_in_pieces() -> None:
    count = 2 * HALF_BYTES // 4 + 1234
    parts = [torch.arange(count) * (place + 1.0) for place in range(2)]

    def all_kinds(place: int, plane: SharedPlane) -> tuple[Any, Any, Any]:
        gathered, received = torch.empty(2, count), torch.empty(2, count)
        plane.all_gather_into_tensor(gathered, parts[place])
        plane.all_to_all(received, torch.stack([parts[place], -parts[place]]))
        return _sum(plane, parts[place]), gathered, received

    for place, (total, gathered, received) in enumerate(Members(2).together(all_kinds)):
        assert torch.equal(total, parts[0] + parts[1])
        assert torch.equal(gathered, torch.stack(parts))
        assert torch.equal(received, torch.stack(parts) * (-1 if place else 1))


def test_what_is_not_contiguous_is_reduced_in_place() -> None:
    def reduce(place: int, plane: SharedPlane) -> Any:
        whole = torch.arange(12.0).view(3, 4) * (place + 1)
        plane.all_reduce(whole.t())
        return whole

    for whole in Members(2).together(reduce):
        assert torch.equal(whole, torch.arange(12.0).view(3, 4) * 3)


@pytest.mark.parametrize("target", [0, 2])
def test_one_member_gathers(target: int) -> None:
    def gather(place: int, plane: SharedPlane) -> list[Any] | None:
        rows = [torch.empty(2, 3) for _ in range(4)] if place == target else None
        plane.gather(torch.full((2, 3), float(place)), rows, dst=target, group=None)
        return rows

    found = Members(4).together(gather)
    assert [rows is not None for rows in found] == [place == target for place in range(4)]
    assert [float(row[0, 0]) for row in found[target]] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("width", [2, 4])
def test_part_j_goes_to_member_j(width: int) -> None:
    parts = [torch.randn(width, 3, 5) for _ in range(width)]

    def exchange(place: int, plane: SharedPlane) -> Any:
        received = torch.empty_like(parts[place])
        plane.all_to_all(received, parts[place])
        return received

    for place, received in enumerate(Members(width).together(exchange)):
        assert torch.equal(received, torch.stack([part[place] for part in parts]))


def aborted(future: Any) -> bool:
    with pytest.raises(PeerLostError, match=f"formation {BORN} has lost a member"):
        future.result(LIMIT_S)
    return True


def test_those_who_wait_for_a_dead_member_come_out_when_one_of_them_is_told() -> None:
    members = Members(4)
    members.together(reduced)
    waiting = members.begin(reduced, 0, 1, 3)
    members.abort(1, BORN)
    assert all(map(aborted, waiting))
    assert all(map(aborted, members.begin(reduced, 1))), "nor does it begin another one"


def test_one_is_told_while_the_others_are_not_there_yet() -> None:
    members = Members(2)
    members.abort(0, BORN)
    assert all(map(aborted, members.begin(reduced, 0)))
    assert all(map(aborted, members.begin(reduced, 1)))
    assert members.planes[1].is_aborted(BORN)
    assert not members.planes[1].is_aborted(BORN + 1)


def test_another_formation_is_not_aborted() -> None:
    members = Members(2)
    members.abort(0, BORN - 1)
    members.abort(1, BORN + 1)
    assert [float(each[0, 0]) for each in members.together(reduced)] == [3.0, 3.0]


def test_the_next_formation_begins_at_one_place_wherever_its_members_were_called_out() -> None:
    members = Members(4)
    members.together(reduced)
    further = members.begin(reduced, 0, 1)
    members.abort(2, BORN)
    assert all(map(aborted, further))
    members.enter(BORN + 1)
    for _ in range(3):
        assert [float(each[0, 0]) for each in members.together(reduced)] == [15.0] * 4


def test_a_member_that_comes_too_late_learns_that_the_others_are_elsewhere() -> None:
    """It was stopped in a collective; meanwhile the others have formed another group."""
    members = Members(2)
    members.formations[1].enter(BORN + 1)
    ahead = members.begin(reduced, 1)
    while members.formation_of(1) != BORN + 1:
        time.sleep(0.001)
    assert all(map(aborted, members.begin(reduced, 0)))
    members.formations[0].enter(BORN + 1)
    assert float(members.begin(reduced, 0)[0].result(LIMIT_S)[0, 0]) == 3.0
    assert float(ahead[0].result(LIMIT_S)[0, 0]) == 3.0


def test_only_the_last_aborted_formations_are_remembered() -> None:
    formations = Formations()
    for formation in range(3 * ABORTED_MAX):
        formations.abort(formation)
    assert [
        formations.is_aborted(formation)
        for formation in (0, 2 * ABORTED_MAX, 3 * ABORTED_MAX - 1, 3 * ABORTED_MAX)
    ] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_new_process_takes_the_place_of_a_lost_one(place: int) -> None:
    """It finds the words that the lost one has left in the middle of a formation."""
    members = Members(3)
    for _ in range(5):
        members.together(reduced)
    others = [each for each in range(3) if each != place]
    waiting = members.begin(reduced, *others)
    members.abort(others[0], BORN)
    assert all(map(aborted, waiting))
    # A lost process has no thread left that could write.
    members.replace(place)
    members.enter(BORN + 1)
    for _ in range(3):
        assert [float(each[0, 0]) for each in members.together(reduced)] == [7.0] * 3


def test_nobody_takes_what_a_lost_member_left_for_a_word_of_its_successor() -> None:
    """Epochs can begin anew when ranks and coordinator were lost one after the other."""
    members = Members(2)
    for _ in range(3):
        members.together(reduced)
    members.replace(0)
    members.replace(1)
    members.enter(1)
    early = members.begin(reduced, 0)
    time.sleep(0.05)
    assert not early[0].done(), "it waits for the other one"
    assert float(members.begin(reduced, 1)[0].result(LIMIT_S)[0, 0]) == 3.0
    assert float(early[0].result(LIMIT_S)[0, 0]) == 3.0


def test_one_that_rehearses_waits_for_nobody_and_is_not_seen() -> None:
    members = Members(2)
    members.together(reduced)
    members.replace(1, rehearses=True)
    members.formations[1].enter(0)
    assert float(reduced(1, members.planes[1])[0, 0]) == 2.0
    gathered = torch.empty(2, 3)
    members.planes[1].all_gather_into_tensor(gathered, torch.ones(3))
    assert gathered.tolist() == [[0.0] * 3, [1.0] * 3]
    assert members.formation_of(1) == BORN, "what the others read is as it was"
    members.planes[1].join()
    members.enter(BORN + 1)
    assert [float(each[0, 0]) for each in members.together(reduced)] == [3.0, 3.0]
