"""Logging of a gateway process: its events and libraries' lines in one form on stderr."""

import logging
import sys

import structlog

from coordinator.protocol.logs import without_words

QUIET_LOGGERS = ("uvicorn.access", "httpx", "asyncio")
QUOTING_LOGGERS = ("vllm.entrypoints.", "vllm.renderers.", "vllm.v1.engine.", "vllm.reasoning.")
"""Loggers whose lines quote requests: only lines with a stack pass, without their text."""


class _QuotesNothing(logging.Filter):
    """Keeps client text out of the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(QUOTING_LOGGERS):
            return True
        if record.exc_info is None:
            return False
        record.msg, record.args = "vllm_failed", ()
        return True


def set_up_logging(*, json: bool) -> None:
    """Send all logging to stderr, as JSON lines or for a human."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        )
    )
    # Stacks without local variables, which include keys and prompts.
    stacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()] if json else shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            without_words,
            *([structlog.processors.ExceptionRenderer(stacks)] if json else []),
            renderer,
        ],
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(_QuotesNothing())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
