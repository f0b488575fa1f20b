"""What a rank relies on in its engine: one suite for the product's engine and the one in memory."""

import pickle
from typing import Any

import numpy as np
import pytest

from comm_pool.formations import PeerLostError
from comm_pool.layout import Mode, Rank
from kvadaptor.geometry import Split
from kvadaptor.pages import without
from tests.harness.worker.engine_bench import NOTHING, EngineBench

PROMPT = list(range(100, 140))
OTHER = list(range(300, 350))
PAGES = 8
BLOCK = 32


# ------------------------------------------------------------------------------ steps


def test_a_step_gives_every_running_task_one_token(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = {"a": bench.alone(PROMPT, 3), "b": bench.alone(OTHER, 2)}
    bench.add("a", PROMPT, 3)
    bench.add("b", OTHER, 2)
    assert bench.scheduler.get_request_counts() == (0, 2)
    steps = [bench.step()]
    assert bench.scheduler.get_request_counts() == (2, 0)
    assert bench.scheduler.reads_no_prompt
    steps += [bench.step(), bench.step()]
    assert [{name: len(new) for name, new in each.items()} for each in steps] == [
        {"a": 1, "b": 1},
        {"a": 1, "b": 1},
        {"a": 1},
    ]
    given = {name: [each[name][0] for each in steps if name in each] for name in "ab"}
    assert given == wanted
    assert bench.scheduler.idle


def test_the_last_output_of_a_task_says_so(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 2)
    ends = []
    for _ in range(2):
        plan = bench.plan()
        ends += [each.finished for each in bench.mode.finish_step(plan, bench.mode.execute(plan))]
    assert ends == [False, True]
    assert bench.scheduler.blocks_free == bench.scheduler.blocks_total


def test_an_ended_task_is_told_to_followers_by_an_empty_step(bench: EngineBench) -> None:
    bench.begin(1, PAGES)
    bench.alone(PROMPT, 1)
    assert (bench.scheduler.idle, bench.scheduler.has_requests()) == (True, True)
    plan = bench.plan()
    assert (plan.is_empty, plan.tokens, plan.reads_prompts) == (True, 0, False)
    assert bench.finish(plan, bench.mode.execute(plan)) == {}
    assert not bench.scheduler.has_requests()


def test_a_plan_says_its_size(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 9)
    plan = bench.plan()
    assert (plan.tokens, plan.context, plan.reads_prompts) == (len(PROMPT), 0, True)
    assert plan.mode is bench.group.mode
    bench.finish(plan, bench.mode.execute(plan))
    plan = bench.plan()
    assert (plan.tokens, plan.context, plan.reads_prompts) == (1, len(PROMPT), False)
    bench.finish(plan, bench.mode.execute(plan))


def test_a_long_prompt_takes_several_steps(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    budget = bench.engine.facts().tokens_per_step_max
    prompt = list(range(100, 100 + budget + 20))
    wanted = bench.alone(prompt, 2)
    bench.add("a", prompt, 2)
    plan = bench.plan()
    assert (plan.tokens, plan.reads_prompts) == (budget, True)
    assert bench.finish(plan, bench.mode.execute(plan)) == {}
    assert not bench.scheduler.reads_no_prompt
    assert [bench.step(), bench.step()] == [{"a": wanted[:1]}, {"a": wanted[1:]}]


def test_a_follower_computes_what_it_is_sent(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = bench.alone(PROMPT, 2)
    bench.add("a", PROMPT, 2)
    for token in wanted:
        plan = bench.plan()
        result = bench.mode.execute(pickle.loads(pickle.dumps(plan)))
        assert bench.finish(plan, result) == {"a": [token]}


def test_a_deferred_step_is_computed_when_it_is_run(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = bench.alone(PROMPT, 2)
    bench.add("a", PROMPT, 2)
    bench.step()
    plan = bench.plan()
    run = bench.mode.ready(plan)
    if bench.mode.table is not None:
        bench.mode.table.unmap(bench.indices())  # Its KV stays where it is now.
    assert bench.finish(plan, run()) == {"a": wanted[1:]}


def test_all_is_done_that_was_launched(bench: EngineBench) -> None:
    bench.begin(1, PAGES)
    bench.add("a", PROMPT, 2)
    bench.step()
    assert bench.engine.done()()


# ------------------------------------------------------------------------------ tasks


def test_a_task_goes_on_with_the_tokens_that_it_has(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = bench.alone(PROMPT, 6)
    bench.add("a", PROMPT, 6)
    bench.run(3)
    assert bench.scheduler.take_back(["a", "nobody"]) == {"a": wanted[:3]}
    assert bench.scheduler.idle
    assert bench.scheduler.blocks_free == bench.scheduler.blocks_total
    bench.add("a", PROMPT, 6, wanted[:3])
    assert bench.run() == {"a": wanted[3:]}


def test_tasks_that_hold_nothing_wait(bench: EngineBench) -> None:
    bench.begin(1, PAGES)
    bench.add("a", PROMPT, 9)
    bench.step()
    bench.add("b", OTHER, 9)
    scheduler = bench.scheduler
    assert (scheduler.holding(), scheduler.not_holding()) == (["a"], ["b"])
    assert scheduler.not_movable() == []
    assert list(scheduler.requests) == ["a", "b"]


def test_a_task_is_outgrown_when_it_needs_more_blocks_than_there_are(bench: EngineBench) -> None:
    bench.begin(1, 3)
    scheduler = bench.scheduler
    assert len(scheduler.set_aside(1)) == 1
    bench.add("a", PROMPT, 3 * BLOCK)
    while bench.step():
        assert scheduler.outgrown() == []
    assert scheduler.outgrown() == [], "it gets the block that is set aside"
    scheduler.give_back()
    while bench.step():
        pass
    assert scheduler.outgrown() == ["a"]
    # The last token that it has needs no KV.
    assert len(scheduler.take_back(["a"])["a"]) == 3 * BLOCK - len(PROMPT) + 1


def test_a_scheduler_is_full_with_as_many_tasks_as_may_run(bench: EngineBench) -> None:
    bench.begin(1, PAGES)
    for number in range(bench.engine.facts().max_tasks):
        assert not bench.scheduler.is_full
        bench.add(f"task {number}", PROMPT, 2)
    assert bench.scheduler.is_full


def test_a_bad_request_is_refused(bench: EngineBench) -> None:
    with pytest.raises(Exception, match=r"."):
        bench.engine.intake.request(b"no request")


# ------------------------------------------------------------------------------ pages


def test_a_grant_bounds_what_runs(bench: EngineBench, width: int) -> None:
    bench.begin(width, 1)
    slots = bench.engine.kv.geometry.slots_per_page(width)
    assert (bench.scheduler.blocks_free, bench.scheduler.blocks_total) == (slots, slots)
    wanted = list(range(100, 100 + slots * BLOCK + 1))
    bench.add("a", wanted, 2)
    assert bench.step() == {}
    assert bench.scheduler.not_holding() == ["a"]
    bench.begin(width, 1)
    assert bench.scheduler.blocks_total == 2 * slots
    assert len(bench.run()["a"]) == 2


def test_tasks_without_room_take_turns_and_lose_nothing(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = {"a": bench.alone(PROMPT, 40), "b": bench.alone(OTHER, 40)}
    assert bench.park() == []
    bench.begin(width, 4 // width)  # Each task needs three blocks in the end.
    bench.add("a", PROMPT, 40)
    bench.add("b", OTHER, 40)
    assert bench.run() == wanted
    preemptions = dict(bench.engine.gauges())["preemptions"]
    assert preemptions > 0


def test_a_parked_task_keeps_its_pages_and_goes_on(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = bench.alone(PROMPT, 6)
    bench.add("a", PROMPT, 6)
    bench.run(3)
    slots = bench.engine.kv.geometry.slots_per_page(width)
    [state], _ = bench.scheduler.movable(100)
    held = bench.park()
    assert held == sorted({*(state.blocks // slots).tolist()})
    counts = bench.engine.pages.counts()
    assert counts.owned + sum(counts.leased.values()) == len(held)
    assert bench.scheduler.holders_of(np.array(held)) == ["a"]
    assert bench.scheduler.holders_of(np.array([max(held) + 1])) == []
    bench.begin(width, PAGES)
    assert bench.scheduler.blocks_total == (PAGES + len(held)) * slots
    assert bench.run() == {"a": wanted[3:]}


def test_a_task_of_a_group_that_was_left_with_its_pages_holds_them(
    bench: EngineBench, width: int
) -> None:
    """As before a migration: the mode is not parked, and a lost member's share may be freed."""
    bench.begin(width, PAGES)
    assert bench.park() == []
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 6)
    bench.step()
    assert bench.scheduler.holders_of(bench.indices()) == ["a"]


def test_parked_pages_serve_another_width(bench: EngineBench) -> None:
    bench.begin(1, PAGES)
    wanted = bench.alone(PROMPT, 6)
    bench.add("a", PROMPT, 6)
    bench.run(3)
    held = bench.park()
    everything = bench.engine.pages.counts().free
    bench.begin(2, everything)
    for number in range(7):  # Together they write to almost all pages that are free.
        bench.add(f"task {number}", range(200 + number, 440 + number), 3)
    assert [len(given) for given in bench.run().values()] == [3] * 7
    assert bench.park() == []
    bench.begin(1, PAGES)
    assert {*held} < {*bench.indices().tolist()}
    assert bench.run() == {"a": wanted[3:]}


def test_a_grant_without_the_pages_of_a_task_is_a_mistake(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 6)
    bench.step()
    held = bench.park()
    bench.begin(width, 2)
    with pytest.raises(AssertionError):
        bench.scheduler.grant(without(bench.indices(), np.array(held)))


# ------------------------------------------------------------------------------ in-flight steps


def test_blocks_that_a_step_in_flight_writes_are_free_after_it(
    bench: EngineBench, width: int
) -> None:
    bench.begin(width, PAGES)
    scheduler = bench.scheduler
    bench.add("a", PROMPT, 9)
    bench.add("b", OTHER, 9)
    bench.step()
    assert not scheduler.frees_after_step
    free, plan = scheduler.blocks_free, bench.plan()
    assert len(scheduler.take_back(["a"])["a"]) == 1
    assert (scheduler.frees_after_step, scheduler.blocks_free) == (True, free)
    assert [*bench.finish(plan, bench.mode.execute(plan))] == ["b"]
    assert (scheduler.frees_after_step, scheduler.blocks_free) == (False, free + 2)


def test_a_step_that_never_ends_holds_nothing(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = bench.alone(OTHER, 2)
    bench.add("a", PROMPT, 9)
    bench.step()
    bench.plan()
    bench.scheduler.take_back(["a"])
    bench.mode.forget_steps()
    assert not bench.scheduler.frees_after_step
    assert bench.scheduler.blocks_free == bench.scheduler.blocks_total
    bench.add("b", OTHER, 2)
    assert bench.run() == {"b": wanted}


def test_what_a_forgotten_step_would_have_written_is_free_at_once(
    bench: EngineBench, width: int
) -> None:
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 9)
    bench.step()
    bench.plan()
    bench.mode.forget_steps()
    bench.scheduler.take_back(["a"])
    assert bench.scheduler.blocks_free == bench.scheduler.blocks_total


def test_a_task_is_published_as_it_will_be_after_the_step_in_flight(
    bench: EngineBench, width: int
) -> None:
    bench.begin(width, PAGES)
    wanted = bench.alone(PROMPT, 6)
    bench.add("a", PROMPT, 6)
    bench.step()
    plan, scheduler = bench.plan(), bench.scheduler
    [state], chains = scheduler.movable(100)
    assert (state.task, state.tokens(), state.count, len(chains)) == ("a", wanted[:1], 1, 0)
    assert (state.computed, state.settled) == (len(PROMPT) + 1, len(PROMPT))
    assert state.blocks.size == 2
    assert scheduler.written_blocks().tolist() == state.blocks[1:].tolist()
    bench.finish(plan, bench.mode.execute(plan))
    assert scheduler.written_blocks().size == 0
    assert scheduler.tokens_since({"a": state.count}) == {"a": wanted[1:2]}
    scheduler.take_back(["a"])
    assert scheduler.tokens_since({"a": state.count}) == {}


# ------------------------------------------------------------------------------ migration


def test_tasks_that_others_continue_are_forgotten_at_once(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 9)
    bench.step()
    scheduler = bench.scheduler
    scheduler.leave_to_others(["a", "nobody"])
    assert scheduler.holding() == scheduler.not_holding() == []
    assert scheduler.movable(9) == ([], [])
    assert bench.park() == []
    scheduler.tidy()
    assert scheduler.idle


def move(bench: EngineBench, fresh: Any, steps: int = 0) -> None:
    """Let the only task go on in these pages of the same rank; a step of it may be in flight.

    Its request is built this many steps before it is published.
    """
    engine, scheduler = bench.engine, bench.scheduler
    [first], _ = scheduler.movable(100)
    request = engine.intake.continued_request(bench.payload(first.task, PROMPT, 8), first)
    known = request.token_ids()
    assert known.tolist() == PROMPT + first.tokens()
    bench.run(steps)
    plan = bench.plan()
    [state], _ = scheduler.movable(100)
    request.catch_up(state)
    assert request.token_ids().tolist() == PROMPT + state.tokens()
    bench.finish(plan, bench.mode.execute(plan))
    finish = engine.mover.start({0: {0: (state.blocks, fresh)}}, Split(1, 1))
    engine.mark()()
    stats, page_bytes = finish(), engine.kv.geometry.page_bytes
    assert (stats.link_bytes, stats.local_bytes) == (0, fresh.size * page_bytes)
    request.go_on(scheduler.tokens_since({state.task: state.count})[state.task])
    scheduler.leave_to_others([state.task])
    bench.park()
    scheduler.tidy()
    bench.step()  # It tells the runner that the task has ended.
    engine.pages.own_these(fresh)
    scheduler.adopt([(request, fresh)], [], bench.indices(), NOTHING, {state.task: known})
    assert scheduler.holding() == [state.task]


@pytest.mark.parametrize("steps", [0, 2])
def test_an_adopted_task_goes_on_where_its_kv_was_copied_to(bench: EngineBench, steps: int) -> None:
    bench.begin(1, PAGES)
    wanted = bench.alone(PROMPT, 8)
    bench.add("a", PROMPT, 8)
    bench.run(3 - steps)
    fresh = bench.engine.pages.free_pages()[-2:]
    move(bench, fresh, steps)
    bench.begin(1, 2)
    plan = bench.plan()
    assert (plan.tokens, plan.context) == (1, len(PROMPT) + 3), "nothing is computed again"
    assert bench.finish(plan, bench.mode.execute(plan)) == {"a": wanted[4:5]}
    assert bench.run() == {"a": wanted[5:]}


def test_an_adopted_task_holds_its_pages_before_it_runs(bench: EngineBench) -> None:
    bench.begin(1, PAGES)
    bench.add("a", PROMPT, 8)
    bench.run(3)
    fresh = bench.engine.pages.free_pages()[-2:]
    move(bench, fresh)
    assert bench.park() == fresh.tolist()
    assert bench.scheduler.holders_of(fresh) == ["a"]
    assert len(bench.scheduler.take_back(["a"])["a"]) == 4


def test_pages_that_a_migration_filled_stay_together(bench: EngineBench) -> None:
    bench.begin(2, 3)
    bench.add("a", PROMPT, 8)
    bench.step()
    [state], _ = bench.scheduler.movable(100)
    request = bench.engine.intake.continued_request(bench.payload("a", PROMPT, 8), state)
    bench.scheduler.take_back(["a"])
    bench.step()
    assert bench.park() == []
    indices, pages = bench.engine.pages.lease_pages(bench.mode.ranks, 3)
    assert bench.mode.table is not None
    bench.mode.table.map(indices, pages)
    bench.scheduler.adopt([(request, np.array([2, 3]))], [], indices, indices)
    assert bench.park() == indices.tolist(), "its blocks lie on one of them"
    bench.scheduler.take_back(["a"])
    assert bench.park() == []


# ------------------------------------------------------------------------------ the engine


def test_a_probe_disturbs_no_task(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    wanted = bench.alone(PROMPT, 4)
    bench.add("a", PROMPT, 4)
    bench.run(2)
    free, engine = bench.scheduler.blocks_free, bench.engine
    values = engine.probe.run(bench.mode.execute, bench.group.mode)
    known, took_us = engine.probed[width, bench.group.mode]
    assert values == pytest.approx(known, abs=engine.probe.error_max_nats)
    assert took_us > 0
    assert bench.scheduler.blocks_free == free
    assert bench.run() == {"a": wanted[2:]}


def test_a_step_of_an_aborted_formation_fails(bench: EngineBench) -> None:
    bench.begin(2, PAGES)
    bench.add("a", PROMPT, 4)
    ranks, communicators = bench.mode.ranks, bench.engine.communicators
    assert not communicators.is_aborted(ranks, bench.formation)
    communicators.abort(ranks, bench.formation)
    assert communicators.is_aborted(ranks, bench.formation)
    assert not communicators.is_aborted(ranks, bench.formation + 1)
    assert not communicators.is_aborted(ranks[:1], bench.formation), "who is alone waits for nobody"
    plan = bench.plan()
    with pytest.raises(PeerLostError) as lost:
        bench.mode.execute(plan)
    assert lost.value.formation == bench.formation
    bench.mode.forget_steps()
    bench.scheduler.take_back(["a"])
    bench.begin(2, 1)
    bench.add("b", OTHER[:20], 2)
    assert len(bench.run()["b"]) == 2, "another formation is not aborted"


def test_its_modes_are_those_of_its_rank(bench: EngineBench) -> None:
    engine = bench.engine
    assert [mode.width for mode in engine.modes.values()] == [1, 2]
    for mode in engine.modes.values():
        assert engine.of_width(mode.width) is mode
        assert mode.ranks == (Rank(0), Rank(1))[: mode.width]
        assert mode.is_leader
        assert (mode.table is None) == (mode.width == 1)
        step_mode = Mode.DP if mode.width == 1 else Mode.TP
        assert mode.times.curves[step_mode].us(1) > 0
    facts = engine.facts()
    assert [each.width for each in facts.step_times] == [1, 2]
    assert facts.whole_layers is None
    assert dict(facts.memory)["kv"] > 0
    assert engine.is_synchronous
    assert engine.holds_steps


def test_a_leader_sends_over_the_queue_of_its_group(bench: EngineBench) -> None:
    bench.engine.of_width(2).queue.enqueue("a message", timeout=1.0)


def test_members_meet(bench: EngineBench) -> None:
    bench.begin(2, 1)
    bench.engine.meet(2)


def test_it_has_the_mailboxes_of_all_its_peers(bench: EngineBench) -> None:
    own = bench.engine.mailboxes[Rank(0)]
    own.publish(5, b"manifest")
    own.settle(b"tokens")
    own.expect_end(7)
    assert (own.epoch, own.message, own.settled_message, own.ends_ns) == (
        *(5, b"manifest"),
        *(b"tokens", 7),
    )
    assert bench.engine.mailboxes[Rank(1)].epoch == 0
