"""The engine in memory fails where a real one would give wrong tokens, and waits on demand."""

import numpy as np
import pytest

from comm_pool.layout import Rank, lease_key
from comm_pool.mixed import Staged
from kvadaptor.geometry import Split
from tests.harness.worker.engine_bench import NOTHING, EngineBench
from tests.harness.worker.fake_engine import FakeCell, FakeEngine, FakeMode, fake_engine
from tests.harness.worker.fake_scheduler import FakePlan, fake_payload, token_at
from worker.rank.engine import NoRoomError

PROMPT = list(range(40))
PIPELINES = (Staged(2, 1), Staged(4, 1))


def bench(engine: FakeEngine, width: int = 1, stages: int = 1) -> EngineBench:
    made = EngineBench(engine, fake_payload)
    made.begin(width, 8, stages)
    made.add("a", PROMPT, 9)
    return made


def follow(engine: FakeEngine, one: EngineBench) -> FakeMode:
    """Let another member join the group of a bench with the same lease."""
    mode = engine.select(one.width, one.formation, one.stages)
    assert mode.table is not None
    mode.table.map(*engine.pages.lease_pages(one.group.lease_key, 8))
    return mode


def test_steps_wait_in_order_until_they_are_finished() -> None:
    engine = fake_engine()
    engine.is_synchronous = False
    one = bench(engine)
    first = one.plan()
    launched = one.mode.execute(first)
    second = one.plan()
    queued = one.mode.execute(second)
    is_done = engine.done()
    assert (launched.query(), queued.query(), is_done()) == (False, False, False)
    engine.finish_step()
    assert (launched.query(), queued.query(), is_done()) == (True, False, False)
    assert one.finish(first, launched) == {"a": [token_at(PROMPT, 40)]}
    assert one.finish(second, queued) == {"a": [token_at(PROMPT, 41)]}, "it waits"
    assert is_done()


def test_a_step_whose_context_is_not_there_fails() -> None:
    one = bench(fake_engine())
    one.step()
    state = one.scheduler.movable(9)[0][0]
    request = one.engine.intake.continued_request(fake_payload("a", PROMPT, 9), state)
    one.scheduler.take_back(["a"])
    one.scheduler.adopt([(request, np.array([7, 8]))], [], one.indices(), NOTHING)
    with pytest.raises(AssertionError, match="the KV of a is not there"):
        one.step()


