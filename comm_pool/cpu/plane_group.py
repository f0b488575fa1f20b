"""vLLM adapter: a group of CPU ranks over shared memory instead of process groups.

All members of vLLM's own group make it together, out of torch's world. Each member makes this one
alone, so a restarted rank can make it while the others serve.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import GroupCoordinator

from comm_pool.cpu.shared_plane import SharedPlane
from comm_pool.cpu.step_ring import StepRing

CPU = torch.device("cpu")


class Members:
    """What vLLM's models need from a process group: its size."""

    def __init__(self, count: int) -> None:
        self._count = count

    def size(self) -> int:
        """Return the number of members."""
        return self._count


class PlaneCommunicator(CpuCommunicator):
    """Adapts vLLM's tensor shapes to the collectives of a plane."""

    def __init__(self, plane: SharedPlane, ranks: Sequence[int], place: int, name: str) -> None:
        # Not the base class's: it reads process groups, and there are none.
        self.dist_module = plane
        self.device, self.unique_name = CPU, name
        self.cpu_group = self.device_group = Members(len(ranks))
        self.ranks = list(ranks)
        self.world_size = self.global_world_size = len(ranks)
        self.rank = self.rank_in_group = place
        self.global_rank = ranks[place]
        self.supports_tensor_dict = self.use_all2all = self.is_ep_communicator = False
        self.all2all_backend = self.all2all_manager = None


class PlaneGroup(GroupCoordinator):
    """What vLLM's layers and our runners need from a group."""

    def __init__(
        self, ranks: Sequence[int], rank: int, plane: SharedPlane, queue: StepRing | None
    ) -> None:
        """`ranks` and `rank` are those of the cell; the first of `ranks` leads."""
        # Not the base class's: see `PlaneCommunicator`.
        self.unique_name = parallel_state._get_unique_name("cell")
        parallel_state._register_group(self)
        self.rank, self.local_rank, self.device_index = rank, rank, rank
        self.ranks, self.group_ranks = list(ranks), [list(ranks)]
        self.world_size = len(ranks)
        self.rank_in_group = self.ranks.index(rank)
        self.device = CPU
        self.cpu_group = self.device_group = Members(self.world_size)
        self.torch_distributed_backend = "gloo"
        self.use_device_communicator = True
        self.device_communicator = PlaneCommunicator(
            plane, self.ranks, self.rank_in_group, self.unique_name
        )
        self.mq_broadcaster = queue
        self.use_custom_op_call = self.use_cpu_custom_send_recv = False
        self._pending_isends: deque[Any] = deque()
        self._plane = plane

    def barrier(self) -> None:
        """Return when all members have called this."""
        self._plane.all_reduce(torch.zeros(1))
