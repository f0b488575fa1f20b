"""Plans to and from pipeline groups of two ranks, worked out by hand."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from kvadaptor.geometry import Split
from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import (
    Chain,
    NewGroup,
    OldGroup,
    ReshardError,
    ReshardInput,
    ReshardPlan,
)
from tests.harness.kv.reshard_model import check_plan

KEY = b"the same"


def chain(name: str, *rows: list[int], **more: Any) -> Chain:
    return Chain(name, np.array(rows, dtype=np.int64), **more)


def asked(old: tuple[OldGroup, ...], new: tuple[NewGroup, ...], **more: Any) -> ReshardInput:
    given = ReshardInput(
        num_kv_heads=8,
        num_pages={0: 64, 1: 64},
        old=old,
        new=new,
        free={rank: np.array([7, 8], dtype=np.int64) for rank in (0, 1)},
        num_layers=4,
    )
    return dataclasses.replace(given, **more)


def planned(given: ReshardInput) -> ReshardPlan:
    plan = plan_reshard(given)
    check_plan(given, plan, random.Random(1))
    return plan


def copied(plan: ReshardPlan) -> list[tuple[int, int, int, int]]:
    """Each copy: source rank and unit, destination rank and unit."""
    return [
        (int(source), int(unit), each.dst_rank, int(target))
        for each in plan.copies
        for source, unit, target in zip(each.src_ranks, each.src_units, each.dst_units, strict=True)
    ]


DP = NewGroup((0,)), NewGroup((1,))
TP = (NewGroup((0, 1)),)
PP = (NewGroup((0, 1), stages=2),)


def test_of_a_replica_the_leader_keeps_the_last_layers() -> None:
    plan = planned(asked((OldGroup((0,), (chain("a", [3]),)), OldGroup((1,))), PP))
    assert plan.finest == Split(2, 1)
    # Units 6 and 7 are the first and the last layers of page 3.
    assert copied(plan) == [(0, 6, 1, 14)]
    assert plan.groups[0].slots(plan.carried[0].blocks).tolist() == [[7], [14]]


def test_stages_become_parts_with_what_lies_right_in_place() -> None:
    """Page 5 is units 20 to 23: the first layers' two halves of heads, then the last layers'."""
    old = OldGroup((0, 1), (chain("a", [11], [10]),), stages=2)
    plan = planned(asked((old,), TP))
    assert plan.finest == Split(2, 2)
    # Rank 0 has the last layers in 22 and 23, rank 1 the first ones in 20 and 21. Rank 0 gets the
    # first half of the first layers, rank 1 the second half of the last ones.
    assert copied(plan) == [(1, 20, 0, 20), (0, 23, 1, 23)]
    assert plan.in_place_units == 2
    assert plan.groups[0].slots(plan.carried[0].blocks).tolist() == [[10], [11]]


def test_parts_become_stages_again() -> None:
    plan = planned(asked((OldGroup((0, 1), (chain("a", [10], [11]),)),), PP))
    assert copied(plan) == [(1, 23, 0, 23), (0, 20, 1, 20)]
    assert plan.groups[0].slots(plan.carried[0].blocks).tolist() == [[11], [10]]


def test_of_equal_blocks_each_stage_keeps_its_own() -> None:
    old = tuple(OldGroup((rank,), (chain(f"{rank}", [3], keys=(KEY,)),)) for rank in (0, 1))
    plan = planned(asked(old, PP))
    assert copied(plan) == []
    assert plan.groups[0].slots(plan.carried[0].blocks).tolist() == [[7], [6]]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_does_not_change_stays(stages: int) -> None:
    old = OldGroup((0, 1), (chain("a", [11, 20], [10, 23]),), stages)
    plan = planned(asked((old,), (NewGroup((0, 1), stages=stages),)))
    assert copied(plan) == []


STAGED = OldGroup((0, 1), stages=2)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (asked((STAGED,), TP, num_layers=5), "2 stages do not share 5 layers evenly"),
        (asked((STAGED,), TP, num_kv_heads=3), "2 ranks do not share 3 KV heads evenly"),
        (asked((OldGroup((0, 1), stages=4),), TP), r"ranks \(0, 1\) cannot be 4 stages"),
        (asked((OldGroup((0, 1), stages=0),), TP), r"ranks \(0, 1\) cannot be 0 stages"),
        (asked((OldGroup((0, 1)),), (NewGroup((0, 1), stages=3),)), "cannot be 3 stages"),
    ],
)
def test_stages_that_cannot_be_are_refused(given: ReshardInput, reason: str) -> None:
    with pytest.raises(ReshardError, match=reason):
        plan_reshard(given)


def test_stages_of_all_heads_need_no_heads_to_share() -> None:
    old = OldGroup((0,), (chain("a", [3]),)), OldGroup((1,))
    assert planned(asked(old, PP, num_kv_heads=1)).carried
