"""The core's start-up settings: numbers and the initial layout.

They are derived once from the cell's configuration, which the core never sees.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from comm_pool.layout import Layout
from coordinator.model.policy_settings import PolicySettings, PolicyStart, TierGoal
from coordinator.model.step_line import StepLine
from coordinator.model.weight_parts import WeightParts
from coordinator.protocol.config import Config
from coordinator.protocol.policy_config import SloTarget, TierConfig
from coordinator.protocol.terms import Carry, Tier

LATE_OUT_MS = (5_000, 5_000, 60_000)


@dataclass(frozen=True, slots=True)
class OutlierSettings:
    """`stage_limit_ms` limits a stage of a switch; a `slow_factor` of 0 ejects no slow rank.

    `late_out_ms` are the ejection times of ranks that were late or out of memory: after the first,
    second … time, then doubled each time after the last.
    """

    stage_limit_ms: int = 10_000
    slow_factor: float = 5.0
    late_out_ms: tuple[int, ...] = LATE_OUT_MS


@dataclass(frozen=True, slots=True)
class TierBounds:
    """How many tasks of a tier may wait, and how long; None is unbounded."""

    tasks_max: int | None = None
    wait_ms: int | None = None


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bounds of the whole queue and of its tiers."""

    tasks_max: int
    tiers: Mapping[Tier, TierBounds] = field(default_factory=dict)

    def of(self, tier: Tier) -> TierBounds:
        """Return the bounds of a tier."""
        return self.tiers.get(tier, TierBounds())


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of the task pool, times in milliseconds.

    `claim_ms` is how long a gateway may take to submit a task again.
    """

    queue: QueueBounds
    ageing_ms: int
    pause_limit_ms: int
    claim_ms: int


@dataclass(frozen=True, slots=True)
class SwitchSettings:
    """Times in milliseconds; `lost_after_ms` and `recover_ms` are at least `lease_ms`."""

    initial: Layout
    lease_ms: int
    lost_after_ms: int
    recover_ms: int
    drain_limit_ms: int
    records_max: int
    default_carry: Carry
    health: OutlierSettings = field(default_factory=OutlierSettings)
    precopy: bool = False
    """Ranks copy full blocks of running tasks before they leave their groups."""

    def __post_init__(self) -> None:
        """Refuse times with which two layouts could overlap."""
        if min(self.lost_after_ms, self.recover_ms) < self.lease_ms:
            raise ValueError("lost_after_ms and recover_ms must be at least lease_ms.")


SETTLED_MS = 3_000


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Settings of a core; `CoordinatorConfig` explains them."""

    world: int
    layout: Layout
    narrowest: int = 1
    """The narrowest groups that can serve; above 1 if ranks hold parts of the weights, borrow none,
    and wait for each other in dp."""
    parts: WeightParts = field(default_factory=WeightParts)
    """Which part of the weights each rank holds."""
    lease_ms: int = 10_000
    lost_after_ms: int = 12_000
    recover_ms: int = 12_000
    """How long a started coordinator waits for ranks' reports; `lost_after_ms` if that is less."""
    answer_ms: int = 0
    """Least time between two answers to a rank without news."""
    pause_limit_ms: int = 2_000
    drain_limit_ms: int = 60_000
    queue: QueueBounds = QueueBounds(4_096)
    ageing_ms: int = 30_000
    default_carry: Carry = Carry.RESHARD
    history_max: int = 1_000
    """Number of switches and of decisions to remember, at most."""
    claim_ms: int = 5_000
    """A task that a rank holds is dropped if no gateway claims it within this time."""
    gateway_gone_ms: int = 5_000
    """The tasks of a gateway that is away for longer are cancelled."""
    in_fleet: bool = False
    """Gateways know other cells too, so this one publishes its load."""
    policy: PolicyStart | None = None
    """The adaptive policy; None leaves layouts to operators."""
    settled_ms: int = SETTLED_MS
    """The coordinator restores a layout that it left because of a loss once the layout has been
    possible for this long."""
    renew_idle_ms: int = 0
    """All ranks restart if wanted groups lack communicators and the cell has had no task for this
    long; 0 is never."""
    renew_busy_ms: int = 0
    """The ranks of one group restart, while the others serve, if it could not be formed for this
    long; 0 is never."""
    health: OutlierSettings = field(default_factory=OutlierSettings)
    """When living ranks that hold the others up are ejected."""
    precopy: bool = False
    """Ranks copy full blocks of running tasks before they leave their groups."""

    @property
    def switch(self) -> SwitchSettings:
        """The settings of the switcher."""
        return SwitchSettings(
            initial=self.layout,
            lease_ms=self.lease_ms,
            lost_after_ms=self.lost_after_ms,
            recover_ms=self.recover_ms,
            drain_limit_ms=self.drain_limit_ms,
            records_max=self.history_max,
            default_carry=self.default_carry,
            health=self.health,
            precopy=self.precopy,
        )


