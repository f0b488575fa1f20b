"""Goodput of an oversubscribed cell, with and without KV pages in host memory.

`python -m tests.bench.host_kv [--rounds 5]`: two CPU cells at once, which serve the same load in
turn, so both see the same machine. The load needs 1.5 times the KV pages that a cell has: without
host pages, tasks that lose theirs are computed again from the prompt.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell

PAGES_BYTES = 10 << 20
HOST_KV_GIB = 0.25
TASKS = 12
PROMPT_TOKENS, ANSWER_TOKENS = 480, 360
"""12 tasks of 840 tokens on two ranks; each rank has room for about four of its six."""


def prompts(number: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the prompt of each task of a round; none begins like another."""
    for task in range(TASKS):
        name = f"{number}-{task}"
        yield name, random.Random(name).choices(range(10, 4000), k=PROMPT_TOKENS)


async def serve(cell: BareCell, number: int) -> tuple[float, list[list[int]]]:
    """Serve one round; return the seconds that it took, and the tokens."""
    client = TaskClient()
    async with client.connected(cell):
        started = time.perf_counter()
        names = []
        for name, prompt in prompts(number):
            client.submit(name, prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            names.append(name)
        streams = await client.finish(*names)
        return time.perf_counter() - started, [stream.tokens for stream in streams]


def totals(cell: BareCell) -> dict[str, int]:
    """Return what a cell has preempted and computed so far."""
    time.sleep(0.5)  # Reports bring it.
    gauges = [rank["gauges"] for rank in cell.get("/admin/ranks")["ranks"]]
    names = ("preemptions", "computed_tokens", "host_hits")
    return {name: sum(each.get(name, 0) for each in gauges) for name in names}


def main() -> None:
    """Print the median goodput of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    took: dict[str, list[float]] = {"without": [], "with": []}
    with ExitStack() as stack:
        cells = {}
        for name, gib in (("without", 0.0), ("with", HOST_KV_GIB)):
            print(f"starting the cell {name} host pages", flush=True)
            folder = Path(stack.enter_context(TemporaryDirectory()))
            cells[name] = stack.enter_context(
                bare_cell(
                    folder,
                    ranks=2,
                    engine_args=[
                        *("--dtype", "float32", "--max-model-len", "1024"),
                        *("--kv-cache-memory-bytes", str(PAGES_BYTES)),
                    ],
                    limits={"host_kv_gib": gib},
                )
            )
        before = {name: totals(cell) for name, cell in cells.items()}
        for number in range(rounds):
            tokens = {}
            for name, cell in cells.items():
                seconds, tokens[name] = asyncio.run(serve(cell, number))
                took[name].append(seconds)
            assert tokens["with"] == tokens["without"]
            print(f"round {number}: {took['without'][-1]:.2f} s, {took['with'][-1]:.2f} s")
        for name, cell in cells.items():
            after = totals(cell)
            print(name, {key: after[key] - before[name][key] for key in after})
    goodput = {name: TASKS * ANSWER_TOKENS / statistics.median(each) for name, each in took.items()}
    for name, rate in goodput.items():
        print(f"{name} host pages: {rate:.0f} tokens/s")
    print(f"ratio {goodput['with'] / goodput['without']:.2f}")


if __name__ == "__main__":
    main()
