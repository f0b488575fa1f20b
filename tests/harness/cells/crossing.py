"""Tasks that cross switches of a cell of four ranks, and the tokens that come of them."""

import asyncio
import random

from tests.harness.cells.bare_cell import BareCell, TaskClient

LAYOUTS = ("dp4", "tp2+dp2", "tp2+tp2", "tp4", "dp2+tp2")
TASKS = 16
TOKENS = 150


def prompt(number: int) -> list[int]:
    """A prompt of token ids, different for each task."""
    return random.Random(number).choices(range(10, 4000), k=20 + 7 * number)


async def run(
    cell: BareCell, tag: str, switches: list[tuple[str, str]], tokens: int = TOKENS
) -> list[list[int]]:
    """All tasks at once, with these switches meanwhile; returns each task's tokens."""
    client = TaskClient()
    async with client.connected(cell):
        names = [f"{tag}-{number}" for number in range(TASKS)]
        for number, name in enumerate(names):
            temperature = 0.8 if number % 2 else 0.0
            client.submit(
                name, prompt(number), max_tokens=tokens, temperature=temperature, seed=number
            )
        await asyncio.sleep(0.5)
        for layout, carry in switches:
            await asyncio.to_thread(cell.switch, layout, carry)
            await asyncio.sleep(0.25)
        return [stream.tokens for stream in await client.finish(*names)]


class Calm:
    """What becomes of the tasks without a switch; they run for whoever asks first."""

    def __init__(self) -> None:
        self._tokens: list[list[int]] = []

    async def tokens(self, cell: BareCell) -> list[list[int]]:
        """Each task's tokens."""
        if not self._tokens:
            self._tokens = await run(cell, "calm", [])
        return self._tokens
