"""Which tests may be repeated, how often, and that every repeat is reported and counted.

Real processes on a machine that others use too meet moments that no test foresaw. One such moment
must not fail a run of half an hour, and a run with many of them must not pass: they are counted.
"""

import logging
import os
import shutil
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

from tests.harness.browser.browser import find_browser
from tests.harness.cells.not_started import NotStartedError
from tests.harness.redis.redis_server import IS_REAL, Redis

REQUIRE_TOOLS_ENV = "AILERON_REQUIRE_TOOLS"
"""Where it is set, a run without one of these tools fails at once instead of testing less."""
TOOLS = ("redis-server", "prometheus", "promtool", "node")
PACKAGES = "redis-server prometheus chromium nodejs"

TIMING_REPEATS = 2
"""For tests marked `timing`: a time that is really too long fails three times in a row."""
PROCESS_REPEATS = 1
"""For other tests under integration/, except those of these marks, which are repeated only where
their servers did not start:"""
COMPARING = frozenset({"exact", "chaos"})
REPEATED_MAX = 5
"""Repeats in one run; with more of them it fails, whatever the repeats said."""
REASON_CHARS = 600
"""Of what the first attempt said, at the end of a run."""

# Some tests have gRPC servers in this process. A child that is forked while they are at work loads
# another program at once; what gRPC does for other children has aborted it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How long an example takes says how busy the machine is, and nothing of what is tested.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the count of this run, if all tools are there that it is to have."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    missing += [] if find_browser() else ["chromium"]
    if missing and os.environ.get(REQUIRE_TOOLS_ENV):
        text = f"{', '.join(missing)} not found; on Debian: apt-get install {PACKAGES}"
        raise pytest.UsageError(f"{REQUIRE_TOOLS_ENV} is set, but {text}.")
    config.pluginmanager.register(Repeats(), "aileron-repeats")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Pure tests and comparisons of numbers are never repeated: they must pass the first time.

    The long fault tests run where they are asked for by their mark.
    """
    if "chaos" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("chaos")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=TIMING_REPEATS, reruns_delay=2))
        elif "integration" in item.path.parts:
            compares = COMPARING.intersection(mark.name for mark in item.iter_markers())
            only = [NotStartedError.__name__] if compares else None
            item.add_marker(
                pytest.mark.flaky(reruns=PROCESS_REPEATS, reruns_delay=2, only_rerun=only)
            )


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Logging as it was, behind a test that sets up a process' own."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    """A Redis of the module's own."""
    made = Redis()
    yield made
    made.stop()


@pytest.fixture
def fresh_redis(redis: Redis) -> Iterator[Redis]:
    """The same, with nothing in it and no bound on its memory."""
    redis.flush()
    yield redis
    redis.limit_memory("0")


class Repeats:
    """Counts the repeats of a run and fails it when they are too many."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._reasons: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed and will be repeated."""
        outcome: str = report.outcome
        if outcome == "rerun":
            self._names.append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(crash or report.longreprtext)[:REASON_CHARS]
            self._reasons.append(f"{report.nodeid} was repeated behind: {said}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn a run with too many repeats into a failed one."""
        if len(self._names) > REPEATED_MAX and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many there were, and what was tested with less than the real thing."""
        if not IS_REAL:
            terminalreporter.write_line(
                "NOT TESTED with a real Redis: servers that speak its protocol took its place, and "
                "what they cannot do was skipped (Debian: apt-get install redis-server).",
                yellow=True,
            )
        if self._names:
            terminalreporter.write_line(
                f"repeated {len(self._names)} times, at most {REPEATED_MAX} allowed: "
                + ", ".join(self._names)
            )
            for reason in self._reasons:
                terminalreporter.write_line(reason)
