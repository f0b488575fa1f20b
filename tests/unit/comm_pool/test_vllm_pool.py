"""The exchange over NCCL, with a communicator that delivers when all members have asked."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed import parallel_state

from comm_pool import vllm_pool
from comm_pool.layout import Rank
from comm_pool.vllm_pool import CommunicatorPool, _release_unusable, all_to_all


class Mailbox:
    """One member's communicator; a message is taken when its receiver has asked for it."""

    def __init__(self, own: int, sent: dict[tuple[int, int], torch.Tensor]) -> None:
        self.disabled = False
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
        monkeypatch.setattr(parallel_state, name, lambda *_: None)
    monkeypatch.setattr(vllm_pool, "set_current_vllm_config", lambda _: nullcontext())
    monkeypatch.setattr(vllm_pool, "_be_a_world", lambda: None)
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
