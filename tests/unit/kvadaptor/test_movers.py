"""Real processes move units of each other's memory; every byte is compared with a numpy model."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvadaptor.geometry import Split
from kvadaptor.transfer.host_mover import COUNTER_BYTES, HostMover, Staging
from kvadaptor.transfer.movers import ExchangeMover, PeerMover
from kvadaptor.transfer.peer_processes import PeerProcesses
from kvadaptor.transfer.peers import allocate
from kvadaptor.transfer.rounds import MoveError, Round, by_source
from kvadaptor.transfer.unit_copy import ArrayCopier, Copies, KernelCopier, Regions
from tests.harness.vllm.mover_ranks import (
    FINEST,
    GEOMETRY,
    UNITS,
    choose,
    content,
    expected,
    lose_the_last,
    move_both_ways,
    move_often,
    random_round,
    run_ranks,
)

CPU = torch.device("cpu")
WHOLE_PAGE = GEOMETRY.page_bytes


@pytest.mark.parametrize("pages", [[64, 64], [64, 48, 80]], ids=["equal", "different"])
def test_all_ranks_move_at_once_either_way(pages: list[int]) -> None:
    rounds = 6
    answers = run_ranks(len(pages), move_both_ways, pages, rounds)
    for rank, answer in enumerate(answers):
        kinds = dict.fromkeys(("peer", "exchange", "host"), [True] * rounds)
        assert answer["right"] == kinds, rank
        assert answer["sizes"] == answer["sizes"][:rounds] * 3
        counts = {source: pair[0].size for source, pair in random_round(pages, 0)[rank].items()}
        local = counts.pop(rank)
        link = sum(counts.values())
        assert answer["sizes"][0] == (link * WHOLE_PAGE // UNITS, local * WHOLE_PAGE // UNITS)


def test_nothing_grows_over_moves() -> None:
    for answer in run_ranks(2, move_often, 200):
        (files, regions), (files_after, regions_after) = answer["before"], answer["after"]
        assert files_after <= files
        assert regions_after <= regions + 8  # the C library takes some for itself
        assert answer["named"] == []
        assert answer["shared"] == 2


def alone(pages: int = 8) -> tuple[Any, PeerMover]:
    """One rank's memory with its content, and its mover."""
    raw = allocate(pages * WHOLE_PAGE, CPU)
    raw.copy_(torch.from_numpy(content(0, pages)))
    return raw, PeerMover(0, {0: raw}, GEOMETRY)


def test_a_pull_from_oneself_is_local() -> None:
    raw, mover = alone()
    copies = random_round([8], 3)
    stats = mover.move(copies, FINEST[0])
    assert np.array_equal(raw.numpy(), expected(copies, [8], 0))
    assert stats.link_bytes == 0
    assert stats.local_bytes == copies[0][0][0].size * WHOLE_PAGE // UNITS


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_it_is_said_when_the_rest_is_up_to_the_device(is_asynchronous: bool) -> None:
    raw, _ = alone()
    events: list[str] = []

    class Recorder(ArrayCopier):
        def copy(self, jobs: Any, unit_bytes: int) -> None:
            events.append("copy")
            super().copy(jobs, unit_bytes)

        def finish(self) -> float:
            events.append("finish")
            return super().finish()

    copier = Recorder(GEOMETRY.num_layers)
    copier.is_asynchronous = is_asynchronous
    mover = PeerMover(0, {0: raw}, GEOMETRY, copier=copier)
    mover.start(random_round([8], 3), FINEST[0], lambda: events.append("launched"))()
    told = ["copy", "launched"] if is_asynchronous else ["launched", "copy"]
    assert events == [*told, "finish"]


def test_the_end_of_two_starts_is_that_of_both() -> None:
    raw, mover = alone()
    copies = random_round([8], 3)
    (source, target) = copies[0][0]
    half = source.size // 2
    parts = [{0: {0: (source[each], target[each])}} for each in (slice(half), slice(half, None))]
    ends = [mover.start(part, FINEST[0]) for part in parts]
    stats = [end() for end in ends]
    assert np.array_equal(raw.numpy(), expected(copies, [8], 0))
    assert sum(each.local_bytes for each in stats) == source.size * WHOLE_PAGE // UNITS
    assert stats[0].seconds > 0 == stats[1].seconds, "the first end has waited for both"


