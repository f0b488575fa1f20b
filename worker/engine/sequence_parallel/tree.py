"""vLLM adapter: the tree with which a rank of a wide group computes a step in sp.

Ulysses sequence parallelism (Shift Parallelism, section 3.2): each rank computes its share of the
tokens with the replica's full weights; around attention the ranks exchange tokens for heads. The
tree consists of shallow copies ("shells") of the modules above attention, the replica's modules
elsewhere, and the tp tree's attention with its KV. Each rank's part of shard-major rows is a plain
column range. A mixed tree (section 3.3.1) does the same over one part of the weights, in the group
of ranks with this part; ranks with the same tokens reduce.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase

from comm_pool.head_exchange import HeadExchange
from comm_pool.layout import Mode, StepMode
from comm_pool.pool import Communicator, activate
from worker.engine.sequence_parallel.exchange import Exchange
from worker.engine.weights.layers import ShardMajorQKV, ViewedRow, ViewError
from worker.engine.weights.moe import experts_shell


class ExchangedQKV(nn.Module):
    """Computes all heads of the weights on this rank's tokens, then exchanges them."""

    def __init__(self, full: ShardMajorQKV, own: ShardMajorQKV, exchange: Exchange) -> None:
        """`own` is the tp tree's layer: it knows the order in which attention expects the heads."""
        super().__init__()
        self.full = full
        # In a tuple, so that its views are not registered as parameters of this tree too.
        self._own = (own,)
        self._exchange = exchange

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(share, hidden) -> (T, [q | k | v]) of this rank's heads."""
        rows = self._exchange.computed_to_heads(lambda part: self.full.stored(part)[0], input_)
        return self._own[0].ordered(rows), None


class ExchangedOutput(nn.Module):
    """Gets all heads of this rank's tokens, then runs o_proj; full weights need no reduction."""

    def __init__(self, full: ViewedRow, exchange: Exchange) -> None:
        super().__init__()
        self.full = full
        self._exchange = exchange

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter | None]:
        """(T, own heads) -> (share, hidden)."""
        out = self._exchange.computed_on_tokens(lambda part: self.full(part)[0], input_)
        return out, self.full.bias if self.full.skip_bias_add else None


class SequenceParallel(nn.Module):
    """Replaces a group's tp tree for one step: same inputs, same outputs."""

    def __init__(self, shells: nn.Module, tp_tree: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.shells = shells
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

        RoPE follows the exchange, so it needs the positions of all tokens.
        """
        assert intermediate_tensors is None, "there are no pipeline stages."
        given = positions if input_ids is None else input_ids
        exchange = self.exchange
        exchange.tokens = given.shape[0]
        hidden = self.shells(
            input_ids if input_ids is None else exchange.own_tokens(input_ids),
            positions,
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
        shells: nn.Module,
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

    `config` is the tp tree's; vLLM looks modules up in it by name during a step. Raises `ViewError`
    for attention layers that do not go from one qkv layer to one o_proj.
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


def _shells(
    root: nn.Module, tp_tree: nn.Module, exchange: Exchange, config: VllmConfig, mode: str
) -> nn.Module:
    """Return shells of all modules of `root` above attention, for this mode of a step."""
    context = config.compilation_config.static_forward_context
    made: dict[int, nn.Module] = {}

    def shell_of(full: nn.Module, own: nn.Module) -> nn.Module:
        if isinstance(full, MoERunner):
            return experts_shell(full, context, mode)
        if not _is_on_the_way(full):
            return full
        if id(full) in made:
            return made[id(full)]
        is_attention = any(isinstance(child, Attention) for child in full.children())
        if is_attention:
            made[id(full)] = shell = _attention_shell(full, own, exchange)
            return shell
        made[id(full)] = shell = _shell(full)
        for name, child in full.named_children():
            shell._modules[name] = shell_of(child, own.get_submodule(name))
        return shell

    return shell_of(root, tp_tree)


def _shell(module: nn.Module) -> nn.Module:
    """Return a shallow copy whose children can be replaced without changing the original's."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


def _is_on_the_way(module: nn.Module) -> bool:
    """Return whether the module contains one that is called differently than in the replica."""
    return any(isinstance(each, (Attention, MoERunner)) for each in module.modules())


def _attention_shell(full: nn.Module, own: nn.Module, exchange: Exchange) -> nn.Module:
    """Put the tp tree's attention layer, with this rank's heads and KV, between the exchanges."""
    shell = _shell(own)
    kinds: list[tuple[type[LinearBase], Callable[[str], nn.Module]]] = [
        (
            ShardMajorQKV,
            lambda name: ExchangedQKV(full.get_submodule(name), own.get_submodule(name), exchange),
        ),
        (ViewedRow, lambda name: ExchangedOutput(full.get_submodule(name), exchange)),
    ]
    for kind, make in kinds:
        names = [name for name, child in own.named_children() if isinstance(child, kind)]
        if len(names) != 1:
            raise ViewError(
                f"a {type(own).__name__} has {len(names)} layers of the kind "
                f"{kind.__name__}, so it cannot be computed in sp."
            )
        shell._modules[names[0]] = make(names[0])
    return shell
