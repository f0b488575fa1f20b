"""What a task has got since it was read, by the product's engine and by the one in memory."""

from tests.harness.worker.engine_bench import EngineBench

PROMPT = list(range(100, 140))
PAGES = 8


def test_progress_is_what_a_task_has_got_since_it_was_read(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 30)
    bench.step()
    scheduler = bench.scheduler
    (before,), _ = scheduler.movable(0)
    bench.run(2)
    plan = bench.plan()
    found = scheduler.progress_since([before], [])
    assert found is not None and found[0] is not None
    (now,), _ = scheduler.movable(0)
    later = before.later(found[0])
    assert later.tokens() == now.tokens()
    assert (later.count, later.computed, later.settled) == (now.count, now.computed, now.settled)
    assert later.hashes == now.hashes
    bench.finish(plan, bench.mode.execute(plan))
    bench.add("b", PROMPT, 30)
    bench.step()
    assert scheduler.progress_since([before], []) is None, "another task could move, too"
    scheduler.take_back(["a", "b"])
    assert scheduler.progress_since([before], []) == [None], "it has ended"


def test_a_task_with_more_blocks_is_read_anew(bench: EngineBench, width: int) -> None:
    bench.begin(width, PAGES)
    bench.add("a", PROMPT, 60)
    bench.step()
    scheduler = bench.scheduler
    (before,), _ = scheduler.movable(0)
    while scheduler.progress_since([before], []) is not None:
        bench.run(1)
    assert scheduler.movable(0)[0][0].blocks.size == before.blocks.size + 1
