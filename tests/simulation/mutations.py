"""Bugs put in on purpose: each must be found, or the simulation is not worth its time."""

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from comm_pool import layout
from comm_pool.layout import Rank
from coordinator.model.events import Effect
from coordinator.protocol.messages.rank import Directive, Drop, GiveBack, RankHello, Report
from coordinator.protocol.messages.tasks import Adopted, TaskReturned
from coordinator.protocol.switch_actions import Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.switch_rules import MOVES, OVER, RULES, Action, Asks, Rule, RuleTable
from coordinator.protocol.switch_situation import Situation
from coordinator.protocol.terms import Binding, Target, TaskId
from coordinator.ranks.outliers import OutlierDetector
from coordinator.ranks.roster import Arrival, Roster
from coordinator.switching import switcher
from coordinator.switching.move_commits import MoveCommits
from coordinator.switching.switcher import Switcher
from coordinator.tasks.task import Task
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_table import TaskTable
from kvadaptor.group_directory import GroupDirectory
from kvadaptor.reshard.terms import OldGroup, UnitCopies
from tests.simulation.sim_gateway import ClientTask, SimGateway, Token
from worker.engine import lost_kv
from worker.engine.lost_kv import LostKV
from worker.engine.scheduling.block_entries import BlockEntries
from worker.rank.core import RankCore
from worker.rank.engine import EngineMode, LeaseIndices
from worker.rank.events import Effect as RankEffect
from worker.rank.events import Event as RankEvent
from worker.rank.inflight_step import InflightStep
from worker.rank.leases import Key, Leases
from worker.rank.migration import copy_rounds, manifest
from worker.rank.migration.copy_rounds import CopyRounds, PreparedMigration
from worker.rank.migration.migration import Migration
from worker.rank.runtime import GroupRuntime
from worker.rank.steps import Steps

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


def _grants_its_own(
    self: Leases, mode: EngineMode, binding: Binding, _grant_pages: int, indices: tuple[int, ...]
) -> LeaseIndices:
    return _leases_begin(self, mode, binding, self._runtime.engine.pages.counts().free, indices)


_leases_begin = Leases.begin


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


def _tells_until_it_joins(self: RankCore) -> int:
    binding = self.participant.binding
    return self._no_room if binding is None or binding.formation <= self._no_room else 0


def _no_patience(self: Switcher, rank: Rank) -> Any:
    directive = _directive_for(self, rank)
    longer = self._settings.lost_after_ms * 2
    return directive and msgspec.structs.replace(directive, lease_ms=longer)


_directive_for = Switcher.directive_for


def _commits_all_the_same(self: MoveCommits, epoch: int, reports: Iterable[Report | None]) -> bool:
    heard = [each and msgspec.structs.replace(each, has_failed=False) for each in reports]
    return _decide(self, epoch, heard)


_decide = MoveCommits.decide


def _adopts_as_it_was(
    self: Migration, binding: Binding, pending: PreparedMigration, indices: LeaseIndices
) -> None:
    _adopt(self, binding, pending, indices)
    for each in pending.incoming:
        led = self._runtime.book.get(each.cargo.header.task)
        assert led is not None
        led.attempt -= 1


_adopt = Migration._adopt


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


def _does_nothing(*_: Any, **__: Any) -> None:
    return None


def _obeys_at_once(self: RankCore, event: RankEvent, now_ns: int) -> RankEffect | None:
    if isinstance(event, Drop | GiveBack):
        return self._begin(self._obey(event))
    return _handle(self, event, now_ns)


_handle = RankCore.handle


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


def _copies_all_at_once(
    copies: Iterable[UnitCopies], _written: Any
) -> tuple[list[UnitCopies], list[UnitCopies]]:
    return list(copies), []


def _counts_always(self: Steps, step: InflightStep) -> bool:
    return True


def _tells_nobody(self: Leases, key: Key) -> bool:
    return self.keep_only(key, ())


def _goes_on_without_news(self: Migration, pending: PreparedMigration) -> None:
    messages, self._mailboxes = self._mailboxes, _Silent()
    try:
        _go_on(self, pending)
    finally:
        self._mailboxes = messages


_go_on = Migration._go_on


class _Silent(dict[Any, Any]):
    """Mailboxes in which no rank has ended a step with a token."""

    settled_message = pickle.dumps({})

    def __missing__(self, _rank: Any) -> "_Silent":
        return self


def _is_never_spoiled(self: PreparedMigration) -> bool:
    return False


def _tells_no_reader(owner: Any, name: str) -> Patch:
    """The call withdraws no mark of what others may read."""
    call = getattr(owner, name)

    def silent(*args: Any) -> Any:
        with patched([(GroupDirectory, "give_up", _does_nothing)]):
            return call(*args)

    return owner, name, silent


def _keeps_inherited(self: GroupDirectory, rank: int, pages: Any) -> None:
    """Let a rank inherit blocks in pages that have changed."""
    inherited = self._inherited
    _give_up_pages(self, rank, pages)
    self._inherited = inherited


_give_up_pages = GroupDirectory.give_up_pages


def _enters_at_once(self: BlockEntries, plan: object) -> None:
    _step_is_planned(self, plan)
    with self.of_finished_step(plan, is_void=False):
        pass


