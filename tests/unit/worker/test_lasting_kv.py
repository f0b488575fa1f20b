"""Peers read the KV memory of a lost CUDA rank, until its next process takes the memory over."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import torch.distributed as dist

from comm_pool.cpu.cell_memory import CellMemoryError
from comm_pool.cuda.lasting_memory import LastingMemory, lasting_memory
from comm_pool.layout import Rank
from kvadaptor.geometry import PageGeometry, Split
from kvadaptor.transfer.peers import PeerMappingError
from worker.engine import lasting_kv
from worker.engine.lasting_kv import LastingKV, MemoryCalls, lasting_bytes
from worker.engine.lost_kv import LostKV
from worker.engine.scheduling.block_copies import BlockCopies

GEOMETRY = PageGeometry(2, 2, 8, 8, 1, 2)
PAGES = 4
NUM_BYTES = PAGES * GEOMETRY.page_bytes
CPU = torch.device("cpu")
KEY = b"k" * 32


def allocate(num_bytes: int, _: torch.device) -> tuple[torch.Tensor, int]:
    file = os.memfd_create("aileron-test-kv")
    os.ftruncate(file, num_bytes)
    return map_file(os.dup(file), num_bytes, CPU), file


def map_file(file: int, num_bytes: int, _: torch.device) -> torch.Tensor:
    mapped = mmap.mmap(file, num_bytes)
    os.close(file)
    return torch.frombuffer(mapped, dtype=torch.int8)


def refused(*_: object) -> torch.Tensor:
    raise PeerMappingError("no peer access.")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank starts alone."""
    monkeypatch.setattr(lasting_kv, "gather_all", lambda own, _: {0: own})
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)


@pytest.fixture
def lasting() -> Iterator[LastingMemory]:
    made = lasting_memory(2, (1, 2), ())
    yield made
    made.close()


def kv_of(lasting: LastingMemory, rank: int, **calls: object) -> LastingKV:
    found = MemoryCalls(**{"allocate": allocate, "map": map_file, **calls})  # type: ignore[arg-type]
    return LastingKV(lasting, Rank(rank), 2, GEOMETRY, CPU, None, found)


def opened(kv: LastingKV) -> LostKV:
    found = kv.open_lost()
    assert found is not None
    return found


def lead_alone(lost: LostKV, rank: int, incarnation: int) -> None:
    """Let a rank serve alone, with a block of this key in page 2."""
    directory = lost.directory_of((Rank(rank),))
    assert directory is not None
    directory.begin(5, [incarnation])
    directory.keep(rank, 5, None)
    directory.fill([2], [KEY])


def found_by(lost: LostKV, present: dict[Rank, int]) -> int | None:
    lost.know(present)
    lost.refresh()
    return lost.find(KEY)


def test_a_peer_copies_pages_of_a_lost_rank_until_its_next_process_begins(
    lasting: LastingMemory,
) -> None:
    survivor, victim = kv_of(lasting, 0), kv_of(lasting, 1)
    own, lost_pages = survivor.take(NUM_BYTES), victim.take(NUM_BYTES)
    reader, left = opened(survivor), opened(victim)
    lead_alone(left, 1, incarnation=7)
    content = torch.arange(NUM_BYTES, dtype=torch.int64).to(torch.int8)
    lost_pages.copy_(content)
    assert found_by(reader, {Rank(0): 1, Rank(1): 7}) is None, "its process lives"
    place = found_by(reader, {Rank(0): 1})
    assert place is not None
    step = BlockCopies(lost_blocks=[3], lost_places=[place])
    reader.loader(step, Split(1, 1), 0, None)()
    layers = own.numpy().reshape(GEOMETRY.num_layers, PAGES, -1)
    wanted = content.numpy().reshape(GEOMETRY.num_layers, PAGES, -1)
    assert (layers[:, 3] == wanted[:, 2]).all()
    assert not layers[:, :3].any()
    assert reader.loaded_bytes == GEOMETRY.page_bytes
    again = kv_of(lasting, 1)
    assert lasting_bytes(lasting, Rank(1)) == NUM_BYTES
    layers = again.take(NUM_BYTES).numpy().reshape(GEOMETRY.num_layers, PAGES, -1)
    assert (layers[:, 2] == wanted[:, 2]).all(), "it inherits the page of the block"
    assert not np.delete(layers, 2, axis=1).any()
    assert (lost_pages.numpy() == layers.reshape(-1)).all(), "it is the same memory"
    assert found_by(reader, {Rank(0): 1, Rank(1): 8}) is None
    successor = opened(again)
    assert successor.inherits
    directory = successor.directory_of((Rank(1),))
    assert directory is not None
    assert directory.take_inherited() == {2: KEY}
    assert not directory.inherited_pages.size
    lead_alone(successor, 1, incarnation=8)
    assert found_by(reader, {Rank(0): 1}) is not None, "the same mapping serves for its next loss"


