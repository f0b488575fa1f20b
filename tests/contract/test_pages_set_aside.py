"""Pages that copies may use while tasks run: no task gets them, and they come back."""

from tests.harness.worker.engine_bench import EngineBench

PROMPT = list(range(100, 140))
BLOCK = 32


def test_tasks_do_not_get_what_is_set_aside(bench: EngineBench, width: int) -> None:
    bench.begin(width, 4)
    slots, scheduler = bench.engine.kv.geometry.slots_per_page(width), bench.scheduler
    aside = scheduler.set_aside(3)
    assert len(aside) == len(set(aside.tolist())) == 3
    assert scheduler.blocks_free == scheduler.blocks_total == slots
    assert scheduler.set_aside(2).tolist() == aside.tolist(), "it is a total"
    bench.add("long", list(range(100, 100 + slots * BLOCK + 1)), 2)
    assert bench.step() == {}
    scheduler.give_back()
    assert scheduler.blocks_total == 4 * slots
    assert len(bench.run()["long"]) == 2


def test_no_more_is_set_aside_than_is_free(bench: EngineBench, width: int) -> None:
    bench.begin(width, 2)
    bench.add("a", PROMPT, 4)
    bench.step()
    assert bench.scheduler.set_aside(9).size < 2
    assert len(bench.run()["a"]) == 3


def test_a_grant_ends_it(bench: EngineBench, width: int) -> None:
    bench.begin(width, 2)
    assert bench.scheduler.set_aside(1).size == 1
    assert bench.park() == []
    bench.begin(width, 1)
    assert bench.scheduler.blocks_total == bench.engine.kv.geometry.slots_per_page(width)
    assert bench.scheduler.set_aside(0).size == 0


def test_a_task_says_how_often_it_lost_its_blocks(bench: EngineBench, width: int) -> None:
    """Else copies of what it held before could count as copies of what it holds now."""
    bench.begin(width, 4 // width)
    bench.add("a", PROMPT, 40)
    bench.add("b", list(range(300, 350)), 40)
    found = 0
    for _ in range(200):
        bench.step()
        states, _ = bench.scheduler.movable(0)
        found = max([found, *(each.preemptions for each in states)])
        if bench.scheduler.idle:
            break
    assert found > 0


def test_tasks_get_blocks_in_advance(bench: EngineBench, width: int) -> None:
    bench.begin(width, 8)
    wanted = bench.alone(PROMPT, 60)
    bench.add("a", PROMPT, 60)
    tokens = bench.step()["a"]
    scheduler = bench.scheduler
    [state], _ = scheduler.movable(0)
    assert state.blocks.size == 2
    scheduler.look_ahead(BLOCK)
    tokens += bench.step()["a"]
    scheduler.look_ahead(0)
    [state], _ = scheduler.movable(0)
    assert state.blocks.size == 3
    for _ in range(3 * BLOCK - len(PROMPT) - 2):
        tokens += bench.step()["a"]
        [now], _ = scheduler.movable(0)
        assert now.blocks.tolist() == state.blocks.tolist(), "it needs no other ones"
    assert tokens + bench.run()["a"] == wanted


def test_they_get_none_in_advance_where_few_are_free(bench: EngineBench, width: int) -> None:
    bench.begin(width, 4 // width)
    bench.add("a", PROMPT, 9)
    bench.step()
    bench.scheduler.look_ahead(BLOCK + 1)
    bench.step()
    [state], _ = bench.scheduler.movable(0)
    assert state.blocks.size == 2
    bench.scheduler.look_ahead(BLOCK)
    bench.park()
    bench.begin(width, 8)
    assert len(bench.run()["a"]) == 7
