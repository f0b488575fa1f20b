"""Logging of coordinator and worker processes: one JSON object per line on stderr.

Stacks are logged without local variables, which may hold prompts, tokens and secrets.
"""

import logging
import sys

import structlog

QUIET_LOGGERS = ("asyncio", "grpc", "uvicorn")
FAILED_EVENTS = frozenset(
    {
        *("vllm_failed", "request_failed", "request_unreadable", "task_refused", "move_failed"),
        "tool_parser_failed",
    }
)
"""Events whose exception may quote a request: only its type and traceback are logged."""


class RequestFailure(Exception):  # noqa: N818 -- stands in a log for an error of any name
    """Replaces an exception whose text must not be logged."""


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


def set_up_logging() -> None:
    """Send our events and the libraries' warnings to stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    stacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    last: list[structlog.typing.Processor] = [
        without_words,
        structlog.processors.ExceptionRenderer(stacks),
        structlog.processors.JSONRenderer(default=str),
    ]
    structlog.configure(
        processors=[*shared, *last],
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
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
