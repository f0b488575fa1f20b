"""vLLM adapter: the tree with which a rank of a wide group computes a step in sp.

Ulysses sequence parallelism (Shift Parallelism, section 3.2): each rank computes its share of the
tokens with the replica's full weights; around attention the ranks exchange tokens for heads. The
tree consists of shallow copies ("shells") of the modules above attention, the replica's modules
elsewhere, and the tp tree's attention with its KV (attention.py says where they exchange). Each
rank's part of shard-major rows is a plain column range. A mixed tree (section 3.3.1) does the same
over one part of the weights, in the group of ranks with this part; ranks with the same tokens
reduce.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from comm_pool.head_exchange import HeadExchange
from comm_pool.layout import Mode, StepMode
from comm_pool.pool import Communicator, activate
from worker.engine.sequence_parallel.attention import (
    ExchangedAttention,
    ExchangedOutput,
    ExchangedQKV,
    qkv_and_output,
)
from worker.engine.sequence_parallel.exchange import Exchange
from worker.engine.weights.moe import experts_shell


class SequenceParallel(nn.Module):
    """Replaces a group's tp tree for one step: same inputs, same outputs."""

    def __init__(self, shells: "Shells", tp_tree: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.shells = shells.root
        self._shares_positions = not shells.around_products
        self.exchange = exchange
        # In a tuple, so that it is not registered as a child.
        self._tp = (tp_tree,)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids and positions (T,) -> hidden states (T, hidden) of all tokens.

        Where RoPE follows the exchange, it needs the positions of all tokens.
        """
        assert intermediate_tensors is None, "there are no pipeline stages."
        given = positions if input_ids is None else input_ids
        exchange = self.exchange
        exchange.tokens = given.shape[0]
        hidden = self.shells(
            input_ids if input_ids is None else exchange.own_tokens(input_ids),
            exchange.own_tokens(positions) if self._shares_positions else positions,
            None,
            inputs_embeds if inputs_embeds is None else exchange.own_tokens(inputs_embeds),
        )
        return exchange.all_tokens(hidden)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Compute this rank's part of the vocabulary, as in tp: all ranks have the rows."""
        logits: torch.Tensor | None = self._tp[0].compute_logits(hidden_states)
        return logits

    def compute_logits_local(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The same without the gather, for vLLM's batch-sharded sampling."""
        logits: torch.Tensor = self._tp[0].compute_logits_local(hidden_states)
        return logits


class MixedParallel(SequenceParallel):
    """An sp tree over a part of the weights: ranks that have the same tokens reduce.

    vLLM's layers look up their group while they run, so it is replaced during the step.
    """

    def __init__(
        self,
        shells: "Shells",
        tp_tree: nn.Module,
        exchange: Exchange,
        reducing: Communicator,
        whole: Communicator,
    ) -> None:
        super().__init__(shells, tp_tree, exchange)
        self._reducing = reducing
        self._whole = whole

    def capturing(self) -> AbstractContextManager[None]:
        """Return the context in which all members capture graphs of this tree.

        A custom all-reduce in a graph reads its peers' addresses from a table that is filled when
        the context ends; vLLM does so for the active group alone.
        """
        custom = getattr(self._reducing.group.device_communicator, "ca_comm", None)
        if custom is None or custom.disabled:
            return nullcontext()
        context: AbstractContextManager[None] = custom.capture()
        return context

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `SequenceParallel`."""
        activate(self._reducing)
        try:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        finally:
            activate(self._whole)


def exchange_of(trees: Mapping[StepMode, nn.Module]) -> Exchange | None:
    """Return the exchange of the sp tree among these, if there is one."""
    tree = trees.get(Mode.SP)
    return tree.exchange if isinstance(tree, SequenceParallel) else None


def capturing(tree: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which all ranks of the group capture a tree's graphs."""
    return tree.capturing() if isinstance(tree, MixedParallel) else nullcontext()


def build_sp_tree(
    replica: nn.Module,
    tp_tree: nn.Module,
    plan: HeadExchange,
    group: GroupCoordinator,
    config: VllmConfig,
) -> SequenceParallel:
    """Build the sp tree beside a tp tree of the same width; it owns no tensor.

    `config` is the tp tree's; vLLM looks modules up in it by name during a step.
    """
    exchange = Exchange(plan, group)
    shells = _shells(replica, tp_tree, exchange, config, Mode.SP)
    return SequenceParallel(shells, tp_tree, exchange).eval()


def build_mixed_tree(
    part: nn.Module,
    tp_tree: nn.Module,
    plan: HeadExchange,
    group: GroupCoordinator,
    config: VllmConfig,
    *,
    name: str,
    reducing: Communicator,
    whole: Communicator,
) -> MixedParallel:
    """Build the tree of a mixed shape `name` over the tree of a part of the weights.

    `plan` and `group` belong to the ranks that have this part, `reducing` to those that have the
    same tokens, `whole` to all.
    """
    exchange = Exchange(plan, group)
    shells = _shells(part, tp_tree, exchange, config, name)
    return MixedParallel(shells, tp_tree, exchange, reducing, whole).eval()


@dataclass(frozen=True, slots=True)
class Shells:
    """Shells of all modules of a tree above attention."""

    root: nn.Module
    around_products: bool
    """Whether tokens are exchanged around qkv and o_proj, else around attention alone."""


def _shells(
    root: nn.Module, tp_tree: nn.Module, exchange: Exchange, config: VllmConfig, mode: str
) -> Shells:
    """Return shells of all modules of `root` above attention, for this mode of a step."""
    context = config.compilation_config.static_forward_context
    made: dict[int, nn.Module] = {}
    around_products = _exchanges_around_products(tp_tree)

    def shell_of(full: nn.Module, own: nn.Module) -> nn.Module:
        if isinstance(full, MoERunner):
            return experts_shell(full, context, mode)
        if isinstance(own, Attention):
            return ExchangedAttention(own, exchange)
        if not _is_on_the_way(full):
            return full
        if id(full) in made:
            return made[id(full)]
        if around_products and any(isinstance(child, Attention) for child in full.children()):
            made[id(full)] = shell = _attention_shell(full, own, exchange)
            return shell
        made[id(full)] = shell = _shell(full)
        for name, child in full.named_children():
            shell._modules[name] = shell_of(child, own.get_submodule(name))
        return shell

    return Shells(shell_of(root, tp_tree), around_products)


def _exchanges_around_products(tp_tree: nn.Module) -> bool:
    """Return whether all tokens are present only between qkv and o_proj, and their positions too.

    Learned positions are looked up outside of attention, where a rank has a share.
    """
    modules = list(tp_tree.modules())
    has_tables = any(
        isinstance(each, nn.Embedding) and not isinstance(each, VocabParallelEmbedding)
        for each in modules
    )
    return not has_tables and all(
        qkv_and_output(module) is not None
        for module in modules
        if any(isinstance(child, Attention) for child in module.children())
    )


def _shell(module: nn.Module) -> nn.Module:
    """Return a shallow copy whose children can be replaced without changing the original's."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    for name, value in list(vars(shell).items()):
        if isinstance(value, MethodType) and value.__self__ is module:
            setattr(shell, name, MethodType(value.__func__, shell))
    return shell


def _is_on_the_way(module: nn.Module) -> bool:
    """Return whether the module contains one that is called differently than in the replica."""
    return any(isinstance(each, (Attention, MoERunner)) for each in module.modules())


def _attention_shell(full: nn.Module, own: nn.Module, exchange: Exchange) -> nn.Module:
    """Put the tp tree's attention layer, with this rank's heads and KV, between the exchanges."""
    names = qkv_and_output(own)
    assert names is not None, "it was looked at before."
    shell, (qkv, output) = _shell(own), names
    shell._modules[qkv] = ExchangedQKV(full.get_submodule(qkv), own.get_submodule(qkv), exchange)
    shell._modules[output] = ExchangedOutput(
        full.get_submodule(output), own.get_submodule(output), exchange
    )
    return shell
