"""Bugs put in on purpose: each must be found, or the simulation is not worth its time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from comm_pool.layout import Rank
from coordinator.protocol.messages import (
    Binding,
    Directive,
    RankHello,
    TaskId,
    TaskReturned,
)
from coordinator.protocol.seat import Seat
from coordinator.roster import Arrival
from coordinator.switcher import Switcher
from coordinator.task_pool import TaskPool
from coordinator.tasks import Task
from tests.simulation.sim_gateway import ClientTask, SimGateway, Token
from tests.simulation.sim_holdings import Holdings
from tests.simulation.stepping import Begin

Patch = tuple[type, str, Callable[..., Any]]


def _on_any_directive(self: Seat, directive: Directive) -> None:
    if directive.incarnation == self.incarnation:
        until = directive.answers_ms + directive.lease_ms
        self.lease_until = max(self.lease_until, until)
        self.wanted = directive


def _is_due_if_different(self: Seat, wanted: Directive) -> bool:
    return wanted.stage != self.stage


def _steps_without_lease(self: Seat, now_ms: int) -> bool:
    return self.is_leader and self.serving


def _majority(self: Switcher) -> bool:
    reports = [self._roster.report_of(rank) for rank in self.alive]
    acknowledged = [report for report in reports if report and report.stage >= self.stage]
    return 2 * len(acknowledged) > len(reports)


def _follower_leaves_alone(self: Seat, binding: Binding, gone: frozenset[Rank]) -> bool:
    return True


def _owes_nothing(self: Seat, promised: Binding, wanted: Directive) -> bool:
    return False


def _grants_its_own(self: Holdings, begin: Begin) -> int:
    return self.pages.counts().free


def _any_attempt(self: TaskPool, rank: Rank, task_id: TaskId, attempt: int) -> Task | None:
    task = self._tasks.get(task_id)
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


def _no_patience(self: Switcher, rank: Rank) -> Any:
    directive = _directive_for(self, rank)
    longer = self._settings.lost_after_ms * 2
    return directive and msgspec.structs.replace(directive, lease_ms=longer)


_directive_for = Switcher.directive_for

MUTATIONS: dict[str, tuple[Patch, ...]] = {
    "accept stale directives": (
        (Seat, "on_directive", _on_any_directive),
        (Seat, "_is_due", _is_due_if_different),
    ),
    "no lease": ((Seat, "may_step", _steps_without_lease),),
    "lease longer than patience": ((Switcher, "directive_for", _no_patience),),
    "majority instead of all": ((Switcher, "_all_acknowledged", _majority),),
    "follower leaves without its leader": ((Seat, "_is_left", _follower_leaves_alone),),
    "leader forgets a leave it owes": ((Seat, "_owes", _owes_nothing),),
    "grants not equal": ((Holdings, "grant_of", _grants_its_own),),
    "accept stale attempts": ((TaskPool, "_current", _any_attempt),),
    "requeue loses tokens": ((TaskPool, "returned", _returned_without_tokens),),
    "gateway ignores fences": ((SimGateway, "takes", _takes_any_attempt),),
    "restarts are ignored": ((Switcher, "on_hello", _ignores_restarts),),
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Put a bug in for a while; None puts in none."""
    patches = MUTATIONS[name] if name is not None else ()
    originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    try:
        for owner, attribute, replacement in patches:
            setattr(owner, attribute, replacement)
        yield
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)
