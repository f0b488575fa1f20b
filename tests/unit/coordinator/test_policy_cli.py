"""`aileron replay` and `explain` print what the policy did; its files are refused in a sentence."""

import json
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.cli.operate import alternation_text, decision_text
from coordinator.model.observation_log import encode
from coordinator.protocol.config import ConfigError
from coordinator.server.policy_files import ObservationLog, read_step_times
from tests.harness.coordinator.policy import log_of, observation
from tests.harness.coordinator.policy_cells import decisions, serving, wait


def test_a_log_is_printed_as_it_would_have_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "seen.jsonl"
    log.write_bytes(b"\n".join(log_of(observation("dp4"), observation("dp4"))) + b"\n")
    assert main(["replay", str(log)]) == 0
    said = capsys.readouterr().out
    assert "tp4" in said
    assert "2 observations, 1 changes" in said
    assert main(["replay", str(log), "--policy", "fixed", "--layout", "tp2+tp2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["now"] for each in answer["steps"]] == ["tp2+tp2"]
    assert answer["changes"] == 0


def test_a_log_may_begin_with_a_byte_order_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "seen.jsonl"
    log.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(log_of(observation("dp4"))) + b"\r\n")
    assert main(["replay", str(log)]) == 0
    assert "1 observations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"{}\n", "line 1 is no line of a log"), (b"", "it holds no observation")],
)
def test_what_is_no_log_is_refused_in_a_sentence(
    content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "seen.jsonl"
    log.write_bytes(content)
    assert main(["replay", str(log)]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "absent")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_decision_is_shown_with_what_it_was_chosen_from() -> None:
    cell = serving()
    wait(cell, 3_000)
    view = next(each for each in decisions(cell) if each["changes"])
    text = decision_text(view)
    assert "because: it meets the goals as well" in text
    assert "candidate" in text
    assert "tp2+tp2" in text
    assert view.keys() >= {"time", "inputs", "candidates", "choice", "reason"}


def test_an_observation_log_is_begun_anew_when_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl"
    line = encode(observation("dp4"))
    log = ObservationLog(str(path), bytes_max=3 * len(line))
    for _ in range(4):
        log.write(observation("dp4"))
    assert path.with_name("seen.jsonl.1").exists()
    ObservationLog("", 1).write(observation("dp4"))
    ObservationLog(str(tmp_path / "absent" / "seen"), 1).write(observation("dp4"))


def test_step_times_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert read_step_times("") == {}
    with pytest.raises(ConfigError, match="cannot read"):
        read_step_times(str(tmp_path / "absent"))
    bad = tmp_path / "bad.yaml"
    bad.write_text("dp2: {points: [[1, 2]]}\n")
    with pytest.raises(ConfigError, match="'dp2' is no mode"):
        read_step_times(str(bad))


def test_an_alternation_is_explained_with_what_one_layout_would_take() -> None:
    view = {
        "phase": "decode",
        "reason": "decodes in tp4: a request takes 700 ms",
        "cycles": 3,
        "seconds": {"prefill": 20.04, "decode": 39.0, "switching": 1.0},
        "requests": 90,
        "single_seconds": 75.5,
    }
    assert alternation_text(view) == (
        "alternation of batch work: decodes in tp4: a request takes 700 ms\n"
        "    3 cycles served 90 requests in 60.0 s (20.0 s prefill, 39.0 s decode, "
        "1.0 s switching); one layout takes about 75.5 s for them"
    )
    idle = {**view, "reason": "no batch work alone", "requests": 0}
    assert alternation_text(idle) == "alternation of batch work: no batch work alone"
