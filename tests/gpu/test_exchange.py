"""An sp exchange in parts, beside the products of large steps, is the exchange in one part.

Needs two NVIDIA GPUs and vLLM's CUDA build. Small whole numbers, so that every product is exact and
one row or one column in the wrong place shows; many steps behind one another without a look from
the host, with memory taken and given back between them, so that memory reused too soon does, too.
"""

from typing import Any

import pytest
import torch

from comm_pool.head_exchange import HeadExchange
from tests.harness.vllm.mover_ranks import World, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

PLAN = HeadExchange(heads=64, kv_heads=8, width=2)
HIDDEN = 1024
HEAD = 16
STEPS = 30


class Group:
    """The part of vLLM's GroupCoordinator that an exchange uses, over NCCL."""

    device_communicator = None

    def __init__(self, world: World) -> None:
        self.rank_in_group = world.rank
        self.device_group = world.device_group


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Numbers from -2 to 2, the same wherever they are drawn."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=draw).float()


def steps_in_parts(world: World, parts: int) -> list[bool]:
    """For each step whether what came in parts is what came in one."""
    from worker.engine.sequence_parallel.exchange import Exchange

    group: Any = Group(world)
    exchange = Exchange(PLAN, group)
    columns = PLAN.width * (PLAN.heads_each + 2 * PLAN.kv_heads_each) * HEAD
    into = whole_numbers(HIDDEN, columns, seed=1).to(world.device)
    out_of = whole_numbers(PLAN.heads * HEAD, HIDDEN, seed=2).to(world.device)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(STEPS):
        exchange.tokens = tokens = 2_048 + 512 * (step % 5) + step % 3
        seed = 3 + step + 100 * world.rank
        hidden = whole_numbers(PLAN.share(tokens), HIDDEN, seed=seed).to(world.device)
        heads = whole_numbers(tokens, PLAN.heads_each * HEAD, seed=seed + 50).to(world.device)
        found = []
        for parts_from in ((), ((0, parts),)):
            exchange.parts_from = parts_from
            found.append(
                (
                    exchange.computed_to_heads(lambda rows: rows @ into, hidden),
                    exchange.computed_on_tokens(lambda rows: rows @ out_of, heads),
                )
            )
            torch.full((tokens, columns), -9.0, device=world.device)  # Takes what was given back.
        pairs += zip(*found, strict=True)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return [torch.equal(one, many) for one, many in pairs]


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_beside_products_are_one_part(parts: int) -> None:
    for right in run_ranks(2, steps_in_parts, parts, device="cuda", limit_s=150):
        assert right == [True] * (2 * STEPS)
