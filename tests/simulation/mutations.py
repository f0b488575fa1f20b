"""Bugs put in on purpose: each must be found, or the simulation is not worth its time."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from comm_pool.layout import Rank
from coordinator.model.events import Effect
from coordinator.protocol.messages.rank import Directive, RankHello, Report
from coordinator.protocol.messages.tasks import Adopted, TaskReturned
from coordinator.protocol.switch_actions import Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.switch_rules import MOVES, OVER, RULES, Action, Asks, Rule, RuleTable
from coordinator.protocol.switch_situation import Situation
from coordinator.protocol.terms import ReturnCause, Target, TaskId
from coordinator.ranks.outliers import OutlierDetector
from coordinator.ranks.roster import Arrival, Roster
from coordinator.switching import switcher
from coordinator.switching.move_commits import MoveCommits
from coordinator.switching.switcher import Switcher
from coordinator.tasks.task import Task
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_table import TaskTable
from tests.simulation import sim_moving
from tests.simulation.sim_engine import SimTask
from tests.simulation.sim_gateway import ClientTask, SimGateway, Token
from tests.simulation.sim_holdings import Holdings
from tests.simulation.sim_moving import SimMoving
from tests.simulation.sim_plan import Cargo, Ranks
from tests.simulation.sim_rank import SimRank
from tests.simulation.sim_room import Room
from tests.simulation.stepping import Begin

Patch = tuple[Any, str, Any]


def _on_any_directive(self: SwitchParticipant, directive: Directive) -> None:
    if directive.incarnation == self.incarnation:
        until = directive.answers_ms + directive.lease_ms
        self.lease_until = max(self.lease_until, until)
        self.wanted = directive


_asks = Situation._asks.fget  # type: ignore[attr-defined]


def _later_if_different(self: Situation) -> Asks:
    asks: Asks = _asks(self)
    is_earlier = asks is Asks.NOTHING and self.wanted.stage != self.rank.stage
    return Asks.LATER_STAGE if is_earlier else asks


def _steps_without_lease(self: SwitchParticipant, now_ms: int) -> bool:
    return self.is_leader and self.serving


def _majority(self: Switcher) -> bool:
    reports = [self._roster.report_of(rank) for rank in self.alive]
    acknowledged = [report for report in reports if report and report.stage >= self.stage]
    return 2 * len(acknowledged) > len(reports)


def _changed(is_meant: Callable[[Rule], bool], **columns: Any) -> Patch:
    """Other columns for the rows that are meant."""
    rules = [dataclasses.replace(rule, **columns) if is_meant(rule) else rule for rule in RULES]
    assert rules != list(RULES)
    return SwitchParticipant, "table", RuleTable(rules)


def _waits_for_leave(rule: Rule) -> bool:
    return rule.action is Action.WAIT and rule.unless == OVER


def _leaves_unserved_drain(rule: Rule) -> bool:
    return rule.action is Action.LEAVE_RECOMPUTE


def _nothing_is_void(report: Report, target: Target, roster: Roster) -> int:
    return 0


def _all_is_void(report: Report, target: Target, roster: Roster) -> int:
    joined = report.binding
    return 0 if joined is None or joined in target.bindings else joined.formation


def _grants_its_own(self: Holdings, begin: Begin) -> int:
    return self.pages.counts().free


def _any_attempt(self: TaskTable, rank: Rank, task_id: TaskId, attempt: int) -> Task | None:
    task = self.get(task_id)
    return task if task is not None and task.leader is not None else None


_returned = TaskPool.returned


def _returned_without_tokens(self: TaskPool, rank: Rank, message: TaskReturned, now_ms: int) -> Any:
    return _returned(self, rank, msgspec.structs.replace(message, generated_tokens=()), now_ms)


def _takes_any_attempt(self: SimGateway, task: ClientTask, token: Token) -> bool:
    return True


_on_hello = Switcher.on_hello


def _ignores_restarts(self: Switcher, hello: RankHello, arrival: Arrival, now_ms: int) -> None:
    if arrival is not Arrival.RESTARTED:
        _on_hello(self, hello, arrival, now_ms)


_on_report = OutlierDetector.on_report


def _hears_of_no_room(self: OutlierDetector, report: Report, *args: Any) -> Any:
    return _on_report(self, msgspec.structs.replace(report, oom_formation=0), *args)


def _tells_until_it_joins(self: Room) -> int:
    binding = self._process.participant.binding
    return self._lacked_in if binding is None or binding.formation <= self._lacked_in else 0


def _no_patience(self: Switcher, rank: Rank) -> Any:
    directive = _directive_for(self, rank)
    longer = self._settings.lost_after_ms * 2
    return directive and msgspec.structs.replace(directive, lease_ms=longer)


_directive_for = Switcher.directive_for


def _commits_all_the_same(self: MoveCommits, epoch: int, reports: Iterable[Report | None]) -> bool:
    heard = [each and msgspec.structs.replace(each, has_failed=False) for each in reports]
    return _decide(self, epoch, heard)


_decide = MoveCommits.decide


def _adopts_as_it_was(cargo: Cargo, blocks: list[int]) -> SimTask:
    task = _restored(cargo, blocks)
    task.attempt -= 1
    return task


_restored = sim_moving._restored


def _any_commit(self: Situation) -> Directive | None:
    copied = self.rank.copied
    is_own = copied is not None and copied.stage.epoch == self.rank.migration
    return copied if is_own and self.wanted.moved > 0 else None


def _keeps_past_the_move(
    self: Situation, *, stays_parked: bool = False, is_joined: bool = False
) -> Resolve:
    return _resolve(self, stays_parked=self.wanted.carry in MOVES, is_joined=is_joined)


_resolve = Situation.resolve


def _only_if_wanted(self: Situation) -> bool:
    return False


def _hands_nothing_over(self: Holdings, group: Ranks, gone: dict[TaskId, int]) -> None:
    return None


def _keeps_all(self: Holdings, group: Ranks, cause: ReturnCause) -> None:
    return None


def _leaders_stay(self: TaskPool, rank: Rank, message: Adopted, now_ms: int) -> list[Effect]:
    return []


def _forgets_moves(self: MoveCommits, report: Report) -> None:
    return None


def _all_have_joined(self: Switcher) -> list[Rank]:
    return []


def _nothing_is_closed(self: Roster, ranks: Iterable[Rank]) -> None:
    return None


def _joined_or_void(report: Report, target: Target, roster: Roster) -> int:
    joined = report.binding
    if joined is None or joined in target.bindings:
        return 0
    leader = roster.report_of(joined.group.leader)
    return joined.formation if leader is not None and leader.binding != joined else 0


def _drops_all(self: SwitchParticipant) -> bool:
    return self.binding is None


def _waits_for_nobody(*_: Any) -> Iterator[None]:
    return iter(())


MUTATIONS: dict[str, tuple[Patch, ...]] = {
    "accept stale directives": (
        (SwitchParticipant, "on_directive", _on_any_directive),
        (Situation, "_asks", property(_later_if_different)),
    ),
    "no lease": ((SwitchParticipant, "may_step", _steps_without_lease),),
    "lease longer than patience": ((Switcher, "directive_for", _no_patience),),
    "majority instead of all": ((Switcher, "_all_acknowledged", _majority),),
    "follower leaves without its leader": (_changed(_waits_for_leave, action=Action.LEAVE),),
    "leaders drain groups that never served": (
        _changed(_leaves_unserved_drain, action=Action.WAIT),
    ),
    "followers wait for a leader that never came": ((switcher, "void", _nothing_is_void),),
    "followers do not wait for their leader's last step": ((switcher, "void", _all_is_void),),
    "followers leave a leader that may step unheard": ((switcher, "void", _joined_or_void),),
    "followers join only what is wanted": ((Situation, "is_in_step", property(_only_if_wanted)),),
    "followers drop what comes before they join": (
        (SwitchParticipant, "may_drain", property(_drops_all)),
    ),
    "grants not equal": ((Holdings, "grant_of", _grants_its_own),),
    "accept stale attempts": ((TaskTable, "current", _any_attempt),),
    "requeue loses tokens": ((TaskPool, "returned", _returned_without_tokens),),
    "gateway ignores fences": ((SimGateway, "takes", _takes_any_attempt),),
    "who had no room stays in": ((OutlierDetector, "on_report", _hears_of_no_room),),
    "who joins another group tells of no room no longer": (
        (Room, "lacked_in", property(_tells_until_it_joins)),
    ),
    "restarts are ignored": ((Switcher, "on_hello", _ignores_restarts),),
    "commit although a rank failed": ((MoveCommits, "decide", _commits_all_the_same),),
    "adopt without a new attempt": ((sim_moving, "_restored", _adopts_as_it_was),),
    "take any commit for one's own": ((Situation, "committed", property(_any_commit)),),
    "keep tasks when the move is over": ((Situation, "resolve", _keeps_past_the_move),),
    "defer no command": ((SimRank, "defers", False),),
    "hand nothing over": (
        (Holdings, "hand_over", _hands_nothing_over),
        (Holdings, "give_up", _keeps_all),
    ),
    "pool keeps the old leader": ((TaskPool, "adopted", _leaders_stay),),
    "recovery forgets moves": ((MoveCommits, "on_report", _forgets_moves),),
    "half joined groups stay": ((Switcher, "_half_formed", _all_have_joined),),
    "closed groups are formed again": ((Roster, "closed_by", _nothing_is_closed),),
    "rounds do not wait": ((SimMoving, "_await_round", _waits_for_nobody),),
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Put a bug in for a while; None puts in none."""
    with patched(MUTATIONS[name] if name is not None else ()):
        yield


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace attributes for a while."""
    originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    try:
        for owner, attribute, replacement in patches:
            setattr(owner, attribute, replacement)
        yield
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)
