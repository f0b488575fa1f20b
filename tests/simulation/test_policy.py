"""The policy over random loads in a simulated cell of four H200s, beside layouts that stay.

The best fixed layout of a load is known only afterwards. `python -m tests.simulation.policy_runs`
does the same for as many loads as wanted; what it found for 200 is in ADR 0024.
"""

import pytest

from comm_pool.layout import parse_layout
from coordinator.model.cost_model import CostModel
from coordinator.model.policy_settings import PolicySettings
from coordinator.protocol.terms import Tier
from tests.simulation.policy_runs import (
    SETTINGS,
    WIDTHS,
    Compared,
    box_of,
    compare,
    returns_within,
    simulate,
)
from tests.simulation.policy_shapes import (
    LLAMA_70B_FP8,
    QWEN_32B,
    QWEN_32B_HALVES,
    Part,
    Phase,
    any_shape,
    arrivals,
)
from tools.simulator.cell import Arrival, SimCell, is_good

pytestmark = pytest.mark.timeout(600)

SEEDS = 16
SEEDS_OF_LOANS = 10


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return [compare(any_shape(seed), seed, box_of(seed)) for seed in range(SEEDS)]


def test_no_fixed_layout_serves_all_loads_as_well(compared: list[Compared]) -> None:
    total = sum(each.adaptive for each in compared)
    for name in compared[0].fixed:
        assert total >= 0.99 * sum(each.fixed[name] for each in compared), name


def test_what_is_lost_to_the_best_layout_of_each_load_is_little(compared: list[Compared]) -> None:
    best = sum(max(each.fixed.values()) for each in compared)
    assert sum(each.adaptive for each in compared) >= 0.96 * best
    ratios = sorted(each.ratio for each in compared)
    assert ratios[len(ratios) // 2] >= 0.97


def test_where_ranks_borrow_little_is_lost_too() -> None:
    """Small steps take as long as their loans, except in the widest group."""
    found = [compare(any_shape(seed), seed, QWEN_32B_HALVES) for seed in range(SEEDS_OF_LOANS)]
    best = sum(max(each.fixed.values()) for each in found)
    assert sum(each.adaptive for each in found) >= 0.96 * best


def test_where_ranks_borrow_decodes_are_served_wide_and_prompts_apart() -> None:
    """A step of many prompt tokens hides its loans, one of a few decodes waits for them."""
    phases = [
        Phase(12, (Part(Tier.STANDARD, 6.0, 300, 400),)),
        Phase(15, (Part(Tier.STANDARD, 12.0, 4_000, 10),)),
    ]
    found = compare(phases, 3, QWEN_32B_HALVES)
    decodes = [name for at_s, name, _ in found.run.switches if at_s < 12]
    prompts = [name for at_s, name, _ in found.run.switches if 12 <= at_s < 27]
    assert (decodes[-1], prompts[-1]) == ("tp4", "dp4")
    assert found.ratio >= 0.95


@pytest.mark.parametrize("seed", range(3))
def test_chat_beside_bursts_of_documents_is_served_apart_from_them(seed: int) -> None:
    """Preset `documents` of the load generator: no static layout meets the goals of chat then."""
    chat, documents = Part(Tier.INTERACTIVE, 6.4, 300, 400), Part(Tier.STANDARD, 16.5, 4_000, 50)
    phases = [Phase(22.5, (chat,)), Phase(15, (chat, documents)), Phase(22.5, (chat,))]
    found = compare(phases * 2, seed, QWEN_32B)
    assert found.adaptive >= 1.85 * max(found.fixed.values())
    reserved = [name for at_s, name, _ in found.run.switches if 22.5 <= at_s < 37.5]
    assert reserved
    assert all("for interactive" in name for name in reserved)
    assert returns_within(found.run, 10) <= 1


def test_no_layout_is_come_back_to_within_the_stay(compared: list[Compared]) -> None:
    assert sum(len(each.run.switches) for each in compared) > SEEDS
    for each in compared:
        assert not returns_within(each.run, SETTINGS.stay_ms / 1000), each.seed
        assert all(reason for _, _, reason in each.run.switches)


def test_every_request_is_told_of_once(compared: list[Compared]) -> None:
    for each in compared:
        assert len(each.run.requests) == each.asked


def test_the_simulated_cell_takes_what_the_cost_model_says() -> None:
    run = simulate([Arrival(0.0, Tier.STANDARD, 4_096, 101)], 60, LLAMA_70B_FP8, "tp4")
    (seen,) = run.requests
    assert seen.ttft_s == pytest.approx(0.196, rel=0.01)
    assert seen.tpot_s == pytest.approx(0.0096, rel=0.02)
    assert is_good(seen, SETTINGS)


def test_measured_throughput_is_found_again() -> None:
    """256 requests of 1,024 + 128 tokens in one group: 20,500 tokens/s in tp4, 13,400 in tp2."""
    load = [Arrival(0.0, Tier.BATCH, 1_024, 128)] * 256
    for layout, groups, measured in (("tp4", 1, 20_500), ("tp2+tp2", 2, 13_400)):
        cell = SimCell(parse_layout(layout, 4, WIDTHS), LLAMA_70B_FP8, PolicySettings())
        ends = [each.end_s for each in cell.run(load * groups, 300).requests]
        assert None not in ends
        rate = 256 * 1_152 / max(end for end in ends if end is not None)
        assert rate == pytest.approx(measured, rel=0.1)


def test_light_then_heavy_traffic_is_served_wide_and_then_apart() -> None:
    phases = [
        Phase(15, (Part(Tier.STANDARD, 1.0, 1_000, 100),)),
        Phase(15, (Part(Tier.STANDARD, 24.0, 1_000, 100),)),
    ]
    run = simulate(arrivals(phases, 3), 60, LLAMA_70B_FP8, None)
    light = [name for at_s, name, _ in run.switches if at_s < 15]
    heavy = [name for at_s, name, _ in run.switches if 15 <= at_s < 30]
    assert light[-1] == "tp4"
    assert heavy
    assert heavy[-1] in ("dp4", "tp2+tp2")


@pytest.mark.parametrize("box", [LLAMA_70B_FP8, QWEN_32B], ids=["70b", "32b"])
@pytest.mark.parametrize("half_s", [1, 2, 4, 8, 15, 30])
def test_a_load_that_comes_and_goes_is_not_chased(half_s: int, box: CostModel) -> None:
    low, high = (Phase(half_s, (Part(Tier.STANDARD, rate, 1_000, 150),)) for rate in (3.0, 24.0))
    found = compare([low, high] * (60 // half_s), 7, box)
    times = [at_s for at_s, _, _ in found.run.switches]
    most = max((sum(at <= each < at + 60 for each in times) for at in times), default=0)
    print(
        f"\nhalf a period {half_s} s: {len(times)} switches in 120 s, {most} in a minute at most, "
        f"{found.ratio:.3f} of the best fixed layout"
    )
    assert most <= 6
    assert len(times) <= 8
    assert found.ratio >= (0.94 if half_s == 30 else 0.98)
