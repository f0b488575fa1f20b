"""Which version of this distribution is installed."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version that is installed."""
    try:
        return version("aileron")
    except PackageNotFoundError:
        return "not installed"
