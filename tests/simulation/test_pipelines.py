"""Groups of pipeline stages under random faults: the invariants hold, and they do what is new.

More seeds are in `test_seeds`, and bugs that these worlds find are in `test_switch`.
"""

import functools

from tests.simulation.seeds import PIPELINES
from tests.simulation.stats import Stats
from tests.simulation.sweep import Kind, failure_of, replay_of, world_of
from tests.simulation.world import FAILURES

SEEDS = range(20)
SEEDS_OF_PRECOPY = range(6)
SEEDS_OF_LOSSES = (45,)
"""Few worlds lose a pipeline group whose tasks find room elsewhere at once."""


@functools.cache
def run_of(seed: int) -> Stats:
    return world_of(seed, PIPELINES).run()


def known_failure_of(seed: int) -> str | None:
    try:
        run_of(seed)
    except FAILURES as error:
        return f"{replay_of(seed, PIPELINES)}    {error}"
    return None


def test_they_hold_with_pipeline_groups() -> None:
    failures = [failure for seed in SEEDS if (failure := known_failure_of(seed))]
    assert not failures, "\n".join(failures)


def test_they_hold_where_kv_is_copied_before_pipeline_groups_are_left() -> None:
    kind = Kind(pipelines=True, precopy=True)
    failures = [each for seed in SEEDS_OF_PRECOPY if (each := failure_of(seed, kind=kind))]
    assert not failures, "\n".join(failures)


def test_stages_compute_steps_at_once_and_tasks_move_to_them() -> None:
    runs = [run_of(seed) for seed in SEEDS]
    assert sum(run.staged for run in runs) > 800
    assert sum(run.ahead for run in runs) > 600
    assert sum(run.moved for run in runs) > 40
    assert sum(run.moved_to_stages for run in runs) > 10
    assert sum(run.spoiled_moves for run in runs) > 0


def test_tasks_go_on_from_the_memory_of_lost_pipeline_groups_and_in_others() -> None:
    runs = [run_of(seed) for seed in (*SEEDS, *SEEDS_OF_LOSSES)]
    assert sum(run.loaded_of_stages for run in runs) > 10
    assert sum(run.loaded_in_stages for run in runs) > 4
