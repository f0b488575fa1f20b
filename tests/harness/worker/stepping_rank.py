"""A rank that steps, over an engine in memory, and what its steps tell of."""

from typing import Any

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.rank import TokenBatch
from coordinator.protocol.messages.tasks import TaskEnded
from coordinator.protocol.terms import Binding
from tests.harness.coordinator.builders import header
from tests.harness.worker.fake_engine import FakeCell, FakeMode
from tests.harness.worker.fake_scheduler import FakeRequest, FakeScheduler, fake_payload
from worker.io.host import HOST, Host
from worker.io.step_queue import QueueMessage, Step
from worker.rank.led_tasks import LedTask, LedTasks
from worker.rank.step_log import StepLog
from worker.rank.steps import Steps

DP = Binding(Group((Rank(0),), Mode.DP), 3)
TP = Binding(Group((Rank(0), Rank(1)), Mode.TP), 4)


class Log(StepLog):
    """Knows how long steps take if the test says so, and notes when they began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.usual: float | None = None
        self.times: list[tuple[int, int]] = []
        self.device_s: list[float | None] = []

    def usual_s(self, _plan: Any, _width: int) -> float | None:
        return self.usual

    def ended(
        self,
        _plan: Any,
        _width: int,
        launched_ns: int,
        end_ns: int,
        floor_us: int = 0,
        device_s: float | None = None,
        busy: float = 1.0,
    ) -> None:
        self.times.append((launched_ns, end_ns))
        self.device_s.append(device_s)


class Stage:
    """Rank 0, which leads a dp and a tp2 group with a task each; launched steps wait."""

    def __init__(self, tokens: int = 9) -> None:
        """Each task ends after this number of tokens."""
        self.engine = FakeCell(2).engines[Rank(0)]
        self.engine.is_synchronous = False
        self.dp, self.tp = self.engine.of_width(1), self.engine.of_width(2)
        self.sent: list[QueueMessage] = []
        self.pushed: list[tuple[int, list[str]]] = []
        """(epoch, tasks) of each batch."""
        self.book = LedTasks()
        self.ended: list[TaskEnded] = []
        self.host: Host = HOST
        self.freed_groups: list[Group] = []
        self.lost_groups: list[Group] = []
        self.idle_groups: list[Group] = []
        """Whose steps computed nothing."""
        self.expected: list[int] = []
        """When the rank has said that its last step will end."""
        for mode, binding in ((self.dp, DP), (self.tp, TP)):
            self._fill(mode, binding, tokens)
        mailbox: Any = self.engine.mailboxes[Rank(0)]
        mailbox.expect_end = self.expected.append
        self.steps = Steps(self, 1, self)
        self.steps.log = self.log = Log()
        self.select(DP)

    def _fill(self, mode: FakeMode, binding: Binding, tokens: int) -> None:
        pool, name = self.engine.pages, f"{binding.group.mode} task"
        if mode.table is None:
            scheduler_of(mode).grant(pool.grant_own_pages(8))
        else:
            indices, pages = pool.lease_pages(mode.ranks, 8)
            mode.table.map(indices, pages)
            scheduler_of(mode).grant(indices)
        self.book.open(LedTask(header(name), 1, binding.group, 0))
        scheduler_of(mode).add_task(
            self.engine.intake.request(fake_payload(name, [1, 2, 3], tokens)), []
        )

    # ------------------------------------------------------------------ the owner of the steps

    def lead(self, message: QueueMessage, *, wait_s: float = 0.0) -> None:
        self.sent.append(message)

    def freed(self, group: Group) -> None:
        self.freed_groups.append(group)

    def return_outgrown(self, group: Group) -> None:
        self.idle_groups.append(group)

    def lose_last_step(self, group: Group) -> None:
        self.lost_groups.append(group)

    def push(self, _reply_to: str, batch: TokenBatch, outputs: Any) -> None:
        self.pushed.append((batch.epoch, [each.request_id for each in outputs]))

    # ------------------------------------------------------------------ what a test lets it do

    def select(self, binding: Binding) -> None:
        """Join a group."""
        self.selected: FakeMode | None = self.engine.select(binding.group.width, binding.formation)

    def step(self, binding: Binding, epoch: int) -> None:
        """Lead a step of the joined group."""
        assert self.selected is not None
        self.steps.lead(self.selected, binding, epoch)

    def follow(self, binding: Binding, *, is_held: bool = False) -> None:
        """Obey a step as a follower of the joined group would."""
        assert self.selected is not None
        plan = self.selected.plan_step(binding.group, lambda: None)
        self.steps.follow(self.selected, Step(binding.formation, plan, is_held), binding)

    def leave(self, binding: Binding = DP) -> None:
        """Leave the joined group."""
        self.steps.on_leave((binding, {Rank(0): 1}))
        self.selected = None

    def leave_in_mid_step(self) -> None:
        """Leave the dp group with a step in flight."""
        self.step(DP, 3)
        self.leave()

    def abort(self, *, closes: bool) -> None:
        """Let the pair lose a member; on CUDA it is then `closed`."""
        communicators = self.engine.communicators
        communicators.abort(TP.group.ranks, TP.formation)
        if closes:
            communicators.closed = (TP.group.ranks,)


def scheduler_of(mode: FakeMode) -> FakeScheduler:
    """Return the scheduler of a mode that the rank leads."""
    assert mode.scheduler is not None
    return mode.scheduler


def task_of(mode: FakeMode) -> FakeRequest:
    """Return the only task of a mode."""
    (task,) = scheduler_of(mode).requests.values()
    return task
