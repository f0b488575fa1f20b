"""Logging of a gateway process: its events and libraries' lines in one form on stderr."""

import logging
import sys

import structlog

from coordinator.protocol.log_config import LogConfig, LogLevel
from coordinator.protocol.logs import number_of, renderers, without_words

QUIET_LOGGERS = ("uvicorn.access", "httpx", "asyncio")
OWN_LOGGERS = ("gateway", "coordinator", "comm_pool", "__main__")
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


def set_up_logging(config: LogConfig | None = None) -> None:
    """Send all logging to stderr, as JSON lines or for a human."""
    config = config or LogConfig()
    is_json = config.format == "json"
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()] if is_json else shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            without_words,
            *renderers(config),
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
    logging.getLogger().handlers = [handler]
    set_level(config.level)


def set_level(level: LogLevel) -> None:
    """Log our events from this level on, and those of libraries from info on."""
    number = number_of(level)
    logging.getLogger().setLevel(max(number, logging.INFO))
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(number)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
