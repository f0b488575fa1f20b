"""The coordinator's core: it takes every event and returns the effects to carry out.

It joins the switcher and the task pool: reports of ranks advance switches, the switcher opens and
closes groups for tasks, and a lost rank's tasks go back to the pool. Pure: the shell passes in
events with its clock's time, one at a time, and carries out the effects in order.
"""

from collections.abc import Iterable, Mapping
from typing import assert_never

from comm_pool.layout import Layout, Rank, format_layout
from coordinator.core.cell_status import CellStatusPublisher
from coordinator.core.gateways import Gateways
from coordinator.core.read_model import CoreViews
from coordinator.model.events import (
    CellDrains,
    Effect,
    Event,
    ForecastMade,
    GatewayClosed,
    GatewayOpened,
    GatewaySent,
    Observed,
    RankClosed,
    RankExited,
    RankOpened,
    RankReported,
    ReinstateMode,
    RenewalWanted,
    SettingsChanged,
    SwitchRecorded,
    SwitchWanted,
    Tick,
    ToGateway,
    ToRank,
    note,
    warning,
)
from coordinator.model.records import Decision, DecisionLog
from coordinator.model.settings import CoreSettings, PoolLimits
from coordinator.policy.controller import PolicyController
from coordinator.policy.decide import POLICY
from coordinator.policy.explain import recorded
from coordinator.protocol.messages.gateway import (
    Cancel,
    Done,
    GatewayHello,
    GatewayToCore,
    StreamGap,
    Submit,
    Welcome,
    Withdraw,
)
from coordinator.protocol.messages.rank import Place, RankHello, Report
from coordinator.protocol.messages.tasks import TaskEnded
from coordinator.protocol.terms import Carry, EndCause
from coordinator.ranks.layout_check import why_unreachable
from coordinator.ranks.roster import Arrival, Roster
from coordinator.switching.directive_sender import DirectiveSender
from coordinator.switching.fallback import fall_back, put_back
from coordinator.switching.layout_restorer import (
    RESTORATION,
    LayoutRestorer,
    RenewalTimes,
    renewal,
    restoration,
)
from coordinator.switching.stragglers import Stragglers
from coordinator.switching.switcher import Switcher
from coordinator.tasks.placement import (
    OpenGroup,
    changing_groups,
    drains,
    max_context_tokens,
    open_groups,
    with_gains,
)
from coordinator.tasks.task_pool import TaskPool

OPERATOR = "operator"
"""Cause of a switch that an operator asked for."""


