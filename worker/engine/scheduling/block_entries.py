"""The entries of one scheduler's full blocks in the directory of its group.

A block has its hash when the step that fills it is planned. The entry follows when that step is
over, so readers find the content after the loss of a rank. vLLM's asynchronous scheduler plans a
step before it knows the tokens of the steps in flight. So it hashes a block late: while it plans
the step after the one that fills the block, or when that one is over. Its entry does not wait for
the later step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvadaptor.group_directory import GroupDirectory

ENTRIES_PER_STEP = 512
"""Maximum entries after one step; a migrated long context is entered over several."""

Blocks = dict[int, bytes]
"""Blocks and their hashes."""


class BlockEntries:
    """The entries of one scheduler's blocks: those to come, and those in the directory."""

    def __init__(
        self, directory: GroupDirectory, is_held: Callable[[int], bool] = lambda _: True
    ) -> None:
        """`is_held` returns True for blocks that tasks hold."""
        self.directory = directory
        self._is_held = is_held
        self.is_planning = False
        """Whether a step is being planned: tasks have computed what earlier steps compute."""
        self._planned: Blocks = {}
        """Blocks that got a hash since the last step was planned, and are filled by the next."""
        self._earlier: Blocks = {}
        """The same of blocks that steps before it fill."""
        self._computed: Blocks | None = None
        """The same of blocks that a step has filled that ends now; None if none does."""
        self._steps: dict[int, Blocks] = {}
        """The blocks of each step that is under way, by the identity of its plan, oldest first."""

    def add(self, block: int, key: bytes, *, is_filled: bool = False) -> None:
        """Enter a block after the step that is planned next, or after those before it."""
        into = self._earlier if is_filled else self._planned
        if self._computed is not None:
            into = self._computed
        into[block] = key

    def remove(self, block: int) -> None:
        """Remove a block's entry: it will get other content."""
        self.directory.clear(block)
        for each in (self._planned, self._earlier, self._computed, *self._steps.values()):
            if each:
                each.pop(block, None)

    def step_is_planned(self, plan: object, *, computes: bool = True) -> None:
        """Count the blocks since the last one for this step, and for the last one under way.

        A step that computes nothing leaves them to the next one: its end does not tell that all
        members have loaded them.
        """
        if self._earlier:
            earlier, self._earlier = self._earlier, {}
            if self._steps:
                self._steps[next(reversed(self._steps))].update(earlier)
            else:
                self._enter(earlier)
        if computes:
            self._steps[id(plan)], self._planned = self._planned, {}

    @contextmanager
    def of_finished_step(self, plan: object, *, is_void: bool) -> Iterator[None]:
        """Enter the blocks of a step that has ended, and what gets a hash meanwhile.

        Neither, if something that the step has read is void.
        """
        self._step_is_over(plan, is_void=is_void)
        if is_void:
            yield
            return
        filled: Blocks = {}
        self._computed = filled
        try:
            yield
        finally:
            self._computed = None
        self._enter(filled)

    def _step_is_over(self, plan: object, *, is_void: bool) -> None:
        filled = self._steps.pop(id(plan), None)
        if filled and not is_void:
            self._enter(filled)

    def _enter(self, filled: Blocks) -> None:
        later = list(filled.items())[ENTRIES_PER_STEP:]
        for block, key in later:
            del filled[block]
            self._planned.setdefault(block, key)
        self.directory.fill(list(filled), list(filled.values()))
        # A task may have ended with the step that filled its block.
        self.directory.release(block for block in filled if not self._is_held(block))

    def withdraw(self) -> None:
        """Enter no block that got a hash until now: its group is left, and may lose the block."""
        self._steps.clear()
        self._planned.clear()
        self._earlier.clear()

    def forget_steps(self) -> None:
        """Enter nothing of the steps that are under way: the group is lost."""
        self.withdraw()
        self.directory.freeze()
