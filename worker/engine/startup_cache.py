"""Measurements that a rank made at start-up together with others, stored for its successor.

A rank that restarts while the others serve computes alone. It takes the step times and probe
results of wide groups from its predecessor, which had the same weights and the same place in every
group.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from comm_pool.cpu.cell_memory import CellMemory, measurements_name
from comm_pool.layout import Rank, StepMode
from worker.rank.step_times import StepTimes

Probes = dict[tuple[int, StepMode], tuple[tuple[float, ...], int]]
"""(width, mode) -> log-probabilities of the probe, and its duration in microseconds."""


@dataclass(frozen=True, slots=True)
class StartupMeasurements:
    """Step times by prepared mode, all probes, and the number of whole layers."""

    times: Mapping[str, StepTimes]
    probed: Probes
    whole_layers: int = 0
    """Layers of which the rank holds all parts, which all ranks have decided together."""

    def store(self, memory: CellMemory, rank: Rank) -> None:
        """Store them for the next process of the rank."""
        memory.put(measurements_name(rank), pickle.dumps(self, protocol=5))

    @classmethod
    def load(cls, memory: CellMemory, rank: Rank) -> "StartupMeasurements":
        """Return what the rank's first process stored."""
        found: StartupMeasurements = pickle.loads(memory.get(measurements_name(rank)))  # noqa: S301 -- our own
        return found
