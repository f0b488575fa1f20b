"""A scheduler's blocks in host pages: which its tasks load, and which it stores."""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from vllm.v1.request import Request, RequestStatus

from kvadaptor.host.directory import HostDirectory
from worker.engine.scheduling.block_copies import BlockCopies, LedTaskView

LOOKS_PER_STEP = 128
"""Blocks that a scheduler whose stores run beside steps looks up in one step, besides as many as
the step computes: 1 ms."""

ORDERS_MAX = 256
"""Steps with stores that are not over, before one waits for them: some were left out."""

_ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""Ends of tasks whose last blocks are whole."""


_Filled = tuple[str | None, bytes, int]
"""The task that has a full block, if it still has it, the hash of the block, and its number."""


class HostCounts(Protocol):
    """What a rank counts of its host pages, in totals since it started."""

    hit_tokens: int
    """Tokens that tasks took from host pages instead of computing them."""
    full: int
    """Blocks that found no page, as all were in use."""


@dataclass(frozen=True, slots=True)
class StoreRules:
    """How a group stores and loads."""

    ranks: Sequence[int]
    """The members, who all must be ready."""
    shares: int
    """How many of them write a page."""
    is_aside: bool
    """Whether they store beside steps: a step begins the stores of blocks that are full then."""
    is_sooner: Callable[[int], bool]
    """Whether loading this many tokens beats computing them."""
    goes_ahead: Callable[[int], bool]
    """Whether they load this many tokens beside steps."""


@dataclass(slots=True)
class _Order:
    """The stores of one step: the last page and its tag, and the blocks."""

    page: int
    tag: int
    blocks: set[int]


class HostBlocks:
    """One scheduler's access to the directory of host pages."""

    def __init__(
        self,
        scheduler: LedTaskView,
        directory: HostDirectory,
        counts: HostCounts,
        rules: StoreRules,
    ) -> None:
        self._scheduler = scheduler
        self._directory = directory
        self._counts = counts
        self._rules = rules
        self.is_sooner, self.goes_ahead = rules.is_sooner, rules.goes_ahead
        self._stored: dict[str, int] = {}
        """How many blocks of each task were looked at for storing."""
        self._step_number = 0
        self._due: dict[str, int] = {}
        """The step in which each task is looked at next."""
        self._used: dict[str, list[int]] = {}
        """The pages that each task has filled, loaded or found."""
        self._last: list[tuple[bytes, int]] = []
        """Hashes and blocks of tasks that lost them, which were full with their last step.

        Those that a step writes to before they are stored are left out."""
        self._orders: deque[_Order] = deque()
        """Stores beside steps that some member may not have copied yet, oldest first."""

    @property
    def _is_ready(self) -> bool:
        return self._directory.are_ready(self._rules.ranks)

    # ------------------------------------------------------------------ a source of blocks

    def refresh(self) -> None:
        """Read what other ranks have stored."""
        self._directory.refresh()

    def take(self, key: bytes) -> int | None:
        """Return a page of this block, pinned; None if there is none."""
        page = self._directory.find(key) if self._is_ready else None
        return page if page is not None and self._directory.pin(page, key) else None

    def let_go(self, places: Iterable[int]) -> None:
        """Unpin pages."""
        self._directory.unpin(places)

    def load(self, step: BlockCopies, name: str, blocks: list[int], places: list[int]) -> None:
        """Let a step load these pages into a task's blocks."""
        step.load_blocks += blocks
        step.load_pages += places
        self._counts.hit_tokens += len(blocks) * self._scheduler.block_size
        self._use(name, places)

    def load_ahead(
        self, step: BlockCopies, name: str, blocks: list[int], places: list[int]
    ) -> None:
        """Let a step begin to load these pages into blocks that will be a task's."""
        step.ahead_blocks += blocks
        step.ahead_pages += places
        self._counts.hit_tokens += len(blocks) * self._scheduler.block_size
        self._use(name, places)

    def gone(self, step: BlockCopies) -> set[int]:
        """Return none: pages stay as they are while they are pinned."""
        return set()

    # ------------------------------------------------------------------ stores

    def plan(
        self,
        step: BlockCopies,
        tokens: dict[str, int],
        begun: Container[str],
        now_s: float,
        written: Callable[[], set[int]],
    ) -> None:
        """Let a step, which computes these tokens of its tasks, store what they fill.

        `written` returns the blocks that the step gives to tasks or loads. Where stores run beside
        steps, this one stores what the steps before it have filled. Tasks that have `begun` with it
        wait for the next one: vLLM lets them hit blocks that others fill in this very step.
        """
        is_aside = self._rules.is_aside
        if not self._is_ready:
            self._last.clear()
            self._due.clear()
            return
        looks = LOOKS_PER_STEP + sum(tokens.values()) // self._scheduler.block_size
        filled: list[_Filled] = [(None, key, block) for key, block in self._last[:looks]]
        self._last = self._last[looks:]
        self._step_number = now = self._step_number + 1
        due = self._due
        # Most tasks of most steps fill no block.
        for name in [name for name, n in tokens.items() if n > 1 or due.get(name, 0) <= now]:
            if is_aside and name in begun:
                continue
            filled += self._filled(name, tokens[name], looks - len(filled))
        if filled:
            self._store(step, filled, now_s)
        if is_aside:
            self._guard(step, written)

    def skip_step(self, step: BlockCopies, written: Callable[[], set[int]]) -> None:
        """Look at all tasks in the next step, as this one stores nothing; see `plan`."""
        self._due.clear()
        if self._rules.is_aside:
            self._guard(step, written)

    def _filled(self, name: str, tokens: int, looks: int) -> Iterable[_Filled]:
        """Return the blocks of a task that are full, with the step's tokens or beside it before.

        Returns `looks` of them at most where stores run beside steps. If the next steps compute one
        token of the task each, it is not looked at before one of them can fill a block.
        """
        request, is_aside = self._scheduler.requests[name], self._rules.is_aside
        computed = request.num_computed_tokens + (0 if is_aside else tokens)
        first, full = self._stored.get(name, 0), self._full(request, computed)
        if is_aside:
            full = min(full, first + looks)
        next_tokens = computed + (tokens if is_aside else 1)
        missing = (max(first, full) + 1) * self._scheduler.block_size - next_tokens
        self._due[name] = self._step_number + 1 + max(0, missing)
        if full <= first:
            return ()
        self._stored[name] = full
        blocks = self._scheduler._blocks_of(name, first, full)
        return zip(repeat(name), request.block_hashes[first:full], blocks)

    def _full(self, request: Request, computed: int) -> int:
        """Return how many blocks of a task are full with its first tokens, and have a hash."""
        return min(int(computed // self._scheduler.block_size), len(request.block_hashes))

    def _store(self, step: BlockCopies, filled: list[_Filled], now_s: float) -> None:
        """Let a step store those of these blocks that have no page."""
        directory = self._directory
        new: dict[bytes, tuple[str | None, int]] = {}
        for name, key, block in filled:
            if not directory.has(key):
                new[key] = name, block
            elif name is not None and (page := directory.find(key)) is not None:
                self._use(name, [page])  # A task that moved here, or one with the same prefix.
        pages = directory.allocate(list(new), self._rules.shares, now_s)
        self._counts.full += len(new) - len(pages)
        step.store_pages += pages
        step.store_tags += directory.entries.tags(pages)
        for page, (name, block) in zip(pages, new.values(), strict=False):
            step.store_blocks.append(block)
            if name is not None:
                self._use(name, [page])

    def _guard(self, step: BlockCopies, written: Callable[[], set[int]]) -> None:
        """Let a step that writes to a block wait until all members have stored it."""
        orders, directory = self._orders, self._directory
        if step.store_pages:
            blocks = set(step.store_blocks)
            orders.append(_Order(step.store_pages[-1], step.store_tags[-1], blocks))
        # Members store in order.
        while orders and directory.entries.is_written(orders[0].page, orders[0].tag):
            orders.popleft()
        if not orders and not self._last:
            return
        gets = written()
        self._last = [each for each in self._last if each[1] not in gets]
        is_free = all(gets.isdisjoint(order.blocks) for order in orders)
        if not is_free or len(orders) > ORDERS_MAX:
            step.frees_stores = True
            orders.clear()

    def ended(self, request: Request) -> None:
        """Forget a task; its pages stay until others need them."""
        if request.status in _ENDED:
            self.loses_blocks(request)
        self._stored.pop(request.request_id, None)
        self._due.pop(request.request_id, None)
        self._directory.remove_users(self._used.pop(request.request_id, ()))

    def loses_blocks(self, request: Request) -> None:
        """Store what a task's last step has filled: the task is about to lose its blocks."""
        name = request.request_id
        first = self._stored.pop(name, 0)
        self._due.pop(name, None)
        if self._rules.is_aside:
            full = self._full(request, request.num_computed_tokens)
            blocks = self._scheduler._blocks_of(name, first, full)
            self._last += zip(request.block_hashes[first:full], blocks, strict=True)

    def forget_ended(self, blocks: Collection[int] | None = None) -> None:
        """Forget what ended tasks have filled last: others may write to these blocks, or to all."""
        gone = None if blocks is None else {*blocks}
        self._last = [] if gone is None else [each for each in self._last if each[1] not in gone]

    def forget_steps(self) -> None:
        """Forget the stores that no step has begun: the group is left."""
        self._last.clear()
        self._orders.clear()

    def _use(self, name: str, pages: Iterable[int]) -> None:
        used = self._used.setdefault(name, [])
        for page in pages:
            self._directory.add_user(page)
            used.append(page)
