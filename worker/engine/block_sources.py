"""vLLM adapter: where the tasks of a mode find blocks that they need not compute."""

from functools import partial

from comm_pool.cpu.cell_memory import host_kv_name
from kvadaptor.host.layout import SHARES_MAX
from kvadaptor.views import KVBuffer
from worker.engine.host_kv import HostTier, open_tier
from worker.engine.lost_kv import LostBlocks
from worker.engine.mode import PreparedMode
from worker.engine.scheduling.ahead_loads import AheadLoads
from worker.engine.scheduling.block_copies import BlockSource
from worker.engine.scheduling.connector import OFFER_S, BlockConnector
from worker.engine.scheduling.host_blocks import HostBlocks, StoreRules
from worker.engine.scheduling.scheduler import ModeScheduler
from worker.engine.weights.layers import ViewError
from worker.spec import RankSpec


def open_host_pages(spec: RankSpec, kv: KVBuffer, *, hashes: bool) -> HostTier | None:
    """Open the cell's host pages for a rank; None if there are none, or they cannot be opened.

    Raises `ViewError` if blocks have no `hashes`.
    """
    if spec.host_memory is None:
        return None
    if not hashes:
        raise ViewError(
            "host KV pages are found by the hashes of the prefix cache, which is off: leave "
            "out --no-enable-prefix-caching, or --host-kv."
        )
    mapped = spec.host_memory.map(host_kv_name(), spec.host_kv_bytes)
    is_optional = spec.host_kv_is_optional
    return open_tier(mapped, spec.cell_ranks, spec.rank, kv, is_optional=is_optional)


def connect_sources(scheduler: ModeScheduler, mode: PreparedMode) -> None:
    """Let a scheduler's tasks load and store blocks, and enter those that they fill."""
    sources: list[BlockSource] = []
    host, pages, ahead = mode.host, None, None
    if host is not None and host.geometry.slots(mode.key.split).count > SHARES_MAX:
        host = None
    if mode.lost is not None and mode.directory is not None:
        scheduler.use_directory(mode.directory)
        sources.append(LostBlocks(scheduler, mode.lost))
    if host is not None:
        pages = HostBlocks(scheduler, host.directory, host, _rules(mode, host))
        sources.append(pages)
        if host.lanes is not None:
            pool = scheduler.kv_cache_manager.block_pool
            ahead = AheadLoads(pool, scheduler.block_size, host.lanes, OFFER_S)
    if sources:
        scheduler.use_connector(BlockConnector(scheduler, sources, pages, ahead))


def _rules(mode: PreparedMode, host: HostTier) -> StoreRules:
    """Return how groups of a mode use host pages."""
    return StoreRules(
        ranks=mode.ranks,
        shares=host.geometry.slots(mode.key.split).count,
        is_aside=host.is_aside,
        is_sooner=partial(host.is_sooner, mode),
        goes_ahead=partial(host.goes_ahead, mode),
    )
