"""The lines of an observation log: observations, and at intervals the cost model.

`aileron replay` reads them back. Pure values; the coordinator's process writes them.
"""

from collections.abc import Collection, Mapping

import msgspec

from comm_pool.layout import Mode
from comm_pool.mixed import Staged
from coordinator.model.cost_model import CostModel, GroupCost, SwitchCost
from coordinator.model.observation import Observation
from coordinator.model.policy_settings import PolicySettings, TierGoal
from coordinator.model.step_line import StepLine
from coordinator.protocol.terms import Tier


class StepLineRecord(msgspec.Struct, frozen=True):
    """A `StepLine`, in microseconds."""

    base_us: float
    token_us: float
    context_us: float


class GroupCostRecord(msgspec.Struct, frozen=True):
    """A `GroupCost`."""

    decode: StepLineRecord
    prefill: StepLineRecord
    capacity_tokens: int
    tasks_max: int
    chunk_tokens: int
    floor_us: float = 0.0
    prefill_floor_us: float = 0.0
    stages: int = 1


class GoalRecord(msgspec.Struct, frozen=True):
    """A `TierGoal`."""

    ttft_ms: float | None
    tpot_ms: float | None
    weight: float
    width_min: int


class CostRecord(msgspec.Struct, frozen=True, tag="costs"):
    """The layouts that exist and what they cost, as of a time."""

    time_ms: int
    world: int
    modes: dict[int, Mode]
    groups: dict[str, GroupCostRecord]
    pause_ms: float
    kv_bytes_per_token: float
    link_bytes_per_s: float
    goals: dict[str, GoalRecord]
    settings: dict[str, float]
    pipelines: tuple[str, ...] = ()
    """Pipeline groups that there may be, such as `pp2`."""


Line = Observation | CostRecord
SETTINGS = (
    "decide_every_ms",
    "stay_ms",
    "settle_ms",
    "caution_ms",
    "horizon_ms",
    "gain_min",
    "latency_gain_min",
    "switches_per_minute_max",
    "pin_ms",
)


def encode(line: Line) -> bytes:
    """Return one line, without its newline."""
    return msgspec.json.encode(line)


def decode(text: bytes) -> Line:
    """Read one line; raises `msgspec.DecodeError` or `ValidationError`."""
    line: Line = msgspec.json.decode(text, type=Line)
    return line


def cost_record(
    now_ms: int,
    world: int,
    modes: Mapping[int, Mode],
    costs: CostModel,
    settings: PolicySettings,
    pipelines: Collection[Staged] = (),
) -> CostRecord:
    """Return the log line of the cost model."""
    switch = costs.switch
    return CostRecord(
        time_ms=now_ms,
        world=world,
        modes=dict(modes),
        groups={name: _group_record(each) for name, each in costs.groups.items()},
        pause_ms=round(switch.pause_s * 1e3, 3),
        kv_bytes_per_token=round(switch.kv_bytes_per_token, 1),
        link_bytes_per_s=round(switch.bytes_per_s),
        goals={
            tier.name.lower(): GoalRecord(
                None if goal.ttft_s is None else goal.ttft_s * 1e3,
                None if goal.tpot_s is None else goal.tpot_s * 1e3,
                goal.weight,
                goal.width_min,
            )
            for tier, goal in settings.goals.items()
        },
        settings={name: getattr(settings, name) for name in SETTINGS},
        pipelines=tuple(map(str, pipelines)),
    )


def costs_of(record: CostRecord) -> CostModel:
    """Return the cost model of a log line."""
    groups = {}
    for name, each in record.groups.items():
        decode_line = _line_of(each.decode)
        same = each.prefill == each.decode
        groups[name] = GroupCost(
            decode_line,
            decode_line if same else _line_of(each.prefill),
            each.capacity_tokens,
            each.tasks_max,
            each.chunk_tokens,
            each.floor_us * 1e-6,
            each.prefill_floor_us * 1e-6,
            each.stages,
        )
    switch = SwitchCost(record.pause_ms / 1e3, record.kv_bytes_per_token, record.link_bytes_per_s)
    return CostModel(groups, switch)


def settings_of(record: CostRecord, changed: Mapping[str, float]) -> PolicySettings:
    """Return the settings of a log line, with some of them changed."""
    goals = {
        Tier[name.upper()]: TierGoal(
            None if goal.ttft_ms is None else goal.ttft_ms / 1e3,
            None if goal.tpot_ms is None else goal.tpot_ms / 1e3,
            goal.weight,
            goal.width_min,
        )
        for name, goal in record.goals.items()
    }
    values = {**record.settings, **changed}
    whole = {name: int(value) for name, value in values.items() if name not in _SHARES}
    shares = {name: float(value) for name, value in values.items() if name in _SHARES}
    return PolicySettings(goals, **whole, **shares)  # type: ignore[arg-type]


_SHARES = ("gain_min", "latency_gain_min")


def _group_record(cost: GroupCost) -> GroupCostRecord:
    return GroupCostRecord(
        _line_record(cost.decode),
        _line_record(cost.prefill),
        cost.capacity_tokens,
        cost.tasks_max,
        cost.chunk_tokens,
        round(cost.floor_s * 1e6, 3),
        round(cost.prefill_floor_s * 1e6, 3),
        cost.stages,
    )


def _line_record(line: StepLine) -> StepLineRecord:
    return StepLineRecord(
        round(line.base_s * 1e6, 3), round(line.token_s * 1e6, 6), round(line.context_s * 1e6, 9)
    )


def _line_of(record: StepLineRecord) -> StepLine:
    return StepLine(record.base_us * 1e-6, record.token_us * 1e-6, record.context_us * 1e-6)
