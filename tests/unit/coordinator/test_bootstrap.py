"""The set-up script before anything is installed: what it needs, says and leaves alone."""

import ast
import sys
from pathlib import Path

import pytest

from tools import bootstrap

SOURCE = Path(bootstrap.__file__)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "gpu"):
        (tmp_path / "requirements" / f"{name}.lock").write_text("# pins\ntorch==2.13.0\nrich==1\n")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / ".venv" / ".ready")
    return tmp_path


def finish(root: Path, lock: str) -> None:
    (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (root / ".venv" / "bin" / "python").touch()
    stamp = bootstrap._fingerprint(root / "requirements" / lock)
    (root / ".venv" / ".ready").write_text(stamp)


def test_it_is_plain_python_with_the_standard_library_only() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_a_finished_set_up_does_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(root, "cpu.lock")
    assert bootstrap.main([]) == 0
    assert bootstrap.main(["--device", "auto"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("changed", ["requirements/cpu.lock", "pyproject.toml"])
def test_a_changed_lock_is_noticed(root: Path, changed: str) -> None:
    before = bootstrap._fingerprint(root / "requirements" / "cpu.lock")
    (root / changed).write_text("torch==3\n")
    assert bootstrap._fingerprint(root / "requirements" / "cpu.lock") != before


def test_the_other_device_has_another_stamp(root: Path) -> None:
    locks = root / "requirements"
    assert bootstrap._fingerprint(locks / "cpu.lock") != bootstrap._fingerprint(locks / "gpu.lock")


def test_without_a_compiler_one_sentence_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(root))
    assert bootstrap.main([]) == 2
    said = capsys.readouterr().err
    assert "no C compiler" in said
    assert said.count("\n") == 1


def test_an_unfit_python_without_another_one_says_so(
    root: Path,
) -> None:
    with pytest.raises(bootstrap.SetupError, match=r"install Python 3\.1 or 3\.2"):
        bootstrap._find_python(((3, 1), (3, 2)))


def _tools(root: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    """Leave only a compiler and an nvidia-smi that lists these GPUs on PATH."""
    for name, text in (("gcc", ""), ("nvidia-smi", f"echo '{listed}'")):
        (root / name).write_text(f"#!/bin/sh\n{text}\n")
        (root / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(root))


@pytest.mark.parametrize("listed", ["", "No devices were found", "NVIDIA-SMI has failed"])
def test_no_gpu_is_one_sentence_before_anything_is_made(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], listed: str
) -> None:
    _tools(root, monkeypatch, listed)
    assert bootstrap.main(["--device", "cuda"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("set-up: nvidia-smi lists no GPU here: install NVIDIA's driver")
    assert (said.err.count("\n"), said.out) == (1, "")
    assert not bootstrap.VENV.exists()


def test_gpus_need_the_python_of_their_lock(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tools(root, monkeypatch, "GPU 0: NVIDIA H200 (UUID: GPU-1)")
    finish(root, "cpu.lock")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    assert bootstrap.main(["--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "cannot be used for GPUs and no Python 3.12 is on PATH: install Python 3.12" in said
    assert "make PYTHON=/path/to/python3.12 DEVICE=cuda setup" in said
    assert said.count("\n") == 1
    assert (bootstrap.VENV / "bin" / "python").exists()


def test_readme_names_the_python_of_the_gpu_lock() -> None:
    """The pages and the set-up must agree."""
    names = {f"Python {major}.{minor}" for major, minor in bootstrap.CUDA_PYTHONS}
    for page in ("README.md", "docs/quickstart.md", "docs/limits.md"):
        text = " ".join((SOURCE.parent.parent / page).read_text().split())
        assert all(name in text for name in names), page
    readme = (SOURCE.parent.parent / "README.md").read_text()
    assert "(for GPUs Python 3.12)" in readme


def test_torch_is_taken_from_the_lock(root: Path) -> None:
    assert bootstrap._pinned(root / "requirements" / "cpu.lock", "torch") == "torch==2.13.0"
    with pytest.raises(bootstrap.SetupError, match="does not pin numpy"):
        bootstrap._pinned(root / "requirements" / "cpu.lock", "numpy")


def test_advice_names_the_variable() -> None:
    advice = bootstrap._torch_advice("torch==2.13.0")
    assert "AILERON_TORCH_INDEX=https://download.pytorch.org/whl/cpu" in advice


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_real_locks_pin_everything_once(name: str) -> None:
    lock = SOURCE.parent.parent / "requirements" / f"{name}.lock"
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    names = [line.split("==")[0].lower() for line in lines]
    assert all(line.count("==") == 1 for line in lines)
    assert len(set(names)) == len(names)
    assert {"torch", "grpcio", "hatch-vcs", "hatchling", "editables", "pytest"} <= set(names)
    if name == "cpu":
        assert not {"torchvision", "torchaudio", "torchcodec", "vllm"} & set(names)


def test_what_an_earlier_name_installed_leaves(root: Path) -> None:
    """Otherwise its script and its metadata would stay beside this one's."""
    bootstrap._create_venv()
    (site,) = bootstrap.VENV.glob("lib/python*/site-packages")
    earlier = site / "aileron-0.1.0.dist-info"
    earlier.mkdir()
    (earlier / "METADATA").write_text("Metadata-Version: 2.1\nName: aileron\nVersion: 0.1.0\n")
    (earlier / "INSTALLER").write_text("pip\n")
    files = [f"{earlier.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")]
    (earlier / "RECORD").write_text("".join(files))
    bootstrap._uninstall(bootstrap.FORMER_NAME)
    assert not earlier.exists()
    bootstrap._uninstall(bootstrap.FORMER_NAME)
