"""The exchange around attention, by two real processes, and what its proof finds."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed import parallel_state

from comm_pool.exchange import HeadExchange
from comm_pool.layout import Rank
from comm_pool.vllm_pool import Communicator
from tests.harness.mover_ranks import World, run_ranks

PLAN = HeadExchange(heads=8, kv_heads=2, width=2)


class Group:
    """The part of vLLM's GroupCoordinator that an exchange uses, over gloo."""

    def __init__(self, world: World) -> None:
        self.rank_in_group = world.rank
        self.device_group = world.cpu_group
        self.device_communicator = None
        self._size = world.size

    def all_gather(self, rows: torch.Tensor, _dim: int) -> torch.Tensor:
        """Rows of all members behind each other."""
        parts = [torch.empty_like(rows) for _ in range(self._size)]
        dist.all_gather(parts, rows.contiguous(), group=self.device_group)
        return torch.cat(parts)


def prove(world: World, fault: str) -> str:
    """Prove an exchange that has this fault; returns what is said, or nothing."""
    from worker.vllm_layers import ViewError
    from worker.vllm_sp import Exchange, prove_exchange

    class Faulty(Exchange):
        def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
            if fault == "tokens":
                return super().to_heads(rows).roll(1, 0)
            if fault == "heads":
                return super().to_heads(rows.roll(1, 1))
            return super().to_heads(rows)

        def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
            found = super().to_tokens(rows)
            return found.roll(1, 1) if fault == "back" else found

    group: Any = Group(world)
    try:
        prove_exchange(Faulty(PLAN, group), torch.device("cpu"))
    except ViewError as error:
        return str(error)
    return ""


def share_out(world: World, tokens: int) -> tuple[list[float], list[float]]:
    """What this rank gets of 1..tokens, and what all get back together."""
    from worker.vllm_sp import Exchange

    group: Any = Group(world)
    exchange = Exchange(PLAN, group)
    exchange.tokens = tokens
    rows = torch.arange(1.0, tokens + 1)[:, None]
    mine = exchange.own_tokens(rows)
    return mine[:, 0].tolist(), exchange.all_tokens(mine)[:, 0].tolist()


def everything(world: World) -> tuple[dict[str, str], Any]:
    """All cases in one pair of processes, which take seconds to import vLLM."""
    said = {fault: prove(world, fault) for fault in ("none", "tokens", "heads", "back")}
    return said, [share_out(world, tokens) for tokens in (1, 5, 6)]


@pytest.mark.timeout(180)
def test_two_processes_exchange_heads_and_tokens() -> None:
    for rank, (said, shares) in enumerate(run_ranks(2, everything, limit_s=150)):
        assert not said.pop("none")
        assert all("mixes up heads or tokens" in sentence for sentence in said.values()), said
        one, five, six = shares
        assert one == (([1.0], [0.0])[rank], [1.0])
        assert five == (([1.0, 2.0, 3.0], [4.0, 5.0, 0.0])[rank], [1.0, 2.0, 3.0, 4.0, 5.0])
        assert six[0] == ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])[rank]


class Alone:
    """A group of one: what is gathered is what is given."""

    rank_in_group = 0

    def all_gather(self, rows: torch.Tensor, _dim: int) -> torch.Tensor:
        """The rows themselves."""
        return rows


@pytest.mark.parametrize("fails", [False, True])
def test_layers_of_a_part_find_the_group_that_has_the_same_tokens(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.vllm_sp import Exchange, MixedParallel

    reducing, whole, group = object(), object(), Alone()
    found: list[Any] = []

    class Shells(nn.Module):  # type: ignore[misc]
        def forward(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
            found.append(parallel_state._TP)
            if fails:
                raise ValueError("a layer failed")
            return ids[:, None]

    members = (Rank(0), Rank(2)), (Rank(0), Rank(1), Rank(2), Rank(3))
    across, all_four = (
        Communicator(ranks, named, 0.0, 0)
        for ranks, named in zip(members, (reducing, whole), strict=True)
    )
    monkeypatch.setattr(parallel_state, "_TP", whole)
    monkeypatch.setattr(parallel_state, "_EP", None)
    alone: Any = group
    exchange = Exchange(HeadExchange(4, 4, 1), alone)
    tree = MixedParallel(Shells(), nn.Identity(), exchange, across, all_four)
    ids = torch.arange(3)
    if fails:
        with pytest.raises(ValueError, match="a layer failed"):
            tree(ids, ids)
    else:
        assert tree(ids, ids).tolist() == [[0], [1], [2]]
    assert found == [reducing]
    assert parallel_state._TP is whole
