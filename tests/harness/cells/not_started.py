"""What tests raise where nothing was tested yet."""


class NotStartedError(RuntimeError):
    """Servers that a test needs did not start: it may be repeated, whatever it compares."""
