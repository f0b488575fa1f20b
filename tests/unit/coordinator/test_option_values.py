"""Values of vLLM's options that are refused before a process imports it."""

from pathlib import Path

import pytest

from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.engine_options import GivenOption, OptionError
from coordinator.protocol.model_check import checked_options
from coordinator.protocol.option_values import check_paths


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs 0: use 1 or more"),
        (["--max-num-batched-tokens", "-1"], "-tokens -1: use 1 or more"),
        (
            ["--max-num-seqs", "8", "--max-num-batched-tokens", "4"],
            "--max-num-batched-tokens 4 is less than --max-num-seqs 8",
        ),
        (["--hf-overrides", '{"a": secret}'], "--hf-overrides takes JSON, and this is none from"),
        (["--default-chat-template-kwargs={bad"], "takes JSON"),
    ],
)
def test_a_value_that_cannot_be(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_options(check_config({"model": {"path": "x", "engine_args": words}}))
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


def test_values_that_vllm_takes_pass() -> None:
    words = [
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "2k", "--block-size", "16"),
        *("--hf-overrides", '{"a": 1}', "--compilation-config", "3"),
    ]
    options = checked_options(check_config({"model": {"path": "x", "engine_args": words}}))
    assert len(options) == 5


def test_a_path_of_this_machine_is_looked_for(tmp_path: Path) -> None:
    for name in ("--chat-template", "--tool-parser-plugin"):
        path = tmp_path / "file"
        option = GivenOption(name, (str(path),), (name, str(path)))
        with pytest.raises(OptionError, match="is no file: check the path"):
            check_paths([option])
        path.touch()
        check_paths([option])
        path.unlink()
    for text in ("{{ messages[0].content }}/", "template_of_vllm.jinja"):
        check_paths([GivenOption("--chat-template", (text,), ("--chat-template", text))])
