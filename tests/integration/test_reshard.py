"""Running tasks cross a switch in the next step: with all their pages, or the most urgent ones."""

import asyncio
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from coordinator.protocol.messages import Tier
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient, bare_cell
from tests.harness.cells.crossing import LAYOUTS, TASKS
from tests.harness.cells.shared import FOUR_RANKS, PAIR

pytestmark = pytest.mark.slow

ENGINE_ARGS = ("--dtype", "float32", "--max-model-len", "1024")
PAUSE_STEPS_MAX = 3
"""Decode steps that pass between two tokens of a stream that a switch interrupts."""
PAUSE_ROUNDS_MIN, PAUSE_ROUNDS = 5, 60
"""Rounds whose median counts: other work on this machine makes it measure for longer."""
PAUSE_SWITCHES = 4
STREAMS = 8
SCARCE_PAGES = 48
CROWD = 24


@pytest.fixture(scope="module")
def scarce_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCell]:
    """Four ranks whose pages a crowd of tasks fills."""
    with bare_cell(
        tmp_path_factory.mktemp("scarce"),
        ranks=4,
        engine_args=[*ENGINE_ARGS, "--num-gpu-blocks-override", str(SCARCE_PAGES)],
        pause_limit_ms=60_000,
    ) as running:
        yield running


def pages_of_groups(cell: BareCell) -> list[int]:
    return [group["pages_total"] for group in cell.get("/admin/layout")["groups"]]


@pytest.mark.xdist_group(FOUR_RANKS)
@pytest.mark.timeout(120)
async def test_groups_have_all_pages_after_a_move(four_ranks: BareCell) -> None:
    """They are granted what is free after the move, as ranks foresee it before: no page less."""
    wanted = {}
    for layout in LAYOUTS:
        four_ranks.switch(layout, "recompute")
        wanted[layout] = pages_of_groups(four_ranks)
    client, draw = TaskClient(), random.Random(5)
    async with client.connected(four_ranks):
        for number in range(TASKS):
            client.submit(f"page-{number}", draw.choices(range(10, 4000), k=90), max_tokens=900)
        streams = list(client.streams.values())
        while not all(stream.tokens for stream in streams):
            await asyncio.sleep(0.01)
        for layout in (*LAYOUTS, *reversed(LAYOUTS[:-1])):
            await asyncio.to_thread(four_ranks.switch, layout, "reshard")
            assert pages_of_groups(four_ranks) == wanted[layout], layout
        assert not any(stream.finished for stream in streams), "nothing was moved in the end"
        for name in client.streams:
            client.cancel(name)


@pytest.mark.xdist_group(FOUR_RANKS)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("origin", "wanted"), [("dp4", "tp4"), ("tp2+dp2", "tp4")])
async def test_idle_ranks_begin_new_tasks_while_a_switch_waits(
    four_ranks: BareCell, origin: str, wanted: str
) -> None:
    """Soft preempt: tasks begun meanwhile keep their tokens and go on in the group."""
    draw = random.Random(4)
    old = [draw.choices(range(10, 4000), k=40) for _ in range(2)]
    new = [draw.choices(range(10, 4000), k=50) for _ in range(3)]
    tag = f"{origin}-{wanted}"
    four_ranks.switch(origin, "recompute")
    client = TaskClient()
    async with client.connected(four_ranks):

        async def tasks(turn: str, *, is_switched: bool) -> list[list[int]]:
            for number, prompt in enumerate(old):
                client.submit(f"{tag}-{turn}-old-{number}", prompt, max_tokens=200, seed=number)
            streams = [client.streams[name] for name in client.streams if f"{turn}-old" in name]
            while not all(stream.tokens for stream in streams):
                await asyncio.sleep(0.005)
            if is_switched:
                await asyncio.to_thread(four_ranks.ask, wanted, "speculate")
            for number, prompt in enumerate(new):
                client.submit(f"{tag}-{turn}-new-{number}", prompt, max_tokens=350, temperature=0.7)
            begun = [client.streams[name] for name in client.streams if f"{turn}-new" in name]
            while is_switched and not any(len(stream.tokens) > 5 for stream in begun):
                await asyncio.sleep(0.005)
            assert not is_switched or not all(stream.finished for stream in streams)
            finished = await client.finish(*[n for n in client.streams if f"-{turn}-" in n])
            return [stream.tokens for stream in finished]

        expected = await tasks("calm", is_switched=False)
        assert await tasks("switched", is_switched=True) == expected
    record = four_ranks.record(origin, wanted)
    assert record["outcome"] == "served"
    counts = {"drain": len(old), "speculate": len(new), "reshard": len(new)}
    told = [line for line in four_ranks.log("worker").splitlines() if '"move_' in line]
    assert record["tasks"] == {**counts, "pause": 0, "recompute": 0}, told


@dataclass(frozen=True)
class Pause:
    """One round of switches, in seconds; `steps` are sorted pauses between tokens without any."""

    steps: list[float]
    pauses: list[float]
    stalls: list[float]

    @property
    def in_steps(self) -> float:
        """The longest client pause per switch, in decode steps; medians."""
        return statistics.median(self.pauses) / statistics.median(self.steps)

    def __str__(self) -> str:
        return (
            f"decode step {statistics.median(self.steps) * 1e3:.1f} ms"
            f" (slowest tenth {self.steps[-len(self.steps) // 10] * 1e3:.1f});"
            f" longest client pause per switch {statistics.median(self.pauses) * 1e3:.1f} ms"
            f" = {self.in_steps:.1f} steps in the median, {max(self.pauses) * 1e3:.1f} ms at worst;"
            f" ranks stall {statistics.median(self.stalls) * 1e3:.1f} ms,"
            f" {max(self.stalls) * 1e3:.1f} at worst"
        )


