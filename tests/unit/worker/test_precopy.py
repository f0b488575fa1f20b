"""Ranks copy KV while their groups serve: what their cores ask for, and what it comes to."""

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, Place, PreCopyOrder
from coordinator.protocol.terms import Carry, Phase, TaskId
from kvadaptor.reshard.terms import ReshardError
from tests.harness.coordinator.builders import header
from tests.harness.worker.core_cell import CoreCell, CoreRank, kinds
from tests.harness.worker.early_cell import (
    TOKENS,
    busy,
    check_streams,
    copy_early,
    finish_move,
    is_over,
    order_of,
    scheduler_of,
)
from tests.harness.worker.fake_engine import FakeEngine
from tests.harness.worker.fake_scheduler import (
    FakeIntake,
    FakeRequest,
    fake_payload,
)
from worker.rank.migration import plan_ahead, precopy
from worker.rank.migration.copy_thread import AtOnce
from worker.rank.migration.manifest import Manifest, TaskSnapshot
from worker.rank.task_state import RunningState


def copied_blocks(rank: CoreRank) -> int:
    copies = rank.runtime.migration.precopy
    return sum(each.slots.size for each in copies.held(copies.epoch))


@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_tasks_run_on_while_their_full_blocks_are_copied(old: str, groups: int, new: str) -> None:
    cell = busy(old, groups)
    before = {name: len(tokens) for name, tokens in cell.streams.items()}
    copy_early(cell, new)
    assert sum(map(copied_blocks, cell.ranks)) >= 1
    assert all(each.participant.serving for each in cell.ranks)
    cell.turn(2)
    assert all(len(cell.streams[name]) > count for name, count in before.items())
    early = {each.core._rank: copied_blocks(each) for each in cell.ranks}
    finish_move(cell)
    assert any(early.values())
    check_streams(cell)


def test_what_was_copied_early_is_not_copied_again() -> None:
    moved = {}
    for is_early in (False, True):
        cell = busy("dp2", 2)
        cell.retarget("tp2")
        if is_early:
            cell.epoch -= 1
            copy_early(cell, "tp2")
        finish_move(cell)
        cell.turn(3)
        times = [each.times for rank in cell.ranks for each in rank.reports]
        moved[is_early] = sum(each.reshard_bytes for some in times for each in some)
        check_streams(cell)
    assert 0 < moved[True] < moved[False]


def test_a_task_is_listed_once_however_many_rounds_have_copied_of_it() -> None:
    """What ranks list is read and planned from while all streams wait."""
    cell = busy("dp2", 2)
    copy_early(cell, "tp2")
    first = {each.core._rank: copied_blocks(each) for each in cell.ranks}
    cell.turn(20)
    copy_early(cell, "tp2", 2)
    grown = [each for each in cell.ranks if copied_blocks(each) > first[each.core._rank] > 0]
    assert grown
    for each in grown:
        copies = each.runtime.migration.precopy
        held = copies.held(copies.epoch)
        assert len({copy.task for copy in held}) == len(held)
        for copy in held:
            assert copy.places.size == copy.blocks.size == copy.slots.size
            assert np.unique(copy.places).size == copy.places.size
    finish_move(cell)
    check_streams(cell)


@pytest.mark.parametrize("carry", [Carry.PAUSE, Carry.DRAIN, Carry.RECOMPUTE])
@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_another_plan_gives_the_pages_back(old: str, groups: int, new: str, carry: Carry) -> None:
    cell = busy(old, groups)
    total = [scheduler_of(each).blocks_total for each in cell.ranks if each.participant.is_leader]
    copy_early(cell, new)
    leaders = [each for each in cell.ranks if each.participant.is_leader]
    schedulers = [scheduler_of(each) for each in leaders]
    assert any(each.aside for each in schedulers)
    assert [each.blocks_total for each in schedulers] != total
    message = cell.wanted(Phase.PARK, carry)
    for each in cell.ranks:
        each.hear(message)
    asked = [kinds(each.turn()) for each in leaders]
    assert all("EndPreCopy" in each for each in asked)
    assert not any(each.aside for each in schedulers)
    cell.turn(3)
    assert not any(copied_blocks(each) for each in cell.ranks)
    for each in cell.ranks:
        each.engine.pages.integrity(full=True)


