"""The entries of one scheduler's full blocks in the directory of its group.

A block has its hash when the step that fills it is planned. The entry follows when that step is
over, so readers find the content after the loss of a rank.
"""

from kvadaptor.group_directory import GroupDirectory

ENTRIES_PER_STEP = 512
"""Maximum entries after one step; a migrated long context is entered over several."""


class BlockEntries:
    """The entries of one scheduler's blocks: those to come, and those in the directory."""

    def __init__(self, directory: GroupDirectory) -> None:
        self.directory = directory
        self._planned: dict[int, bytes] = {}
        """Blocks that got a hash since the last step was planned, and their hashes."""
        self._steps: dict[int, dict[int, bytes]] = {}
        """The same of each step that is under way, by the identity of its plan."""

    def add(self, block: int, key: bytes) -> None:
        """Enter a block after the step that is planned next."""
        self._planned[block] = key

    def remove(self, block: int) -> None:
        """Remove a block's entry: it will get other content."""
        self.directory.clear(block)
        if self._planned or self._steps:
            for each in (self._planned, *self._steps.values()):
                each.pop(block, None)

    def step_is_planned(self, plan: object) -> None:
        """Count the blocks since then for this step."""
        if self._planned:
            self._steps[id(plan)] = self._planned
            self._planned = {}

    def step_is_over(self, plan: object, *, is_void: bool = False) -> None:
        """Enter the blocks of a step that has ended, unless something that it read is void."""
        filled = self._steps.pop(id(plan), None)
        if filled is None or is_void:
            return
        later = list(filled.items())[ENTRIES_PER_STEP:]
        for block, key in later:
            del filled[block]
            self._planned.setdefault(block, key)
        self.directory.fill(list(filled), list(filled.values()))

    def withdraw(self) -> None:
        """Enter no block that got a hash until now: its group is left, and may lose the block."""
        self._steps.clear()
        self._planned.clear()

    def forget_steps(self) -> None:
        """Enter nothing of the steps that are under way: the group is lost."""
        self.withdraw()
        self.directory.freeze()
