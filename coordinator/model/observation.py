"""The policy's input: everything that a decision depends on, small enough to be logged.

An observation log has one JSON object per line; `aileron replay` runs it again. Times are
milliseconds of the coordinator's clock, rates are per second, lengths in tokens. Pure values.
"""

import msgspec


class TierObservation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tasks of a tier; unstarted ones have no token and are queued or placed, not paused."""

    tier: int
    unstarted: int = 0
    unstarted_tokens: int = 0
    """Prompt tokens, and tokens to recompute, of the unstarted tasks."""
    oldest_wait_ms: int = 0
    running: int = 0
    context_tokens: int = 0
    """Tokens whose KV the running tasks hold."""
    to_come_tokens: float = 0.0
    """Tokens that the running tasks are still likely to generate, at most their limits."""
    longest_tokens: int = 0
    """The longest context that any of them may reach."""
    rate: float = 0.0
    """Arrivals per second since the rate last changed."""
    rate_age_s: float = 0.0
    """How long ago that was, at most 30 s."""
    prompts: tuple[int, ...] = ()
    """Quantiles of the newest prompts' lengths, ascending."""
    queued: int = 0
    """Those of the unstarted tasks that no group had room for."""
    unstarted_late: int = 0
    """Those of the unstarted tasks that wait longer than their goal for a first token."""
    running_late: int = 0
    """Those of the running tasks that got their first token too late for their goal."""
    output_tokens: float = 0.0
    """Mean output of the newest tasks that ended."""


class GroupObservation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group of the layout and its tasks, running or not, by tier (index 0 is interactive)."""

    name: str
    leader: int
    tasks: tuple[int, ...] = ()
    tokens: int = 0
    blocks_free: int = 0
    blocks_total: int = 0


class SwitchObservation(msgspec.Struct, frozen=True):
    """A switch of the last minute: its age since it was wanted, its layouts and its cause."""

    ago_ms: int
    from_layout: str
    to_layout: str
    cause: str


class Observation(msgspec.Struct, frozen=True, omit_defaults=True, tag="observation"):
    """One observation of the cell."""

    time_ms: int
    layout: str
    """The wanted layout; it serves unless `is_switching`."""
    epoch: int
    is_switching: bool
    tiers: tuple[TierObservation, ...]
    groups: tuple[GroupObservation, ...] = ()
    switches: tuple[SwitchObservation, ...] = ()
    """Newest last."""
    pinned_ms: int = 0
    """How long an operator's layout stays pinned."""
    reserved: tuple[int, ...] = ()
    """Leaders of the groups reserved for the most urgent tiers."""
    reserved_tiers: int = 0
    """The number of tiers, from interactive down, that those groups take."""
