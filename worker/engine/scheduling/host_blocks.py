"""A scheduler's blocks in host pages: which its tasks load, and which it stores."""

from collections.abc import Callable, Iterable
from typing import Protocol

from kvadaptor.host.directory import HostDirectory
from worker.engine.scheduling.block_copies import BlockCopies, LedTaskView


class HostCounts(Protocol):
    """What a rank counts of its host pages, in totals since it started."""

    hit_tokens: int
    """Tokens that tasks took from host pages instead of computing them."""
    full: int
    """Blocks that found no page, as all were in use."""


class HostBlocks:
    """One scheduler's access to the directory of host pages."""

    def __init__(
        self,
        scheduler: LedTaskView,
        directory: HostDirectory,
        shares: int,
        counts: HostCounts,
        is_sooner: Callable[[int], bool],
    ) -> None:
        """`shares` members write a page; `is_sooner` tells if loading beats computing.

        It is asked with a number of tokens.
        """
        self._scheduler = scheduler
        self._directory = directory
        self._shares = shares
        self._counts = counts
        self.is_sooner = is_sooner
        self._stored: dict[str, int] = {}
        """How many blocks of each task were looked at for storing."""
        self._used: dict[str, list[int]] = {}
        """The pages that each task has filled or loaded."""

    # ------------------------------------------------------------------ a source of blocks

    def refresh(self) -> None:
        """Read what other ranks have stored."""
        self._directory.refresh()

    def take(self, key: bytes) -> int | None:
        """Return a page of this block, pinned; None if there is none."""
        page = self._directory.find(key)
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

    def gone(self, step: BlockCopies) -> set[int]:
        """Return none: pages stay as they are while they are pinned."""
        return set()

    # ------------------------------------------------------------------ stores

    def plan(self, step: BlockCopies, tokens: dict[str, int], now_s: float) -> None:
        """Let a step, which computes these tokens of its tasks, store what they fill."""
        self._directory.settle()
        for name, count in tokens.items():
            self._plan_task(step, name, count, now_s)

    def _plan_task(self, step: BlockCopies, name: str, tokens: int, now_s: float) -> None:
        """Add the blocks that are full after the step and in no host page yet."""
        request, size = self._scheduler.requests[name], self._scheduler.block_size
        first = self._stored.get(name, 0)
        full = min((request.num_computed_tokens + tokens) // size, len(request.block_hashes))
        if full <= first:
            return
        self._stored[name] = full
        blocks = self._scheduler._blocks_of(name)
        directory = self._directory
        for number in range(first, full):
            key = request.block_hashes[number]
            if directory.find(key) is not None or directory.is_pending(key):
                continue
            page = directory.allocate(key, self._shares, now_s)
            if page is None:
                self._counts.full += full - number
                return
            step.store_blocks.append(blocks[number])
            step.store_pages.append(page)
            step.store_tags.append(directory.tag(page))
            self._use(name, [page])

    def ended(self, name: str) -> None:
        """Forget a task; its pages stay until others need them."""
        self._stored.pop(name, None)
        self._directory.remove_users(self._used.pop(name, ()))

    def _use(self, name: str, pages: Iterable[int]) -> None:
        used = self._used.setdefault(name, [])
        for page in pages:
            self._directory.add_user(page)
            used.append(page)
