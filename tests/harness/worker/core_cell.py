"""Ranks of a cell, each with its core and its loop, over engines in memory; a test gives the turns.

Nothing waits: an inbox without messages, and a step queue without any, end a wait at once. So one
thread drives all ranks, as long as each is asked for its part of a move after all have parked.
"""

import queue
from collections.abc import Callable, Sequence
from typing import Any

from comm_pool.layout import Rank
from comm_pool.mixed import Staged
from coordinator.protocol.messages.rank import (
    Directive,
    Drop,
    Grant,
    Place,
    RankDown,
    RankHello,
    Report,
)
from coordinator.protocol.messages.tasks import TaskReturned
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import (
    Binding,
    Carry,
    Phase,
    ReturnCause,
    Stage,
    Target,
    TaskId,
    Tier,
)
from tests.harness.coordinator.builders import directive, header, target
from tests.harness.worker.fake_engine import FakeCell
from tests.harness.worker.fake_rank import PROMPT, FakeRank
from tests.harness.worker.fake_scheduler import fake_payload
from worker.rank.core import RankCore
from worker.rank.events import Effect, Result
from worker.rank.loop import RankLoop

NOW_MS = 10**12
"""Time leases that answer reports of then last for as long as any test."""
ROUNDS_MAX = 20


class ImpatientInbox(queue.SimpleQueue[Any]):
    """An inbox for which nobody waits."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(block=False)


class RecordedLoop(RankLoop):
    """Notes what the core asks for."""

    effects: list[Effect]

    def _result_of(self, effect: Effect) -> Result:
        self.effects.append(effect)
        return super()._result_of(effect)


class CoreRank(FakeRank):
    """One rank with all that it decides with; it is its own session, too."""

    def __init__(
        self, cell: FakeCell, rank: int = 0, streams: dict[str, list[int]] | None = None
    ) -> None:
        super().__init__(cell, rank, streams)
        self.participant = SwitchParticipant(Rank(rank), 1)
        self.core = RankCore(self.engine, self.runtime, self.participant, 0.001)
        self.reports: list[Report] = []
        self.hellos: list[RankHello] = []
        self.inbox = ImpatientInbox()
        session: Any = self
        self.loop = RecordedLoop(self.core, session, self.inbox)
        self.loop.effects = []

    def publish(self, report: Report) -> None:
        """See `RankSession`."""
        self.reports.append(report)

    def hello(self, hello: RankHello) -> None:
        """See `RankSession`."""
        self.hellos.append(hello)

    def hear(self, *messages: RankDown) -> None:
        """Get messages of the coordinator."""
        for each in messages:
            self.inbox.put(each)

    def turn(self, times: int = 1) -> list[Effect]:
        """Make passes; return what the core asked for, in order."""
        self.loop.effects = []
        for _ in range(times):
            self.loop.turn()
        return self.loop.effects

    @property
    def returned(self) -> list[tuple[TaskId, ReturnCause]]:
        """The tasks that went back to the coordinator, reported or not."""
        reported: list[TaskReturned] = [each for one in self.reports for each in one.returned]
        return [(each.task, each.cause) for each in (*reported, *self.runtime.returned)]


def kinds(effects: Sequence[Effect]) -> list[str]:
    """Return what the core asked for, without reports."""
    names = [type(each).__name__ for each in effects]
    return [name for name in names if name != "SendReport"]


class CoreCell:
    """All ranks of a cell, and a coordinator that asks for what the test says."""

    def __init__(
        self,
        layout: str,
        world: int = 2,
        pages: int | Sequence[int] = 65,
        pipelines: Sequence[Staged] = (),
    ) -> None:
        self.world = world
        self.streams: dict[str, list[int]] = {}
        cell = FakeCell(world, pages=pages, pipelines=pipelines)
        self.ranks = [CoreRank(cell, rank, self.streams) for rank in range(world)]
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.epoch = 0
        self.moved = 0
        self.form(layout)

    # ------------------------------------------------------------------ what the coordinator does

    def wanted(self, phase: Phase, carry: Carry = Carry.RECOMPUTE, **given: Any) -> Directive:
        """Return the directive of a phase."""
        grants = [Grant(each.group.ranks, self._free(each)) for each in self.target.bindings]
        return directive(
            self.target,
            self.epoch,
            phase,
            **{
                "carry": carry,
                "answers_ms": NOW_MS,
                "moved": self.moved,
                "grants": grants if phase is Phase.SERVE else (),
                **given,
            },
        )

    def _free(self, binding: Binding) -> int:
        return min(self.ranks[rank].engine.pages.counts().free for rank in binding.group.ranks)

    def retarget(self, layout: str) -> Target:
        """Want another layout in an epoch of its own."""
        self.epoch += 1
        self.target = target(layout, self.epoch, world=self.world)
        return self.target

    def ask(self, message: Directive, *, ends: Callable[[], bool] | None = None) -> None:
        """Send a directive to all, and give turns until all have reported that they obey it."""
        for each in self.ranks:
            each.hear(message)
        self.go_on_until(ends or (lambda: self.all_at(message.stage)))

    def all_at(self, stage: Stage) -> bool:
        """Return whether all ranks have reported the stage, or a later one."""
        return all(each.reports and each.reports[-1].stage >= stage for each in self.ranks)

    def go_on_until(self, is_over: Callable[[], bool]) -> None:
        """Give turns to all ranks, and let their devices end what they have."""
        for _ in range(ROUNDS_MAX):
            if is_over():
                return
            self.turn()
            for each in self.ranks:
                each.engine.finish_steps()
        assert is_over(), [each.participant.stage for each in self.ranks]

    def turn(self, times: int = 1) -> None:
        """Give turns to all ranks."""
        for _ in range(times):
            for each in self.ranks:
                each.turn()

    def form(self, layout: str, carry: Carry = Carry.RECOMPUTE) -> None:
        """Serve in a layout; no KV moves."""
        self.retarget(layout)
        for phase in (Phase.PARK, Phase.SWAP, Phase.SERVE):
            self.ask(self.wanted(phase, carry))

    def move(self, layout: str) -> None:
        """Serve in a layout, to which all tasks migrate."""
        self.retarget(layout)
        self.ask(self.wanted(Phase.PARK, Carry.RESHARD), ends=self.all_parked)
        self.ask(self.wanted(Phase.MOVE, Carry.RESHARD))
        assert not any(each.reports[-1].has_failed for each in self.ranks)
        self.moved = self.epoch
        for phase in (Phase.SWAP, Phase.SERVE):
            self.ask(self.wanted(phase, Carry.RESHARD))

    def all_parked(self) -> bool:
        """Return whether all ranks have parked and have published their last tokens."""
        is_quiescing = any(each.runtime.migration.is_quiescing for each in self.ranks)
        return self.all_at(Stage(self.epoch, Phase.PARK)) and not is_quiescing

    # ------------------------------------------------------------------ tasks

    def leader_of(self, group: int) -> CoreRank:
        """Return the leader of a group of the target."""
        return self.ranks[self.target.bindings[group].group.leader]

    def place_task(
        self,
        name: str,
        group: int = 0,
        prompt: Sequence[int] = PROMPT,
        tokens: int = 30,
        tier: Tier = Tier.STANDARD,
    ) -> None:
        """Give a task to the leader of a group."""
        self.prompts[name] = tuple(prompt)
        given = header(name, prompt=len(prompt), max_tokens=tokens, tier=tier)
        payload = fake_payload(name, prompt, tokens)
        self.leader_of(group).hear(Place(given, 1, self.target.bindings[group], payload))


def drop(name: str, attempt: int = 1) -> Drop:
    """Return the command that ends a task."""
    return Drop(TaskId(name), attempt)
