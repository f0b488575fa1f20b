"""`python -m worker` with a stopwatch, or under cProfile.

`PROFILE_OUT` names a folder for rank-N.events.json: [what, began, ended] in nanoseconds of the
host's monotonic clock, for what takes 50 µs or more. With `PROFILE_KIND=cprofile` it gets
rank-N.txt instead, and with `PROFILE_KIND=torch` the operations of some prefills of wide groups.
Used by `tests.bench.profile_steps`.
"""

import cProfile
import functools
import importlib
import io
import json
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.__main__ import main

NOTED_NS = 50_000
TRACED_EVERY = 8
ROWS = 60
"""Of each profile."""

WATCHED = {
    "worker.rank.runtime.GroupRuntime": (
        "place",
        "begin",
        "park",
        "join",
        "unbind",
        "hand_over",
    ),
    "worker.rank.leases.Leases": ("begin", "withdraw"),
    "worker.rank.steps.Steps": ("lead", "execute", "_finish", "_push"),
    "worker.rank.inflight_step.InflightStep": ("tokens",),
    "worker.rank.loop.RankLoop": ("_take_inbox", "_do"),
    "worker.rank.migration.plan_ahead.MigrationPlanner": ("plan_ahead", "plan"),
    "worker.rank.migration.migration.Migration": (
        "publish",
        "_await_manifest",
        "_restore",
        "_go_on",
        "_hand_over",
        "_adopt",
    ),
    "worker.rank.migration.precopy.PreCopy": (
        "_begin",
        "_publish",
        "_read_all",
        "_find_draft",
        "_find_plan",
        "_copy_next",
        "_keep",
    ),
    "worker.rank.migration.early_requests.EarlyRequests": ("build", "completed", "expect"),
    "worker.rank.migration.copy_rounds.CopyRounds": (
        "_copy_beside_steps",
        "_copy_after_steps",
        "_await_quiesced",
    ),
    "worker.engine.scheduling.scheduler.ModeScheduler": (
        "plan_step",
        "finish_step",
        "adopt",
        "tidy",
    ),
    "worker.engine.scheduling.host_blocks.HostBlocks": ("plan", "ended"),
    "worker.engine.host_lanes.HostLanes": ("store", "look", "wait_stores", "load", "load_ahead"),
}

COUNTED = {"worker.engine.host_lanes.HostLanes": ("order_stores",)}
"""Noted however short."""


def table_of(profile: cProfile.Profile) -> str:
    """By own time, then by time with callees."""
    text = io.StringIO()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(ROWS)
    return text.getvalue()


def watch(events: list[tuple[str, int, int]], owner: Any, name: str, least_ns: int) -> None:
    """Note when a method of a class begins and ends, if it takes that long."""
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic_ns()
        try:
            return method(*args, **kwargs)
        finally:
            ended = time.monotonic_ns()
            if ended - began > least_ns:
                events.append((name, began, ended))

    setattr(owner, name, noted)


def watch_device(events: list[tuple[str, int, int]]) -> Callable[[], None]:
    """Note how long steps and copies take on the device; return a call for when all are over."""
    import torch

    from kvadaptor.transfer.boxes import DeviceBoxCopier
    from worker.rank.inflight_step import InflightStep

    device_s, copy = InflightStep.device_s, DeviceBoxCopier.copy
    copies: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def noted(self: InflightStep) -> float | None:
        seconds = device_s(self)
        if seconds is not None:
            ended = time.monotonic_ns()
            events.append(("device", ended - int(seconds * 1e9), ended))
        return seconds

    def timed(self: DeviceBoxCopier, *args: Any, waits: bool = True) -> Any:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        at = time.monotonic_ns()
        if waits:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        began.record(self._stream)
        copying = copy(self, *args, waits=False)
        ended.record(self._stream)
        copies.append((at, began, ended))
        return copying

    def finish() -> None:
        for at, began, ended in copies:
            events.append(("box_copy", at, at + int(began.elapsed_time(ended) * 1e6)))

    InflightStep.device_s = noted  # type: ignore[method-assign]
    DeviceBoxCopier.copy = timed  # type: ignore[method-assign,assignment]
    return finish


def trace_prefills(out: Path) -> None:
    """Leave torch's own profile of a few prefills of a wide group: host and device times by op."""
    from torch.profiler import ProfilerActivity, profile

    from worker.rank.steps import Steps

    execute = Steps.execute
    seen = 0

    def traced(self: Steps, mode: Any, plan: Any) -> Any:
        nonlocal seen
        is_prefill = plan.tokens > 1 and mode.key.width > 1
        seen += is_prefill
        if not is_prefill or seen % TRACED_EVERY:
            return execute(self, mode, plan)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            result = execute(self, mode, plan)
        table = trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS)
        name = f"rank-{self._runtime.engine.spec.rank}.torch.txt"
        with (out / name).open("a") as file:
            file.write(f"{plan.tokens} tokens\n{table}\n")
        return result

    Steps.execute = traced  # type: ignore[method-assign]


def install(out: Path, kind: str) -> None:
    """Let the ranks' loops leave their profile behind."""
    from worker.rank.loop import RankLoop

    if kind == "torch":
        trace_prefills(out)
        return
    events: list[tuple[str, int, int]] = []
    finish = watch_device(events) if kind == "events" else lambda: None
    run = RankLoop.run

    def profiled(self: RankLoop) -> None:
        rank = self.core.engine.spec.rank
        if kind == "cprofile":
            profile = cProfile.Profile()
            profile.runcall(run, self)
            (out / f"rank-{rank}.txt").write_text(table_of(profile))
        else:
            run(self)
            finish()
            (out / f"rank-{rank}.events.json").write_text(json.dumps(events))

    RankLoop.run = profiled  # type: ignore[method-assign]
    if kind != "cprofile":
        for watched, least_ns in ((WATCHED, NOTED_NS), (COUNTED, 0)):
            for owner, names in watched.items():
                module, _, kind_of = owner.rpartition(".")
                for name in names:
                    watch(events, getattr(importlib.import_module(module), kind_of), name, least_ns)


if __name__ == "__main__":
    install(Path(os.environ["PROFILE_OUT"]), os.environ.get("PROFILE_KIND", "events"))
    sys.exit(main())
