"""The page that a run of the long tests leaves."""

from types import SimpleNamespace
from typing import Any

from tests.harness.runs.record import Record


def report(nodeid: str, when: str, outcome: str, duration: float, text: str = "") -> Any:
    failed = outcome == "failed"
    return SimpleNamespace(
        nodeid=nodeid,
        when=when,
        outcome=outcome,
        duration=duration,
        failed=failed,
        longrepr=None,
        longreprtext=text,
    )


def test_the_page_counts_tests_and_adds_up_the_seconds_of_their_phases() -> None:
    record = Record()
    record.pytest_runtest_logreport(report("tests/a.py::one", "setup", "passed", 4.0))
    record.pytest_runtest_logreport(report("tests/a.py::one", "call", "passed", 6.0))
    record.pytest_runtest_logreport(report("tests/a.py::two", "setup", "skipped", 0.0))
    record.pytest_runtest_logreport(report("tests/b.py::one", "call", "failed", 1.0, "so\n  it is"))
    text = record.text()
    assert "| tests/a.py | 1 | 0 | 1 | 10 |\n| tests/b.py | 0 | 1 | 0 | 1 |" in text
    assert "- `tests/b.py::one`: so it is" in text
