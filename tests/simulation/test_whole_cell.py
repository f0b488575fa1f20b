"""The whole cell in one world: the gateways' real task book and streams, the policy, the planner.

With everything that `test_switch` breaks, and one-way partitions, clocks that jump, slow ranks and
ranks that compute wrongly.
"""

import pytest

from coordinator.ranks.mode_quarantine import ModeQuarantine
from tests.simulation.checkers import Violation
from tests.simulation.seeds import WIDE
from tests.simulation.stats import Stats
from tests.simulation.sweep import replay_of
from tests.simulation.world import FAILURES, World

SEEDS = 36


@pytest.fixture(scope="module")
def runs() -> list[Stats]:
    done, failures = [], []
    for seed in range(SEEDS):
        try:
            done.append(World(seed, wide=True).run())
        except FAILURES as error:
            failures.append(f"{replay_of(seed, WIDE)}    {error}")
    assert not failures, "\n".join(failures)
    return done


@pytest.mark.timeout(600)
def test_invariants_hold_in_the_whole_cell(runs: list[Stats]) -> None:
    assert len(runs) == SEEDS
    assert sum(run.ends.get("finished", 0) for run in runs) > 500


def test_all_parts_and_faults_take_part(runs: list[Stats]) -> None:
    for what, least in {
        "switches": 200,
        "moved": 20,
        "crashes": 10,
        "core_crashes": 3,
        "trimmed_tokens": 50,
        "policy_switches": 2,
        "one_way": 50,
        "clock_jumps": 10,
        "slowed": 10,
        "meetings": 10,
        "drifts": 20,
        "left_out": 5,
        "restored": 1,
        "renewed": 2,
        "renewed_parts": 1,
    }.items():
        assert sum(getattr(run, what) for run in runs) >= least, what


def test_a_failure_names_the_command_that_replays_it() -> None:
    assert replay_of(7, WIDE) == "make sim SEED=7 WIDE=1"


def test_a_guard_that_keeps_what_is_barred_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModeQuarantine, "remaining", lambda _self, layout, *_: layout)
    with pytest.raises(Violation, match="serves though it has drifted"):
        for seed in range(SEEDS):
            World(seed, wide=True).run()
