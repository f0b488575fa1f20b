"""The exchange around attention, by two real processes, and what its proof finds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed import parallel_state

from comm_pool.head_exchange import HeadExchange
from comm_pool.layout import Mode, Rank
from comm_pool.pool import Communicator
from tests.harness.vllm.exchange_ranks import PLAN, exchanged


@pytest.mark.timeout(180)
def test_two_processes_exchange_heads_and_tokens(tmp_path: Path) -> None:
    for rank, (said, shares, parts) in enumerate(exchanged(tmp_path / "answers")):
        assert not said.pop("none")
        assert not said.pop("no fault in parts")
        assert all("mixes up heads or tokens" in sentence for sentence in said.values()), said
        one, five, six = shares
        assert one == (([1.0], [0.0])[rank], [1.0])
        assert five == (([1.0, 2.0, 3.0], [4.0, 5.0, 0.0])[rank], [1.0, 2.0, 3.0, 4.0, 5.0])
        assert six[0] == ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])[rank]
        few, two, each, large = (rows for rows, _ in parts)
        assert few == [2] * 4  # Below the size from which parts are taken.
        assert two == [5, 5, 3, 2, 3, 2]
        assert each == [5, 5, *[1] * 10]
        assert large == [257, 257, *[128, 128, 1] * 2]  # By 64 tokens, not by the number of parts.
        assert max(max(errors) for _, errors in parts) < 1e-12


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
    from worker.engine.sequence_parallel.exchange import Exchange
    from worker.engine.sequence_parallel.tree import MixedParallel, Shells

    reducing, whole, group = object(), object(), Alone()
    found: list[Any] = []

    class Root(nn.Module):  # type: ignore[misc]
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
    tree = MixedParallel(
        Shells(Root(), around_products=True), nn.Identity(), exchange, across, all_four
    )
    ids = torch.arange(3)
    if fails:
        with pytest.raises(ValueError, match="a layer failed"):
            tree(ids, ids)
    else:
        assert tree(ids, ids).tolist() == [[0], [1], [2]]
    assert found == [reducing]
    assert parallel_state._TP is whole


class CustomAllReduce:
    """What a graph's custom all-reduces are entered in when its capture ends."""

    def __init__(self, *, disabled: bool) -> None:
        self.disabled = disabled
        self.told: list[str] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.told.append("begins")
        yield
        self.told.append("ends")


def test_graphs_of_a_mixed_tree_are_captured_within_the_group_that_reduces() -> None:
    """Otherwise its custom all-reduces read addresses that nobody has written."""
    from worker.engine.sequence_parallel.exchange import Exchange
    from worker.engine.sequence_parallel.tree import MixedParallel, Shells, capturing

    alone: Any = Alone()
    exchange = Exchange(HeadExchange(4, 4, 1), alone)
    ranks = (Rank(0), Rank(2))

    def mixed(custom: CustomAllReduce | None) -> MixedParallel:
        plane = SimpleNamespace(ca_comm=custom) if custom is not None else None
        group: Any = SimpleNamespace(device_communicator=plane)
        reducing = Communicator(ranks, group, 0.0, 0)
        shells = Shells(nn.Identity(), around_products=True)
        return MixedParallel(shells, nn.Identity(), exchange, reducing, reducing)

    custom, off = CustomAllReduce(disabled=False), CustomAllReduce(disabled=True)
    for tree in (mixed(custom), mixed(off), mixed(None), nn.Identity()):
        with capturing(tree):
            custom.told.append("captured")
    assert custom.told == ["begins", "captured", "ends", *["captured"] * 3]
    assert off.told == []


class Runner:
    """A runner whose sp steps take so many ms by their tokens and parts."""

    max_num_tokens = 8_192
    max_num_reqs = 256
    modes = (Mode.TP, Mode.SP)

    def __init__(self, parts_tried: tuple[int, ...], took_ms: dict[tuple[int, int], float]) -> None:
        from worker.engine.sequence_parallel.exchange import Exchange

        group: Any = Alone()
        group.cpu_group = "the group's own"
        self.exchange = Exchange(PLAN, group)
        self.exchange.parts_tried = parts_tried
        self._took_ms = took_ms

    def seconds(self, tokens: int) -> float:
        """What a step takes as the exchange is set now."""
        self.exchange.tokens = tokens
        return self._took_ms[tokens, self.exchange.parts] / 1e3


def test_all_ranks_of_a_group_settle_on_the_same_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.engine import calibrate

    # Here 4,096 tokens are sooner done in two parts; the other rank finds that they are not.
    own = {(2_048, 1): 90, (2_048, 2): 91, (4_096, 1): 200, (4_096, 2): 150}
    runner = Runner((1, 2), {**own, (8_192, 1): 400, (8_192, 2): 300})
    other = [[0.080, 0.080], [0.180, 0.200], [0.390, 0.310]]

    def slower_of_both(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert (op, group) == (dist.ReduceOp.MAX, "the group's own")
        tensor.copy_(torch.maximum(tensor, torch.tensor(other, dtype=tensor.dtype)))

    def timed(runner: Runner, _mode: Any, tokens: int, _device: Any) -> float:
        return runner.seconds(tokens)

    monkeypatch.setattr(calibrate, "_timed_step", timed)
    monkeypatch.setattr(dist, "all_reduce", slower_of_both)
    calibrate.settle_parts(runner, torch.device("cuda"))
    assert runner.exchange.parts_from == ((2_048, 1), (4_096, 1), (8_192, 2))
    found = []
    for tokens in (1, 2_047, 8_191, 8_192, 9_000):
        runner.exchange.tokens = tokens
        found.append(runner.exchange.parts)
    assert found == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_measured_where_nothing_is_to_choose(device: str) -> None:
    from worker.engine.calibrate import settle_parts

    runner = Runner((1,), {})
    settle_parts(runner, torch.device(device))
    assert runner.exchange.parts == 1
