"""Re-shard plans of small memories, worked out by hand; the checker of plans catches bad ones."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import (
    Chain,
    FallbackCause,
    NewGroup,
    OldGroup,
    ReshardError,
    ReshardInput,
    ReshardPlan,
    UnitCopies,
)
from tests.harness.kv.reshard_model import check_plan

KEY = b"the same"


def chain(name: str, *rows: Sequence[int], **more: Any) -> Chain:
    slots = np.array(rows, dtype=np.int64).reshape(len(rows), -1)
    return dataclasses.replace(Chain(name, slots), **more)


def asked(
    old: Sequence[OldGroup],
    new: Sequence[Sequence[int]],
    free: Mapping[int, Sequence[int]],
    **more: Any,
) -> ReshardInput:
    given = ReshardInput(
        num_kv_heads=8,
        num_pages={rank: 64 for ranks in new for rank in ranks},
        old=tuple(old),
        new=tuple(NewGroup(tuple(ranks)) for ranks in new),
        free={rank: np.array(pages, dtype=np.int64) for rank, pages in free.items()},
    )
    return dataclasses.replace(given, **more)


def planned(given: ReshardInput) -> ReshardPlan:
    plan = plan_reshard(given)
    check_plan(given, plan, random.Random(1))
    return plan


def dp(rank: int, *chains: Chain) -> OldGroup:
    return OldGroup((rank,), chains)


def tp2(*chains: Chain) -> OldGroup:
    return OldGroup((0, 1), chains)


def copies(plan: ReshardPlan) -> list[tuple[int, int, list[list[int]]]]:
    return [
        (
            each.round,
            each.dst_rank,
            np.stack((each.src_ranks, each.src_units, each.dst_units), 1).tolist(),
        )
        for each in plan.copies
    ]


REPLICAS = [dp(0, chain("a", [3, 5])), dp(1, chain("b", [4]))]


def test_two_replicas_become_a_group() -> None:
    """Each keeps its heads of its own pages and gets those of the other's into a free page."""
    plan = planned(asked(REPLICAS, [(0, 1)], {0: [9], 1: [8, 10]}))
    # Rank 0: a's blocks stay at slots 2·3 and 2·5; b's heads 0 come into its free page 9.
    # Rank 1: b stays at slot 2·4 + 1, a's heads 1 come into its free page 8.
    assert copies(plan) == [(1, 0, [[1, 8, 18]]), (1, 1, [[0, 7, 16], [0, 11, 17]])]
    lease = plan.groups[0]
    assert lease.pages.tolist() == [[3, 5, 9], [4, 8, 10]]
    assert lease.slots(lease.used).tolist() == [[6, 10, 18], [16, 17, 9]]
    assert plan.in_place_units == 3


def test_members_lease_as_many_pages_as_the_one_that_needs_most() -> None:
    """Rank 0 keeps three pages; rank 1 has no use for a third page but leases one."""
    plan = planned(
        asked([dp(0, chain("a", [3, 5, 7])), dp(1)], [(0, 1)], {0: [], 1: [10, 11, 12, 13]})
    )
    assert plan.groups[0].pages.tolist() == [[3, 5, 7], [10, 11, 12]]
    assert plan.carried[0].blocks.tolist() == [2, 3, 4]
    assert plan.groups[0].slots(plan.carried[0].blocks).tolist() == [[6, 10, 14], [20, 21, 22]]
    assert plan.groups[0].table[:, :2].tolist() == [[0, 1], [0, 1]]


def test_member_with_fewer_pages_makes_the_others_pack() -> None:
    """Four blocks fill two pages of rank 1, so rank 0 may not keep all its four pages."""
    plan = planned(
        asked([dp(0, chain("a", [3, 4, 5, 6])), dp(1)], [(0, 1)], {0: [7, 8], 1: [10, 11]})
    )
    assert plan.groups[0].indices == 2
    assert not plan.fallbacks


def test_a_group_becomes_two_replicas() -> None:
    plan = planned(
        asked([tp2(chain("a", [6], [8]), chain("b", [7], [9]))], [(0,), (1,)], {0: [20], 1: [21]})
    )
    # Page 3 of rank 0 is full and so is page 4 of rank 1, so both tasks go to free pages.
    assert plan.rounds == 1
    assert [each.group for each in plan.carried] == [0, 1]
    assert [lease.pages.tolist() for lease in plan.groups] == [[[20]], [[21]]]
    assert copies(plan) == [
        (1, 0, [[0, 6, 40], [1, 8, 41]]),
        (1, 1, [[0, 7, 42], [1, 9, 43]]),
    ]


