"""The memory that the launcher makes for its ranks before it forks them, and keeps."""

from collections.abc import Collection
from dataclasses import dataclass

from comm_pool.cpu.cell_memory import CellMemory, cell_memory, host_kv_name, link_names
from comm_pool.cuda.lasting_memory import LastingMemory, lasting_memory
from comm_pool.layout import Rank
from coordinator.protocol.config import Config


@dataclass(slots=True)
class Memories:
    """What ranks share, apart from devices."""

    cell: CellMemory | None = None
    """What all ranks share; on CPU."""
    links: CellMemory | None = None
    """The memory between the stages of pipeline groups where `cell` has none; on CUDA."""
    lasting: LastingMemory | None = None
    """What outlives ranks on CUDA, until all of them start together."""
    host: CellMemory | None = None
    """The host pages, named `host_kv_name()`, which outlive renewals; None if there are none."""

    def renew(self, config: Config, ranks: Collection[Rank]) -> None:
        """Make it anew for ranks that start together; the host pages stay."""
        for memory in (self.cell, self.links):
            if memory is not None:
                memory.close()
        if config.cell.device == "cpu":
            self.cell = memory_of(config)
            return
        self.links = links_of(config)
        if len(ranks) == config.cell.ranks:
            if self.lasting is not None:
                self.lasting.close()
            self.lasting = lasting_of(config)

    def make_host_pages(self) -> None:
        """Make the memory of host pages."""
        self.host = CellMemory((host_kv_name(),))

    def close(self) -> None:
        """Close all in this process."""
        for memory in (self.cell, self.links, self.lasting, self.host):
            if memory is not None:
                memory.close()


def memory_of(config: Config) -> CellMemory:
    """Make the memory that the ranks of a CPU cell share."""
    cell, pipelines = config.cell, config.pipeline_groups()
    return cell_memory(cell.ranks, cell.widths, config.mixed_groups(), pipelines)


def links_of(config: Config) -> CellMemory:
    """Make the memory between pipeline stages of CUDA ranks."""
    cell = config.cell
    return CellMemory(link_names(cell.ranks, cell.widths, config.pipeline_groups()))


def lasting_of(config: Config) -> LastingMemory | None:
    """Make what outlives CUDA ranks; None if no other rank could go on with it."""
    cell = config.cell
    if cell.peer_access != "auto" or config.copy_width > 1:
        return None  # A rank with a part of the weights takes all of its block along.
    return lasting_memory(cell.ranks, cell.widths, config.pipeline_groups())
