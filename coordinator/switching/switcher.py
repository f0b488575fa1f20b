"""The coordinator's side of the switch protocol: from one layout to the next, despite failures.

Invariant: the epoch only grows, a stage is left only when every rank of the target has acknowledged
it or serves in a group that the switch leaves alone, and a rank is cut out only when its time lease
is over or its process has ended. There is no abort: a change of plan is a new target with a higher
epoch, at any time. The core calls this module and sends `directive_for` to each rank as the answer
to its reports and whenever `version` changes.
"""

from collections.abc import Collection, Mapping

from comm_pool.layout import Layout, Rank, format_layout
from coordinator.model.records import Decision, SwitchLog, SwitchRecord
from coordinator.model.settings import SwitchSettings
from coordinator.protocol.messages.rank import Directive, RankHello, Report
from coordinator.protocol.messages.tasks import Adopted
from coordinator.protocol.switch_rules import MOVES
from coordinator.protocol.terms import (
    PLAN_AFTER_WAIT,
    Binding,
    Carry,
    Phase,
    Stage,
    Target,
    TaskId,
)
from coordinator.ranks.outliers import Ejection, OutlierDetector
from coordinator.ranks.recovery import Resumed, resume
from coordinator.ranks.roster import Arrival, Roster
from coordinator.switching.move_commits import MoveCommits
from coordinator.switching.page_grants import PageGrants
from coordinator.switching.precopy import PreCopy
from coordinator.switching.retained_leases import RetainedLeases
from coordinator.switching.targets import (
    bind,
    have_joined,
    is_foreign,
    staying,
    void,
    who_is_late,
)

NOTHING = Stage(0, Phase.PARK)
"""Below every real stage: a directive with it renews leases and asks for nothing."""

STALL_SHARE = 4
"""A coordinator that did not listen for 1/4 of `lost_after_ms` does not count it as silence."""

RANKS = "ranks"
"""Cause of a decision that nobody made: ranks came, or were lost."""


