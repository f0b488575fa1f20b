"""The installed version of this distribution."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

DISTRIBUTION: Final = "aileron-serving"
"""Name on the package index, where `aileron` belongs to another project."""
NOT_INSTALLED: Final = "not installed"


def own_version() -> str:
    """Return the installed version, or `NOT_INSTALLED` in a bare checkout."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return NOT_INSTALLED
