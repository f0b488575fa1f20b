"""Bills of materials list what images install, and checks of unused code find some."""

import json
import re
from pathlib import Path

import pytest

from tests.harness.cells.servers import ROOT
from tools.sbom import LOCKS, SCHEMA, product_lines, write
from tools.unused_code import unused

pytestmark = pytest.mark.timeout(300)

PACKAGES_MIN = 100


def name_of(line: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=]", line)[0]).lower()


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return dict(zip(LOCKS, write(tmp_path_factory.mktemp("sbom")), strict=True))


@pytest.mark.parametrize("target", LOCKS)
def test_a_bill_lists_each_package_of_the_image(bills: dict[str, Path], target: str) -> None:
    """`write` has the tool compare each bill with the schema of CycloneDX, or fails."""
    bill = json.loads(bills[target].read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", SCHEMA)
    assert bill["metadata"]["component"]["name"] == "aileron-serving"
    lines = product_lines(LOCKS[target])
    listed = {name_of(each["name"]): each for each in bill["components"]}
    assert len(lines) >= PACKAGES_MIN
    assert set(listed) == {name_of(line) for line in lines}
    for line in lines:
        part = listed[name_of(line)]
        assert f"=={part['version']}" in line
        hashes = {each["content"] for ref in part["externalReferences"] for each in ref["hashes"]}
        assert hashes == set(re.findall(r"--hash=sha256:(\S+)", line))


def test_tools_are_in_no_bill() -> None:
    for lock in LOCKS.values():
        names = {name_of(line) for line in product_lines(lock)}
        assert not names & {"pytest", "mypy", "mkdocs", "vulture", "hatchling"}
        assert {"pyzmq", "grpcio", "fastapi"} <= names


def test_unused_code_is_found(tmp_path: Path) -> None:
    for folder in ("comm_pool", "coordinator", "gateway", "kvadaptor", "loadgen", "worker"):
        (tmp_path / folder).mkdir()
    (tmp_path / "gateway" / "some.py").write_text("def forgotten() -> None:\n    pass\n")
    (tmp_path / "worker" / "other.py").write_text("def used() -> None:\n    pass\n\n\nused()\n")
    assert unused(tmp_path) == ["gateway/some.py:1: unused function forgotten"]


def test_the_checks_are_part_of_make_check() -> None:
    """`make test` begins with it, and CI runs `make test`."""
    check = (ROOT / "Makefile").read_text().partition("\ncheck: ")[2].partition("\n\n")[0]
    assert "-m tools.unused_code" in check
    assert "deptry ." in check