_step_is_planned = BlockEntries.step_is_planned


def _finishes_the_oldest(self: Steps) -> None:
    if self._planned:
        self._finish(self._planned.popleft())
    else:
        _finish_inflight(self)


_finish_inflight = Steps.finish_inflight


def _drops_only_what_is_launched(self: Steps, formation: int) -> None:
    planned = list(self._planned)
    _drop(self, formation)
    self._planned.extend(planned)


_drop = Steps.drop


def _of_its_ranks(ranks: tuple[Rank, ...], stages: int) -> tuple[Rank, ...]:
    return ranks


def _bound_ranks(self: GroupRuntime) -> tuple[Rank, ...]:
    return self._binding.group.ranks if self._binding is not None else ()


def _without_stages(*given: Any) -> OldGroup:
    return OldGroup(*given[:2])


def _is_any_version(self: GroupDirectory, block: int, version: int) -> bool:
    return _is_same(self, block, int(self.versions()[block]))


_is_same = GroupDirectory.is_same


def _is_always_there(self: LostKV, place: int, tag: int) -> bool:
    return True


OF_PIPELINES: dict[str, tuple[Patch, ...]] = {
    "groups are left with planned steps": ((Steps, "must_end", False),),
    "only the oldest planned step is finished": ((Steps, "finish_inflight", _finishes_the_oldest),),
    "planned steps outlive their formation": ((Steps, "drop", _drops_only_what_is_launched),),
    "pp and tp of the same ranks have one lease": (
        (layout, "lease_key", _of_its_ranks),
        (manifest, "lease_key", _of_its_ranks),
    ),
    "a joined pipeline group is taken for tp": (
        (GroupRuntime, "bound_key", property(_bound_ranks)),
    ),
    "stages are taken for ranges of heads": ((manifest, "OldGroup", _without_stages),),
}
"""Those of pipeline groups."""

MUTATIONS: dict[str, tuple[Patch, ...]] = {
    **OF_PIPELINES,
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
    "grants not equal": ((Leases, "begin", _grants_its_own),),
    "accept stale attempts": ((TaskTable, "current", _any_attempt),),
    "requeue loses tokens": ((TaskPool, "returned", _returned_without_tokens),),
    "gateway ignores fences": ((SimGateway, "takes", _takes_any_attempt),),
    "who had no room stays in": ((OutlierDetector, "on_report", _hears_of_no_room),),
    "who joins another group tells of no room no longer": (
        (RankCore, "oom_formation", property(_tells_until_it_joins)),
    ),
    "restarts are ignored": ((Switcher, "on_hello", _ignores_restarts),),
    "commit although a rank failed": ((MoveCommits, "decide", _commits_all_the_same),),
    "adopt without a new attempt": ((Migration, "_adopt", _adopts_as_it_was),),
    "take any commit for one's own": ((Situation, "committed", property(_any_commit)),),
    "keep tasks when the move is over": ((Situation, "resolve", _keeps_past_the_move),),
    "defer no command": ((RankCore, "handle", _obeys_at_once),),
    "hand nothing over": (
        (GroupRuntime, "hand_over", _does_nothing),
        (GroupRuntime, "give_up", _does_nothing),
    ),
    "pool keeps the old leader": ((TaskPool, "adopted", _leaders_stay),),
    "recovery forgets moves": ((MoveCommits, "on_report", _forgets_moves),),
    "half joined groups stay": ((Switcher, "_half_formed", _all_have_joined),),
    "closed groups are formed again": ((Roster, "closed_by", _nothing_is_closed),),
    "rounds do not wait": ((CopyRounds, "_await_round", _does_nothing),),
    "copies do not wait for steps": ((copy_rounds, "split", _copies_all_at_once),),
    "groups begin before their copies are over": ((Migration, "arrive", _does_nothing),),
    "steps of lost groups count": ((Steps, "_counts", _counts_always),),
    "nobody hears of lost leases": ((Leases, "_lose", _tells_nobody),),
    "tasks go on without their last tokens": ((Migration, "_go_on", _goes_on_without_news),),
    "copies change pages that can be read": ((CopyRounds, "_give_up_pages", _does_nothing),),
    "groups begin in pages that can be read": (_tells_no_reader(Leases, "_publish"),),
    "new processes empty pages that can be read": (_tells_no_reader(lost_kv, "open_directories"),),
    "blocks are entered before they are full": (
        (BlockEntries, "step_is_planned", _enters_at_once),
    ),
    "blocks of a group that was left are entered": ((BlockEntries, "withdraw", _does_nothing),),
    "blocks keep their entries": ((GroupDirectory, "clear", _does_nothing),),
    "entries come back as they were": ((GroupDirectory, "is_same", _is_any_version),),
    "a found place is always there": ((LostKV, "is_there", _is_always_there),),
    "pages that have changed are inherited": ((GroupDirectory, "give_up_pages", _keeps_inherited),),
    "spoiled tasks go on": ((PreparedMigration, "may_be_spoiled", property(_is_never_spoiled)),),
}


RARE = frozenset(
    {
        "who joins another group tells of no room no longer",
        "followers leave a leader that may step unheard",
        "blocks of a group that was left are entered",  # A contract test finds it.
    }
)
"""Bugs that few of many thousand seeds find."""


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
