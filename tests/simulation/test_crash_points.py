"""Every point of a switch and of the move in it, every role: a crash there never mixes layouts.

Nothing is lost either: every task of every run finishes, and all ranks serve one layout at its end.
"""

import pytest

from coordinator.protocol.terms import Carry
from tests.simulation.crash_points import (
    EXIT_SEEN,
    SILENT,
    STUCK,
    CrashWorld,
    Point,
    Switch,
    points_of,
)
from tests.simulation.mutations import mutated
from tests.simulation.world import FAILURES

HOWS = (EXIT_SEEN, SILENT, STUCK)
SHARE = 3
"""The default run tries one point of this number."""

MIXED = Switch("tp4+tp2+dp2", "dp2+tp2+tp4", Carry.RESHARD)
"""Each rank changes its role: leaders, followers and ranks alone, before and after."""
STAGED = Switch("pp4+tp2+dp2", "dp2+pp2+tp4", Carry.RESHARD)
"""The same, from and to pipeline groups."""
SWITCHES = (
    MIXED,
    STAGED,
    Switch("pp4+pp4", "tp4+tp4", Carry.RESHARD),
    Switch("tp4+pp2+pp2", "pp4+tp2+dp2", Carry.PAUSE),
    Switch("dp8", "tp8", Carry.RESHARD),
    Switch("tp8", "dp8", Carry.RESHARD),
    *(Switch("tp4+tp2+dp2", "dp2+tp2+tp4", carry) for carry in Carry if carry is not Carry.RESHARD),
)


def failures_of(switch: Switch, runs: list[tuple[Point, str]]) -> list[str]:
    """What went wrong, as the point where the crash was."""
    found = []
    for point, how in runs:
        world = CrashWorld(switch, point, how)
        try:
            world.run_switch()
            assert world.crashed_at is not None, "the point was not reached again"
        except FAILURES as error:
            found.append(f"{switch}, {how}, {point}: {error}")
    return found


@pytest.mark.parametrize("first", range(len(HOWS)))
def test_a_crash_at_any_point_ends_in_one_layout(first: int) -> None:
    """A share of the points in one of three ways; `make chaos` has all, and other switches."""
    points = points_of(MIXED, HOWS[first])
    assert {point.role for point in points} >= {f"rank {rank}" for rank in range(8)}
    assert len({point.label for point in points}) >= 25
    chosen = points[first :: len(HOWS) * SHARE]
    assert not failures_of(MIXED, [(point, HOWS[first]) for point in chosen])


@pytest.mark.parametrize("how", [EXIT_SEEN, SILENT])
def test_a_crash_at_any_point_of_a_pipeline_group_ends_in_one_layout(how: str) -> None:
    points = points_of(STAGED, how)
    chosen = points[HOWS.index(how) :: len(HOWS) * SHARE]
    assert len(chosen) >= 12
    assert not failures_of(STAGED, [(point, how) for point in chosen])


@pytest.mark.chaos
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_crash_at_every_point(switch: Switch, how: str) -> None:
    if switch.has_stages and how == STUCK:
        pytest.skip("steps of pipeline groups run on no device")
    points = points_of(switch, how)
    failures = failures_of(switch, [(point, how) for point in points])
    print(f"{switch}, {how}: {len(points)} points, {len(failures)} failures")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("bug", "label"),
    [
        ("requeue loses tokens", "PARK is heard"),
        ("take any commit for one's own", "leave is reported"),
    ],
)
def test_a_bug_shows_at_some_point(bug: str, label: str) -> None:
    """These matter only when somebody dies in a switch: without a crash it goes well."""
    with mutated(bug):
        points = [each for each in points_of(MIXED) if each.label == label]
        assert points
        assert failures_of(MIXED, [(point, EXIT_SEEN) for point in points])
