"""What commands print of a running cell's answers."""

import pytest

from coordinator.cli import main
from coordinator.cli.admin_client import AdminClient


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["usage"], "no request has ended\n"),
        (["usage", "--tenant", "acme"], "no request of tenant acme has ended\n"),
        (["renew", "1"], "Rank 1 restarts while the others serve.\n"),
        (["renew", "1", "0"], "Ranks 0, 1 restart together while the others serve.\n"),
    ],
)
def test_answers_of_a_cell_are_sentences(
    words: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = {"usage": [], "since": "2026-01-01T00:00:00+00:00"}
    for method in ("get", "post"):
        monkeypatch.setattr(AdminClient, method, lambda *_: answer)
    assert main([*words, "--admin-url", "http://127.0.0.1:1"]) == 0
    assert sentence in capsys.readouterr().out
