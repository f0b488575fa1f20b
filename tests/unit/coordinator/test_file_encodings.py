"""Files that users write, in the encodings that their editors choose."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.protocol.config import ConfigError, load_config
from coordinator.protocol.keys import ApiKey, dump_key, hash_of, load_keys
from coordinator.server.policy_files import read_step_times

KEY = ApiKey(hash=hash_of("sk-one"), tenant="acme")
CONFIG = "model: {path: m, served_name: größer}\n"
KEYS = "# größer\nkeys:\n" + dump_key(KEY)
STEPS = "# größer\ndp1: {points: [[1, 2], [8, 3]]}\n"

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16"]
"""UTF-16 with a mark is what PowerShell writes."""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_may_begin_with_a_byte_order_mark(
    tmp_path: Path, encoding: str, line_end: str
) -> None:
    path = tmp_path / "file.yaml"

    def write(text: str) -> Path:
        path.write_bytes(text.replace("\n", line_end).encode(encoding))
        return path

    assert load_config(write(CONFIG)).served_model_name == "größer"
    assert load_keys(write(KEYS)) == {KEY.hash: KEY}
    assert set(read_step_times(str(write(STEPS)))) == {"dp1"}


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (load_config, CONFIG),
        (load_keys, KEYS),
        (lambda path: read_step_times(str(path)), STEPS),
    ],
    ids=["configuration", "keys", "step times"],
)
def test_other_encodings_are_refused_in_a_sentence(
    tmp_path: Path, read: Callable[[Path], object], text: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"file\.yaml"):
        read(path)


def add_key(path: Path) -> int:
    return main(["key", "--tenant", "other", "--file", str(path)])


def test_a_key_is_added_to_a_file_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(KEYS.encode("utf-8-sig"))
    assert add_key(path) == 0
    assert [key.tenant for key in load_keys(path).values()] == ["acme", "other"]
    assert "größer" in path.read_text(encoding="utf-8")


def test_a_key_is_not_added_to_a_file_that_is_not_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(KEYS.encode("utf-16"))
    assert add_key(path) == 2
    assert "save it as UTF-8" in capsys.readouterr().err
    assert load_keys(path) == {KEY.hash: KEY}
