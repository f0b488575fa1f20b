"""What a rank holds: pages and leases, the tasks of the group it leads, tasks paused in others.

`bound` is always the group that the rank is joined to; its lease is whole and not to be touched.
"""

from collections.abc import Collection

import numpy as np
from msgspec.structs import replace

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import LeaseRetention, PageReport, Place
from coordinator.protocol.messages.tasks import TaskEnded, TaskReturned
from coordinator.protocol.switch_participant import KEEPING
from coordinator.protocol.terms import Binding, Carry, EndCause, ReturnCause, TaskId
from kvadaptor.pages import PagePool
from tests.harness.kv.page_leases import lease_table
from tests.simulation.checkers import check
from tests.simulation.sim_engine import SimEngine, SimTask, slots_of
from tests.simulation.sim_memory import Memory
from tests.simulation.sim_plan import Cargo, Manifest
from tests.simulation.stepping import Begin, Step

Ranks = tuple[Rank, ...]


class Holdings:
    """The memory of one process of one rank."""

    def __init__(self, rank: Rank, num_pages: int, incarnation: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.pages = PagePool(num_pages)
        self.memory = Memory()
        self.engine: SimEngine | None = None
        self.paused: dict[Ranks, dict[TaskId, SimTask]] = {}
        self.kept: dict[Ranks, LeaseRetention] = {}
        """What this leader needs of the leases of groups that are not bound."""
        self.ended: list[TaskEnded] = []
        self.returned: list[TaskReturned] = []
        self.changed = False
        self._own: set[int] = set()
        self._lost: set[Ranks] = set()
        """Groups whose pages were given up because a member is lost."""
        self._moved_in: dict[Ranks, tuple[int, ...]] = {}
        """Lease indices that hold moved tasks of a group, until it begins."""
        self._applied: dict[Ranks, tuple[int, int]] = {}
        self._members: dict[Ranks, dict[Rank, int | None]] = {}
        self._joined: dict[Ranks, int] = {}
        self._version = 0

    def join(self, binding: Binding, incarnations: dict[Rank, int]) -> None:
        ranks = binding.group.ranks
        self._members[ranks] = {each: incarnations.get(each) for each in ranks}
        self._joined[ranks] = binding.formation
        self._lost.discard(ranks)

    def has_lost(self, ranks: Ranks) -> bool:
        """Whether pages that a group of these ranks had are given up for a lost member."""
        return ranks in self._lost

    def members(self, ranks: Ranks) -> dict[Rank, int | None]:
        """The processes that were in the group when it was joined last."""
        return self._members[ranks]

    def table(self, ranks: Ranks) -> frozenset[int]:
        return frozenset(lease_table(self.pages, ranks))

    def begin(self, binding: Binding, begin: Begin) -> None:
        """Lease pages for a wide group: first what is kept, then the grant on top."""
        ranks = binding.group.ranks
        kept = begin.kept.indices if begin.kept is not None else ()
        kept += self._moved_in.pop(ranks, ())
        missing = set(kept) - self.table(ranks)
        check(not missing, f"rank {self.rank} has no pages for kept {missing} of {ranks}")
        # What a lost member had a share in may become known only now.
        self._return_paused(ranks, frozenset(kept))
        self.pages.keep_only(ranks, kept)
        self.pages.lease_pages(ranks, self.grant_of(begin))
        self._applied[ranks] = (binding.formation, begin.version)
        self.kept.pop(ranks, None)

    def kept_still(self, kept: LeaseRetention | None) -> LeaseRetention | None:
        """What the coordinator says is kept of a lease, less what a move has given up since."""
        if kept is None:
            return None
        held = self.table(kept.ranks).intersection(kept.indices)
        return replace(kept, indices=tuple(sorted(held)))

    def version_of(self, ranks: Ranks) -> int:
        """The last word of this leader on what it keeps of a lease; -1 is none."""
        kept = self.kept.get(ranks)
        return kept.version if kept is not None else -1

    def grant_of(self, begin: Begin) -> int:
        return begin.grant_pages

    def serve(self, binding: Binding, grant_pages: int) -> None:
        """Lead a group whose pages are there (dp: own them now) and resume what paused in it."""
        ranks = binding.group.ranks
        if len(ranks) == 1:
            self._own.update(self.pages.grant_own_pages(grant_pages).tolist())
        indices = frozenset(self._own) if len(ranks) == 1 else self.table(ranks)
        self.engine = SimEngine(binding, indices)
        for task in self.paused.pop(ranks, {}).values():
            check(self.engine.resume(task), f"{task.header.task} has blocks of no lease of {ranks}")

    def is_idle(self, binding: Binding | None) -> bool:
        """Say whether the joined group has no task; what paused in it counts before it serves."""
        if self.engine is not None:
            return not self.engine.tasks
        return binding is None or not self.paused.get(binding.group.ranks)

    def park(self, binding: Binding, carry: Carry, *, lost: bool) -> None:
        """Lead the group no longer, and apply the carry plan to its tasks.

        With `reshard` they wait for the move where they are, and all pages with them.
        """
        ranks = binding.group.ranks
        paused = self.paused.setdefault(ranks, {})
        tasks = list(self.engine.tasks.values()) if self.engine else []
        self.engine = None
        for task in tasks:
            if task.blocks and carry in KEEPING and not lost:
                paused[task.header.task] = task
            else:
                has_kv = bool(task.blocks)
                self.give_back(task, ReturnCause.RECOMPUTE if has_kv else ReturnCause.NOT_STARTED)
        if lost or carry not in KEEPING:
            # What paused in a group that was joined again, and left before it served.
            self._return_paused(ranks, frozenset())
        if lost or carry is not Carry.RESHARD:
            self.withdraw(ranks)

    def apply(self, kept: LeaseRetention, whole: Collection[Ranks | None]) -> None:
        """Free the pages of an unbound group that its leader does not need."""
        order = (kept.formation, kept.version)
        if kept.ranks in whole or order <= self._applied.get(kept.ranks, (0, 0)):
            return
        self._applied[kept.ranks] = order
        held = self.table(kept.ranks)
        remaining = held.intersection(kept.indices)
        if remaining != held:
            self._lost.add(kept.ranks)
        # A member's share of these pages is lost: the coordinator says so, and it is right.
        if remaining != held and self._return_paused(kept.ranks, remaining):
            self.withdraw(kept.ranks)
        self.pages.keep_only(kept.ranks, remaining)

    def left(self, ranks: Ranks, kept: frozenset[int]) -> None:
        """Free what the leader's tasks do not hold: it has left the group, by its last message."""
        remaining = self.table(ranks) & kept
        self.changed |= remaining != self.table(ranks)
        self.pages.keep_only(ranks, remaining)

    def forget_lost(self, present: dict[Rank, int], whole: Collection[Ranks | None]) -> None:
        """Leases that a lost process had a share in are worth nothing."""
        for ranks, members in list(self._members.items()):
            if ranks in whole or all(present.get(each) == inc for each, inc in members.items()):
                continue
            del self._members[ranks]
            self._lost.add(ranks)
            if self._return_paused(ranks, frozenset()):
                self.withdraw(ranks)
            self.pages.keep_only(ranks, ())

    def execute(self, step: Step) -> None:
        """Find the KV that the step relies on, and make what it makes."""
        width = step.binding.group.width
        slots = slots_of(width)
        lease = lease_table(self.pages, step.binding.group.ranks) if width > 1 else None
        for block, mark in step.found:
            index, slot = divmod(block, slots)
            there = self.memory.read(lease[index] if lease else index, slots, slot)
            check(there == mark, f"rank {self.rank} has {there} in {step.binding}, not {mark}")
        for block, mark in step.made:
            index, slot = divmod(block, slots)
            self.memory.write(lease[index] if lease else index, slots, slot, mark)

    # ------------------------------------------------------------------ moves

    def manifest(self, group: Ranks | None, formation: int) -> Manifest:
        """What this rank tells of itself before a move."""
        free = frozenset(self.pages.free_pages().tolist())
        groups = [tuple(map(Rank, ranks)) for ranks in self.pages.groups()]
        indices = {ranks: self.table(ranks) for ranks in groups}
        if group is None:
            return Manifest(self.rank, self.incarnation, (), -1, {}, free, indices)
        alone = len(group) == 1
        pages = {page: page for page in self._own} if alone else lease_table(self.pages, group)
        cargo = tuple(
            Cargo(
                task.header,
                task.attempt,
                task.length,
                tuple(task.tokens),
                tuple(task.blocks),
                task.computed,
            )
            for task in self.paused.get(group, {}).values()
        )
        pages = dict(pages)
        return Manifest(self.rank, self.incarnation, group, formation, pages, free, indices, cargo)

    def hand_over(self, group: Ranks, gone: dict[TaskId, int]) -> None:
        """Forget tasks that another leader goes on with."""
        tasks = self.paused.get(group, {})
        for name, attempt in gone.items():
            is_there = name in tasks and tasks[name].attempt == attempt
            check(is_there or group in self._lost, f"{name} is not what rank {self.rank} told")
            if is_there:
                del tasks[name]

    def take_pages(
        self,
        binding: Binding,
        indices: list[int],
        pages: list[int],
        members: dict[Rank, int | None],
    ) -> None:
        """Give these pages to a group that is to be joined."""
        ranks = binding.group.ranks
        self._members[ranks] = members
        numbers = np.array(pages, dtype=np.int64)
        if len(ranks) == 1:
            self.pages.own_these(numbers)
            self._own.update(pages)
            return
        self.pages.lease_these(ranks, np.array(indices, dtype=np.int64), numbers)
        self._joined[ranks] = binding.formation
        self._lost.discard(ranks)
        self._applied[ranks] = (binding.formation, -1)
        self._moved_in[ranks] = tuple(indices)

    def moved_in(self, ranks: Ranks) -> tuple[int, ...]:
        """The lease indices that a move filled for a group that has not begun."""
        return tuple(sorted(self._moved_in.get(ranks, ())))

    def not_joined(self) -> None:
        """What was prepared for a group is not joined now."""
        self._moved_in.clear()

    def adopt(self, ranks: Ranks, task: SimTask) -> None:
        """Hold a task that was moved here, until its group serves."""
        tasks = self.paused.setdefault(ranks, {})
        check(task.header.task not in tasks, f"{task.header.task} is moved to where it is")
        tasks[task.header.task] = task

    def give_up(self, ranks: Ranks, cause: ReturnCause) -> None:
        """Return all tasks of a group that is not bound."""
        for task in self.paused.get(ranks, {}).values():
            self.give_back(task, cause)
        self.paused[ranks] = {}

    def withdraw(self, ranks: Ranks) -> None:
        """Give up what the paused tasks of an unbound group do not need."""
        tasks = self.paused.setdefault(ranks, {})
        blocks = {block for task in tasks.values() for block in task.blocks}
        self.changed = True
        if len(ranks) == 1:
            self.pages.return_own(self._own - blocks)
            self._own &= blocks
            return
        slots = slots_of(len(ranks))
        indices = tuple(sorted({block // slots for block in blocks}))
        self._version += 1
        self.kept[ranks] = LeaseRetention(ranks, self._version, indices, self._joined[ranks])

    def held(self, migration: Ranks | None = None) -> dict[TaskId, tuple[SimTask, Ranks, bool]]:
        """All tasks, each with its group and whether it is paused; those that move are not."""
        held = {
            task_id: (task, ranks, ranks != migration)
            for ranks, tasks in self.paused.items()
            for task_id, task in tasks.items()
        }
        if self.engine is not None:
            ranks = self.engine.binding.group.ranks
            held |= {each: (task, ranks, False) for each, task in self.engine.tasks.items()}
        return held

    def place(self, place: Place) -> None:
        header = place.header
        task = SimTask(header, place.attempt, place.payload[0], list(place.generated_tokens))
        if self.engine is None or self.engine.binding != place.binding:
            self.give_back(task, ReturnCause.STALE)
            return
        check(header.task not in self.held(), f"rank {self.rank} already has {header.task}")
        self.engine.tasks[header.task] = task

    def take_out(self, task_id: TaskId, bound: Ranks, upto: int | None = None) -> SimTask | None:
        """Forget a task, up to an attempt, and free its memory."""
        found = self.held().get(task_id)
        if found is None or (upto is not None and found[0].attempt > upto):
            return None
        if self.engine is not None and (task := self.engine.remove(task_id)):
            return task
        for ranks, tasks in self.paused.items():
            if task_id in tasks:
                task = tasks.pop(task_id)
                if ranks != bound:
                    self.withdraw(ranks)
                return task
        return None

    def finish(self, task_id: TaskId) -> None:
        """The task's last token was pushed."""
        task = self.engine.remove(task_id) if self.engine else None
        assert task is not None
        self.ended.append(TaskEnded(task_id, task.attempt, EndCause.FINISHED, task.length))
        self.changed = True

    def give_back(self, task: SimTask, cause: ReturnCause) -> None:
        tokens = tuple(task.tokens)
        self.returned.append(TaskReturned(task.header.task, task.attempt, cause, tokens))
        self.changed = True

    def _return_paused(self, ranks: Ranks, indices: frozenset[int]) -> bool:
        """Return the paused tasks that need other lease indices than these."""
        slots = slots_of(len(ranks))
        tasks = self.paused.get(ranks, {})
        before = len(tasks)
        for task in list(tasks.values()):
            if not indices.issuperset(block // slots for block in task.blocks):
                del tasks[task.header.task]
                self.give_back(task, ReturnCause.RECOMPUTE)
        return len(tasks) < before

    def page_report(self) -> PageReport:
        counts = self.pages.counts()
        return PageReport(counts.total, counts.free, counts.owned, sum(counts.leased.values()))
