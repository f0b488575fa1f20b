"""What a scheduler loads from host pages and stores into them, hook by hook."""

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from kvadaptor.host.directory import HostDirectory
from kvadaptor.host.layout import HostLayout
from worker.engine.scheduling import host_blocks
from worker.engine.scheduling.block_copies import BlockCopies
from worker.engine.scheduling.connector import OFFER_S, BlockConnector
from worker.engine.scheduling.host_blocks import HostBlocks, StoreRules

SIZE = 4
PAGES = 8


def key_of(number: int) -> bytes:
    return bytes([number + 1]) * 32


@dataclass
class Task:
    """What the hooks read of vLLM's request."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    status: RequestStatus = RequestStatus.RUNNING


@dataclass
class Blocks:
    numbers: list[int]

    def get_block_ids(self) -> tuple[list[int]]:
        return (self.numbers,)


@dataclass
class Counts:
    hit_tokens: int = 0
    full: int = 0


@dataclass
class Scheduler:
    """Tasks whose block n is 100 + n."""

    requests: dict[str, Any] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)
    block_size: int = SIZE
    max_num_scheduled_tokens: int = 64

    def _blocks_of(self, request_id: str, first: int = 0, last: int | None = None) -> list[int]:
        return [100 + number for number in range(20)][first:last]


class Group:
    """One leader's hooks over a directory of its own."""

    def __init__(
        self, *, shares: int = 1, is_sooner: Any = lambda _: True, is_aside: bool = False
    ) -> None:
        layout = HostLayout(2, PAGES, 64)
        memory = memoryview(bytearray(layout.data_at))
        self.own, self.other = (HostDirectory(memory, layout, rank, 0.0) for rank in range(2))
        self.scheduler, self.counts = Scheduler(), Counts()
        for each in (self.own, self.other):
            each.set_ready(is_ready=True)
        rules = StoreRules((0, 1)[:shares], shares, is_aside, is_sooner, lambda _: False)
        pages = HostBlocks(self.scheduler, self.own, self.counts, rules)
        self.hooks = BlockConnector(self.scheduler, (pages,), pages)

    def task(self, tokens: int, name: str = "task", computed: int = 0) -> Any:
        made = Task(name, tokens, [key_of(n) for n in range(tokens // SIZE)], computed)
        self.scheduler.requests[name] = made
        return made

    def step(self, **tokens: int) -> BlockCopies | None:
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = tokens
        return self.hooks.build_connector_meta(output)

    def store(self, directory: HostDirectory, *numbers: int) -> list[int]:
        pages = directory.allocate([key_of(number) for number in numbers], 1, 0.0)
        assert len(pages) == len(numbers)
        directory.entries.complete(pages, 0, directory.entries.tags(pages))
        return pages

    def pins(self) -> int:
        at = self.own.layout.pins_at(0)
        return sum(self.own._bytes[at : at + self.own.layout.pages])


def test_full_blocks_of_a_step_are_stored_once() -> None:
    group = Group(shares=2)
    task = group.task(10)
    step = group.step(task=10)
    assert step is not None
    assert step.store_blocks == [100, 101]
    assert not step.load_pages
    task.num_computed_tokens = 10
    task.block_hashes.append(key_of(2))
    assert group.step(task=1) is None, "the third block is not full"
    task.num_computed_tokens = 11
    later = group.step(task=1)
    assert later is not None
    assert later.store_blocks == [102]
    # Another task with the same blocks finds them being filled.
    assert group.step(**{group.task(8, "twin").request_id: 8}) is None


@pytest.mark.parametrize("kind", ["usual", "lost", "not ready"])
def test_a_block_is_stored_by_the_step_that_fills_it_whatever_the_steps_before_were(
    kind: str,
) -> None:
    """A step that loads from lost groups, or is not ready, stores nothing and fills a token."""
    group = Group()
    task = group.task(4, computed=3)
    stored = []
    for number in range(6):
        group.own.set_ready(is_ready=(kind, number) != ("not ready", 1))
        if (kind, number) == ("lost", 1):
            group.hooks._step.lost_blocks.append(7)
        step = group.step(task=1)
        stored.append(step.store_blocks if step is not None else [])
        task.num_computed_tokens += 1
        task.num_tokens += 1
        if task.num_tokens % SIZE == 0:
            task.block_hashes.append(key_of(task.num_tokens // SIZE - 1))
    assert stored == [[100], [], [], [], [101], []]


def test_a_block_without_a_hash_waits() -> None:
    """Where steps overlap, the token that fills a block may not be known yet."""
    group = Group()
    task = group.task(8)
    task.block_hashes.pop()
    first = group.step(task=8)
    assert first is not None
    assert first.store_blocks == [100]
    task.num_computed_tokens = 8
    task.block_hashes.append(key_of(1))
    second = group.step(task=1)
    assert second is not None
    assert second.store_blocks == [101]


def test_a_prefix_is_loaded_up_to_the_last_token() -> None:
    group = Group()
    pages = group.store(group.other, 0, 1, 2, 3)
    task = group.task(16)
    assert group.hooks.get_num_new_matched_tokens(task, 0) == (12, False)
    group.hooks.update_state_after_alloc(task, Blocks([7, 8, 9, 10]), 12)
    assert group.counts.hit_tokens == 12
    step = group.step(task=4)
    assert step is not None
    assert (step.load_blocks, step.load_pages) == ([7, 8, 9], pages[:3])
    assert not step.store_pages, "all are there"
    assert group.pins() == 3
    group.hooks.step_is_over(step)
    group.hooks.step_is_over(step)
    assert group.pins() == 0


def test_what_the_device_has_is_not_loaded() -> None:
    group = Group()
    pages = group.store(group.other, 0, 1, 2)
    task = group.task(13)
    assert group.hooks.get_num_new_matched_tokens(task, 8) == (4, False)
    group.hooks.update_state_after_alloc(task, Blocks([7, 8, 9, 10]), 4)
    step = group.step(task=1)
    assert step is not None
    assert (step.load_blocks, step.load_pages) == ([9], pages[2:])


def test_a_gap_ends_what_is_loaded() -> None:
    group = Group()
    group.store(group.other, 0, 2)
    assert group.hooks.get_num_new_matched_tokens(group.task(16), 0) == (4, False)


@pytest.mark.parametrize("reason", ["slow", "reads no cache", "nothing"])
def test_nothing_is_loaded_and_nothing_stays_pinned(reason: str) -> None:
    group = Group(is_sooner=lambda tokens: reason != "slow" and tokens > 0)
    if reason != "nothing":
        group.store(group.other, 0, 1)
    task = group.task(12)
    task.skip_reading_prefix_cache = reason == "reads no cache"
    assert group.hooks.get_num_new_matched_tokens(task, 0) == (0, False)
    assert group.pins() == 0


def test_an_offer_is_kept_while_blocks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    group.store(group.other, 0, 1)
    task = group.task(12)
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for _ in range(3):
        assert group.hooks.get_num_new_matched_tokens(task, 0) == (8, False)
        assert group.step() is None
        assert group.pins() == 2
    # Less of it is needed now.
    assert group.hooks.get_num_new_matched_tokens(task, 4) == (4, False)
    assert group.pins() == 1
    now_s += OFFER_S + 0.1
    assert group.step() is None
    assert group.pins() == 0


def test_a_smaller_allocation_lets_the_rest_go() -> None:
    group = Group()
    pages = group.store(group.other, 0, 1, 2)
    task = group.task(16)
    assert group.hooks.get_num_new_matched_tokens(task, 0) == (12, False)
    group.hooks.update_state_after_alloc(task, Blocks([7, 8, 9]), 4)
    step = group.step(task=1)
    assert step is not None
    assert step.load_pages == pages[:1]
    assert group.pins() == 1


def test_blocks_that_another_rank_has_stored_are_used_by_tasks_that_move_here() -> None:
    group = Group()
    pages = group.store(group.other, 0, 1)
    group.own.refresh()
    group.task(8)
    group.step(task=8)
    assert group.own._users == dict.fromkeys(pages, 1)


def test_ended_tasks_leave_nothing_but_their_pages() -> None:
    group = Group()
    group.store(group.other, 0)
    task = group.task(9)
    assert group.hooks.get_num_new_matched_tokens(task, 0) == (4, False)
    assert group.hooks.request_finished(task, []) == (False, None)
    assert group.pins() == 0
    step = group.step(task=9)
    assert step is not None
    assert len(step.store_pages) == 1
    assert group.own._users
    group.hooks.request_finished(task, [])
    assert not group.own._users


def test_steps_that_never_end_are_forgotten() -> None:
    group = Group()
    group.store(group.other, 0)
    task = group.task(8)
    group.hooks.get_num_new_matched_tokens(task, 0)
    group.hooks.update_state_after_alloc(task, Blocks([7]), 4)
    assert group.step(task=4) is not None
    group.hooks.forget_steps()
    assert group.pins() == 0


def test_where_all_pages_are_in_use_blocks_are_counted() -> None:
    group = Group()
    pages = group.store(group.own, *range(50, 50 + PAGES))
    for number, page in enumerate(pages, 50):
        assert group.other.pin(page, key_of(number)) or group.own.pin(page, key_of(number))
    assert group.step(**{group.task(8).request_id: 8}) is None
    assert group.counts.full == 2


# ------------------------------------------------------------------ beside steps


def given(group: Group, *blocks: int, **tokens: int) -> BlockCopies | None:
    """A step that computes these tokens and gives a task these blocks."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = tokens
    output.scheduled_cached_reqs.new_block_ids.append((list(blocks),))
    return group.hooks.build_connector_meta(output)


def written(group: Group, step: BlockCopies) -> None:
    """All members have stored what a step says."""
    group.own.entries.complete(step.store_pages, 0, step.store_tags)


def test_beside_steps_the_next_one_stores_what_a_step_has_filled() -> None:
    group = Group(is_aside=True)
    task = group.task(10)
    assert group.step(task=10) is None
    task.num_computed_tokens = 10
    step = group.step(task=1)
    assert step is not None
    assert step.store_blocks == [100, 101]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED])
def test_the_last_blocks_of_an_ended_task_are_stored(status: RequestStatus) -> None:
    """Unless it ended in another way: then its blocks may hold anything."""
    group = Group(is_aside=True)
    task = group.task(8)
    assert group.step(task=8) is None
    task.num_computed_tokens = 8
    task.status = status
    group.hooks.request_finished(task, [])
    step = group.step()
    assert (step.store_blocks if step else []) == (
        [100, 101] if status is RequestStatus.FINISHED_STOPPED else []
    )
    assert group.step() is None


def test_a_preempted_task_computes_no_full_block_again() -> None:
    group = Group(is_aside=True)
    task = group.task(8)
    assert group.step(task=8) is None
    task.num_computed_tokens = 8
    group.hooks.preempted(task)
    task.num_computed_tokens = 0
    step = given(group, 100)
    assert step is not None
    assert (step.store_blocks, step.frees_stores) == ([100, 101], True)
    written(group, step)
    assert group.hooks.get_num_new_matched_tokens(group.task(9, "task"), 0) == (8, False)


def test_a_step_waits_for_stores_of_blocks_that_it_writes() -> None:
    group = Group(is_aside=True)
    task = group.task(8)
    task.num_computed_tokens = 8
    first = given(group, 7, task=1)
    assert first is not None
    assert (first.store_blocks, first.frees_stores) == ([100, 101], False)
    again = given(group, 8, 101, task=1)
    assert again is not None
    assert again.frees_stores
    assert given(group, 101, task=1) is None, "that step has waited"


def test_loads_from_lost_groups_wait_for_stores_of_their_blocks() -> None:
    """Blocks of a preempted task that no step has stored yet are not stored any more."""
    group = Group(is_aside=True)
    task = group.task(8)
    task.num_computed_tokens = 8
    assert given(group, 7, task=1) is not None
    late = group.task(12, "late", computed=12)
    late.block_hashes = [key_of(number) for number in (5, 6, 7)]
    group.hooks.preempted(late)
    group.hooks._step.lost_blocks += [100, 102]
    loads = given(group, 8, task=1)
    assert loads is not None
    assert (loads.store_blocks, loads.frees_stores) == ([], True)
    after = given(group, 9)
    assert after is not None
    assert after.store_blocks == [101], "the others have got other content"


def test_blocks_that_all_members_have_stored_are_free() -> None:
    group = Group(is_aside=True)
    task = group.task(8)
    task.num_computed_tokens = 8
    first = given(group, 7, task=1)
    assert first is not None
    written(group, first)
    assert given(group, 101, task=1) is None


def test_a_step_may_write_to_a_block_that_it_stores() -> None:
    """A task has ended and another gets its block at once."""
    group = Group(is_aside=True)
    task = group.task(8)
    task.num_computed_tokens, task.status = 8, RequestStatus.FINISHED_STOPPED
    group.hooks.request_finished(task, [])
    step = given(group, 100)
    assert step is not None
    assert (step.store_blocks, step.frees_stores) == ([100, 101], True)


def test_a_long_prompt_that_arrived_is_looked_at_over_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_blocks, "LOOKS_PER_STEP", 2)
    group = Group(is_aside=True)
    task = group.task(20)
    task.num_computed_tokens = 20
    steps = [group.step(task=1) for _ in range(4)]
    assert [step.store_blocks if step else None for step in steps] == [
        [100, 101],
        [102, 103],
        [104],
        None,
    ]


def test_a_long_prompt_that_ended_is_stored_over_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not the blocks that other tasks get meanwhile."""
    monkeypatch.setattr(host_blocks, "LOOKS_PER_STEP", 2)
    group = Group(is_aside=True)
    task = group.task(28)
    task.num_computed_tokens, task.status = 28, RequestStatus.FINISHED_STOPPED
    group.hooks.request_finished(task, [])
    steps = [given(group), given(group, 104), given(group), given(group)]
    assert [step.store_blocks if step else None for step in steps] == [
        [100, 101],
        [102, 103],
        [105, 106],
        None,
    ]


def test_a_group_uses_no_page_before_all_members_are_ready() -> None:
    group = Group(shares=2)
    group.store(group.other, 0, 1)
    task = group.task(12)
    group.other.set_ready(is_ready=False)
    assert group.hooks.get_num_new_matched_tokens(task, 0) == (0, False)
    assert group.step(task=12) is None
    group.other.set_ready(is_ready=True)
    assert group.hooks.get_num_new_matched_tokens(task, 0) == (8, False)


def test_a_group_that_is_left_stores_nothing_later() -> None:
    group = Group(is_aside=True)
    task = group.task(8)
    task.num_computed_tokens, task.status = 8, RequestStatus.FINISHED_STOPPED
    group.hooks.request_finished(task, [])
    group.hooks.stop()
    assert group.step() is None
