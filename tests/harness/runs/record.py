"""Records a run of the long tests: `--record` leaves a dated page under docs/benchmarks."""

import shlex
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.harness.runs.provenance import commit, cores_and_processor, today

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "benchmarks"
REASON_CHARS = 300
"""Of what a failed test says."""


class Record:
    """Counts outcomes and seconds by module, and writes the page at the end."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what one phase of a test took, and how the test ended."""
        module = report.nodeid.partition("::")[0]
        self._seconds[module] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[module][report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = " ".join(str(crash or report.longreprtext).split())[:REASON_CHARS]
            self._failures.append(f"- `{report.nodeid}`: {reason}")

    def pytest_sessionfinish(self) -> None:
        """Write the page."""
        page = FOLDER / f"{today()}-test-long.md"
        page.write_text(self.text())
        print(f"\nrecorded in {page.relative_to(ROOT)}")

    def text(self) -> str:
        """Return the page in Markdown."""
        command = shlex.join(["pytest", *sys.argv[1:]])
        lines = [
            f"# Long tests, {today()}",
            "",
            f"Command: `{command}`, commit {commit()}, {cores_and_processor()}.",
            "",
            "| module | passed | failed | skipped | seconds |",
            "|---|---|---|---|---|",
        ]
        for module, seconds in sorted(self._seconds.items(), key=lambda each: -each[1]):
            found = self._outcomes[module]
            counts = " | ".join(str(found[each]) for each in ("passed", "failed", "skipped"))
            lines.append(f"| {module} | {counts} | {seconds:.0f} |")
        if self._failures:
            lines += ["", "Failures:", "", *self._failures]
        return "\n".join(lines) + "\n"
