"""Plans are those recorded before groups could have pipeline stages, bit for bit."""

import hashlib
import random
from collections.abc import Iterator

import numpy as np

from kvadaptor.reshard.early import EarlyPlan, plan_early
from kvadaptor.reshard.plan import plan_reshard
from kvadaptor.reshard.terms import ReshardInput, ReshardPlan, UnitCopies
from tests.harness.kv.early_inputs import copied_early, spare_of, without_keys
from tests.harness.kv.reshard_inputs import Shape, Tiling, draw_input

INPUTS = 120
PLANS = "c58c7bfd3bc5dc9afc577cb5642efbb7ea1ffd04927f0210a1e8040417bde70a"
EARLY_PLANS = "62e0c4982aef96ad8e5315dcb333b91220e01480dd257e9b3aaae4d2facdc10d"


def tiling(draw: random.Random, first: int, width: int) -> Tiling:
    if width == 1 or draw.random() < 0.3:
        return (tuple(range(first, first + width)),)
    half = width // 2
    return (*tiling(draw, first, half), *tiling(draw, first + half, half))


def inputs() -> Iterator[tuple[ReshardInput, random.Random]]:
    """Inputs of all widths, memories from empty to full; every third one has early blocks."""
    draw = random.Random(35)
    for number in range(INPUTS):
        ranks = draw.choice([1, 2, 4, 4, 8])
        first = ranks * draw.randrange(2)
        both = [(tuple(range(first, first + ranks)),), tiling(draw, first, ranks)]
        draw.shuffle(both)
        shape = Shape(
            old=both[0],
            new=both[1],
            num_heads=ranks * draw.choice([1, 3]),
            num_pages=draw.randint(6, 24),
            more_pages=draw.choice([0, 1, 30]),
            tasks=draw.randint(1, 5),
            cached=draw.randint(0, 3),
            fill=draw.choice([0.5, 1.0, 1.0]),
            spare=draw.choice([0.0, 0.5, 1.0]),
            keyed=draw.random() < 0.5,
            rounds_max=draw.choice([2, 8, 8]),
            seed=number,
        )
        asked = draw_input(shape)
        yield copied_early(asked, 0.5, draw) if number % 3 == 0 else asked, draw


def array(numbers: np.ndarray) -> bytes:
    return repr(numbers.shape).encode() + numbers.astype("<i8").tobytes()


def copies(each: UnitCopies) -> bytes:
    head = repr((each.round, each.dst_rank)).encode()
    return head + b"".join(map(array, (each.src_ranks, each.src_units, each.dst_units)))


def plan_bytes(plan: ReshardPlan) -> Iterator[bytes]:
    yield repr((plan.units, plan.rounds, plan.in_place_units, plan.dropped)).encode()
    yield repr([(each.id, each.cause.value) for each in plan.fallbacks]).encode()
    for lease in plan.groups:
        yield repr(lease.ranks).encode()
        yield from map(array, (lease.pages, lease.table, lease.used))
    for each in plan.carried:
        yield repr((each.id, each.cached, each.group, each.size, each.in_place)).encode()
        yield array(each.blocks)
    yield from map(copies, plan.copies)


def early_bytes(plan: EarlyPlan) -> Iterator[bytes]:
    yield repr((plan.units, plan.rank, plan.width)).encode()
    yield from map(array, (plan.source_ranks, plan.source_units, plan.slots))
    for name, (places, at) in plan.places.items():
        yield name.encode() + array(places) + array(at)
    yield copies(plan.copies(plan.size // 3, plan.size))


def test_plans_are_those_recorded() -> None:
    found = hashlib.sha256()
    for asked, _ in inputs():
        for each in plan_bytes(plan_reshard(asked)):
            found.update(each)
    assert found.hexdigest() == PLANS


def test_early_plans_are_those_recorded() -> None:
    found = hashlib.sha256()
    for asked, draw in inputs():
        spare = spare_of(asked, 0.7, draw)
        for rank in asked.num_pages:
            for each in early_bytes(plan_early(without_keys(asked), rank, spare[rank])):
                found.update(each)
    assert found.hexdigest() == EARLY_PLANS
