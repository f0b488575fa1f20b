"""The children of `aileron up`: watched, started again, stopped in order, never orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from coordinator.cli.cell import Cell, CellProcess
from coordinator.cli.children import Child, ChildSpec
from coordinator.cli.screen import RankProgress

STEADY = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print('{"event":"up"}', flush=True)
time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"event":"up"}', flush=True)
time.sleep(60)
"""


class Told:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[Mapping[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, text: str) -> None:
        self.lines.append(text)

    def rank(self, progress: RankProgress) -> None:
        raise AssertionError(progress)

    def loaded(self) -> None:
        return

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Fixture:
    """Members of a cell that run snippets of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told = Told()

    def member(
        self, name: str, code: str, *, restarts: bool = True, limit_s: float = 5.0
    ) -> CellProcess:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        spec = ChildSpec(name, command, os.environ, self.folder / f"{name}.log")
        child = Child(spec, self.told.events.append, None)
        return CellProcess(child, restarts=restarts, stop_limit_s=limit_s)

    async def up(self, count: int) -> None:
        while sum(event.get("event") == "up" for event in self.told.events) < count:
            await asyncio.sleep(0.01)


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


async def never() -> bool:
    return False


def nothing() -> None:
    return


async def run_until_up(fixture: Fixture, members: list[CellProcess], *signals: int) -> int:
    """Run the cell, send ourselves `signals` once all members are up; return the exit status."""
    run = asyncio.create_task(Cell(members, fixture.told).run(never, nothing))
    await fixture.up(len(members))
    for number in signals:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.05)
    return await run


async def test_signal_stops_everything_in_order(fixture: Fixture) -> None:
    members = [fixture.member(name, STEADY) for name in ("gateway", "worker", "coordinator")]
    assert await run_until_up(fixture, members, signal.SIGTERM) == 0
    assert all(member.child.pid is None for member in members)
    assert "killed" not in fixture.told.text


async def test_a_child_that_does_not_stop_is_killed_and_named(fixture: Fixture) -> None:
    members = [fixture.member("gateway", STUBBORN, limit_s=0.2)]
    assert await run_until_up(fixture, members, signal.SIGINT) == 0
    assert "gateway did not stop within 0 s and was killed" in fixture.told.text


async def test_second_signal_ends_at_once(fixture: Fixture) -> None:
    members = [fixture.member("gateway", STUBBORN, limit_s=30)]
    started = time.monotonic()
    assert await run_until_up(fixture, members, signal.SIGINT, signal.SIGINT) == 0
    assert time.monotonic() - started < 10
    assert "streams that were running are cut" in fixture.told.text


async def test_a_dead_coordinator_is_started_again(fixture: Fixture) -> None:
    mark = fixture.folder / "started"
    code = f"""
    import pathlib, sys, time
    mark = pathlib.Path({str(mark)!r})
    if not mark.exists():
        mark.touch()
        sys.exit(3)
    print('{{"event":"up"}}', flush=True)
    time.sleep(60)
    """
    assert await run_until_up(fixture, [fixture.member("coordinator", code)], signal.SIGTERM) == 0
    assert "coordinator ended (exit status 3); starting it again in 0.2 s" in fixture.told.text


async def test_a_dead_worker_is_the_end(fixture: Fixture) -> None:
    code = "print('a cause'); raise SystemExit(7)"
    members = [
        fixture.member("gateway", STEADY),
        fixture.member("worker", code, restarts=False),
    ]
    assert await Cell(members, fixture.told).run(never, nothing) == 1
    assert "worker ended (exit status 7); its last lines were:\n    a cause" in fixture.told.text
    assert members[0].child.pid is None


async def test_a_killed_worker_is_named_with_its_signal(fixture: Fixture) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    members = [fixture.member("worker", code, restarts=False)]
    assert await Cell(members, fixture.told).run(never, nothing) == 1
    assert "worker ended (SIGKILL)" in fixture.told.text


async def test_a_usage_error_is_not_tried_again(fixture: Fixture) -> None:
    members = [fixture.member("gateway", "print('bad option'); raise SystemExit(2)")]
    assert await Cell(members, fixture.told).run(never, nothing) == 1
    assert "starting it again" not in fixture.told.text
    assert "bad option" in fixture.told.text


async def test_serving_is_announced_once(fixture: Fixture) -> None:
    answers = iter((False, False, True))
    announced: list[int] = []

    async def serves() -> bool:
        return next(answers)

    cell = Cell([fixture.member("gateway", STEADY)], fixture.told)
    run = asyncio.create_task(cell.run(serves, lambda: announced.append(1)))
    while not announced:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run == 0
    assert announced == [1]


async def test_output_is_logged_and_long_lines_are_cut(fixture: Fixture) -> None:
    code = "print('x' * 3_000_000); print('{\"event\":\"up\"}', end='')"
    member = fixture.member("worker", code)
    assert await member.child.run() == 0
    assert (fixture.folder / "worker.log").stat().st_size == 3_000_001 + len('{"event":"up"}')
    assert fixture.told.events == [{"event": "up"}]


async def test_children_are_out_of_ctrl_c_s_reach_in_the_session_of_their_parent(
    fixture: Fixture,
) -> None:
    """Linux shares cores out by session: one for each child would make them wait for each other."""
    code = """
    import json, os
    print(json.dumps({"event": "up", "group": os.getpgid(0), "session": os.getsid(0)}))
    """
    assert await fixture.member("worker", code).child.run() == 0
    (told,) = fixture.told.events
    assert told["group"] != os.getpgid(0)
    assert told["session"] == os.getsid(0)


def test_children_die_with_their_parent(tmp_path: Path) -> None:
    """Even when the parent is killed and can clean nothing up."""
    code = f"""
    import asyncio, os, sys
    from pathlib import Path
    from coordinator.cli.children import Child, ChildSpec
    spec = ChildSpec('x', [sys.executable, '-c', 'import time; time.sleep(60)'],
                     os.environ, Path({str(tmp_path / "x.log")!r}))
    async def main():
        child = Child(spec, print, None)
        run = asyncio.create_task(child.run())
        while child.pid is None:
            await asyncio.sleep(0.01)
        print(child.pid, flush=True)
        await run
    asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/status").exists():
        if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
