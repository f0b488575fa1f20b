"""Random inputs of the re-shard planner, as ranks could have them."""

import random
from dataclasses import dataclass

import numpy as np

from kvadaptor.reshard.terms import Chain, NewGroup, OldGroup, ReshardInput

Tiling = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shape:
    """How an input is drawn; `fill` is the part of the pages that old groups have.

    A rank has up to `more_pages` pages beyond `num_pages`. `old_stages` and `new_stages` are the
    pipeline stages of each group; empty means one.
    """

    old: Tiling
    new: Tiling
    num_heads: int
    num_pages: int
    more_pages: int
    tasks: int
    cached: int
    fill: float
    spare: float
    keyed: bool
    rounds_max: int
    seed: int
    num_layers: int = 1
    old_stages: tuple[int, ...] = ()
    new_stages: tuple[int, ...] = ()


def draw_input(shape: Shape) -> ReshardInput:
    draw = random.Random(shape.seed)
    ranks_of_all = [rank for ranks in shape.old for rank in ranks]
    num_pages = {rank: shape.num_pages + draw.randint(0, shape.more_pages) for rank in ranks_of_all}
    old, free = [], {}
    old_stages = shape.old_stages or (1,) * len(shape.old)
    new_stages = shape.new_stages or (1,) * len(shape.new)
    for number, ranks in enumerate(shape.old):
        # Members lease equally many pages, so no more than the smallest has.
        fewest = min(num_pages[rank] for rank in ranks)
        count = round((fewest - 1) * shape.fill * draw.random())
        slots_of, pages = [], []
        for rank in ranks:
            order = draw.sample(range(1, num_pages[rank]), num_pages[rank] - 1)
            mine, others = sorted(order[:count]), order[count:]
            slots = [page * len(ranks) + slot for page in mine for slot in range(len(ranks))]
            if draw.random() < 0.5:
                draw.shuffle(slots)
            slots_of.append(slots)
            pages.append(mine)
            # The rest belongs to paused tasks.
            free[rank] = others[: round(len(others) * shape.spare)]
        table = np.array(slots_of, dtype=np.int64).reshape(len(ranks), -1)
        chains = _draw_chains(draw, shape, number, table)
        old.append(OldGroup(ranks, chains, old_stages[number]))
        for rank, mine in zip(ranks, pages, strict=True):
            held = {
                int(slot) // len(ranks)
                for chain in chains
                for slot in chain.slots[ranks.index(rank)]
            }
            free[rank] += [page for page in mine if page not in held]
    return ReshardInput(
        num_kv_heads=shape.num_heads,
        num_pages=num_pages,
        old=tuple(old),
        new=tuple(
            NewGroup(ranks, stages=stages)
            for ranks, stages in zip(shape.new, new_stages, strict=True)
        ),
        free={rank: np.array(sorted(pages), dtype=np.int64) for rank, pages in free.items()},
        rounds_max=shape.rounds_max,
        num_layers=shape.num_layers,
    )


def _draw_chains(
    draw: random.Random, shape: Shape, number: int, table: np.ndarray
) -> tuple[Chain, ...]:
    """Chains over the logical blocks 0..n-1, whose slots are `table`; some start like another."""
    unused = list(range(table.shape[1]))
    if draw.random() < 0.5:
        draw.shuffle(unused)
    chains: list[Chain] = []
    logical: list[list[int]] = []
    key_of: dict[int, bytes | None] = {}
    count = shape.tasks + shape.cached
    for at in range(count):
        cached = at >= shape.tasks
        family = draw.randrange(3)
        blocks: list[int] = []
        if logical and draw.random() < 0.4:
            parent = draw.choice(logical)
            blocks = parent[: draw.randint(0, len(parent))]
        fresh = draw.randint(0, 2 * table.shape[1] // max(1, count))
        blocks = blocks + unused[:fresh]
        del unused[:fresh]
        for index, block in enumerate(blocks):
            key = f"{family}.{index}".encode() if draw.random() < 0.8 else None
            key_of.setdefault(block, key)
        logical.append(blocks)
        keys = tuple(key_of[block] for block in blocks)
        chains.append(
            Chain(
                id=f"{'c' if cached else 't'}{number}.{at}",
                slots=table[:, blocks],
                tier=draw.randrange(3),
                cached=cached,
                recency=draw.randrange(5),
                keys=keys if shape.keyed else (),
            )
        )
    return tuple(chains)
