"""vLLM adapter: the list of all tensors of a rank's weights in the cell's memory.

CPU ranks of a cell share memory that outlives them. A rank writes this list last, with
a checksum of itself, so a list that can be read says that the memory is complete. The next process
of the rank finds its tensors with it, and peers the layout and the checksums of what they borrow.
"""

import pickle
import zlib
from dataclasses import dataclass

import torch

from comm_pool.cpu.cell_memory import FENCE, CellMemory, manifest_name
from worker.engine.weights.outcomes import Outcomes
from worker.engine.weights.part_memory import TensorPlace, UnitLayout

_CHECK_BYTES = 4


@dataclass(frozen=True, slots=True)
class UnitSums:
    """Checksums of a unit: of what each of its loans brings, and of what is copied once."""

    loans: tuple[int, ...]
    resident: int

    def of_piece(self, number: int) -> "UnitSums":
        """Return the checksums of one loan."""
        return UnitSums((self.loans[number],), self.resident)


@dataclass(frozen=True, slots=True)
class LentUnit:
    """A unit as its peers must know it, on any device."""

    name: str
    layout: UnitLayout
    sums: UnitSums

    @property
    def key(self) -> tuple[str, UnitLayout]:
        """What is the same in all parts."""
        return self.name, self.layout


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A number or None that loading has left in place of a tensor, such as a scale.

    Or a small tensor that a device's layer keeps in memory of the host.
    """

    module: str
    holder: str
    name: str
    value: float | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PartManifest:
    """All tensors of a loaded part or replica: those of its units, and the `rest_bytes` of others.

    The places of the rest name modules by their path in the tree. Places that overlap share memory.
    """

    units: tuple[LentUnit, ...]
    rest: tuple[TensorPlace, ...]
    rest_bytes: int
    rest_sum: int
    plain: tuple[PlainValue, ...]
    outcomes: Outcomes
    """Numbers computed with them, which the next process must get too."""

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        """The layout of each unit, in order."""
        return tuple(unit.layout for unit in self.units)

    def store(self, memory: CellMemory, rank: int) -> None:
        """Say that the memory of a rank's part is complete."""
        content = pickle.dumps(self, protocol=5)
        with FENCE:  # The tensors are there before the list is.
            check = zlib.crc32(content).to_bytes(_CHECK_BYTES, "little")
        memory.put(manifest_name(rank), check + content)

    @classmethod
    def load(cls, memory: CellMemory, rank: int) -> "PartManifest | None":
        """Return the list of a rank's part; None if the rank has not completed it."""
        found = memory.get(manifest_name(rank))
        check, content = found[:_CHECK_BYTES], found[_CHECK_BYTES:]
        if not content or zlib.crc32(content).to_bytes(_CHECK_BYTES, "little") != check:
            return None
        manifest: PartManifest = pickle.loads(content)  # noqa: S301 -- our own
        return manifest

    @staticmethod
    def withdraw(memory: CellMemory, rank: int) -> None:
        """Say that the memory of a rank's part is not complete."""
        memory.put(manifest_name(rank), b"")
