"""Runs a transcript's commands against a cell and writes down what the core wants done.

Commands, one per line; `#` starts a comment that stays in the transcript:

    cell LAYOUT [setting=value ...]     a new cell, whose ranks have not been heard
    serve                               all ranks come and serve the first layout; says nothing
    open|report|settle|exit|restart|silence RANK...
    tick [MS]                           time passes, in steps of 100 ms; silent ranks do not report
    switch LAYOUT [CARRY]
    busy|idle RANK...                   the rank leads running tasks, or none
    gateway NAME | away NAME
    submit TASK [tier=..] [prompt=..] [max=..] [deadline=..] [delivered=1,2] [attempt=..]
    cancel|done TASK
    ended|returned RANK TASK#ATTEMPT [TOKEN,TOKEN]
    paused|running RANK TASK
    held RANK TASK#ATTEMPT              the rank opens a new session and holds the task
    coordinator                         the coordinator is replaced by a new one
    show layout|queue|switches|ranks
"""

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from comm_pool.layout import Rank, format_layout
from coordinator.core.views import View
from coordinator.model.events import (
    Effect,
    GatewayClosed,
    Note,
    RankExited,
    SwitchRecorded,
    ToGateway,
    ToRank,
)
from coordinator.model.settings import QueueBounds
from coordinator.protocol.messages.gateway import (
    Cancel,
    CellState,
    Done,
    Resubmit,
    Submit,
    TaskFailed,
    Welcome,
)
from coordinator.protocol.messages.rank import Directive, Drop, GiveBack, Place, Stop
from coordinator.protocol.messages.tasks import (
    HeldTask,
    TaskEnded,
    TaskHeader,
    TaskProgress,
    TaskReturned,
)
from coordinator.protocol.terms import Carry, EndCause, ReturnCause, Target, TaskId, Tier
from tests.transcripts.cell import Cell

TICK_MS = 100


