"""What reaches the log of what clients send: nothing."""

import json as json_module
import logging
from collections.abc import Iterator

import pytest
import structlog

from coordinator.protocol.log_config import LogConfig, LogLevel
from gateway.telemetry.logs import set_level, set_up_logging

SECRET = "a secret prompt"


@pytest.fixture(autouse=True)
def restored(restored_logging: None) -> Iterator[None]:
    vllm = logging.getLogger("vllm")
    # Where vLLM is imported it has given its logger a handler; gateways switch that off.
    own = vllm.handlers, vllm.propagate
    vllm.handlers, vllm.propagate = [], True
    yield
    vllm.handlers, vllm.propagate = own


def fail() -> None:
    local = SECRET
    raise ValueError(f"cannot read {local}")


@pytest.mark.parametrize("json", [True, False])
def test_failures_are_logged_without_the_request(
    capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    set_up_logging(LogConfig(format="json" if json else "console"))
    vllm = logging.getLogger("vllm.entrypoints.openai.serving")
    own = structlog.get_logger("gateway.http.edge")
    vllm.warning("Error with %s", SECRET)
    try:
        fail()
    except ValueError:
        vllm.exception("Error in %s", SECRET)
        own.exception("request_failed", request_id="r1")
    logged = capsys.readouterr().err
    assert SECRET not in logged
    assert logged.count("ValueError") >= 2, "the type is told"
    assert "r1" in logged
    assert "test_logs.py" in logged
    if json:
        assert all(isinstance(json_module.loads(line), dict) for line in logged.splitlines())


def test_own_lines_and_others_pass(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging()
    structlog.get_logger("gateway.http.edge").info("client_lost", reason='a\n{"event": "forged"}')
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    lines = [json_module.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["client_lost", "Invalid HTTP request received."]


@pytest.mark.parametrize(
    ("level", "passing"),
    [
        ("debug", ["our info", "our warning", "their info", "their warning"]),
        ("info", ["our info", "our warning", "their info", "their warning"]),
        ("warning", ["our warning", "their warning"]),
        ("error", []),
    ],
)
def test_a_level_holds_for_our_events_and_for_libraries(
    capsys: pytest.CaptureFixture[str], level: LogLevel, passing: list[str]
) -> None:
    set_up_logging()
    set_level(level)
    own, other = structlog.get_logger("gateway.http.edge"), logging.getLogger("a.library")
    own.info("our info")
    own.warning("our warning")
    other.info("their info")
    other.warning("their warning")
    logging.getLogger("httpx").info("GET http://a-secret-place")
    lines = [json_module.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == passing
