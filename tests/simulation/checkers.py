"""What must never happen, whatever fails: each check raises `Violation` with what was seen."""

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Binding, Carry, Phase, Stage

if TYPE_CHECKING:
    from tests.simulation.book_gateway import BookGateway
    from tests.simulation.sim_gateway import SimGateway
    from tests.simulation.sim_rank import SimRank
    from tests.simulation.sim_scheduler import SimPlan


class Violation(AssertionError):
    """An invariant of the system was broken."""


def check(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


class StageChecker:
    """The stage that a process acknowledged never goes back."""

    def __init__(self) -> None:
        self._highest: dict[tuple[Rank, int], Stage] = {}

    def see(self, rank: Rank, incarnation: int, stage: Stage) -> None:
        before = self._highest.get((rank, incarnation))
        if before is not stage:
            is_later = before is None or stage >= before
            check(is_later, f"rank {rank} went back from {before} to {stage}")
            self._highest[rank, incarnation] = stage


class MoveChecker:
    """All ranks that take part in a move agree on its outcome, and on what a group starts from.

    Where all ranks and the coordinator are new processes, epochs begin again. A commit of which
    only processes knew that have ended is forgotten. A coordinator that has recovered counts the
    ranks that have not reported to it as lost, with their leases and their tasks, even if they come
    back. So what these heard of an earlier coordinator is no outcome any more.
    """

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, list[tuple[SimRank, bool]]] = {}
        self._moved_in: dict[Binding, tuple[int, ...]] = {}
        self._coordinator = 0
        """The newest coordinator that has recovered."""
        self._heard: frozenset[tuple[Rank, int]] = frozenset()
        """(rank, incarnation) of those that had reported to it by then."""

    def recovered(self, coordinator: int, heard: Iterable[tuple[Rank, int]]) -> None:
        """Forget what others than these ranks heard of earlier coordinators."""
        self._coordinator, self._heard = coordinator, frozenset(heard)
        for outcomes in self._outcomes.values():
            outcomes[:] = [each for each in outcomes if self._was_heard(each[0])]

    def resolved(
        self, process: "SimRank", directive: Directive, is_committed: bool, coordinator: int
    ) -> None:
        """Note the outcome of a move, which `directive` of this coordinator names to the rank."""
        if coordinator < self._coordinator and not self._was_heard(process):
            return
        epoch = directive.stage.epoch
        move = epoch, directive.target, directive.members
        outcomes = self._outcomes.setdefault(move, [])
        outcomes.append((process, is_committed))
        living = {was for each, was in outcomes if each.world.ranks[each.rank] is each}
        check(living == {is_committed}, f"one rank commits the move of {epoch}, another does not")

    def _was_heard(self, process: "SimRank") -> bool:
        return (process.rank, process.incarnation) in self._heard

    def joined(self, binding: Binding, moved_in: tuple[int, ...]) -> None:
        before = self._moved_in.setdefault(binding, moved_in)
        check(before == moved_in, f"members of {binding} begin with {before} and {moved_in}")


class Stream:
    """What a client sees of one task: tokens 0, 1, 2, ... that continue one another, then one end.

    Tokens are drawn at random, so each carries a digest of all before it: a leader that goes on
    from other tokens than the client has is found out, even if indices look right.
    """

    def __init__(self, task: str, length: int) -> None:
        self.task = task
        self.length = length
        self.tokens: list[int] = []
        self.digest = 0
        self.end: str | None = None

    def deliver(self, index: int, before: int, token: int) -> None:
        check(self.end is None, f"{self.task}: token {index} after its end ({self.end})")
        check(index == len(self.tokens), f"{self.task}: token {index} after {len(self.tokens)}")
        check(
            before == self.digest,
            f"{self.task}: token {index} continues other tokens than the client has",
        )
        self.tokens.append(token)
        self.digest = digest(self.digest, token)

    def finish(self, how: str) -> None:
        check(self.end is None, f"{self.task} ended twice: {self.end}, then {how}")
        self.end = how
        if how == "finished":
            check(
                len(self.tokens) == self.length,
                f"{self.task} finished after {len(self.tokens)} of {self.length} tokens",
            )


def digest(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) & 0xFFFF_FFFF_FFFF


def check_agreement(leader: Binding | None, member: Binding | None, rank: Rank) -> None:
    if leader is None or member != leader:  # No `check`: to write down bindings takes long.
        raise Violation(f"rank {rank} is in {member} while its leader steps in {leader}")


def check_nothing_waits(participant: SwitchParticipant) -> None:
    """A leader that is to leave its group, and stays for its tasks, can step with them.

    A parked rank does not wait for other ranks to park if nothing migrates.
    """
    wanted, binding = participant.wanted, participant.binding
    if wanted is None:
        return
    to_be = wanted.target.binding_of(participant.rank)
    if participant.is_leader and wanted.stage > participant.stage:
        check(
            participant.serving or to_be == binding,
            f"rank {participant.rank} waits in {binding} and never served",
        )
    is_known = wanted.stage.epoch > 0 and wanted.target == participant.target
    migrates = participant.is_moving or wanted.carry in (Carry.RESHARD, Carry.SPECULATE)
    if is_known and binding is None and wanted.stage.phase is Phase.PARK and not migrates:
        check(to_be is None, f"rank {participant.rank} waits to join {to_be} and nothing migrates")


def check_pages_of_leader(process: "SimRank") -> None:
    """Each page of a group that serves is its scheduler's, or set aside; none is lost or both."""
    participant, binding = process.participant, process.participant.binding
    if not (participant.is_leader and participant.serving) or binding is None:
        return
    group, pool = binding.group, process.engine.pages
    scheduler = process.engine.of_width(group.width, group.stages).scheduler
    ranks = group.ranks
    if process.engine.communicators.is_aborted(ranks, binding.formation):
        return  # It may have been lost before it began; its leader leaves it next.
    assert scheduler is not None
    leased = pool.own_pages() if len(ranks) == 1 else pool.lease_indices(group.lease_key)
    given = {block // scheduler.slots_per_page for block in scheduler._granted}
    check(not given & scheduler.aside, f"rank {process.rank} uses what it has set aside")
    if given | scheduler.aside != set(leased.tolist()):
        raise Violation(f"rank {process.rank} has lost pages of {binding}")


def check_one_leads(
    plan: "SimPlan",
    leader: "SimRank",
    other: "SimRank",
    gateways: "Mapping[str, SimGateway | BookGateway]",
) -> None:
    """Nobody else goes on with a task of the step in a way that its gateway would believe."""
    now_ms = other.host.now_ns() // 1_000_000
    if not (other.runtime.has_tasks and other.participant.may_step(now_ms)):
        return
    joined = other.runtime.bound_key
    for part in plan.parts:
        task, own = other.runtime.book.get(part.name), leader.runtime.book.get(part.name)
        if task is None or own is None or task.group.lease_key != joined:
            continue
        client = gateways[task.header.gateway].open.get(part.name)
        check(
            client is None or min(own.attempt, task.attempt) <= client.fence,
            f"{part.name} is led by rank {leader.rank} and by rank {other.rank}",
        )


def check_equal(what: str, one: Hashable, other: Hashable) -> None:
    check(one == other, f"{what}: {one} and {other}")