class Interpreter:
    """One transcript's cell."""

    def __init__(self) -> None:
        self.cell = Cell("dp1")
        self._silent: set[int] = set()
        self._headers: dict[str, TaskHeader] = {}
        self._shown: list[str] = []

    def run(self, commands: Iterable[str]) -> str:
        """Run a block of commands and return what came of it."""
        self._shown = []
        for command in commands:
            words = (
                command.partition("#")[0].split() if command.startswith("#") else command.split()
            )
            if words:
                self._command(words[0])(words[1:])
        effects = [line for line in lines_of(self.cell.take()) if line]
        return "\n".join([*effects, *self._shown]) or "nothing"

    def _command(self, name: str) -> Callable[[list[str]], None]:
        return {
            "cell": self._cell,
            "serve": lambda _: self.cell.serve(),
            "open": self._each(self.cell.open),
            "report": self._each(self.cell.report),
            "settle": lambda ranks: self.cell.settle(*map(int, ranks)),
            "exit": self._each(lambda rank: self.cell.event(RankExited(Rank(rank)))),
            "restart": self._each(self.cell.restart),
            "silence": self._each(self._silent.add),
            "tick": self._tick,
            "switch": self._switch,
            "busy": self._each(lambda rank: self._set_idle(rank, is_idle=False)),
            "idle": self._each(lambda rank: self._set_idle(rank, is_idle=True)),
            "gateway": lambda words: self.cell.gateway(words[0]),
            "away": lambda words: self.cell.event(GatewayClosed(words[0])),
            "submit": self._submit,
            "cancel": lambda words: self.cell.say(Cancel(TaskId(words[0]))),
            "done": lambda words: self.cell.say(Done(TaskId(words[0]))),
            "ended": self._ended,
            "returned": self._returned,
            "paused": lambda words: self._progress(words, is_paused=True),
            "running": lambda words: self._progress(words, is_paused=False),
            "held": self._held,
            "coordinator": lambda _: self.cell.start(),
            "show": self._show,
        }[name]

    def _each(self, act: Callable[[int], object]) -> Callable[[list[str]], None]:
        def act_on(ranks: list[str]) -> None:
            for rank in ranks:
                act(int(rank))

        return act_on

    def _cell(self, words: list[str]) -> None:
        settings: dict[str, Any] = {
            name: int(value) for name, value in (word.split("=") for word in words[1:])
        }
        if "queue_tasks_max" in settings:
            settings["queue"] = QueueBounds(settings.pop("queue_tasks_max"))
        self.cell = Cell(words[0], **settings)
        self._silent.clear()

    def _tick(self, words: list[str]) -> None:
        for _ in range(int(words[0]) // TICK_MS if words else 0):
            self.cell.tick(TICK_MS)
            for rank in self.cell.ranks:
                if rank not in self._silent:
                    self.cell.report(rank)
        if not words:
            self.cell.tick()

    def _switch(self, words: list[str]) -> None:
        self.cell.switch(words[0], *map(Carry, words[1:]))

    def _set_idle(self, rank: int, *, is_idle: bool) -> None:
        self.cell.ranks[Rank(rank)].is_idle = is_idle

    def _submit(self, words: list[str]) -> None:
        options = dict(word.split("=") for word in words[1:])
        header = TaskHeader(
            task=TaskId(words[0]),
            gateway=options.get("gateway", "g"),
            reply_to="tcp://g",
            prompt_tokens=int(options.get("prompt", "10")),
            max_tokens=int(options.get("max", "10")),
            tier=Tier[options.get("tier", "standard").upper()],
            deadline_ms=int(options.get("deadline", "0")),
        )
        self._headers[words[0]] = header
        delivered = _tokens(options.get("delivered", ""))
        attempt = int(options.get("attempt", "0"))
        self.cell.say(Submit(header, b"", delivered, attempt), header.gateway)

    def _ended(self, words: list[str]) -> None:
        task, attempt = _task(words[1])
        ended = TaskEnded(task, attempt, EndCause.FINISHED, generated=1)
        self.cell.report(int(words[0]), ended=[ended])

    def _returned(self, words: list[str]) -> None:
        task, attempt = _task(words[1])
        tokens = _tokens(words[2] if len(words) > 2 else "")
        returned = TaskReturned(task, attempt, ReturnCause.RECOMPUTE, tokens)
        self.cell.report(int(words[0]), returned=[returned])

    def _progress(self, words: list[str], *, is_paused: bool) -> None:
        progress = TaskProgress(TaskId(words[1]), 1, is_paused)
        self.cell.report(int(words[0]), progress=[progress])

    def _held(self, words: list[str]) -> None:
        rank = Rank(int(words[0]))
        held = []
        for word in words[1:]:
            task, attempt = _task(word)
            binding = self.cell.ranks[rank].participant.binding
            assert binding is not None
            held.append(HeldTask(self._headers[task], attempt, binding.group, 0, paused=False))
        self.cell.open(rank, held)

    def _show(self, words: list[str]) -> None:
        if words == ["ranks"]:
            self._shown += [repr(rank.participant) for rank in self.cell.ranks.values()]
            return
        core = self.cell.core
        views: dict[str, Callable[[], View]] = {
            "layout": core.views.layout,
            "queue": core.views.queue,
            "switches": lambda: core.views.switches(9),
        }
        for name, value in views[words[0]]().items():
            items = value if isinstance(value, list) else [value]
            self._shown += [f"{name}: {json.dumps(item)}" for item in items]


def _task(word: str) -> tuple[TaskId, int]:
    task, _, attempt = word.partition("#")
    return TaskId(task), int(attempt)


def _tokens(text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in text.split(",") if token)


def lines_of(effects: list[Effect]) -> Iterable[str]:
    """One line per effect; one for a directive that several ranks are given in a row."""
    for line, run in groupby(map(_line_of, effects), key=itemgetter(1)):
        who = [name for name, _ in run]
        yield f"{', '.join(who)} <- {line}" if who[0] else line


def _line_of(effect: Effect) -> tuple[str, str]:
    """Who is told, and what."""
    match effect:
        case ToRank(rank, Directive() as directive):
            return f"rank {rank}", _directive(directive)
        case ToRank(rank, Place() as place):
            task = f"{place.header.task}#{place.attempt}"
            formed = f"{place.binding.group.name}@{place.binding.formation}"
            behind = f" behind {list(place.generated_tokens)}" if place.generated_tokens else ""
            return f"rank {rank}", f"place {task} in {formed}{behind}"
        case ToRank(rank, Drop(task_id)):
            return f"rank {rank}", f"drop {task_id}"
        case ToRank(rank, GiveBack(task_id)):
            return f"rank {rank}", f"give back {task_id}"
        case ToRank(rank, Stop(reason)):
            return f"rank {rank}", f"stop: {reason}"
        case ToGateway(name, Welcome(coordinator)):
            return name, f"welcome from {coordinator}"
        case ToGateway(name, CellState() as cell):
            state = "serving" if cell.serving else "not serving"
            alive = f"{cell.ranks_alive}/{cell.world} ranks, {cell.queued} queued"
            limit = f"context {cell.max_context_tokens}"
            return name, f"cell {cell.layout} epoch {cell.epoch}, {state}, {alive}, {limit}"
        case ToGateway(name, TaskFailed(task_id, code, message)):
            return name, f"failed {task_id}: {code}: {message}"
        case ToGateway(name, Resubmit(task_id, attempt)):
            return name, f"submit {task_id} again, take nothing of attempts up to {attempt}"
        case SwitchRecorded(record):
            took = f"{record.from_layout} -> {record.to_layout} in {record.total_ms} ms"
            return "", f"switch {record.epoch} {record.outcome.value}: {took} ({record.cause})"
        case Note(_, event, fields):
            words = [f"{name}={value}" for name, value in fields.items()]
            return "", " ".join(["note:", event, *words])
        case _:
            raise AssertionError(f"no line for {effect}")


def _directive(directive: Directive) -> str:
    stage = f"{directive.stage.epoch}.{directive.stage.phase.name}"
    text = f"{stage} {_target(directive.target)} {directive.carry.value}"
    if directive.grants:
        grants = [f"{_ranks(grant.ranks)}:{grant.pages}" for grant in directive.grants]
        text += f" grants {' '.join(grants)}"
    for kept in directive.retentions:
        text += f" kept {_ranks(kept.ranks)}:{list(kept.indices)}@{kept.formation}.{kept.version}"
    return text


def _target(target: Target) -> str:
    borns = [str(binding.formation) for binding in target.bindings]
    return f"{format_layout(target.layout) or 'nothing'}@{','.join(borns)}"


def _ranks(ranks: tuple[Rank, ...]) -> str:
    return "-".join(str(rank) for rank in ranks)