def core_settings(config: Config, step_times: Mapping[str, StepLine] | None = None) -> CoreSettings:
    """Return the core's settings for a checked configuration.

    `step_times` are those of `policy.step_times`, which the caller has read.
    """
    coordinator = config.coordinator
    return CoreSettings(
        world=config.cell.ranks,
        layout=config.initial_layout(),
        narrowest=config.narrowest,
        parts=WeightParts(
            config.cell.weight_parts,
            config.copy_width,
            borrows=config.borrows,
            # CPU ranks lend from memory that is the cell's.
            outlive=config.cell.device == "cpu",
        ),
        # If no rank serves without the others, waiting for more ranks gains nothing.
        settled_ms=SETTLED_MS if config.narrowest == 1 else 0,
        lease_ms=coordinator.lease_ms,
        lost_after_ms=coordinator.lost_after_ms,
        recover_ms=coordinator.lost_after_ms,
        # Regular reports come one interval apart, give or take a step.
        answer_ms=coordinator.heartbeat_ms // 2,
        pause_limit_ms=coordinator.pause_limit_ms,
        drain_limit_ms=coordinator.drain_limit_ms,
        queue=_queue_bounds(config),
        ageing_ms=coordinator.ageing_ms,
        default_carry=Carry(coordinator.default_carry),
        precopy=coordinator.precopy == "on",
        history_max=coordinator.history_switches_max,
        in_fleet=config.fleet.is_on,
        policy=_policy(config, step_times or {}),
        renew_idle_ms=coordinator.renew_idle_ms,
        renew_busy_ms=coordinator.renew_busy_ms,
        health=OutlierSettings(coordinator.stage_limit_ms, coordinator.slow_factor),
    )


def _policy(config: Config, step_times: Mapping[str, StepLine]) -> PolicyStart | None:
    policy = config.policy
    if policy.name == "fixed":
        return None
    settings = PolicySettings(
        goals={
            tier: _goal(getattr(config.slo, tier.name.lower()), getattr(policy, tier.name.lower()))
            for tier in Tier
        },
        decide_every_ms=policy.decide_every_ms,
        stay_ms=policy.stay_ms,
        settle_ms=policy.settle_ms,
        caution_ms=policy.caution_ms,
        horizon_ms=policy.horizon_ms,
        switches_per_minute_max=policy.switches_per_minute_max,
        pin_ms=policy.pin_ms,
        alternates=policy.alternation == "auto",
    )
    return PolicyStart(settings, config.cell.widths, step_times)


def _goal(target: SloTarget, tier: TierConfig) -> TierGoal:
    return TierGoal(
        None if target.ttft_ms is None else target.ttft_ms / 1000,
        None if target.tpot_ms is None else target.tpot_ms / 1000,
        tier.weight,
        tier.width_min,
    )


def _queue_bounds(config: Config) -> QueueBounds:
    coordinator = config.coordinator
    tiers = {
        tier: TierBounds(limits.queue_tasks_max, limits.wait_ms)
        for tier in Tier
        for limits in [getattr(coordinator.tiers, tier.name.lower())]
    }
    return QueueBounds(coordinator.queue_tasks_max, tiers)
