"""What a rank says of itself: the hello of a session, and its reports."""

from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import Drop, RankHello, Report, SwitchTimes
from coordinator.protocol.messages.tasks import HeldTask, TaskProgress
from tests.simulation.sim_engine import KV_HEADS
from tests.simulation.sim_memory import BLOCK_TOKENS

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank


def hello_of(process: "SimRank") -> RankHello:
    """Who this is, what it holds, and what it goes on with if its move was committed."""
    migration = process.migration
    held = process.holdings.held(migration.group).values()
    drops = {each.task: each.attempt for each in process.deferred if isinstance(each, Drop)}
    return RankHello(
        version=PROTOCOL_VERSION,
        rank=process.rank,
        incarnation=process.incarnation,
        pid=process.rank,
        device="sim",
        widths=process.widths,
        max_tasks=8,
        max_model_len_tokens=64,
        tokens_per_slot=BLOCK_TOKENS,
        kv_heads=KV_HEADS,
        pages_total=process.world.num_pages[process.rank],
        held=tuple(
            HeldTask(
                task.header,
                task.attempt,
                process.world.group(ranks),
                len(task.tokens),
                is_paused,
            )
            for task, ranks, is_paused in held
            if task.attempt > drops.get(task.header.task, -1)
        ),
        adopted=migration.adopted,
        adopted_in=migration.adopted_in,
        cohort=process.cohort,
        leases=tuple(tuple(map(Rank, ranks)) for ranks in process.holdings.pages.groups()),
    )


def report_of(process: "SimRank", times: list[SwitchTimes]) -> Report:
    """What is now, and what happened since the last report."""
    holdings, participant, migration = process.holdings, process.participant, process.migration
    engine = holdings.engine
    moved, heard_in_epoch = participant.known_migration
    held = holdings.held(migration.group).items()
    return Report(
        rank=process.rank,
        incarnation=process.incarnation,
        sent_at_ms=process.clock_ms,
        stage=participant.stage,
        binding=participant.binding,
        target=participant.target,
        pages=holdings.page_report(),
        running=engine.running if engine else 0,
        waiting=len(engine.tasks) - engine.running if engine else 0,
        blocks_free=len(engine.free) if engine else 0,
        blocks_total=engine.blocks_total if engine else 0,
        retentions=tuple(holdings.kept.values()),
        ended=tuple(holdings.ended),
        returned=tuple(holdings.returned),
        progress=tuple(
            TaskProgress(task_id, len(task.tokens), is_paused)
            for task_id, (task, _, is_paused) in held
        ),
        times=tuple(times),
        adopted=migration.adopted,
        has_failed=migration.has_failed,
        moved=moved,
        heard_in_epoch=heard_in_epoch,
        probed=tuple(process.probed.values()),
        closed=tuple(sorted(process.closed)),
        free_pages_after_commit=migration.free_pages_after_commit,
        oom_formation=process.room.lacked_in,
    )
