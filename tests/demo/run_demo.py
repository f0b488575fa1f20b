"""`make demo`: a whole cell, real OpenAI clients, and a layout that changes under running streams.

Starts `aileron up` on free ports, keeps several streams running while the layout goes to one wide
group and back, and prints what each stream and each switch saw. Exit status 0 only if every stream
was complete and every switch served. Ends everything it started.
"""

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from openai import AsyncOpenAI

from coordinator.cli.admin_client import AdminClient
from coordinator.cli.operate import switches_table
from coordinator.cli.ports import free_ports
from coordinator.cli.tables import format_table

STREAMS = 8
TOKENS_PER_STREAM = 400
TOKENS_BETWEEN_SWITCHES = 30
"""Each stream gets at least so many tokens in every layout."""
START_LIMIT_S = 300
RUN_LIMIT_S = 240
STOP_LIMIT_S = 60
QUESTIONS = ("What is a list?", "How do I read a file?", "What does json.dumps do?", "Why sort?")


@dataclass(slots=True)
class Stream:
    """What one client saw."""

    number: int
    tokens_seen: int = 0
    usage_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    arrivals: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """It ended by its own limit, and every token was counted once."""
        return self.finish_reason == "length" and self.usage_tokens == TOKENS_PER_STREAM

    @property
    def has_ended(self) -> bool:
        """No more tokens will come."""
        return bool(self.finish_reason or self.error)

    @property
    def longest_gap_ms(self) -> float:
        """The longest pause between two chunks, after the first."""
        gaps = [later - earlier for earlier, later in pairwise(self.arrivals)]
        return max(gaps, default=0.0) * 1000


async def converse(client: AsyncOpenAI, model: str, stream: Stream) -> None:
    """Run one stream to its end."""
    try:
        chunks = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTIONS[stream.number % len(QUESTIONS)]}],
            max_tokens=TOKENS_PER_STREAM,
            seed=stream.number,
            stream=True,
            stream_options={"include_usage": True},
            # The stream is to last, so the model may not end it.
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            if chunk.usage is not None:
                stream.usage_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                stream.arrivals.append(time.monotonic())
                stream.tokens_seen += 1
                stream.finish_reason = choice.finish_reason or stream.finish_reason
    except Exception as error:  # noqa: BLE001 -- whatever it is, the table says it and we exit 1
        stream.error = f"{type(error).__name__}: {error}"


async def next_layout(admin: AdminClient, layout: str, streams: list[Stream]) -> dict[str, Any]:
    """Let every stream go on for a while, then switch and return the switch's record."""
    marks = [stream.tokens_seen + TOKENS_BETWEEN_SWITCHES for stream in streams]
    while any(
        stream.tokens_seen < mark and not stream.has_ended
        for stream, mark in zip(streams, marks, strict=True)
    ):
        await asyncio.sleep(0.01)
    running = sum(not stream.has_ended for stream in streams)
    print(f"switching to {layout} under {running} running streams …", flush=True)
    answer = await asyncio.to_thread(admin.post, "/admin/layout?wait=1", {"layout": layout})
    return {"running": running, **answer}


@contextlib.asynccontextmanager
async def cell(arguments: argparse.Namespace, port: int, admin_port: int) -> AsyncIterator[None]:
    """Run `aileron up` and wait until it serves; stop it in the end."""
    command = [sys.executable, "-P", "-m", "coordinator.cli", "up"]
    command += ["--port", str(port), "--admin-port", str(admin_port), "--device", arguments.device]
    command += ["--ranks", str(arguments.ranks)]
    command += ["--model", arguments.model] if arguments.model else []
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        async with httpx.AsyncClient(trust_env=False) as http:
            while not await is_ready(http, port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("demo: the cell did not start; see the lines above.")
                await asyncio.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def is_ready(http: httpx.AsyncClient, port: int) -> bool:
    """Say whether the cell serves."""
    try:
        return (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def run(arguments: argparse.Namespace) -> int:
    """Start a cell and play the demo on it; returns the exit status."""
    port, admin_port = free_ports(2)
    async with cell(arguments, port, admin_port):
        url, admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
        return await play(url, admin_url, arguments.ranks)


async def play(url: str, admin_url: str, ranks: int) -> int:
    """Switch a cell that serves under running streams; returns the exit status."""
    admin = AdminClient(admin_url)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    model = (await client.models.list()).data[0].id
    streams = [Stream(number) for number in range(STREAMS)]
    talks = [asyncio.create_task(converse(client, model, stream)) for stream in streams]
    answers = []
    async with asyncio.timeout(RUN_LIMIT_S):
        for layout in (f"tp{ranks}", f"dp{ranks}"):
            answers.append(await next_layout(admin, layout, streams))
        await asyncio.gather(*talks)
    await client.close()
    switches = admin.get("/admin/switches?last=2")["switches"]
    return show(streams, answers, switches)


def show(
    streams: list[Stream], answers: list[dict[str, Any]], switches: list[dict[str, Any]]
) -> int:
    """Print the tables; returns the exit status."""
    rows = [
        (
            stream.number,
            stream.usage_tokens,
            f"{stream.longest_gap_ms:.0f}",
            "yes" if stream.is_complete else stream.error or f"no ({stream.finish_reason})",
        )
        for stream in streams
    ]
    print("\n" + format_table(("stream", "tokens", "longest gap ms", "complete"), rows))
    print("\n" + switches_table(switches) + "\n")
    under_load = all(answer["running"] == STREAMS for answer in answers)
    if not under_load:
        print("demo: some streams had ended before the last switch; nothing is shown by them.")
    good = under_load and all(stream.is_complete for stream in streams) and len(answers) == 2
    print("every stream was complete." if good else "demo: FAILED, see the tables.")
    return 0 if good else 1


def main() -> int:
    """Parse the command line and play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--model", default="")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
