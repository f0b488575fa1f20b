"""Who is turned away when too many wait, and when another try is worth it."""

import pytest

from coordinator.model.events import ToGateway
from coordinator.model.settings import PoolLimits, QueueBounds, TierBounds
from coordinator.protocol.messages.gateway import TaskFailed
from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.shedding import RETRY_AFTER_MAX_S, RETRY_AFTER_STALLED_S
from coordinator.tasks.task_pool import TaskPool
from tests.harness.coordinator.builders import submit
from tests.harness.coordinator.pools import group

BOUNDS = QueueBounds(
    8,
    {
        Tier.INTERACTIVE: TierBounds(4, 1_000),
        Tier.STANDARD: TierBounds(6, 5_000),
        Tier.BATCH: TierBounds(8, None),
    },
)


@pytest.fixture
def pool() -> TaskPool:
    made = TaskPool(PoolLimits(queue=BOUNDS, ageing_ms=1_000, pause_limit_ms=100, claim_ms=50))
    made.context_tokens_max = 160
    made.recovered(0)
    return made


def add(
    pool: TaskPool, name: str, tier: Tier = Tier.STANDARD, tenant: str = "", now_ms: int = 0
) -> list[TaskFailed]:
    effects = pool.submit(submit(name, tier=tier, tenant=tenant), now_ms)
    pool.integrity()
    failures = [each.message for each in effects if isinstance(each, ToGateway)]
    assert all(isinstance(each, TaskFailed) for each in failures)
    return [each for each in failures if isinstance(each, TaskFailed)]


def test_a_full_tier_refuses_who_comes(pool: TaskPool) -> None:
    for n in range(4):
        assert add(pool, str(n), Tier.INTERACTIVE) == []
    (failure,) = add(pool, "late", Tier.INTERACTIVE)
    assert (failure.task, failure.code) == ("late", "queue_full")
    assert add(pool, "other tier") == []


def test_the_lowest_tier_gives_way_newest_first(pool: TaskPool) -> None:
    for n in range(8):
        add(pool, f"b{n}", Tier.BATCH)
    (failure,) = add(pool, "s")
    assert (failure.task, failure.code) == ("b7", "tier_capacity")
    (failure,) = add(pool, "i", Tier.INTERACTIVE)
    assert failure.task == "b6"
    (failure,) = add(pool, "b8", Tier.BATCH)
    assert (failure.task, failure.code) == ("b8", "queue_full"), "nothing is below it"
    assert len(pool.tasks) == 8


def test_nothing_gives_way_to_its_own_tier_or_a_lower_one(pool: TaskPool) -> None:
    for n in range(4):
        add(pool, f"i{n}", Tier.INTERACTIVE)
        add(pool, f"s{n}")
    (failure,) = add(pool, "b", Tier.BATCH)
    assert failure.task == "b"


def test_in_a_full_tier_the_tenant_with_most_of_it_gives_way(pool: TaskPool) -> None:
    for n in range(6):
        add(pool, f"f{n}", tenant="flood")
    (failure,) = add(pool, "quiet", tenant="quiet")
    assert (failure.task, failure.code) == ("f5", "queue_full")
    (failure,) = add(pool, "f6", tenant="flood")
    assert failure.task == "f6"
    for n in range(2):
        (failure,) = add(pool, f"q{n}", tenant="quiet")
        assert failure.task == f"f{4 - n}"
    (failure,) = add(pool, "q2", tenant="quiet")
    assert failure.task == "q2", "both have as much now"


def test_a_task_that_has_run_is_never_turned_away(pool: TaskPool) -> None:
    """Its client has tokens of it."""
    for n in range(8):
        pool.submit(submit(f"b{n}", tier=Tier.BATCH, attempt=1), 0)
        pool.submit(submit(f"b{n}", tier=Tier.BATCH, attempt=1_001), 0)
    assert len(pool.tasks.queue) == 8
    (failure,) = add(pool, "i", Tier.INTERACTIVE)
    assert failure.task == "i"
    assert pool.tick(10**9) == []


@pytest.mark.parametrize(
    ("serves", "code"), [(True, "tier_capacity"), (False, "no_healthy_workers")]
)
def test_who_waited_too_long_is_told_why(pool: TaskPool, serves: bool, code: str) -> None:
    full = group(max_tasks=0)
    add(pool, "a", Tier.INTERACTIVE)
    add(pool, "b", Tier.INTERACTIVE, now_ms=500)
    add(pool, "c", Tier.BATCH)
    pool.place([full] if serves else [], 900)
    assert pool.tick(1_000) == []
    (effect,) = pool.tick(1_001)
    assert isinstance(effect, ToGateway)
    assert isinstance(effect.message, TaskFailed)
    assert (effect.message.task, effect.message.code) == ("a", code)
    assert len(pool.tick(1_501)) == 1
    assert list(pool.tasks.queue.in_order(0, ())) == ["c"], "its tier may wait for ever"


def test_retry_after_follows_how_fast_the_queue_drains(pool: TaskPool) -> None:
    shedding, queue = pool._shedding, pool.tasks.queue
    assert shedding.retry_after_s(queue, Tier.BATCH, 0) == RETRY_AFTER_STALLED_S
    for n in range(6):
        add(pool, str(n))
    for now_ms in range(0, 4_000, 1_000):
        shedding.placed(now_ms)
    # Four in four seconds, and six are ahead.
    assert shedding.retry_after_s(queue, Tier.STANDARD, 4_000) == 6
    assert shedding.retry_after_s(queue, Tier.INTERACTIVE, 4_000) == 1
    for _ in range(100):
        shedding.placed(4_000)
    assert shedding.retry_after_s(queue, Tier.STANDARD, 4_000) == 1
    assert shedding.retry_after_s(queue, Tier.STANDARD, 14_001) == RETRY_AFTER_STALLED_S
    shedding.placed(20_000)
    assert 1 <= shedding.retry_after_s(queue, Tier.STANDARD, 29_000) <= RETRY_AFTER_MAX_S


def test_a_failed_task_is_not_revived_by_a_repetition(pool: TaskPool) -> None:
    for n in range(8):
        add(pool, f"b{n}", Tier.BATCH)
    add(pool, "s")
    (again,) = add(pool, "b7", Tier.BATCH)
    assert again.code == "tier_capacity"
    assert TaskId("b7") not in pool.tasks


def test_other_bounds_hold_from_now_on(pool: TaskPool) -> None:
    for n in range(4):
        assert add(pool, str(n), Tier.INTERACTIVE) == []
    pool.change_bounds(QueueBounds(8, {Tier.INTERACTIVE: TierBounds(5, 1_000)}), 1_000)
    assert add(pool, "fifth", Tier.INTERACTIVE) == []
    (failure,) = add(pool, "sixth", Tier.INTERACTIVE)
    assert (failure.task, failure.code) == ("sixth", "queue_full")
    pool.change_bounds(QueueBounds(8, {Tier.INTERACTIVE: TierBounds(1, 1_000)}), 1_000)
    assert len(pool.tasks) == 5, "queued tasks stay"
