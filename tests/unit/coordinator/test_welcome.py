"""What `aileron up` prints when it serves, and what it warns of before."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.cli import up as up_command
from coordinator.cli.operate import gateway_warnings
from coordinator.cli.returns import Returns
from coordinator.cli.up import welcome_lines
from coordinator.protocol import folders
from coordinator.protocol.config import check_config
from coordinator.protocol.keys import ApiKey, dump_key, hash_of, warning_of


def line_of(name: str, *, has_admin_key: bool = False, **sections: Any) -> str:
    config = check_config({"model": {"path": "demo"}, **sections})
    lines = welcome_lines(config, "aileron", has_admin_key=has_admin_key)
    [line] = [line for line in lines if line.startswith(f"  {name} ")]
    return line.removeprefix(f"  {name}").strip()


def test_the_request_to_try_has_the_key_that_it_needs() -> None:
    header = "-H 'Authorization: Bearer YOUR_API_KEY'"
    assert header not in line_of("try it")
    assert header in line_of("try it", gateway={"keys_file": "keys.yaml"})


def test_the_switch_to_try_has_the_key_that_it_needs() -> None:
    assert line_of("switch") == "aileron switch tp2"
    with_key = line_of("switch", has_admin_key=True)
    assert with_key == "AILERON_ADMIN_KEY=YOUR_ADMIN_KEY aileron switch tp2"


@pytest.mark.parametrize(
    ("cell", "layout"),
    [
        ({"ranks": 6, "layout": "dp6", "widths": [1, 2]}, "tp2+tp2+tp2"),
        ({"ranks": 2, "layout": "tp2"}, "dp2"),
    ],
)
def test_the_switch_to_try_is_possible(cell: dict[str, Any], layout: str) -> None:
    assert line_of("switch", cell=cell) == f"aileron switch {layout}"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_cell_with_one_layout_has_no_switch_to_try(ranks: int) -> None:
    cell = {"ranks": ranks, "layout": f"dp{ranks}", "widths": [1]}
    config = check_config({"model": {"path": "a/b"}, "cell": cell})
    assert "switch" not in "".join(welcome_lines(config, "aileron", has_admin_key=False))


def test_a_file_of_keys_that_accepts_nobody_is_named() -> None:
    now = datetime.now(UTC)
    expired = ApiKey(hash=hash_of("a"), tenant="a", expires=now - timedelta(days=1))
    revoked = ApiKey(hash=hash_of("b"), tenant="b", revoked=now)
    path = Path("keys.yaml")
    for keys in ((), (expired,), (expired, revoked)):
        assert "keys.yaml has no key that is accepted" in warning_of(keys, path, now)
    assert not warning_of((expired, ApiKey(hash=hash_of("c"), tenant="c")), path, now)


@pytest.mark.parametrize("keys", ["", "keys:\n", "expired"])
def test_up_warns_of_it_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keys: str,
) -> None:
    async def serve(*_: Any) -> tuple[str, bool]:
        return "", False

    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(up_command, "_serve", serve)
    monkeypatch.setattr(folders, "UNIX_PATH_BYTES_MAX", 300)
    file = tmp_path / "keys.yaml"
    old = datetime(2020, 1, 1, tzinfo=UTC)
    old_key = ApiKey(hash=hash_of("a"), tenant="a", expires=old)
    file.write_text(f"keys:\n{dump_key(old_key)}" if keys == "expired" else keys)
    ports = ["--port", "0", "--admin-port", "0"]
    assert main(["up", "--keys", str(file), *ports]) == 0
    assert capsys.readouterr().err == (
        f"aileron: warning: {file} has no key that is accepted, so every request gets 401: add one "
        f"with `aileron key new --tenant NAME --file {file}`.\n"
    )


def test_status_shows_what_gateways_say_of_their_files() -> None:
    def said(config: str = "", keys: str = "") -> dict[str, Any]:
        return {"config_refusal": config or None, "keys_refusal": keys or None}

    own = {"refusal": "line 1 is wrong."}
    files = [said(), said(keys="k is broken."), said("line 1 is wrong.", "k is broken.")]
    assert gateway_warnings(files, own) == ["API keys: k is broken."]
    assert gateway_warnings(files, None) == [
        "API keys: k is broken.",
        "the old configuration stays: line 1 is wrong.",
    ]
    assert gateway_warnings([said()], None) == []


def test_a_rank_that_is_back_is_announced() -> None:
    now_s = [10.0]
    returns = Returns(lambda: now_s[0])
    ready = {"event": "rank_progress", "rank": 1, "stage": "ready", "done": 1, "total": 1}
    assert returns.words_for(ready) is None, "it starts for the first time"
    assert returns.words_for({"event": "rank_exited", "rank": 1, "starts_in_s": 1.5}) is None
    now_s[0] = 12.0
    assert returns.words_for({"event": "rank_exited", "rank": 1, "starts_in_s": 3.0}) is None
    assert returns.words_for({**ready, "rank": 0}) is None
    assert returns.words_for({**ready, "stage": "warm"}) is None
    now_s[0] = 18.3
    assert returns.words_for(ready) == "rank 1 is back after 8.3 s"
    assert returns.words_for(ready) is None
