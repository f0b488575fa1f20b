"""Layouts with sp and shift groups: between modes nothing moves, and steps are as they promise."""

import time

import pytest

from tests.harness.cells.bare_cell import BareCell
from tests.harness.cells.crossing import TASKS, prompt, run
from tests.harness.cells.random_load import STEP_TOKENS_MAX

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-four")]

LARGEST_STEP = min(len(prompt(TASKS - 1)), STEP_TOKENS_MAX)
"""Tokens of the largest step that surely comes."""
ONE_GROUP = ("sp4", "tp4", "sp2tp2", "shift4", "shift2tp2")


@pytest.mark.timeout(200)
async def test_between_modes_of_one_group_no_kv_moves(four_ranks: BareCell) -> None:
    expected = await run(four_ranks, "unmoved", [])
    for carry in ("reshard", "pause"):
        four_ranks.switch("sp4", "recompute")
        switches = [(layout, carry) for layout in (*ONE_GROUP[1:], "tp4", "sp4")]
        assert await run(four_ranks, f"same-{carry}", switches) == expected, carry
        records = four_ranks.get(f"/admin/switches?last={len(switches)}")["switches"]
        assert {(record["carry"], record["outcome"]) for record in records} == {(carry, "served")}
        assert sum(record["reshard_bytes"] for record in records) == 0
        assert sum(record["tasks"]["recompute"] for record in records) == 0
        # Paused tasks are not even counted: their pages never stop being their group's.
        moved = sum(record["tasks"]["reshard"] for record in records)
        assert moved > TASKS or carry == "pause"


def sp_share(cell: BareCell, before: dict[str, int]) -> tuple[int, int]:
    """Steps since `before` of rank 3, a follower, and those of them with tokens shared out."""
    time.sleep(1.5)  # Gauges are read twice a second.
    gauges = cell.get("/admin/ranks")["ranks"][3]["gauges"]
    taken = gauges["steps"] - before.get("steps", 0), gauges["steps_sp"] - before.get("steps_sp", 0)
    before.update(gauges)
    return taken


@pytest.mark.timeout(200)
async def test_a_layout_pins_its_steps_and_shift_keeps_to_the_threshold(
    four_ranks: BareCell,
) -> None:
    times = four_ranks.get("/admin/decisions")["step_times"][2]
    before: dict[str, int] = {}
    shares = {}
    sp_share(four_ranks, before)
    for layout in ONE_GROUP:
        four_ranks.switch(layout, "recompute")  # Nothing runs, so it takes no steps.
        await run(four_ranks, f"pinned-{layout}", [], tokens=60)
        steps, in_sp = sp_share(four_ranks, before)
        assert steps > 50
        shares[layout] = in_sp / steps
    thresholds = {
        "shift4": times["sp_from_tokens"],
        "shift2tp2": times["mixed_from_tokens"]["sp2tp2"],
    }
    print(shares, thresholds)
    assert (shares["sp4"], shares["tp4"], shares["sp2tp2"]) == (1, 0, 1)
    # Most steps decode 16 tasks; the first ones read their prompts, 1,160 tokens in all, in as many
    # steps as they come in.
    for layout, start in thresholds.items():
        if start is None or start > 2000:
            assert shares[layout] == 0
        elif start <= 16:
            assert shares[layout] > 0.5
        else:
            assert shares[layout] < 0.5
            assert shares[layout] > 0 or start > LARGEST_STEP


def test_step_times_of_every_width_are_told(four_ranks: BareCell) -> None:
    told = four_ranks.get("/admin/decisions")["step_times"]
    assert [times["width"] for times in told] == [1, 2, 4]
    for times in told:
        modes = {1: {"dp"}, 2: {"tp", "sp"}, 4: {"tp", "sp", "sp2tp2"}}[times["width"]]
        assert set(times["curves"]) == modes
        assert times["mixed_from_tokens"].keys() == modes - {"dp", "tp", "sp"}
        for points in times["curves"].values():
            sizes, measured = zip(*((each["tokens"], each["ms"]) for each in points), strict=True)
            assert sizes[0] == 1
            assert sizes == tuple(sorted(sizes))
            assert 0 < measured[0] <= measured[-1]
    print(told)
