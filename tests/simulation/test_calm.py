"""Where nothing breaks but processes, early copies happen, as the participant's table says."""

from tests.simulation.mutations import patched
from tests.simulation.rule_faults import ROWS
from tests.simulation.sweep import Kind, world_of

EARLY = Kind(calm=True, precopy=True)
SEEDS = range(6)


def copies_early() -> int:
    """KV pages that ranks copied while their groups served."""
    return sum(world_of(seed, EARLY).run().precopied for seed in SEEDS)


def test_blocks_are_copied_before_groups_are_left() -> None:
    assert copies_early() > 0


def test_no_leader_stays_for_copies_without_its_rule() -> None:
    with patched([ROWS["row 9, WAIT"]]):
        assert copies_early() == 0
