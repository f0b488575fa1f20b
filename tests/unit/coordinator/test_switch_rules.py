"""The table of the participant: one row for each case, and none for what cannot come about."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

import pytest

from comm_pool.layout import Rank
from coordinator.protocol.messages.rank import Directive
from coordinator.protocol.switch_actions import Ack, Join, Leave, Move, Resolve, Serve
from coordinator.protocol.switch_participant import ACTIONS, SwitchParticipant
from coordinator.protocol.switch_rules import (
    RULES,
    TABLE,
    Action,
    Asks,
    Case,
    Fact,
    IllegalEventError,
    Position,
    Rule,
    RuleTable,
    Wanted,
)
from coordinator.protocol.switch_situation import FACTS, MOVES, Situation
from coordinator.protocol.terms import Carry, Phase, Stage
from tests.harness.coordinator.builders import directive, target
from tests.harness.coordinator.participant_walk import (
    SafePoint,
    clone,
    directives,
    make_moves,
    state_of,
    walk,
)

ALL_PLANS = tuple(Carry)
WORLDS = (
    (0, 1, ("dp4", "tp2+dp2", "off1+dp3"), ALL_PLANS),
    (1, 2, ("tp2+dp2",), (Carry.RESHARD,)),
    (1, 2, ("tp2+dp2",), (Carry.SPECULATE,)),
    (0, 2, ("tp2+dp2",), (Carry.RESHARD,)),
    (0, 2, ("tp2+dp2",), (Carry.DRAIN,)),
    (0, 2, ("tp2+dp2",), (Carry.SPECULATE,)),
    (0, 2, ("tp2+dp2",), (Carry.PAUSE,)),
)
"""Rank, epochs, layouts and plans; together they reach every row."""
CASES: list[Case] = list(product(Position, Asks, Wanted, Phase, Carry))
Step = tuple[SwitchParticipant, bool, Move | None, Rule]
"""A participant with a directive, whether its group is idle, its action, and the row of it."""


@functools.cache
def rows_of(case: Case) -> list[Rule]:
    return [rule for rule in RULES if case in set(rule.cases())]


def possible(facts: set[Fact], plan: Carry) -> Iterator[frozenset[Fact]]:
    """Yield all sets of these facts that hold together."""
    sizes = range(len(facts) + 1)
    for true in chain.from_iterable(combinations(sorted(facts, key=str), size) for size in sizes):
        if plan is Carry.DRAIN or Fact.IDLE_DRAIN not in true:
            yield frozenset(true)


@functools.cache
def steps() -> tuple[Step, ...]:
    """One step for each row and kind of participant that the worlds come to."""
    found: dict[object, Step] = {}
    for rank, epochs, layouts, plans in WORLDS:
        for before, order, event in walk(rank, list(directives(epochs, 1 - rank, layouts, plans))):
            for step in steps_from(before, order, event):
                at, _, move, rule = step
                kind = rule, at.position, type(move), at.stage.phase
                found.setdefault(kind, step)
    return tuple(found.values())


def steps_from(before: SwitchParticipant, order: Directive, event: SafePoint) -> Iterator[Step]:
    """Yield the steps of a safe point, after checks of each."""
    at = clone(before)
    at.wanted = None
    at.on_directive(order)
    while True:
        now = Situation(at, order, event.idle)
        (rule,) = TABLE.matching(now.case, now.is_true)
        move = at.next_move(idle=event.idle)
        yield clone(at), event.idle, move, rule
        if move is None or event.puts_off or event.overtaken_by is not None:
            return
        stage = at.stage
        at.made(move)
        assert at.stage >= stage, "a stage goes back"


def test_one_row_matches_in_every_case() -> None:
    """Whatever facts hold: the order of rows means nothing, and none is missing."""
    for case in CASES:
        rules = rows_of(case)
        facts = {fact for rule in rules for fact in (*rule.when, *rule.unless)}
        for true in possible(facts, case[-1]):
            matching = [rule for rule in rules if rule.holds(true.__contains__)]
            assert len(matching) == min(len(rules), 1), (case, true, matching)


def test_cases_without_a_row_are_illegal() -> None:
    illegal = [case for case in CASES if not rows_of(case)]
    assert illegal
    for case in illegal:
        with pytest.raises(IllegalEventError, match=case[0].name):
            TABLE.action(case, lambda fact: True)


def test_every_row_comes_about() -> None:
    missing = set(RULES) - {rule for *_, rule in steps()}
    assert not missing


def test_every_fact_and_action_has_its_code() -> None:
    assert (
        set(FACTS) == set(Fact) == {fact for rule in RULES for fact in (*rule.when, *rule.unless)}
    )
    assert {*MOVES, Action.WAIT} == set(Action) == {rule.action for rule in RULES}
    assert {action for actions in ACTIONS.values() for action in actions} == set(MOVES)


def test_asking_changes_nothing() -> None:
    for at, idle, move, _ in steps():
        before = state_of(at)
        assert at.next_move(idle=idle) == move
        assert state_of(at) == before


@pytest.mark.parametrize("row", range(len(RULES)))
def test_without_its_row_an_event_is_illegal(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = steps()  # With the whole table, whichever test walks first.
    monkeypatch.setattr(SwitchParticipant, "table", RuleTable(RULES[:row] + RULES[row + 1 :]))
    for at, idle, _, rule in walked:
        if rule is RULES[row]:
            before = state_of(at)
            with pytest.raises(IllegalEventError):
                at.next_move(idle=idle)
            assert state_of(at) == before


@pytest.mark.parametrize("kind", ACTIONS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("position", Position, ids=lambda position: position.name)
def test_an_action_that_no_row_gives_at_a_position_is_illegal(
    kind: type[Move], position: Position
) -> None:
    """Even if all its fields fit."""
    moves = [move for _, _, move, _ in steps() if isinstance(move, kind)]
    there = [at for at, *_ in steps() if at.position is position]
    assert moves and there
    if any(rule.action in ACTIONS[kind] and position in (rule.at or Position) for rule in RULES):
        assert any(is_taken(at, move) for at in there for move in moves)
    else:
        assert not any(is_taken(at, move) for at in there for move in moves)


def is_taken(at: SwitchParticipant, move: Move) -> bool:
    """Return whether the participant records the action; if not, it has not changed."""
    twin = clone(at)
    try:
        twin.made(move)
    except IllegalEventError:
        assert state_of(twin) == state_of(at)
        return False
    return True


def test_an_action_for_another_group_migration_or_stage_is_illegal() -> None:
    """Each action that a participant is given, with a field of another one."""
    elsewhere = target("dp4", 99).bindings[3]
    past = directive(target("dp4", 1), 0, Phase.PARK)
    tried = 0
    for at, _, move, _ in steps():
        wrong: list[Move] = []
        match move:
            case None:
                continue
            case Leave() | Serve() | Join():
                wrong.append(replace(move, binding=elsewhere))
            case Resolve():
                wrong.append(replace(move, epoch=move.epoch + 1))
            case Ack():
                wrong.append(replace(move, stage=Stage(0, Phase.PARK)))
        if at.stage.epoch and not isinstance(move, Ack | Resolve):
            wrong.append(replace(move, directive=past))
        for each in wrong:
            if not isinstance(each, Ack) or at.stage.epoch:
                assert not is_taken(at, each), f"{at} takes {each}"
                tried += 1
    assert tried > len(RULES)


@pytest.mark.parametrize("position", Position, ids=lambda position: position.name)
def test_only_a_follower_hears_that_its_leader_left_for_a_migration(position: Position) -> None:
    for at in [at for at, *_ in steps() if at.position is position]:
        before, formation = state_of(at), at.binding.formation if at.binding else 1
        if at.is_follower:
            twin = clone(at)
            twin.on_leave(formation, for_move=True)
            assert twin.leaves[formation]
            continue
        with pytest.raises(IllegalEventError):
            at.on_leave(formation, for_move=True)
        assert state_of(at) == before


def test_it_shows_itself_in_a_line() -> None:
    participant = SwitchParticipant(Rank(1), 1)
    assert repr(participant) == "<rank 1: 0.PARK PARKED no group no plan>"
    participant.on_directive(directive(target("tp2+dp2", 3), 3, Phase.SWAP, carry=Carry.PAUSE))
    assert repr(participant) == "<rank 1: 0.PARK PARKED no group pause>"
    list(make_moves(participant, SafePoint()))
    assert repr(participant) == "<rank 1: 3.SWAP JOINED_FOLLOWER tp2@3 pause>"
