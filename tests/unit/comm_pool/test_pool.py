"""The exchange over NCCL, with a communicator that delivers when all members have asked; which
groups a rank closes to get out of a formation."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed import parallel_state

from comm_pool import pool as pool_module
from comm_pool.cuda.collective_abort import GUARD_NAME, CallGate
from comm_pool.formations import Formations, PeerLostError
from comm_pool.layout import Rank
from comm_pool.mixed import Staged, read_mixed
from comm_pool.pool import Communicator, CommunicatorPool, _release_unusable, all_to_all
from comm_pool.stages.links import StageLinks


class Mailbox:
    """One member's communicator; a message is taken when its receiver has asked for it."""

    def __init__(self, own: int, sent: dict[tuple[int, int], torch.Tensor]) -> None:
        self.disabled = False
        self.nccl: object = None
        self.wanted: dict[int, torch.Tensor] = {}
        self.depth = 0
        self._own = own
        self._sent = sent

    def group_start(self) -> None:
        self.depth += 1

    def group_end(self) -> None:
        self.depth -= 1

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        assert self.depth == 1, "outside a group a send would wait for ever"
        assert tensor.is_contiguous()
        self._sent[self._own, dst] = tensor

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        assert self.depth == 1
        self.wanted[src] = tensor


def group_of(member: int, width: int, plane: Any) -> Any:
    return SimpleNamespace(
        world_size=width,
        rank_in_group=member,
        device_communicator=SimpleNamespace(pynccl_comm=plane),
        device_group=None,
    )


@pytest.mark.parametrize("width", [2, 4, 8])
def test_part_j_goes_to_member_j(width: int) -> None:
    sent: dict[tuple[int, int], torch.Tensor] = {}
    planes = [Mailbox(member, sent) for member in range(width)]
    parts = [torch.randn(width, 3, 5) for _ in range(width)]
    received = [
        all_to_all(group_of(member, width, planes[member]), parts[member])
        for member in range(width)
    ]
    for member, plane in enumerate(planes):
        assert plane.depth == 0
        for source, tensor in plane.wanted.items():
            tensor.copy_(sent[source, member])
    for to, source in itertools.product(range(width), repeat=2):
        assert torch.equal(received[to][source], parts[source][to])


@pytest.mark.parametrize("is_torchs", [False, True])
def test_an_exchange_over_a_closed_communicator_opens_no_group_of_calls(is_torchs: bool) -> None:
    plane = Mailbox(0, {})
    plane.disabled = is_torchs
    guard = CallGate(lambda: 3)
    group = group_of(0, 2, plane)
    setattr(group.device_communicator, GUARD_NAME, guard)
    assert guard.close(1.0)
    with pytest.raises(PeerLostError):
        all_to_all(group, torch.zeros(2, 4))
    assert plane.depth == 0
    assert not plane.wanted


def pool_of_rank_0(ways: dict[str, Any]) -> Any:
    """The pool of a rank that is in groups of up to four, and of two mixed shapes."""

    def communicator(name: str, *ranks: int) -> Communicator:
        members = tuple(map(Rank, ranks))
        return Communicator(members, cast(Any, None), 0.0, 0, aborter=ways.get(name))

    pool: Any = CommunicatorPool.__new__(CommunicatorPool)
    made = [communicator("tp2", 0, 1), communicator("tp4", 0, 1, 2, 3), communicator("dp", 0)]
    pool._by_ranks = {each.ranks: each for each in made}
    pool._mixed = {
        read_mixed("sp2tp2"): communicator("sp2tp2", 0, 2),
        read_mixed("sp2tp4"): communicator("sp2tp4", 0, 2, 4, 6),
    }
    pool.closed = ()
    pool._pump = None
    pool._staged = {}
    return pool


class End:
    """An end of a link that counts how often it was released."""

    released = 0

    def release(self) -> None:
        self.released += 1


