"""Every command of README.md runs: here, as README.md has it, or in a test that the table names.

Commands here differ from README.md's in three ways: ports are free ones, `0.0.0.0` is loopback, and
`.venv/bin/aileron` is this checkout's.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.demo.run_demo import play
from tests.harness.cells.product import MODEL_NAME, Product, started
from tests.harness.cells.servers import ROOT
from tests.harness.runs.definitions import names_in

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("ranks-product"),
]

COMMAND_LIMIT_S = 120
README_URL = "http://127.0.0.1:8000"
AILERON = ".venv/bin/aileron"
HERE = "tests/integration/test_readme.py"

UP_MODEL = "make up MODEL=/path/or/hf-id DEVICE=cuda"
TORCH_INDEX = "export AILERON_TORCH_INDEX=https://download.pytorch.org/whl/cpu"
CHAT = (
    f"curl {README_URL}/v1/chat/completions -H 'Content-Type: application/json' "
    '-d \'{"model": "aileron-demo", "messages": [{"role": "user", "content": "What is a list?"}], '
    '"stream": true}\''
)
STATUS = f"{AILERON} status --once"
SWITCH = f"{AILERON} switch tp2"
SWITCH_BACK = f"{AILERON} switch dp2 --carry pause"
EXPLAIN = f"{AILERON} explain --last 3"
ADAPTIVE = f"{AILERON} up --ranks 4 --policy adaptive"
KEY = f"{AILERON} key new --tenant acme --file keys.yaml --requests-per-minute 600"
KEYED = f"{AILERON} up --host 0.0.0.0 --keys keys.yaml"
VENV = "python3 -m venv aileron-env"
PIP = 'aileron-env/bin/pip install ".[cpu]" --extra-index-url https://download.pytorch.org/whl/cpu'
UP_INSTALLED = "aileron-env/bin/aileron up"
CHART = "helm install chat helm --values helm/values/kind.yaml"
FIRST_SWITCH = ("layout   dp2", "tp2 serves", "dp2 serves", "asked by operator")
"""What the commands of the quick start's first switch print, among other lines."""
PYTHON = "python"
"""Stands for the one block of Python."""

OPERATOR = f"{HERE}::test_operator_commands"
WHEEL = "tests/install/test_wheel.py::test_it_serves_the_demo_from_its_own_files"
BOOTSTRAP = "tests/unit/coordinator/test_bootstrap.py"
RUN_BY: dict[str, tuple[str, ...]] = {
    "make up": (
        f"{HERE}::test_make_runs",
        f"{BOOTSTRAP}::test_a_finished_set_up_does_nothing",
        "tests/integration/test_up.py::test_progress_is_shown_and_requests_are_served",
    ),
    "make test": (
        f"{HERE}::test_make_runs",
        "tests/unit/harness/test_lanes.py::"
        "test_the_first_worker_takes_groups_with_ranks_and_the_others_the_rest",
    ),
    TORCH_INDEX: (f"{BOOTSTRAP}::test_advice_names_the_variable",),
    UP_MODEL: (f"{HERE}::test_make_runs", "tests/integration/test_families.py::test_family"),
    CHAT: (f"{HERE}::test_first_request",),
    PYTHON: (f"{HERE}::test_python_client",),
    STATUS: (OPERATOR,),
    SWITCH: (OPERATOR,),
    SWITCH_BACK: (OPERATOR,),
    EXPLAIN: (OPERATOR,),
    "make demo": (f"{HERE}::test_make_runs", f"{HERE}::test_demo"),
    ADAPTIVE: (f"{HERE}::test_adaptive_policy",),
    KEY: (f"{HERE}::test_keys",),
    KEYED: (f"{HERE}::test_keys",),
    VENV: (WHEEL,),
    PIP: (WHEEL,),
    UP_INSTALLED: (WHEEL,),
    CHART: ("tests/helm/test_manifests.py::test_lint_finds_nothing",),
    "make docs": ("tests/docs/test_site.py::test_every_page_is_there",),
}
"""Each command of README.md -> the tests that run it."""
MAKE_RUNS = {
    "make up": f"{AILERON} up --port 8000 --device cpu",
    UP_MODEL: f"{AILERON} up --port 8000 --device cuda --model /path/or/hf-id",
    "make test": ".venv/bin/python -m pytest -m ",
    "make demo": ".venv/bin/python -m tests.demo.run_demo --device cpu",
}
"""Command -> the command line that it runs last."""

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:make|export) [^`]+)`")
"""Commands in the text; `aileron switch` and the like stand there for what they do."""


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in FENCED.findall(text) if name == language]


def commands_in(text: str) -> set[str]:
    """The commands of a document's shell blocks and text, without comments and line breaks."""
    lines = "".join(blocks(text, "")).replace("\\\n", " ").splitlines()
    shell = {" ".join(re.sub(r"(^|\s)# .*", "", line).split()) for line in lines}
    inline = {" ".join(command.split()) for command in INLINE.findall(FENCED.sub("", text))}
    return (shell | inline | {PYTHON} if blocks(text, PYTHON) else shell | inline) - {""}


README = (ROOT / "README.md").read_text()


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command that finds the cell whose files are in this folder."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_RUNTIME_DIR": str(folder),
        "no_proxy": "127.0.0.1",
    }


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder; returns its standard output."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def aileron(command: str, folder: Path) -> str:
    """Run a command of README.md that begins with `AILERON`."""
    program, *words = shlex.split(command)
    assert program == AILERON
    return run([sys.executable, "-m", "coordinator.cli", *words], folder)


def options_of(command: str, folder: Path) -> list[str]:
    """The options of an `aileron up` of README.md, on loopback and with its file's full path."""
    program, name, *options = shlex.split(command)
    assert (program, name) == (AILERON, "up")
    instead = {"0.0.0.0": "127.0.0.1", "keys.yaml": str(folder / "keys.yaml")}
    return [instead.get(word, word) for word in options]