class Core:
    """The coordinator of one cell, without its sockets and clock."""

    __slots__ = (
        "_answers",
        "_coordinator_id",
        "_decisions",
        "_gateways",
        "_is_context_known",
        "_pool",
        "_publisher",
        "_restoring",
        "_roster",
        "_settings",
        "_steering",
        "_stragglers",
        "_switcher",
        "_version",
        "views",
    )

    def __init__(self, settings: CoreSettings, coordinator_id: str, now_ms: int) -> None:
        self._settings = settings
        self._coordinator_id = coordinator_id
        self._roster = Roster(settings.world, settings.narrowest, settings.parts)
        self._switcher = Switcher(settings.switch, self._roster, now_ms)
        self._answers = DirectiveSender(self._switcher, settings.answer_ms)
        self._pool = TaskPool(
            PoolLimits(
                queue=settings.queue,
                ageing_ms=settings.ageing_ms,
                pause_limit_ms=settings.pause_limit_ms,
                claim_ms=settings.claim_ms,
            )
        )
        self._stragglers = Stragglers()
        self._gateways = Gateways()
        self._decisions = DecisionLog(settings.history_max)
        self._steering = PolicyController(settings.policy) if settings.policy is not None else None
        self._restoring = LayoutRestorer(
            settings.layout,
            settings.settled_ms,
            RenewalTimes(settings.renew_idle_ms, settings.renew_busy_ms),
            is_fixed=settings.policy is None,
        )
        self._publisher = CellStatusPublisher(settings.world, in_fleet=settings.in_fleet)
        self._version = self._switcher.version
        """The version of the directives sent last."""
        self._is_context_known = True
        """Whether the longest context is that of the ranks of now; `publish` looks it up."""
        parts = self._roster, self._switcher, self._pool, self._decisions, self._steering
        self.views = CoreViews(settings, *parts)

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Return all effects of an event."""
        return [*self.decide(event, now_ms), *self.publish(event)]

    def decide(self, event: Event, now_ms: int) -> list[Effect]:
        """Return the effects of an event that ranks may wait for; `publish` gives the rest."""
        match event:
            case RankOpened(hello):
                self._answers.opened(hello.rank)
                effects = self._rank_opened(hello, now_ms)
            case RankReported(_, report):
                effects = self._rank_reported(report, now_ms)
            case RankClosed(rank, incarnation):
                self._roster.on_closed(rank, incarnation)
                effects = [note("rank_session_closed", rank=rank)]
            case RankExited():
                effects = self._rank_exited(event, now_ms)
            case GatewayOpened(hello):
                effects = self._gateway_opened(hello, now_ms)
            case GatewaySent(gateway, message):
                effects = self._gateway_sent(gateway, message, now_ms)
            case GatewayClosed(gateway):
                self._gateways.closed(gateway, now_ms)
                effects = [note("gateway_session_closed", gateway=gateway)]
            case SwitchWanted():
                effects = self._switch_wanted(event, now_ms)
            case ReinstateMode() | RenewalWanted() | CellDrains():
                effects = self._operated(event)
            case SettingsChanged(settings):
                effects = self._settings_changed(settings)
            case Tick():
                effects = self._tick(now_ms)
            case _:
                assert_never(event)
        return [*effects, *self._follow_up(event, now_ms)]

    def why_unreachable(self, layout: Layout) -> str | None:
        """Return why a switch to `layout` is impossible, in one sentence, or None."""
        if self._switcher.recovering:
            return "the coordinator is still collecting the ranks' reports: try again in a moment."
        return why_unreachable(layout, self._roster, self._switcher.alive)

    def integrity(self) -> None:
        """Assert the invariants of all parts; costs O(tasks)."""
        self._pool.integrity()
        self._switcher.integrity()
        assert self._pool.recovering == self._switcher.recovering, "only one of the two recovered."

    def _rank_opened(self, hello: RankHello, now_ms: int) -> list[Effect]:
        arrival = self._roster.on_hello(hello, now_ms)
        if arrival is Arrival.STALE:
            return [warning("rank_session_stale", rank=hello.rank, incarnation=hello.incarnation)]
        about = {"incarnation": hello.incarnation, "arrival": arrival.name.lower()}
        opened = note("rank_session_opened", rank=hello.rank, **about, held=len(hello.held))
        effects: list[Effect] = [opened]
        if arrival is Arrival.RESTARTED:
            effects += self._pool.lost(hello.rank, now_ms)
        if hello.inherits:
            self._pool.tasks.loads.homes.inherit(hello.rank)
        self._switcher.on_hello(hello, arrival, now_ms)
        if self._steering is not None:
            self._steering.on_hello(hello)
        has_moved = self._switcher.has_moved(hello.adopted_in)
        effects += self._pool.reconcile(hello, now_ms, has_moved=has_moved)
        # A rank that has not heard of a commit may not have heard the fate of its tasks either.
        for adopted in hello.adopted if has_moved else ():
            effects += self._pool.adopted(hello.rank, adopted, now_ms)
        return effects

    def _rank_reported(self, report: Report, now_ms: int) -> list[Effect]:
        if not self._roster.on_report(report, now_ms):
            return []
        cut_out = self._switcher.on_report(report, now_ms)
        if self._steering is not None:
            self._steering.on_report(report, self._pool.tasks)
        effects = [each for ended in report.ended for each in self._task_ended(report.rank, ended)]
        effects += self._lost(cut_out, now_ms)
        self._pool.tasks.loads.homes.cached(report.rank, report.cached)
        for returned in report.returned:
            effects += self._pool.returned(report.rank, returned, now_ms)
        if self._roster.report_of(report.rank) is report:
            self._pool.progress(report.rank, report.progress, now_ms)
            cuts = self._roster.take_cuts(report)
            effects += self._pool.on_broken_links(report.rank, cuts, now_ms)
        for times in report.times:
            self._switcher.log.on_times(times)
        return effects

    def _task_ended(self, rank: Rank, ended: TaskEnded) -> list[Effect]:
        was_known = ended.task in self._pool.tasks
        effects = self._pool.ended(rank, ended)
        was_waited_for = self._stragglers.ended(rank, ended.task)
        has_ended = was_known and ended.task not in self._pool.tasks
        if (
            has_ended
            and ended.cause is EndCause.FINISHED
            and drains(rank, self._switcher, self._roster, was_waited_for=was_waited_for)
        ):
            self._switcher.log.count(Carry.DRAIN)
        return effects

    def _rank_exited(self, exited: RankExited, now_ms: int) -> list[Effect]:
        rank, is_at_fault = exited.rank, exited.is_at_fault
        self._roster.on_exited(rank)
        self._switcher.lose((rank,), now_ms)
        lost = self._pool.lost(rank, now_ms, is_at_fault=is_at_fault)
        return [warning("rank_exited", rank=rank, is_at_fault=is_at_fault), *lost]

    def _gateway_opened(self, hello: GatewayHello, now_ms: int) -> list[Effect]:
        self._gateways.heard(hello.gateway)
        self._pool.gateway_opened(hello.gateway, now_ms)
        greeting = (Welcome(self._coordinator_id), *self._publisher.greeting())
        opened = note("gateway_session_opened", gateway=hello.gateway)
        return [opened, *(ToGateway(hello.gateway, each) for each in greeting)]

    def _gateway_sent(self, gateway: str, message: GatewayToCore, now_ms: int) -> list[Effect]:
        self._gateways.heard(gateway)
        match message:
            case Submit():
                if self._steering is not None and message.header.task not in self._pool.tasks:
                    self._steering.on_submit(message, now_ms)
                self._publisher.remember(message.prefixes)
                return self._pool.submit(message, now_ms)
            case Withdraw(task):
                return self._pool.withdraw(task)
            case Cancel(task):
                return self._pool.release(task)
            case Done(task):
                return self._pool.release(task, is_done=True)
            case StreamGap(epoch, gap_ms):
                self._switcher.log.on_gap(epoch, gap_ms)
                return []
            case GatewayHello():
                return [warning("gateway_hello_repeated", gateway=gateway)]
            case _:
                assert_never(message)

    def _switch_wanted(
        self, wanted: SwitchWanted, now_ms: int, decision: Decision | None = None
    ) -> list[Effect]:
        choice = format_layout(wanted.layout)
        reason = self.why_unreachable(wanted.layout)
        if reason is not None:
            return [warning("switch_refused", layout=choice, cause=wanted.cause, reason=reason)]
        if decision is None:
            because = f"asked by {OPERATOR}" if wanted.cause == OPERATOR else wanted.cause
            decision = Decision(now_ms, choice, wanted.carry, because, cause=wanted.cause)
            self._restoring.decided(wanted.layout)
            if self._steering is not None:
                self._steering.pin(now_ms)
        self._decisions.add(decision)
        decide_ms = 0 if wanted.asked_ms is None else max(0, now_ms - wanted.asked_ms)
        self._switcher.retarget(
            wanted.layout,
            wanted.carry,
            wanted.cause,
            now_ms,
            decide_ms=decide_ms,
            reserved=self._reserved_groups(wanted.layout),
        )
        if self._switcher.is_speculating:
            changing = changing_groups(self._switcher, self._roster)
            leaders = [each.group.leader for each in changing]
            self._stragglers.start(leaders, self._pool.tasks.loads.of)
        return []

    def _operated(self, order: ReinstateMode | RenewalWanted | CellDrains) -> list[Effect]:
        match order:
            case ReinstateMode(mode):
                return put_back(self._roster, mode)
            case RenewalWanted(ranks):
                return renewal(self._roster, ranks or tuple(self._roster), OPERATOR)
            case CellDrains():
                self._publisher.is_draining = True
                return [note("cell_drains")]

    def _settings_changed(self, settings: CoreSettings) -> list[Effect]:
        self._pool.change_bounds(settings.queue, settings.ageing_ms)
        if self._steering is not None and settings.policy is not None:
            self._steering.change_settings(settings.policy.settings)
        return [note("settings_changed")]

    def _lost(self, ranks: Iterable[Rank], now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        for rank in ranks:
            effects += [warning("rank_lost", rank=rank), *self._pool.lost(rank, now_ms)]
        return effects

    def _tick(self, now_ms: int) -> list[Effect]:
        cut_out = self._switcher.on_tick(now_ms)
        # What a lost rank has adopted is lost with it.
        effects = [*self._adopt(now_ms), *self._lost(cut_out, now_ms)]
        if self._switcher.is_speculating:
            self._stragglers.prune(self._pool.tasks.loads.of)
        if starved := self._switcher.starved() or self._short_of_pages():
            layout = self._switcher.target.layout
            self._switcher.retarget(layout, Carry.PAUSE, "pages became free", now_ms, fresh=starved)
        for name in self._gateways.take_gone(now_ms, self._settings.gateway_gone_ms):
            effects += [warning("gateway_gone", gateway=name), *self._pool.gateway_gone(name)]
        if self._steering is not None:
            effects += self._steer(self._steering, now_ms)
        return [*effects, *self._restore(now_ms)]

    def _short_of_pages(self) -> tuple[Rank, ...]:
        """Return the leader of a group to form anew for a task that fits no group as they are."""
        if not (self._pool.tasks.queue and self._switcher.is_serving):
            return ()
        groups = self._open_groups()
        group = self._pool.in_need_of(with_gains(groups, self._switcher), groups)
        return (group.leader,) if group is not None else ()

    def _restore(self, now_ms: int) -> list[Effect]:
        """Restore the layout or the communicators that a loss took, if its ranks are back."""
        layout = self._restoring.layout_due(self._switcher, self._roster, now_ms)
        if layout is not None:
            carry = self._settings.default_carry
            wanted = SwitchWanted(layout, carry, RESTORATION)
            return self._switch_wanted(wanted, now_ms, restoration(layout, carry, now_ms))
        is_idle = not len(self._pool.tasks)
        due = self._restoring.renewal_due(self._switcher, self._roster, now_ms, is_idle=is_idle)
        return renewal(self._roster, due, "idle" if is_idle else "busy") if due else []

    def _steer(self, steering: PolicyController, now_ms: int) -> list[Effect]:
        """Evaluate the policy and carry out its verdict."""
        evaluation = steering.look(self._switcher, self._roster, self._pool.tasks, now_ms)
        if evaluation is None:
            return []
        effects: list[Effect] = [Observed(evaluation.costs)] if evaluation.costs is not None else []
        effects.append(Observed(evaluation.observation))
        if evaluation.expected:
            effects.append(
                ForecastMade(evaluation.observation.epoch, steering.horizon_ms, evaluation.expected)
            )
        carry = evaluation.verdict.carry or self._settings.default_carry
        self._pool.alternate(now_ms, holds=steering.holds_batch, pauses=steering.pauses_batch)
        decision = recorded(evaluation.verdict, carry, now_ms)
        layout = evaluation.verdict.choice.layout
        if evaluation.verdict.changes:
            steering.keep(evaluation.verdict)
        if layout == self._switcher.target.layout:
            self._decisions.add(decision)
        elif self.why_unreachable(layout) is None:
            wanted = SwitchWanted(layout, carry, POLICY, now_ms)
            effects += self._switch_wanted(wanted, now_ms, decision)
        return [*effects, *self._pool.vacate(self._open_groups(), now_ms)]

    def _follow_up(self, event: Event, now_ms: int) -> list[Effect]:
        """Do what may follow from any event."""
        effects = self._leave_drifted(now_ms)
        if self._switcher.is_speculating and self._stragglers.are_done:
            self._switcher.end_wait(now_ms)
        effects += self._adopt(now_ms)
        if self._switcher.version != self._version:
            self._version = self._switcher.version
            effects += self._answers.directives(self._roster, now_ms)
            self._is_context_known = False
        elif isinstance(event, RankReported):
            effects += self._answers.answer(event.rank, now_ms)
        if self._pool.recovering and not self._switcher.recovering:
            effects += self._pool.recovered(now_ms)
        if isinstance(event, Tick):
            effects += self._pool.tick(now_ms)
        for carry, count in self._pool.take_carried().items():
            self._switcher.log.count(carry, count)
        # Tasks that a group holds may have lost their room in it, with none in the queue.
        if self._pool.tasks.queue or isinstance(event, Tick):
            effects += self._place(now_ms)
        return effects

    def publish(self, event: Event) -> list[Effect]:
        """Return what else follows from the event decided last: news, records, refused tasks."""
        effects = [] if self._is_context_known else self._refresh_context()
        self._is_context_known = True
        effects += self._publish_status(is_tick=isinstance(event, Tick))
        for record in self._switcher.log.take_finished():
            effects.append(SwitchRecorded(record))
            if self._steering is not None:
                self._steering.on_switch(record)
        return effects

    def _adopt(self, now_ms: int) -> list[Effect]:
        """Record who leads the tasks of a migration that has been committed."""
        adopted = self._switcher.take_adopted()
        effects = [each for of in adopted for each in self._pool.adopted(*of, now_ms)]
        for rank, task in self._switcher.take_without_heir():
            effects += self._pool.given_away(rank, task, now_ms)
        return effects

    def _leave_drifted(self, now_ms: int) -> list[Effect]:
        """Continue without modes that have drifted."""
        fallback = fall_back(self._switcher, self._roster, now_ms)
        for change in self._switcher.take_changes():
            self._decisions.add(change)
        effects = [*fallback.notes]
        for rank in fallback.wrong:
            effects += self._pool.lost(rank, now_ms)
        if fallback.decision is not None:
            self._decisions.add(fallback.decision)
        return effects

    def _place(self, now_ms: int) -> list[Effect]:
        groups = self._open_groups()
        placed = self._pool.place(groups, now_ms)
        if self._switcher.is_speculating:
            bindings = self._switcher.target.bindings
            idle = {each.leader for each in groups if each.binding not in bindings}
            to_ranks = [each for each in placed if isinstance(each, ToRank)]
            begun = sum(isinstance(e.message, Place) and e.rank in idle for e in to_ranks)
            self._switcher.log.count(Carry.SPECULATE, begun)
        return placed

    def _open_groups(self) -> tuple[OpenGroup, ...]:
        reserved_groups = self._reserved_groups(self._switcher.target.layout)
        return open_groups(self._switcher, self._roster, self._stragglers, reserved_groups)

    def _reserved_groups(self, layout: Layout) -> Mapping[Rank, int]:
        return self._steering.reserved_groups(layout) if self._steering else {}

    def _refresh_context(self) -> list[Effect]:
        if self._switcher.recovering:
            return []
        before = self._pool.context_tokens_max
        longest = max_context_tokens(self._roster, self._switcher.alive)
        if not longest:
            # No rank is available. Those that return are likely to be as large as before.
            return []
        self._pool.context_tokens_max = longest
        return self._pool.recheck_context() if longest < before else []

    def _publish_status(self, *, is_tick: bool) -> list[Effect]:
        """Publish the cell's news to gateways."""
        groups = self._open_groups() if is_tick and self._settings.in_fleet else None
        news = self._publisher.news(
            self._switcher, self._pool, self._roster, groups, is_tick=is_tick
        )
        return [ToGateway(name, each) for name in self._gateways.present() for each in news]
