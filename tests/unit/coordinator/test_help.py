"""What `aileron` shows a user who types little, or types the words of another command."""

import pytest

from coordinator.cli import main
from coordinator.cli.arguments import parse_arguments
from coordinator.cli.launch import Machine, build_config
from coordinator.cli.up import other_layout, words_for

MACHINE = Machine(0, (18_100, 18_101, 18_102, 18_103), "/tmp/run", "/tmp/state")


@pytest.mark.parametrize(
    ("arguments", "other"),
    [
        ([], "tp2"),
        (["--layout", "tp2"], "dp2"),
        (["--ranks", "4", "--widths", "2"], "tp2+tp2"),
        (["--ranks", "4", "--widths", "2", "--layout", "tp2+tp2"], "dp4"),
        (["--ranks", "1"], None),
        (["--weight-parts", "2", "--borrow", "none"], None),
        (["--weight-parts", "2"], "dp2"),
    ],
)
def test_the_layout_to_try_is_another_one(arguments: list[str], other: str | None) -> None:
    assert other_layout(build_config(parse_arguments(["up", *arguments]), MACHINE)) == other


@pytest.mark.parametrize("words", [[], ["key"], ["config"]])
def test_a_command_alone_shows_what_there_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "usage: aileron" in capsys.readouterr().out


def test_doctor_and_plan_take_each_other_s_words() -> None:
    for command in ("doctor", "plan"):
        by_word = parse_arguments([command, "a/b", "--gpus", "2"])
        by_option = parse_arguments([command, "--model", "a/b", "--ranks", "2"])
        for each in (by_word, by_option):
            assert each.model == "a/b"
            assert 2 in (each.ranks, getattr(each, "gpus", None))


def test_processes_say_how_many_requests_they_wait_for() -> None:
    draining = {"event": "gateway_draining", "limit_s": 30.0}
    assert words_for({**draining, "requests": 2}) == "waiting up to 30 s for 2 requests to end"
    assert words_for({**draining, "requests": 1}) == "waiting up to 30 s for 1 request to end"
    assert words_for({**draining, "requests": 0}) is None
