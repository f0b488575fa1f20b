"""What gateways are told of the prompts that their cell has seen."""

import msgspec
import pytest

from coordinator.model.events import Tick, ToGateway
from coordinator.protocol.messages.gateway import GatewayToCore, PrefixesHeld
from coordinator.protocol.prefixes import BLOCK_TOKENS, prefix_hashes
from tests.harness.coordinator.builders import submit
from tests.transcripts.cell import Cell

COMMON = prefix_hashes(range(2 * BLOCK_TOKENS))
LONGER = prefix_hashes(range(3 * BLOCK_TOKENS))


def serving(**settings: object) -> Cell:
    cell = Cell("dp2", **settings)
    cell.gateway("g")
    cell.serve()
    cell.take()
    return cell


def asked(task: str, prefixes: tuple[int, ...]) -> GatewayToCore:
    return msgspec.structs.replace(submit(task), prefixes=prefixes)


def told(cell: Cell) -> dict[str, tuple[int, ...]]:
    """What each gateway is told since the last time."""
    return {
        each.gateway: each.message.hashes
        for each in cell.take()
        if isinstance(each, ToGateway) and isinstance(each.message, PrefixesHeld)
    }


def test_every_gateway_is_told_at_the_next_tick_what_came() -> None:
    cell = serving(in_fleet=True)
    cell.gateway("h")
    cell.take()
    cell.say(asked("a", COMMON), "g")
    assert told(cell) == {}, "not at each task"
    cell.event(Tick())
    assert told(cell) == {"g": COMMON, "h": COMMON}
    cell.event(Tick())
    assert told(cell) == {}, "nothing is told twice"


def test_blocks_that_came_again_are_told_once_and_as_the_newest() -> None:
    cell = serving(in_fleet=True)
    other = prefix_hashes(range(7, 7 + BLOCK_TOKENS))
    for task, prefixes in (("a", COMMON), ("b", other), ("c", LONGER)):
        cell.say(asked(task, prefixes), "g")
    cell.event(Tick())
    assert LONGER[:2] == COMMON
    assert told(cell) == {"g": (*other, *LONGER)}


def test_a_gateway_that_comes_is_told_all_of_it_at_once() -> None:
    cell = serving(in_fleet=True)
    cell.say(asked("a", COMMON), "g")
    cell.event(Tick())
    cell.say(asked("b", LONGER), "g")
    cell.take()
    cell.gateway("late")
    assert told(cell) == {"late": LONGER}


@pytest.mark.parametrize("in_fleet", [True, False])
def test_a_cell_alone_tells_nothing_of_prompts(in_fleet: bool) -> None:
    cell = serving(in_fleet=in_fleet)
    cell.say(asked("a", COMMON), "g")
    cell.event(Tick())
    cell.gateway("late")
    assert set(told(cell)) == ({"g", "late"} if in_fleet else set())
