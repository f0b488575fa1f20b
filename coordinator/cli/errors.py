"""The exception for errors that users of the command line cause."""

USAGE_STATUS = 2
"""Exit status of a command that cannot run as it was given."""


class CliError(Exception):
    """The request cannot be done; the text says why, and what to do, in one sentence."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
