"""A rank's part in a move of KV, as `Moving` plays it: tell, plan, copy, resolve.

Peers read each other's boards and memory without asking, at any later tick: of processes that stand
still, have gone on to another layout, or are dead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.messages.tasks import Adopted
from coordinator.protocol.switch_actions import Reshard, Resolve
from coordinator.protocol.terms import Binding, Carry, ReturnCause
from kvadaptor.pages import NULL_PAGE
from tests.simulation.sim_engine import SimTask, slots_of
from tests.simulation.sim_memory import SPOILED, Mark
from tests.simulation.sim_plan import Cargo, Manifest, Placed, Plan, Ranks, plan_move

if TYPE_CHECKING:
    from tests.simulation.sim_rank import SimRank

GAVE_UP = -1
PEER_WAIT_LIMIT_TICKS = 40
COPY_TICKS_MAX = 3


class Overtaken(Exception):
    """Another layout is wanted by now."""


class MoveFailed(Exception):
    """A peer is gone, or does not go on."""


@dataclass
class Board:
    """What one rank shows the others."""

    epoch: int = 0
    manifest: Manifest | None = None
    round: int = 0
    owner: int = 1
    """The incarnation of the process that writes there."""


@dataclass
class Pending:
    """A move whose copies are done here, until it is known whether it counts."""

    epoch: int
    plan: Plan
    rounds_done: int = 0


class SimMoving:
    """The moves of one process."""

    def __init__(self, process: "SimRank", mailboxes: dict[Rank, Board]) -> None:
        self._process = process
        self._mailboxes = mailboxes
        self.group: Ranks | None = None
        """The group that was left with tasks which may move."""
        self._formation = -1
        self._is_told = False
        """Peers count on what this rank has of the group, until the move is decided."""
        self.pending: Pending | None = None
        self.adopted: tuple[Adopted, ...] = ()
        self.adopted_in = 0
        self.has_failed = False
        self._acknowledged: tuple[Directive, int] | None = None
        """The last move that was carried out, and when."""
        self.under_way: Reshard | None = None
        self._run: Iterator[None] = iter(())

    @property
    def told_group(self) -> Ranks | None:
        """The group that was left, if what is held of it must stay until the move is decided."""
        return self.group if self._is_told else None

    @property
    def goal(self) -> Ranks | None:
        """The group that is joined, maybe, if the move that was made here is committed."""
        bindings = self.pending.plan.bindings if self.pending is not None else ()
        groups = (each.group.ranks for each in bindings)
        return next((ranks for ranks in groups if self._process.rank in ranks), None)

    def hear_of_leases(self, directive: Directive) -> None:
        """Free what a directive says is not needed; what must not be touched yet is told again."""
        holdings, bound, goal = self._process.holdings, self._process.bound, self.goal
        for kept in directive.retentions:
            holdings.apply(kept, (bound, self.told_group, goal))
        if self._process.participant.wanted is directive and directive.stage.epoch > 0:
            holdings.forget_lost(dict(directive.members), (bound, goal))

    # ------------------------------------------------------------------ the move

    def left(self, binding: Binding, epoch: int) -> None:
        """Tasks and pages of this group stay as they are, and peers are told."""
        self.group, self._formation = binding.group.ranks, binding.formation
        self._tell(epoch)

    def start(self, move: Reshard, is_overtaken: Callable[[], bool]) -> None:
        self.under_way = move
        self.has_failed = False
        self.adopted, self.adopted_in = (), move.directive.stage.epoch
        self._run = self._move(move.directive, is_overtaken)

    def advance(self) -> Reshard | None:
        """Go on for a tick; return the move when it is carried out, raise if it is overtaken."""
        own = self._own_board
        try:
            next(self._run)
        except StopIteration:
            return self._done()
        except Overtaken:
            own.round = GAVE_UP
            self.under_way = None
            raise
        except MoveFailed:
            own.round = GAVE_UP
            self.has_failed = True
            self.adopted = ()
            self._process.world.stats.failed_moves += 1
            return self._done()
        return None

    def _done(self) -> Reshard | None:
        done, self.under_way = self.under_way, None
        assert done is not None
        directive = done.directive
        self._acknowledged = directive, self._process.world.now
        return done

    @property
    def _own_board(self) -> Board:
        return self._mailboxes[self._process.rank]

    def _tell(self, epoch: int) -> None:
        self.adopted = ()
        self._is_told = True
        if self.group is not None and self._process.holdings.has_lost(self.group):
            # Other members may not know yet; without this rank's share its tasks cannot move.
            group = None
        else:
            group = self.group
        mailbox = self._own_board
        mailbox.manifest = self._process.holdings.manifest(group, self._formation)
        mailbox.round = 0
        mailbox.epoch = epoch

    def _move(self, directive: Directive, is_overtaken: Callable[[], bool]) -> Iterator[None]:
        epoch = directive.stage.epoch
        if self._own_board.epoch != epoch:
            self._tell(epoch)
        at = partial(self._process.world.point, self._process.rank)
        at("boards are read")
        manifests: dict[Rank, Manifest] = {}
        movers = self._peers(directive)
        for rank in movers:
            mailbox = self._mailboxes[rank]
            yield from self._wait(partial(_tells, mailbox, epoch), is_overtaken)
            assert mailbox.manifest is not None
            manifests[rank] = mailbox.manifest
        two_rounds = self._process.world.has_two_rounds(epoch)
        plan = plan_move(manifests, directive.target, two_rounds=two_rounds)
        self._process.world.check_plan(epoch, manifests, directive.target)
        self.pending = Pending(epoch, plan)
        at("move is planned")
        self._own_board.round = 1
        rng = self._process.world.rng
        for number in range(1, plan.rounds + 1):
            if number > 1:
                yield from self._meet(epoch, movers, number, is_overtaken)
            if number == 1:
                self._restore(plan)
                if rng.random() < self._process.world.faults.move_fails:
                    raise MoveFailed
            for _ in range(rng.randint(0, COPY_TICKS_MAX)):
                yield
            at(f"round {number} is read")
            self._copy([each for each in plan.placed if each.round == number])
            self.pending.rounds_done = number
            at(f"round {number} is written")
            self._own_board.round = number + 1

    def _peers(self, directive: Directive) -> Ranks:
        """Movers on whose boards somebody writes: the processes that are meant still have them."""
        shares, now = self._process.world.faults.shares_memory, dict(directive.members)
        known = (rank for rank in directive.movers if rank in self._mailboxes)
        return tuple(rank for rank in known if shares or self._mailboxes[rank].owner == now[rank])

    def _wait(
        self, condition: Callable[[], bool], is_overtaken: Callable[[], bool]
    ) -> Iterator[None]:
        deadline = self._process.world.now + PEER_WAIT_LIMIT_TICKS
        while not condition():
            if is_overtaken():
                raise Overtaken
            if self._process.world.now > deadline:
                raise MoveFailed
            yield

    def _meet(
        self, epoch: int, movers: tuple[Rank, ...], number: int, is_overtaken: Callable[[], bool]
    ) -> Iterator[None]:
        for rank in movers:

            def is_there(rank: Rank = rank) -> bool:
                mailbox = self._mailboxes[rank]
                if mailbox.epoch != epoch or mailbox.round == GAVE_UP:
                    raise MoveFailed
                return mailbox.round >= number

            yield from self._wait(is_there, is_overtaken)

    def _restore(self, plan: Plan) -> None:
        self.adopted = tuple(
            Adopted(each.cargo.header.task, each.cargo.attempt + 1, len(each.cargo.tokens))
            for each in plan.placed
            if each.binding.group.leader == self._process.rank
        )

    def _copy(self, tasks: list[Placed]) -> None:
        """Read all, then write: what the sources hold now, whatever has become of them."""
        rank = self._process.rank
        copies: list[tuple[int, int, int, Mark]] = []
        for each in tasks:
            if rank not in each.binding.group.ranks:
                continue
            slots = slots_of(each.binding.group.width)
            for number, block in enumerate(each.blocks):
                page = each.pages[rank][number // slots]
                copies.append((page, slots, block % slots, self._read(each, number)))
        for page, slots, slot, mark in copies:
            self._process.holdings.memory.write(page, slots, slot, mark)

    def _read(self, placed: Placed, number: int) -> Mark:
        """A block of a task from all members of its old group, each of which has a share of it."""
        assert self.pending is not None
        slots = slots_of(len(placed.source))
        index, slot = divmod(placed.cargo.blocks[number], slots)
        found: set[Mark | None] = set()
        for member in placed.source:
            manifest = self.pending.plan.manifests[member]
            process = self._process.world.ranks[member]
            if process is None or process.incarnation != manifest.incarnation:
                raise MoveFailed
            page = manifest.pages.get(index, NULL_PAGE)
            found.add(process.holdings.memory.read(page, slots, slot))
        mark = found.pop()
        return SPOILED if found or mark is None else mark

    # ------------------------------------------------------------------ afterwards

    def resolve(self, resolve: Resolve) -> None:
        """Go on with what was taken over, or with what was left."""
        stats = self._process.world.stats
        pending, self.pending = self.pending, None
        self.adopted, self._is_told = (), False
        if self._acknowledged is not None:
            directive, since = self._acknowledged
            if directive.stage.epoch == resolve.epoch and self._process.cut_out_at < since:
                self._process.world.moves.resolved(self._process, directive, resolve.is_committed)
        if resolve.is_committed:
            assert pending is not None and pending.epoch == resolve.epoch
            self._commit(pending)
            if resolve.is_joined:
                stats.promised += resolve.directive.stage.epoch > resolve.epoch
                return
            self._process.holdings.not_joined()
            stats.overtaken_moves += 1
        # Nobody could begin round 2 before this rank had finished round 1.
        is_spoiled = (
            not resolve.is_committed
            and pending is not None
            and pending.rounds_done > 0
            and pending.plan.rounds > 1
        )
        stats.spoiled_moves += is_spoiled
        if resolve.stays_parked and not is_spoiled:
            return
        group, self.group = self.group, None
        if group is not None and group[0] == self._process.rank:
            if is_spoiled or resolve.directive.carry is not Carry.PAUSE:
                self._process.holdings.give_up(group, ReturnCause.RECOMPUTE)
            self._process.holdings.withdraw(group)

    def _commit(self, pending: Pending) -> None:
        self._hand_over(pending.plan)
        for binding in pending.plan.bindings:
            if self._process.rank in binding.group.ranks:
                self._take_over(binding, pending.plan)

    @property
    def free_pages_after_commit(self) -> int:
        """Pages that are free when the move that was carried out here is committed."""
        if self.pending is None:
            return 0
        plan, now = self.pending.plan, self._process.holdings.pages.counts()
        given = 0
        if self.group is not None and len(self.group) == 1:
            given = now.owned
        elif self.group is not None and self.group in plan.left:
            given = now.leased.get(self.group, 0)
        rank = self._process.rank
        mine = [each for each in plan.placed if rank in each.binding.group.ranks]
        return now.free + given - sum(len(each.pages[rank]) for each in mine)

    def _hand_over(self, plan: Plan) -> None:
        group = self.group
        if group is None:
            return
        holdings = self._process.holdings
        is_whole = group in plan.left
        if group[0] == self._process.rank:
            gone = {
                each.cargo.header.task: each.cargo.attempt
                for each in plan.placed
                if each.source == group
            }
            holdings.hand_over(group, gone)
            holdings.give_up(group, ReturnCause.RECOMPUTE)
            holdings.withdraw(group)
        if is_whole and len(group) > 1:
            holdings.pages.keep_only(group, ())
        self.group = None

    def _take_over(self, binding: Binding, plan: Plan) -> None:
        rank, ranks = self._process.rank, binding.group.ranks
        tasks = [each for each in plan.placed if each.binding == binding]
        holdings = self._process.holdings
        pages = [page for each in tasks for page in each.pages[rank]]
        indices = [index for each in tasks for index in each.indices]
        members: dict[Rank, int | None] = {each: plan.manifests[each].incarnation for each in ranks}
        holdings.take_pages(binding, indices, pages, members)
        self.group, self._formation = ranks, binding.formation
        if binding.group.leader == rank:
            self._process.world.stats.moved += len(tasks)
            for each in tasks:
                holdings.adopt(ranks, _restored(each.cargo, each.blocks))


def _tells(mailbox: Board, epoch: int) -> bool:
    return mailbox.epoch == epoch


def _restored(cargo: Cargo, blocks: list[int]) -> SimTask:
    task = SimTask(cargo.header, cargo.attempt + 1, cargo.length, list(cargo.tokens))
    task.blocks = blocks
    task.computed = cargo.computed
    return task
