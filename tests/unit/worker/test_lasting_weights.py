"""The next process of a CUDA rank finds its weights by their handles, or reads the checkpoint."""

import mmap
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from comm_pool.cpu.cell_memory import rest_name
from comm_pool.cuda.lasting_memory import LastingMemory, lasting_memory
from comm_pool.layout import Mode, Rank
from kvadaptor.transfer.peers import PeerMappingError
from tests.harness.vllm.part_trees import base_config
from tests.harness.vllm.stored_trees import check_same, end_process
from tests.harness.vllm.trees import CPU, experts_process, write_and_name
from worker.engine import lasting_weights
from worker.engine.config import ModeKey, mode_config
from worker.engine.lasting_weights import LastingWeights, predecessor_bytes
from worker.engine.weights import part_store
from worker.engine.weights.layers import ViewError
from worker.engine.weights.outcomes import outcomes_of_model
from worker.engine.weights.part_finder import find_part
from worker.engine.weights.part_store import RestMemory, store_part
from worker.engine.weights.tree import load_replica, loading_plan

RANK, SHARDS = Rank(1), 2


class FileArea:
    """A `LastingArea` of anonymous files, one per piece; it is one file here."""

    def __init__(self, num_bytes: int, _: torch.device) -> None:
        self.files: list[int] = []
        self.grown: list[int] = []
        self.is_mapped = False
        self._size = num_bytes
        file = os.memfd_create("aileron-test-weights")
        os.ftruncate(file, num_bytes)
        self._use(file)
        self._own = file

    def _use(self, file: int) -> None:
        self.raw = torch.frombuffer(mmap.mmap(file, self._size), dtype=torch.int8)

    def unmap(self) -> None:
        self.is_mapped = False

    def grow(self, end: int) -> None:
        assert end <= self._size
        self.grown.append(end)
        self.files = [self._own]

    def map(self, files: list[int]) -> None:
        (file,) = files
        self._use(file)
        self.is_mapped = True
        os.close(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("weights")
    with experts_process(folder):
        yield write_and_name(folder / "plain")


@pytest.fixture
def lasting() -> Iterator[LastingMemory]:
    made = lasting_memory(2, (1, 2), ())
    yield made
    made.close()


def weights_of(lasting: LastingMemory) -> LastingWeights:
    return LastingWeights(lasting, RANK, CPU, FileArea)  # type: ignore[arg-type]


def config_of(model: Path) -> VllmConfig:
    return mode_config(base_config(model, dtype="float32"), ModeKey(Mode.DP, 1))


def loaded(model: Path, lasting: LastingMemory) -> nn.Module:
    """Load a replica and store it, in a process that then ends."""
    config, weights = config_of(model), weights_of(lasting)
    with set_current_vllm_config(config):
        replica = load_replica(config, SHARDS)
        compute = partial(outcomes_of_model, config=config, device=CPU)
        store_part(replica, (), lasting.cell, RANK, compute, weights.make)
    end_process()
    return replica


def found(model: Path, lasting: LastingMemory) -> nn.Module | None:
    """What the next process finds."""
    config, weights = config_of(model), weights_of(lasting)
    with set_current_vllm_config(config):
        compute = partial(outcomes_of_model, config=config, device=CPU)
        plan = loading_plan(config, SHARDS, 1, "none")
        there = find_part(config, plan, lasting.cell, RANK, compute, weights.map)
    return None if there is None else there[0]


def test_the_next_process_finds_the_weights_by_their_handles(
    model: Path, lasting: LastingMemory
) -> None:
    assert not weights_of(lasting).are_there
    stored = loaded(model, lasting)
    assert weights_of(lasting).are_there
    again = found(model, lasting)
    assert again is not None
    check_same(again, stored)


def test_memory_grows_as_it_is_filled(model: Path, lasting: LastingMemory) -> None:
    config, areas = config_of(model), []

    def make(num_bytes: int) -> RestMemory:
        area = FileArea(num_bytes, CPU)
        areas.append(area)
        return RestMemory(area.raw, area.grow)

    with set_current_vllm_config(config):
        store_part(load_replica(config, SHARDS), (), lasting.cell, RANK, lambda _: {}, make)
    end_process()
    (area,) = areas
    assert area.grown == sorted(area.grown)
    assert len(area.grown) > 10
    assert area.grown[-1] <= area.raw.numel() < area.grown[-1] + 256


def test_weights_that_were_dropped_or_changed_are_not_found(
    model: Path, lasting: LastingMemory
) -> None:
    loaded(model, lasting)
    kept = lasting.handles.get(rest_name(RANK))
    assert kept is not None
    with mmap.mmap(kept[1][0], int(kept[0])) as raw:
        raw[5000] ^= 1
    os.close(kept[1][0])
    assert found(model, lasting) is None, "a bit has changed"
    weights = weights_of(lasting)
    weights.drop()
    assert not weights.are_there
    assert lasting.handles.get(rest_name(RANK)) is None
    assert found(model, lasting) is None
    with pytest.raises(PeerMappingError, match="not as large"):
        weights.map(1)


def test_what_was_mapped_for_nothing_is_given_back(model: Path, lasting: LastingMemory) -> None:
    loaded(model, lasting)
    kept = lasting.handles.get(rest_name(RANK))
    assert kept is not None
    os.close(kept[1][0])
    assert predecessor_bytes(lasting, RANK) == int(kept[0])
    weights = weights_of(lasting)
    weights.map(int(kept[0]))
    (area,) = weights._mapped
    assert area.is_mapped  # type: ignore[attr-defined]
    weights.drop()
    assert not area.is_mapped  # type: ignore[attr-defined]
    assert not weights._mapped
    assert predecessor_bytes(lasting, RANK) == 0


def test_pieces_are_few_however_large_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, int] = {}
    note = lambda size, _, piece_bytes: given.update(size=size, piece=piece_bytes)  # noqa: E731
    monkeypatch.setattr(lasting_weights, "LastingArea", note)
    for size in (5 << 30, 140 << 30):
        lasting_weights.new_area(size, CPU)
        assert given["piece"] >= 1 << 30
        assert -(-size // given["piece"]) <= 32


def test_a_tensor_on_another_device_is_not_stored(model: Path, lasting: LastingMemory) -> None:
    config, weights = config_of(model), weights_of(lasting)
    with set_current_vllm_config(config):
        replica = load_replica(config, SHARDS)
        next(replica.modules()).register_buffer("elsewhere", torch.zeros(8, device="meta"))
        with pytest.raises(ViewError, match="elsewhere of layer  lies on meta, not on cpu"):
            store_part(replica, (), lasting.cell, RANK, lambda _: {}, weights.make)
    end_process()
    assert not weights.are_there


def test_small_tensors_of_the_host_are_stored_beside_those_of_a_device() -> None:
    weight = ("layer", "_parameters", "weight", torch.empty(10_000, device="meta"))
    scale = ("layer", "", "scale", torch.full((2,), 0.5))
    found = [weight, scale]
    (aside,) = part_store._aside(found)
    assert found == [weight]
    assert (aside.module, aside.holder, aside.name) == scale[:3]
    assert isinstance(aside.value, torch.Tensor)
    assert aside.value.tolist() == [0.5, 0.5]
    with pytest.raises(ViewError, match="large of layer layer lies on cpu, not on meta"):
        part_store._aside([weight, ("layer", "", "large", torch.zeros(5_000))])
