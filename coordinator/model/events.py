"""All events that the coordinator's core handles, and all effects that it can ask for.

The shell turns sessions, timers and admin calls into events, passes them to `Core.handle` with its
clock, and carries out the effects in order. It drops an effect for a peer without an open session:
the peer's next hello repairs the gap.
"""

from dataclasses import dataclass, field
from enum import Enum

from comm_pool.layout import Layout, Rank
from coordinator.model.observation_log import Line
from coordinator.model.records import SwitchRecord
from coordinator.model.settings import CoreSettings
from coordinator.protocol.messages.gateway import GatewayDown, GatewayHello, GatewayToCore
from coordinator.protocol.messages.launcher import RenewRanks
from coordinator.protocol.messages.rank import RankDown, RankHello, Report
from coordinator.protocol.terms import Carry


@dataclass(frozen=True, slots=True)
class Expected:
    """The forecast for requests of a tier over the horizon.

    Mean times in seconds; `attainment` is the share of requests that meet the tier's goals.
    """

    tier: str
    ttft_s: float
    tpot_s: float
    attainment: float


@dataclass(frozen=True, slots=True)
class RankOpened:
    """A rank's session began; an earlier one of the same rank has ended."""

    hello: RankHello


@dataclass(frozen=True, slots=True)
class RankReported:
    """A report arrived over the rank's current session."""

    rank: Rank
    report: Report


@dataclass(frozen=True, slots=True)
class RankClosed:
    """The rank's current session ended; its process may live."""

    rank: Rank
    incarnation: int


@dataclass(frozen=True, slots=True)
class RankExited:
    """The supervisor saw the rank's newest process end."""

    rank: Rank
    is_at_fault: bool = True
    """Whether its tasks may be the cause; not so if it ended on demand or with a peer."""


@dataclass(frozen=True, slots=True)
class GatewayOpened:
    """A gateway's session began; an earlier one of the same gateway has ended."""

    hello: GatewayHello


@dataclass(frozen=True, slots=True)
class GatewaySent:
    """A message arrived over the gateway's current session."""

    gateway: str
    message: GatewayToCore


@dataclass(frozen=True, slots=True)
class GatewayClosed:
    """The gateway's current session ended."""

    gateway: str


@dataclass(frozen=True, slots=True)
class SwitchWanted:
    """An operator or the policy wants a layout; `asked_ms` is the time of the request, if known."""

    layout: Layout
    carry: Carry
    cause: str
    asked_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ReinstateMode:
    """An operator reinstates a quarantined mode, such as `tp2`."""

    mode: str


@dataclass(frozen=True, slots=True)
class RenewalWanted:
    """An operator wants these ranks to restart together; an empty tuple means all."""

    ranks: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class CellDrains:
    """The cell is about to end: gateways have to take their tasks elsewhere."""


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """New bounds of the queue and new settings of the policy; all other settings are the old."""

    settings: CoreSettings


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent several times per heartbeat interval."""


Event = (
    RankOpened
    | RankReported
    | RankClosed
    | RankExited
    | GatewayOpened
    | GatewaySent
    | GatewayClosed
    | SwitchWanted
    | ReinstateMode
    | RenewalWanted
    | CellDrains
    | SettingsChanged
    | Tick
)


class Level(Enum):
    """The log level of a note."""

    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class ToRank:
    """Send a message to a rank."""

    rank: Rank
    message: RankDown


@dataclass(frozen=True, slots=True)
class ToGateway:
    """Send a message to a gateway."""

    gateway: str
    message: GatewayDown


@dataclass(frozen=True, slots=True)
class ToLauncher:
    """Send a message to the launcher of the ranks."""

    message: RenewRanks


@dataclass(frozen=True, slots=True)
class SwitchRecorded:
    """A switch ended: it was served or superseded."""

    record: SwitchRecord


@dataclass(frozen=True, slots=True)
class Note:
    """A log entry: a noun phrase and its fields."""

    level: Level
    event: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observed:
    """A line for the observation log, if there is one."""

    line: Line


@dataclass(frozen=True, slots=True)
class ForecastMade:
    """The forecast of each tier over the horizon, if the layout of `epoch` keeps serving."""

    epoch: int
    horizon_ms: int
    tiers: tuple[Expected, ...]


Effect = ToRank | ToGateway | ToLauncher | SwitchRecorded | Observed | ForecastMade | Note


def note(event: str, **fields: object) -> Note:
    """Return a note of normal operation."""
    return Note(Level.INFO, event, fields)


def warning(event: str, **fields: object) -> Note:
    """Return a note of a problem."""
    return Note(Level.WARNING, event, fields)
