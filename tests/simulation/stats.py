"""What happened in a run."""

from dataclasses import dataclass, field

from coordinator.policy.decide import POLICY
from coordinator.switching.layout_restorer import RESTORATION


@dataclass
class Stats:
    """What happened, to see that the simulation reaches what it is for."""

    ticks: int = 0
    steps: int = 0
    tokens: int = 0
    switches: int = 0
    tasks: int = 0
    crashes: int = 0
    core_crashes: int = 0
    blocked: int = 0
    stuck: int = 0
    """Ranks that were ended because a peer had died in their step."""
    without_room: int = 0
    """Ranks that found no room for a step."""
    closed: int = 0
    """Groups that ranks have closed to get out of a step alive, per rank."""
    reunited: int = 0
    """Steps of wide groups whose members were started again together."""
    rejoined: int = 0
    """Members of steps of wide groups that were started while the others lived."""
    given_up: int = 0
    """Processes that ended because a step or a copy failed that others may rely on."""
    meetings: int = 0
    """Members of groups whose first step waited for late copies."""
    moved: int = 0
    """Tasks that went on in another group with their KV."""
    moved_to_stages: int = 0
    """Those that went on in a pipeline group."""
    precopied: int = 0
    """Blocks that ranks found copied when they planned a move."""
    loaded: int = 0
    """Blocks of lost groups that tasks have loaded instead of computing them."""
    loaded_of_wide: int = 0
    """Those of groups of several ranks: some are in pages of survivors."""
    loaded_of_stages: int = 0
    """Those of pipeline groups."""
    loaded_in_stages: int = 0
    """Those that tasks of pipeline groups have loaded."""
    loaded_of_the_dead: int = 0
    """Those of groups of which a rank had no process."""
    inherited: int = 0
    """Blocks that new processes of ranks alone have of the ones before them."""
    void: int = 0
    """Blocks of lost groups that tasks loaded in vain, as they were gone by the end of the step."""
    built_early: int = 0
    """Requests that new leaders had built before the old groups were left."""
    failed_moves: int = 0
    """Per rank, as the others."""
    overtaken_moves: int = 0
    """Committed, but the group was not joined."""
    promised: int = 0
    """Groups that were joined although another layout was wanted, as their leader might step."""
    spoiled_moves: int = 0
    held_tokens: int = 0
    """Tokens that came before an earlier one."""
    trimmed_tokens: int = 0
    policy_switches: int = 0
    one_way: int = 0
    """Directions in which nothing passed for a while."""
    clock_jumps: int = 0
    slowed: int = 0
    drifts: int = 0
    left_out: int = 0
    """Ranks that are in no layout at the end, because they compute wrongly."""
    restored: int = 0
    """Switches back to what was wanted before a loss."""
    renewed: int = 0
    """How often all ranks were started again to form one cohort."""
    renewed_parts: int = 0
    """How often those of one group were."""
    borrowed: int = 0
    """Steps that read parts of the weights from ranks outside of their group."""
    lent_by_the_dead: int = 0
    """Such steps while a rank that may lend to them had no process."""
    staged: int = 0
    """Steps of pipeline groups."""
    ahead: int = 0
    """Those that began while another one of their group was in flight."""
    ends: dict[str, int] = field(default_factory=dict)

    def saw_switch(self, cause: str) -> None:
        """Count a switch that ended, by what it was for."""
        self.switches += 1
        self.policy_switches += cause == POLICY
        self.restored += cause == RESTORATION