@pytest.mark.parametrize(("at_least", "passes"), [(2, 9), (1, 3)])
@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_groups_serve_while_pages_are_set_aside(
    monkeypatch: pytest.MonkeyPatch, old: str, groups: int, new: str, at_least: int, passes: int
) -> None:
    """Setting all of a device's pages aside takes longer than a step; many passes, too long."""
    monkeypatch.setattr(precopy, "ASIDE_PAGES", at_least)
    monkeypatch.setattr(precopy, "ASIDE_PASSES_MAX", passes)
    cell = busy(old, groups)
    (leader, *_) = [each for each in cell.ranks if each.participant.is_leader]
    before = {name: len(tokens) for name, tokens in cell.streams.items()}
    cell.retarget(new)
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order_of(cell, pages=5))
    found = list[int]()

    def is_aside() -> bool:
        found.append(len(scheduler_of(leader).aside))
        return found[-1] >= 5

    cell.ask(wanted, ends=is_aside)
    assert {2, 4, 5} <= {*found} <= {0, 2, 4, 5}
    assert all(len(cell.streams[name]) > count + 1 for name, count in before.items())
    cell.ask(wanted, ends=lambda: is_over(cell, 1))
    assert sum(map(copied_blocks, cell.ranks)) >= 1
    finish_move(cell)
    check_streams(cell)


def test_pages_go_back_if_not_all_of_them_are_set_aside_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precopy, "ASIDE_PAGES", 2)
    cell = busy("tp2", 1)
    scheduler = scheduler_of(cell.ranks[0])
    total = scheduler.blocks_total
    cell.retarget("dp2")
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order_of(cell))
    cell.ask(wanted, ends=lambda: bool(scheduler.aside))
    assert cell.ranks[0].runtime.migration.precopy.is_busy
    cell.ask(cell.wanted(Phase.PARK, Carry.PAUSE), ends=cell.all_parked)
    assert not scheduler.aside
    assert scheduler.blocks_total == total


def test_a_task_that_ends_meanwhile_is_not_carried() -> None:
    cell = CoreCell("dp2")
    cell.place_task("short", 0, range(40), 6)
    cell.place_task("long", 1, range(50, 90), TOKENS)
    cell.turn(3)
    copy_early(cell, "tp2")
    cell.turn(8)
    assert len(cell.streams["short"]) == 6
    cell.prompts.pop("short")
    finish_move(cell)
    check_streams(cell)


def test_a_follower_lets_loads_end_before_it_copies_into_pages_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its leader may have given up loads whose blocks these are, and knows only its own copies."""
    ordered: list[Rank] = []
    monkeypatch.setattr(FakeEngine, "order_copies", lambda self: ordered.append(self.spec.rank))
    copy_early(busy("tp2", 1), "dp2")
    assert ordered == [Rank(1)]


def test_leaders_set_nothing_aside_without_a_grant() -> None:
    cell = busy("dp2", 2)
    cell.retarget("tp2")
    order = PreCopyOrder(1, ())
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order)
    cell.ask(wanted, ends=lambda: all(each.reports[-1].precopy for each in cell.ranks))
    assert not any(scheduler_of(each).aside for each in cell.ranks)
    finish_move(cell)
    check_streams(cell)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tasks whose requests were built to continue them, in order."""
    names: list[str] = []
    build = FakeIntake.continued_request

    def noted(self: FakeIntake, payload: bytes, state: RunningState) -> FakeRequest:
        names.append(state.task)
        return build(self, payload, state)

    monkeypatch.setattr(FakeIntake, "continued_request", noted)
    return names


@pytest.mark.parametrize(("old", "groups", "new"), [("dp2", 2, "tp2"), ("tp2", 1, "dp2")])
def test_new_leaders_build_their_requests_before_the_switch(
    old: str, groups: int, new: str, built: list[str]
) -> None:
    cell = busy(old, groups)
    copy_early(cell, new)
    assert sorted(built) == sorted(cell.prompts)
    cell.turn(3)
    finish_move(cell)
    assert sorted(built) == sorted(cell.prompts), "nothing is built again"
    check_streams(cell)


