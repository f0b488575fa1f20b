"""vLLM adapter: where an sp group exchanges tokens for heads around attention, and back.

Around the matrix products, it travels beside them in parts (`Exchange`). That needs a module whose
code reads its tokens in the qkv product alone, because what lies between the exchanges has all
tokens and what lies outside has a share. Any other module computes q, k and v of its share as the
replica does, and exchanges right around vLLM's attention.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from worker.engine.sequence_parallel.exchange import Exchange
from worker.engine.weights.layers import Output, ShardMajorQKV, ViewedRow


class ExchangedQKV(nn.Module):
    """Computes all heads of the weights on this rank's tokens, then exchanges them."""

    def __init__(self, full: ShardMajorQKV, own: ShardMajorQKV, exchange: Exchange) -> None:
        """`own` is the tp tree's layer: it knows the order in which attention expects the heads."""
        super().__init__()
        self.full = full
        # In a tuple, so that its views are not registered as parameters of this tree too.
        self._own = (own,)
        self._exchange = exchange

    def forward(self, input_: torch.Tensor) -> Output:
        """(share, hidden) -> (T, [q | k | v]) of this rank's heads."""
        own = self._own[0]
        rows = own.ordered(self._exchange.computed_to_heads(self.full.stored, input_))
        return (rows, None) if own.return_bias else rows


class ExchangedOutput(nn.Module):
    """Gets all heads of this rank's tokens, then runs o_proj; full weights need no reduction."""

    def __init__(self, full: ViewedRow, own: ViewedRow, exchange: Exchange) -> None:
        super().__init__()
        self.full = full
        self._returns_bias = own.return_bias
        self._exchange = exchange

    def forward(self, input_: torch.Tensor) -> Output:
        """(T, own heads) -> (share, hidden)."""
        out = self._exchange.computed_on_tokens(self._rows, input_)
        if not self._returns_bias:
            return out
        return out, self.full.bias if self.full.skip_bias_add else None

    def _rows(self, input_: torch.Tensor) -> torch.Tensor:
        out = self.full(input_)
        rows: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return rows


class ExchangedAttention(nn.Module):
    """Attention over this rank's heads of all tokens, called with all heads of its share."""

    def __init__(self, own: Attention, exchange: Exchange) -> None:
        """`own` is the tp tree's layer, with this rank's heads and KV."""
        super().__init__()
        # In a tuple, so that it is not registered as a child.
        self._own = (own,)
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        """Return what models ask attention layers for, such as the number of heads."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_own"][0], name)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """(share, heads·dim) of q, k and v -> (share, heads·dim).

        Further arguments describe the output, whose shape is known.
        """
        own = self._own[0]
        heads = self._exchange.to_heads(heads_by_rank(own, query, key, value, self._width))
        sizes = (
            own.num_heads * own.head_size,
            own.num_kv_heads * own.head_size,
            own.num_kv_heads * own.head_size_v,
        )
        out: torch.Tensor = own(*heads.split(sizes, -1))
        return self._exchange.to_tokens(out.flatten(1))

    @property
    def _width(self) -> int:
        return self._exchange.plan.width


def heads_by_rank(
    own: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int
) -> torch.Tensor:
    """Put all heads of a share of the tokens in the order of the ranks that attend with them.

    `own` is the attention of one rank of a group of `width`. Ranks with the same KV head get a
    copy each.

    Returns:
        (share, width·[q | k | v]).
    """
    parts = [query.reshape(len(query), width, -1)]
    for rows, size in ((key, own.head_size), (value, own.head_size_v)):
        heads = rows.reshape(len(rows), -1, size)
        copies = width * own.num_kv_heads // heads.shape[1]
        parts.append(heads.repeat_interleave(copies, 1).reshape(len(rows), width, -1))
    return torch.cat(parts, -1).flatten(1)


def qkv_and_output(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the layers around which a module's tokens can be exchanged, if any.

    They are its only qkv layer, through which alone its code reads its tokens, and its only
    row-parallel layer.
    """
    fused = [name for name, each in module.named_children() if isinstance(each, ShardMajorQKV)]
    rows = [name for name, each in module.named_children() if isinstance(each, ViewedRow)]
    if len(fused) != 1 or len(rows) != 1 or "forward" in vars(module):
        return None
    return (fused[0], rows[0]) if _reads_tokens_once(type(module).forward, fused[0]) else None


@cache
def _reads_tokens_once(forward: Callable[..., Any], layer: str) -> bool:
    """Return whether a forward method names what it gives `self.<layer>` nowhere else."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError, TypeError):
        return False
    given = [
        call.args[0].id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == f"self.{layer}"
        and len(call.args) == 1
        and isinstance(call.args[0], ast.Name)
    ]
    if len(given) != 1:
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return sum(name.id == given[0] for name in names) == 1
