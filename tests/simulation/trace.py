"""The lines of a replay, short enough to read."""

from coordinator.events import Effect, Note, SwitchRecorded, ToGateway, ToRank
from coordinator.protocol.messages import CellState, Directive, Place

LINE_CHARS = 300


def line_of(effect: Effect) -> str | None:
    """Return what the core does; directives are left out, as the moves they lead to show them."""
    match effect:
        case ToRank(_, Directive()) | ToGateway(_, CellState()):
            return None
        case ToRank(rank, message):
            return f"core -> rank {rank}: {short(message)}"
        case ToGateway(name, answer):
            return f"core -> {name}: {short(answer)}"
        case SwitchRecorded(record):
            return f"core: switch to {record.to_layout} {record.outcome.value}"
        case Note(_, event, fields):
            return f"core: {event} {fields}"


def short(value: object) -> str:
    if isinstance(value, Place):
        return f"Place({value.header.task}#{value.attempt} behind {len(value.generated_tokens)})"
    text = str(value)
    return text if len(text) <= LINE_CHARS else text[: LINE_CHARS - 3] + "..."