def test_a_block_stays_in_its_page_if_the_rest_of_the_page_is_not_needed() -> None:
    """Slot 6 is the first of page 3, where rank 0's heads belong; slot 8 is not for rank 1's."""
    plan = planned(asked([tp2(chain("a", [6], [8]))], [(0,), (1,)], {0: [20], 1: [21]}))
    assert plan.carried[0].group == 0
    assert plan.groups[0].pages.tolist() == [[3]]
    assert copies(plan) == [(1, 0, [[1, 8, 7]])]
    assert plan.in_place_units == 1


def test_without_a_free_page_full_pages_change_places_in_rounds() -> None:
    given = asked(
        [dp(0, chain("a", range(1, 5))), dp(1, chain("b", range(1, 5)))],
        [(0, 1)],
        {0: [9], 1: [9]},
    )
    plan = planned(given)
    assert plan.rounds == 2
    assert not plan.fallbacks
    few = planned(dataclasses.replace(given, rounds_max=1))
    assert [each.cause for each in few.fallbacks] == [FallbackCause.ROUNDS]
    assert few.rounds <= 1


def test_memory_that_is_full_cannot_change_places() -> None:
    given = asked([dp(0, chain("a", [1, 2])), dp(1, chain("b", [1, 2]))], [(0, 1)], {})
    plan = planned(given)
    assert [(each.id, each.cause) for each in plan.fallbacks] == [("b", FallbackCause.ROUNDS)]


@pytest.mark.parametrize("width", [1, 2])
def test_what_does_not_change_stays(width: int) -> None:
    ranks = tuple(range(width))
    given = asked([OldGroup(ranks, (chain("a", *[[5, 9]] * width),))], [ranks], {})
    plan = planned(given)
    assert (plan.rounds, plan.in_place_units) == (0, 2 * width)
    assert plan.carried[0].in_place


def test_shared_blocks_are_carried_once_per_new_group() -> None:
    a, b = chain("a", [2, 3, 4]), chain("b", [2, 3, 6])
    plan = planned(asked([dp(0, a, b), dp(1)], [(0, 1)], {0: [20], 1: [20, 21, 22, 23]}))
    first, second = plan.carried
    assert first.blocks[:2].tolist() == second.blocks[:2].tolist()
    assert plan.groups[0].used.size == 4


def test_a_short_common_prefix_is_doubled_rather_than_all_tasks_in_one_place() -> None:
    tasks = [chain(f"t{n}", [2, 10 + n, 20 + n], [2, 10 + n, 20 + n]) for n in range(4)]
    plan = planned(asked([tp2(*tasks)], [(0,), (1,)], {0: range(30, 50), 1: range(30, 50)}))
    assert sorted(each.group for each in plan.carried) == [0, 0, 1, 1]
    assert [lease.used.size for lease in plan.groups] == [5, 5]


def test_a_long_common_prefix_keeps_tasks_together() -> None:
    prefix = list(range(2, 12))
    tasks = [chain(f"t{n}", *[[*prefix, 20 + n]] * 2) for n in range(2)]
    lone = chain("u", *[range(40, 50)] * 2)
    plan = planned(asked([tp2(*tasks, lone)], [(0,), (1,)], {0: range(30, 60), 1: range(30, 60)}))
    assert [each.group for each in plan.carried] == [0, 0, 1]


def test_of_equal_blocks_each_rank_keeps_its_own() -> None:
    a, b = (chain(name, [page], keys=(KEY,)) for name, page in (("a", 2), ("b", 3)))
    plan = planned(asked([dp(0, a), dp(1, b)], [(0, 1)], {}))
    assert plan.rounds == 0
    assert plan.carried[0].blocks.tolist() == plan.carried[1].blocks.tolist() == [2]
    assert all(each.in_place for each in plan.carried)


def test_least_recently_used_chains_are_dropped_and_the_next_is_cut() -> None:
    cached = [
        chain(f"c{age}", [10 * age, 10 * age + 1, 10 * age + 2], cached=True, recency=age)
        for age in (1, 2, 3)
    ]
    plan = planned(asked([dp(0, *cached), dp(1)], [(0, 1)], {0: [], 1: [5, 6]}))
    assert plan.dropped == ("c1",)
    assert [(each.id, each.blocks.size) for each in plan.carried] == [("c2", 1), ("c3", 3)]


