"""The backup of docs/upgrade.md, run as it stands while a gateway has the database open."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from gateway.batches.setup import DATABASE, FILES_FOLDER
from gateway.batches.sqlite_store import SqliteStore
from gateway.batches.terms import FileRecord
from tests.harness.cells.servers import ROOT

FOLDER = Path(".aileron", "batches", "aileron-demo")
PAGE = (ROOT / "docs" / "upgrade.md").read_text()
RECORD = FileRecord(
    id="file-1",
    tenant="acme",
    filename="in.jsonl",
    purpose="batch",
    bytes=3,
    created_at=1,
    expires_at=1_000,
)


@pytest.mark.skipif(
    shutil.which("sqlite3") is None, reason="NOT TESTED: sqlite3 is not on PATH (Debian: sqlite3)."
)
def test_a_backup_has_records_and_files(tmp_path: Path) -> None:
    (block,) = re.findall(r"```sh\n(sqlite3 .*?)```", PAGE, re.DOTALL)
    folder = tmp_path / FOLDER
    store = SqliteStore(folder / DATABASE)
    store.add_file(RECORD)
    (folder / FILES_FOLDER).mkdir()
    (folder / FILES_FOLDER / RECORD.id).write_text("{}\n")
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["sh", "-ec", block], cwd=tmp_path, env=environment, check=True)
    store.close()
    copy = SqliteStore(tmp_path / "backup.sqlite3")
    assert copy.file("acme", RECORD.id) == RECORD
    copy.close()
    with tarfile.open(tmp_path / "files.tar.gz") as archive:
        names = [name.removeprefix("./") for name in archive.getnames()]
    assert f"{FILES_FOLDER}/{RECORD.id}" in names
    assert not [name for name in names if DATABASE in name]
