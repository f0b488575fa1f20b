"""What tests of vLLM's schedulers share."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def base() -> Any:
    """Configuration of the demo model."""
    from tests.harness.vllm.mode_schedulers import base_config

    return base_config()


@pytest.fixture
def hasher(base: Any) -> Any:
    """What computes block hashes."""
    from tests.harness.vllm.mode_schedulers import hasher_of

    return hasher_of(base)