def test_the_links_of_a_lost_pipeline_group_are_released_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "unblock", lambda *_: None)
    pool = pool_of_rank_0({"tp2": "tp2", "tp4": "tp4"})
    four = tuple(map(Rank, range(4)))
    before, after = End(), End()
    links = StageLinks(cast(Any, before), cast(Any, after))
    pool._staged = {Staged(2, 2): replace(pool.of(four), links=links)}
    pool.unblock(four[:2], lambda: True)
    assert (before.released, after.released) == (0, 0)
    for _ in range(3):
        pool.unblock(four, lambda: True)
    assert (before.released, after.released) == (3, 3)


def test_a_rank_closes_a_lost_group_and_no_group_of_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unblock: list[list[str]] = []
    monkeypatch.setattr(pool_module, "unblock", lambda ways, *_: unblock.append(ways))
    pool = pool_of_rank_0({name: name for name in ("tp2", "tp4", "sp2tp2", "sp2tp4")})
    four = tuple(map(Rank, range(4)))
    for _ in range(2):
        pool.unblock(four, lambda: True)
    assert unblock == [["tp4", "sp2tp2"]] * 2
    assert pool.closed == (four,), "told once, whatever it takes to get out"
    pool.unblock(four[:2], lambda: True)
    assert unblock[2] == ["tp2"]
    assert pool.closed == (four, four[:2])


def test_a_rank_whose_collectives_raise_by_themselves_closes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "unblock", lambda *_: pytest.fail("nothing is to be done"))
    pool = pool_of_rank_0({})
    pool.unblock(tuple(map(Rank, range(4))), lambda: True)
    assert pool.closed == ()


def test_a_rank_alone_has_nobody_to_lose() -> None:
    pool = pool_of_rank_0({})
    pool._planes_of = {}
    pool._formations = Formations()
    for formation in (1, 2):
        pool.enter(formation)
    alone, pair = (Rank(0),), (Rank(0), Rank(1))
    # An epoch has formations of one rank beside those that lost somebody.
    pool.abort(pair, 2)
    assert pool.is_aborted(pair, 2)
    assert not pool.is_aborted(pair, 1)
    assert not pool.is_aborted(alone, 2)


def test_a_disabled_communicator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        assert group is None
        received.copy_(sent.flip(0))

    monkeypatch.setattr("torch.distributed.all_to_all_single", exchange)
    plane = Mailbox(0, {})
    plane.disabled = True
    sent = torch.randn(2, 4)
    assert torch.equal(all_to_all(group_of(0, 2, plane), sent), sent.flip(0))
    assert torch.equal(all_to_all(group_of(0, 2, None), sent), sent.flip(0))


@pytest.mark.parametrize("is_disabled", [True, False])
def test_the_buffer_of_an_unusable_multicast_is_freed(is_disabled: bool) -> None:
    plane = SimpleNamespace(disabled=is_disabled, buffer=torch.zeros(4))
    _release_unusable(SimpleNamespace(device_communicator=SimpleNamespace(symm_mem_comm=plane)))
    assert hasattr(plane, "buffer") is not is_disabled
    _release_unusable(SimpleNamespace(device_communicator=None))


@pytest.mark.parametrize("is_disabled", [False, True])
def test_custom_all_reduce_is_used_unless_it_is_disabled(
    is_disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE", is_disabled)
    for name in ("init_distributed_environment", "initialize_model_parallel", "get_tp_group"):
        monkeypatch.setattr(parallel_state, name, lambda *_, **__: None)
    monkeypatch.setattr(pool_module, "set_current_vllm_config", lambda _: nullcontext())
    monkeypatch.setattr(pool_module, "_be_a_world", lambda: None)
    parallel = SimpleNamespace(disable_custom_all_reduce=is_disabled)
    config: Any = SimpleNamespace(parallel_config=parallel)
    memory: Any = object()
    CommunicatorPool(
        config,
        rank=Rank(0),
        first=Rank(0),
        world=1,
        widths=(1,),
        mixed=(),
        init_method="",
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        memory=memory,
    )
    assert parallel_state._ENABLE_CUSTOM_ALL_REDUCE is not is_disabled
