"""vLLM adapter: the members of a pipeline group in the order of their stages."""

from collections.abc import Sequence

from vllm.distributed.parallel_state import GroupCoordinator


class StageGroup(GroupCoordinator):
    """What vLLM's models and runners ask of their pipeline group.

    It communicates nothing: activations travel over links (`comm_pool.stages.links`), and tokens
    with the steps that need them.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are those of the cell, the first stage's first; `rank` is this one."""
        # Not the base class's: it makes process groups.
        self.rank, self.ranks = rank, list(ranks)
        self.world_size = len(ranks)
        self.rank_in_group = self.ranks.index(rank)
        self.device_communicator = None
        self.mq_broadcaster = None

    def make_sibling_device_group(self, group_desc: str | None = None) -> None:
        """Return nothing: model runner V2 asks for a group to broadcast tokens in."""