def test_an_empty_round_moves_nothing() -> None:
    raw, mover = alone()
    none = np.empty(0, dtype=np.int64)
    rounds: tuple[Round, ...] = ({}, {0: {}}, {0: {0: (none, none)}}, {5: {}})
    for copies in rounds:
        assert mover.move(copies, FINEST[0]).local_bytes == 0
    assert np.array_equal(raw.numpy(), content(0, 8))


@pytest.mark.parametrize("finest", FINEST, ids=str)
@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_pieces_of_any_size_give_the_same(
    piece: int, finest: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvadaptor.transfer.unit_copy.PIECE_BYTES", piece)
    raw, mover = alone()
    copies = random_round([8], 4, units=finest.width)
    mover.move(copies, finest)
    assert np.array_equal(raw.numpy(), expected(copies, [8], 0, finest))


@pytest.mark.parametrize(
    ("copies", "finest", "reason"),
    [
        ({0: ([32], [1])}, FINEST[0], "not in 0..31"),
        ({0: ([1], [-1])}, FINEST[0], "not in 0..31"),
        ({0: ([1, 2], [3])}, FINEST[0], "differ in number"),
        ({1: ([1], [2])}, FINEST[0], "rank 1 is not"),
        ({0: ([1], [2])}, Split(1, 8), "no 8 equal units"),
        ({0: ([1], [2])}, Split(8, 1), "8 stages do not divide the 4 layers"),
        ({0: ([64], [1])}, Split(2, 4), "not in 0..63"),
    ],
)
def test_what_cannot_be_is_refused(copies: Any, finest: Split, reason: str) -> None:
    raw, mover = alone()
    arrays = {rank: (np.array(a), np.array(b)) for rank, (a, b) in copies.items()}
    with pytest.raises(MoveError, match=reason):
        mover.move({0: arrays}, finest)
    assert np.array_equal(raw.numpy(), content(0, 8))


def test_staging_below_one_unit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    mover = ExchangeMover(alone()[0], GEOMETRY, None, staging_bytes=4096)
    with pytest.raises(MoveError, match="staging are too few"):
        mover.warm(1)


@pytest.mark.parametrize("peer_access", [True, False])
def test_all_ranks_get_the_fastest_mover_that_works(*, peer_access: bool) -> None:
    wanted = ("PeerMover", None) if peer_access else ("HostMover", "cell.peer_access is off")
    assert run_ranks(2, choose, peer_access) == [wanted] * 2


@pytest.mark.parametrize("is_begun", [False, True], ids=["before its part", "in it"])
def test_a_peer_that_ends_in_a_move_through_the_host_keeps_nobody(*, is_begun: bool) -> None:
    """All that others exchange is moved, and then each of them says who has ended."""
    *others, _ = run_ranks(3, lose_the_last, 400, is_begun)
    said = (
        "of the ranks that started together, number 2 ended during the move: its tasks are "
        "computed again."
    )
    assert others == [(said, True)] * 2


def test_a_process_has_ended_once_nobody_runs_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    peers = PeerProcesses({1: os.getpid(), 2: child.pid})
    assert not any(map(peers.has_ended, (0, 1, 2)))
    child.kill()
    child.wait()
    assert [peers.has_ended(rank) for rank in (0, 1, 2)] == [False, False, True]
    with pytest.raises(ProcessLookupError):
        PeerProcesses({2: child.pid})


def test_staging_of_the_host_below_one_unit_is_refused() -> None:
    raw, _ = alone()
    small = allocate(COUNTER_BYTES + 100, CPU)
    staging = {rank: Staging(rank, small, 2) for rank in range(2)}
    with pytest.raises(MoveError, match="staging are too few"):
        HostMover(raw, GEOMETRY, 0, staging, PeerProcesses({})).warm(1)


def test_a_plan_is_split_by_source() -> None:
    split = by_source(np.array([2, 0, 2]), np.array([5, 6, 7]), np.array([1, 2, 3]))
    assert {rank: (a.tolist(), b.tolist()) for rank, (a, b) in split.items()} == {
        0: ([6], [2]),
        2: ([5, 7], [1, 3]),
    }


def interpret_kernel() -> None:
    """Run the GPU's kernel on CPU memory and compare it with numpy; Triton must interpret."""
    from kvadaptor.transfer.copy_kernel import Shape

    rng = np.random.default_rng(5)
    # Units below, at, above and at no power of two of a tile; copies that fill no tile.
    for unit_words, tile_words, count in ((1, 8, 13), (8, 8, 5), (32, 8, 3), (12, 8, 3), (3, 8, 7)):
        layers, unit_bytes = 3, 16 * unit_words
        memories = [
            torch.from_numpy(rng.integers(-128, 128, layers * units * unit_bytes, dtype=np.int8))
            for units in (24, 20, 40)
        ]
        own, near, far = memories
        orders = [rng.permutation(memory.numel() // layers // unit_bytes) for memory in memories]
        jobs = [
            Copies(far, orders[2][:2], own, orders[0][count + 1 : count + 3]),
            Copies(near, orders[1][:count], own, orders[0][:count]),
            Copies(own, orders[0][-1:], own, orders[0][count : count + 1]),
            Copies(own, orders[0][:0], own, orders[0][:0]),
        ]
        wanted = own.clone()
        same = [Copies(job.source, job.source_units, wanted, job.target_units) for job in jobs]
        ArrayCopier(layers).copy(same, unit_bytes)
        # Fewer programs than tiles, and more.
        shape = Shape(tile_words, programs=3 if unit_words > 1 else 99, warps=1)
        copier = KernelCopier(layers, CPU, shape=shape)
        copier.warm(own, unit_bytes, 4)
        copier.copy(jobs[:1], unit_bytes)
        copier.copy(jobs[1:], unit_bytes)
        copier.finish()
        assert torch.equal(own, wanted), (unit_words, tile_words, count)
    with pytest.raises(MoveError, match="not a multiple of 16"):
        KernelCopier(3, CPU).copy(jobs, 24)
    # Units of two of four layers, from memory of other size and from such that has only two.
    own, far, staged = (
        torch.from_numpy(rng.integers(-128, 128, layers * units * 32, dtype=np.int8))
        for layers, units in ((4, 20), (4, 24), (2, 8))
    )
    # Those of layers 0 and 1, then those of layers 2 and 3.
    orders = [rng.permutation([*range(n), *range(2 * n, 3 * n)]) for n in (20, 24)]
    orders.append(rng.permutation(8))
    jobs = [
        Copies(far, orders[1][:30], own, orders[0][:30], Regions(2, 24 * 32, 20 * 32)),
        Copies(staged, orders[2], own, orders[0][30:38], Regions(2, 8 * 32, 20 * 32)),
    ]
    wanted = own.clone()
    ArrayCopier(4).copy([replace(job, target=wanted) for job in jobs], 32)
    KernelCopier(4, CPU, shape=Shape(warps=1)).copy(jobs, 32)
    assert torch.equal(own, wanted)


def test_tables_under_way_are_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = KernelCopier(1, CPU)
    copier._reserve(5)
    waits: list[int] = []

    def wait() -> None:
        waits.append(1)
        copier._used = 0

    monkeypatch.setattr(copier, "_wait", wait)
    assert [copier._take(2), copier._take(3)] == [0, 2]
    assert not waits
    assert copier._take(1) == 0
    assert waits
    assert copier._take(9) == 0
    assert copier._pinned.numel() == copier._table.numel() == 4 * 9


def test_the_kernel_copies_what_numpy_copies() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import interpret_kernel; interpret_kernel()"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