@pytest.mark.parametrize("stages", [1, 2], ids=["tp2", "pp2"])
def test_kv_of_a_group_is_carried_to_one_rank_in_shares(stages: int) -> None:
    """Each member has half of the heads of each block, or half of its layers."""
    cell = FakeCell(2, pipelines=PIPELINES[:1])
    leader, follower = cell.engines.values()
    one = bench(leader, 2, stages)
    other = follow(follower, one)
    for _ in range(3):
        plan = one.plan()
        one.mode.queue.enqueue(plan)
        other.execute(other.queue.dequeue())
        one.finish(plan, one.mode.execute(plan))
    [state] = one.scheduler.movable(9)[0]
    one.scheduler.leave_to_others(["a"])
    one.park()
    # All slots of a page are as many as its units; the table says where the engine has them.
    table = other.table
    assert table is not None
    slots = table.all_slots()[state.blocks].astype(np.int64)
    fresh = leader.pages.free_pages()[-2:]
    # A page has two units: a block's two halves, one from each member.
    shares = {rank: other.split.share_of(rank) for rank in (0, 1)}
    copies = {0: {rank: (slots, fresh * 2 + share) for rank, share in shares.items()}}
    stats = leader.mover.start(copies, Split(stages, 2 // stages))()
    assert stats.link_bytes == stats.local_bytes == leader.kv.geometry.page_bytes
    request = leader.intake.continued_request(fake_payload("a", PROMPT, 9), state)
    one.begin(1, 0)
    leader.pages.own_these(fresh)
    one.scheduler.adopt([(request, fresh)], [], one.indices(), NOTHING)
    one.scheduler.grant(one.indices())
    assert one.run()["a"] == [token_at(PROMPT, position) for position in range(43, 49)]


def test_a_stage_writes_its_own_layers_alone() -> None:
    """The leader has the last ones; other layers of its slots are nobody's."""
    cell = FakeCell(4, pipelines=PIPELINES)
    one = bench(cell.engines[Rank(0)], 4, 4)
    modes = [one.mode, *(follow(cell.engines[Rank(rank)], one) for rank in (1, 3))]
    plan = one.plan()
    assert isinstance(plan, FakePlan)
    one.mode.execute(plan)
    modes[2].execute(plan)
    [part] = plan.parts
    layers: list[set[int]] = []
    for mode in (modes[0], modes[2]):
        assert isinstance(mode, FakeMode) and mode.table is not None
        words = mode.engine.kv.tokens(mode.table.slots(list(part.blocks)), mode.split)
        assert words.shape[1:] == (1, 4), "one layer with all heads"
        layers.append(set((words[: part.count] // 16 % 4).ravel().tolist()))
    assert layers == [{3}, {0}]
    one.finish(plan, {"a": token_at(PROMPT, 40)})
    with pytest.raises(AssertionError, match="the KV of a is not there"):
        modes[1].execute(one.plan())


@pytest.mark.parametrize("finest", [Split(4, 4), Split(2, 2), Split(4, 1), Split(1, 4)], ids=str)
def test_units_tile_a_page(finest: Split) -> None:
    """Unit u has range u // T of the layers, and u % T of the heads."""
    engine = fake_engine(world=4)
    kv = engine.kv
    kv.words[:] = np.arange(kv.words.size)
    grid = kv.words.reshape(4, kv.num_pages, 4, -1)
    page, found = 5, []
    for unit in range(finest.width):
        row, column = divmod(unit, finest.tp)
        layers, heads = 4 // finest.pp, 4 // finest.tp
        wanted = grid[row * layers :][:layers, page, column * heads :][:, :heads]
        read = kv.read(np.array([page * finest.width + unit]), finest)
        assert read.ravel().tolist() == wanted.ravel().tolist()
        found += read.ravel().tolist()
    assert sorted(found) == sorted(grid[:, page].ravel().tolist()), "each word once"
    kv.put(np.array([page * finest.width]), finest, np.full_like(read, -1))
    assert np.count_nonzero(kv.words == -1) == read.size


def test_modes_of_pipeline_groups_are_found_by_their_stages() -> None:
    engine = FakeCell(4, pipelines=(*PIPELINES, Staged(2, 2))).engines[Rank(0)]
    with pytest.raises(KeyError):
        fake_engine(world=4).of_width(4, 4)
    narrow, wide = engine.of_width(4), engine.of_width(4, 4)
    assert (narrow.stages, wide.stages, narrow.ranks) == (1, 4, wide.ranks)
    assert engine.of_width(4, 2).split == Split(2, 2)
    assert engine.select(4, 3, 4) is wide and engine.selected is wide
    assert {(4, Staged(4, 1)), (2, Staged(2, 1))} < engine.probed.keys()
    times = {each.width: each for each in engine.facts().step_times}
    assert sorted(times) == [1, 2, 4], "one for each width"
    assert lease_key(wide.ranks, 4) != lease_key(wide.ranks, 1)


def test_no_task_is_in_two_steps_that_wait_for_its_token() -> None:
    """Chunks of a prompt may be in several: only the last gives a token."""
    engine = FakeCell(2, pipelines=PIPELINES[:1], budget=16).engines[Rank(0)]
    one = bench(engine, 2, 2)
    plans: list[FakePlan] = []
    while one.scheduler.has_more:
        plan = one.plan()
        assert isinstance(plan, FakePlan)
        plans.append(plan)
    assert [each.tokens for each in plans] == [16, 16, 8]
    assert [part.gives for each in plans for part in each.parts] == [False, False, True]
    void = one.plan()
    assert void.is_void
    for each in plans:
        one.finish(each, one.mode.execute(each))
    seen: list[bool] = [one.scheduler.has_more]
    one.scheduler.take_back(["a"])
    seen.append(one.scheduler.has_more)  # Its followers are to hear that it has ended.
    seen.append(one.plan().is_void)
    seen.append(one.scheduler.has_more)
    assert seen == [True, True, False, False]


def test_a_step_without_room_says_so() -> None:
    engine = fake_engine()
    one = bench(engine)
    engine.has_no_room = True
    plan = one.plan()
    with pytest.raises(NoRoomError):
        one.mode.execute(plan)


def test_a_step_of_another_width_is_a_mistake() -> None:
    engine = fake_engine(world=2)
    one = bench(engine)
    plan = one.plan()
    engine.select(2)
    with pytest.raises(AssertionError, match="not selected"):
        one.mode.execute(plan)


def test_members_share_queues_and_formations() -> None:
    cell = FakeCell(4)
    narrow = {rank: cell.engines[Rank(rank)].of_width(2) for rank in range(4)}
    narrow[2].queue.enqueue("to rank 3")
    with pytest.raises(TimeoutError):
        narrow[1].queue.dequeue()
    assert narrow[3].queue.dequeue() == "to rank 3"
    cell.engines[Rank(3)].communicators.abort(narrow[3].ranks, 5)
    assert cell.engines[Rank(2)].communicators.is_aborted(narrow[3].ranks, 5)
    assert not cell.engines[Rank(0)].communicators.is_aborted(narrow[0].ranks, 5)
