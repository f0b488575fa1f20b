"""Mutation testing of the parts that decide: `python -m tests.mutants`, or `make mutants`.

Each mutant is a changed copy of a module's functions (`operators`); it is killed when a fast test
fails with it, when a few seeds of the simulation do, or when it runs for too long. Tests are
collected once; every mutant gets a fork of that process in which the code of the functions is
replaced, so that everybody who imported them has the change. Deterministic: Hypothesis draws the
same examples each time. The simulation's seeds are among those of `make test`.
"""

import argparse
import ast
import importlib
import inspect
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import hypothesis
import pytest

from tests.mutants.operators import Mutant, mutants

UNIT, PROPERTY = "tests/unit/", "tests/property/"


@dataclass(frozen=True)
class Part:
    """What is changed, and what must notice."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    seeds: tuple[int, ...] = ()
    """Seeds of the simulation that are run when the tests saw nothing."""


PARTS = {
    "stream": Part(
        ("gateway.token_stream",),
        (UNIT + "gateway/test_token_stream.py", PROPERTY + "test_token_stream.py"),
    ),
    "pages": Part(
        ("kvadaptor.pages",),
        (
            UNIT + "kvadaptor/test_pages.py",
            UNIT + "kvadaptor/test_pages_named.py",
            PROPERTY + "test_pages.py",
        ),
    ),
    "loans": Part(
        ("comm_pool.loans",),
        (
            UNIT + "comm_pool/test_loans.py",
            PROPERTY + "test_loans.py",
        ),
    ),
    "host": Part(
        (
            "kvadaptor.host.directory",
            "kvadaptor.host.entries",
            "kvadaptor.host.block_index",
            "kvadaptor.host.layout",
        ),
        (
            UNIT + "kvadaptor/test_host_directory.py",
            UNIT + "kvadaptor/test_page_gifts.py",
            PROPERTY + "test_host_directory.py",
        ),
    ),
    "switch": Part(
        (
            "coordinator.protocol.switch_participant",
            "coordinator.protocol.switch_rules",
            "coordinator.protocol.switch_situation",
            "coordinator.protocol.switch_state",
            "coordinator.switching.switcher",
            "coordinator.switching.move_commits",
            "coordinator.switching.targets",
        ),
        (
            UNIT + "coordinator/test_switch_participant.py",
            UNIT + "coordinator/test_switch_rules.py",
            UNIT + "coordinator/test_participant_migration.py",
            UNIT + "coordinator/test_switcher.py",
            UNIT + "coordinator/test_move_commits.py",
            UNIT + "coordinator/test_core.py",
            UNIT + "coordinator/test_switch_bookkeeping.py",
            UNIT + "coordinator/test_outliers.py",
            UNIT + "coordinator/test_retained_leases.py",
            UNIT + "coordinator/test_mode_quarantine.py",
            "tests/transcripts/",
        ),
        seeds=(2, 3, 0, 10, 5, 7, 12, 15),
    ),
}
LIMIT_S = 120
"""A mutant that runs for longer than this, on a busy machine, hangs: it is killed."""


@dataclass
class Score:
    """What became of the mutants of one module."""

    killed: int = 0
    survivors: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.killed + len(self.survivors)


class Forks:
    """A pytest plugin that runs the collected tests once per mutant."""

    def __init__(self, part: Part, step: int) -> None:
        self._part, self._step = part, step
        self.scores = {name: Score() for name in part.modules}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert _survives(session, self._part, None, None), "the tests fail without a mutant"
        for name in self._part.modules:
            module = importlib.import_module(name)
            score = self.scores[name]
            for number, mutant in enumerate(mutants(inspect.getsource(module))):
                if number % self._step:
                    continue
                if _survives(session, self._part, module, mutant):
                    score.survivors.append(f"{name}:{mutant.line} {mutant.what}")
                    print(f"survived  {score.survivors[-1]}", flush=True)
                else:
                    score.killed += 1
            print(f"{name}: {score.killed} of {score.total} killed", flush=True)
        return True


def _survives(
    session: pytest.Session, part: Part, module: ModuleType | None, mutant: Mutant | None
) -> bool:
    """Run the tests in a child; False if one of them fails or the time is over."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        failed = True
        try:
            if module is not None and mutant is not None:
                replace_code(module, mutant.tree)
            failed = _tests_fail(session) or _seeds_fail(part.seeds)
        finally:
            os._exit(int(failed))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _tests_fail(session: pytest.Session) -> bool:
    for item in session.items:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.testsfailed:
            return True
    return False


def _seeds_fail(seeds: tuple[int, ...]) -> bool:
    from tests.simulation.world import FAILURES, World

    for seed in seeds:
        try:
            World(seed).run()
        except (*FAILURES, TypeError, AttributeError):
            return True
    return False


def replace_code(module: ModuleType, tree: ast.Module) -> None:
    """Give every function of the module the code that it has in the changed source."""
    changed: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(tree, f"<mutant of {module.__name__}>", "exec"), changed)
    _replace(vars(module), changed, module.__name__)


def _replace(old: Any, new: Any, owner: str) -> None:
    for name, value in list(old.items()):
        own, other = _function(value), _function(new.get(name))
        if isinstance(own, FunctionType) and isinstance(other, FunctionType):
            if own.__module__ == owner:
                own.__code__ = other.__code__
        elif isinstance(own, type) and own.__module__ == owner:
            _replace(vars(own), vars(other), owner)


def _function(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("parts", nargs="*", help="all if none is named")
    parser.add_argument("--every", type=int, default=1, help="take only every n-th mutant")
    chosen = parser.parse_args()
    hypothesis.settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
    hypothesis.settings.load_profile("mutants")
    killed = total = 0
    began = time.monotonic()
    for name in chosen.parts or PARTS:
        forks = Forks(PARTS[name], chosen.every)
        options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-W", "ignore"]
        code = pytest.main([*options, *PARTS[name].tests], plugins=[forks])
        if code != pytest.ExitCode.OK:
            return 2
        killed += sum(score.killed for score in forks.scores.values())
        total += sum(score.total for score in forks.scores.values())
    took_s = time.monotonic() - began
    print(f"{killed} of {total} mutants killed: {killed / total:.1%}, {took_s:.0f} s")
    return int(killed < 0.9 * total)


if __name__ == "__main__":
    sys.exit(main())
