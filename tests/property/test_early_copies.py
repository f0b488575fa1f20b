"""Copies made while the old groups serve, and plans that find them there."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvadaptor.reshard.plan import plan_reshard
from tests.harness.kv.early_inputs import copied_early
from tests.harness.kv.reshard_inputs import Shape, draw_input
from tests.harness.kv.reshard_model import check_plan
from tests.harness.kv.reshard_shapes import shapes, staged_shapes


@given(
    st.one_of(shapes(), staged_shapes()),
    st.randoms(use_true_random=False),
    st.sampled_from([0.3, 1.0]),
)
@settings(max_examples=120, deadline=None)
def test_plans_keep_their_promises_with_early_blocks(
    shape: Shape, order: random.Random, share: float
) -> None:
    asked = copied_early(draw_input(shape), share, order)
    check_plan(asked, plan_reshard(asked), order)


@given(st.one_of(shapes(), staged_shapes()), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_nothing_is_copied_again_where_all_fits(shape: Shape, order: random.Random) -> None:
    """With ample pages, the plan copies no task's block, and overwrites no old one."""
    # A rank that serves alone afterwards needs a page for every slot of its old group's pages.
    fill = 0.5 / sum(len(ranks) for ranks in shape.old)
    roomy = replace(shape, fill=fill, spare=1.0, num_pages=60, cached=0, keyed=False, rounds_max=8)
    asked = copied_early(draw_input(roomy), 1.0, order)
    plan = plan_reshard(asked)
    assert not plan.fallbacks
    assert not plan.copies, f"{sum(each.src_units.size for each in plan.copies)} units are copied"
