"""How the suite runs: which tests wait for `make test-long`, in which order, on which worker."""

import itertools
import logging
import os
import shutil
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

from tests.harness.browser.browser import find_browser
from tests.harness.redis.redis_server import IS_REAL, Redis
from tests.harness.runs.lanes import LaneScheduling
from tests.harness.runs.record import Record

REQUIRE_TOOLS_ENV = "AILERON_REQUIRE_TOOLS"
"""Where it is set, a run without one of these tools fails at once instead of testing less."""
TOOLS = ("redis-server", "prometheus", "promtool", "node")
PACKAGES = "redis-server prometheus chromium nodejs"

LONG_MARKS = ("long", "chaos")
"""Tests of these marks run only where they are asked for by name: `make test-long`."""
SUMMARY = "summary"
"""A test's `record_property(SUMMARY, line)` prints the line at the end of the run."""
POSITION = pytest.StashKey[int]()

# Some tests have gRPC servers in this process. A child that is forked while they are at work loads
# another program at once; what gRPC does for other children has aborted it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How long an example takes says how busy the machine is, and nothing of what is tested.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
# One tree has one result: no change is refused for an example that only another run draws.
hypothesis.settings.register_profile(
    "same examples", hypothesis.settings.get_profile("busy machine"), derandomize=True
)
hypothesis.settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make test-long` asks for."""
    parser.addoption("--record", action="store_true", help="leave a page under docs/benchmarks")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run that lacks a tool which it must have; choose examples; collect summaries.

    `make test` always draws the same examples, and shuffles pure tests in the same way. `make
    test-long`, and a run of single files, draws new ones.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    missing += [] if find_browser() else ["chromium"]
    if missing and os.environ.get(REQUIRE_TOOLS_ENV):
        text = f"{', '.join(missing)} not found; on Debian: apt-get install {PACKAGES}"
        raise pytest.UsageError(f"{REQUIRE_TOOLS_ENV} is set, but {text}.")
    if "not long" in config.option.markexpr:
        hypothesis.settings.load_profile("same examples")
    config.pluginmanager.register(Summary(), "aileron-summary")
    if config.getoption("record"):
        config.pluginmanager.register(Record(), "aileron-record")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LaneScheduling:
    """Give the first worker the tests that start ranks."""
    return LaneScheduling(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Remember where a test stands in its file."""
    item.stash[POSITION] = next(_positions)


_positions = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests, and run those of real processes first and as written.

    Pure tests stay in pytest-randomly's order, but simulations are the first of them: a module that
    takes minutes and comes last lets the other workers wait. Tests of real processes share these,
    and later ones build on their state, so their order is that of the file.
    """
    unwanted = [mark for mark in LONG_MARKS if mark not in config.option.markexpr]
    long = [item for item in items if any(map(item.get_closest_marker, unwanted))]
    if long:
        config.hook.pytest_deselected(items=long)
    left = [item for item in items if item not in set(long)]
    real = [item for item in left if _has_processes(item)]
    pure = [item for item in left if not _has_processes(item)]
    pure.sort(key=lambda item: "simulation" not in item.path.parts)
    items[:] = sorted(real, key=lambda item: item.stash[POSITION]) + pure


def _has_processes(item: pytest.Item) -> bool:
    return "integration" in item.path.parts or item.get_closest_marker("ranks") is not None


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Logging as it was, after a test that sets up a process' own."""
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


class Summary:
    """Says at the end of a run what its tests have drawn, and what was tested with less."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the lines of one test."""
        if report.when == "call":
            self._lines += [str(line) for name, line in report.user_properties if name == SUMMARY]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print them."""
        if self._lines:
            terminalreporter.section("what this run has drawn")
        for line in self._lines:
            terminalreporter.write_line(line)
        if not IS_REAL:
            terminalreporter.write_line(
                "NOT TESTED with a real Redis: servers that speak its protocol took its place, and "
                "what they cannot do was skipped (Debian: apt-get install redis-server).",
                yellow=True,
            )
