"""Tests that compare measured times may be repeated; every repeat is reported."""

import pytest

TIMING_REPEATS = 2
"""A machine that does other work for some seconds must not fail a run that takes half an hour.

A time that is really too long fails three times in a row.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only tests marked `timing` are repeated: everything else must pass the first time."""
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=TIMING_REPEATS, reruns_delay=2))
