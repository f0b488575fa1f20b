"""What users of `vllm serve` type, and what becomes of it."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main, up
from coordinator.cli.arguments import parse_arguments
from coordinator.cli.errors import CliError
from coordinator.cli.launch import Machine, build_config
from coordinator.cli.up import CheckedFiles, write_keys
from coordinator.protocol import folders
from coordinator.protocol.config import Config
from coordinator.protocol.keys import hash_of, load_keys
from coordinator.protocol.model_files import ModelFiles


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def build(*words: str, gpus: int = 0) -> Config:
    machine = Machine(gpus, (20_001, 20_002, 20_003, 20_004), "/tmp/run", "/tmp/state")
    return build_config(parse_arguments(["serve", *words]), machine)


def test_a_model_and_bare_options() -> None:
    config = build("meta-llama/X", "--max-model-len", "32k", "--port", "9000", "--enforce-eager")
    assert config.model.path == "meta-llama/X"
    assert config.served_model_names == ("meta-llama/X",)
    assert config.model.engine_args == ("--max-model-len", "32k", "--enforce-eager")
    assert (config.gateway.host, config.gateway.port) == ("127.0.0.1", 9000)


@pytest.mark.parametrize(
    "words",
    [
        ["--dtype", "float16", "org/m", "--seed=3"],
        ["--model", "org/m", "--dtype", "float16", "--seed=3"],
        ["org/m", "--", "--dtype", "float16", "--seed=3"],
    ],
)
def test_a_model_may_stand_anywhere(words: list[str]) -> None:
    config = build(*words)
    assert config.model.path == "org/m"
    assert config.model.engine_args == ("--dtype", "float16", "--seed=3")


@pytest.mark.parametrize(
    ("words", "ranks", "layout"),
    [
        (["-tp", "2"], 2, "tp2"),
        (["-tp", "2", "-dp", "2"], 4, "tp2+tp2"),
        (["--tensor_parallel_size=4"], 4, "tp4"),
        (["--data-parallel-size", "4"], 4, "dp4"),
        (["-tp", "2", "--ranks", "8"], 8, "tp2+tp2+tp2+tp2"),
        (["-tp", "2", "--layout", "dp2"], 2, "dp2"),
        (["-tp", "1", "-pp", "1"], 1, "dp1"),
        (["-pp", "2"], 2, "pp2"),
        (["-pp", "2", "-dp", "2"], 4, "pp2+pp2"),
        (["-pp", "2", "--device", "cpu"], 2, "pp2"),
        (["-pp", "2", "-dp", "2", "--device", "cpu"], 4, "pp2+pp2"),
        (["-pp", "2", "-tp", "2", "--device", "cpu"], 4, "pp2tp2"),
        (["-pp", "1"], 8, "dp8"),
        ([], 8, "dp8"),
    ],
)
def test_parallel_sizes_become_ranks_and_layout(words: list[str], ranks: int, layout: str) -> None:
    config = build("m", *words, gpus=8)
    assert (config.cell.ranks, config.cell.layout) == (ranks, layout)
    assert config.model.engine_args == ()


def test_wide_stages_on_gpus_are_refused_with_what_can_be_used() -> None:
    with pytest.raises(CliError, match="pp2tp2 has stages of 2 ranks, which only CPU ranks run"):
        build("m", "-pp", "2", "-tp", "2", gpus=8)


def test_several_names_and_own_options() -> None:
    config = build(
        *(
            "--served-model-name",
            "a",
            "b",
            "a",
            "--weight-parts",
            "2",
            "--borrow",
            "all",
            "-tp",
            "2",
            "/models/x",
        ),
        *("--whole-layers=auto", "--policy", "fixed", "-asc", "1", "--enable-expert-parallel"),
    )
    assert config.served_model_names == ("a", "b")
    assert config.cell.weight_parts == 2
    assert config.cell.borrow == "all"
    assert config.cell.whole_layers == "auto"
    assert config.model.engine_args == ()
    assert build("/models/x").served_model_names == ("/models/x",)


def test_up_serves_an_id_as_it_is() -> None:
    for path, name in (
        ("meta-llama/X", "meta-llama/X"),
        ("X", "X"),
        ("/models/X/", "X"),
        ("./models/X", "X"),
        ("a/b/X", "X"),
    ):
        assert Config.model_validate({"model": {"path": path}}).served_model_name == name


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_arguments(["serve", "m", "--api-key", "k", "l"]).api_keys == ("k", "l")
    assert parse_arguments(["serve", "m"]).api_keys == ()
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert parse_arguments(["serve", "m"]).api_keys == ("theirs",)
    assert parse_arguments(["serve", "m", "--api-key", "k"]).api_keys == ("k",)
    assert parse_arguments(["serve", "m", "--keys", "f"]).api_keys == ()
    file = write_keys(tmp_path / "keys.yaml", ("k", "k", "ключ"))
    assert set(load_keys(file)) == {hash_of("k"), hash_of("ключ")}
    assert file.stat().st_mode & 0o777 == 0o600
    assert "- hash: sha256" in file.read_text()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder of temporary files; signals do afterwards what they did before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Folders of tests may have longer names than any socket may have.
    monkeypatch.setattr(folders, "UNIX_PATH_BYTES_MAX", 300)
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    yield tmp_path
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_refused_start_leaves_no_key(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/where", "--api-key", "k"]) == 2
    assert "/no/where is no folder" in capsys.readouterr().err
    assert main(["serve", "m", "--api-key", "k", "--layout", "tp3"]) == 2
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_cell_runs_leaves_no_key(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    found: list[Path] = []

    def check_files(_: Config) -> None:
        found.extend(temporary.glob("*/keys.yaml"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(up, "check_files", check_files)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m", "--api-key", "k"])
    assert ended.value.code == 128 + number
    assert len(found) == 1
    assert list(temporary.iterdir()) == []


def test_a_cell_that_was_killed_is_no_success(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(*_: Any, **__: Any) -> tuple[str, bool]:
        return "", True

    files = CheckedFiles(ModelFiles("m", None, None, is_complete=False), only_cached=False)
    monkeypatch.setattr(up, "check_files", lambda _: files)
    monkeypatch.setattr(up, "_serve", serve)
    assert main(["serve", "m", "--port", "0", "--admin-port", "0"]) == 130
    assert list(temporary.iterdir()) == []


def test_the_command_to_type_is_the_one_beside_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` runs the package by `.venv/bin/python -m`, from the folder above."""
    command = tmp_path / ".venv" / "bin" / "aileron"
    command.parent.mkdir(parents=True)
    command.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["/some/coordinator/cli/__main__.py"])
    monkeypatch.setattr(sys, "executable", str(command.with_name("python")))
    assert up.own_command() == ".venv/bin/aileron"
    command.unlink()
    assert up.own_command() == f"{command.with_name('python')} -m coordinator.cli"


