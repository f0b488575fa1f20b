"""The order in which queued tasks are taken."""

from collections import Counter
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.task import State, Task
from coordinator.tasks.task_queue import IDLE_LINES_MAX, PLACEMENTS_PER_PROMOTION, TaskQueue
from tests.harness.coordinator.builders import header

AGEING_MS = 100


def task(
    name: str,
    arrival: int,
    tier: Tier = Tier.STANDARD,
    arrived_ms: int = 0,
    tenant: str = "",
    prompt: int = 10,
) -> Task:
    made = header(name, tier=tier, tenant=tenant, prompt=prompt)
    return Task(made, arrival, arrived_ms, State.QUEUED, arrived_ms)


def queue(*tasks: Task) -> TaskQueue:
    made = TaskQueue(AGEING_MS)
    for each in tasks:
        made.put(each)
    return made


def order(of: TaskQueue, now_ms: int = 0, closed: Collection[Tier] = ()) -> list[TaskId]:
    return list(of.in_order(now_ms, closed))


def take(of: TaskQueue, tasks: dict[str, Task], now_ms: int = 0) -> TaskId:
    """Place the first one, as the pool does."""
    first = order(of, now_ms)[0]
    of.placed(tasks[first], now_ms)
    of.remove(tasks[first])
    return first


def test_tier_comes_before_arrival() -> None:
    tasks = queue(task("b", 0, Tier.BATCH), task("s", 1), task("i", 2, Tier.INTERACTIVE))
    assert order(tasks) == ["i", "s", "b"]
    assert len(tasks) == 3


def test_arrival_decides_within_a_tier_whenever_a_task_is_put() -> None:
    late, early = task("late", 7), task("early", 3)
    assert order(queue(late, early)) == ["early", "late"]


def test_waiting_lifts_a_task_tier_by_tier() -> None:
    old = task("old", 0, Tier.BATCH)
    standard = task("new standard", 1, Tier.STANDARD, arrived_ms=99)
    interactive = task("new interactive", 2, Tier.INTERACTIVE, arrived_ms=99)
    tasks = queue(old, standard, interactive)
    assert order(tasks, 99) == ["new interactive", "new standard", "old"]
    assert order(tasks, 198) == ["new interactive", "new standard", "old"]
    assert order(tasks, 200) == ["old", "new interactive", "new standard"]
    tasks.remove(interactive)
    assert order(tasks, 198) == ["old", "new standard"]


def test_promotions_are_a_share_of_the_placements() -> None:
    """Without it, a backlog of aged batch work would come before everything else."""
    tasks = {f"b{n}": task(f"b{n}", n, Tier.BATCH) for n in range(40)}
    tasks |= {f"i{n}": task(f"i{n}", 40 + n, Tier.INTERACTIVE, arrived_ms=1_000) for n in range(40)}
    waiting = queue(*tasks.values())
    taken = "".join(take(waiting, tasks, 1_000)[0] for _ in range(40))
    assert taken.count("b") == 40 // (PLACEMENTS_PER_PROMOTION + 1) + 1
    assert taken.startswith("b" + "i" * PLACEMENTS_PER_PROMOTION + "b")


def test_a_tenant_that_floods_its_tier_delays_itself() -> None:
    tasks = {f"f{n}": task(f"f{n}", n, tenant="flood") for n in range(100)}
    waiting = queue(*tasks.values())
    for _ in range(10):
        take(waiting, tasks)
    tasks |= {f"q{n}": task(f"q{n}", 100 + n, tenant="quiet") for n in range(3)}
    for n in range(3):
        waiting.put(tasks[f"q{n}"])
    taken = [take(waiting, tasks)[0] for _ in range(6)]
    assert "".join(taken) in ("qfqfqf", "fqfqfq")


def test_shares_are_counted_in_tokens() -> None:
    tasks = {f"b{n}": task(f"b{n}", n, tenant="big", prompt=990) for n in range(20)}
    tasks |= {f"s{n}": task(f"s{n}", 20 + n, tenant="small", prompt=90) for n in range(40)}
    waiting = queue(*tasks.values())
    taken = Counter(take(waiting, tasks)[0] for _ in range(33))
    # 990 + 10 tokens against 90 + 10 of each: ten small ones for a big one.
    assert taken["s"] in (29, 30)


def test_what_a_tenant_did_not_use_is_not_saved_up() -> None:
    tasks = {f"a{n}": task(f"a{n}", n, tenant="a") for n in range(60)}
    waiting = queue(*tasks.values())
    for _ in range(30):
        take(waiting, tasks)
    tasks |= {f"b{n}": task(f"b{n}", 60 + n, tenant="b") for n in range(30)}
    for n in range(30):
        waiting.put(tasks[f"b{n}"])
    taken = Counter(take(waiting, tasks)[0] for _ in range(20))
    assert taken == {"a": 10, "b": 10}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=1, max_size=60),
    st.data(),
)
def test_no_backlogged_tenant_gets_ahead_by_more_than_two_tasks(
    arrivals: list[tuple[str, int]], data: st.DataObject
) -> None:
    """The bound of start-time fair queueing, over any arrivals, while two tenants wait."""
    tasks = {
        f"{tenant}{n}": task(f"{tenant}{n}", n, tenant=tenant, prompt=prompt)
        for n, (tenant, prompt) in enumerate(arrivals)
    }
    waiting = queue(*tasks.values())
    served: Counter[str] = Counter()
    while len(waiting):
        name = take(waiting, tasks)
        served[name[0]] += tasks[name].header.prompt_tokens + tasks[name].header.max_tokens
        left = {tenant for tenant in "abc" if waiting.count_of(Tier.STANDARD, tenant)}
        values = [served[tenant] for tenant in left]
        if values:
            assert max(values) - min(values) <= 2 * 510
    assert sum(served.values()) == sum(prompt + 10 for _, prompt in arrivals)


def test_idle_tenants_are_forgotten() -> None:
    waiting = queue(task("stays", 0, tenant="stays"))
    for n in range(1, 3 * IDLE_LINES_MAX):
        each = task(str(n), n, tenant=str(n))
        waiting.put(each)
        waiting.placed(each, 0)
        waiting.remove(each)
    assert len(waiting._lines[Tier.STANDARD]) <= IDLE_LINES_MAX + 1
    assert order(waiting) == ["stays"]


def test_a_removed_task_is_gone_and_may_come_back() -> None:
    first, second = task("first", 0), task("second", 1)
    tasks = queue(first, second)
    tasks.remove(first)
    assert order(tasks) == ["second"]
    tasks.put(first)
    assert order(tasks) == ["first", "second"]


def test_a_closed_tier_ends_early() -> None:
    tasks = queue(task("a", 0), task("b", 1), task("c", 2, Tier.BATCH))
    closed: set[Tier] = set()
    taken = []
    for each in tasks.in_order(0, closed):
        taken.append(each)
        closed.add(Tier.STANDARD)
    assert taken == ["a", "c"]
