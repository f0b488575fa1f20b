"""The lines of a replay, short enough to read."""

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from coordinator.model.events import (
    Effect,
    Event,
    ForecastMade,
    GatewaySent,
    Note,
    Observed,
    RankOpened,
    SwitchRecorded,
    ToGateway,
    ToLauncher,
    ToRank,
)
from coordinator.protocol.messages.gateway import CellState, Submit
from coordinator.protocol.messages.message import Message
from coordinator.protocol.messages.rank import Directive, Place
from coordinator.protocol.switch_actions import (
    Ack,
    Join,
    Leave,
    Move,
    Park,
    Reshard,
    Resolve,
    Serve,
)
from coordinator.protocol.terms import Binding, TaskId

LINE_CHARS = 200


@contextmanager
def logs_to(say: Callable[[str], None] | None) -> Iterator[None]:
    """Pass on what is logged meanwhile as lines; None drops it."""

    def tell(_logger: object, _level: str, event: MutableMapping[str, Any]) -> Any:
        assert say is not None
        say(f"log: {event.pop('event')} {dict(event)}"[:LINE_CHARS])
        raise structlog.DropEvent

    before = structlog.get_config()
    level = logging.CRITICAL if say is None else logging.INFO
    structlog.configure(
        processors=[tell], wrapper_class=structlog.make_filtering_bound_logger(level)
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def line_of(effect: Effect) -> str | None:
    """Return what the core does; directives are left out, as the moves they lead to show them."""
    match effect:
        case ToRank(_, Directive()) | ToGateway(_, CellState()):
            return None
        case ToRank(rank, message):
            return f"core -> rank {rank}: {_message(message)}"
        case ToGateway(name, answer):
            return f"core -> {name}: {_message(answer)}"
        case ToLauncher(message):
            return f"core -> launcher: {_message(message)}"
        case SwitchRecorded(record):
            return f"core: switch to {record.to_layout} {record.outcome.value}"
        case Note(_, event, fields):
            return f"core: {event} {fields}"
        case Observed() | ForecastMade():
            return None


def event_line(event: Event) -> str:
    match event:
        case RankOpened(hello):
            held = [f"{each.header.task}#{each.attempt}" for each in hello.held]
            return f"rank {hello.rank} says hello ({hello.incarnation}), holds {held}"
        case GatewaySent(gateway, message):
            return f"{gateway} says {_message(message)}"
        case _:
            return str(event)[:LINE_CHARS]


def move_line(move: Move) -> str:
    stage = move.directive.stage
    return f"{stage.epoch}.{stage.phase.name}: {_move(move)}"


def _move(move: Move) -> str:
    match move:
        case Leave(binding, carry, _, group_lost):
            return f"leave {_binding(binding)} ({carry.value}{', lost' if group_lost else ''})"
        case Join(binding):
            return f"join {_binding(binding)}"
        case Serve(binding, pages, kept):
            indices = kept.indices if kept is not None else ()
            return f"serve {_binding(binding)} with {pages} pages on top of {indices}"
        case Reshard():
            return "moved its share"
        case Resolve(epoch, is_committed, stays_parked):
            how = "committed" if is_committed else "not committed"
            return f"resolve {epoch}: {how}{', kept' if stays_parked else ''}"
        case Park():
            return "park"
        case Ack():
            return "unchanged"


def _binding(binding: Binding) -> str:
    first, last = binding.group.ranks[0], binding.group.ranks[-1]
    return f"{binding.group.name}[{first}-{last}]@{binding.formation}"


def _message(message: Message) -> str:
    match message:
        case Submit(header, _, delivered, attempt):
            return f"submit {header.task} behind {len(delivered)} tokens, attempt {attempt}"
        case Place(header, attempt, binding, _, tokens):
            return f"place {header.task}#{attempt} in {_binding(binding)} behind {len(tokens)}"
        case _:
            task: TaskId | None = getattr(message, "task", None)
            return f"{type(message).__name__} {task}" if task else str(message)[:LINE_CHARS]
