"""The one exception that users cause: bad input, or a server that does not answer.

Its text is one clear sentence. `cli` prints it and exits with status 2; nothing else catches it.
Failures of single requests are `records.Failure` values in the report, not exceptions.
"""


class UsageError(Exception):
    """The user's request cannot be carried out; the text gives the reason in one sentence."""
