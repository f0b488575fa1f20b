"""Every test that takes a `release` runs for each variation of the chart."""

import pytest

from tests.helm.charts import VARIATIONS, Release, releases


@pytest.fixture(params=VARIATIONS)
def release(request: pytest.FixtureRequest) -> Release:
    """What one variation installs."""
    return releases()[request.param]
