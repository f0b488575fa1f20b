"""A rank that steps, on an engine that computes nothing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.messages.tasks import TaskEnded
from coordinator.protocol.terms import Binding
from tests.harness.coordinator.builders import header
from worker.io.step_queue import Step
from worker.rank.led_tasks import LedTask, LedTasks
from worker.rank.step_times import StepCurve, StepTimes
from worker.rank.steps import Steps

DP = Binding(Group((Rank(0),), Mode.DP), 3)
TP = Binding(Group((Rank(0), Rank(1)), Mode.TP), 4)


class Result:
    """vLLM's asynchronous output: there when the test says so."""

    def __init__(self) -> None:
        self.is_there = False
        self.taken = 0
        self.copy_event = self

    def query(self) -> bool:
        return self.is_there

    def get_output(self) -> str:
        self.is_there = True
        self.taken += 1
        return "tokens"


class Scheduler:
    """One task, which ends when `ends` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends = False
        self.frees_after_step = False
        self.busy = True
        self.is_empty = False
        """The next step only tells which tasks have ended."""
        self.events: list[str] = []

    def has_requests(self) -> bool:
        return self.busy


class PreparedMode:
    def __init__(self, name: str, width: int) -> None:
        self.width = width
        self.times = StepTimes(width, {Mode.DP: StepCurve(((1, 2_000),))})
        self.scheduler = Scheduler(name)
        self.results: list[Result] = []
        self.computed = 0

    def plan_step(self, group: Group, _settle: Any) -> Any:
        scheduler = self.scheduler
        scheduler.events.append("plan")
        return SimpleNamespace(
            tokens=0 if scheduler.is_empty else 1,
            is_empty=scheduler.is_empty,
            reads_prompts=False,
            mode=group.mode,
            context=0,
        )

    def finish_step(self, _plan: Any, result: str) -> list[Any]:
        assert result == "tokens"
        scheduler = self.scheduler
        scheduler.events.append("finish")
        return [
            SimpleNamespace(request_id=scheduler.name, new_token_ids=[7], finished=scheduler.ends)
        ]

    def execute(self, _plan: Any) -> Result:
        self.results.append(Result())
        return self.results[-1]

    def ready(self, _plan: Any) -> Callable[[], str]:
        return self.compute

    def compute(self) -> str:
        """A step at once, as on CPU."""
        self.computed += 1
        return "tokens"


class Stage:
    """A rank that leads a dp group and a tp2 group."""

    def __init__(self) -> None:
        self.dp, self.tp = PreparedMode("dp task", 1), PreparedMode("tp task", 2)
        self.selected: PreparedMode | None = self.dp
        self.device_done = False
        self.sent: list[Any] = []
        self.pushed: list[tuple[int, list[str]]] = []
        self.book = LedTasks()
        self.ended: list[TaskEnded] = []
        self.freed_groups: list[Group] = []
        self.lost_groups: list[Group] = []
        self.engine = SimpleNamespace(
            spec=SimpleNamespace(rank=Rank(0)),
            done=lambda: lambda: self.device_done,
            is_synchronous=True,
            mailboxes={Rank(0): self},
            communicators=self,
        )
        self.aborted: set[tuple[tuple[Rank, ...], int]] = set()
        self.closed: tuple[tuple[Rank, ...], ...] = ()
        for name, binding in (("dp task", DP), ("tp task", TP)):
            self.book.open(LedTask(header(name), 1, binding.group, 0))
        self.steps = Steps(cast(Any, self), 1, cast(Any, self))
        self.usual_s: float | None = None
        self.expected: list[int] = []
        log = SimpleNamespace(ended=lambda *_: None, usual_s=lambda *_: self.usual_s)
        self.steps.log = cast(Any, log)

    def is_aborted(self, ranks: tuple[Rank, ...], formation: int) -> bool:
        return (ranks, formation) in self.aborted

    def lead(self, message: Any) -> None:
        self.sent.append(message)

    def expect_end(self, at_ns: int) -> None:
        self.expected.append(at_ns)

    def freed(self, group: Group) -> None:
        self.freed_groups.append(group)

    def lose_last_step(self, group: Group) -> None:
        self.lost_groups.append(group)

    def push(self, _reply_to: str, header: Any, batch: list[Any]) -> None:
        self.pushed.append((header.epoch, [each.request_id for each in batch]))

    def step(self, mode: PreparedMode, binding: Binding, epoch: int) -> None:
        self.steps.lead(cast(Any, mode), binding, epoch)

    def leave_in_mid_step(self) -> None:
        self.step(self.dp, DP, 3)
        self.leave()

    def leave(self) -> None:
        self.steps.on_leave((DP, {Rank(0): 1}))
        self.selected = None


def follow(stage: Stage, mode: PreparedMode, binding: Binding, *, is_held: bool = False) -> None:
    step = Step(binding.formation, mode.plan_step(binding.group, None), is_held)
    stage.steps.follow(cast(Any, mode), step, binding)
