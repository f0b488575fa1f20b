"""A replica, or a packed part, that a rank leaves in its cell's memory for the next process."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from comm_pool.cpu.cell_memory import CellMemory, CellMemoryError, cell_memory
from comm_pool.layout import Mode
from tests.harness.vllm import cpu_kernels
from tests.harness.vllm.families import BY_SLUG, FAMILIES
from tests.harness.vllm.part_trees import PARTS, base_config, rank_of_parts
from tests.harness.vllm.quantized_models import KINDS, write_quantized
from tests.harness.vllm.stored_trees import check_same, end_process
from tests.harness.vllm.tiny_models import make_family
from tests.harness.vllm.trees import CPU, experts_process, write_and_name
from worker.engine.config import ModeKey, mode_config
from worker.engine.weights.gated import view_gated
from worker.engine.weights.layers import ViewError
from worker.engine.weights.manifest import PartManifest
from worker.engine.weights.outcomes import check_outcomes, outcomes_of_model
from worker.engine.weights.packed import is_packed
from worker.engine.weights.part_finder import find_part
from worker.engine.weights.part_memory import units_of
from worker.engine.weights.part_store import rest_memory, store_part
from worker.engine.weights.tree import load_replica, loading_plan

RANK, SHARDS = 1, 2
OFTEN = ("olmo-2", "gemma-2", "gpt-2", "phi-1-5-phi-2", "glm-4-5", "gpt-oss")
"""Those of which no two are made of the same layers."""
NOT_FOUND = ("apertus",)
"""It reads numbers of its activation while it is built, so its next process loads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("replicas")
    with experts_process(folder):
        yield folder


@pytest.fixture
def memory() -> Iterator[CellMemory]:
    made = cell_memory(2, (1, 2), ())
    yield made
    made.close()


def config_of(model: Path) -> VllmConfig:
    """The configuration of a rank that holds all weights."""
    return mode_config(base_config(model, dtype="float32"), ModeKey(Mode.DP, 1))


def loaded(model: Path, memory: CellMemory, shards: int = SHARDS) -> nn.Module:
    """Load a replica and store it, in a process that then ends."""
    config = config_of(model)
    with set_current_vllm_config(config):
        replica = load_replica(config, shards)
        compute = partial(outcomes_of_model, config=config, device=CPU)
        store_part(replica, (), memory, RANK, compute)
    end_process()
    return replica


def found(model: Path, memory: CellMemory, shards: int = SHARDS) -> nn.Module | None:
    """What the next process finds."""
    config = config_of(model)
    with set_current_vllm_config(config):
        compute = partial(outcomes_of_model, config=config, device=CPU)
        plan = loading_plan(config, shards, 1, "none")
        there = find_part(config, plan, memory, RANK, compute)
    return None if there is None else there[0]


def cases() -> list[Any]:
    others = [each.slug for each in FAMILIES if each.slug not in OFTEN]
    return [*OFTEN, *(pytest.param(slug, marks=pytest.mark.long) for slug in others)]


@pytest.mark.parametrize("slug", cases())
def test_a_replica_of_each_family_is_found(slug: str, folder: Path, memory: CellMemory) -> None:
    """Sinks, biases of experts, corrections of routers: what kernels hold is found as well."""
    family = BY_SLUG[slug]
    model = make_family(family, folder / slug)
    shards = 1 if family.refused else SHARDS
    stored = loaded(model, memory, shards)
    if slug in NOT_FOUND:
        with pytest.raises(ViewError, match="vLLM cannot build the model without weights"):
            found(model, memory, shards)
        return
    again = found(model, memory, shards)
    assert again is not None
    check_same(again, stored)


def test_what_was_loaded_is_freed(folder: Path, memory: CellMemory) -> None:
    """All tensors lie in one piece of memory, and there is no other copy."""
    stored = loaded(write_and_name(folder / "plain"), memory)
    manifest = PartManifest.load(memory, RANK)
    assert manifest is not None
    assert manifest.units == ()
    first = next(stored.parameters()).untyped_storage()
    assert first.nbytes() >= manifest.rest_bytes
    for each in (*stored.parameters(), *stored.buffers()):
        assert not each.numel() or each.untyped_storage().data_ptr() == first.data_ptr()


