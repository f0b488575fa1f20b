"""How many threads a rank computes with."""

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.config import Config
from worker import spec as module
from worker.cohort import Cohort
from worker.spec import everyone, rank_spec


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
    assert rank_spec(config, Rank(0), cohort, None).threads == threads
