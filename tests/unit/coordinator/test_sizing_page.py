"""docs/sizing.md: every command prints what the page shows."""

from pathlib import Path

import pytest

from tests.harness.coordinator.published_models import fill_cache
from tests.harness.coordinator.sizing_page import BLOCK, PAGE, rewritten


def test_every_command_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise run `python -m tests.harness.coordinator.sizing_page`."""
    fill_cache(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = PAGE.read_text()
    assert len(BLOCK.findall(page)) >= 4
    assert page.count("```console") == len(BLOCK.findall(page))
    assert rewritten(page) == page
