"""What the lock files install: one exact version of each package, under licences that fit."""

import re
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.with_hashes import main

ROOT = Path(__file__).resolve().parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[a-z,]+\])?==([0-9][A-Za-z0-9.+!_-]*)( *;.*)?")
COPYLEFT = re.compile(r"\b(AGPL|SSPL|GPL|GNU (Affero )?General Public)", re.IGNORECASE)
LESSER = re.compile(r"LGPL|Lesser|classpath|linking exception", re.IGNORECASE)


HASHES = re.compile(r"( --hash=sha256:[0-9a-f]{64})+")


def entries(lock: Path) -> list[str]:
    lines = [line.split(" #")[0].strip() for line in lock.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def pins(lock: Path) -> list[str]:
    return [line.partition(" --hash=")[0] for line in entries(lock)]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_file_is_known_by_its_hash(lock: Path) -> None:
    """Otherwise `pip install --require-hashes` refuses the whole file."""
    hashes = [(line, line[len(line.partition(" --hash=")[0]) :]) for line in entries(lock)]
    assert not [line for line, told in hashes if HASHES.fullmatch(told) is None]


def test_hashes_are_put_into_a_lock_file(tmp_path: Path) -> None:
    lock, one, other = tmp_path / "some.lock", "a" * 64, "b" * 64
    lock.write_text(f"# why\nSome_Name[x]==1.0 --hash=sha256:{other}\nplain==2\n")
    hashed = f"plain==2 \\\n    --hash=sha256:{one}\nsome-name==1.0 \\\n"
    hashed += f"    --hash=sha256:{other} \\\n    --hash=sha256:{one}\n"
    main(lock, hashed)
    both = f"--hash=sha256:{one} --hash=sha256:{other}"
    assert lock.read_text() == f"# why\nSome_Name[x]==1.0 {both}\nplain==2 --hash=sha256:{one}\n"
    with pytest.raises(SystemExit, match="Some_Name"):
        main(lock, "plain==2\n")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_has_one_exact_version(lock: Path) -> None:
    matches = [(line, PIN.fullmatch(line)) for line in pins(lock)]
    assert len(matches) > 50
    assert not [line for line, match in matches if match is None]
    names = [re.sub(r"[-_.]+", "-", match[1]).lower() for _, match in matches if match]
    assert len(names) == len(set(names)), "a package is there twice"


NOT_LOCKED = {"torchaudio", "torchcodec", "torchvision"}
"""Text needs none of them; see the head of cpu.lock."""


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0"])
@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_what_packages_need_on_the_oldest_patch_release_is_locked(lock: Path, python: str) -> None:
    """The locks are installed without dependencies, also by a Python that is older than this."""
    of_python = {"python_full_version": python, "python_version": python[:4], "extra": ""}
    names = {canonicalize_name(re.split(r"[\[=]", line)[0]) for line in pins(lock)}
    known, missing = 0, []
    for name in names:
        try:
            needs = [Requirement(each) for each in requires(name) or ()]
        except PackageNotFoundError:
            continue
        wanted = [each for each in needs if not each.marker or each.marker.evaluate(of_python)]
        known += len(wanted)
        absent = {canonicalize_name(each.name) for each in wanted} - names - NOT_LOCKED
        missing += [f"{each}, for {name}" for each in sorted(absent)]
    assert known > 100
    assert not missing


def test_no_package_that_is_installed_here_is_under_a_copyleft_licence() -> None:
    known, refused = 0, []
    for line in pins(ROOT / "requirements" / "cpu.lock"):
        match = PIN.fullmatch(line)
        assert match is not None
        try:
            told = metadata(match[1])
        except PackageNotFoundError:
            continue
        licences = [told["License-Expression"] or (told["License"] or "")[:80]]
        licences += [each for each in told.get_all("Classifier", []) if "License" in each]
        text = " | ".join(licences)
        known += bool(text.strip(" |"))
        if COPYLEFT.search(LESSER.sub("", text)) and "MIT" not in text and "BSD" not in text:
            refused.append(f"{match[1]}: {text}")
    assert known > 50
    assert not refused
