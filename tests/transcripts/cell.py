"""The core with ranks that obey at once: everything that a transcript or a test of it needs.

Ranks are real seats without a process around them; what they report and when is up to the caller.
Directives that repeat what a rank was told already are kept out of the answers.
"""

from collections.abc import Iterable

from comm_pool.layout import Group, Layout, Rank, parse_layout
from coordinator.core.core import Core
from coordinator.model.events import (
    Effect,
    Event,
    GatewayOpened,
    GatewaySaid,
    RankOpened,
    RankSaid,
    SwitchWanted,
    Tick,
    ToRank,
)
from coordinator.model.settings import CoreSettings
from coordinator.protocol.messages.gateway import GatewayHello, GatewayToCore
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.rank import (
    Directive,
    LeaseRetention,
    PageReport,
    RankHello,
    Report,
)
from coordinator.protocol.messages.tasks import (
    Adopted,
    HeldTask,
    TaskEnded,
    TaskProgress,
    TaskReturned,
)
from coordinator.protocol.switch_actions import Leave, Serve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry

WIDTHS = (1, 2, 4)
PAGES = 10
"""Pages of a rank without the null page."""
RANK_CLOCK_MS = 1_000_000
"""How far the ranks' clocks are ahead of the coordinator's."""


class ObedientRank:
    """A seat and what its rank would report."""

    def __init__(self, rank: Rank, incarnation: int, widths: tuple[int, ...]) -> None:
        self.participant = SwitchParticipant(rank, incarnation)
        self.widths = widths
        self.pages_free = PAGES
        self.blocks_total = 0
        self.kept: tuple[LeaseRetention, ...] = ()
        self.is_idle = True
        self.adopted: tuple[Adopted, ...] = ()
        """What this rank goes on with if its move is committed."""
        self.has_failed = False
        self.told: Directive | None = None
        self.closed: tuple[tuple[Rank, ...], ...] = ()

    def obey(self) -> bool:
        """Make all moves that can be made; followers hear their leader at once."""
        moved = False
        while (move := self.participant.next_move(idle=self.is_idle)) is not None:
            if isinstance(move, Leave):
                self.pages_free, self.blocks_total = PAGES, 0
            if isinstance(move, Serve):
                self.pages_free -= move.grant_pages
                slots = move.binding.group.width
                self.blocks_total = move.grant_pages * slots if self.participant.is_leader else 0
            self.participant.made(move)
            moved = True
        return moved

    def hello(self, held: Iterable[HeldTask] = (), max_tasks: int = 4) -> RankHello:
        return RankHello(
            version=PROTOCOL_VERSION,
            rank=self.participant.rank,
            incarnation=self.participant.incarnation,
            pid=1_000 + self.participant.rank,
            device="cpu",
            widths=self.widths,
            cohort=self.participant.incarnation - 1,
            max_tasks=max_tasks,
            max_model_len_tokens=1_000,
            tokens_per_slot=16,
            kv_heads=8,
            pages_total=PAGES + 1,
            held=tuple(held),
            adopted=self.adopted if self.participant.is_moving else (),
            adopted_in=self.participant.stage.epoch,
        )

    def report(
        self,
        now_ms: int,
        *,
        ended: Iterable[TaskEnded] = (),
        returned: Iterable[TaskReturned] = (),
        progress: Iterable[TaskProgress] = (),
    ) -> Report:
        return Report(
            rank=self.participant.rank,
            incarnation=self.participant.incarnation,
            sent_at_ms=now_ms + RANK_CLOCK_MS,
            stage=self.participant.stage,
            binding=self.participant.binding,
            target=self.participant.target,
            pages=PageReport(PAGES + 1, self.pages_free, PAGES - self.pages_free, 0),
            blocks_free=self.blocks_total,
            blocks_total=self.blocks_total,
            retentions=self.kept,
            ended=tuple(ended),
            returned=tuple(returned),
            progress=tuple(progress),
            adopted=self.adopted if self.participant.is_moving else (),
            has_failed=self.has_failed,
            moved=self.participant.known_migration[0],
            heard_in_epoch=self.participant.known_migration[1],
            closed=self.closed,
            free_pages_after_commit=self.pages_free,
        )


