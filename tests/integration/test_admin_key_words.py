"""What commands say to those whose admin key a coordinator does not take."""

from pathlib import Path

import pytest

from coordinator.cli import main
from tests.harness.cells.coordinator_process import Coordinator

KEY = "an-admin-key-of-the-test"


@pytest.mark.parametrize(
    ("sent", "fault"), [("", "The admin key is missing"), (KEY + "x", "The admin key is wrong")]
)
def test_a_switch_names_the_key_that_suffices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sent: str,
    fault: str,
) -> None:
    monkeypatch.setenv("AILERON_ADMIN_KEY", KEY)
    monkeypatch.setenv("AILERON_VIEWER_KEY", KEY + "-viewer")
    coordinator = Coordinator(tmp_path)
    with coordinator.running():
        monkeypatch.setenv("AILERON_ADMIN_KEY", sent)
        monkeypatch.delenv("AILERON_VIEWER_KEY")
        url = f"http://127.0.0.1:{coordinator.admin}"
        assert main(["switch", "dp2", "--admin-url", url]) == 1
        assert capsys.readouterr().err == (
            f"aileron: {fault}: set AILERON_ADMIN_KEY to this server's, or send it as a bearer "
            "token.\n"
        )
        monkeypatch.setenv("AILERON_VIEWER_KEY", KEY + "-viewer")
        monkeypatch.delenv("AILERON_ADMIN_KEY")
        assert main(["switch", "tp2", "--admin-url", url]) == 1
        assert "set AILERON_ADMIN_KEY to one that suffices" in capsys.readouterr().err
