"""What servers add to the first token by the prompt's size: `python -m tests.bench.prompt_size`.

aileron's gateway and vLLM's API server run side by side, each over an engine in another process
that computes nothing (`tests.bench.instant_engine`), and are loaded in turn: what is measured is
the way of a chat from the socket to the engine and back, with tokenizing. A real prefill hides it.
Four looks: TTFT by size and number of clients; the gaps of small streams while large prompts come
in, which show work that holds the event loop; TTFT of short chats among long ones, which shows work
that stands in a queue; and CPU time per streamed token.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from tests.bench.instant_engine import STEP_S
from tests.harness.cells.servers import MODEL, ROOT, environment, free_port, running
from tests.harness.runs.provenance import commit, cores_and_processor, today

SIZES = {"128 tokens": 360, "20 KB": 20_000, "220 KB": 220_000}
"""Name -> characters of text."""
MESSAGE_CHARS = 4_000
CLIENTS = (1, 32, 150)
REQUESTS = {1: 16, 32: 32, 150: 150}
"""Clients -> requests in all."""
LARGE_ONES = 4
"""A sequential client sends this many times fewer of the largest prompts."""
ANSWER_TOKENS = 4
CONTEXT_TOKENS = 131_072
OPTIONS = [
    *("--max-model-len", str(CONTEXT_TOKENS), "--dtype", "bfloat16"),
    *("--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT_TOKENS})),
]
PEER, EARLIER, OURS = "vllm serve", "aileron before", "aileron"
BESIDE = {"streams": 8, "prompts": 6, "clients": 6, "short": 10}
REST_LIMIT_S, REST_LOOK_S, REST_SHARE = 60.0, 0.5, 0.15
"""A server that rests uses less than this share of a core between two looks."""
PER_TOKEN = {"clients": 32, "requests": 32, "tokens": 151}


@contextmanager
def gateway(root: Path) -> Iterator[tuple[str, int]]:
    """Run a checkout's gateway over a cell that answers at once; yields its URL and process id."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cell = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.instant_engine", "cell"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
        )
        stack.callback(cell.wait)
        stack.callback(cell.kill)
        assert cell.stdout is not None
        port = free_port()
        config = {
            "model": {"path": str(MODEL), "served_name": "model", "engine_args": OPTIONS},
            "coordinator": {"listen": f"127.0.0.1:{json.loads(cell.stdout.readline())['port']}"},
            "gateway": {"port": port},
            "run_dir": folder,
        }
        path = Path(folder) / "gateway.json"
        path.write_text(json.dumps(config))
        token = {"AILERON_TOKEN": "a-secret-for-tests-only"}
        command = [sys.executable, "-m", "gateway", "--config", str(path)]
        url = stack.enter_context(
            running(command, port, "/ready", root, {**environment(root), **token})
        )
        yield url, _child_with("-m gateway")


@contextmanager
def vllm_server() -> Iterator[tuple[str, int]]:
    """Run vLLM's API server over an engine that answers at once."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [sys.executable, "-m", "tests.bench.instant_vllm", folder, "--model", str(MODEL)]
        options = ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
        with running([*command, *options, *OPTIONS], port) as url:
            yield url, _child_with("instant_vllm")


def _child_with(mark: str) -> int:
    """The newest child of this process with this in its command line."""
    children = psutil.Process().children()
    return max(
        (each for each in children if mark in " ".join(each.cmdline())),
        key=psutil.Process.create_time,
    ).pid


def source_text() -> str:
    """Text of the kind that coding agents send: this repository's own source."""
    files = sorted((ROOT / "coordinator").rglob("*.py"))
    return "\n".join(file.read_text() for file in files)


