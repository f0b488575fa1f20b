"""What KV pages in host memory cost and save on a GPU: two cells on one device, in turns.

`python -m tests.bench.gpu_host_kv --model llama-3-8b [--rounds 3] [--out FILE]`: one cell has host
pages, the other has none, and both have the same memory for KV. Both stay up, and an idle cell
computes nothing. Measured in each round, in both:

- `decode`: the time of a step of 128 streams, and `prefill`: prompts of 2,048 tokens, per second.
  Prompts are new, so the cell with pages only stores. A third row stores nothing: its blocks are
  all there.
- `load`: the time to the first token of 8,192 tokens that were computed before and have left the
  device, beside 32 streams, and what these streams saw meanwhile.
- `oversubscribed`: requests that need 1.5 times the KV memory.
- `conversations`: turns of conversations that need 1.5 times the KV memory together.

With `--ranks 2`, each cell is one group of two GPUs that hold a part of the weights each. With
`--profile DIR`, the main loops note what takes 50 µs or more, and the sums are printed.

`--model demo --device cpu` tries it out.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.gpu_cell import RunningCell, running_cell
from tests.bench.gpu_load import StreamLog
from tests.bench.gpu_numbers import longest_gap, steady_steps
from tests.bench.gpu_shapes import SHAPES, as_arguments, kv_bytes_per_token, write_shape

ASIDE = "tests.harness.faults.aside_worker"
SIDES = ("without", "with")
BLOCK = 16
"""Tokens."""
PARTS = ("decode", "prefill", "load", "oversubscribed", "conversations")


@dataclass(frozen=True)
class Sizes:
    """Sizes of load; tokens unless a name says otherwise."""

    kv: int = 120_000
    """What the KV memory of each cell holds."""
    host_share: float = 1.6
    """What the host's pages hold, over what a cell's KV memory holds: `load` fills the latter."""
    memory_share: float = 0.44
    decode_streams: int = 128
    decode_prompt: int = 256
    decode: int = 200
    prefills: int = 64
    """Requests."""
    prefill: int = 2_048
    loaded: int = 8_192
    beside_streams: int = 32
    beside: int = 400
    over_prompt: int = 2_048
    over: int = 2_048
    conversation: int = 8_192
    turn: int = 64
    at_once: int = 4
    """Conversations."""
    vocab: int = 100_000
    longest: int = 9_216


DEMO_SIZES = Sizes(
    kv=4_000,
    host_share=26.0,
    decode_streams=8,
    decode_prompt=64,
    decode=40,
    prefills=4,
    prefill=256,
    loaded=512,
    beside_streams=4,
    beside=100,
    over_prompt=200,
    over=200,
    conversation=500,
    turn=16,
    vocab=4_000,
    longest=1_024,
)

_seeds = itertools.count(1)


class Side:
    """One cell, and its client."""

    def __init__(self, cell: RunningCell, sizes: Sizes) -> None:
        self.cell, self.client, self.sizes = cell, cell.client, sizes

    def new_prompt(self, tokens: int) -> list[int]:
        """Tokens that no request began with."""
        return random.Random(next(_seeds)).choices(range(10, self.sizes.vocab), k=tokens)

    async def send(self, prompt: list[int], tokens: int) -> StreamLog:
        """Send one request."""
        name = f"task-{next(_seeds)}"
        return await self.client.start(name, self.client.prepare(name, prompt, tokens))

    async def all_of(self, prompts: list[list[int]], tokens: int) -> float:
        """Send these at once; return the seconds until the last has ended."""
        named = {f"task-{next(_seeds)}": prompt for prompt in prompts}
        ready = {name: self.client.prepare(name, each, tokens) for name, each in named.items()}
        started = time.perf_counter()
        await self.client.finish(ready)
        return time.perf_counter() - started

    async def settle(self) -> None:
        """Forget the round."""
        await self.client.clear()
        await asyncio.sleep(0.3)

    async def decode(self, prompts: list[list[int]]) -> float:
        """Return the time of a step with all streams, in ms."""
        await self.all_of(prompts, self.sizes.decode)
        (steady,) = steady_steps(self.client.batches).values()
        await self.settle()
        return steady["median_ms"]

    async def prefill(self) -> float:
        """Return prompt tokens per second."""
        sizes = self.sizes
        prompts = [self.new_prompt(sizes.prefill) for _ in range(sizes.prefills)]
        took_s = await self.all_of(prompts, 1)
        await self.settle()
        return sizes.prefills * sizes.prefill / took_s

    async def load(self) -> dict[str, float]:
        """Return times to the first token of one long prompt, beside streams, in ms."""
        sizes = self.sizes
        wanted = self.new_prompt(sizes.loaded)
        await self.all_of([wanted], 1)
        for _ in range(sizes.kv // sizes.loaded + 1):
            await self.all_of([self.new_prompt(sizes.loaded)], 1)  # It leaves the device.
        await self.settle()
        beside = [
            await self.send(self.new_prompt(64), sizes.beside) for _ in range(sizes.beside_streams)
        ]
        while min(log.tokens for log in beside) < sizes.beside // 4:
            await asyncio.sleep(0.005)
        found = {}
        for name in ("gone", "there"):  # The second time it is on the device.
            began = time.perf_counter()
            log = await self.send(wanted, 1)
            await log.done
            found[f"first_token_{name}_ms"] = (log.times[0] - log.sent_s) * 1e3
            found[f"gap_{name}_ms"] = longest_of(beside, began, time.perf_counter()) * 1e3
        quiet_from = time.perf_counter() + 0.05
        await asyncio.gather(*(log.done for log in beside))
        gaps = [b - a for log in beside for a, b in itertools.pairwise(log.times) if a > quiet_from]
        found["step_ms"] = statistics.median(gaps) * 1e3 if gaps else 0.0
        await self.settle()
        return found

    async def oversubscribed(self) -> float:
        """Return output tokens per second of requests that need 1.5 times the KV memory."""
        sizes = self.sizes
        count = int(1.5 * sizes.kv / (sizes.over_prompt + sizes.over))
        took_s = await self.all_of(
            [self.new_prompt(sizes.over_prompt) for _ in range(count)], sizes.over
        )
        await self.settle()
        return count * sizes.over / took_s

    async def conversations(self) -> dict[str, float]:
        """Return turns per second, and the median time to a turn's first token in ms."""
        sizes = self.sizes
        count = int(1.5 * sizes.kv / sizes.conversation)
        known = [self.new_prompt(sizes.conversation) for _ in range(count)]
        firsts: list[float] = []
        queue = iter(known)

        async def talk() -> None:
            for words in queue:
                words.extend(self.new_prompt(sizes.turn))
                log = await self.send(words, sizes.turn)
                await log.done
                firsts.append((log.times[0] - log.sent_s) * 1e3)

        await asyncio.gather(*(talk() for _ in range(sizes.at_once)))
        queue, firsts = iter(known), []
        started = time.perf_counter()
        await asyncio.gather(*(talk() for _ in range(sizes.at_once)))
        took_s = time.perf_counter() - started
        await self.settle()
        return {"turns_per_s": count / took_s, "turn_first_token_ms": statistics.median(firsts)}

    async def gauges(self) -> dict[str, int]:
        """What the rank has counted."""
        ranks = (await self.cell.facts())["gauges"]
        return {name: sum(each.get(name, 0) for each in ranks) for name in COUNTED}