def test_a_replica_that_has_changed_is_loaded_again(folder: Path, memory: CellMemory) -> None:
    model = write_and_name(folder / "changed")
    loaded(model, memory)
    manifest = PartManifest.load(memory, RANK)
    assert manifest is not None
    raw = rest_memory(memory, RANK, manifest.rest_bytes)
    raw[len(raw) // 2] ^= 1
    assert found(model, memory) is None
    again = loaded(model, memory)
    second = found(model, memory)
    assert second is not None
    check_same(second, again)


def test_weights_of_another_size_stay_where_they_are(folder: Path, memory: CellMemory) -> None:
    """The rank computes with them there, and its next process loads."""
    loaded(write_and_name(folder / "first"), memory)
    model = make_family(BY_SLUG["gpt-2"], folder / "second")
    config = config_of(model)
    with set_current_vllm_config(config):
        replica = load_replica(config, SHARDS)
        before = {name: each.data_ptr() for name, each in replica.named_parameters()}
        with pytest.raises(CellMemoryError, match=f"rest-{RANK} has"):
            store_part(replica, (), memory, RANK)
    end_process()
    assert {name: each.data_ptr() for name, each in replica.named_parameters()} == before
    assert found(model, memory) is None


def test_a_tree_that_computes_something_else_is_refused(
    folder: Path, memory: CellMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the loader had left something in Python objects alone; then the rank loads."""
    model = write_and_name(folder / "other")
    loaded(model, memory)

    def other(tree: nn.Module) -> int:
        tree.model.norm.variance_epsilon = 1e6
        return view_gated(tree)

    with monkeypatch.context() as patch:
        patch.setattr("worker.engine.weights.part_finder.view_gated", other)
        with pytest.raises(ViewError, match="the model computes other numbers than before"):
            found(model, memory)
    assert not _ROPE_DICT, "the next tree must have rotary modules of its own"
    loaded(model, memory)
    assert found(model, memory) is not None


# Packed weights


def part_of(model: Path) -> AbstractContextManager[VllmConfig]:
    return rank_of_parts(model, RANK, dtype="float32")


@pytest.mark.parametrize("borrow", ["none", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_found(kind: str, borrow: str, folder: Path, memory: CellMemory) -> None:
    cpu_kernels.install()
    model, _ = write_quantized(folder / borrow, kind)
    with part_of(model) as config:
        stored = load_replica(config, PARTS, PARTS, borrow)
        units = list(units_of(stored)) if borrow == "all" else []
        store_part(stored, units, memory, RANK)
    end_process()
    with part_of(model) as config:
        plan = loading_plan(config, PARTS, PARTS, borrow)
        there = find_part(config, plan, memory, RANK)
    assert there is not None
    again, manifest = there[0], there[1].manifest
    assert manifest.outcomes.keys() == {
        name for name, module in again.named_modules() if is_packed(module)
    }
    assert len(manifest.outcomes) > PARTS
    check_same(again, stored)


def test_a_kernel_that_keeps_weights_to_itself_is_refused(
    folder: Path, memory: CellMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes with what it was made of, and the next process makes it of zeros."""
    cpu_kernels.install()
    model, _ = write_quantized(folder / "kept", "fp8-block")
    kernel = CPUFp8BlockScaledMMKernel
    compute = kernel.apply_weights

    def process(self: Any, layer: nn.Module) -> None:
        self.kept = {id(layer): layer.weight.float().clone()}

    def apply(self: Any, layer: nn.Module, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return compute(self, layer, x, *rest, **named) * self.kept[id(layer)].abs().max()

    monkeypatch.setattr(kernel, "process_weights_after_loading", process)
    monkeypatch.setattr(kernel, "apply_weights", apply)
    with part_of(model) as config:
        stored = load_replica(config, PARTS, PARTS, "none")
        store_part(stored, (), memory, RANK)
    end_process()
    with part_of(model) as config:
        plan = loading_plan(config, PARTS, PARTS, "none")
        with pytest.raises(ViewError, match=r"layer .*proj computes other numbers than before"):
            find_part(config, plan, memory, RANK)


def test_a_model_on_a_gpu_may_add_in_another_order() -> None:
    """Not a layer alone, and not on CPU."""
    stored, found = {"": (1.0, 1.0)}, {"": (1.01, 1.01)}
    check_outcomes(found, stored, torch.device("cuda"))
    with pytest.raises(ViewError, match="the model computes other numbers"):
        check_outcomes({"": (1.03, 1.03)}, stored, torch.device("cuda"))
    with pytest.raises(ViewError, match="the model computes other numbers"):
        check_outcomes(found, stored, torch.device("cpu"))
    with pytest.raises(ViewError, match="layer a computes other numbers"):
        check_outcomes({"a": (1.01,)}, {"a": (1.0,)}, torch.device("cuda"))