class Cell:
    """A core, its clock and obedient ranks; effects are collected until they are taken."""

    def __init__(self, layout: str = "dp2", **settings: object) -> None:
        world = sum(int(part.lstrip("dptsof")) for part in layout.split("+"))
        self.settings = CoreSettings(
            world=world,
            layout=parse_layout(layout, world, WIDTHS),
            **settings,  # type: ignore[arg-type]
        )
        self.now_ms = 0
        self.ranks = {rank: ObedientRank(rank, 1, WIDTHS) for rank in map(Rank, range(world))}
        self._effects: list[Effect] = []
        self._started = 0
        self.start()

    def start(self) -> None:
        """Start a coordinator, the first one or one after another."""
        self._started += 1
        self.core = Core(self.settings, f"coordinator-{self._started}", self.now_ms)

    def layout(self, text: str) -> Layout:
        return parse_layout(text, self.settings.world, WIDTHS)

    def group(self, text: str, leader: int) -> Group:
        return self.layout(text).group_of(Rank(leader))

    def event(self, event: Event) -> None:
        """Let something happen; directives reach the seats, which do not move yet."""
        for effect in self.core.handle(event, self.now_ms):
            match effect:
                case ToRank(rank, Directive() as directive):
                    self._direct(self.ranks[rank], directive, effect)
                case _:
                    self._effects.append(effect)
        self.core.integrity()

    def _direct(self, rank: ObedientRank, directive: Directive, effect: Effect) -> None:
        rank.participant.on_directive(directive)
        if rank.told is None or _content(rank.told) != _content(directive):
            self._effects.append(effect)
        rank.told = directive

    def take(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def open(self, rank: int, held: Iterable[HeldTask] = ()) -> None:
        process = self.ranks[Rank(rank)]
        process.told = None
        self.event(RankOpened(process.hello(held)))

    def report(self, rank: int, **fields: Iterable[object]) -> None:
        process = self.ranks[Rank(rank)]
        report = process.report(self.now_ms, **fields)  # type: ignore[arg-type]
        self.event(RankSaid(Rank(rank), report))

    def settle(self, *ranks: int) -> None:
        """Let these ranks (all, if none is named) obey and report until nothing moves."""
        chosen = [self.ranks[Rank(rank)] for rank in ranks] or list(self.ranks.values())
        for process in chosen:
            self.report(process.participant.rank)
        while sum(self._obey(process) for process in chosen):
            pass

    def _obey(self, process: ObedientRank) -> bool:
        binding = process.participant.binding
        if process.participant.is_follower and binding is not None:
            leader = self.ranks[binding.group.leader].participant
            if leader.binding != binding:
                process.participant.on_leave(binding.formation)
        if not process.obey():
            return False
        self.report(process.participant.rank)
        return True

    def restart(self, rank: int) -> None:
        """Replace the rank's process by a new one, which has no communicators."""
        participant = self.ranks[Rank(rank)].participant
        self.ranks[participant.rank] = ObedientRank(
            participant.rank, participant.incarnation + 1, (1,)
        )

    def tick(self, passed_ms: int = 0) -> None:
        self.now_ms += passed_ms
        self.event(Tick())

    def switch(self, layout: str, carry: Carry = Carry.RECOMPUTE) -> None:
        self.event(SwitchWanted(self.layout(layout), carry, "operator"))

    def gateway(self, name: str = "g") -> None:
        self.event(GatewayOpened(GatewayHello(PROTOCOL_VERSION, name)))

    def say(self, message: GatewayToCore, gateway: str = "g") -> None:
        self.event(GatewaySaid(gateway, message))

    def serve(self) -> None:
        """Bring everything up: all ranks report, the first layout serves."""
        for rank in self.ranks:
            self.open(rank)
            self.report(rank)
        self.tick()
        self.settle()
        self.take()


def _content(directive: Directive) -> tuple[object, ...]:
    return (
        directive.stage,
        directive.target,
        directive.carry,
        directive.grants,
        directive.retentions,
    )
