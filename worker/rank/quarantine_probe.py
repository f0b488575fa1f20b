"""A rank's part in the numerical guard: the results of its groups' probes.

The leader of a newly formed group runs the probe before the group's first step; followers obey it
like any step. It compares the result with that of the same mode at start-up, where every mode was
compared with dp. It probes after switches if configured, and when a group first serves with a
process that started later and has only computed alone. The coordinator decides what to do.
"""

import math
from collections.abc import Sequence

import structlog

from comm_pool.formations import PeerLostError
from comm_pool.layout import Group, Rank, StepMode, step_name
from comm_pool.mixed import Staged
from coordinator.protocol.messages.rank import Directive, Probed
from coordinator.protocol.terms import Binding
from worker.io.step_queue import Step
from worker.rank.engine import Engine, EngineMode, Plan
from worker.rank.runtime import GroupRuntime

log = structlog.get_logger()

ERROR_TOP_NATS = 1e6
"""Reported instead of infinity and NaN."""


def error_nats(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the mean absolute difference of log-probabilities from the reference.

    It is not the difference of the losses, in which errors cancel. Values that are missing or not
    finite count as ERROR_TOP_NATS.
    """
    if len(values) != len(reference) or not reference:
        return ERROR_TOP_NATS
    pairs = zip(values, reference, strict=True)
    error = sum(abs(value - wanted) for value, wanted in pairs) / len(reference)
    return min(error, ERROR_TOP_NATS) if math.isfinite(error) else ERROR_TOP_NATS


class QuarantineProbe:
    """The newest result of every mode that this rank leads; used by its main loop alone."""

    def __init__(self, engine: Engine, *, after_switch: bool) -> None:
        self._engine = engine
        self._after_switch = after_switch
        self._together = dict(engine.spec.together)
        self._proved: dict[Group, list[int | None]] = {}
        """The processes of a group when it was last probed."""
        self._results: dict[tuple[tuple[Rank, ...], str], Probed] = {}
        # The reference is dp, or tp where ranks hold parts of the weights.
        narrowest = min(engine.probed, key=lambda place: place[0])
        wanted = engine.probed[narrowest][0]
        for (width, step_mode), (values, took_us) in engine.probed.items():
            stages = step_mode.pp if isinstance(step_mode, Staged) else 1
            mode = engine.of_width(width, stages)
            # A rank that joins others has reference values of wide modes, but has not computed
            # them.
            if mode.is_leader and (width == 1 or not engine.spec.joins):
                self._note(mode, step_mode, 0, error_nats(values, wanted), took_us)

    @property
    def results(self) -> tuple[Probed, ...]:
        """The results for every report: the coordinator recognizes those it has seen."""
        return tuple(self._results.values())

    def is_due(self, binding: Binding, directive: Directive) -> bool:
        """Return whether to probe a group that this rank leads: if configured, or new to it."""
        group = binding.group
        known = self._proved.get(group, [self._together.get(rank) for rank in group.ranks])
        is_new = group.width > 1 and known != self._processes(group, directive)
        return is_new or self._after_switch

    def _processes(self, group: Group, directive: Directive) -> list[int | None]:
        present = dict(directive.members)
        return [present.get(rank) for rank in group.ranks]

    def run(self, runtime: GroupRuntime, binding: Binding, directive: Directive) -> None:
        """Probe a group that this rank leads, unless it is full of tasks.

        Raises `PeerLostError` if its formation is aborted meanwhile.
        """
        ranks, mode = binding.group.ranks, runtime.mode_of(binding.group)
        if mode.scheduler is None or mode.scheduler.is_full:
            log.warning("mode_not_probed", group=binding.group.name, reason="it is full of tasks")
            return

        def execute(plan: Plan) -> object:
            runtime.lead(Step(binding.formation, plan))
            return mode.execute(plan)

        for step_mode in binding.group.step_modes:
            started_ns = runtime.host.now_ns()
            values = self._engine.probe.run(execute, step_mode)
            took_us = (runtime.host.now_ns() - started_ns) // 1000
            if self._engine.communicators.is_aborted(ranks, binding.formation):
                raise PeerLostError(binding.formation)  # The mode is not at fault.
            wanted, _ = self._engine.probed[mode.width, step_mode]
            epoch = directive.stage.epoch
            self._note(mode, step_mode, epoch, error_nats(values, wanted), took_us)
        self._proved[binding.group] = self._processes(binding.group, directive)

    def _note(
        self, mode: EngineMode, step_mode: StepMode, epoch: int, error: float, took_us: int
    ) -> None:
        ranks = mode.ranks
        name = step_name(step_mode, mode.width)
        limit = self._engine.probe.error_max_nats
        result = Probed(ranks, name, epoch, error, limit, took_us)
        self._results[ranks, name] = result
        what = {"mode": name, "ranks": ranks, "epoch": epoch, "error_nats": error}
        if result.has_drifted:
            log.error("mode_drifts", **what, error_max_nats=limit)
            if mode.directory is not None:
                # Nobody continues from what this group has computed.
                mode.directory.give_up(self._engine.spec.rank)
        else:
            log.info("mode_probed", **what, took_ms=round(took_us / 1000, 1))
