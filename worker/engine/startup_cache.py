"""Measurements that a rank made at start-up together with others, stored for its successor.

A rank that restarts while the others serve computes alone. It takes the step times and probe
results of wide groups from its predecessor, which had the same weights and the same place in every
group. On CUDA it prepares narrow groups alone, and need not measure them again.
"""

import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from comm_pool.cpu.cell_memory import CellMemory, measurements_name
from comm_pool.layout import Rank, StepMode
from worker.engine.config import ModeKey
from worker.engine.mode import PreparedMode
from worker.rank.step_times import StepTimes
from worker.spec import RankSpec

Probes = dict[tuple[int, StepMode], tuple[tuple[float, ...], int]]
"""(width, mode) -> log-probabilities of the probe, and its duration in microseconds."""


@dataclass(frozen=True, slots=True)
class StartupMeasurements:
    """What a rank measured at start-up, and the number of its whole layers."""

    times: Mapping[str, StepTimes]
    """By prepared mode."""
    probed: Probes
    whole_layers: int = 0
    """Layers of which the rank holds all parts, which all ranks have decided together."""
    launch_bound: Mapping[str, bool] = field(default_factory=dict)
    """Whether launches bound steps that read prompts, by prepared mode."""

    @classmethod
    def of(
        cls, modes: Mapping[ModeKey, PreparedMode], probed: Probes, whole_layers: int
    ) -> "StartupMeasurements":
        """Return the measurements of these modes."""
        times = {str(key): mode.times for key, mode in modes.items()}
        bound = {str(key): mode.runner.is_launch_bound for key, mode in modes.items()}
        return cls(times, probed, whole_layers, bound)

    def store(self, memory: CellMemory, rank: Rank) -> None:
        """Store them for the next process of the rank."""
        memory.put(measurements_name(rank), pickle.dumps(self, protocol=5))

    def has(self, modes: Collection[str]) -> bool:
        """Return whether it has the step times of all these prepared modes."""
        return set(modes) <= self.times.keys()

    def probes_with(self, own: Probes, widths: Collection[int]) -> Probes:
        """Return these probes of groups of some widths, and a process's own instead."""
        known = {key: found for key, found in self.probed.items() if key[0] in widths}
        return {**known, **own}

    @classmethod
    def load(cls, memory: CellMemory, rank: Rank) -> "StartupMeasurements":
        """Return what the rank's first process stored."""
        found: StartupMeasurements = pickle.loads(memory.get(measurements_name(rank)))  # noqa: S301 -- our own
        return found


def memory_of_measurements(spec: RankSpec) -> CellMemory | None:
    """Return the memory in which a rank leaves them to the next process; None: there is none."""
    return spec.lasting.cell if spec.lasting is not None else spec.memory


def known_measurements(spec: RankSpec) -> StartupMeasurements | None:
    """Return what the first process of a rank measured; None if this is the first one."""
    memory = memory_of_measurements(spec)
    if memory is None or not memory.get(measurements_name(spec.rank)):
        return None
    if spec.lasting is None and not spec.joins:
        return None  # Ranks of a CPU cell that start together measure together.
    return StartupMeasurements.load(memory, spec.rank)
