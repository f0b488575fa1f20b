"""What all tests of ranks in memory share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collections_go_on() -> Iterator[None]:
    """A rank that leaves its group pauses them for its process, which is that of all tests."""
    yield
    gc.enable()