def test_a_cell_that_fails_keeps_its_logs_alone(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(config: Config, *_: Any, **__: Any) -> tuple[str, bool]:
        (Path(config.run_dir) / "worker.log").write_text("lost")
        return "the cell failed.", False

    files = CheckedFiles(ModelFiles("m", None, None, is_complete=False), only_cached=False)
    monkeypatch.setattr(up, "check_files", lambda _: files)
    monkeypatch.setattr(up, "_serve", serve)
    words = ["serve", "m", "--api-key", "k", "--port", "0", "--admin-port", "0"]
    assert main(words) == 1
    assert "logs are kept in" in capsys.readouterr().err
    assert [path.name for path in temporary.glob("*/*")] == ["worker.log"]


def test_a_file_of_options(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: org/m\ntensor-parallel-size: 2\nmax-num-seqs: 8\nserved-model-name: [a, b]\n"
        "enable-auto-tool-choice: true\nenforce-eager: false\n"
        "compilation_config: {mode: 0}\n"
    )
    config = build("--config", str(file), "--max-num-seqs", "9")
    assert (config.model.path, config.cell.layout) == ("org/m", "tp2")
    assert config.served_model_names == ("a", "b")
    assert config.model.engine_args == (
        *("--max-num-seqs", "8", "--enable-auto-tool-choice", "--no-enforce-eager"),
        *("--compilation_config", '{"mode": 0}', "--max-num-seqs", "9"),
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name the model: aileron serve MODEL"),
        (["m", "n"], "'n' is no option: name one model"),
        (["m", "--max-modle-len", "3"], "no option --max-modle-len; did you mean --max-model-len?"),
        (["m", "--rank", "3"], "no option --rank; did you mean --ranks?"),
        (["m", "-tp", "3"], "a power of two"),
        (["m", "-tp", "two"], "--tensor-parallel-size takes a whole number"),
        (["m", "-tp", "0"], "use 1 or more"),
        (["m", "-tp", "None"], "--tensor-parallel-size takes a whole number, not 'None'"),
        (["m", "-dp", "_"], "--data-parallel-size takes a whole number, not '_'"),
        (["m", "-tp.x", "2"], "--tensor-parallel-size takes a whole number and has no parts"),
        (["m", "-asc", "None"], "--api-server-count takes a whole number, not 'None'"),
        (["m", "--api-server-count=-1"], "--api-server-count -1: use 1 or more"),
        (["m", "-asc", "9" * 5_000], "--api-server-count takes a whole number"),
        (["m", "-pp", "3"], "--pipeline-parallel-size 3: groups are as wide as a power of two"),
        (["m", "-tp", "2", "--ranks", "3"], "--ranks 3 are not"),
        (["m", "-tp", "2", "-dp", "2", "--ranks", "8"], "--ranks 8 are not 2 groups of 2"),
        (["m", "--api-key", ""], "--api-key is empty"),
        (["m", "--api-key", "k", "--keys", "f"], "exclude each other"),
        (["m", "--host", "0.0.0.0"], "gateway.keys_file"),
        (["m", "--config", "/no/file"], "cannot read /no/file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(CliError) as refused:
        build(*words)
    assert refused.value.status == 2
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["up", "--max-model-len", "9"], "put it after --, or use `aileron serve`"),
        (["up", "--enforce-eager"], "put it after --, or use `aileron serve`"),
        (["up", "--modle", "x"], "no option --modle; did you mean --model?"),
        (["status", "--jsn"], "did you mean --json? See `aileron status --help`."),
        (["up", "stray"], "'stray' is no option of `aileron up`"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_help_names_what_vllm_s_options_become(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert "aileron serve MODEL" in said
    assert "--weight-parts" in said
