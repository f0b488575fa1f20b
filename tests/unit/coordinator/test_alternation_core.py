"""Alternation of batch work within the core: what is switched, held back, paused and told."""

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from coordinator.model.events import SettingsChanged
from coordinator.model.policy_settings import PolicySettings, PolicyStart
from coordinator.protocol.messages.rank import GiveBack, RankHello
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.protocol.messages.tasks import TaskProgress
from coordinator.protocol.terms import TaskId, Tier
from coordinator.tasks.task import State
from tests.harness.coordinator.builders import submit
from tests.harness.coordinator.policy_cells import wait
from tests.transcripts.cell import Cell, ObedientRank

SETTINGS = PolicySettings(settle_ms=500, stay_ms=1_000, pin_ms=20_000, switches_per_minute_max=120)
PROMPT, OUTPUT = 3_000, 200
SIZES = (1, 256, 2_048)


def curve(base_ms: float, token_ms: float) -> tuple[tuple[int, int], ...]:
    return tuple((size, round(1_000 * (base_ms + token_ms * size))) for size in SIZES)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """Four ranks with slow memory behind a slow link, and 14 places for batch tasks."""
    wide = WidthTimes(4, (("tp", curve(80, 0.3)), ("pp4", curve(75, 0.1))))
    plain = ObedientRank.hello

    def hello(rank: ObedientRank, *given: Any, **named: Any) -> RankHello:
        found = plain(rank, *given, **named)
        return structs.replace(
            found,
            max_tasks=16,
            max_model_len_tokens=8_000,
            tokens_per_slot=16_384,
            step_times=(wide,),
            widths=(1, 4),
        )

    monkeypatch.setattr(ObedientRank, "hello", hello)
    return serving(SETTINGS)


def serving(settings: PolicySettings) -> Cell:
    cell = Cell("tp4", policy=PolicyStart(settings, (1, 4), {}))
    cell.gateway()
    cell.serve()
    return cell


def place(cell: Cell, *names: str, tier: Tier = Tier.BATCH) -> None:
    for name in names:
        cell.say(submit(name, prompt=PROMPT, max_tokens=OUTPUT, tier=tier))


def names_of(cell: Cell, *states: State) -> list[str]:
    return sorted(str(task.id) for task in cell.core._pool.tasks if task.state in states)


def report(cell: Cell, *, paused: bool = False, most: int = 99) -> None:
    """Let rank 0 tell of tasks that it leads."""
    held = names_of(cell, State.PLACED, State.PAUSED)[:most]
    items = [TaskProgress(TaskId(name), 5, paused) for name in held]
    cell.report(0, progress=items)


def target(cell: Cell) -> object:
    return cell.core.views.layout()["target"]


def last_switch(cell: Cell) -> dict[str, Any]:
    found: Any = cell.core.views.switches(1)["switches"]
    return dict(found[-1])


def alternation(cell: Cell) -> dict[str, Any]:
    found: Any = cell.core.views.alternation()
    return dict(found)


NAMES = [f"t{number:02}" for number in range(40)]


def test_prompts_are_read_in_stages_while_what_runs_is_paused(cell: Cell) -> None:
    place(cell, *NAMES)
    wait(cell, 2_000)
    assert target(cell) == "pp4"
    assert last_switch(cell)["carry"] == "pause"
    assert alternation(cell)["phase"] == "prefill"
    assert "in turns between pp4 and tp4" in alternation(cell)["reason"]


def test_paused_batch_tasks_are_not_given_back_while_prompts_are_read(cell: Cell) -> None:
    place(cell, *NAMES)
    wait(cell, 1_000)
    report(cell, paused=True, most=5)
    assert names_of(cell, State.PAUSED)
    cell.take()
    wait(cell, 2 * cell.settings.pause_limit_ms)
    given_back = [each for each in cell.take() if isinstance(getattr(each, "message", 0), GiveBack)]
    assert not given_back
    assert alternation(cell)["phase"] == "prefill"


def test_queued_batch_tasks_wait_while_others_decode(cell: Cell) -> None:
    place(cell, *NAMES)
    wait(cell, 1_000)
    report(cell)
    wait(cell, 2_000)
    assert target(cell) == "tp4", "the cell holds as many tasks as it can"
    assert last_switch(cell)["carry"] == "reshard"
    assert alternation(cell)["phase"] == "decode"
    queued = names_of(cell, State.QUEUED)
    assert queued
    for name in (held := names_of(cell, State.PLACED))[:2]:
        cell.core._pool.release(TaskId(name), is_done=True)
    wait(cell, 500)
    assert names_of(cell, State.QUEUED) == queued, "there is room for two, but they wait"
    assert names_of(cell, State.PLACED) == held[2:]


def test_an_interactive_request_ends_it_at_once(cell: Cell) -> None:
    place(cell, *NAMES[:6])
    wait(cell, 1_000)
    assert target(cell) == "pp4"
    place(cell, "urgent", tier=Tier.INTERACTIVE)
    wait(cell, 300)
    assert target(cell) == "tp4"
    assert last_switch(cell)["carry"] == "reshard"
    assert alternation(cell)["phase"] == "off"
    assert "urgent" in names_of(cell, State.PLACED)


def test_it_ends_where_it_is_switched_off_while_the_cell_serves(cell: Cell) -> None:
    place(cell, *NAMES)
    wait(cell, 1_000)
    report(cell)
    wait(cell, 2_000)
    assert alternation(cell)["phase"] == "decode"
    cell.core._pool.release(TaskId(names_of(cell, State.PLACED)[0]), is_done=True)
    start = PolicyStart(dataclasses.replace(SETTINGS, alternates=False), (1, 4), {})
    cell.event(SettingsChanged(dataclasses.replace(cell.settings, policy=start)))
    queued = names_of(cell, State.QUEUED)
    wait(cell, 1_000)
    assert alternation(cell) | {"seconds": {}} == {
        "phase": "off",
        "reason": "policy.alternation is off",
        "cycles": 1,
        "seconds": {},
        "requests": 0,
        "single_seconds": 0.0,
    }
    assert len(names_of(cell, State.QUEUED)) < len(queued), "batch tasks are placed again"


def test_a_cell_that_must_not_alternate_does_not(cell: Cell) -> None:
    del cell
    other = serving(PolicySettings(settle_ms=500, stay_ms=1_000, alternates=False))
    place(other, *NAMES)
    wait(other, 5_000)
    assert alternation(other)["phase"] == "off"
    assert alternation(other)["reason"] == "policy.alternation is off"
    assert last_switch(other)["carry"] != "pause"