def test_any_leader_may_get_a_task_without_a_full_block(built: list[str]) -> None:
    cell = CoreCell("tp2")
    for name in ("short-0", "short-1"):
        cell.place_task(name, 0, range(10), TOKENS)
    cell.turn(4)
    copy_early(cell, "dp2")
    assert sorted(built) == ["short-0", "short-0", "short-1", "short-1"]
    cell.turn(2)
    finish_move(cell)
    assert len(built) == 4
    assert [len(each.runtime.book) for each in cell.ranks] == [1, 1]
    check_streams(cell)


def test_a_task_of_a_new_attempt_is_built_again(built: list[str]) -> None:
    cell = busy("dp2", 2)
    copy_early(cell, "tp2")
    leader, tokens = cell.ranks[1], tuple(cell.streams["task-1"])
    leader.runtime.give_back(TaskId("task-1"))
    leader.runtime.returned.clear()
    binding, prompt = leader.participant.binding, cell.prompts["task-1"]
    assert binding is not None
    given, payload = header("task-1", max_tokens=TOKENS), fake_payload("task-1", prompt, TOKENS)
    leader.hear(Place(given, 2, binding, payload, generated_tokens=tokens))
    cell.turn(3)
    finish_move(cell)
    assert sorted(built) == ["task-0", "task-1", "task-1"]
    check_streams(cell)


def test_payloads_are_published_once_before_the_switch() -> None:
    cell = busy("dp2", 2)
    copy_early(cell, "tp2")
    first = [payloads_of(each) for each in cell.ranks]
    assert all(payload for some in first for payload in some)
    copy_early(cell, "tp2", 2)
    assert [payloads_of(each) for each in cell.ranks] == [[b""], [b""]]
    cell.ask(cell.wanted(Phase.PARK, Carry.RESHARD), ends=cell.all_parked)
    assert [payloads_of(each) for each in cell.ranks] == first, "a rank may have missed a round"


def payloads_of(rank: CoreRank) -> list[bytes]:
    """The payloads in what a rank has published last."""
    manifest = pickle.loads(rank.engine.mailboxes[rank.core._rank].message)
    return [each.payload for each in manifest.cargo]


def test_another_plan_forgets_what_was_built(built: list[str]) -> None:
    cell = busy("dp2", 2)
    copy_early(cell, "tp2")
    leader, scheduler = cell.ranks[1], scheduler_of(cell.ranks[1])
    message = cell.wanted(Phase.PARK, Carry.PAUSE)
    for each in cell.ranks:
        each.hear(message)
    cell.turn(3)
    requests = cell.ranks[0].runtime.migration.precopy.requests
    (state,), _ = scheduler.movable(0)
    led = leader.runtime.book.get(TaskId("task-1"))
    assert led is not None and "task-1" in built
    now = TaskSnapshot(led.header, led.attempt, led.emitted, led.payload, state)
    assert requests.take(1, now) is None


