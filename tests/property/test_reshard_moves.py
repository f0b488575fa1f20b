"""Plans that movers carry out: every member finds the bytes of its own layers and heads."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvadaptor.geometry import PageGeometry
from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import NewGroup, OldGroup, ReshardInput
from kvadaptor.transfer.movers import PeerMover
from kvadaptor.transfer.rounds import by_source
from tests.harness.kv.reshard_inputs import Shape, draw_input
from tests.harness.kv.reshard_model import Content, Model
from tests.harness.kv.reshard_shapes import shapes, staged_shapes

HEAD_BYTES = 6


class Contents:
    """The KV of blocks, (layers, heads, bytes), random and the same for equal contents."""

    def __init__(self, asked: ReshardInput) -> None:
        self._shape = (asked.num_layers, asked.num_kv_heads, HEAD_BYTES)
        self._random = np.random.default_rng(7)
        self._of: dict[Content, Any] = {}

    def share(self, content: Content, group: OldGroup | NewGroup, place: int) -> Any:
        """What a member computes of a block: the leader the last layers."""
        if content not in self._of:
            self._of[content] = self._random.integers(-128, 128, self._shape, dtype=np.int8)
        stage, part = divmod(place, len(group.ranks) // group.stages)
        return cut(self._of[content], group, group.stages - 1 - stage, part)


def cut(kv: Any, group: OldGroup | NewGroup, row: int, column: int) -> Any:
    """A range of the layers and a range of the heads of (layers, heads, bytes); a view."""
    layers = kv.shape[0] // group.stages
    heads = kv.shape[1] * group.stages // len(group.ranks)
    return kv[row * layers : (row + 1) * layers, column * heads : (column + 1) * heads]


def slot(memory: Any, group: OldGroup | NewGroup, number: int) -> Any:
    """A slot in (layers, pages, heads, bytes); a view."""
    page, inside = divmod(number, len(group.ranks))
    return cut(memory[:, page], group, *divmod(inside, len(group.ranks) // group.stages))


@given(st.one_of(shapes(), staged_shapes()))
@settings(max_examples=80, deadline=None)
def test_members_find_the_bytes_of_their_layers_and_heads(shape: Shape) -> None:
    asked = draw_input(shape)
    geometry = PageGeometry(asked.num_layers, asked.num_kv_heads, 2, 1, 1, 2)
    raw = {
        rank: torch.zeros(pages * geometry.page_bytes, dtype=torch.int8)
        for rank, pages in asked.num_pages.items()
    }
    memory = {
        rank: each.numpy().reshape(asked.num_layers, -1, asked.num_kv_heads, HEAD_BYTES)
        for rank, each in raw.items()
    }
    contents, model = Contents(asked), Model.of(asked)
    for group in asked.old:
        for chain in group.chains:
            for place, rank in enumerate(group.ranks):
                for content, number in zip(
                    model.contents(chain.id), chain.slots[place], strict=True
                ):
                    slot(memory[rank], group, number)[:] = contents.share(content, group, place)
    plan = plan_reshard(asked)
    for each in plan.copies:
        copies = by_source(each.src_ranks, each.src_units, each.dst_units)
        mover = PeerMover(each.dst_rank, raw, geometry)
        mover.move({each.dst_rank: copies}, plan.finest)
    for carried in plan.carried:
        new = asked.new[carried.group]
        slots = plan.groups[carried.group].slots(carried.blocks).tolist()
        for place, rank in enumerate(new.ranks):
            for content, number in zip(model.contents(carried.id), slots[place], strict=False):
                found = slot(memory[rank], new, number)
                assert np.array_equal(found, contents.share(content, new, place))
