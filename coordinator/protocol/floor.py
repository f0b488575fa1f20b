"""How long loans may make a step. Pure.

A step that borrows takes at least as long as its loans over the link: its floor. Layers that every
rank holds whole need no loans, but take memory from KV.
"""

from coordinator.protocol.policy_config import SloConfig

STEPS_MIX = 2.0
"""A floor may take this part of a goal: steps with prompts, which come between, take longer."""


def floor_goal_s(slo: SloConfig) -> float | None:
    """Return the longest floor, in seconds, with which decodes of all tiers but batch meet goals.

    None if no such tier has a goal for the time per token.
    """
    goals_ms = [each.tpot_ms for each in (slo.interactive, slo.standard) if each.tpot_ms]
    return min(goals_ms) / 1e3 / STEPS_MIX if goals_ms else None
