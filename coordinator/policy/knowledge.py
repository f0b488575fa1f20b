"""The policy's knowledge of its cell: which layouts exist, and what each would cost.

It comes from ranks' hellos, reports and switches, or from a file of step times. `controller` calls
this module.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from comm_pool.layout import Mode, Rank, step_name
from comm_pool.mixed import Staged
from coordinator.model.cost_model import (
    CHUNK_TOKENS,
    CostModel,
    GroupCost,
    StepFits,
    SwitchCost,
    floors_us,
)
from coordinator.model.records import Outcome, SwitchRecord
from coordinator.model.step_line import StepLine
from coordinator.policy.candidates import LayoutSpace
from coordinator.protocol.messages.rank import RankHello, Report
from coordinator.ranks.roster import Roster, kv_tokens

PAUSE_ASSUMED_S = 0.05
LINK_ASSUMED_BYTES_S = 50e9
"""Assumed until a switch was measured."""

NEWEST_SHARE = 0.3
"""Weight of the newest switch in the moving average."""

BYTES_MIN = 1 << 20
"""Migrations of fewer bytes say nothing about the links."""


class Knowledge:
    """The known layouts and costs."""

    __slots__ = (
        "_fits",
        "_pause_s",
        "_space",
        "_space_of",
        "_speed",
        "_step_times",
        "_widths",
        "version",
    )

    def __init__(self, widths: Collection[int], step_times: Mapping[str, StepLine]) -> None:
        self._widths = sorted({1, *widths})
        self._step_times = step_times
        self._fits = StepFits()
        self._pause_s = PAUSE_ASSUMED_S
        self._speed = LINK_ASSUMED_BYTES_S
        self._space: LayoutSpace | None = None
        self._space_of: object = None
        self.version = 0
        """Grows when the set of layouts changes."""

    def on_hello(self, hello: RankHello) -> None:
        """Add a rank's start-up measurements."""
        memory = dict(hello.memory)
        tokens = max(1, hello.pages_total * hello.tokens_per_slot)
        # About: where only some layers are in parts, the others count more than once.
        weights = memory.get("weights", 0) * hello.parts
        share = memory.get("kv", 0) / tokens / weights if weights else 0.0
        self._fits.add_curves(hello.step_times, share)

    def on_report(self, report: Report) -> None:
        """Add a leader's served steps."""
        if report.served:
            self._fits.add_steps(report.served)

    def on_switch(self, record: SwitchRecord) -> None:
        """Add the times of a switch."""
        if record.outcome is not Outcome.SERVED or record.stall_ms is None:
            return
        pause_s = max(0.0, record.stall_ms - record.reshard_ms) / 1000
        self._pause_s += NEWEST_SHARE * (pause_s - self._pause_s)
        if record.reshard_bytes > BYTES_MIN and record.reshard_ms:
            speed = record.reshard_bytes / (record.reshard_ms / 1000)
            self._speed += NEWEST_SHARE * (speed - self._speed)

    def space(self, roster: Roster, alive: Collection[Rank]) -> LayoutSpace:
        """Return the layouts of the ranks that are alive; the same object until they change."""
        modes, pipelines = self.modes(roster, alive), self.pipelines(roster, alive)
        absent = [Rank(rank) for rank in range(roster.world) if rank not in alive]
        alone = [rank for rank in alive if roster.is_degraded(rank)]
        made_of = tuple(modes.items()), pipelines, tuple(absent), tuple(alone)
        if self._space is None or made_of != self._space_of:
            self._space = LayoutSpace(
                roster.world, modes, absent=absent, alone=alone, pipelines=pipelines
            )
            self._space_of = made_of
            self.version += 1
        return self._space

    def modes(self, roster: Roster, alive: Collection[Rank]) -> dict[int, Mode]:
        """Return the serving mode of each width: shift if sp is faster than tp for some steps."""
        found = {1: Mode.DP}
        for width in self._widths[1:]:
            if any(not roster.supports(r, width) for r in alive if not roster.is_degraded(r)):
                continue
            out = roster.guard.modes_out()
            if step_name(Mode.TP, width) in out:
                continue
            shifts = not self._step_times and all(_shifts(roster, rank, width) for rank in alive)
            shifts = shifts and step_name(Mode.SP, width) not in out
            found[width] = Mode.SHIFT if shifts else Mode.TP
        return found

    def pipelines(self, roster: Roster, alive: Collection[Rank]) -> tuple[Staged, ...]:
        """Return the pipeline groups that all these ranks have prepared and may use."""
        able = [rank for rank in alive if not roster.is_degraded(rank)]
        out = roster.guard.modes_out()
        return tuple(
            staged
            for width in self._widths[1:]
            for staged in self._stagings(width)
            if str(staged) not in out
            and all(roster.supports(rank, width) for rank in able)
            and all(roster.can_compute(rank, width, staged) for rank in able)
        )

    def costs(self, roster: Roster, alive: Collection[Rank]) -> CostModel:
        """Return what groups of these ranks cost; groups with unknown step times are missing."""
        hellos = [roster[rank].hello for rank in alive if rank in roster]
        if not hellos:
            return CostModel({})
        groups = {}
        for width, mode in self.modes(roster, alive).items():
            # An operator may have chosen a mode that the policy would not.
            for each in (mode,) if width == 1 else (Mode.TP, Mode.SP, Mode.SHIFT):
                if (cost := self._group(each, width, hellos)) is not None:
                    groups[f"{each}{width}"] = cost
            for staged in self._stagings(width):
                if (cost := self._pipeline(staged, hellos)) is not None:
                    groups[str(staged)] = cost
        kv_bytes = dict(hellos[0].memory).get("kv", 0)
        per_token = kv_bytes / max(1, hellos[0].pages_total * hellos[0].tokens_per_slot)
        return CostModel(groups, SwitchCost(self._pause_s, per_token, self._speed))

    def _stagings(self, width: int) -> list[Staged]:
        """Return the pipeline groups of a width that there may be; stages are groups, too."""
        return [Staged(width // tp, tp) for tp in self._widths if tp < width]

    def _pipeline(self, staged: Staged, hellos: list[RankHello]) -> GroupCost | None:
        line = self._line(str(staged))
        if line is None:
            return None
        # It is that of one stage; see `GroupCost`.
        line = replace(line, base_s=staged.pp * line.base_s)
        return GroupCost(
            decode=line,
            prefill=line,
            capacity_tokens=kv_tokens(hellos, staged.width, staged.pp),
            tasks_max=hellos[0].max_tasks,
            chunk_tokens=staged.pp * (hellos[0].tokens_per_step_max or CHUNK_TOKENS),
            stages=staged.pp,
        )

    def _group(self, mode: Mode, width: int, hellos: list[RankHello]) -> GroupCost | None:
        small, large = (Mode.TP, Mode.SP) if mode is Mode.SHIFT else (mode, mode)
        decode = self._line(step_name(small, width))
        prefill = self._line(step_name(large, width)) if mode is Mode.SHIFT else decode
        if decode is None or prefill is None:
            return None
        # By the ranks that are alive: one that restarts may have other whole layers than before.
        floors = floors_us((times for hello in hellos for times in hello.step_times), width)
        return GroupCost(
            decode=decode,
            prefill=prefill,
            capacity_tokens=kv_tokens(hellos, width),
            tasks_max=hellos[0].max_tasks,
            chunk_tokens=hellos[0].tokens_per_step_max or CHUNK_TOKENS,
            floor_s=floors.get(small, 0) * 1e-6,
            prefill_floor_s=floors.get(large, 0) * 1e-6,
        )

    def _line(self, name: str) -> StepLine | None:
        return self._step_times.get(name) if self._step_times else self._fits.line(name)


def _shifts(roster: Roster, rank: Rank, width: int) -> bool:
    return any(
        times.width == width and times.sp_from_tokens is not None
        for times in roster[rank].hello.step_times
    )
