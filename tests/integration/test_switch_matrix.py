"""Four ranks through a walk in which all pairs of what can come together in a switch come.

Layouts, carry plans, moments and kinds of requests: `tests/harness/cells/switch_matrix.py`. Each
day has a walk of its own; AILERON_MATRIX_SEED=20261126 runs the one of that day again. Greedy
streams are what plain vLLM makes of the request alone; sampled ones, whose draws are ours (ADR
0009), are what the same cell makes of it without switches.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.cells.matrix_walk import Met, Switched, Walk, met_by_moment
from tests.harness.cells.random_load import alone, compare, settle
from tests.harness.cells.switch_matrix import (
    SEED_ENV,
    Moment,
    Plan,
    day_seed,
    describe,
    draw_walk,
)
from tests.harness.vllm.matrix_cases import Requests
from tests.harness.vllm.static_answers import static_answers

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks-four")]

MOVES = (Plan.RESHARD, Plan.SPECULATE)


@pytest.fixture(scope="module")
def seed() -> int:
    return day_seed()


@pytest.fixture(scope="module")
def requests(seed: int) -> Requests:
    """Those that the walk of the seed draws from."""
    return Requests(random.Random(f"requests {seed}"))


@pytest.fixture(scope="module")
def static(requests: Requests, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What plain vLLM generates for the greedy ones, and the log-probabilities of it."""
    folder: Path = tmp_path_factory.mktemp("static")
    return static_answers(list(requests), folder)


@pytest.mark.timeout(900)
async def test_streams_are_exact_through_every_pair_of_circumstances(
    four_ranks: BareCell,
    seed: int,
    requests: Requests,
    static: dict[int, Any],
    record_property: Callable[[str, object], None],
) -> None:
    rows = draw_walk(seed)
    record_property("summary", describe(rows, seed))
    with naming(seed):
        reference = await alone(four_ranks, [case for case in requests if not case.is_greedy])
        before = settle(four_ranks)
        client, started = TaskClient(), time.monotonic()
        async with client.connected(four_ranks):
            walk = Walk(four_ranks, client, requests, random.Random(f"walk {seed}"))
            await walk.go(rows)
        took = time.monotonic() - started
        worst = max(compare_one(each, static, reference) for each in walk.met)
        check_records(walk.switched)
        assert walk.overtaken > 0
        record_property(
            "summary",
            f"  {len(walk.met)} requests, {len(rows)} switches in {took:.1f} s, {walk.overtaken}"
            f" overtaken: {carried(walk)}, logprobs within {worst:.1e};"
            f" moments met: {met_by_moment(walk.switched)}",
        )
        assert settle(four_ranks) == before


@contextmanager
def naming(seed: int) -> Iterator[None]:
    """Say with each failure how the same walk is run again."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"run again with {SEED_ENV}={seed}")
        raise


def compare_one(met: Met, static: dict[int, Any], reference: dict[int, Stream]) -> float:
    """A stream is exact, up to where its client left; returns the largest logprob error."""
    try:
        return compare([met.case], {met.case.seed: met.stream}, static, reference)
    except AssertionError as error:
        error.add_note(f"submitted for {met.row}")
        raise


def check_records(switched: list[Switched]) -> None:
    """Every switch served what was asked; nothing that could move was computed again."""
    moves = 0
    for last, each in pairwise(switched):
        record, row = each.record, each.row
        about = f"{row}: {record}"
        assert (record["outcome"], record["to"]) == ("served", row.target), about
        if row.moment is Moment.OVERTAKEN:
            continue
        assert record["from"] == row.origin, about
        # Groups that form anew for pages in between do not serve, so they cannot speculate.
        forms_anew = record["epoch"] - last.record["epoch"] > 1
        assert record["carry"] == row.plan or (
            forms_anew and (row.plan, record["carry"]) == (Plan.SPECULATE, Plan.RESHARD)
        ), f"{about} after {last.record}"
        if row.plan in MOVES and not is_still_counted(last) and not each.paused:
            assert record["tasks"]["recompute"] == record["tasks"]["pause"] == 0, about
            moves += record["tasks"]["reshard"]
    assert moves > 5
    for moment, (met, count) in met_by_moment(switched).items():
        assert met > count / 2, f"{moment} was met {met} times of {count}"


def is_still_counted(last: Switched) -> bool:
    """Whether ranks may tell of what a switch did to tasks when another has begun."""
    return last.row.plan not in (*MOVES, Plan.DRAIN) or last.row.moment is Moment.OVERTAKEN


def carried(walk: Walk) -> dict[str, int]:
    """How many tasks were carried over by each plan."""
    counts: Counter[str] = Counter()
    for each in walk.switched:
        counts.update(each.record["tasks"])
    return dict(counts)
