"""What a rank has measured at start-up together with the others, kept for who takes its place.

A rank that is started again while the others serve computes alone. How long steps of wide groups
take, and what their probe gives, it is told by the process that it stands in for: same weights,
same place in every group.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from comm_pool.cpu.cell_memory import CellMemory, measured_name
from comm_pool.layout import Rank, StepMode
from worker.engine.step_times import StepTimes

Probes = dict[tuple[int, StepMode], tuple[tuple[float, ...], int]]
"""(width, mode) -> log-probabilities of the probe, and its microseconds."""


@dataclass(frozen=True, slots=True)
class StartupMeasurements:
    """Step times by width, and all probes."""

    times: Mapping[int, StepTimes]
    probed: Probes

    def leave(self, memory: CellMemory, rank: Rank) -> None:
        """Keep it for the next process of the rank."""
        memory.put(measured_name(rank), pickle.dumps(self, protocol=5))

    @classmethod
    def left(cls, memory: CellMemory, rank: Rank) -> "StartupMeasurements":
        """Return what the rank's first process has left."""
        found: StartupMeasurements = pickle.loads(memory.get(measured_name(rank)))  # noqa: S301 -- our own
        return found
