"""The one exception that users cause: bad input, or a server that cannot be reached at all.

Its text is one clear sentence. `cli` prints it and exits with status 2; nothing else catches it.
Failures of single requests are not exceptions: they are `records.Failure` values in the report.
"""


class UsageError(Exception):
    """What the user asked for cannot be done; the text says why in one sentence."""
