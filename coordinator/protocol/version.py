"""The installed version of this distribution."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the installed version."""
    try:
        return version("aileron")
    except PackageNotFoundError:
        return "not installed"
