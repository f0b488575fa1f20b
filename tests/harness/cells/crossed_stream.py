"""A stream that crosses layouts, one after the other."""

import asyncio

from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient

TOKENS_OF_EACH = 5
"""As many come in a layout before the switch to the next one, and more in the last."""
TOKENS_OF_THE_LAST = 50


async def cross(
    cell: BareCell, name: str, prompt: list[int], layouts: tuple[str, ...], tokens: int
) -> Stream:
    """A stream of this many tokens, with switches meanwhile; its client leaves after them."""
    client = TaskClient()
    async with client.connected(cell):
        stream = client.submit(name, prompt, max_tokens=tokens, logprobs=1, ignore_eos=True)
        for layout in layouts:
            await more_tokens(stream, TOKENS_OF_EACH)
            assert not stream.finished, f"it has ended before the switch to {layout}"
            await asyncio.to_thread(cell.switch, layout)
        if layouts:
            await more_tokens(stream, TOKENS_OF_THE_LAST)
            client.cancel(name)
        else:
            await client.finish(name)
    assert stream.failure is None, stream.failure
    return stream


async def more_tokens(stream: Stream, count: int) -> None:
    """Wait for this number of further tokens, or the end of the stream."""
    wanted = len(stream.tokens) + count
    while len(stream.tokens) < wanted and not stream.finished:
        await asyncio.sleep(0.002)
