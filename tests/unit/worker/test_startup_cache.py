"""What a rank's process leaves to the one that takes its place."""

from comm_pool.cpu.cell_memory import cell_memory
from comm_pool.layout import Mode, Rank
from comm_pool.mixed import Mixed
from worker.engine.startup_cache import StartupMeasurements
from worker.rank.step_times import StepCurve, StepTimes


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
