"""Every block of the documentation is run or parsed: commands by the parsers that read them.

Commands of README.md run for real (tests/integration/test_readme.py), and other pages repeat them.
Here every command of ours goes through its own parser, so that no page has an option that is not
there; a shell parses the rest. YAML is read as the configuration that it is a part of.
"""

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.cli.arguments import parse_arguments
from coordinator.cli.errors import CliError
from coordinator.protocol.config import Config, ConfigError, check_config
from loadgen.options import build_parser
from tests.harness.cells.servers import ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "loadgen" / "README.md",
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh")
FREE_TEXT = ("text", "mermaid", "console")
"""Figures, forms of command lines, which their page takes from the parsers, and commands with
output, which tests of their pages run."""
BLOCKS_MIN, COMMANDS_MIN = 45, 60
OTHERS = {
    *("apt-get", "cd", "cosign", "curl", "docker", "export", "gh", "git", "helm", "kubectl"),
    *("pip", "pip-audit", "python3", "sqlite3", "tar", "unzip", "uv", "vllm"),
}
"""Programs that are not ours: their lines are parsed by a shell, and their paths looked up."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    language: str
    text: str

    def commands(self) -> Iterator[list[str]]:
        """The commands of a block for a shell, as words."""
        for line in self.text.replace("\\\n", " ").splitlines():
            for part in re.split(r" && ", line):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words:
                    yield words


BLOCKS = [
    Block(page, language, text)
    for page in PAGES
    for language, text in FENCED.findall(page.read_text())
]
COMMANDS = [
    (block.page.name, words)
    for block in BLOCKS
    if block.language in SHELL
    for words in block.commands()
]


def test_blocks_are_found() -> None:
    assert len(BLOCKS) >= BLOCKS_MIN
    assert len(COMMANDS) >= COMMANDS_MIN
    known = {*SHELL, *FREE_TEXT, "python", "yaml", "json"}
    assert {block.language for block in BLOCKS} <= known
    fences = sum(page.read_text().count("\n```") for page in PAGES)
    assert fences == 2 * len(BLOCKS), "a block is not closed, or is indented"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_shell_parses_its_blocks(page: Path) -> None:
    for block in BLOCKS:
        if block.page == page and block.language in SHELL:
            ended = subprocess.run(
                ["sh", "-n", "-c", block.text], capture_output=True, text=True, check=False
            )
            assert ended.returncode == 0, ended.stderr + block.text


def check_aileron(words: list[str]) -> None:
    """Parse a command line of `aileron`, with what follows `--`."""
    if "--help" in words or "--version" in words:
        with pytest.raises(SystemExit) as ended:
            parse_arguments(words)
        assert not ended.value.code
    else:
        assert callable(parse_arguments(words).command)


def check_make(words: list[str]) -> None:
    """Find the target and the variables in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        pattern = rf"\$\((if \$\()?{name}\b" if equals else rf"^{re.escape(name)}:"
        assert re.search(pattern, makefile, re.MULTILINE), word


def check_python(words: list[str]) -> None:
    """Parse a `python -m loadgen`; other modules must be files of ours, or of pip and venv."""
    words = [word for word in words if word != "-P"]
    assert words[0] == "-m", words
    if words[1] == "loadgen":
        assert build_parser().parse_args(words[2:])
    elif words[1] not in ("venv", "pip", "pytest"):
        path = ROOT / words[1].replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def check_helm(words: list[str]) -> None:
    """Look the values files up."""
    for option, value in itertools.pairwise(words):
        if option == "--values" and value.startswith("helm/"):
            assert (ROOT / value).is_file()
    if words[0] == "install":
        assert (ROOT / words[2] / "Chart.yaml").is_file()


def check_docker(words: list[str]) -> None:
    """The target is a stage of the Dockerfile, and what runs in it is a command line of ours."""
    if words[0] == "build":
        target = words[words.index("--target") + 1]
        assert f" AS {target}\n" in (ROOT / "Dockerfile").read_text()
    elif words[0] == "run":
        (image,) = (at for at, word in enumerate(words) if re.search(r"(^|/)aileron:", word))
        check_aileron(words[image + 1 :])


def check_vllm(words: list[str]) -> None:
    """What vLLM takes, `aileron serve` takes too; for an open address it wants keys."""
    assert words[0] == "serve"
    check_aileron(words)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "aileron": check_aileron,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "helm": check_helm,
    "docker": check_docker,
    "vllm": check_vllm,
}


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}-{' '.join(w)[:50]}" for page, w in COMMANDS]
)
def test_a_command_is_one_that_exists(page: str, words: list[str]) -> None:
    del page
    program = re.sub(r"^(python3)\.\d+$", r"\1", words[0].rpartition("/")[2])
    if program in CHECKS:
        CHECKS[program](words[1:])
    else:
        assert program in OTHERS, f"{program}: add it to OTHERS, or a check for it"


def test_a_wrong_option_is_found() -> None:
    with pytest.raises(CliError):
        check_aileron(["up", "--rank", "x", "--no-such-option"])
    with pytest.raises(AssertionError):
        check_make(["no-such-target"])
    with pytest.raises(AssertionError):
        check_helm(["install", "chat", "helm", "--values", "helm/values/none.yaml"])


def of(language: str) -> list[Any]:
    """The blocks of one language, as parameters of a test."""
    found = [block for block in BLOCKS if block.language == language]
    return [pytest.param(block.text, id=f"{block.page.name}-{n}") for n, block in enumerate(found)]


@pytest.mark.parametrize("text", of("python"))
def test_python_compiles(text: str) -> None:
    compile(text, "page", "exec")


@pytest.mark.parametrize("text", of("json"))
def test_json_is_json(text: str) -> None:
    json.loads(text)


@pytest.mark.parametrize("text", of("yaml"))
def test_yaml_is_configuration(text: str) -> None:
    """The one exception is what another program reads: rules of prometheus-adapter."""
    data = yaml.safe_load(text)
    if set(data) == {"rules"}:
        return
    check_config({"model": {"path": "/model"}, **data})


def test_wrong_configuration_is_found() -> None:
    with pytest.raises(ConfigError, match=r"did you mean policy\.name"):
        check_config({"model": {"path": "/model"}, "policy": {"nam": "fixed"}})
    assert "rules" not in Config.model_fields
