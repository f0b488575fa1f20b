"""`python -m tests.harness.runs.coverage_run COMMAND...`: the product's lines that a run executes.

Every Python process that the command starts or forks measures itself. Lines that only a process
executes which is killed by SIGKILL are lost, so the figure is a lower bound. The simulation's ranks
are greenlets: were coverage not to know, it would count their lines in wrong files.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("gateway", "coordinator", "worker", "comm_pool", "kvadaptor", "loadgen")
SETTINGS = """
[run]
parallel = True
concurrency = thread,greenlet
data_file = {folder}/lines
source =
{sources}
sigterm = True
patch =
    subprocess
    fork
    _exit
    execv
disable_warnings = no-data-collected,module-not-measured,module-not-imported,already-imported
[report]
skip_covered = True
skip_empty = True
"""


def main(command: list[str]) -> int:
    """Run the command and print the report; returns the command's exit status."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        settings = Path(folder, "settings.ini")
        sources = "\n".join(f"    {ROOT / package}" for package in PACKAGES)
        settings.write_text(SETTINGS.format(folder=folder, sources=sources))
        env = {**os.environ, "COVERAGE_PROCESS_START": str(settings)}
        env["COVERAGE_RCFILE"] = str(settings)
        status = subprocess.run(command, env=env, cwd=ROOT, check=False).returncode
        measured = coverage.Coverage(config_file=str(settings))
        measured.combine([folder])
        measured.report()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
