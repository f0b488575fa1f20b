"""Logs the actions of operators: who asked, for what, and what came of it."""

from collections.abc import Generator
from contextlib import contextmanager

import structlog
from starlette.requests import Request

from coordinator.admin.access import CALLER_KEY, LOOPBACK_CALLER
from coordinator.admin.answer_error import AnswerError

log = structlog.get_logger()

TEXT_CHARS_MAX = 100
"""A longer argument is truncated."""


@contextmanager
def logged_action(request: Request, action: str, **arguments: object) -> Generator[None]:
    """Log the enclosed action when it ends, with its status and the code of its error."""
    status, code = 200, None
    try:
        yield
    except AnswerError as error:
        status, code = error.answer.status_code, error.code
        raise
    except BaseException:
        status, code = 500, "internal_error"
        raise
    finally:
        log.info(
            "admin_action",
            action=action,
            caller=request.scope.get(CALLER_KEY, LOOPBACK_CALLER),
            address=request.client.host if request.client else "",
            status=status,
            error=code,
            **{name: _short(value) for name, value in arguments.items() if value is not None},
        )


def _short(value: object) -> object:
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
