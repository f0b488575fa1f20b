"""docs/logs.md lists every event of the code, with its level, and every field of a request."""

import re
from collections.abc import Iterator

import msgspec

from coordinator.protocol.request_line import EVENT
from gateway.telemetry.request_log import LEVEL, RequestLine
from tests.harness.logs.events_of_code import (
    ANNOUNCED,
    ROOT,
    LogEvent,
    events_of_code,
    unnamed_events,
)

PAGE = (ROOT / "docs" / "logs.md").read_text()
SECTION_OF_PACKAGE = {
    "comm_pool": "Events of ranks",
    "coordinator": "Events of coordinators",
    "gateway": "Events of gateways",
    "kvadaptor": "Events of ranks",
    "worker": "Events of ranks",
}
ANNOUNCEMENTS = "Announcements"
BY_OTHER_MEANS = {LogEvent(EVENT, "gateway", LEVEL), LogEvent("vllm_failed", "gateway", "error")}
"""Events that no call of a logger names."""
COMMON_FIELDS = {"event", "level", "logger", "timestamp"}
EVENTS_MIN = 80


def rows(section: str) -> Iterator[tuple[str, ...]]:
    """The rows of a section's table, with their cells."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("| `"):
            yield tuple(cell.strip() for cell in line.strip("|").split(" | "))


def test_the_page_lists_exactly_the_events_of_the_code() -> None:
    known = events_of_code() | BY_OTHER_MEANS
    assert len(known) > EVENTS_MIN
    wanted = {
        (
            ANNOUNCEMENTS if event.level == ANNOUNCED else SECTION_OF_PACKAGE[event.package],
            event.name,
            event.level,
        )
        for event in known
    }
    listed = [
        (section, re.sub("`", "", row[0]), row[1])
        for section in {*SECTION_OF_PACKAGE.values(), ANNOUNCEMENTS}
        for row in rows(section)
    ]
    assert set(listed) == wanted
    assert len(listed) == len(set(listed)), "each event is listed once"


def test_every_event_has_a_constant_name() -> None:
    assert not unnamed_events()


def test_the_page_lists_exactly_the_fields_of_a_request() -> None:
    fields = {field.name for field in msgspec.structs.fields(RequestLine)} - COMMON_FIELDS
    listed = [re.sub("`", "", row[0]) for row in rows("One line for each request")]
    assert sorted(listed) == sorted(fields)
