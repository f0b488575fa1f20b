"""Re-shard plans over all pairs of layouts and memories from empty to full, against the model."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import ReshardPlan
from tests.harness.kv.reshard_inputs import Shape, Tiling, draw_input
from tests.harness.kv.reshard_model import check_plan


@st.composite
def tilings(draw: st.DrawFn, first: int, width: int) -> Tiling:
    """Aligned power-of-two groups that cover a span."""
    if width == 1 or draw(st.booleans()):
        return (tuple(range(first, first + width)),)
    half = width // 2
    return (*draw(tilings(first, half)), *draw(tilings(first + half, half)))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    units = draw(st.sampled_from([1, 2, 4, 8]))
    first = units * draw(st.integers(0, 1))
    whole = (tuple(range(first, first + units)),)
    parts = draw(tilings(first, units))
    old, new = draw(st.sampled_from([(whole, parts), (parts, whole)]))
    return Shape(
        old=old,
        new=new,
        num_heads=units * draw(st.sampled_from([1, 2, 3])),
        num_pages=draw(st.integers(1, 28)),
        more_pages=draw(st.sampled_from([0, 0, 1, 5, 30])),
        tasks=draw(st.integers(0, 5)),
        cached=draw(st.integers(0, 3)),
        fill=draw(st.sampled_from([0.1, 0.3, 0.5, 0.8, 1.0])),
        spare=draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
        keyed=draw(st.booleans()),
        rounds_max=draw(st.sampled_from([1, 2, 8])),
        seed=draw(st.integers(0, 2**32)),
    )


def same(one: ReshardPlan, other: ReshardPlan) -> bool:
    return repr(one) == repr(other)


@given(shapes(), st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_every_plan_keeps_its_promises(shape: Shape, order: random.Random) -> None:
    asked = draw_input(shape)
    check_plan(asked, plan_reshard(asked), order)


@pytest.mark.long
@given(shapes(), st.randoms(use_true_random=False))
@settings(max_examples=2_000, deadline=None)
def test_many_plans_keep_their_promises(shape: Shape, order: random.Random) -> None:
    asked = draw_input(shape)
    check_plan(asked, plan_reshard(asked), order)


@given(shapes())
@settings(max_examples=50, deadline=None)
def test_equal_inputs_give_equal_plans(shape: Shape) -> None:
    plan, again = plan_reshard(draw_input(shape)), plan_reshard(draw_input(shape))
    assert same(plan, again)
