"""The core behaves as its transcripts say; `python -m tests.transcripts` writes them anew."""

from pathlib import Path

import pytest

from tests.transcripts.transcript import paths, replay


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_the_core_does_what_its_transcript_says(path: Path) -> None:
    text = path.read_text()
    assert replay(text) == text
