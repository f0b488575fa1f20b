"""Alternation of batch work within the core: what is switched, held back, paused and reported."""

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from coordinator.model.events import SettingsChanged, ToRank
from coordinator.model.policy_settings import PolicySettings, PolicyStart
from coordinator.protocol.messages.rank import GiveBack, RankHello
from coordinator.protocol.messages.steps import WidthTimes
from coordinator.protocol.messages.tasks import TaskProgress, TaskReturned
from coordinator.protocol.terms import ReturnCause, TaskId, Tier
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
    """Four ranks with slow memory and a slow link, and 14 places for batch tasks."""
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


def serving(settings: PolicySettings, layout: str = "tp4") -> Cell:
    cell = Cell(layout, policy=PolicyStart(settings, (1, 4), {}))
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


def to_decodes(cell: Cell) -> None:
    """Let all tasks that a group has taken have their first token."""
    place(cell, *NAMES)
    wait(cell, 1_000)
    report(cell)
    wait(cell, 2_000)
    assert alternation(cell)["phase"] == "decode"


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
    assert not given_back(cell)
    assert alternation(cell)["phase"] == "prefill"


def test_queued_batch_tasks_wait_while_others_decode(cell: Cell) -> None:
    to_decodes(cell)
    assert target(cell) == "tp4", "the cell holds as many tasks as it can"
    assert last_switch(cell)["carry"] == "reshard"
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


def given_back(cell: Cell) -> list[str]:
    """Who was asked back since the last look."""
    messages = [each.message for each in cell.take() if isinstance(each, ToRank)]
    return [str(each.task) for each in messages if isinstance(each, GiveBack)]


def to_long_prefill(cell: Cell) -> list[str]:
    """Pause five tasks, and read prompts for longer than a pause may last elsewhere."""
    place(cell, *NAMES)
    wait(cell, 1_000)
    report(cell, paused=True, most=5)
    wait(cell, 2 * cell.settings.pause_limit_ms)
    assert alternation(cell)["phase"] == "prefill"
    cell.take()
    return names_of(cell, State.PAUSED)


def test_paused_tasks_keep_their_kv_when_prompts_are_read(cell: Cell) -> None:
    paused = to_long_prefill(cell)
    held = names_of(cell, State.PLACED, State.PAUSED)
    cell.report(0, progress=[TaskProgress(TaskId(name), 5, name in paused) for name in held])
    while alternation(cell)["phase"] == "prefill":
        cell.tick(100)
    assert not given_back(cell)
    wait(cell, 2 * cell.settings.pause_limit_ms)
    assert given_back(cell) == paused, "these ranks never let them go on"


def test_paused_tasks_keep_their_kv_when_an_urgent_one_comes(cell: Cell) -> None:
    to_long_prefill(cell)
    place(cell, "urgent", tier=Tier.INTERACTIVE)
    for _ in range(4):
        cell.tick(100)
    assert alternation(cell)["phase"] == "off"
    assert not set(given_back(cell)) & set(names_of(cell, State.PAUSED))


def switch_off(cell: Cell) -> None:
    start = PolicyStart(dataclasses.replace(SETTINGS, alternates=False), (1, 4), {})
    cell.event(SettingsChanged(dataclasses.replace(cell.settings, policy=start)))


def test_switched_off_it_leaves_prompts_for_the_layout_for_decodes(cell: Cell) -> None:
    to_long_prefill(cell)
    switch_off(cell)
    wait(cell, 500)
    assert target(cell) == "tp4"
    assert last_switch(cell)["carry"] == "reshard"
    assert alternation(cell)["phase"] == "off"
    assert alternation(cell)["reason"] == "policy.alternation is off"


def test_switched_off_it_holds_no_batch_task_back(cell: Cell) -> None:
    to_decodes(cell)
    cell.core._pool.release(TaskId(names_of(cell, State.PLACED)[0]), is_done=True)
    queued = names_of(cell, State.QUEUED)
    switch_off(cell)
    wait(cell, 1_000)
    assert len(names_of(cell, State.QUEUED)) < len(queued)


def test_no_task_is_paused_in_a_layout_that_is_not_of_the_pair(
    monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    del cell
    slow = WidthTimes(1, (("dp", curve(2_000, 3)),))
    plain = ObedientRank.hello

    def hello(rank: ObedientRank, *given: Any, **named: Any) -> RankHello:
        found = plain(rank, *given, **named)
        return structs.replace(found, step_times=(slow, *found.step_times))

    monkeypatch.setattr(ObedientRank, "hello", hello)
    other = serving(SETTINGS, "dp4")
    place(other, *NAMES)
    while target(other) == "dp4":
        other.tick(100)
    assert last_switch(other)["carry"] == "reshard"


def test_tasks_that_have_begun_go_on_while_others_are_held_back(cell: Cell) -> None:
    to_decodes(cell)
    begun = TaskId(names_of(cell, State.PLACED)[-1])
    attempt = cell.core._pool.tasks[begun].attempt
    cell.report(0, returned=[TaskReturned(begun, attempt, ReturnCause.RECOMPUTE, (1, 2, 3))])
    wait(cell, 300)
    assert str(begun) in names_of(cell, State.PLACED)
    assert names_of(cell, State.QUEUED)


def test_a_cell_that_must_not_alternate_does_not(cell: Cell) -> None:
    del cell
    other = serving(PolicySettings(settle_ms=500, stay_ms=1_000, alternates=False))
    place(other, *NAMES)
    wait(other, 5_000)
    assert alternation(other)["phase"] == "off"
    assert alternation(other)["reason"] == "policy.alternation is off"
    assert last_switch(other)["carry"] != "pause"
