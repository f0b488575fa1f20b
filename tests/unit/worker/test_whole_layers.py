"""How many layers all ranks hold whole, where that is left to them."""

from threading import Barrier, Thread

import pytest

pytest.importorskip("vllm")

from types import SimpleNamespace

import torch

from worker.engine import device
from worker.engine.device import WHOLE_SHARE, room_for_whole
from worker.engine.weights.whole_layers import AutoWhole

SIZES = [393_000_000] * 64
RATE = 374e9


def alone(number: int) -> int:
    return number


def test_the_fewest_that_reach_the_goal_are_whole() -> None:
    assert AutoWhole(0.025, None, alone).decide(SIZES, 2, RATE) == 41
    assert AutoWhole(0.05, None, alone).decide(SIZES, 2, RATE) == 17
    assert AutoWhole(None, None, alone).decide(SIZES, 2, RATE) == 0
    assert AutoWhole(0.052, None, alone).decide(SIZES, 2, RATE, other_s=0.002) == 17
    assert AutoWhole(0.001, None, alone).decide(SIZES, 2, RATE, other_s=0.002) == len(SIZES)


def test_whole_layers_take_no_more_than_their_room() -> None:
    assert AutoWhole(0.025, 4_000_000_000, alone).decide(SIZES, 2, RATE) == 10
    assert AutoWhole(0.05, 10**12, alone).decide(SIZES, 2, RATE) == 17
    assert AutoWhole(0.025, 0, alone).decide(SIZES, 2, RATE) == 0


def test_the_slowest_link_and_the_fullest_device_decide_for_all_ranks() -> None:
    numbers: list[list[int]] = [[], []]
    barrier, found = Barrier(2), [0, 0]

    def agree(rank: int, number: int) -> int:
        numbers[rank].append(number)
        barrier.wait(10)
        largest = max(each[-1] for each in numbers)
        barrier.wait(10)
        return largest

    def decide(rank: int, rate: float, room_bytes: int) -> None:
        auto = AutoWhole(0.05, room_bytes, lambda number: agree(rank, number))
        found[rank] = auto.decide(SIZES, 2, rate)

    def both(rooms: tuple[int, int]) -> list[int]:
        threads = [
            Thread(target=decide, args=(rank, rate, rooms[rank]))
            for rank, rate in enumerate((RATE, RATE / 1.2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return list(found)

    assert both((10**12, 10**12)) == [25, 25]
    assert both((2_000_000_000, 10**12)) == [5, 5]


@pytest.mark.parametrize(
    ("given", "room"), [(None, WHOLE_SHARE * 30e9), (10**9, WHOLE_SHARE * 30e9), (28 * 10**9, 2e9)]
)
def test_kv_keeps_what_it_was_given_and_half_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, given: int | None, room: float
) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda *_args, **_named: 30 * 10**9)
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=given))
    assert room_for_whole(config, torch.device("cuda")) == room
    assert room_for_whole(config, torch.device("cpu")) is None
