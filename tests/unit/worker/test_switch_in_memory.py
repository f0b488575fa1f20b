"""Ranks switch while their tasks run, over engines in memory: tokens, KV and pages are exact.

An engine in memory fails a step whose KV is not there, so a wrong copy or a page with two owners
shows as a failed step.
"""

import pytest

from coordinator.protocol.switch_actions import Resolve
from coordinator.protocol.terms import Binding, Carry, Phase
from tests.harness.coordinator.builders import directive, target
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import FakeRank
from tests.harness.worker.fake_scheduler import token_at

TOKENS = 30
PAGES, MORE_PAGES = 65, 97


def last_step_of(rank: FakeRank) -> str:
    """What the last step of a rank that has left its group is."""
    steps = rank.runtime.steps
    if steps.has_deferred_step:
        return "deferred"
    return "in flight" if steps.has_detached_step else "over"


class Cell:
    """All ranks of a cell, each driven as its main loop would, in the order of a switch."""

    def __init__(self, layout: str, pages: tuple[int, ...], last_step: str) -> None:
        """`pages` of each rank; groups are left with a `last_step` over, in flight or deferred."""
        world = len(pages)
        self.world = world
        self.last_step = last_step
        self.streams: dict[str, list[int]] = {}
        cell = FakeCell(world, pages=pages)
        self.ranks = [FakeRank(cell, rank, self.streams) for rank in range(world)]
        for each in self.ranks:
            each.engine.is_synchronous = last_step != "in flight"
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.epoch = 1
        self.target = target(layout, 1, world=world)
        self.serve()

    def serve(self) -> None:
        """Let all groups of the target begin."""
        for binding in self.target.bindings:
            members = [self.ranks[rank] for rank in binding.group.ranks]
            free = min(each.engine.pages.counts().free for each in members)
            for each in members:
                each.runtime.join(binding)
            members[0].runtime.serve(binding, (), free)
            self.follow(binding)

    def follow(self, binding: Binding) -> None:
        """Let followers read all that they were sent, and compute as far as their leader has."""
        leader, *followers = (self.ranks[rank] for rank in binding.group.ranks)
        for each in followers:
            while each.runtime.follow(binding, wait_s=0.0) is not None:
                pass
            while len(each.engine.launched) > len(leader.engine.launched):
                each.engine.finish_step()

    def place(self, name: str, group: int, prompt: range) -> None:
        """Give a task to a group of the target."""
        self.prompts[name] = tuple(prompt)
        binding = self.target.bindings[group]
        self.ranks[binding.group.leader].place(name, binding, prompt=prompt, tokens=TOKENS)

    def step(self, steps: int) -> None:
        """Let every group that has work compute this number of steps."""
        for binding in self.target.bindings * steps:
            leader = self.ranks[binding.group.leader]
            if leader.runtime.has_work:
                leader.step(self.epoch)
                self.follow(binding)
                leader.runtime.tidy_some()

    def settle(self) -> bool:
        """Let all devices end what they have; never another layout."""
        for each in self.ranks:
            each.engine.finish_steps()
            each.runtime.steps.run_deferred()
            each.runtime.look()
        return False

    def switch(self, layout: str) -> None:
        """Leave with the last steps in flight, migrate, commit and join."""
        self.epoch += 1
        new = target(layout, self.epoch, world=self.world)
        asked = directive(new, self.epoch, Phase.MOVE, carry=Carry.RESHARD)
        for old in self.target.bindings:
            leader = self.ranks[old.group.leader].runtime
            if self.last_step == "deferred" and leader.has_tasks:
                leader.defer_step(self.epoch)
            self.follow(old)
            for rank in old.group.ranks:
                self.leave(self.ranks[rank], old)
        assert self.last_step in {last_step_of(each) for each in self.ranks}
        for each in self.ranks:
            each.runtime.migration.move(asked, self.settle)
            assert not each.runtime.migration.has_failed
        for each in self.ranks:
            each.runtime.migration.resolve(Resolve(self.epoch, True, False, True, asked))
        self.target = new
        self.serve()

    def leave(self, rank: FakeRank, binding: Binding) -> None:
        """Leave a group for a migration."""
        rank.runtime.steps.on_leave((binding, {}))
        rank.runtime.unbind()
        if rank.engine.spec.rank == binding.group.leader:
            rank.runtime.park(binding.group, Carry.RESHARD, group_lost=False)
        rank.runtime.migration.on_leave(binding)
        rank.runtime.migration.publish(self.epoch)

    def finish(self) -> None:
        """Serve all tasks to their end, and check all tokens."""
        self.step(TOKENS + 10)
        for name, prompt in self.prompts.items():
            wanted = [token_at(prompt, len(prompt) + number) for number in range(TOKENS)]
            assert self.streams[name] == wanted, name
        returned = [each.runtime.returned for each in self.ranks]
        assert not any(returned), "no task was computed again"


@pytest.mark.parametrize("last_step", ["over", "in flight", "deferred"])
@pytest.mark.parametrize("is_unequal", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ("dp2", "tp2", "dp2")),
        (4, ("dp4", "tp2+tp2", "tp4", "tp2+dp2", "dp4")),
        (4, ("tp4", "dp4", "tp4")),
    ],
    ids=str,
)
def test_streams_go_on_in_every_layout(
    world: int, layouts: tuple[str, ...], last_step: str, is_unequal: bool
) -> None:
    pages = tuple(MORE_PAGES if is_unequal and rank % 2 else PAGES for rank in range(world))
    cell = Cell(layouts[0], pages, last_step)
    for number in range(2 * len(cell.target.bindings)):
        group = number // 2
        cell.place(f"task {number}", group, range(100 * number, 100 * number + 30 + 7 * number))
    for layout in layouts[1:]:
        cell.step(5)
        cell.switch(layout)
    cell.finish()
    counts = [each.engine.pages.counts() for each in cell.ranks]
    known = [each.free + each.owned + sum(each.leased.values()) + 1 for each in counts]
    assert known == list(pages)
    assert all(len(each.runtime.book) == 0 for each in cell.ranks)
