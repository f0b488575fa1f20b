"""Re-shard plans over all pairs of layouts and memories from empty to full, against the model."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import ReshardPlan
from tests.harness.kv.reshard_inputs import Shape, draw_input
from tests.harness.kv.reshard_model import check_plan
from tests.harness.kv.reshard_shapes import shapes, staged_shapes


def same(one: ReshardPlan, other: ReshardPlan) -> bool:
    return repr(one) == repr(other)


@given(shapes(), st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_every_plan_keeps_its_promises(shape: Shape, order: random.Random) -> None:
    asked = draw_input(shape)
    check_plan(asked, plan_reshard(asked), order)


@given(staged_shapes(), st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_every_plan_of_pipeline_groups_keeps_its_promises(
    shape: Shape, order: random.Random
) -> None:
    asked = draw_input(shape)
    check_plan(asked, plan_reshard(asked), order)


@pytest.mark.long
@given(st.one_of(shapes(), staged_shapes()), st.randoms(use_true_random=False))
@settings(max_examples=2_000, deadline=None)
def test_many_plans_keep_their_promises(shape: Shape, order: random.Random) -> None:
    asked = draw_input(shape)
    check_plan(asked, plan_reshard(asked), order)


@given(st.one_of(shapes(), staged_shapes()))
@settings(max_examples=50, deadline=None)
def test_equal_inputs_give_equal_plans(shape: Shape) -> None:
    plan, again = plan_reshard(draw_input(shape)), plan_reshard(draw_input(shape))
    assert same(plan, again)