def test_cached_chains_cost_few_rounds() -> None:
    """What fits in two rounds is kept, though all of it would fit in more."""
    cached = [chain(f"c{n}", [2 + n], cached=True, recency=n) for n in range(20)]
    other = [chain(f"d{n}", [2 + n], cached=True, recency=n) for n in range(20)]
    given = asked([dp(0, *cached), dp(1, *other)], [(0, 1)], {0: [40], 1: [40]})
    plan = planned(given)
    assert plan.rounds <= 2
    assert plan.dropped
    assert planned(dataclasses.replace(given, cached_rounds_max=0)).rounds == 0


def test_large_and_less_urgent_tasks_fall_back_first() -> None:
    old = dp(
        0,
        chain("late", [1], tier=2),
        chain("large", [2, 3, 4], tier=1),
        chain("small", [5], tier=1),
        chain("urgent", [6, 7], tier=0),
    )
    plan = planned(asked([old, dp(1)], [(0, 1)], {1: [9, 10]}))
    assert [(each.id, each.cause) for each in plan.fallbacks] == [("large", FallbackCause.PAGES)]
    tight = planned(asked([old, dp(1)], [(0, 1)], {1: [9]}))
    assert [each.id for each in tight.fallbacks] == ["late", "large", "small"]


GOOD = chain("a", [3])


@pytest.mark.parametrize(
    "given",
    [
        asked([dp(0)], [(0, 1)], {}),
        asked([], [], {}),
        asked([OldGroup((1, 2))], [(1, 2)], {}),
        asked([dp(0), dp(1)], [(0,), (1,)], {}),
        asked([OldGroup(tuple(range(16)))], [range(16)], {}),
        asked([dp(0, GOOD)], [(0,)], {0: [3]}),
        asked([dp(0, GOOD)], [(0,)], {0: [64]}),
        asked([dp(0, GOOD)], [(0,)], {1: [5]}),
        asked([dp(0, chain("a", [0]))], [(0,)], {}),
        asked([dp(0, chain("a", [64]))], [(0,)], {}),
        asked([dp(0, GOOD, GOOD)], [(0,)], {}),
        asked([dp(0, chain("a", [3], [3]))], [(0,)], {}),
        asked([dp(0, chain("a", [3], keys=(KEY, KEY)))], [(0,)], {}),
        asked([dp(0, chain("a", [3], keys=(KEY,)), chain("b", [3], keys=(b"x",)))], [(0,)], {}),
        asked([tp2(chain("a", [4, 5], [4, 4]))], [(0, 1)], {}),
        asked([tp2(chain("a", [4], [4]), chain("b", [4], [5]))], [(0, 1)], {}),
        asked([dp(0, GOOD)], [(0,)], {}, rounds_max=0),
        asked([dp(0, GOOD), dp(1)], [(0, 1)], {}, num_pages={0: 3, 1: 64}),
        asked([dp(0), dp(1, GOOD)], [(0, 1)], {0: [3]}, num_pages={0: 3, 1: 64}),
        asked([tp2(chain("a", [4], [8]))], [(0, 1)], {}, num_pages={0: 64, 1: 4}),
        asked([dp(0, GOOD), dp(1)], [(0, 1)], {}, num_pages={0: 64}),
        asked([dp(0, GOOD), dp(1)], [(0, 1)], {}, num_pages={0: 64, 1: 0}),
    ],
)
def test_inputs_that_cannot_be_are_refused(given: ReshardInput) -> None:
    with pytest.raises(ReshardError):
        plan_reshard(given)


def test_keys_on_one_chain_do_not_need_keys_on_all() -> None:
    plan = planned(asked([dp(0, GOOD, chain("b", [5], keys=(KEY,)))], [(0,)], {}))
    assert plan.rounds == 0


# What a plan must not be. Each breaks a plan of two rounds in one way.


def _first(plan: ReshardPlan, change: Callable[[UnitCopies], UnitCopies]) -> ReshardPlan:
    return dataclasses.replace(plan, copies=(change(plan.copies[0]), *plan.copies[1:]))


def swap_two_destinations(plan: ReshardPlan) -> ReshardPlan:
    def change(each: UnitCopies) -> UnitCopies:
        units = each.dst_units.copy()
        units[:2] = units[1::-1]
        return dataclasses.replace(each, dst_units=units)

    return _first(plan, change)


def drop_a_copy(plan: ReshardPlan) -> ReshardPlan:
    return _first(
        plan,
        lambda each: dataclasses.replace(
            each,
            src_ranks=each.src_ranks[1:],
            src_units=each.src_units[1:],
            dst_units=each.dst_units[1:],
        ),
    )


def merge_rounds(plan: ReshardPlan) -> ReshardPlan:
    merged = tuple(dataclasses.replace(each, round=1) for each in plan.copies)
    return dataclasses.replace(plan, copies=merged, rounds=1)