@pytest.mark.long
@pytest.mark.xdist_group(PAIR)
@pytest.mark.timeout(360)
async def test_a_switch_pauses_clients_for_three_steps(pair: BareCell) -> None:
    """Long: it compares times of some milliseconds, which other tests on these cores would change.

    The step is measured in the same round, as the median over both layouts. What else this machine
    does only adds to a pause, so the calmest rounds in a row count.
    """
    rounds: list[Pause] = []
    for number in range(PAUSE_ROUNDS):
        rounds.append(await pauses(pair, f"round-{number}"))
        print(f"\n{rounds[-1]}", end="")
        last = rounds[-PAUSE_ROUNDS_MIN:]
        if len(last) == PAUSE_ROUNDS_MIN and typical(last) <= PAUSE_STEPS_MAX:
            break
    assert typical(last) <= PAUSE_STEPS_MAX, rounds
    calmest = min(last, key=lambda each: each.in_steps)
    assert max(calmest.pauses) <= 4 * PAUSE_STEPS_MAX * statistics.median(calmest.steps), calmest


def typical(rounds: list[Pause]) -> float:
    """The longest client pause per switch, in decode steps; the median of these rounds."""
    return statistics.median(each.in_steps for each in rounds)


async def pauses(cell: BareCell, tag: str) -> Pause:
    """Switch under four streams, and see what each switch does to them."""
    client, loop = TaskClient(), asyncio.get_running_loop()
    spans: list[tuple[float, float]] = []
    epochs = []
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(4)]
        for number, name in enumerate(names):
            prompt = random.Random(number).choices(range(10, 4000), k=60)
            client.submit(name, prompt, max_tokens=900)
        streams = [client.streams[name] for name in names]
        await asyncio.sleep(1.0)
        for layout in ("tp2", "dp2") * (PAUSE_SWITCHES // 2):
            started = loop.time()
            record = (await asyncio.to_thread(cell.switch, layout, "reshard"))["switch"]
            epochs.append(record["epoch"])
            spans.append((started, loop.time() + 0.05))
            await asyncio.sleep(0.25)
        assert not any(stream.finished for stream in streams), "the streams ended too early"
        for name in names:
            client.cancel(name)
    records = {r["epoch"]: r for r in cell.get("/admin/switches?last=60")["switches"]}
    found = [each for stream in streams for each in gaps(stream)]
    return Pause(
        sorted(gap for at, gap in found if not is_within(at, gap, spans)),
        [max(gap for at, gap in found if is_within(at, gap, [span])) for span in spans],
        [records[epoch]["stall_ms"] / 1e3 for epoch in epochs],
    )


def gaps(stream: Stream) -> list[tuple[float, float]]:
    """When each pause between two tokens began, and how long it was."""
    return [(before, after - before) for before, after in pairwise(stream.times)]


def is_within(at: float, gap: float, spans: list[tuple[float, float]]) -> bool:
    """Whether a pause overlaps one of these spans."""
    return any(at < end and at + gap > start for start, end in spans)


@pytest.mark.timeout(300)
async def test_where_pages_are_scarce_the_less_urgent_are_recomputed(
    scarce_cell: BareCell,
) -> None:
    cell = scarce_cell
    cell.switch("dp4", "recompute")
    before = cell.pages()
    expected = await crowd(cell, "calm", [])
    layouts = ("tp4", "dp4", "tp2+tp2", "dp2+tp2", "tp4", "tp2+dp2", "dp4")
    assert await crowd(cell, "scarce", [*layouts]) == expected
    records = cell.get("/admin/switches?last=60")["switches"]
    moved = [record for record in records if record["carry"] == "reshard"]
    counts = {c: sum(r["tasks"][c] for r in moved) for c in ("reshard", "recompute")}
    lines = [line for line in cell.log("worker").splitlines() if "move_short_of_pages" in line]
    told = [json.loads(line) for line in lines]
    rounds = [each["rounds"] for each in told]
    left = {tier.name.lower(): [0, 0] for tier in Tier}
    for each in told:
        for place, name in enumerate(("carried", "left")):
            for tier, count in each[name].items():
                left[tier][place] += count
    print(f"\n{counts}; rounds {rounds}; carried and left by tier where scarce: {left}")
    assert max(rounds, default=1) > 1, "no move took several rounds"
    assert counts["recompute"] > 0, "no task was left behind"
    share = [left[tier.name.lower()][1] / max(1, sum(left[tier.name.lower()])) for tier in Tier]
    assert share[Tier.INTERACTIVE] <= share[Tier.STANDARD] <= share[Tier.BATCH], left
    cell.switch("dp4", "recompute")
    assert cell.pages() == before


async def crowd(cell: BareCell, tag: str, layouts: list[str]) -> list[list[int]]:
    """Tasks that nearly fill the memory, in three tiers; returns each one's tokens."""
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(CROWD)]
        for number, name in enumerate(names):
            draw = random.Random(number)
            prompt = draw.choices(range(10, 4000), k=draw.randint(80, 300))
            tier = Tier(number % 3)
            client.submit(name, prompt, tier=tier, max_tokens=180, temperature=0.7, seed=number)
        await asyncio.sleep(0.6)
        for layout in layouts:
            await asyncio.to_thread(cell.switch, layout, "reshard")
            cell.pages()
            await asyncio.sleep(0.15)
        return [stream.tokens for stream in await client.finish(*names)]
