"""`python -m tools.sbom [FOLDER]`: CycloneDX bills of materials, one for each lock file.

They list what an image installs: the locked packages with their hashes, without the tools of
requirements/tools.txt. cyclonedx-py reads the lock file, so nothing needs to be installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {"cpu": "cpu.lock", "cuda": "gpu.lock"}
"""Target of the Dockerfile -> its lock file."""
SCHEMA = "1.6"
"""Version of CycloneDX's schema, which each bill is validated with."""
FOLDER = ROOT / "build" / "sbom"


def product_lines(lock: str) -> list[str]:
    """Return the lines of a lock file that an image installs."""
    folder = ROOT / "requirements"
    tools = [
        re.compile(line, re.IGNORECASE)
        for line in (folder / "tools.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    lines = (folder / lock).read_text().splitlines()
    return [
        line
        for line in lines
        if line and not line.startswith("#") and not any(tool.search(line) for tool in tools)
    ]


def write(folder: Path) -> list[Path]:
    """Write the bills into a folder; returns their paths. Raises `CalledProcessError`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for target, lock in LOCKS.items():
        bill = folder / f"aileron-{target}.cdx.json"
        subprocess.run(
            [
                *(sys.executable, "-W", "ignore::UserWarning", "-m", "cyclonedx_py"),
                *("requirements", "-", "--pyproject", str(ROOT / "pyproject.toml")),
                *("--mc-type", "application", "--output-reproducible", "--output-format", "JSON"),
                *("--spec-version", SCHEMA, "--validate"),
                *("--output-file", str(bill)),
            ],
            input="\n".join(product_lines(lock)),
            text=True,
            check=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        made.append(bill)
    return made


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
