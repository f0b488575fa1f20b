"""How long clients wait for their next token when a switch comes between, in decode steps."""

import asyncio
import random
import statistics
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.xdist_group("ranks-two")]

PAUSE_STEPS_MAX = 3
"""Decode steps that pass between two tokens of a stream that a switch interrupts."""
PAUSE_ROUNDS_MIN, PAUSE_ROUNDS = 5, 60
"""Rounds whose median counts: other work on this machine makes it measure for longer."""
PAUSE_SWITCHES = 4


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
