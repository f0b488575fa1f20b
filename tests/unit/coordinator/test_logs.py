"""What coordinators and workers log: lines of JSON, and no local variables."""

import io
import json
import logging

import pytest
import structlog

from coordinator.protocol.log_config import LogConfig, LogLevel
from coordinator.protocol.logs import FAILED_EVENTS, set_level, set_up_logging

pytestmark = pytest.mark.usefixtures("restored_logging")

SECRET = "a secret prompt"


def fail() -> None:
    local = [SECRET]
    raise ValueError(f"{len(local)} is wrong")


def test_every_line_is_json_and_stacks_have_no_local_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_logging()
    own, other = structlog.get_logger(), logging.getLogger("grpc.aio")
    try:
        fail()
    except ValueError:
        own.exception("rank_failed", epoch=3)
        other.exception("step failed")
    other.warning('a\n{"event": "forged"}')
    other.info("not of interest")
    written = capsys.readouterr()
    assert written.out == "", "stdout is for what others wait for"
    assert SECRET not in written.err
    lines = [json.loads(line) for line in written.err.splitlines()]
    assert [line["event"] for line in lines] == [
        *("rank_failed", "step failed", 'a\n{"event": "forged"}'),
    ]
    for line in lines[:2]:
        [told] = line["exception"]
        assert (told["exc_type"], told["exc_value"]) == ("ValueError", "1 is wrong")
        assert told["frames"][-1]["name"] == "fail"
    assert {line["level"] for line in lines} == {"error", "warning"}
    assert [line.get("logger") for line in lines] == [None, "grpc.aio", "grpc.aio"]


class Unbuffered(io.StringIO):
    """A stream as with PYTHONUNBUFFERED: what is written goes out at once, by a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, text: str) -> int:
        self.calls.append(text)
        return len(text)


def test_lines_of_processes_that_share_a_stream_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Unbuffered()
    monkeypatch.setattr("sys.stderr", stream)
    set_up_logging()
    structlog.get_logger().info("rank_built")
    logging.getLogger("asyncio").warning("slow")
    events = [json.loads(each)["event"] for each in stream.calls]
    assert events == ["rank_built", "slow"], "a line each, and not its end apart"
    assert all(each.endswith("}\n") for each in stream.calls)


def test_context_is_told_with_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging()
    with structlog.contextvars.bound_contextvars(rank=3):
        structlog.get_logger().info("rank_built")
        logging.getLogger("asyncio").warning("slow")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["rank"]) for line in lines] == [("rank_built", 3), ("slow", 3)]


@pytest.mark.parametrize("event", sorted(FAILED_EVENTS))
def test_what_may_quote_a_request_is_told_by_type_and_place(
    capsys: pytest.CaptureFixture[str], event: str
) -> None:
    set_up_logging()
    try:
        raise ValueError(SECRET) from KeyError(SECRET)
    except ValueError:
        structlog.get_logger().exception(event)
    logged = capsys.readouterr().err
    assert SECRET not in logged
    [told] = json.loads(logged)["exception"]
    assert told["exc_value"] == "ValueError"
    assert told["frames"][-1]["filename"] == __file__


@pytest.mark.parametrize(
    ("level", "passing"),
    [
        ("debug", ["our info", "our warning", "their info", "their warning"]),
        ("info", ["our info", "our warning", "their warning"]),
        ("warning", ["our warning", "their warning"]),
        ("error", []),
    ],
)
def test_a_level_may_change_while_the_process_runs(
    capsys: pytest.CaptureFixture[str], level: LogLevel, passing: list[str]
) -> None:
    set_up_logging(LogConfig(level="error"))
    own, other = structlog.get_logger(), logging.getLogger("a.library")
    own.info("before")
    set_level(level)
    own.info("our info")
    own.warning("our warning")
    other.info("their info")
    other.warning("their warning")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == passing


def test_the_console_form_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogConfig(format="console"))
    structlog.get_logger().info("rank_lost", rank=3)
    line = capsys.readouterr().err
    assert "rank_lost" in line
    assert "rank=3" in line
    assert not line.startswith("{")