def test_memory_of_another_size_is_refused_as_others_map_it(lasting: LastingMemory) -> None:
    kv_of(lasting, 0).take(NUM_BYTES)
    with pytest.raises(CellMemoryError, match="aileron renew"):
        kv_of(lasting, 0).take(2 * NUM_BYTES)


def test_without_such_memory_kv_ends_with_its_process(lasting: LastingMemory) -> None:
    kv = kv_of(lasting, 0, allocate=refused)
    assert not kv.take(NUM_BYTES).any()
    assert kv.open_lost() is None
    assert not lasting_bytes(lasting, Rank(0))


def test_ranks_without_such_memory_make_none_later(lasting: LastingMemory) -> None:
    for _ in range(2):
        kv_of(lasting, 0, allocate=refused).take(NUM_BYTES)
    later = kv_of(lasting, 0)
    assert not later.take(NUM_BYTES).any()
    assert later.open_lost() is None


def test_memory_that_cannot_be_taken_over_is_not_replaced(lasting: LastingMemory) -> None:
    """Survivors have mapped it, and would read it instead of the new one."""
    kv_of(lasting, 1).take(NUM_BYTES)
    with pytest.raises(CellMemoryError, match=r"no peer access.*aileron renew"):
        kv_of(lasting, 1, map=refused).take(NUM_BYTES)
    assert lasting_bytes(lasting, Rank(1)) == NUM_BYTES


def test_ranks_of_which_only_some_have_such_memory_do_not_start(
    lasting: LastingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = PeerMappingError("no room.")
    monkeypatch.setattr(lasting_kv, "gather_all", lambda own, _: {0: own, 1: error})
    with pytest.raises(CellMemoryError, match="rank 1: no room"):
        kv_of(lasting, 0).take(NUM_BYTES)
    monkeypatch.setattr(lasting_kv, "gather_all", lambda own, _: {0: own, 1: None})
    with pytest.raises(CellMemoryError, match="rank 0: no peer access"):
        kv_of(lasting, 1, allocate=refused).take(NUM_BYTES)


def test_a_rank_that_cannot_reach_all_others_reads_none(lasting: LastingMemory) -> None:
    kv_of(lasting, 1).take(NUM_BYTES)
    kv = kv_of(lasting, 0, map=refused)
    kv.take(NUM_BYTES)
    assert kv.open_lost() is None
    kv = kv_of(lasting, 0)
    kv.take(NUM_BYTES)
    assert kv.open_lost() is not None


def test_ranks_that_start_together_map_each_other(
    lasting: LastingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = kv_of(lasting, 0), kv_of(lasting, 1)
    raws = [first.take(NUM_BYTES), second.take(NUM_BYTES)]
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    mapped = first.map_all(raws[0], None)
    assert mapped.refusal is None
    raws[1][7] = 5
    assert [int(mapped.memory[rank][7]) for rank in (0, 1)] == [0, 5]
    assert np.shares_memory(mapped.memory[0].numpy(), raws[0].numpy())
