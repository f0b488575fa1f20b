"""A rank's seat in the states that tests start from, and what it does about a directive."""

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive, Grant
from coordinator.protocol.switch_actions import Resolve
from coordinator.protocol.switch_participant import SwitchParticipant
from coordinator.protocol.terms import Carry, Phase, Stage, Target
from tests.harness.coordinator.builders import directive, target

PARK, MOVE, SWAP, SERVE = Phase
PAIR = (Rank(0), Rank(1))


def obey(participant: SwitchParticipant, order: Directive, *, idle: bool = True) -> list[str]:
    """Give the seat a directive, make all its moves and return their names."""
    participant.on_directive(order)
    return make_moves(participant, idle=idle)


def make_moves(participant: SwitchParticipant, *, idle: bool = True) -> list[str]:
    made = []
    while (move := participant.next_move(idle=idle)) is not None:
        participant.made(move)
        made.append(type(move).__name__)
    return made


def serving(rank: int, wanted: Target, epoch: int = 1) -> SwitchParticipant:
    """A seat that serves `wanted`."""
    participant = SwitchParticipant(Rank(rank), 1)
    obey(participant, directive(wanted, epoch, PARK))
    obey(participant, directive(wanted, epoch, SWAP))
    grants = [Grant(binding.group.ranks, 5) for binding in wanted.bindings]
    assert obey(participant, directive(wanted, epoch, SERVE, grants=grants)) == ["Serve"]
    return participant


PAIRED, ALONE = target("tp2+dp2", 2), target("dp4", 1)


def left(carry: Carry = Carry.RESHARD, wanted: Target = PAIRED, rank: int = 0) -> SwitchParticipant:
    """A rank has left its group of one for a pair, with tasks that may move."""
    participant = serving(rank, ALONE)
    assert obey(participant, directive(wanted, 2, PARK, carry=carry))[0] == "Leave"
    return participant


def moved(wanted: Target = PAIRED, rank: int = 0) -> SwitchParticipant:
    """The same, and it has copied its share."""
    participant = left(wanted=wanted, rank=rank)
    assert obey(participant, directive(wanted, 2, MOVE, carry=Carry.RESHARD)) == ["Reshard"]
    assert (participant.stage, participant.is_moving) == (Stage(2, MOVE), True)
    return participant


def resolved(participant: SwitchParticipant, order: Directive) -> Resolve:
    """How the seat decides on its move when it reads this."""
    participant.on_directive(order)
    move = participant.next_move(idle=True)
    assert isinstance(move, Resolve)
    participant.made(move)
    return move