def chat_status(url: str, key: str | None = None) -> int:
    """The status of a short chat request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    message = {"role": "user", "content": "What is a list?"}
    body = {"model": MODEL_NAME, "messages": [message], "max_tokens": 4}
    url = f"{url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).status_code


@pytest.fixture(scope="module")
def serving(shared_product: Product) -> Product:
    """The product that modules share, in the layout that `make up` starts with."""
    shared_product.switch("dp2", "recompute")
    return shared_product


def test_each_command_is_in_the_table() -> None:
    assert commands_in(README) == set(RUN_BY)
    assert len(blocks(README, PYTHON)) == 1
    named = {test for tests in RUN_BY.values() for test in tests}
    missing = [
        test
        for test, (path, name) in ((test, test.split("::")) for test in sorted(named))
        if not (ROOT / path).is_file() or name not in names_in(ROOT / path)
    ]
    assert not missing, "these tests do not exist"


def test_commands_are_found() -> None:
    text = "`make a\nb=1`, `c`\n\n```\n# d\ne -f \\\n  'g'   # h\n\n```\n```python\ni\n```\n"
    assert commands_in(text) == {"make a b=1", "e -f 'g'", PYTHON}
    assert commands_in("```\nj\n```\n") == {"j"}


@pytest.mark.parametrize("command", MAKE_RUNS)
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_runs(command: str) -> None:
    program, *words = shlex.split(command)
    unset = {"PORT", "RANKS", "MODEL", "DEVICE", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    ended = subprocess.run(
        [program, "--dry-run", "--no-print-directory", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in unset},
        capture_output=True,
        text=True,
        check=True,
    )
    *_, last = ended.stdout.splitlines()
    assert " ".join(last.split()).startswith(MAKE_RUNS[command])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_first_request(serving: Product, tmp_path: Path) -> None:
    """The block itself, in a shell: its quotes and line breaks too."""
    (block,) = (block for block in blocks(README, "") if block.startswith("curl "))
    streamed = run(["sh", "-c", block.replace(README_URL, serving.url)], tmp_path)
    assert '"delta"' in streamed
    assert streamed.rstrip().endswith("data: [DONE]")


def test_python_client(serving: Product, tmp_path: Path) -> None:
    (block,) = blocks(README, PYTHON)
    assert README_URL in block
    assert run([sys.executable, "-c", block.replace(README_URL, serving.url)], tmp_path).strip()


def test_operator_commands(serving: Product) -> None:
    """As they follow each other in README.md; they find the cell by themselves."""
    folder = serving.log_file.parent
    status = aileron(STATUS, folder)
    assert f"model    {MODEL_NAME} on 2 cpu ranks" in status
    assert "layout   dp2" in status
    assert "tp2 serves" in aileron(SWITCH, folder)
    assert "dp2 serves" in aileron(SWITCH_BACK, folder)
    assert serving.get("/admin/switches?last=1")["switches"][0]["carry"] == "pause"
    assert aileron(EXPLAIN, folder).count("asked by operator") >= 2


def of_page(page: str, heading: str) -> str:
    """The shell block under a heading of a page in docs/."""
    text = (ROOT / "docs" / page).read_text()
    (block,) = blocks(text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0], "sh")
    return block


def test_quick_start(serving: Product, tmp_path: Path) -> None:
    """The request, and the commands of the first switch."""
    block = of_page("quickstart.md", "The first request")
    if shutil.which("curl") is not None:
        answer = run(["sh", "-c", block.replace(README_URL, serving.url)], tmp_path)
        assert json.loads(answer)["choices"][0]["message"]["content"]
    folder = serving.log_file.parent
    answers = [
        run(
            [sys.executable, "-m", "coordinator.cli", *shlex.split(line, comments=True)[1:]], folder
        )
        for line in of_page("quickstart.md", "The first switch").splitlines()
    ]
    assert [text in each for text, each in zip(FIRST_SWITCH, answers, strict=True)] == [True] * 4


def test_load_of_the_tuning_page(serving: Product, tmp_path: Path) -> None:
    """Two runs of some seconds, and their comparison."""
    page = (ROOT / "docs" / "tuning.md").read_text()
    measure, compare = blocks(page, "sh")[0].splitlines()
    for name in ("before.json", "after.json"):
        words = shlex.split(measure.replace(README_URL, serving.url))
        words[words.index("--duration") + 1] = "2"
        words[words.index("--out") + 1] = name
        run([sys.executable, *words[1:]], tmp_path)
    assert "before" in run([sys.executable, *shlex.split(compare)[1:]], tmp_path)


async def test_demo(serving: Product, capsys: pytest.CaptureFixture[str]) -> None:
    """What `make demo` does once its cell serves."""
    assert await play(serving.url, serving.admin, 2) == 0
    assert "every stream was complete." in capsys.readouterr().out


def test_keys(tmp_path: Path) -> None:
    """With one rank, which starts sooner; the first command prints the key last."""
    key = aileron(KEY, tmp_path).split()[-1]
    with started(tmp_path, [*options_of(KEYED, tmp_path), "--ranks", "1"]) as running:
        assert chat_status(running.url) == 401
        assert chat_status(running.url, key) == 200
    assert running.process.returncode == 0


def test_adaptive_policy(tmp_path: Path) -> None:
    with started(tmp_path, options_of(ADAPTIVE, tmp_path)) as running:
        assert chat_status(running.url) == 200
        status = running.get("/admin/status")
        assert (len(status["ranks"]), status["policy"]) == (4, "adaptive")
    assert running.process.returncode == 0
