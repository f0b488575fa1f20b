"""Commits that are half heard when the coordinator ends: no stream is wrong, and none hangs."""

import pytest

from tests.simulation.half_heard import HalfHeardWorld
from tests.simulation.seeds import BORROW, PARTS, WIDE
from tests.simulation.sweep import NARROW, Kind
from tests.simulation.world import FAILURES

KINDS = (NARROW, WIDE, PARTS, BORROW)
SEEDS = 8


def failures_of(runs: list[tuple[int, Kind]]) -> tuple[list[str], int]:
    """What failed, and how many commits were half heard."""
    failures, half_heard = [], 0
    for seed, kind in runs:
        world = HalfHeardWorld(seed, kind)
        try:
            world.run()
        except FAILURES as error:
            failures.append(f"seed {seed}, {kind}: {error}")
        half_heard += world.half_heard
    return failures, half_heard


@pytest.mark.parametrize("kind", KINDS, ids=["narrow", "wide", "parts", "borrow"])
def test_clients_notice_nothing(kind: Kind) -> None:
    failures, half_heard = failures_of([(seed, kind) for seed in range(SEEDS)])
    assert not failures, "\n".join(failures)
    assert half_heard > 1, "the scenario does not come about"


@pytest.mark.chaos
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kind", KINDS, ids=["narrow", "wide", "parts", "borrow"])
def test_clients_notice_nothing_with_all_seeds(kind: Kind) -> None:
    failures, _ = failures_of([(seed, kind) for seed in range(SEEDS, 150)])
    assert not failures, "\n".join(failures)
