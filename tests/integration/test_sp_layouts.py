"""Layouts with sp and shift groups: to and from every other, with running tasks, exact streams."""

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.cells.crossing import TASKS, prompt, run

pytestmark = [pytest.mark.slow, pytest.mark.exact]

LAYOUTS = ("dp4", "sp2tp2", "sp2+tp2", "shift2+dp2", "shift4")
CROSSING_TOKENS = 250
"""Of each task that crosses: on a fast machine shorter ones end before the switches do."""

LONGEST_PROMPT = len(prompt(TASKS - 1))
ONE_GROUP = ("sp4", "tp4", "sp2tp2", "shift4", "shift2tp2")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks in fp32."""
    with bare_cell(
        tmp_path_factory.mktemp("sp"),
        ranks=4,
        engine_args=["--dtype", "float32", "--max-model-len", "1024"],
        mixed=("sp2tp2",),
        pause_limit_ms=60_000,
    ) as running:
        yield running


@pytest.mark.timeout(400)
async def test_running_tasks_cross_to_every_other_layout(cell: BareCell) -> None:
    cell.switch("dp4", "recompute")
    expected = await run(cell, "plain", [], CROSSING_TOKENS)
    pairs = [layout for pair in itertools.permutations(LAYOUTS, 2) for layout in pair]
    carries = random.Random(5).choices(["reshard", "reshard", "pause", "recompute"], k=len(pairs))
    switches = list(zip(pairs, carries, strict=True))
    half = len(switches) // 2
    for turn in range(2):
        cell.switch("dp4", "recompute")
        part = switches[turn * half : (turn + 1) * half]
        # Paused tasks wait for their ranks to be one group again.
        ending = [("dp4", "recompute")]
        crossed = await run(cell, f"crossed-{turn}", part + ending, CROSSING_TOKENS)
        assert crossed == expected, turn
    records = cell.get("/admin/switches?last=60")["switches"]
    assert sum(record["tasks"]["reshard"] for record in records) > 5 * TASKS
    cell.pages()


@pytest.mark.timeout(200)
async def test_between_modes_of_one_group_no_kv_moves(cell: BareCell) -> None:
    cell.switch("dp4", "recompute")
    expected = await run(cell, "unmoved", [])
    for carry in ("reshard", "pause"):
        cell.switch("sp4", "recompute")
        switches = [(layout, carry) for layout in (*ONE_GROUP[1:], "tp4", "sp4")]
        assert await run(cell, f"same-{carry}", switches) == expected, carry
        records = cell.get(f"/admin/switches?last={len(switches)}")["switches"]
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
async def test_a_layout_pins_its_steps_and_shift_keeps_to_the_threshold(cell: BareCell) -> None:
    times = cell.get("/admin/decisions")["step_times"][2]
    before: dict[str, int] = {}
    shares = {}
    for layout in ONE_GROUP:
        cell.switch(layout, "recompute")
        sp_share(cell, before)
        await run(cell, f"pinned-{layout}", [], tokens=60)
        steps, in_sp = sp_share(cell, before)
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
            assert shares[layout] > 0 or start > LONGEST_PROMPT


def test_step_times_of_every_width_are_told(cell: BareCell) -> None:
    told = cell.get("/admin/decisions")["step_times"]
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