class PatientThread(Executor):
    """Runs what it is given when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append((Future(), lambda: fn(*args, **kwargs)))
        return self.calls[-1][0]

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for future, call in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 -- it is raised where the result is asked for
                future.set_exception(error)


@pytest.fixture
def threaded() -> tuple[CoreCell, list[PatientThread]]:
    """A busy cell whose ranks read and plan in threads."""
    cell = busy("dp2", 2)
    threads = [PatientThread() for _ in cell.ranks]
    for rank, thread in zip(cell.ranks, threads, strict=True):
        rank.runtime.migration.precopy._thread = thread
    return cell, threads


def ask_for_work(cell: CoreCell, threads: list[PatientThread], wanted: Directive) -> None:
    """Ask until all threads have something to do, or the first round is over."""
    cell.ask(wanted, ends=lambda: all(thread.calls for thread in threads) or is_over(cell, 1))


def run_from_now_on(cell: CoreCell, threads: list[PatientThread]) -> None:
    """Let the threads run what they have, and from now on all that they are given."""
    for rank, thread in zip(cell.ranks, threads, strict=True):
        thread.run()
        rank.runtime.migration.precopy._thread = AtOnce()


@pytest.mark.parametrize("drafts", [False, True])
def test_steps_go_on_while_a_thread_reads_and_plans(
    threaded: tuple[CoreCell, list[PatientThread]], drafts: bool
) -> None:
    cell, threads = threaded
    cell.retarget("tp2")
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order_of(cell, drafts=drafts))
    works = 0
    while not is_over(cell, 1):
        before = {name: len(tokens) for name, tokens in cell.streams.items()}
        ask_for_work(cell, threads, wanted)
        cell.turn(2)
        assert all(len(cell.streams[name]) > count for name, count in before.items())
        works += any(thread.calls for thread in threads)
        for thread in threads:
            thread.run()
        cell.turn(1)
    assert works >= 2, "it reads, and it plans"
    assert [each.runtime.migration.planning.draft_of(cell.epoch) for each in cell.ranks] == [
        int(drafts)
    ] * 2
    run_from_now_on(cell, threads)
    finish_move(cell, drafted=int(drafts))
    check_streams(cell)


def test_what_a_thread_has_read_for_another_switch_is_not_used(
    threaded: tuple[CoreCell, list[PatientThread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, threads = threaded
    read, reads = precopy._read, []

    def noted(messages: Mapping[int, bytes]) -> dict[int, Manifest]:
        reads.append(cell.epoch)
        return read(messages)

    monkeypatch.setattr(precopy, "_read", noted)
    cell.retarget("tp2")
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order_of(cell, drafts=True))
    ask_for_work(cell, threads, wanted)
    run_from_now_on(cell, threads)
    copy_early(cell, "tp2")
    assert reads == [cell.epoch - 1] * 2 + [cell.epoch] * 2
    finish_move(cell)
    check_streams(cell)


def test_a_round_drafts_if_another_coordinator_wants_that(
    threaded: tuple[CoreCell, list[PatientThread]],
) -> None:
    """What the thread plans for the copies of the round is not the draft."""
    cell, threads = threaded
    cell.retarget("tp2")
    order = order_of(cell)
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order)
    ask_for_work(cell, threads, wanted)
    for thread in threads:
        thread.run()
    ask_for_work(cell, threads, wanted)
    run_from_now_on(cell, threads)
    drafting = PreCopyOrder(order.round, order.grants, drafts=True)
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=drafting)
    cell.ask(wanted, ends=lambda: is_over(cell, 1))
    assert [each.runtime.migration.planning.draft_of(cell.epoch) for each in cell.ranks] == [1, 1]
    finish_move(cell)
    check_streams(cell)


@pytest.mark.parametrize(
    ("drafts", "module", "call", "event"),
    [
        (False, precopy, "plan_early_copies", "precopy_not_planned"),
        (True, plan_ahead, "plan_move", "precopy_not_drafted"),
    ],
)
def test_a_round_ends_if_a_plan_fails(
    threaded: tuple[CoreCell, list[PatientThread]],
    monkeypatch: pytest.MonkeyPatch,
    drafts: bool,
    module: ModuleType,
    call: str,
    event: str,
) -> None:
    cell, threads = threaded

    def fail(*_: object) -> None:
        raise ReshardError("there is no such plan.")

    monkeypatch.setattr(module, call, fail)
    cell.retarget("tp2")
    wanted = cell.wanted(Phase.PARK, Carry.RESHARD, precopy=order_of(cell, drafts=drafts))
    with capture_logs() as logs:
        for _ in range(4):
            ask_for_work(cell, threads, wanted)
            for thread in threads:
                thread.run()
        cell.ask(wanted, ends=lambda: is_over(cell, 1))
    assert [each["event"] for each in logs if each["event"] == event] == [event] * 2
    monkeypatch.undo()
    assert sum(map(copied_blocks, cell.ranks)) == 0
    finish_move(cell)
    check_streams(cell)