class Switcher:
    """The wanted state of all ranks, and their progress towards it.

    It starts recovering: until every rank has reported, or a time limit passes, it only renews
    leases, so that ranks that served under an earlier coordinator continue undisturbed.
    """

    __slots__ = (
        "_changes",
        "_decide_ms",
        "_drain_until_ms",
        "_grants",
        "_health",
        "_last_tick_ms",
        "_leases",
        "_moves",
        "_precopy",
        "_recover_ms",
        "_recover_until_ms",
        "_roster",
        "_settings",
        "_stay",
        "alive",
        "carry",
        "log",
        "recovering",
        "served_layout",
        "stage",
        "target",
        "version",
    )

    def __init__(self, settings: SwitchSettings, roster: Roster, now_ms: int) -> None:
        self._settings = settings
        self._roster = roster
        self._grants = PageGrants(roster)
        self._health = OutlierDetector(settings.health, roster.world)
        self._leases = RetainedLeases()
        self._moves = MoveCommits()
        self._precopy = PreCopy(roster)
        self._drain_until_ms = 0
        self._last_tick_ms = now_ms
        self._recover_ms = min(settings.lost_after_ms, settings.recover_ms)
        """How long to wait for missing ranks after the first hello; 0 once that wait has begun."""
        self._recover_until_ms = now_ms + self._recover_ms
        self._decide_ms = 0
        self._changes: list[Decision] = []
        self.log = SwitchLog(settings.records_max)
        self.stage = NOTHING
        self.target = Target(())
        self.alive: tuple[Rank, ...] = ()
        """The ranks of the target: all that are not cut out."""
        self._stay: frozenset[Binding] = frozenset()
        """The groups that this switch leaves alone, so it does not wait for their ranks."""
        self.carry = settings.default_carry
        self.recovering = True
        self.served_layout = Layout(())
        """The last layout that every rank served, or that an earlier coordinator had as its
        target."""
        self.version = 0
        """Grows whenever directives change."""

    @property
    def epoch(self) -> int:
        """The number of the target."""
        return self.stage.epoch

    @property
    def is_serving(self) -> bool:
        """Every rank of the target has acknowledged SERVE, or serves on in a group that stays."""
        is_last = self.stage.phase is Phase.SERVE and bool(self.target.bindings)
        return is_last and self._all_acknowledged()

    def is_granted(self, binding: Binding) -> bool:
        """Return whether the group is in the target and reached SERVE, in any epoch."""
        return binding in self._grants

    def on_hello(self, hello: RankHello, arrival: Arrival, now_ms: int) -> None:
        """Take in a rank that is new, or is back as a new process."""
        if self.recovering:
            if self._recover_ms:
                # Ranks of one launcher start together, perhaps long after this process.
                self._recover_until_ms = max(self._recover_until_ms, now_ms + self._recover_ms)
                self._recover_ms = 0
            self._moves.on_hello(hello)
        if self.recovering or arrival in (Arrival.STALE, Arrival.AGAIN):
            return
        rank = hello.rank
        layout = self.target.layout
        self._health.renewed(rank)
        if arrival is Arrival.RESTARTED and rank in self.alive:
            self._leases.drop(rank, self.epoch)
            layout = layout.without((rank,)).plus((rank,))
            self._change(layout, f"rank {rank} restarted", now_ms, fresh=(rank,))
        else:
            self._leases.drop(rank, self.epoch)
            self._change(layout.plus((rank,)), f"rank {rank} joined", now_ms)

    def on_report(self, report: Report, now_ms: int) -> tuple[Rank, ...]:
        """Handle a report that the roster counted; return its rank if it is cut out."""
        if self._leases.on_report(report.rank, report.retentions):
            self.version += 1
        if self.recovering:
            self._moves.on_report(report)
            return ()
        rank = report.rank
        cut_out = self._leave_out(self._health.on_report(report, self.alive, now_ms), now_ms)
        newest = self._roster.report_of(rank)
        if newest is not None and is_foreign(newest, self.target, self.epoch):
            # An earlier coordinator got further than the reports at recovery showed.
            self._change(self.target.layout.plus((rank,)), "epoch overtaken", now_ms)
        elif rank not in self.alive and not (self.alive and self._roster.is_out(rank, now_ms)):
            self._change(self.target.layout.plus((rank,)), f"rank {rank} is back", now_ms)
        self._advance(now_ms)
        self._look_at_precopy(now_ms)
        return cut_out

    def on_tick(self, now_ms: int) -> tuple[Rank, ...]:
        """Advance time; return the ranks that are cut out: silent, late in a switch, or slow.

        Ranks that have said hello, but nothing else by the end of recovery, are silent.
        """
        self._forgive_own_stall(now_ms)
        if self.recovering:
            return self._try_resume(now_ms)
        limit_ms = self._settings.lost_after_ms
        silent = [each for each in self.alive if self._roster.silent_since(each, now_ms) > limit_ms]
        self.lose(silent, now_ms)
        if now_ms >= self._drain_until_ms:
            self.end_wait(now_ms)
        self._advance(now_ms)
        self._look_at_precopy(now_ms)
        return (*silent, *self._take_out(now_ms))

    @property
    def is_draining(self) -> bool:
        """Groups finish their tasks before they change."""
        return self.stage.phase is Phase.PARK and self.carry is Carry.DRAIN

    @property
    def is_speculating(self) -> bool:
        """Groups that are to change serve until their old tasks have ended."""
        return self.stage.phase is Phase.PARK and self.carry is Carry.SPECULATE

    @property
    def is_precopying(self) -> bool:
        """Groups that are to change serve until full blocks of their tasks are copied."""
        return self.stage.phase is Phase.PARK and self._precopy.order is not None

    def end_wait(self, now_ms: int) -> None:
        """If the switch in progress waits for tasks to end, stop waiting."""
        if self.stage.phase is Phase.PARK:
            was_speculating = self.is_speculating
            self._set_carry(PLAN_AFTER_WAIT.get(self.carry, self.carry), now_ms)
            if was_speculating:
                self._start_precopy(now_ms)

    def _start_precopy(self, now_ms: int) -> None:
        """Let ranks copy before they leave their groups, if the plan moves KV."""
        if self._settings.precopy and self.carry is Carry.RESHARD:
            self._precopy.start(self.epoch, self.target, self.alive, now_ms)

    def _look_at_precopy(self, now_ms: int) -> None:
        if self.is_precopying and self._precopy.look(now_ms):
            self.version += 1
            copied = self._precopy
            self.log.precopied(self.epoch, copied.rounds, copied.bytes, copied.took_ms(now_ms))

    def lose(self, ranks: Collection[Rank], now_ms: int, cause: str = "lost") -> None:
        """Continue without these ranks at once, for a cause such as a process's end."""
        lost = [rank for rank in ranks if rank in self.alive and not self.recovering]
        for rank in lost:
            self._leases.drop(rank, self.epoch)
        if names := ", ".join(map(str, lost)):
            self._change(self.target.layout.without(lost), f"rank {names} {cause}", now_ms)

    def retarget(
        self,
        layout: Layout,
        carry: Carry,
        cause: str,
        now_ms: int,
        *,
        decide_ms: int = 0,
        fresh: Collection[Rank] = (),
        reserved: Mapping[Rank, int] | None = None,
    ) -> None:
        """Switch to another layout; allowed at any time.

        Groups that stay keep their formation and serve on, except those with a `fresh` rank. If the
        layout is the target already, only the carry plan of a switch in progress changes. Only
        groups that serve can speculate: during another switch the tasks migrate at once.
        """
        if carry is Carry.SPECULATE and not self.is_serving:
            carry = PLAN_AFTER_WAIT[carry]
        if layout == self.target.layout and not fresh and self.epoch:
            if self.stage.phase is not Phase.PARK:
                return
            if carry not in MOVES or self.carry in MOVES:
                self._set_carry(carry, now_ms)
                return
            # Ranks may have joined their next groups since they reported, and a mover waits for the
            # manifests of all others: only reports of a new epoch show who is parked.
        self._decide_ms = decide_ms
        was_serving = self.is_serving
        self._set_carry(carry, now_ms)
        self._set_target(layout, cause, now_ms, fresh, reserved)
        if was_serving:
            self._start_precopy(now_ms)

    def directive_for(self, rank: Rank) -> Directive | None:
        """Return the rank's current directive; None if it has not reported or has ended."""
        report = self._roster.report_of(rank)
        if report is None or self._roster[rank].has_exited:
            return None
        stage = NOTHING if self.recovering else self.stage
        return Directive(
            incarnation=report.incarnation,
            answers_ms=report.sent_at_ms,
            lease_ms=self._settings.lease_ms,
            stage=stage,
            target=self.target,
            carry=self.carry,
            members=tuple((each, self._roster[each].incarnation) for each in self.alive),
            ended=self._roster.exited(),
            abandoned_formation=0 if self.recovering else void(report, self.target, self._roster),
            grants=self._grants.of(self.target.bindings) if stage.phase is Phase.SERVE else (),
            retentions=self._leases.for_rank(rank),
            movers=self._moves.movers if stage.phase is Phase.MOVE else (),
            moved=self._moves.committed(report.stage.epoch),
            precopy=self._precopy.order if self.is_precopying else None,
            drafted=self._precopy.drafted if stage.phase is Phase.PARK else 0,
        )

    def has_moved(self, epoch: int) -> bool:
        """Return whether the migration of this epoch was committed."""
        return self._moves.committed(epoch) == epoch > 0

    def take_adopted(self) -> list[tuple[Rank, Adopted]]:
        """Return (new leader, task) for tasks that changed their leader since the last call."""
        return self._moves.take_adopted()

    def take_without_heir(self) -> list[tuple[Rank, TaskId]]:
        """Return (old leader, task) for tasks that a committed migration gave to ranks unheard."""
        return self._moves.take_without_heir()

    def starved(self) -> tuple[Rank, ...]:
        """Return the leaders of groups that would gain much by forming anew."""
        return self._grants.starved() if self.is_serving else ()

    def blocks_to_gain(self, binding: Binding) -> int:
        """Return how many blocks a group that was granted its pages would gain by forming anew."""
        return self._grants.blocks_to_gain(binding)

    def integrity(self) -> None:
        """Assert that ranks and grants agree with the target."""
        assert self.alive == self.target.layout.ranks, "alive ranks differ from the target's."
        granted = self._grants.all_of()
        assert granted <= set(self.target.bindings), "a group outside the target has a grant."
        if self.stage.phase is Phase.SERVE:
            assert granted == set(self.target.bindings), "a serving group has no grant."
        assert self.recovering or self.epoch > 0, "no target after recovery."
        is_wanted = self.stage.phase is Phase.PARK and self.carry is Carry.RESHARD
        assert is_wanted or self._precopy.order is None, "early copies for no migration."

    def _change(
        self, layout: Layout, cause: str, now_ms: int, fresh: Collection[Rank] = ()
    ) -> None:
        """Retarget although no one asked for it; a switch in progress keeps its carry plan.

        Ranks that come or go end a speculation: some are parked by then.
        """
        plan = self._settings.default_carry if self.stage.phase is Phase.SERVE else self.carry
        self._set_carry(Carry.RESHARD if plan is Carry.SPECULATE else plan, now_ms)
        self._set_target(layout, cause, now_ms, fresh)
        choice = format_layout(layout, self._roster.world)
        self._changes.append(Decision(now_ms, choice, self.carry, cause, cause=RANKS))

    def take_changes(self) -> list[Decision]:
        """Return the changes since the last call that ranks brought about which came or went."""
        changes, self._changes = self._changes, []
        return changes

    def _set_target(
        self,
        layout: Layout,
        cause: str,
        now_ms: int,
        fresh: Collection[Rank],
        reserved: Mapping[Rank, int] | None = None,
    ) -> None:
        reports = [report for rank in self._roster if (report := self._roster.report_of(rank))]
        highest = max([self.epoch, *(report.stage.epoch for report in reports)])
        previous = self.target
        fresh = {*fresh, *self._half_formed()}
        self.stage = Stage(highest + 1, Phase.PARK)
        self.target = bind(layout, previous, self.stage.epoch, fresh, reserved or {})
        self._stay = staying(previous, self.target, self._roster, self._stay)
        self.alive = layout.ranks
        self._precopy.stop()
        for binding in previous.bindings:
            if binding not in self.target.bindings:
                self._grants.drop(binding)
                self._leases.unbind(binding)
        self.version += 1
        self._start_record(cause, now_ms)

    def _half_formed(self) -> list[Rank]:
        """Ranks that a committed migration prepared for groups that may not all have joined yet."""
        if not self.has_moved(self.epoch):
            return []
        waiting = [each for each in self.target.bindings if not have_joined(each, self._roster)]
        return [rank for binding in waiting for rank in binding.group.ranks]

    def _start_record(self, cause: str, now_ms: int) -> None:
        world = self._roster.world
        self.log.start(
            SwitchRecord(
                epoch=self.epoch,
                from_layout=format_layout(self.served_layout, world),
                to_layout=format_layout(self.target.layout, world),
                cause=cause,
                carry=self.carry,
                started_ms=now_ms,
                decide_ms=self._decide_ms,
            )
        )
        self._decide_ms = 0

    def _set_carry(self, carry: Carry, now_ms: int) -> None:
        self._drain_until_ms = now_ms + self._settings.drain_limit_ms
        if carry is not self.carry:
            self._precopy.stop()
            self.carry = carry
            self.version += 1

    def _take_out(self, now_ms: int) -> tuple[Rank, ...]:
        """Cut out ranks that hold the others up, for a while."""
        if self.is_serving:
            hellos = (self._roster[rank].hello for rank in self.alive if rank in self._roster)
            ejections = self._health.slow(self.alive, now_ms, hellos)
        else:
            waits = self.is_draining or self.is_speculating or self.is_precopying
            late = {} if waits else self._late()
            ejections = self._health.late(self.stage, late, self.alive, now_ms)
        return self._leave_out(ejections, now_ms)

    def _leave_out(self, ejections: Collection[Ejection], now_ms: int) -> tuple[Rank, ...]:
        for each in ejections:
            self._roster[each.rank].out_until_ms = now_ms + each.out_ms
            self.lose((each.rank,), now_ms, each.cause)
        return tuple(each.rank for each in ejections)

    def _late(self) -> dict[Rank, Binding | None]:
        return who_is_late(self._roster, self.alive, self.stage, self.target, self._stay)

    def _all_acknowledged(self) -> bool:
        return not self._late()

    def _advance(self, now_ms: int) -> None:
        while self.stage.phase is not Phase.SERVE and self._all_acknowledged():
            self._complete(self.stage.phase)
            self.version += 1
        if self.is_serving:
            self.served_layout = self.target.layout
            self.log.served(now_ms)

    def _complete(self, phase: Phase) -> None:
        """Enter the phase after one that every rank acknowledged."""
        self._precopy.stop()  # Groups whose formation was aborted leave although it goes on.
        peers = map(self._roster.report_of, filter(self._roster.has_peers, self.alive))
        if phase is Phase.PARK and self.carry is Carry.RESHARD and self._moves.start(peers):
            self.stage = Stage(self.epoch, Phase.MOVE)
        elif phase is Phase.SWAP or (phase is Phase.MOVE and self._decide_move()):
            self.stage = Stage(self.epoch, Phase.SERVE)
            self._grant()
        else:
            self.stage = Stage(self.epoch, Phase.SWAP)

    def _decide_move(self) -> bool:
        """Return whether groups can begin at once: all their ranks know what they will have."""
        reports = map(self._roster.report_of, self._moves.movers)
        if not self._moves.decide(self.epoch, reports):
            return False
        # Their ranks lease pages now, perhaps before they are granted any.
        for binding in self.target.bindings:
            self._leases.know(binding)
        return self._moves.cover(each for each in self.target.bindings if each not in self._grants)

    def _grant(self) -> None:
        for binding in self.target.bindings:
            if binding not in self._grants:
                self._grants.add(binding)
                self._leases.bind(binding)

    def _forgive_own_stall(self, now_ms: int) -> None:
        stall_ms = now_ms - self._last_tick_ms
        self._last_tick_ms = now_ms
        if stall_ms > self._settings.lost_after_ms // STALL_SHARE:
            self._roster.forgive(stall_ms, now_ms)
            self._health.forgive(stall_ms, now_ms)
            self._recover_until_ms += stall_ms

    def _try_resume(self, now_ms: int) -> tuple[Rank, ...]:
        resumed = resume(
            self._roster, self._settings.initial, is_late=now_ms >= self._recover_until_ms
        )
        if resumed is None:
            return ()
        self.recovering = False
        self.version += 1
        self._take_over(resumed, now_ms)
        return tuple(rank for rank in self._roster if self._roster.report_of(rank) is None)

    def _take_over(self, resumed: Resumed, now_ms: int) -> None:
        self.target = resumed.target
        self.alive = resumed.target.layout.ranks
        self.served_layout = resumed.target.layout
        self.stage = resumed.stage
        self._leases.recover(self._roster.leases(), resumed.stage.epoch)
        self._moves.recover()
        for binding in self.target.bindings:
            self._leases.know(binding)
        for binding in resumed.serving:
            self._leases.bind(binding)
            self._grants.resume(binding)
        for rank in resumed.gone:
            self._leases.drop(rank, self.epoch)
        if not resumed.is_settled:
            stopped = set(self.target.bindings).difference(resumed.serving)
            fresh = [rank for binding in stopped for rank in binding.group.ranks]
            self._set_target(resumed.layout, resumed.cause, now_ms, fresh)
        self._advance(now_ms)