def body_of(text: str, chars: int, number: int, tokens: int) -> bytes:
    """Return a chat of `chars` characters in messages of users and assistants; all differ."""
    start = number * 977 % (len(text) - chars)
    cut = f"{number}\n{text[start : start + chars]}"[:chars]
    pieces = [cut[at : at + MESSAGE_CHARS] for at in range(0, len(cut), MESSAGE_CHARS)]
    roles = ["system", *(("user", "assistant")[place % 2] for place in range(len(pieces)))]
    messages: list[dict[str, str]] = [
        {"role": role, "content": piece} for role, piece in zip(roles, pieces, strict=False)
    ]
    messages[-1]["role"] = "user"
    body = {
        "model": "model",
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


async def ask(client: aiohttp.ClientSession, body: bytes) -> list[float]:
    """Send one chat; seconds from its send to each of its events."""
    began, times = time.perf_counter(), []
    headers = {"Content-Type": "application/json"}
    async with client.post("/v1/chat/completions", data=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - began)
    return times


def session(url: str) -> aiohttp.ClientSession:
    """Connections to a server, as many as are wanted."""
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def in_turns(url: str, clients: int, bodies: Sequence[bytes]) -> list[list[float]]:
    """Let each client send one request after another until all are answered."""
    waiting, answers = iter(bodies), []

    async def one(client: aiohttp.ClientSession) -> None:
        for body in waiting:
            answers.append(await ask(client, body))

    async with session(url) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    return answers


async def short_beside_long(url: str, text: str, seed: int) -> list[float]:
    """Seconds to the first token of short chats while clients send long ones all the time."""
    long = [body_of(text, SIZES["220 KB"], seed + place, 1) for place in range(BESIDE["clients"])]
    times: list[float] = []
    async with session(url) as client:

        async def again(body: bytes) -> None:
            while True:
                await ask(client, body)

        crowd = [asyncio.create_task(again(body)) for body in long]
        await asyncio.sleep(0.5)
        for place in range(BESIDE["short"]):
            body = body_of(text, SIZES["128 tokens"], seed + place, 1)
            times.append((await ask(client, body))[0])
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    return times


async def beside(url: str, text: str, seed: int) -> list[float]:
    """Seconds between the events of small streams while large prompts come one after another."""
    async with session(url) as client:
        large = [
            body_of(text, SIZES["220 KB"], seed + place, 1) for place in range(BESIDE["prompts"])
        ]
        small = body_of(text, SIZES["128 tokens"], seed, 100_000)
        gaps: list[float] = []
        loading = asyncio.Event()

        async def stream() -> None:
            last = 0.0
            headers = {"Content-Type": "application/json"}
            async with client.post("/v1/chat/completions", data=small, headers=headers) as response:
                async for line in response.content:
                    now = time.perf_counter()
                    if line.startswith(b"data: {"):
                        if last and loading.is_set():
                            gaps.append(now - last)
                        last = now

        streams = [asyncio.create_task(stream()) for _ in range(BESIDE["streams"])]
        await asyncio.sleep(1)
        loading.set()
        for body in large:
            await ask(client, body)
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return gaps


@dataclass
class Seen:
    """The measurements of one server: lists over the rounds."""

    ttft_s: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """(size, clients) -> median of each round."""
    cpu_s: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """(size, clients) -> seconds of CPU per request of each round."""
    gaps_s: list[tuple[float, float]] = field(default_factory=list)
    """99th percentile and longest gap of each round."""
    short_s: list[float] = field(default_factory=list)
    """Median of each round."""
    per_token_s: list[float] = field(default_factory=list)

    def newest(self) -> dict[str, float]:
        """The newest round, in ms and us."""
        ttft = {f"{size}, {clients}": 1e3 * s[-1] for (size, clients), s in self.ttft_s.items()}
        more = {
            "gap": 1e3 * self.gaps_s[-1][1],
            "short": 1e3 * self.short_s[-1],
            "token us": 1e6 * self.per_token_s[-1],
        }
        return {name: round(value, 1) for name, value in (ttft | more).items()}


def cpu_s(process: int) -> float:
    """Seconds of CPU that a process has used."""
    times = psutil.Process(process).cpu_times()
    return times.user + times.system


def rest(process: int) -> None:
    """Return when a server has nothing left to do, such as the prompts of clients that left."""
    deadline = time.monotonic() + REST_LIMIT_S
    while time.monotonic() < deadline:
        before = cpu_s(process)
        time.sleep(REST_LOOK_S)
        if cpu_s(process) - before <= REST_SHARE * REST_LOOK_S:
            return
    raise TimeoutError("the server does not come to rest.")


def look(seen: Seen, url: str, process: int, text: str, seed: int, sizes: Sequence[str]) -> None:
    """Load one server once in all ways."""
    for size in sizes:
        for clients in CLIENTS:
            count = REQUESTS[clients] // (LARGE_ONES if clients == 1 and size == "220 KB" else 1)
            bodies = [
                body_of(text, SIZES[size], seed + place, ANSWER_TOKENS) for place in range(count)
            ]
            rest(process)
            before = cpu_s(process)
            answers = asyncio.run(in_turns(url, clients, bodies))
            seen.cpu_s[size, clients].append((cpu_s(process) - before) / count)
            seen.ttft_s[size, clients].append(statistics.median(each[0] for each in answers))
    rest(process)
    gaps = asyncio.run(beside(url, text, seed))
    seen.gaps_s.append((statistics.quantiles(gaps, n=100)[98], max(gaps)))
    rest(process)
    short = asyncio.run(short_beside_long(url, text, seed))
    seen.short_s.append(statistics.median(short))
    spent = []
    for tokens in (1, PER_TOKEN["tokens"]):
        bodies = [
            body_of(text, SIZES["128 tokens"], seed + place, tokens)
            for place in range(PER_TOKEN["requests"])
        ]
        rest(process)
        before = cpu_s(process)
        asyncio.run(in_turns(url, PER_TOKEN["clients"], bodies))
        spent.append(cpu_s(process) - before)
    more = (PER_TOKEN["tokens"] - 1) * PER_TOKEN["requests"]
    seen.per_token_s.append((spent[1] - spent[0]) / more)


def measure(rounds: int, earlier: Path | None, sizes: Sequence[str]) -> dict[str, Seen]:
    """Server -> its measurements, loaded in turn; the order turns around each round."""
    text = source_text()
    with ExitStack() as stack:
        servers = {PEER: stack.enter_context(vllm_server())}
        if earlier is not None:
            servers[EARLIER] = stack.enter_context(gateway(earlier))
        servers[OURS] = stack.enter_context(gateway(ROOT))
        found = {name: Seen() for name in servers}
        warm = body_of(text, SIZES["20 KB"], 0, ANSWER_TOKENS)
        for url, _ in servers.values():
            asyncio.run(in_turns(url, 4, [warm] * 16))
        for number in range(rounds):
            for name in list(servers) if number % 2 else reversed(servers):
                look(found[name], *servers[name], text, 1_000 * number, sizes)
            for name, seen in found.items():
                print(name, json.dumps(seen.newest()), flush=True)
            print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
    return found


def table(found: dict[str, Seen], sizes: Sequence[str]) -> list[str]:
    """Rows of medians over the rounds."""
    rows = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    base = found[PEER]
    for size in sizes:
        for clients in CLIENTS:
            key = size, clients
            peer_ms = 1e3 * statistics.median(base.ttft_s[key])
            cells = []
            for name, seen in found.items():
                ms = 1e3 * statistics.median(seen.ttft_s[key])
                cpu_ms = 1e3 * statistics.median(seen.cpu_s[key])
                added = "" if name == PEER else f" ({ms - peer_ms:+.1f})"
                cells.append(f"{ms:.1f}{added}, CPU {cpu_ms:.1f}")
            rows.append(f"| {size}, {clients} clients | {' | '.join(cells)} |")
    gaps = [
        " / ".join(
            f"{1e3 * statistics.median(column):.0f}" for column in zip(*each.gaps_s, strict=True)
        )
        for each in found.values()
    ]
    rows.append(f"| gaps beside 220 KB prompts, p99 / longest, ms | {' | '.join(gaps)} |")
    short = [f"{1e3 * statistics.median(each.short_s):.0f}" for each in found.values()]
    label = f"TTFT of 128 tokens beside {BESIDE['clients']} clients with 220 KB, ms"
    rows.append(f"| {label} | {' | '.join(short)} |")
    costs = [f"{1e6 * statistics.median(each.per_token_s):.0f}" for each in found.values()]
    rows.append(f"| CPU per streamed token, us | {' | '.join(costs)} |")
    return rows


def main() -> None:
    """Measure, print, and leave a dated table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES], default=[*SIZES])
    parser.add_argument("--out", type=Path, help="where the table is written")
    arguments = parser.parse_args()
    rows = table(measure(arguments.rounds, arguments.before, arguments.sizes), arguments.sizes)
    text = [
        f"# Time to the first token by the prompt's size, {today()}",
        "",
        f"Command: `python -m tests.bench.prompt_size --rounds {arguments.rounds}`, commit "
        f"{commit()}, {cores_and_processor()}.",
        f"TTFT p50 in ms and CPU ms per request of the serving process; steps of "
        f"{1e3 * STEP_S:.0f} ms.",
        "",
        *rows,
    ]
    if arguments.out is not None:
        arguments.out.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
