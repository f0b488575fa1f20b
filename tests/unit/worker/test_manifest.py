"""The plan of a move, derived from what all ranks tell: who takes part, where KV goes."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from comm_pool.layout import Group, Mode, Rank
from coordinator.protocol.terms import Binding, Target
from kvadaptor.geometry import Split
from tests.harness.worker.manifests import (
    BLOCK,
    EPOCH,
    GEOMETRY,
    PAGES,
    binding,
    cargo,
    dp,
    ints,
    target,
    tp,
)
from worker.rank.migration.early_copy import EarlyCopy, packed, unpacked
from worker.rank.migration.lease_indices import renumbered
from worker.rank.migration.manifest import (
    Ints,
    Manifest,
    MigrationPlan,
    component_of,
    plan_move,
)
from worker.rank.task_state import CachedChain


def plan(rank: int, manifests: dict[int, Manifest], to: Target) -> MigrationPlan:
    return plan_move(rank, manifests, to, GEOMETRY)


def test_all_ranks_derive_the_same_plan() -> None:
    led = [cargo(f"task {rank}", ints(1 + rank, 5), 20) for rank in range(2)]
    manifests = {rank: dp(rank, led[rank]) for rank in range(2)}
    travelled = pickle.loads(pickle.dumps(manifests, protocol=5))
    one, other = plan(0, manifests, target((0, 1))), plan(1, travelled, target((0, 1)))
    assert one.ranks == other.ranks == (0, 1)
    assert [each.id for each in one.plan.carried] == [each.id for each in other.plan.carried]
    for mine, theirs in zip(one.plan.copies, other.plan.copies, strict=True):
        assert mine.dst_rank == theirs.dst_rank
        assert (mine.src_units == theirs.src_units).all()
        assert (mine.dst_units == theirs.dst_units).all()
    assert one.cargo["task 1"][0] == 1, "its old leader"
    for carried in one.plan.carried:
        assert (one.blocks([carried])[0] == other.blocks([carried])[0]).all()


def test_ranks_of_different_sizes_derive_the_same_plan() -> None:
    """Rank 1 has pages that rank 0 lacks, and tasks in them."""
    large = dp(1, cargo("b", ints(30, 35), 20), num_pages=40)
    manifests = {0: dp(0, cargo("a", ints(1, 5), 20)), 1: large}
    travelled = pickle.loads(pickle.dumps(manifests, protocol=5))
    one, other = plan(0, manifests, target((0, 1))), plan(1, travelled, target((0, 1)))
    assert repr(one.plan) == repr(other.plan)
    assert {each.id for each in one.plan.carried} == {"a", "b"}
    sources = [(each.dst_rank, each.src_units.tolist()) for each in one.plan.copies]
    units = one.plan.units
    assert (0, [30 * units, 35 * units]) in sources, "rank 0 reads beyond its own last page"
    (lease,) = one.plan.groups
    assert lease.pages[0].max() < PAGES
    assert one.plan.rounds == 1


def test_a_group_gets_no_more_pages_than_its_smallest_member_has() -> None:
    """Rank 1 alone holds a task that both together could hold, were they as large as rank 1."""
    task = cargo("large", np.arange(1, 37), 36 * BLOCK)
    manifests = {0: dp(0), 1: dp(1, task, cargo("small", ints(37), 10), num_pages=40)}
    for rank in (0, 1):
        move = plan(rank, manifests, target((0, 1)))
        assert [(each.id, each.cause.value) for each in move.plan.fallbacks] == [("large", "pages")]
        assert [each.id for each in move.plan.carried] == ["small"]


def test_a_wide_group_of_unequal_members_falls_apart() -> None:
    """Rank 1 holds its share in pages that rank 0 lacks."""
    manifests = tp((0, 1), cargo("a", ints(2, 3), 20), cargo("b", ints(4, 5), 32))
    large = manifests[1]
    manifests[1] = replace(
        large,
        num_pages=40,
        slots=np.pad(large.slots, (0, 2 * (40 - PAGES)), constant_values=-1),
        pages=large.pages + 30,
        free=np.arange(1, 31),
    )
    manifests[1].slots[2:8] += 60
    plans = [plan(rank, manifests, target((0,), (1,))) for rank in (0, 1)]
    assert repr(plans[0].plan) == repr(plans[1].plan)
    assert {each.group for each in plans[0].plan.carried} == {0, 1}
    assert plans[0].plan.groups[0].pages.max() < PAGES
    read = {rank: set[int]() for rank in (0, 1)}
    for each in plans[0].plan.copies:
        for rank, unit in zip(each.src_ranks.tolist(), each.src_units.tolist(), strict=True):
            read[rank].add(unit // plans[0].plan.units)
    assert read[0] <= {1, 2, 3}
    assert read[1] <= {31, 32, 33}
    assert read[0] or read[1]


def test_components_are_planned_apart() -> None:
    manifests = {rank: dp(rank, cargo(f"task {rank}", ints(1), 16)) for rank in range(4)}
    to = target((0, 1), (2, 3))
    assert plan(0, manifests, to).ranks == (0, 1)
    assert plan(3, manifests, to).ranks == (2, 3)
    assert set(plan(3, manifests, to).cargo) == {"task 2", "task 3"}


def test_a_group_that_is_not_whole_stays_out_with_its_tasks() -> None:
    manifests = tp((0, 1), cargo("task", ints(2, 3), 20))
    left_before = replace(manifests[1], formation=4)
    move = plan(0, {**manifests, 1: left_before}, target((0,), (1,)))
    assert move.cargo == {}
    assert not move.plan.carried
    assert move.ranks == (0,), "the ranks have nothing in common any more"


def test_a_rank_that_left_no_group_takes_part_with_what_is_free() -> None:
    none = np.zeros(0, dtype=np.int32)
    bare = Manifest(1, (), -1, ints(), none, ints(4, 5, 6), {}, PAGES)
    move = plan(1, {0: dp(0, cargo("task", ints(1, 2), 20)), 1: bare}, target((0, 1)))
    (lease,) = move.plan.groups
    assert set(lease.pages[1].tolist()) <= {4, 5, 6}
    assert move.plan.carried[0].id == "task"


def test_fresh_lease_indices_avoid_those_of_paused_tasks() -> None:
    manifests = {rank: dp(rank, cargo(f"task {rank}", ints(1, 2), 20)) for rank in range(2)}
    paused: dict[tuple[int, ...], Ints] = {(0, 1): ints(1, 3)}
    manifests[1] = replace(manifests[1], indices=paused)
    move = plan(0, manifests, target((0, 1)))
    assert move.indices[0].tolist() == [2, 4, 5]
    for carried in move.plan.carried:
        assert not set(move.blocks([carried])[0].tolist()) & {0, 1, 2, 3, 6, 7}


def test_indices_that_would_run_out_are_an_error_before_anything_is_given_up() -> None:
    manifests = {rank: dp(rank, cargo(f"task {rank}", ints(1, 2), 20)) for rank in range(2)}
    manifests[1] = replace(manifests[1], indices={(0, 1): np.arange(1, PAGES)})
    with pytest.raises(AssertionError, match="run out"):
        plan(0, manifests, target((0, 1)))


def test_indices_run_out_where_the_smallest_member_has_none() -> None:
    manifests = {0: dp(0), 1: dp(1, cargo("task", ints(1, 2), 20), num_pages=40)}
    manifests[1] = replace(manifests[1], indices={(0, 1): np.arange(1, PAGES)})
    with pytest.raises(AssertionError, match="run out"):
        plan(1, manifests, target((0, 1)))


def test_blocks_are_renumbered_by_lease_index() -> None:
    assert renumbered(ints(2, 3, 5), binding(0, 1), ints(4, 9)).tolist() == [8, 9, 19]
    assert renumbered(ints(2, 3, 5), binding(0), ints()).tolist() == [2, 3, 5]


def test_only_full_blocks_are_shared_by_what_they_hold() -> None:
    """Two tasks with one text: the full block lies once in the new group, the last one twice."""
    same = [replace(cargo(name, ints(1, 2), 20)) for name in ("a", "b")]
    for each in same:
        each.state.hashes[:] = [b"the same"]
    manifests = {rank: dp(rank, same[rank]) for rank in range(2)}
    move = plan(0, manifests, target((0, 1)))
    first, second = (blocks.tolist() for blocks in move.blocks(move.plan.carried))
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_pages_without_a_chain_are_free_for_the_move() -> None:
    move = plan(0, {0: dp(0, cargo("a", ints(1), 16)), 1: dp(1)}, target((0, 1)))
    assert move.plan.rounds == 1
    assert move.spoils_from is None, "there is room: nothing that lies there is overwritten"


def test_nothing_moves_where_a_member_of_the_new_group_takes_no_part() -> None:
    """It joined before a move was wanted. Other components move all the same."""
    manifests = {rank: dp(rank, cargo(f"task {rank}", ints(1), 16)) for rank in (0, 2, 3)}
    wanted = target((0, 1), (2, 3))
    without, others = plan(0, manifests, wanted), plan(3, manifests, wanted)
    assert (without.ranks, without.old_groups) == ((0,), ((0,),))
    assert not (without.bindings or without.plan.carried or without.plan.copies)
    assert without.spoils_from is None
    assert {carried.id for carried in others.plan.carried} == {"task 2", "task 3"}


def test_a_move_that_overwrites_says_from_which_round_on() -> None:
    """All pages of both ranks are full, so that units change places."""
    full = np.arange(1, PAGES)
    manifests = {}
    for rank in range(2):
        task = cargo(f"task {rank}", full, full.size * BLOCK)
        manifests[rank] = replace(dp(rank, task), pages=full, free=ints())
    move = plan(0, manifests, target((0, 1)))
    assert move.plan.fallbacks or move.plan.rounds > 1
    assert move.spoils_from is not None
    assert move.spoils_from <= move.plan.rounds


def test_a_copy_that_stays_behind_may_be_overwritten_in_the_first_round() -> None:
    """Of two equal blocks one is read: what nobody needs of the other one is vacant at once."""
    full = np.arange(1, PAGES)
    manifests = {}
    for rank in range(2):
        task = cargo(f"task {rank}", full, full.size * BLOCK)
        task.state.hashes[:] = [b"%d" % number for number in full]
        task.state.hashes[-1] = b"only here: %d" % rank
        manifests[rank] = replace(dp(rank, task), pages=full, free=ints())
    move = plan(0, manifests, target((0, 1)))
    assert not move.plan.fallbacks
    assert move.spoils_from == 1
    assert [move.may_begin_early] == [False], "old steps may still read there"


def test_cached_chains_travel_newest_first() -> None:
    chains = (CachedChain(ints(4, 5), [b"new", b"newer"]), CachedChain(ints(6), [b"old"]))
    move = plan(0, {0: dp(0, chains=chains), 1: dp(1)}, target((0, 1)))
    assert [each.id for each in move.plan.carried] == ["cached/0/0", "cached/0/1"]
    assert move.chains["cached/0/0"].hashes == [b"new", b"newer"]


def test_a_wide_group_falls_apart() -> None:
    led = [cargo("a", ints(2, 3), 20), cargo("b", ints(4, 5), 32)]
    manifests = tp((0, 1), *led, shift=3)
    move = plan(1, manifests, target((0,), (1,)))
    assert {carried.group for carried in move.plan.carried} == {0, 1}, "one each"
    assert all(indices.size == 0 for indices in move.indices)
    for carried in move.plan.carried:
        assert (move.blocks([carried])[0] == carried.blocks).all()


def test_a_move_does_not_land_where_a_step_under_way_writes() -> None:
    """Blocks 6 and 7 belong to a task that has ended, but its last step is not over."""
    manifests = {
        0: replace(dp(0, cargo("task", ints(1, 5), 20)), written=ints(5, 6, 7)),
        1: dp(1, cargo("other", ints(1, 2, 3, 4), 60)),
    }
    move = plan(0, manifests, target((0, 1)))
    (lease,) = move.plan.groups
    assert not {6, 7} & set(lease.pages[0].tolist())
    assert move.may_begin_early
    units = move.plan.units
    assert np.flatnonzero(move.written[0]).tolist() == [
        page * units + unit for page in (5, 6, 7) for unit in range(units)
    ]
    assert list(move.written) == [0], "the other rank's last step is over"


def test_blocks_that_a_step_under_way_writes_are_not_copied_early() -> None:
    """Both tasks have hit a block of another, which the step under way computes."""
    led = [cargo("part", ints(1, 5, 6), 40), cargo("none", ints(5, 7), 20)]
    manifests = {0: replace(dp(0, *led), written=ints(5, 6, 7)), 1: dp(1)}
    found = component_of(0, manifests, target((0, 1)), GEOMETRY, is_serving=True)
    assert found.given is not None
    chains = [chain for group in found.given.old for chain in group.chains]
    assert [(each.id, each.slots.tolist()) for each in chains] == [("part", [[1]])]


def test_every_member_knows_where_its_group_writes() -> None:
    manifests = tp((0, 1), cargo("task", ints(2, 3), 20), shift=2)
    manifests[0] = replace(manifests[0], written=ints(3))
    move = plan(0, manifests, target((0,), (1,)))
    for rank in (0, 1):
        slot = int(manifests[rank].slots[3])
        assert np.flatnonzero(move.written[rank]).tolist() == [slot]


@pytest.mark.parametrize(
    ("stages", "mode", "written"), [(2, Mode.TP, [6, 7]), (1, Mode.PP, [5, 7])]
)
def test_ranks_know_the_stages_of_old_and_new_groups(
    stages: int, mode: Mode, written: list[int]
) -> None:
    """The last step writes slot 3: of page 1 the last layers, or the second half of the heads."""
    manifests = {
        rank: replace(each, stages=stages)
        for rank, each in tp((0, 1), cargo("task", ints(2, 3), 20)).items()
    }
    manifests[0] = replace(manifests[0], written=ints(3))
    travelled = pickle.loads(pickle.dumps(manifests, protocol=5))
    to = Target((Binding(Group((Rank(0), Rank(1)), mode), EPOCH),))
    geometry = replace(GEOMETRY, num_layers=2)
    one, other = (plan_move(0, each, to, geometry) for each in (manifests, travelled))
    assert repr(one.plan) == repr(other.plan)
    assert one.plan.finest == Split(2, 2)
    assert [each.id for each in one.plan.carried] == ["task"]
    assert one.plan.copies, "half of each member's share is the other's"
    for rank in (0, 1):
        assert np.flatnonzero(one.written[rank]).tolist() == written


def test_the_first_round_of_several_may_begin_while_old_steps_are_under_way() -> None:
    led = [cargo(f"task {rank}", ints(*range(1, 10)), 140) for rank in range(2)]
    manifests = {rank: dp(rank, led[rank]) for rank in range(2)}
    move = plan(0, manifests, target((0, 1)))
    assert move.plan.rounds > 1
    assert move.spoils_from == 2
    assert move.may_begin_early


def test_a_move_into_wide_groups_may_end_behind_its_commit() -> None:
    manifests = {rank: dp(rank, cargo(f"task {rank}", ints(1 + rank, 5), 20)) for rank in range(4)}
    for to in (target((0, 1), (2, 3)), target((0, 1, 2, 3))):
        move = plan(0, manifests, to)
        assert move.plan.copies
        assert move.may_end_late


def test_a_move_that_brings_a_rank_alone_something_is_over_before_its_commit() -> None:
    """Its first step waits for nobody, and may write where another rank still reads."""
    manifests = tp((0, 1), cargo("a", ints(2, 3), 20), cargo("b", ints(4, 5), 32), shift=3)
    assert not plan(1, manifests, target((0,), (1,))).may_end_late
    wider = {**tp((0, 1), cargo("a", ints(2, 3), 20), shift=2), 2: dp(2), 3: dp(3)}
    assert plan(0, wider, target((0, 1, 2, 3))).may_end_late


def test_a_move_between_groups_is_over_before_its_commit() -> None:
    """The lost member of one group would take with it what the other still copies."""
    manifests = tp((0, 1, 2, 3), *(cargo(f"{n}", ints(4 + n), 10) for n in range(4)), shift=2)
    move = plan(0, manifests, target((0, 1), (2, 3)))
    assert {each.group for each in move.plan.carried} == {0, 1}
    assert not move.may_end_late


def test_a_move_of_several_rounds_is_over_before_its_commit() -> None:
    led = [cargo(f"task {rank}", ints(*range(1, 10)), 140) for rank in range(2)]
    move = plan(0, {rank: dp(rank, led[rank]) for rank in range(2)}, target((0, 1)))
    assert move.plan.rounds > 1
    assert not move.may_end_late


def test_early_copies_travel_in_one_array() -> None:
    copies = tuple(
        EarlyCopy(
            f"task-{number}", number % 2, 1, 0, 2, *(np.arange(number) + row for row in (0, 9, 7))
        )
        for number in range(1, 5)
    )
    found = unpacked(pickle.loads(pickle.dumps(packed(copies), protocol=5)))
    assert [each.key for each in found] == [each.key for each in copies]
    for each, copy in zip(found, copies, strict=True):
        assert each.places.tolist() == copy.places.tolist()
        assert each.blocks.tolist() == copy.blocks.tolist()
        assert each.slots.tolist() == copy.slots.tolist()
    assert unpacked(packed(())) == ()
