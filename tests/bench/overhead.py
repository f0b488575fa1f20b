"""What HTTP, relay and coordinator add to AsyncLLM in-process: `python -m tests.bench.overhead`.

AsyncLLM of plain vLLM and aileron with one rank run side by side and are loaded in turn with the
same prompts: one request at a time for the time to the first token, several at once for the tokens
per second that clients receive. What aileron's engine computes differently is part of the number.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp

from tests.bench.cpu import OPTIONS, UNPACKED
from tests.bench.provenance import commit, cpu_name, today
from tests.bench.servers import ROOT, aileron_command, environment, free_port, running

PROMPT_TOKENS = 128
VOCABULARY = 4_000
LATENCY = {"at_once": 1, "tokens": 4, "requests": 40}
THROUGHPUT = {"at_once": 16, "tokens": 64, "requests": 48}
ADDED_P50_MS_MAX, ADDED_P99_MS_MAX = 2.0, 10.0
LOST_SHARE_MAX = 0.03


class InProcess:
    """The child that holds AsyncLLM."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, load: dict[str, Any]) -> dict[str, Any]:
        """Serve one load there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = self.answer()
        return found

    def answer(self) -> Any:
        """The next line that it says."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def in_process(options: list[str]) -> Iterator[InProcess]:
    """Run AsyncLLM in a child until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.overhead_engine", *options],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    child = InProcess(process)
    try:
        assert child.answer() == "ready"
        yield child
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


async def ask(client: aiohttp.ClientSession, prompt: list[int], tokens: int) -> float:
    """Send one streamed request; milliseconds to its first token."""
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    first_s, began = 0.0, time.perf_counter()
    async with client.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not first_s and line.startswith(b"data: "):
                first_s = time.perf_counter()
    return (first_s - began) * 1e3


async def over_http(url: str, load: dict[str, Any]) -> dict[str, Any]:
    """Serve one load through aileron's port."""
    places = asyncio.Semaphore(load["at_once"])
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client:
        began = time.perf_counter()

        async def one(prompt: list[int]) -> float:
            async with places:
                return await ask(client, prompt, load["tokens"])

        ttft_ms = await asyncio.gather(*(one(prompt) for prompt in load["prompts"]))
        took_s = time.perf_counter() - began
    tokens_per_s = len(load["prompts"]) * load["tokens"] / took_s
    return {"ttft_ms": list(ttft_ms), "tokens_per_s": tokens_per_s}


def sized(sizes: dict[str, int], seed: int) -> dict[str, Any]:
    """A load with prompts that no cache has seen."""
    draw = random.Random(seed)
    prompts = [
        draw.choices(range(10, VOCABULARY), k=PROMPT_TOKENS) for _ in range(sizes["requests"])
    ]
    return {"at_once": sizes["at_once"], "tokens": sizes["tokens"], "prompts": prompts}


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Server -> all times to the first token, in ms, and tokens per second of each round."""
    port = free_port()
    seen: dict[str, dict[str, list[float]]] = {
        name: {"ttft_ms": [], "tokens_per_s": []} for name in ("in-process", "aileron")
    }
    with ExitStack() as stack:
        print("starting both", flush=True)
        inner = stack.enter_context(in_process([*OPTIONS, *UNPACKED]))
        url = stack.enter_context(running(aileron_command(port, 1, OPTIONS), port, "/ready"))
        for number in range(-1, rounds):  # The first round warms up.
            for sizes in (LATENCY, THROUGHPUT):
                load = sized(sizes, 2 * number + (sizes is LATENCY))
                turns = [
                    ("in-process", lambda load=load: inner.ask(load)),
                    ("aileron", lambda load=load: asyncio.run(over_http(url, load))),
                ]
                for name, serve in turns if number % 2 else reversed(turns):
                    result = serve()
                    if number >= 0 and sizes is LATENCY:
                        seen[name]["ttft_ms"] += result["ttft_ms"]
                    elif number >= 0:
                        seen[name]["tokens_per_s"].append(result["tokens_per_s"])
            print(f"round {number + 1} of {rounds}", flush=True)
    return seen


def verdict(seen: dict[str, dict[str, list[float]]]) -> list[str]:
    """A table of both, and what was added and lost."""
    rows = ["| | in-process | aileron over HTTP | difference | target |", "|---|---|---|---|---|"]
    for place, limit in ((50, ADDED_P50_MS_MAX), (99, ADDED_P99_MS_MAX)):
        inner, outer = (
            statistics.quantiles(seen[name]["ttft_ms"], n=100)[place - 1]
            for name in ("in-process", "aileron")
        )
        rows.append(
            f"| TTFT p{place}, ms | {inner:.2f} | {outer:.2f} | {outer - inner:+.2f} "
            f"| at most +{limit:g} |"
        )
    inner, outer = (statistics.median(each["tokens_per_s"]) for each in seen.values())
    rows.append(
        f"| tokens/s, {THROUGHPUT['at_once']} at once | {inner:.0f} | {outer:.0f} "
        f"| {outer / inner - 1:+.1%} | at least -{LOST_SHARE_MAX:.0%} |"
    )
    return rows


def main() -> None:
    """Measure, print, and leave a dated table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    rows = verdict(measure(rounds))
    date = today()
    text = [
        f"# What the way over HTTP adds, {date}",
        "",
        f"Command: `python -m tests.bench.overhead --rounds {rounds}`, commit {commit()}, "
        f"{os.cpu_count()} cores of {cpu_name()}.",
        "AsyncLLM in-process (plain layers, as aileron's views are) and aileron with one rank side "
        f"by side, loaded in turn; prompts of {PROMPT_TOKENS} tokens.",
        "",
        *rows,
    ]
    file = ROOT / "docs" / "benchmarks" / f"{date}-cpu-overhead.md"
    file.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
