"""vLLM adapter: what a step copies into and out of its tasks' blocks, and from where to where."""

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import Request


@dataclass(slots=True)
class BlockCopies(KVConnectorMetadata):
    """What a step copies: loads before it computes, stores afterwards. Blocks are logical."""

    load_blocks: list[int] = field(default_factory=list)
    load_pages: list[int] = field(default_factory=list)
    """The host pages that are loaded."""
    lost_blocks: list[int] = field(default_factory=list)
    lost_places: list[int] = field(default_factory=list)
    lost_tags: list[int] = field(default_factory=list)
    """Blocks of lost groups that are loaded, and the tags of their entries."""
    store_blocks: list[int] = field(default_factory=list)
    store_pages: list[int] = field(default_factory=list)
    store_tags: list[int] = field(default_factory=list)
    frees_stores: bool = False
    """Whether the step writes to a block that may not be stored yet, so that it waits for that."""
    ahead: list[tuple[int, int]] = field(default_factory=list)
    """The number of each load that begins with this step, ahead of its task, and its blocks."""
    ahead_blocks: list[int] = field(default_factory=list)
    ahead_pages: list[int] = field(default_factory=list)
    """The blocks and host pages of these loads, in their order."""
    awaits: list[int] = field(default_factory=list)
    """The numbers of the loads that are over before the step computes."""

    @property
    def is_empty(self) -> bool:
        """Whether the step copies nothing."""
        return not (self.loads or self.store_blocks or self.ahead or self.frees_stores)

    @property
    def loads(self) -> bool:
        """Whether the step reads what is loaded for it."""
        return bool(self.load_blocks or self.lost_blocks or self.awaits)


class LedTaskView(Protocol):
    """The scheduler's side that the connector reads."""

    requests: dict[str, Request]
    running: list[Request]
    block_size: int
    max_num_scheduled_tokens: int

    def _blocks_of(self, request_id: str, first: int = 0, last: int | None = None) -> list[int]: ...


class BlockSource(Protocol):
    """Where full blocks can be read, found by their hashes; its places are numbers."""

    def refresh(self) -> None:
        """Learn what is there now."""

    def take(self, key: bytes) -> int | None:
        """Return the place of this block, kept until `let_go`; None if it is not there."""

    def let_go(self, places: Iterable[int]) -> None:
        """Keep places no more."""

    def is_sooner(self, tokens: int) -> bool:
        """Return whether loading this many tokens beats computing them."""

    def load(self, step: BlockCopies, name: str, blocks: list[int], places: list[int]) -> None:
        """Let a step load these places into a task's blocks."""

    def goes_ahead(self, tokens: int) -> bool:
        """Return whether this many tokens are loaded beside steps, before the task runs."""

    def load_ahead(
        self, step: BlockCopies, name: str, blocks: list[int], places: list[int]
    ) -> None:
        """Let a step begin to load these places into blocks that will be a task's."""

    def gone(self, step: BlockCopies) -> set[int]:
        """Return the blocks of a finished step that may have read something else."""


class BlockStores(Protocol):
    """Where full blocks are stored."""

    def plan(
        self,
        step: BlockCopies,
        tokens: dict[str, int],
        begun: Container[str],
        now_s: float,
        written: Callable[[], set[int]],
    ) -> None:
        """Let a step, which computes these tokens of its tasks, store what they fill.

        The `begun` of these tasks were not in the step before.
        `written` returns the blocks that the step gives to tasks or loads.
        """

    def skip_step(self, step: BlockCopies, written: Callable[[], set[int]]) -> None:
        """Note that a step stores nothing; later ones store what it fills.

        `written` is that of `plan`.
        """

    def ended(self, request: Request) -> None:
        """Forget a task; it still has its blocks."""

    def loses_blocks(self, request: Request) -> None:
        """Store what a task's last step has filled: the task is about to lose its blocks."""

    def forget_ended(self, blocks: Collection[int] | None = None) -> None:
        """Store nothing of ended tasks that no step has begun to store, or not these blocks."""

    def forget_steps(self) -> None:
        """Forget the stores that no step has begun: the group is left."""


Taken = list[tuple[BlockSource, int]]
"""Places that are kept, and their sources."""
