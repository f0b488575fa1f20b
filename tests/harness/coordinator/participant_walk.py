"""Everything that can happen to a participant in a small world, breadth first.

A world has four ranks, a few epochs and layouts, every phase and carry plan, and one irregularity
per directive: a commit, a process that is a new one, a lapsed time lease, and so on.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, Grant, PreCopyOrder
from coordinator.protocol.switch_actions import Leave, Move, Reshard, Serve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.switch_state import SwitchState
from coordinator.protocol.terms import Carry, Phase, Stage
from tests.harness.coordinator.builders import LEASE_MS, directive, target

LAYOUTS = ("dp4", "tp2+dp2", "off1+dp3", "dp1+off1+dp2")
"""Ranks 0 and 1 are alone, a pair, or one of them is cut out."""


@dataclass(frozen=True)
class SafePoint:
    """The rank makes its moves."""

    idle: bool = True
    puts_off: bool = False
    """It stops before an action that the shell may put off."""
    overtaken_by: Directive | None = None
    """What it reads while it copies."""


def directives(
    epochs: int, peer: int, layouts: Iterable[str] = LAYOUTS, plans: Iterable[Carry] = tuple(Carry)
) -> Iterator[Directive]:
    """Yield what a coordinator may ask for; groups of any layout may be of an earlier formation."""
    for epoch in range(1, epochs + 1):
        for layout, born, phase, carry in product(layouts, range(1, epoch + 1), Phase, plans):
            wanted = target(layout, born)
            grants = [Grant(binding.group.ranks, 5) for binding in wanted.bindings]
            for fields in irregular(epoch, phase, peer):
                yield directive(
                    wanted, epoch, phase, **{"carry": carry, "grants": grants, **fields}
                )


def irregular(epoch: int, phase: Phase, peer: int) -> Iterator[dict[str, Any]]:
    """Yield what may be unusual about a directive, where that counts."""
    yield {}
    match phase:
        case Phase.PARK:
            yield {"members": {peer: 2}}
            yield {"abandoned_formation": max(epoch - 1, 1)}
            yield {"answers_ms": 2 * LEASE_MS}
            yield {"moved": epoch - 1}
            yield {"moved": epoch - 1, "members": {peer: 2}}
            yield {"precopy": PreCopyOrder(1, ())}
        case Phase.MOVE:
            yield {"movers": ()}
        case Phase.SWAP:
            yield {"moved": epoch}
        case Phase.SERVE:
            yield {"moved": epoch}


def clone(participant: SwitchParticipant) -> SwitchParticipant:
    """A copy that shares nothing that changes."""
    twin = copy.copy(participant)
    twin.leaves, twin.members = dict(twin.leaves), dict(twin.members)
    return twin


def state_of(participant: SwitchParticipant) -> dict[str, object]:
    """All that a participant remembers."""
    values = {name: getattr(participant, name) for name in SwitchState.__slots__}
    return {name: dict(each) if isinstance(each, dict) else each for name, each in values.items()}


def make_moves(participant: SwitchParticipant, event: SafePoint) -> Iterator[Move]:
    """Make the moves of a safe point; yields each before it is made."""
    while (move := participant.next_move(idle=event.idle)) is not None:
        yield move
        if event.puts_off and isinstance(move, Leave | Serve | Reshard):
            return
        if isinstance(move, Reshard) and event.overtaken_by is not None:
            participant.on_directive(event.overtaken_by)
        participant.made(move)


def walk(
    rank: int, orders: Sequence[Directive]
) -> Iterator[tuple[SwitchParticipant, Directive, SafePoint]]:
    """Yield each (state, directive, safe point) that can come about, in as few events as possible.

    Directives that a rank waits under differ by their stage alone in what may follow.
    """
    begin = SwitchParticipant(Rank(rank), 1)
    known, queue = {_key(begin)}, deque([begin])
    formations = sorted({binding.formation for each in orders for binding in each.target.bindings})
    while queue:
        at = queue.popleft()
        reached = []
        bound = at.binding
        for formation in formations if bound is None else [bound.formation]:
            for for_move in (False, True) if at.is_follower else (False,):
                reached.append(clone(at))
                reached[-1].on_leave(formation, for_move=for_move)
        floor = at.wanted.stage if at.wanted is not None else at.stage
        for order in orders:
            if order.stage < floor:
                continue
            branch = clone(at)
            branch.wanted = None
            branch.on_directive(order)
            for event in _safe_points(branch, orders):
                yield at, order, event
                reached.append(clone(branch))
                for _ in make_moves(reached[-1], event):
                    pass
        for after in reached:
            if (key := _key(after)) not in known:
                known.add(key)
                queue.append(after)


def _safe_points(at: SwitchParticipant, orders: Sequence[Directive]) -> Iterator[SafePoint]:
    """Yield those that differ here."""
    wanted = at.wanted
    assert wanted is not None
    for idle in (False, True) if wanted.carry is Carry.DRAIN else (False,):
        yield SafePoint(idle)
        moves = list(make_moves(clone(at), SafePoint(idle)))
        if any(isinstance(move, Leave | Serve | Reshard) for move in moves):
            yield SafePoint(idle, puts_off=True)
        for move in moves:
            if isinstance(move, Reshard):
                epoch = wanted.stage.epoch + 1
                later = (each for each in orders if each.stage == Stage(epoch, Phase.PARK))
                yield from (SafePoint(idle, overtaken_by=each) for each in later)


def _key(participant: SwitchParticipant) -> tuple[object, ...]:
    """What can still make a difference."""
    wanted, copied, binding = participant.wanted, participant.copied, participant.binding
    epochs = participant.migration, participant.stage.epoch
    if copied is None or (participant.promised is None and copied.stage.epoch not in epochs):
        prepared = None
    else:
        prepared = copied.stage.epoch, copied.target, copied.members
    return (
        participant.stage,
        participant.target,
        binding,
        participant.serving,
        wanted and wanted.stage,
        participant.lease_until,
        binding and tuple(sorted(participant.members.items())),
        tuple(sorted(participant.leaves.items())),
        participant.migration,
        participant.promised,
        prepared,
    )
