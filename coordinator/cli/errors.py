"""The exception for errors that users of the command line cause."""

USAGE_STATUS = 2
"""Exit status for unusable arguments or an unusable configuration."""


class CliError(Exception):
    """The command fails; the text gives the cause and the remedy in one sentence."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
