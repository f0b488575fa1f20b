"""`python -m worker` with a stopwatch, or under cProfile.

`PROFILE_OUT` names a folder for rank-N.events.json: [what, began, ended] in nanoseconds of the
host's monotonic clock, for what takes 50 µs or more; with `PROFILE_KIND=cprofile` it gets
rank-N.txt instead. Used by `tests.bench.profile_steps --cell`.
"""

import cProfile
import functools
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
ROWS = 60
"""Of each profile."""


def table_of(profile: cProfile.Profile) -> str:
    """By own time, then by time with callees."""
    text = io.StringIO()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(ROWS)
    return text.getvalue()


def watch(events: list[tuple[str, int, int]], owner: Any, name: str) -> None:
    """Note when a method of a class begins and ends."""
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic_ns()
        try:
            return method(*args, **kwargs)
        finally:
            ended = time.monotonic_ns()
            if ended - began > NOTED_NS:
                events.append((name, began, ended))

    setattr(owner, name, noted)


def install(out: Path, kind: str) -> None:
    """Let the ranks' loops leave their profile behind."""
    from worker.member import Member
    from worker.rank_loop import RankLoop

    events: list[tuple[str, int, int]] = []
    run = RankLoop.run

    def profiled(self: RankLoop) -> None:
        rank = self._rank
        if kind == "cprofile":
            profile = cProfile.Profile()
            profile.runcall(run, self)
            (out / f"rank-{rank}.txt").write_text(table_of(profile))
        else:
            run(self)
            (out / f"rank-{rank}.events.json").write_text(json.dumps(events))

    RankLoop.run = profiled  # type: ignore[method-assign]
    if kind != "cprofile":
        for name in ("place", "_execute", "_finish", "_push", "begin", "park", "join", "unbind"):
            watch(events, Member, name)
        for name in ("_lead_step", "_wait", "_report_if_due", "_take_inbox", "_carry_out"):
            watch(events, RankLoop, name)


if __name__ == "__main__":
    install(Path(os.environ["PROFILE_OUT"]), os.environ.get("PROFILE_KIND", "events"))
    sys.exit(main())
