"""The first message of a rank's session: its identity, its prepared modes and its tasks."""

import os
from collections.abc import Sequence

from comm_pool.layout import Rank
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import Drop, GiveBack, RankHello
from coordinator.protocol.messages.tasks import HeldTask
from coordinator.protocol.switch_participant import SwitchParticipant
from worker.rank.engine import Engine, EngineFacts
from worker.rank.led_tasks import LedTask
from worker.rank.runtime import GroupRuntime
from worker.spec import modes_widths, part_of


def hello_of(
    engine: Engine,
    runtime: GroupRuntime,
    participant: SwitchParticipant,
    pending_commands: Sequence[Drop | GiveBack] = (),
) -> RankHello:
    """Describe the rank's current state; tasks with a pending `Drop` are omitted."""
    facts = engine.facts()
    drops = {each.task: each.attempt for each in pending_commands if isinstance(each, Drop)}
    return RankHello(
        version=PROTOCOL_VERSION,
        rank=engine.spec.rank,
        incarnation=participant.incarnation,
        pid=os.getpid(),
        device=facts.device,
        widths=tuple(sorted({1, *modes_widths(engine.spec)})),
        max_tasks=facts.max_tasks,
        max_model_len_tokens=facts.max_model_len_tokens,
        tokens_per_slot=engine.kv.geometry.tokens_per_slot,
        kv_heads=engine.kv.geometry.num_kv_heads,
        pages_total=engine.kv.num_pages,
        held=tuple(
            HeldTask(
                led.header,
                led.attempt,
                led.group,
                led.emitted,
                is_paused(led, runtime, participant),
            )
            for led in runtime.book
            if led.attempt > drops.get(led.header.task, -1)
        ),
        adopted=runtime.migration.adopted if participant.is_moving else (),
        adopted_in=runtime.migration.epoch,
        memory=facts.memory,
        cohort=engine.spec.cohort,
        step_times=facts.step_times,
        tokens_per_step_max=facts.tokens_per_step_max,
        leases=tuple(tuple(map(Rank, ranks)) for ranks in engine.pages.groups()),
        part=part_of(engine.spec),
        parts=engine.spec.parts,
        borrow=engine.spec.borrow,
        whole_layers=_whole_layers(engine, facts),
    )


def _whole_layers(engine: Engine, facts: EngineFacts) -> int:
    """Return the number of whole layers that the engine took, or that it was given."""
    if facts.whole_layers is not None:
        return facts.whole_layers
    given = engine.spec.whole_layers
    return 0 if given == "auto" else given


def is_paused(led: LedTask, runtime: GroupRuntime, participant: SwitchParticipant) -> bool:
    """Return whether a task waits for its group to form again: neither served nor migrating."""
    ranks = led.group.ranks
    is_bound = participant.binding is not None and ranks == participant.binding.group.ranks
    return not is_bound and ranks != runtime.migration.ranks
