"""The rules of the switch participant: what a rank does at a safe point, as a table.

The participant obeys the one row that matches. The rows exclude each other, so their order means
nothing. A combination without a row cannot come about: it raises `IllegalEventError`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product

from coordinator.protocol.terms import Carry, Phase


class IllegalEventError(ValueError):
    """The switch protocol has no rule for this event here; the participant has not changed."""


class Position(Enum):
    """Where a rank is; its own actions alone change it."""

    PARKED = auto()
    """Joined to nothing."""
    UNDECIDED = auto()
    """Joined to nothing; a migration may still take the tasks that the rank parked."""
    PROMISED = auto()
    """Joined to nothing; the leader of the group prepared by a migration may wait for the rank."""
    JOINED_LEADER = auto()
    JOINED_FOLLOWER = auto()
    SERVING_LEADER = auto()
    SERVING_FOLLOWER = auto()


class Asks(Enum):
    """What the wanted stage is to a rank."""

    NOTHING = auto()
    """An earlier stage, or another layout of an acknowledged epoch. Only a coordinator that
    restarted without hearing of that epoch sends one, and it raises its epoch when it reads this
    rank's report."""
    SAME_STAGE = auto()
    """The acknowledged stage."""
    LATER_STAGE = auto()
    OUTCOME = auto()
    """A later stage that tells the outcome of the migration that an undecided rank waits for."""


class Wanted(Enum):
    """The group that the target wants this rank in."""

    SAME_GROUP = auto()
    """The joined one, of the same formation."""
    OTHER_GROUP = auto()
    NO_GROUP = auto()
    """The rank is cut out: it joins nothing in any phase, and no peer waits for it."""


class Fact(Enum):
    """What else counts; the participant finds it out only where a row names it."""

    COPIES_EARLY = auto()
    """The directive asks to copy KV while groups serve, and this one does and is whole."""
    IDLE_DRAIN = auto()
    """The plan is DRAIN, and the group that the rank leads has no unfinished task."""
    MEMBER_GONE = auto()
    """A member of the joined group is cut out, or its process is a new one."""
    LEADER_GONE = auto()
    """The same of the leader of the joined group."""
    LEASE_LAPSED = auto()
    """The time lease had lapsed before the directive: the group can run no step."""
    LEAVE_READ = auto()
    """The leader of the joined group has left it. If it parked its tasks for a migration, this does
    not hold under SPECULATE: the plan that the leader has heard comes to this rank too."""
    ABANDONED = auto()
    """The directive says that nobody will lead the joined formation."""
    NEW_EPOCH = auto()
    """The wanted epoch is later than the acknowledged one."""
    MOVER = auto()
    """The directive names the rank as one that copies KV."""
    PREPARED_WANTED = auto()
    """This rank's migration is committed, and no later epoch is wanted."""
    PREPARED_IN_STEP = auto()
    """It is committed, and another epoch is wanted, but the leader that this rank would follow may
    already be in a step: all processes of the prepared group are still the same."""


class Action(Enum):
    """What a rank does; the participant fills in the fields of `switch_actions`."""

    WAIT = auto()
    LEAVE = auto()
    """`Leave` under the wanted carry plan."""
    LEAVE_RECOMPUTE = auto()
    """`Leave` under RECOMPUTE, whatever plan is wanted."""
    PARK = auto()
    RESHARD = auto()
    RESOLVE = auto()
    """`Resolve`: the rank applies the plan to its tasks now."""
    RESOLVE_PARKED = auto()
    """`Resolve` with `stays_parked`."""
    RESOLVE_JOINED = auto()
    """`Resolve` with `is_joined`."""
    JOIN = auto()
    """`Join` of the wanted group."""
    JOIN_PROMISED = auto()
    """`Join` of the group that a migration prepared."""
    SERVE = auto()
    ACK = auto()


Case = tuple[Position, Asks, Wanted, Phase, Carry]


