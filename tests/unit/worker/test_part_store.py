"""A part of the weights that a rank leaves in its cell's memory, and the next process finds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from torch import nn

from comm_pool.cpu.cell_memory import CellMemory, cell_memory, manifest_name
from tests.harness.vllm.block_kernels import triton_blocks_on_cpu
from tests.harness.vllm.expert_models import write_experts
from tests.harness.vllm.part_trees import PARTS, rank_of_parts
from tests.harness.vllm.stored_trees import check_same, end_process
from tests.harness.vllm.trees import CPU, experts_process, write_and_name
from worker.engine.weights.manifest import PartManifest
from worker.engine.weights.part_finder import find_part
from worker.engine.weights.part_memory import units_of
from worker.engine.weights.part_store import rest_memory, store_part, unit_memory
from worker.engine.weights.selftest import prove_tree
from worker.engine.weights.tree import load_replica, loading_plan

RANKS = PARTS
KINDS = ("plain", "fp8", "fp8-static", "channel", "block", "compressed-block", "moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("parts")
    for kind in KINDS[:-1]:
        write_and_name(folder / kind, kind)
    write_experts(folder / "moe", tie_word_embeddings=True)
    with experts_process(folder), triton_blocks_on_cpu():
        yield folder


@pytest.fixture
def memory() -> Iterator[CellMemory]:
    made = cell_memory(RANKS, (1, 2), ())
    yield made
    made.close()


def prove(part: nn.Module, rank: int) -> int:
    return prove_tree(part, part, width=PARTS, rank_in_group=rank, device=CPU, shards=RANKS)


def load_and_store(model: Path, memory: CellMemory, borrow: str, rank: int = 1) -> nn.Module:
    with rank_of_parts(model, rank) as config:
        part = load_replica(config, RANKS, PARTS, borrow)
        store_part(part, list(units_of(part)), memory, rank)
        prove(part, rank)
    end_process()
    return part


def find(model: Path, memory: CellMemory, borrow: str, rank: int = 1) -> nn.Module | None:
    with rank_of_parts(model, rank) as config:
        found = find_part(config, loading_plan(config, RANKS, PARTS, borrow), memory, rank)
        if found is not None:
            prove(found[0], rank)
    return None if found is None else found[0]


@pytest.mark.parametrize("borrow", ["ffn", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_process_finds_every_tensor(
    kind: str, borrow: str, folder: Path, memory: CellMemory
) -> None:
    loaded = load_and_store(folder / kind, memory, borrow)
    found = find(folder / kind, memory, borrow)
    assert found is not None
    check_same(found, loaded)


def test_tied_layers_stay_tied(folder: Path, memory: CellMemory) -> None:
    load_and_store(folder / "moe", memory, "ffn")
    found = find(folder / "moe", memory, "ffn")
    assert found is not None
    assert found.lm_head.weight is found.model.embed_tokens.weight


def test_nothing_is_found_before_all_is_stored(folder: Path, memory: CellMemory) -> None:
    assert find(folder / "plain", memory, "ffn") is None
    load_and_store(folder / "plain", memory, "ffn")
    content = memory.get(manifest_name(1))
    memory.put(manifest_name(1), content[: len(content) // 2])
    assert find(folder / "plain", memory, "ffn") is None, "the rank has ended while it wrote"
    PartManifest.withdraw(memory, 1)
    assert find(folder / "plain", memory, "ffn") is None
    load_and_store(folder / "plain", memory, "ffn")
    assert find(folder / "plain", memory, "ffn") is not None


@pytest.mark.parametrize("where", ["unit", "rest"])
def test_a_part_that_has_changed_is_loaded_again(
    where: str, folder: Path, memory: CellMemory
) -> None:
    load_and_store(folder / "plain", memory, "all")
    manifest = PartManifest.load(memory, 1)
    assert manifest is not None
    if where == "unit":
        raw = unit_memory(memory, 1, manifest.layouts, is_own=True)[-1]
    else:
        raw = rest_memory(memory, 1, manifest.rest_bytes)
    raw[len(raw) // 2] ^= 1
    assert find(folder / "plain", memory, "all") is None
