"""What the stopwatch of ranks watches is there."""

import importlib

import pytest

pytest.importorskip("vllm")

from tests.bench.profiled_worker import WATCHED


@pytest.mark.parametrize("owner", WATCHED)
def test_what_is_watched_exists(owner: str) -> None:
    module, _, name = owner.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert [each for each in WATCHED[owner] if not hasattr(found, each)] == []
