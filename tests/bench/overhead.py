"""What HTTP, relay and coordinator add to AsyncLLM in-process: `python -m tests.bench.overhead`.

AsyncLLM of plain vLLM, `vllm serve` and aileron with one rank run side by side and are loaded in
turn with the same prompts: one request at a time for the time to the first token, several at once
for the tokens per second that clients receive. What aileron's engine computes differently is part
of the number. Processes of vLLM spin for about a second after their last request, so each turn
waits until all servers are quiet. CPU time per request tells costs apart that noise does not.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.bench.cpu import OPTIONS, UNPACKED
from tests.harness.cells.servers import (
    ROOT,
    aileron_command,
    environment,
    free_port,
    running,
    vllm_command,
)
from tests.harness.runs.provenance import commit, cores_and_processor, today

PROMPT_TOKENS = 128
VOCABULARY = 4_000
LATENCY = {"at_once": 1, "tokens": 4, "requests": 40}
THROUGHPUT = {"at_once": 16, "tokens": 64, "requests": 48}
ADDED_P50_MS_MAX, ADDED_P99_MS_MAX = 2.0, 10.0
LOST_SHARE_MAX = 0.03
NAMED = ["--served-model-name", "model"]
"""What aileron calls its model by default."""
QUIET_SHARE = 0.4
"""Share of one core below which all servers together count as quiet; one that spins takes one."""
QUIET_LOOK_S, QUIET_WAIT_S = 0.25, 20.0
INNER, PEER, EARLIER, OURS = "AsyncLLM in-process", "vllm serve", "aileron before", "aileron"


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


class Servers:
    """The processes of each server, and the CPU time they have used."""

    def __init__(self) -> None:
        self._roots: dict[str, psutil.Process] = {}
        self._me = psutil.Process()

    def started(self, name: str) -> None:
        """Take the newest child of this process for the server of this name."""
        known = {process.pid for process in self._roots.values()}
        (self._roots[name],) = (each for each in self._me.children() if each.pid not in known)

    def cpu_s(self, name: str) -> dict[str, float]:
        """Role of a server's process -> seconds of CPU so far; of its children by their names."""
        seconds: dict[str, float] = {}
        root = self._roots[name]
        for process in [root, *root.children(recursive=True)]:
            try:
                words, times = process.cmdline(), process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            role = next((known for known in ROLES if known in " ".join(words[:5])), "front end")
            seconds[ROLES.get(role, role)] = (
                seconds.get(ROLES.get(role, role), 0.0) + times.user + times.system
            )
        return seconds

    def wait_until_quiet(self) -> None:
        """Return when no server does anything any more; raises TimeoutError."""
        deadline = time.monotonic() + QUIET_WAIT_S
        before = self._all_s()
        while time.monotonic() < deadline:
            time.sleep(QUIET_LOOK_S)
            now = self._all_s()
            if now - before < QUIET_SHARE * QUIET_LOOK_S:
                return
            before = now
        raise TimeoutError("the servers do not come to rest.")

    def _all_s(self) -> float:
        return sum(sum(self.cpu_s(name).values()) for name in self._roots)


ROLES = {
    "VLLM::EngineCore": "engine core",
    "VLLM::Worker": "engine worker",
    "-m gateway": "gateway",
    "-m coordinator": "coordinator and CLI",
    "-m worker": "rank",
}
"""What is found in the first words of a command line, and what it is called in the table."""


@dataclass
class Seen:
    """What was seen of one server."""

    ttft_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, Counter[str]] = field(
        default_factory=lambda: {"latency": Counter(), "throughput": Counter()}
    )
    requests: Counter[str] = field(default_factory=Counter)


