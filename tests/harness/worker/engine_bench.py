"""One rank's engine as a test of the contract uses it: it leads alone, and nobody follows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from comm_pool.layout import Group, Mode
from kvadaptor.pages import without
from worker.rank.engine import Engine, EngineMode, EngineScheduler, Plan
from worker.rank.inflight_step import InflightStep

Payload = Callable[[str, Sequence[int], int], bytes]
"""(name, prompt, tokens to generate) -> a request as gateways send it."""

NOTHING = np.zeros(0, dtype=np.int64)


class EngineBench:
    """An engine of rank 0 that serves in one width at a time."""

    def __init__(self, engine: Engine, payload: Payload) -> None:
        self.engine = engine
        self.payload = payload
        self.formation = 0
        self.width = self.stages = 1

    # ------------------------------------------------------------------ groups

    @property
    def mode(self) -> EngineMode:
        """The selected mode."""
        return self.engine.of_width(self.width, self.stages)

    @property
    def scheduler(self) -> EngineScheduler:
        """Its scheduler."""
        scheduler = self.mode.scheduler
        assert scheduler is not None
        return scheduler

    @property
    def group(self) -> Group:
        """Its group."""
        if self.stages > 1:
            return Group(self.mode.ranks, Mode.PP, self.width // self.stages)
        return Group(self.mode.ranks, Mode.DP if self.width == 1 else Mode.TP)

    def begin(self, width: int, pages: int, stages: int = 1) -> None:
        """Select a mode, and grant it this many pages besides those that its tasks hold."""
        self.width, self.stages, pool = width, stages, self.engine.pages
        self.formation += 1
        assert self.engine.select(width, self.formation, stages) is self.mode
        if self.mode.table is None:
            pool.grant_own_pages(pages)
        else:
            self.mode.table.map(*pool.lease_pages(self.group.lease_key, pages))
        self.scheduler.grant(self.indices())

    def indices(self) -> Any:
        """The lease indices that the mode has; in dp its pages."""
        pool = self.engine.pages
        return pool.own_pages() if self.width == 1 else pool.lease_indices(self.group.lease_key)

    def park(self) -> list[int]:
        """Withdraw the mode, and free what no task holds; returns the lease indices that stay."""
        held, pool = self.scheduler.withdraw(), self.engine.pages
        if self.mode.table is None:
            pool.keep_own(held)
        else:
            self.mode.table.unmap(without(self.indices(), held))
            pool.keep_only(self.group.lease_key, held.tolist())
        return [int(each) for each in held]

    def clear(self) -> None:
        """Drop all tasks and pages, and let the runners forget them."""
        for mode in self.engine.modes.values():
            self.width, self.stages = mode.width, mode.stages
            self.engine.select(self.width, self.formation, self.stages)
            self.mode.forget_steps()
            self.scheduler.take_back(list(self.scheduler.requests))
            while self.scheduler.has_requests():
                self.step()
            assert self.park() == []

    # ------------------------------------------------------------------ tasks and steps

    def add(
        self, name: str, prompt: Sequence[int], tokens: int, generated: Sequence[int] = ()
    ) -> None:
        """Add a task that is to have this many tokens in all."""
        request = self.engine.intake.request(self.payload(name, prompt, tokens))
        self.scheduler.add_task(request, list(generated))

    def plan(self) -> Plan:
        """Plan a step, which is then in flight."""
        return self.mode.plan_step(self.group, lambda: None)

    def finish(self, plan: Plan, result: Any) -> dict[str, list[int]]:
        """Take in the result of a step; returns the new tokens by task."""
        outputs = self.mode.finish_step(plan, InflightStep(plan, result).tokens())
        return {each.request_id: list(each.new_token_ids) for each in outputs}

    def step(self) -> dict[str, list[int]]:
        """Run a step."""
        plan = self.plan()
        return self.finish(plan, self.mode.execute(plan))

    def run(self, steps: int = 200) -> dict[str, list[int]]:
        """Run at most this many steps, until no task is left; returns all new tokens by task."""
        tokens: dict[str, list[int]] = {}
        for _ in range(steps):
            if self.scheduler.idle:
                break
            for name, new in self.step().items():
                tokens.setdefault(name, []).extend(new)
        return tokens

    def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The tokens of a task that nothing disturbs; its blocks are cached no longer."""
        self.add("alone", prompt, tokens)
        given = self.run()["alone"]
        assert self.scheduler.withdraw().size == 0
        self.scheduler.grant(self.indices())
        return given
