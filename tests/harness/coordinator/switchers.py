"""Switchers and cells in the states that their tests start from."""

from comm_pool.layout import Rank
from coordinator.model.settings import OutlierSettings, SwitchSettings
from coordinator.protocol.terms import Carry, Phase, Stage
from coordinator.ranks.roster import Roster
from coordinator.switching.switcher import Switcher
from tests.harness.coordinator.builders import hello, layout, report
from tests.transcripts.cell import Cell


def settings(
    health: OutlierSettings | None = None, *, precopy: bool = False, **changes: int
) -> SwitchSettings:
    times = {"lease_ms": 1_000, "lost_after_ms": 1_000, "recover_ms": 1_000} | changes
    return SwitchSettings(
        initial=layout("tp2+dp2"),
        drain_limit_ms=500,
        records_max=3,
        default_carry=Carry.RECOMPUTE,
        health=health or OutlierSettings(),
        precopy=precopy,
        **times,
    )


class Ranks:
    """Four ranks that report whatever the test wants."""

    def __init__(self, *, precopy: bool = False) -> None:
        self.roster = Roster(4)
        self.switcher = Switcher(settings(precopy=precopy), self.roster, 0)
        self.now_ms = 0
        for rank in range(4):
            self.hear(rank, Stage(0, Phase.PARK))

    def hear(self, rank: int, stage: Stage, **fields: object) -> None:
        if Rank(rank) not in self.roster:
            self.roster.on_hello(hello(rank), self.now_ms)
        wanted = self.switcher.target if stage.epoch else None
        if wanted is not None and stage.phase >= Phase.SWAP:
            fields.setdefault("binding", wanted.binding_of(Rank(rank)))
        said = report(rank, stage, sent_at_ms=self.now_ms, target=wanted, **fields)  # type: ignore[arg-type]
        assert self.roster.on_report(said, self.now_ms)
        self.switcher.on_report(said, self.now_ms)

    def acknowledge(self, *ranks: int, **fields: object) -> None:
        stage = self.switcher.stage
        for rank in ranks or range(4):
            self.hear(rank, stage, **fields)

    def tick(self, passed_ms: int = 0) -> tuple[Rank, ...]:
        self.now_ms += passed_ms
        return self.switcher.on_tick(self.now_ms)

    def serve(self) -> "Ranks":
        self.tick()
        for _ in Phase:
            self.acknowledge()
        assert self.switcher.is_serving
        return self


def restarted(cell: Cell, *ranks: int) -> Cell:
    """Replace the coordinator; these ranks (all, if none is named) are heard."""
    cell.start()
    for rank in ranks or cell.ranks:
        cell.open(rank)
        cell.report(rank)
    cell.take()
    return cell


def serving_cell(text: str, **changes: object) -> Cell:
    cell = Cell(text, **changes)
    cell.serve()
    return cell
