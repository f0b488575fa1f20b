"""A cell at rest: one layout served by all ranks, nothing unfinished, no page lost."""

from typing import TYPE_CHECKING

from coordinator.core.core import Core
from tests.simulation.checkers import check
from tests.simulation.drift import check_layout
from tests.simulation.sim_rank import SimRank

if TYPE_CHECKING:
    from tests.simulation.world import World


def unrest_of(world: "World") -> str | None:
    """Return what is not at rest, or None."""
    core = world.core
    if core is None or not core.views.is_serving:
        return "the core does not serve"
    if not core._roster.serves_whole(core._switcher.target.layout):
        return f"a group of {core.views.target_name} lacks parts of the weights"
    for name, gateway in world.gateways.items():
        if gateway.open:
            return f"{name} waits for {sorted(gateway.open)}"
    for rank, process in world.ranks.items():
        is_wrong = core._roster.guard.is_wrong(rank)
        if process is None or not (core.views.is_available(rank) or is_wrong):
            return f"rank {rank} is not there"
        if not core.views.is_available(rank):
            unrest = _unrest_of_wrong_rank(core, process)
        else:
            unrest = _unrest_of_rank(process)
        if unrest is not None:
            return f"rank {rank} {unrest}"
        # A switch waits neither for the ranks of groups that stay nor for those without a group.
        if (stage := process.participant.stage) != core._switcher.stage:
            return f"rank {rank} is at {stage}, not yet at {core._switcher.stage}"
    return _unrest_of_pool(core)


def check_rest(world: "World") -> None:
    """Check what must hold at rest, and count what happened."""
    assert world.core is not None
    world.core.integrity()
    check_layout(world)
    stages = {rank.participant.stage for rank in world.alive}
    check(len(stages) == 1, f"ranks rest in different stages: {stages}")
    for rank in world.alive:
        rank.engine.pages.integrity(full=True)
    world.stats.ticks = world.now
    for gateway in world.gateways.values():
        for stream in gateway.streams:
            world.stats.tasks += 1
            check(stream.end is not None, f"{stream.task} never ended")
            end = stream.end or ""
            world.stats.ends[end] = world.stats.ends.get(end, 0) + 1


def _unrest_of_wrong_rank(core: Core, process: SimRank) -> str | None:
    """Return what is not at rest on a rank that computes wrongly."""
    if core._roster[process.rank].incarnation != process.incarnation:
        return "is not the process that computed wrongly, and was not heard"
    held = _tasks_of(process)
    return f"computes wrongly and still holds {sorted(held)}" if held else None


def _unrest_of_rank(process: SimRank) -> str | None:
    participant, pages = process.participant, process.engine.pages
    if not participant.serving or participant.target is None or participant.binding is None:
        return f"does not serve, but is at {participant.stage}"
    if participant.target.binding_of(participant.rank) != participant.binding:
        return f"serves in {participant.binding}"
    if held := _tasks_of(process):
        return f"still holds {sorted(held)}"
    if process.runtime.migration.precopy.is_busy:
        return "still copies for a switch"
    group = participant.binding.group
    scheduler = process.engine.of_width(group.width, group.stages).scheduler
    if scheduler is not None and scheduler.aside:
        return "keeps pages from its tasks"
    strangers = set(pages.counts().leased) - {group.lease_key}
    return f"still leases pages to {sorted(strangers)}" if strangers else None


def _tasks_of(process: SimRank) -> list[str]:
    return [led.header.task for led in process.runtime.book]


def _unrest_of_pool(core: Core) -> str | None:
    tasks = core.views.queue()["tasks"]
    assert isinstance(tasks, dict)
    return f"the pool still has tasks: {tasks}" if any(tasks.values()) else None