COUNTED = (
    *("preemptions", "computed_tokens", "host_hits", "host_stored_bytes", "host_loaded_bytes"),
    *("host_late_blocks", "host_full_blocks", "host_pages", "host_registered_bytes"),
)


def longest_of(logs: list[StreamLog], start: float, end: float) -> float:
    """Return the longest time between two tokens of a stream that overlaps a span of time."""
    gaps = (longest_gap(log.times, start, end) for log in logs)
    return max((later - earlier for earlier, later in gaps), default=0.0)


async def measure(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Start both cells and measure the rounds."""
    results: dict[str, Any] = {"model": args.model, "ranks": args.ranks, "rounds": []}
    group = "dp1" if args.ranks == 1 else f"tp{args.ranks}"
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory()))
        model = write_shape(args.model, root)
        kv_bytes = sizes.kv * kv_bytes_per_token(model)
        host_gib = round(sizes.host_share * kv_bytes / 2**30, 2)
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_model_len": sizes.longest,
            "max_num_seqs": 256,
            "max_num_batched_tokens": min(8_192, sizes.longest),
            "kv_cache_memory_bytes": kv_bytes // args.ranks,
        }
        if args.device == "cuda":
            options |= {"load_format": "dummy", "gpu_memory_utilization": sizes.memory_share}
        else:
            options |= {"dtype": "float32", "kv_cache_memory_bytes": 10 << 20}
        sides: dict[str, Side] = {}
        for name in SIDES:
            print(f"starting the cell {name} host pages", flush=True)
            (root / name).mkdir()
            if args.profile:
                (args.profile / name).mkdir(parents=True)
                os.environ["PROFILE_OUT"] = str((args.profile / name).absolute())
            up = running_cell(
                root / name,
                ranks=args.ranks,
                model=model,
                device=args.device,
                engine_args=as_arguments(options),
                worker=worker_of(args),
                settings={
                    "host_kv_gib": host_gib if name == "with" else 0.0,
                    "weight_parts": args.ranks,
                    "layout": group,
                },
            )
            sides[name] = Side(await stack.enter_async_context(up), sizes)
            print(f"  after {sides[name].cell.start_s} s", flush=True)
        for side in sides.values():
            await one_round(side, ["decode", "prefill"])  # It warms up.
        for number in range(args.rounds):
            for name in SIDES if number % 2 else reversed(SIDES):
                row = {"side": name, **await one_round(sides[name], args.parts)}
                results["rounds"].append(row)
                print(json.dumps(row), flush=True)
        results["gauges"] = {name: await side.gauges() for name, side in sides.items()}
        results["logs"] = {name: side.cell.tail() for name, side in sides.items()}
    return results


def worker_of(args: argparse.Namespace) -> str:
    """Return the module that the ranks run."""
    if args.profile:
        return "tests.bench.profiled_worker"
    return "worker" if args.device == "cuda" else ASIDE


async def one_round(side: Side, parts: list[str]) -> dict[str, Any]:
    """Measure all parts of a round in one cell."""
    row: dict[str, Any] = {"spans_ns": {}}
    for part in parts:
        began_ns = time.monotonic_ns()
        row |= await one_part(side, part)
        row["spans_ns"][part] = began_ns, time.monotonic_ns()
    return row


async def one_part(side: Side, part: str) -> dict[str, float]:
    """Measure one part."""
    sizes = side.sizes
    if part == "decode":
        lengths = [sizes.decode_prompt - each % BLOCK for each in range(sizes.decode_streams)]
        # Each step fills the blocks of some of them.
        prompts = [side.new_prompt(each) for each in lengths]
        fresh_ms = await side.decode(prompts)
        # The same blocks again, so that nothing is stored.
        return {"decode_ms": fresh_ms, "decode_known_ms": await side.decode(prompts)}
    if part == "prefill":
        return {"prefill_per_s": await side.prefill()}
    if part == "load":
        return await side.load()
    if part == "oversubscribed":
        return {"oversubscribed_per_s": await side.oversubscribed()}
    return await side.conversations()


def print_profile(folder: Path, rounds: list[dict[str, Any]]) -> None:
    """Print, for each part and side, how often the ranks noted something, and their mean times."""
    for side in SIDES:
        events = [
            event
            for path in sorted((folder / side).glob("rank-*.events.json"))
            for event in json.loads(path.read_text())
        ]
        for row in rounds:
            for part, (began, ended) in row["spans_ns"].items() if row["side"] == side else ():
                sums: dict[str, list[float]] = {}
                for name, start, end in events:
                    if began <= start < ended:
                        sums.setdefault(name, []).append((end - start) / 1e6)
                print(f"{side} {part}, {(ended - began) / 1e6:.0f} ms:")
                for name, each in sorted(sums.items(), key=lambda item: -sum(item[1])):
                    mean, most = statistics.mean(each), max(each)
                    print(f"  {name}: {len(each)} of {mean:.3f} ms, {most:.2f} at most")


def main() -> None:
    """Measure, print medians and write all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*SHAPES, "demo"], default="llama-3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--parts", nargs="+", default=["decode", "prefill", "load", "oversubscribed"]
    )
    parser.add_argument("--profile", type=Path, help="a new folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = asyncio.run(measure(args, DEMO_SIZES if args.model == "demo" else Sizes()))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    print(json.dumps(results["gauges"], indent=1))
    if args.profile:
        print_profile(args.profile, results["rounds"])
    skipped = ("side", "spans_ns")
    names = dict.fromkeys(key for row in results["rounds"] for key in row if key not in skipped)
    for name in names:
        medians = [
            statistics.median(row[name] for row in results["rounds"] if row["side"] == side)
            for side in SIDES
        ]
        ratio = medians[1] / medians[0] if medians[0] else 0.0
        print(f"{name}: without {medians[0]:.3f}, with {medians[1]:.3f}, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