def measure(rounds: int, earlier: Path | None) -> dict[str, Seen]:
    """Server -> what was seen of it; `earlier` is another checkout of aileron to compare with."""
    servers, urls = Servers(), {}
    with ExitStack() as stack:
        print("starting all", flush=True)
        inner = stack.enter_context(in_process([*OPTIONS, *UNPACKED]))
        servers.started(INNER)
        for name, root in ((PEER, ROOT), (EARLIER, earlier), (OURS, ROOT)):
            if root is None:
                continue
            port = free_port()
            command, probe = aileron_command(port, 1, OPTIONS), "/ready"
            if name == PEER:
                command = [*vllm_command(port, [*OPTIONS, *UNPACKED]), *NAMED]
                probe = "/health"
            urls[name] = stack.enter_context(running(command, port, probe, root))
            servers.started(name)
        seen = {name: Seen() for name in (INNER, *urls)}

        def serve(name: str, load: dict[str, Any]) -> dict[str, Any]:
            if name == INNER:
                return inner.ask(load)
            return asyncio.run(over_http(urls[name], load))

        for number in range(-1, rounds):  # The first round warms up.
            for kind, sizes in (("latency", LATENCY), ("throughput", THROUGHPUT)):
                load = sized(sizes, 2 * number + (sizes is LATENCY))
                names = list(seen) if number % 2 else list(reversed(seen))
                for name in names:
                    servers.wait_until_quiet()
                    before = servers.cpu_s(name)
                    result = serve(name, load)
                    used = {
                        role: s - before.get(role, 0) for role, s in servers.cpu_s(name).items()
                    }
                    if number >= 0:
                        note(seen[name], kind, result, used)
            print(f"round {number + 1} of {rounds}", flush=True)
    return seen


def note(seen: Seen, kind: str, result: dict[str, Any], used: dict[str, float]) -> None:
    """Add what one turn has shown."""
    seen.cpu_s[kind].update(used)
    seen.requests[kind] += len(result["ttft_ms"])
    if kind == "latency":
        seen.ttft_ms += result["ttft_ms"]
    else:
        seen.tokens_per_s.append(result["tokens_per_s"])


def verdict(seen: dict[str, Seen]) -> list[str]:
    """A table of all, what each adds to the first, and what it costs in CPU time."""
    rows = [f"| | {' | '.join(seen)} | target |", "|---" * (len(seen) + 2) + "|"]
    for place, limit in ((50, ADDED_P50_MS_MAX), (99, ADDED_P99_MS_MAX)):
        base, *ms = (statistics.quantiles(each.ttft_ms, n=100)[place - 1] for each in seen.values())
        cells = [f"{base:.2f}", *(f"{each:.2f} ({each - base:+.2f})" for each in ms)]
        rows.append(f"| TTFT p{place}, ms | {' | '.join(cells)} | at most +{limit:g} |")
    base, *rates = (statistics.median(each.tokens_per_s) for each in seen.values())
    cells = [f"{base:.0f}", *(f"{each:.0f} ({each / base - 1:+.1%})" for each in rates)]
    what = f"tokens/s, {THROUGHPUT['at_once']} at once"
    rows.append(f"| {what} | {' | '.join(cells)} | at least -{LOST_SHARE_MAX:.0%} |")
    return [*rows, "", *cpu_table(seen)]


def cpu_table(seen: dict[str, Seen]) -> list[str]:
    """CPU milliseconds per request of every process."""
    rows = [
        f"CPU milliseconds per request: of {LATENCY['tokens']} tokens one at a time, and of "
        f"{THROUGHPUT['tokens']} tokens {THROUGHPUT['at_once']} at once.",
        "",
        "| server | process | one at a time | at once |",
        "|---|---|---|---|",
    ]
    for name, each in seen.items():
        for role in each.cpu_s["throughput"]:
            ms = [1e3 * each.cpu_s[kind][role] / each.requests[kind] for kind in each.cpu_s]
            rows.append(f"| {name} | {role} | {ms[0]:.2f} | {ms[1]:.2f} |")
    return rows


def main() -> None:
    """Measure, print, and leave a dated table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    rows = verdict(measure(rounds, arguments.before))
    date = today()
    text = [
        f"# What the way over HTTP adds, {date}",
        "",
        f"Command: `python -m tests.bench.overhead --rounds {rounds}`, commit {commit()}, "
        f"{cores_and_processor()}.",
        "AsyncLLM in-process and `vllm serve` (plain layers, as aileron's views are) and aileron "
        "with one rank side by side, loaded in turn once all are quiet; prompts of "
        f"{PROMPT_TOKENS} tokens.",
        "",
        *rows,
    ]
    file = ROOT / "docs" / "benchmarks" / f"{date}-cpu-overhead.md"
    file.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
