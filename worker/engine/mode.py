"""vLLM adapter: the prepared objects of one group width on this rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from vllm.config import VllmConfig

from comm_pool.layout import Group, Mode, Rank, StepMode
from comm_pool.pool import Communicator
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.slot_table import SlotTable
from kvadaptor.translate import translate
from worker.engine.config import ModeKey
from worker.engine.counters import LoanCounts
from worker.engine.host_kv import HostTier
from worker.engine.lost_kv import LostKV
from worker.engine.scheduling.block_copies import BlockCopies
from worker.engine.scheduling.inherited_blocks import inherit_blocks
from worker.engine.scheduling.scheduler import ModeScheduler
from worker.engine.scheduling.step_plan import StepPlan
from worker.io.step_queue import BroadcastQueue
from worker.rank.engine import NoRoomError, TaskOutput
from worker.rank.step_times import StepTimes

log = structlog.get_logger()


def _no_copy() -> None:
    """Copy nothing."""


_NO_COPIES = _no_copy, _no_copy


@dataclass(slots=True)
class PreparedMode:
    """The prepared objects of one width on this rank; `scheduler` only if this rank leads.

    `key` names the mode that runner and configuration were made for: dp, or tp for wide groups.
    """

    key: ModeKey
    communicator: Communicator
    runner: Any
    table: SlotTable | None
    scheduler: ModeScheduler | None
    config: VllmConfig
    times: StepTimes
    """Step times; empty until the width is warm."""
    loans: LoanCounts | None = None
    """What the rank borrows in its steps; None if nothing."""
    host: HostTier | None = None
    """The host pages; None if the cell has none."""
    lost: LostKV | None = None
    """The KV of lost groups; None where it ends with its processes."""
    directory: GroupDirectory | None = None
    """The block directory of its group; None likewise."""
    _from_tokens: dict[StepMode, int | None] = field(default_factory=dict)

    def calibrate(self, times: StepTimes) -> None:
        """Choose modes by these times from now on."""
        self.times = times
        shared: tuple[StepMode, ...] = (Mode.SP, *times.mixed)
        self._from_tokens = {mode: times.from_tokens(mode) for mode in shared}

    @property
    def width(self) -> int:
        """The members of its groups."""
        return self.key.width

    @property
    def stages(self) -> int:
        """The pipeline stages of its groups; 1 if they are no pipeline groups."""
        return self.key.stages

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The members of this rank's group of that width."""
        return self.communicator.ranks

    @property
    def queue(self) -> BroadcastQueue:
        """The group's step queue; wide groups have one."""
        queue: BroadcastQueue = self.communicator.group.mq_broadcaster
        return queue

    @property
    def is_leader(self) -> bool:
        """Whether this rank schedules for its group of this width."""
        return self.communicator.rank_in_group == 0

    def mode_of_step(self, group: Group, tokens: int) -> StepMode:
        """Return the mode in which a group of this width computes a step of `tokens` tokens."""
        shared = group.mixed or Mode.SP
        if self.stages > 1:
            return group.step_modes[0]
        if group.mode is not Mode.SHIFT:
            return shared if group.mode is Mode.SP else group.mode
        start = self._from_tokens.get(shared)
        return shared if start is not None and tokens >= start else Mode.TP

    def pace_tokens(self, group: Group) -> int | None:
        """Return how large prompts make the steps of a group beside decodes; None is no limit.

        A shift group computes small steps in tp, which borrows nothing.
        """
        if group.mode is Mode.SHIFT:
            return None
        return self.times.pace_tokens.get(group.mixed or group.mode)

    def plan_step(self, group: Group, settle: Callable[[], None]) -> StepPlan:
        """Schedule the group's next step, in the mode that suits its size; see `ModeScheduler`."""
        assert self.scheduler is not None
        plan = self.scheduler.plan_step(settle, self.pace_tokens(group), self.stages)
        plan.mode = self.mode_of_step(group, plan.tokens)
        return plan

    def execute(self, plan: StepPlan) -> Any:
        """Run one step on this rank; the width must be selected.

        On CUDA the result is in flight: `get_output` waits for it. Raises `NoRoomError`.
        """
        return self.ready(plan)()

    def ready(self, plan: StepPlan) -> Callable[[], Any]:
        """Return a call that runs the step later, if the width is still selected.

        Its KV stays where it is now.
        """
        output = plan.output if self.table is None else translate(plan.output, self.table)
        copies = plan.output.kv_connector_metadata
        load, store = _NO_COPIES
        load_lost = _no_copy
        if isinstance(copies, BlockCopies):
            member = self.communicator.rank_in_group
            if self.host is not None:
                split = self.key.split
                load, store = self.host.copies(copies, self.ranks, split, member, self.table)
            if copies.lost_blocks:
                assert self.lost is not None
                load_lost = self.lost.loader(copies, self.key.split, member, self.table)

        def run() -> Any:
            load()
            load_lost()
            self.runner.use(plan.mode, reads_prompts=plan.reads_prompts)
            try:
                result = self.runner.run(output, plan.grammar, plan.resuming, plan.known)
            except torch.OutOfMemoryError as error:
                if self.loans is not None:
                    self.loans.abort_step()
                raise NoRoomError(str(error)) from None
            if self.loans is not None and not plan.is_empty:
                self.loans.count(plan.mode)
            store()
            if self.host is not None:
                self.host.look()
            return result

        return run

    def inherit(self) -> None:
        """Let tasks hit what this rank alone has from the process before it; see `EngineMode`."""
        keys = self.directory.take_inherited() if self.directory is not None else {}
        if keys and self.scheduler is not None:
            blocks = inherit_blocks(self.scheduler, keys)
            log.info("blocks_inherited", group=str(self.key), blocks=len(blocks))

    def finish_step(self, plan: StepPlan, result: Any) -> Sequence[TaskOutput]:
        """Update all tasks of a step; return the outputs for their clients.

        Raises `LenderLostError` if the step may have read the memory of a process that has ended.
        """
        assert self.scheduler is not None
        if self.loans is not None:
            self.loans.check(plan.mode)
        outputs: Sequence[TaskOutput] = self.scheduler.finish_step(plan, result)
        if self.host is not None:
            self.host.step_is_over()
        return outputs

    def forget_steps(self) -> None:
        """Drop the runner's state of the group's tasks: its last step never ends."""
        self.runner.forget_tasks()
        if self.scheduler is not None:
            self.scheduler.forget_steps()
