"""What a rank's first process measured serves those after it, as far as they prepare the same."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from comm_pool.cpu.cell_memory import CellMemory, cell_memory, measurements_name
from comm_pool.cuda.lasting_memory import lasting_memory
from comm_pool.layout import Mode, Rank
from comm_pool.mixed import Mixed
from coordinator.protocol.config import check_config
from worker.cohort import Cohort
from worker.engine.config import ModeKey
from worker.engine.startup_cache import Probes, StartupMeasurements, known_measurements
from worker.memories import Memories
from worker.rank.step_times import StepCurve, StepTimes
from worker.spec import RankSpec, everyone, rank_spec

PROBES: Probes = {(1, Mode.DP): ((0.5,), 3), (2, Mode.TP): ((0.7,), 4), (2, Mode.SP): ((0.8,), 5)}
MEASURED = StartupMeasurements({"dp1": StepTimes(1, {})}, PROBES)


def spec_of(memories: Memories, *, joins: bool) -> RankSpec:
    config = check_config(
        {
            "model": {"path": "nowhere", "served_name": "demo"},
            "cell": {"ranks": 2, "device": "cpu", "layout": "dp2", "widths": [1, 2]},
        }
    )
    spec = rank_spec(config, Rank(1), Cohort(1, everyone(config), 0), memories)
    return replace(spec, joins=joins)


def test_the_next_process_of_a_rank_is_told_what_was_measured() -> None:
    memory = cell_memory(2, (1, 2), ())
    curve = StepCurve(((1, 100), (256, 900)))
    times = {
        "dp1": StepTimes(1, {Mode.DP: curve}),
        "tp2": StepTimes(2, {Mode.TP: curve, Mixed(2, 2): curve}),
    }
    first = StartupMeasurements(times, {(2, Mode.TP): ((-1.5, -2.5), 40)})
    first.store(memory, Rank(1))
    StartupMeasurements({}, {}).store(memory, Rank(0))
    assert StartupMeasurements.load(memory, Rank(1)) == first
    assert StartupMeasurements.load(memory, Rank(0)) == StartupMeasurements({}, {})
    memory.close()


def test_modes_tell_their_times_and_what_bounds_their_steps() -> None:
    keys = ModeKey(Mode.DP, 1), ModeKey(Mode.TP, 2)
    times = [StepTimes(1, {}), StepTimes(2, {})]
    modes: Any = {
        key: SimpleNamespace(times=each, runner=SimpleNamespace(is_launch_bound=each.width > 1))
        for key, each in zip(keys, times, strict=True)
    }
    found = StartupMeasurements.of(modes, PROBES, 3)
    assert found.times == dict(zip(("dp1", "tp2"), times, strict=True))
    assert found.launch_bound == {"dp1": False, "tp2": True}
    assert (found.probed, found.whole_layers) == (PROBES, 3)


def test_a_narrow_group_has_no_use_for_probes_of_wide_ones() -> None:
    own: Probes = {(1, Mode.DP): ((0.4,), 9)}
    assert MEASURED.probes_with(own, {1}) == own
    assert MEASURED.probes_with(own, {1, 2}) == {**PROBES, **own}


def test_a_cuda_rank_finds_them_where_its_memory_outlives_it() -> None:
    lasting = lasting_memory(2, (1, 2), ())
    spec = spec_of(Memories(lasting=lasting), joins=False)
    assert known_measurements(spec) is None
    MEASURED.store(lasting.cell, spec.rank)
    found = known_measurements(spec)
    assert found is not None
    assert found.probed == PROBES
    lasting.close()


def test_cpu_ranks_that_start_together_measure_together() -> None:
    memory = CellMemory([measurements_name(1)])
    MEASURED.store(memory, Rank(1))
    assert known_measurements(spec_of(Memories(memory), joins=False)) is None
    assert known_measurements(spec_of(Memories(memory), joins=True)) is not None
    memory.close()