def turn_rounds_round(plan: ReshardPlan) -> ReshardPlan:
    turned = (dataclasses.replace(each, round=plan.rounds + 1 - each.round) for each in plan.copies)
    return dataclasses.replace(plan, copies=tuple(turned))


def read_another_rank(plan: ReshardPlan) -> ReshardPlan:
    return _first(plan, lambda each: dataclasses.replace(each, src_ranks=1 - each.src_ranks))


def write_elsewhere(plan: ReshardPlan) -> ReshardPlan:
    return _first(plan, lambda each: dataclasses.replace(each, dst_units=each.dst_units + 100))


def copy_twice(plan: ReshardPlan) -> ReshardPlan:
    return dataclasses.replace(plan, copies=(plan.copies[0], *plan.copies))


def swap_in_a_table(plan: ReshardPlan) -> ReshardPlan:
    table = plan.groups[0].table.copy()
    table[0, [2, 3]] = table[0, [3, 2]]
    return dataclasses.replace(plan, groups=(dataclasses.replace(plan.groups[0], table=table),))


def name_a_slot_twice(plan: ReshardPlan) -> ReshardPlan:
    table = plan.groups[0].table.copy()
    table[0, -1] = table[0, -2]
    return dataclasses.replace(plan, groups=(dataclasses.replace(plan.groups[0], table=table),))


def lease_a_page_of_others(plan: ReshardPlan) -> ReshardPlan:
    pages, table = plan.groups[0].pages.copy(), plan.groups[0].table.copy()
    table[0][table[0] // 2 == pages[0, -1]] += 2 * (60 - pages[0, -1])
    pages[0, -1] = 60
    lease = dataclasses.replace(plan.groups[0], pages=pages, table=table)
    return dataclasses.replace(plan, groups=(lease,))


def lose_a_task(plan: ReshardPlan) -> ReshardPlan:
    return dataclasses.replace(plan, carried=plan.carried[1:])


def share_what_differs(plan: ReshardPlan) -> ReshardPlan:
    one, other = plan.carried
    mixed = dataclasses.replace(other, blocks=one.blocks)
    return dataclasses.replace(plan, carried=(one, mixed))


def claim_to_stay(plan: ReshardPlan) -> ReshardPlan:
    return dataclasses.replace(
        plan, carried=tuple(dataclasses.replace(each, in_place=True) for each in plan.carried)
    )


@pytest.mark.parametrize(
    "broken",
    [
        swap_two_destinations,
        drop_a_copy,
        merge_rounds,
        turn_rounds_round,
        read_another_rank,
        write_elsewhere,
        copy_twice,
        swap_in_a_table,
        name_a_slot_twice,
        lease_a_page_of_others,
        lose_a_task,
        share_what_differs,
        claim_to_stay,
    ],
)
def test_the_checker_catches(broken: Callable[[ReshardPlan], ReshardPlan]) -> None:
    pages = {0: [9], 1: [9]}
    given = asked([dp(0, chain("a", range(1, 5))), dp(1, chain("b", range(1, 5)))], [(0, 1)], pages)
    plan = planned(given)
    assert plan.rounds == 2
    with pytest.raises(AssertionError):
        check_plan(given, broken(plan), random.Random(1))


def test_reserved_groups_get_the_tasks_of_their_tiers() -> None:
    """Otherwise the larger ones would be shared out by size."""
    tasks = [chain(f"task {n}", [n], [n], tier=n % 2) for n in range(2, 10)]
    given = asked([tp2(*tasks)], [[0], [1]], {0: range(20, 40), 1: range(20, 40)})
    for reserved in (0, 1):
        groups = tuple(
            NewGroup(each.ranks, 1 if number == reserved else 0)
            for number, each in enumerate(given.new)
        )
        plan = planned(dataclasses.replace(given, new=groups))
        assert not plan.fallbacks
        for each in plan.carried:
            is_urgent = int(each.id.split()[1]) % 2 == 0
            assert (each.group == reserved) == is_urgent, each.id


def test_pages_count_more_than_reservations() -> None:
    tasks = [chain(f"task {n}", [n], [n], tier=1) for n in range(2, 10)]
    given = asked([tp2(*tasks)], [[0], [1]], {0: range(20, 40), 1: ()})
    groups = (NewGroup((0,), 1), NewGroup((1,)))
    plan = planned(dataclasses.replace(given, new=groups))
    assert not plan.fallbacks
    assert {each.group for each in plan.carried} == {0, 1}
