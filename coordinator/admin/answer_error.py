"""The exception by which a call of the admin API ends with an error answer."""

from coordinator.admin.access import error_answer


class AnswerError(Exception):
    """Ends a call with an error answer."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.answer = error_answer(status, code, message, param)
