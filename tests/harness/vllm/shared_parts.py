"""All ranks that share out the parts of a tiny model's weights, in the test's own process.

Each loads its part and shares it as in a cell, one after the other: a rank that has filled its
memory lets the next one begin.
"""

import os
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from comm_pool.cpu.cell_memory import cell_memory, weights_name
from comm_pool.layout import Mode
from comm_pool.loans import part_of
from tests.harness.vllm.trees import CPU, HIDDEN, VOCAB, Trees
from worker.engine.config import ModeKey, mode_config
from worker.engine.weights.borrowed import BorrowedEmbeddings, BorrowedLmHead, build_borrowing_tree
from worker.engine.weights.layers import PlannedEmbedding
from worker.engine.weights.lending import Borrowing, Place, share_parts
from worker.engine.weights.part_memory import layouts_of, units_of
from worker.engine.weights.part_store import unit_memory

TOKENS = 33
EXPERTS = 8
"""Of the tiny models that have some."""


@dataclass
class SharedParts:
    """What the ranks have after their start."""

    trees: Trees
    ranks: int
    parts: int
    borrow: str
    whole_layers: int = 0

    def __post_init__(self) -> None:
        self.memory = cell_memory(self.ranks, {1, self.ranks}, ())
        self.loaded = [
            self.trees.part(self.parts, part_of(rank, self.ranks, self.parts), self.borrow)
            for rank in range(self.ranks)
        ]
        self.borrowings: dict[int, Borrowing] = {}
        self._share(0)

    def _share(self, rank: int) -> None:
        def meet() -> None:
            if rank + 1 < self.ranks:
                self._share(rank + 1)

        self.borrowings[rank] = share_parts(
            self.loaded[rank],
            Place(rank, 0, self.ranks, self.parts),
            CPU,
            memory=self.memory,
            cpu_group=None,
            meet=meet,
            whole_layers=self.whole_layers,
        )

    def tree(self, rank: int) -> nn.Module:
        """The tree with which a rank computes alone."""
        own, config = self.borrowings[rank], mode_config(self.trees.base, ModeKey(Mode.DP, 1))
        with set_current_vllm_config(config):
            return build_borrowing_tree(
                config, self.loaded[rank], own.units, own.ring, shards=self.trees.shards
            )

    def memory_of(self, rank: int, prefix: str) -> list[torch.Tensor]:
        """The memory of those units of a rank's own part whose names begin so."""
        units = list(units_of(self.loaded[rank]))
        held = unit_memory(self.memory, rank, layouts_of(units), is_own=False)
        return [raw for unit, raw in zip(units, held, strict=True) if unit.name.startswith(prefix)]

    def bits(self) -> list[bytes]:
        """All that each rank lends."""
        names = [weights_name(rank) for rank in range(self.ranks)]
        sizes = [os.fstat(self.memory._files[name]).st_size for name in names]
        return [
            bytes(self.memory.map(name, size, is_own=False))
            for name, size in zip(names, sizes, strict=True)
        ]


def outputs(
    tree: nn.Module, borrowing: Borrowing, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """What each unit gives in a tree, one after the other in the order of use."""
    modules = dict(tree.named_modules(remove_duplicate=False))
    with torch.no_grad():
        return {name: output_of(modules[name], dtype) for name in borrowing.units}


def output_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a layer, a feed-forward network, experts or a table give for the tests' input."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((TOKENS, HIDDEN), generator=generator).to(dtype)
    if isinstance(module, RoutedExperts):
        weights, experts = torch.rand((TOKENS, EXPERTS), generator=generator).topk(2)
        out: torch.Tensor = module.forward_modular(x, weights, experts.int())
        return out
    if isinstance(module, (PlannedEmbedding, BorrowedEmbeddings)):
        rows: torch.Tensor = module(torch.randint(0, VOCAB, (TOKENS,), generator=generator))
        return rows.clone()
    if isinstance(module, (ParallelLMHead, BorrowedLmHead)):
        logits: torch.Tensor = module.quant_method.apply(module, x)
        return logits.clone()
    result = module(x)
    out = result[0] if isinstance(result, tuple) else result
    return out.clone()
