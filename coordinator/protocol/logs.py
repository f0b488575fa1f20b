"""Logging of coordinator and worker processes: one JSON object per line on stderr.

Stacks are logged without local variables, which may hold prompts, tokens and secrets.
"""

import logging
import sys

import structlog

from coordinator.protocol.log_config import LogConfig, LogLevel

QUIET_LOGGERS = ("asyncio", "grpc", "uvicorn")
FAILED_EVENTS = frozenset(
    {
        *("vllm_failed", "request_failed", "request_unreadable", "task_refused", "move_failed"),
        "tool_parser_failed",
    }
)
"""Events whose exception may quote a request: only its type and traceback are logged."""

NUMBERS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""The standard library's numbers of our levels."""

_LIBRARY_LEVEL_MIN = logging.WARNING
"""Libraries report their normal operation only at level debug."""


class RequestFailure(Exception):  # noqa: N818 -- stands in a log for an error of any name
    """Replaces an exception whose text must not be logged."""


class _Gate:
    """Drops events below the level, which may change while the process runs."""

    def __init__(self) -> None:
        self.least = logging.INFO

    def __call__(
        self, _: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Pass the event on, or raise `DropEvent`."""
        if NUMBERS.get(method, logging.CRITICAL) < self.least:
            raise structlog.DropEvent
        return event


_gate = _Gate()


def number_of(level: LogLevel) -> int:
    """Return the standard library's number of a level."""
    return NUMBERS[level]


def without_words(
    _: logging.Logger, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Reduce an exception that may quote a request to its type and its traceback."""
    info = event.get("exc_info")
    if event.get("event") in FAILED_EVENTS and info:
        kind, _value, place = sys.exc_info() if info is True else info
        name = getattr(kind, "__name__", "unknown")
        event["exc_info"] = (RequestFailure, RequestFailure(name), place)
    return event


def renderers(config: LogConfig) -> list[structlog.typing.Processor]:
    """Return the last processors of a line, which make it text of the configured format."""
    if config.format == "console":
        return [
            structlog.dev.ConsoleRenderer(
                colors=False, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    stacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(stacks),
        structlog.processors.JSONRenderer(default=str),
    ]


def set_up_logging(config: LogConfig | None = None) -> None:
    """Send our events and the libraries' warnings to stderr."""
    config = config or LogConfig()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last = [without_words, *renderers(config)]
    structlog.configure(
        processors=[_gate, *shared, *last],
        # Ranks share a stream, so a line and its end must be one write even where it is unbuffered.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.getLogger().handlers = [handler]
    set_level(config.level)


def set_level(level: LogLevel) -> None:
    """Log our events from this level on, and those of libraries from warnings on."""
    _gate.least = number_of(level)
    of_libraries = logging.INFO if level == "debug" else max(number_of(level), _LIBRARY_LEVEL_MIN)
    logging.getLogger().setLevel(of_libraries)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(number_of(level), _LIBRARY_LEVEL_MIN))
