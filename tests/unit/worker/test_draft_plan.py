"""What a plan that was drafted while groups served is worth once they are left."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.harness.worker.manifests import GEOMETRY, cargo, dp, ints, target
from worker.rank.migration.draft_plan import DraftPlan
from worker.rank.migration.early_copy import EarlyCopy
from worker.rank.migration.manifest import Manifest, TaskSnapshot, plan_move
from worker.rank.task_state import CachedChain

EPOCH, ROUND = 9, 2
TO = target((0, 1))
A, B = cargo("a", ints(1, 2), 20), cargo("b", ints(1, 3), 30)
CHAIN = CachedChain(ints(6, 7), [b"x", b"y"])
BEFORE = {0: dp(0, A, chains=(CHAIN,)), 1: dp(1, B)}
Manifests = dict[int, Manifest]


def draft() -> DraftPlan:
    return DraftPlan(0, EPOCH, ROUND, TO, BEFORE, plan_move(0, BEFORE, TO, GEOMETRY))


def now(**of_rank_0: object) -> Manifests:
    """What ranks publish when they have left, if only this has changed."""
    later = {rank: replace(each, draft=ROUND) for rank, each in BEFORE.items()}
    later[0] = replace(later[0], **of_rank_0)  # type: ignore[arg-type]
    return later


def with_state(task: TaskSnapshot, **state: object) -> TaskSnapshot:
    return replace(task, state=replace(task.state, **state))  # type: ignore[arg-type]


def test_tokens_alone_change_no_plan() -> None:
    drafted = draft()
    longer = with_state(A, computed=23, settled=22, count=6)
    move = drafted.finished(now(cargo=(longer,), written=ints(2)))
    assert move is not None
    assert move.cargo["a"] == (0, longer), "its leader goes on from the newest state"
    wanted = plan_move(0, now(cargo=(longer,), written=ints(2)), TO, GEOMETRY)
    assert repr(move.plan) == repr(wanted.plan)
    assert {rank: units.tolist() for rank, units in move.written.items()} == {
        rank: units.tolist() for rank, units in wanted.written.items()
    }


def test_a_task_that_has_ended_is_left_out() -> None:
    move = draft().finished(now(cargo=()))
    assert move is not None
    assert set(move.cargo) == {"b"}
    assert {each.id for each in move.plan.carried if not each.cached} == {"b"}


def test_a_chain_that_is_cached_since_changes_nothing() -> None:
    newer = CachedChain(ints(8), [b"z"])
    move = draft().finished(now(chains=(newer, CHAIN)))
    assert move is not None
    assert [each.id for each in move.plan.carried if each.cached] == ["cached/0/0"]
    assert move.chains["cached/0/0"].hashes == CHAIN.hashes


CHANGES: dict[str, Callable[[], Manifests]] = {
    "a rank has no draft": lambda: now(draft=0),
    "a rank has a draft of another round": lambda: now(draft=ROUND - 1),
    "a task has come": lambda: now(cargo=(A, cargo("c", ints(4), 10))),
    "a task has one more block": lambda: now(cargo=(with_state(A, blocks=ints(1, 2, 5)),)),
    "a task has lost its blocks": lambda: now(cargo=(with_state(A, preemptions=1),)),
    "a task was placed anew": lambda: now(cargo=(replace(A, attempt=2),)),
    "a chain is cached no more": lambda: now(chains=()),
    "a chain lies elsewhere": lambda: now(chains=(replace(CHAIN, blocks=ints(6, 8)),)),
    "another formation was left": lambda: now(formation=4),
    "pages were leased": lambda: now(free=BEFORE[0].free[1:]),
    "a lease has other pages": lambda: now(pages=BEFORE[0].pages[1:]),
    "a paused group keeps a lease": lambda: now(indices={(0, 1): ints(1)}),
    "a rank has other early copies": lambda: now(
        early=(EarlyCopy("b", 1, 1, 0, 2, ints(0), ints(1), ints(20)),)
    ),
    "a rank takes no part": lambda: {0: now()[0]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_lies_where_makes_it_void(change: str) -> None:
    assert draft().finished(CHANGES[change]()) is None


def test_a_newer_attempt_elsewhere_makes_it_void() -> None:
    elsewhere = replace(dp(2, replace(A, attempt=2)), draft=ROUND)
    assert draft().finished({**now(), 2: elsewhere}) is None
