"""Ranks that share parts of the weights with each other, through files and through handles."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import torch.distributed as dist
from torch import nn

from comm_pool.cpu.cell_memory import CellMemory, cell_memory
from tests.harness.vllm.part_trees import PARTS, rank_of_parts
from tests.harness.vllm.trees import CPU, tree_process, write_and_name
from worker.engine.weights.layers import ViewError
from worker.engine.weights.lending import Borrowing, Place, share_parts
from worker.engine.weights.manifest import PartManifest
from worker.engine.weights.part_memory import UnitKind, units_of
from worker.engine.weights.part_store import store_part, unit_memory
from worker.engine.weights.tree import load_replica

PLACES = tuple(Place(rank, 0, PARTS, PARTS) for rank in range(PARTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("lending")
    model = write_and_name(folder / "model")
    with tree_process(folder):
        yield model


@pytest.fixture
def memory() -> Iterator[CellMemory]:
    made = cell_memory(PARTS, (1, 2), ())
    yield made
    made.close()


def load(model: Path, rank: int) -> nn.Module:
    with rank_of_parts(model, rank) as config:
        return load_replica(config, PARTS, PARTS, "all")


def share(part: nn.Module, rank: int, memory: CellMemory | None) -> Borrowing:
    return share_parts(part, PLACES[rank], CPU, memory=memory, cpu_group=rank, meet=lambda: None)


def check_copies(borrowing: Borrowing, lender: nn.Module) -> None:
    """Every loan brings what the lender's layers have, the lm_head's piece by piece."""
    borrowing.ring.begin_step()
    rows = 0
    for unit in units_of(lender):
        borrowed = borrowing.units[unit.name]
        if unit.kind is UnitKind.LM_HEAD:
            borrowed.ring.begin_step()
        for part in borrowed.parts:
            if part.loan is None:
                if unit.kind is UnitKind.EMBEDDINGS and part is not borrowed.parts[0]:
                    assert torch.equal(part.tensors[0][1], unit.layers[""].weight)
                continue
            with borrowed.ring.use(part.loan):
                for place, tensor in part.tensors:
                    own = getattr(unit.layers[place.layer], place.name)
                    if unit.kind is UnitKind.LM_HEAD:
                        assert part.first_row == rows
                        rows += len(tensor)
                        own = own[part.first_row : rows]
                    assert torch.equal(tensor, own), (unit.name, place)
    assert rows == len(lender.lm_head.weight)


def store(model: Path, memory: CellMemory, rank: int) -> nn.Module:
    part = load(model, rank)
    store_part(part, list(units_of(part)), memory, rank)
    return part


def test_a_rank_borrows_from_the_memory_of_its_cell(model: Path, memory: CellMemory) -> None:
    lender = store(model, memory, 0)
    check_copies(share(load(model, 1), 1, memory), lender)


def test_a_part_that_changed_since_it_was_stored_is_refused(
    model: Path, memory: CellMemory
) -> None:
    store(model, memory, 0)
    manifest = PartManifest.load(memory, 0)
    assert manifest is not None
    third = manifest.units[2].name
    unit_memory(memory, 0, manifest.layouts, is_own=True)[2][1000] ^= 8
    with pytest.raises(ViewError, match=f"the copy of {third} differs from what rank 0 lends"):
        share(load(model, 1), 1, memory)


def test_a_rank_that_has_stored_nothing_lends_nothing(model: Path, memory: CellMemory) -> None:
    with pytest.raises(ViewError, match="rank 0 has not stored its part"):
        share(load(model, 1), 1, memory)


def test_ranks_exchange_handles_and_checksums(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where no memory outlives a rank; the two ranks are threads."""
    everyone: dict[int, Any] = {}
    together = threading.Barrier(PARTS)

    def all_gather_object(into: list[Any], own: Any, group: int) -> None:
        everyone[group] = own
        together.wait(60)
        into[:] = [everyone[rank] for rank in range(PARTS)]
        together.wait(60)  # Nobody says the next before all have read this.

    monkeypatch.setattr(dist, "get_world_size", lambda _: PARTS)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    parts = [load(model, rank) for rank in range(PARTS)]
    found: dict[int, Borrowing] = {}

    def run(rank: int) -> Callable[[], None]:
        return lambda: found.update({rank: share(parts[rank], rank, None)})

    threads = [threading.Thread(target=run(rank)) for rank in range(PARTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(PARTS):
        check_copies(found[rank], parts[1 - rank])
