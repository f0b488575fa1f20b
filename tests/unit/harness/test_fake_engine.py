"""The engine in memory fails where a real one would give wrong tokens, and waits on demand."""

import numpy as np
import pytest

from comm_pool.layout import Rank
from kvadaptor.geometry import Split
from tests.harness.worker.engine_bench import NOTHING, EngineBench
from tests.harness.worker.fake_engine import FakeCell, FakeEngine, fake_engine
from tests.harness.worker.fake_scheduler import fake_payload, token_at
from worker.rank.engine import NoRoomError

PROMPT = list(range(40))


def bench(engine: FakeEngine, width: int = 1) -> EngineBench:
    made = EngineBench(engine, fake_payload)
    made.begin(width, 8)
    made.add("a", PROMPT, 9)
    return made


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


def test_kv_of_a_group_is_carried_to_one_rank_in_shares() -> None:
    """Each member has half of the heads of each block."""
    cell = FakeCell(2)
    leader, follower = cell.engines.values()
    one, other = bench(leader, 2), EngineBench(follower, fake_payload)
    other.width = 2
    follower.select(2, one.formation)
    table = follower.of_width(2).table
    assert table is not None
    table.map(*follower.pages.lease_pages(one.mode.ranks, 8))
    for _ in range(3):
        plan = one.plan()
        one.mode.queue.enqueue(plan)
        follower.of_width(2).execute(follower.of_width(2).queue.dequeue())
        one.finish(plan, one.mode.execute(plan))
    [state] = one.scheduler.movable(9)[0]
    one.scheduler.leave_to_others(["a"])
    one.park()
    slots = np.array(table.slots(state.blocks.tolist()))
    fresh = leader.pages.free_pages()[-2:]
    # A page has two units: a block's two halves, one from each member.
    copies = {
        0: {rank: (slots, fresh * 2 + rank) for rank in (0, 1)},
    }
    stats = leader.mover.start(copies, Split(1, 2))()
    assert stats.link_bytes == stats.local_bytes == leader.kv.geometry.page_bytes
    request = leader.intake.continued_request(fake_payload("a", PROMPT, 9), state)
    one.begin(1, 0)
    leader.pages.own_these(fresh)
    one.scheduler.adopt([(request, fresh)], [], one.indices(), NOTHING)
    one.scheduler.grant(one.indices())
    assert one.run()["a"] == [token_at(PROMPT, position) for position in range(43, 49)]


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
