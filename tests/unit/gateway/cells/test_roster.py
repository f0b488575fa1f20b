"""Which cells tasks may go to, stay in and must leave, by what was heard of them."""

import msgspec

from coordinator.protocol.messages.gateway import CellLoad, CellState, PrefixesHeld
from coordinator.protocol.prefixes import (
    BLOCK_TOKENS,
    BLOCKS_MAX,
    PrefixHistory,
    prefix_hashes,
)
from coordinator.protocol.terms import TaskId, Tier
from gateway.fleet.placement import Needs
from gateway.fleet.roster import FORGOTTEN_AFTER_S, CellRoster, MoveReason

A, B = "a:1", "b:1"
STATE = CellState("dp2", 1, serving=True, world=2, ranks_alive=2, queued=0, max_context_tokens=512)
NEEDS = Needs(TaskId("task"), Tier.STANDARD, 100)


def heard(*names: str) -> CellRoster:
    roster = CellRoster(names, 2.0, in_fleet=True)
    for name in names:
        roster.opened(name)
        roster.update(name, STATE)
    return roster


def test_a_cell_is_left_once_it_was_not_reached_for_long_enough() -> None:
    roster = heard(A, B)
    roster.closed(A, 10.0)
    assert roster.choose(NEEDS, ()) == B
    assert roster.left(11.9) == {}
    assert roster.left(12.0) == {A: MoveReason.DEAD}
    roster.opened(A)
    assert roster.left(99.0) == {}
    # Until it says so, nobody knows that it serves.
    assert roster.choose(NEEDS, (), without=[B]) is None


def test_a_cell_that_the_registry_names_no_more_is_left_with_its_session() -> None:
    roster = heard(A, B)
    roster.found({B}, 10.0)
    assert roster.left(10.0) == {}
    assert roster.choose(NEEDS, (), without=[B]) == A
    roster.closed(A, 11.0)
    assert roster.left(11.0) == {A: MoveReason.DEAD}


def test_an_empty_registry_takes_no_cell_away_whose_session_lives() -> None:
    roster = heard(A, B)
    roster.found(set(), 10.0)
    assert roster.up == [A, B]
    assert roster.left(99.0) == {}
    assert roster.forget((), 99.0) == []


def test_a_cell_is_forgotten_when_nothing_is_left_of_it() -> None:
    roster = heard(A, B)
    roster.found({B}, 10.0)
    roster.closed(A, 10.0)
    long_after_s = 10.0 + FORGOTTEN_AFTER_S
    assert roster.forget((), long_after_s - 1) == []
    assert roster.forget({A}, long_after_s) == []
    assert roster.forget((), long_after_s) == [A]
    assert list(roster) == [B]


def test_a_cell_that_drains_or_has_no_rank_is_left_at_once() -> None:
    for change, reason in (
        ({"draining": True}, MoveReason.DRAINING),
        ({"ranks_alive": 0}, MoveReason.DEAD),
    ):
        roster = heard(A, B)
        assert roster.update(A, msgspec.structs.replace(STATE, **change))
        assert roster.left(0.0) == {A: reason}
        assert roster.choose(NEEDS, ()) == B
        assert roster.update(A, STATE)
        assert roster.left(0.0) == {}


def test_a_task_that_is_too_long_for_all_is_refused_by_the_largest() -> None:
    roster = heard(A, B)
    roster.update(B, msgspec.structs.replace(STATE, max_context_tokens=1_024))
    assert roster.choose(Needs(TaskId("x"), Tier.BATCH, 600), ()) == B
    assert roster.choose(Needs(TaskId("x"), Tier.BATCH, 2_000), ()) == B
    assert CellRoster([A], 2.0, in_fleet=True).choose(NEEDS, ()) is None


def test_tasks_sent_since_a_cell_told_its_load_count() -> None:
    roster = heard(A, B)
    load = CellLoad((0, 0, 0), 0, 8, 100, 100)
    for name in (A, B):
        roster.update(name, msgspec.structs.replace(STATE, load=load))
    chosen = []
    for number in range(8):
        cell = roster.choose(Needs(TaskId(f"task-{number}"), Tier.STANDARD, 1), ())
        assert cell is not None
        roster.sent(cell, ())
        chosen.append(cell)
    assert chosen.count(A) == chosen.count(B) == 4


def test_a_prompt_goes_where_its_beginning_was_seen() -> None:
    prompt = list(range(10 * BLOCK_TOKENS + 5))
    hashes = prefix_hashes(prompt)
    assert len(hashes) == 10
    roster = heard(A, B)
    for name in (A, B):
        roster.update(name, PrefixesHeld(hashes[:4]))
        assert roster.choose(NEEDS, hashes) is not None
        roster.update(name, PrefixesHeld(hashes[4:8]))
        assert roster.choose(NEEDS, hashes) == name
        roster = heard(A, B)
    # A new session of a cell that restarted begins with nothing.
    idle = msgspec.structs.replace(STATE, load=CellLoad((0, 0, 0), 0, 8, 100, 100))
    roster.update(A, idle)
    roster.update(B, idle)
    roster.sent(A, hashes)
    assert roster.choose(NEEDS, hashes) == A
    roster.closed(A, 0.0)
    roster.opened(A)
    roster.update(A, idle)
    roster.update(B, PrefixesHeld(hashes[:1]))
    assert roster.choose(NEEDS, hashes) == B


def test_a_hash_covers_everything_before_its_block() -> None:
    prompt = list(range(3 * BLOCK_TOKENS))
    other = [7, *prompt[1:]]
    assert not set(prefix_hashes(prompt)) & set(prefix_hashes(other))
    assert prefix_hashes(prompt)[:2] == prefix_hashes(prompt[: 2 * BLOCK_TOKENS])
    assert prefix_hashes(prompt[: BLOCK_TOKENS - 1]) == ()
    assert len(prefix_hashes([1] * BLOCK_TOKENS * 200)) == BLOCKS_MAX


def test_both_sides_forget_the_same_prefixes() -> None:
    cell, gateway = PrefixHistory(4), PrefixHistory(4)
    for hashes in ((1, 2, 3), (1,), (4, 5), (3,), (6,)):
        cell.remember(hashes)
        gateway.remember(hashes)
    assert list(cell) == list(gateway) == [4, 5, 3, 6]
    late = PrefixHistory(4)
    late.remember(tuple(cell))
    assert list(late) == list(cell)
    assert cell.matched((4, 5, 1)) == 2