@dataclass(frozen=True)
class Rule:
    """One row: it matches if every column does; an empty column matches everything."""

    at: Collection[Position]
    asks: Collection[Asks]
    wanted: Collection[Wanted]
    phases: Collection[Phase]
    plans: Collection[Carry]
    action: Action
    when: Collection[Fact] = ()
    """One of these facts must hold."""
    unless: Collection[Fact] = ()
    """None of these facts may hold."""

    def cases(self) -> Iterator[Case]:
        """Yield every combination of the first five columns that the row matches."""
        return product(
            self.at or Position,
            self.asks or Asks,
            self.wanted or Wanted,
            self.phases or Phase,
            self.plans or Carry,
        )

    def holds(self, is_true: Callable[[Fact], bool]) -> bool:
        """Return whether the columns of facts match."""
        is_met = not self.when or any(map(is_true, self.when))
        return is_met and not any(map(is_true, self.unless))


class RuleTable:
    """Rules, found by their first five columns."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._rows: dict[Case, list[Rule]] = {}
        for rule in self.rules:
            for case in rule.cases():
                self._rows.setdefault(case, []).append(rule)
        self._given = {(case[0], rule.action) for rule in self.rules for case in rule.cases()}

    def matching(self, case: Case, is_true: Callable[[Fact], bool]) -> list[Rule]:
        """Return the rows that match: one, or none where the event is illegal."""
        return [rule for rule in self._rows.get(case, ()) if rule.holds(is_true)]

    def action(self, case: Case, is_true: Callable[[Fact], bool]) -> Action:
        """Return the action of the row that matches; raises `IllegalEventError` if none does."""
        for rule in self._rows.get(case, ()):
            if rule.holds(is_true):
                return rule.action
        raise IllegalEventError(f"no rule for {', '.join(each.name for each in case)}")

    def gives(self, at: Position, actions: Iterable[Action]) -> bool:
        """Return whether a row gives one of these actions to a rank at this position."""
        return any((at, action) in self._given for action in actions)


# Cells of the table: a name stands for one value, or for those in the comment or sum.
ANY = ()
PARKED, UNDECIDED, PROMISED, NEW_LEADER, NEW_FOLLOWER, LEADER, FOLLOWER = (
    (position,) for position in Position
)
NEW, SERVING = NEW_LEADER + NEW_FOLLOWER, LEADER + FOLLOWER
LEADERS, FOLLOWERS = NEW_LEADER + LEADER, NEW_FOLLOWER + FOLLOWER
APART, BOUND = PARKED + UNDECIDED, NEW + SERVING
NOTHING, AGAIN, LATER, OUTCOME = ((asks,) for asks in Asks)
SAME, OTHER, CUT_OUT = ((wanted,) for wanted in Wanted)
UNWANTED = OTHER + CUT_OUT
PARK, MOVE, SWAP, SERVE = ((phase,) for phase in Phase)
PAUSE, DRAIN, RECOMPUTE, RESHARD, SPECULATE = ((plan,) for plan in Carry)
WAITS = DRAIN + SPECULATE  # until tasks end
MOVES = RESHARD + SPECULATE  # tasks in the end: they stay where they are, no rank joins before
STAYS = PAUSE + DRAIN + RECOMPUTE  # nothing migrates
EARLY = (Fact.COPIES_EARLY,)
IDLE, LAPSED, MOVER = (Fact.IDLE_DRAIN,), (Fact.LEASE_LAPSED,), (Fact.MOVER,)
NEW_EPOCH = (Fact.NEW_EPOCH,)
LOST = (Fact.MEMBER_GONE, Fact.LEASE_LAPSED)  # the leader has nothing to wait for
OVER = (Fact.LEAVE_READ, Fact.LEADER_GONE, Fact.ABANDONED)  # the leader sends no further step
AWAITED = (Fact.PREPARED_WANTED, Fact.PREPARED_IN_STEP)

# fmt: off
RULES = (
    # A rank that the directive asks for nothing new; a parked one joins early if nothing migrates.
    Rule(APART + BOUND, NOTHING, ANY, ANY, ANY, Action.WAIT),
    Rule(UNDECIDED + BOUND, AGAIN, ANY, ANY, ANY, Action.WAIT),
    Rule(PARKED, AGAIN, UNWANTED, MOVE + SWAP + SERVE, ANY, Action.WAIT),
    Rule(PARKED, AGAIN, UNWANTED, PARK, MOVES, Action.WAIT),
    Rule(PARKED, AGAIN, CUT_OUT, PARK, STAYS, Action.WAIT),
    Rule(PARKED, AGAIN, OTHER, PARK, STAYS, Action.JOIN),
    # A leader whose group is not wanted leaves, or serves on until its tasks end or their full
    # blocks are copied. No task ends in a group that never served, so its leader does not wait; the
    # coordinator lets only groups that serve speculate.
    Rule(LEADERS, LATER, UNWANTED, ANY, PAUSE + RECOMPUTE, Action.LEAVE),
    Rule(LEADERS, LATER, UNWANTED, ANY, RESHARD, Action.LEAVE, unless=EARLY),
    Rule(LEADERS, LATER, UNWANTED, ANY, RESHARD, Action.WAIT, when=EARLY),
    Rule(LEADERS, LATER, UNWANTED, ANY, DRAIN, Action.LEAVE, when=IDLE),
    Rule(LEADER, LATER, UNWANTED, ANY, WAITS, Action.LEAVE, when=LOST, unless=IDLE),
    Rule(LEADER, LATER, UNWANTED, ANY, WAITS, Action.WAIT, unless=IDLE + LOST),
    Rule(NEW_LEADER, LATER, UNWANTED, ANY, WAITS, Action.LEAVE_RECOMPUTE, unless=IDLE),
    # A follower leaves after its leader, and for a migration if its leader has.
    Rule(FOLLOWERS, LATER, UNWANTED, ANY, ANY, Action.WAIT, unless=OVER),
    Rule(FOLLOWERS, LATER, UNWANTED, ANY, ANY, Action.LEAVE, when=OVER),
    # A group that is wanted goes on, or begins with the pages that SERVE grants it.
    Rule(SERVING, LATER, SAME, ANY, ANY, Action.ACK),
    Rule(NEW, LATER, SAME, PARK + MOVE + SWAP, ANY, Action.ACK),
    Rule(NEW, LATER, SAME, SERVE, ANY, Action.SERVE),
    # A rank that parked its tasks for a migration hears its outcome. The prepared group is joined
    # if it is wanted or its leader may be in a step; the next migration may take the tasks.
    Rule(UNDECIDED, OUTCOME, UNWANTED, ANY, ANY, Action.RESOLVE_JOINED, when=AWAITED),
    Rule(UNDECIDED, OUTCOME, UNWANTED, PARK + MOVE, MOVES, Action.RESOLVE_PARKED, unless=AWAITED),
    Rule(UNDECIDED, OUTCOME, UNWANTED, PARK + MOVE, STAYS, Action.RESOLVE, unless=AWAITED),
    Rule(UNDECIDED, OUTCOME, UNWANTED, SWAP + SERVE, ANY, Action.RESOLVE, unless=AWAITED),
    Rule(PROMISED, LATER, UNWANTED, ANY, ANY, Action.JOIN_PROMISED),
    # A parked rank joins at once if nothing migrates, else after MOVE.
    Rule(APART, LATER, CUT_OUT, ANY, ANY, Action.PARK, when=NEW_EPOCH),
    Rule(APART, LATER, CUT_OUT, ANY, ANY, Action.ACK, unless=NEW_EPOCH),
    Rule(APART, LATER, OTHER, PARK, MOVES, Action.PARK),
    Rule(APART, LATER, OTHER, MOVE, ANY, Action.RESHARD, when=MOVER),
    Rule(APART, LATER, OTHER, MOVE, ANY, Action.ACK, unless=MOVER),
    Rule(PARKED, LATER, OTHER, PARK, STAYS, Action.JOIN),
    Rule(PARKED, LATER, OTHER, SWAP + SERVE, ANY, Action.JOIN),
)
# fmt: on
TABLE = RuleTable(RULES)
