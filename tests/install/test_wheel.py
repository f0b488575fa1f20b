"""The wheel as a user gets it: in an environment of its own, away from this checkout.

The environment has the locked packages of this one and of aileron the installed wheel alone. Every
process of it notes which files it opens, and runs in a folder with packages of the same names.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.harness.cells.servers import ROOT, free_port

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ranks-wheel"),
]

PACKAGES = ("comm_pool", "coordinator", "gateway", "kvadaptor", "loadgen", "worker")
BUILD_LIMIT_S = 100
COMMAND_LIMIT_S = 60
START_LIMIT_S = 180
FALLBACK = re.search(
    r'^fallback-version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
)
NOTE_OPENED = """
import os, re, sys
def note(event, arguments):
    if event == "open" and arguments and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if re.search({pattern!r}, path) and path not in seen:
            seen.add(path)
            os.write(log, (os.path.abspath(path) + chr(10)).encode())
seen = set()
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.set_inheritable(log, True)
sys.addaudithook(note)
"""
"""What each Python of the environment runs first: opened files of our packages go into a log."""


def build(folder: Path, into: Path, target: str, path: str = os.environ["PATH"]) -> Path:
    """Build the sources in a folder; returns the wheel or the archive."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    ended = subprocess.run(
        [*command, "--directory", str(into)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (built,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder to work in."""

    bin: Path
    folder: Path
    opened: Path

    def environment(self) -> dict[str, str]:
        """The variables of a process that knows nothing of this checkout."""
        own = {"PATH": f"{self.bin}:/usr/bin:/bin", "no_proxy": "127.0.0.1"}
        own |= dict.fromkeys(("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"), str(self.folder))
        return {**own, "HF_HUB_OFFLINE": "1"}

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of the environment in the folder."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )

    def sources(self) -> set[Path]:
        """The files of our packages that its processes opened, wherever those are."""
        return {Path(line) for line in self.opened.read_text().splitlines()}

    def of_the_checkout(self) -> list[Path]:
        """Those of the checkout; its environment has packages with folders of the same names."""
        own = (each for each in self.sources() if each.is_relative_to(ROOT))
        return [each for each in own if not each.is_relative_to(ROOT / ".venv")]


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Installed:
    environment, folder = tmp_path / "environment", tmp_path / "folder"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, cwd=tmp_path)
    opened = tmp_path / "opened"
    opened.touch()
    (site,) = environment.glob("lib/python*/site-packages")
    # A file that names a folder adds its packages, but not what an editable installation added.
    places = {sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))}
    (site / "locked.pth").write_text("\n".join(sorted(places)) + "\n")
    pattern = rf"/({'|'.join(PACKAGES)})/[^:]*$"
    (site / "note_opened.py").write_text(NOTE_OPENED.format(pattern=pattern, log=str(opened)))
    (site / "note_opened.pth").write_text("import note_opened\n")
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return Installed(environment / "bin", folder, opened)


def test_it_holds_the_product_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert wheel.name.startswith("aileron_serving-")
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    data = {Path(n).suffix for n in names if ".dist-info/" not in n and not n.endswith(".py")}
    assert data == {".html", ".json", ".safetensors"}
    assert not [name for name in names if re.search(r"(^|/)(tests?|tools|train\w*)[/.]", name)]
    assert not [name for name in names if re.search(r"/(test_|\.)|heldout|training", name)]


def test_the_command_runs_beside_folders_of_the_same_names(installed: Installed) -> None:
    version = installed.run("aileron", "--version")
    assert re.fullmatch(r"aileron \d+\.\d+\.\d+\S*\n", version.stdout), version.stderr
    for name in ("gateway", "coordinator", "rank"):
        # Each replaces itself by `python -P -m PACKAGE`, which says what is wrong with the file.
        ended = installed.run("aileron", name, "--config", "missing.yaml")
        assert "missing.yaml" in ended.stderr, ended.stderr
        assert (ended.returncode, "wrong package" in ended.stderr) == (2, False)
    assert installed.run("python", "-P", "-m", "loadgen", "--help").returncode == 0
    assert "wrong package" in installed.run("python", "-m", "loadgen", "--help").stderr
    assert not installed.of_the_checkout()


@pytest.fixture
def url(installed: Installed) -> Iterator[str]:
    """`aileron up` as README.md starts it after `pip install`, on free ports."""
    port, admin_port = free_port(), free_port()
    log = installed.folder / "up.log"
    options = ["--ranks", "1", "--port", str(port), "--admin-port", str(admin_port), "--verbose"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(installed.bin / "aileron"), "up", *options],
            cwd=installed.folder,
            env=installed.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not ready(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_it_serves_the_demo_from_its_own_files(
    installed: Installed, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        answer = client.chat.completions.create(
            model="aileron-demo",
            messages=[{"role": "user", "content": "What is a list?"}],
            max_tokens=8,
        )
    assert answer.choices[0].message.content
    opened = installed.sources()
    assert not installed.of_the_checkout()
    assert not [each for each in opened if each.is_relative_to(installed.folder)]
    # The log would hold them: each of these was opened where the wheel put it.
    for name in ("comm_pool", "coordinator", "gateway", "kvadaptor", "worker"):
        assert any(f"/site-packages/{name}/" in str(each) for each in opened), name


def copy_of_sources(folder: Path) -> Path:
    """What is tracked here, with its changes, without a repository."""
    archive = build(ROOT, folder / "archive", "sdist")
    # Python's own unpacking takes no filter before 3.11.4, and wants one after 3.12.
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    (sources,) = (each for each in folder.iterdir() if each.name.startswith("aileron_serving-"))
    return sources


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_version_is_that_of_the_tag(tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path)
    archived = sources.name.partition("-")[2]
    assert FALLBACK is not None
    # From the archive, whose version was fixed when it was made, and where nothing says a version.
    assert version_of(build(sources, tmp_path / "a", "wheel")) == archived
    (sources / "PKG-INFO").unlink()
    assert version_of(build(sources, tmp_path / "b", "wheel")) == FALLBACK[1]
    git(sources, "init", "--quiet")
    git(sources, "add", "--all", "--force")
    git(sources, "commit", "--quiet", "--message", "a")
    assert ".dev1+g" in version_of(build(sources, tmp_path / "c", "wheel"))
    git(sources, "tag", "v7.8.9")
    assert version_of(build(sources, tmp_path / "d", "wheel")) == "7.8.9"
    # A machine without git still builds.
    assert version_of(build(sources, tmp_path / "e", "wheel", "/nowhere")) == FALLBACK[1]
