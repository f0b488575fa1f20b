"""How many threads a rank computes with, and what it borrows."""

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.config import Config
from worker import spec as module
from worker.cohort import Cohort
from worker.memories import Memories
from worker.spec import RankSpec, communicator_widths, everyone, modes_widths, rank_spec


@pytest.mark.parametrize(
    ("device", "given", "cores", "threads"),
    [("cpu", 0, 9, 4), ("cpu", 0, 2, 1), ("cpu", 3, 9, 3), ("cuda", 0, 9, 1), ("cuda", 2, 9, 2)],
)
def test_ranks_share_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, device: str, given: int, cores: int, threads: int
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    cell = {"ranks": 2, "device": device, "threads_per_rank": given}
    config = Config.model_validate({"model": {"path": "m"}, "cell": cell})
    cohort = Cohort(0, everyone(config), config.cell.dist_port)
    assert rank_spec(config, Rank(0), cohort, Memories()).threads == threads


def spec_of(**cell: object) -> RankSpec:
    settings = {"ranks": 4, "widths": [1, 2, 4], "layout": "tp4", **cell}
    config = Config.model_validate({"model": {"path": "m"}, "cell": settings})
    return rank_spec(config, Rank(0), Cohort(0, everyone(config), 0), Memories())


def test_ranks_that_borrow_serve_alone_and_in_the_widest_groups() -> None:
    halves = spec_of(weight_parts=2, whole_layers="auto")
    assert (halves.borrow, halves.whole_layers, halves.floor_goal_s) == ("ffn", "auto", 0.015)
    assert modes_widths(halves) == (1, 4)
    assert modes_widths(spec_of(weight_parts=2, borrow="all")) == (1, 4)
    assert modes_widths(spec_of(weight_parts=2, borrow="none")) == (4,)
    replica = spec_of()
    assert (replica.parts, replica.borrow, replica.whole_layers) == (1, "none", 0)
    assert modes_widths(replica) == (1, 2, 4)


def test_ranks_have_communicators_of_the_widths_that_they_use() -> None:
    assert communicator_widths(spec_of()) == (1, 2, 4)
    assert communicator_widths(spec_of(weight_parts=4)) == (1, 4)
    assert communicator_widths(spec_of(weight_parts=4, borrow="none")) == (1, 4)
    # Ranks with the same half exchange heads in pairs.
    assert communicator_widths(spec_of(weight_parts=2)) == (1, 2, 4)


def test_ranks_may_hold_different_numbers_of_whole_layers() -> None:
    """ZeroDP's source holds all layers, its sink borrows what it lacks."""
    settings = {"ranks": 4, "widths": [1, 2, 4], "layout": "tp4", "weight_parts": 2}
    config = Config.model_validate(
        {"model": {"path": "m"}, "cell": {**settings, "whole_layers": [5, 0, 3, 0]}}
    )
    cohort = Cohort(0, everyone(config), 0)
    found = [rank_spec(config, rank, cohort, Memories()).whole_layers for rank in everyone(config)]
    assert found == [5, 0, 3, 0]
