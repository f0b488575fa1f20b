"""`make soak`: a real cell for hours under switches, kills, bursts and clients that leave.

Every stream is one of a few questions, whose answers are known. At the end nothing may have grown.
Leaves a dated table. `SOAK_MINUTES`, `SOAK_RANKS`, `SOAK_KILL_S` and `SOAK_DEVICE` set how long,
how wide, how often a rank is killed, and `cpu` or `cuda`; `SOAK_OUT` is a folder for the table.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from openai import AsyncOpenAI, OpenAIError
from openai.types import Completion

from comm_pool.layout import Mode, format_layout, supported_layouts
from tests.bench import gpu
from tests.bench.gpu_servers import gpu_memory_mib
from tests.harness.cells.admin import ask, get_json, post, switch
from tests.harness.cells.devices import ranks_per_device
from tests.harness.cells.servers import MODEL, ROOT, environment, free_port, running
from tests.harness.runs.provenance import commit, cores_and_processor, today
from tests.soak.asked import TOKENS, Answer, Question, is_right, questions
from tests.soak.measures import (
    Sample,
    Slopes,
    memory_kept,
    pages_lost,
    sample,
    segments,
    slopes,
)

MINUTES = float(os.environ.get("SOAK_MINUTES", "120"))
RANKS = int(os.environ.get("SOAK_RANKS", "2"))
KILL_S = float(os.environ.get("SOAK_KILL_S", "900"))
DEVICE = os.environ.get("SOAK_DEVICE", "cpu")
SWITCH_S = 20.0
SAMPLE_S = 10.0
BURST_S = 60.0
BURST = 24
CLIENTS = 4
LEAVES_SHARE = 0.1
ALL_TOKENS_LIMIT_S = 180.0
SETTLE_S = 180.0
QUIET_S = 10.0
"""Behind a burst; servers and clients close connections that nobody uses after 5 s."""
APART_S = 15.0
"""So long ranks of several cohorts serve as they are; then all are started again together."""
WIDE_MODE = "tp" if RANKS > 1 else "dp"
CARRIES = ("reshard", "reshard", "pause", "recompute")
QUESTIONS = questions(DEVICE)
OPTIONS = [
    *("--max-model-len", "1024", "--max-num-seqs", "32"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
    *(("--dtype", "float32", "--enforce-eager") if DEVICE == "cpu" else ("--dtype", "bfloat16")),
]


@dataclass
class Soak:
    """One run: where the cell is, and what came of it so far."""

    url: str
    admin: str
    model: str
    draw: random.Random
    expected: dict[Question, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    asking: int = 0
    """Requests that wait for an answer now."""
    crowded_s: float = 0.0
    """When more than the steady clients were asking last."""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def is_quiet(self) -> bool:
        """A burst's connections are open files; a leak is what stays when they are gone."""
        return self.asking <= CLIENTS and self.now_s - self.crowded_s > QUIET_S

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a request while it waits."""
        self.asking += 1
        try:
            yield
        finally:
            if self.asking > CLIENTS:
                self.crowded_s = self.now_s
            self.asking -= 1


async def answer_to(
    soak: Soak, client: AsyncOpenAI, question: Question, leaves_after: int | None = None
) -> Answer:
    """One answer, or the beginning of one whose client leaves."""
    text, chunks, tokens = "", 0, 0
    stream = await client.completions.create(
        model=soak.model, stream=True, stream_options={"include_usage": True}, **question.body
    )
    async with stream:
        chunk: Completion
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            chunks += 1
            if leaves_after is not None and chunks >= leaves_after:
                return Answer(text)
    return Answer(text, tokens)


async def one_request(soak: Soak, client: AsyncOpenAI) -> None:
    """Ask one of the questions and compare."""
    question = soak.draw.choice(QUESTIONS)
    leaves = soak.draw.randrange(1, TOKENS // 2) if soak.draw.random() < LEAVES_SHARE else None
    try:
        with soak.one_more():
            async with asyncio.timeout(ALL_TOKENS_LIMIT_S):
                answer = await answer_to(soak, client, question, leaves)
    except (OpenAIError, TimeoutError) as error:
        soak.counts["failed"] += 1
        soak.wrong.append(f"{soak.now_s:.0f} s: {type(error).__name__}: {error}"[:300])
        return
    soak.counts["left" if leaves else "whole"] += 1
    if not is_right(question, answer, soak.expected):
        soak.counts["not exact"] += 1
        whole = question.sentence or soak.expected[question]
        soak.wrong.append(
            f"{soak.now_s:.0f} s: {question.prompt!r} gave {answer}, not {whole!r}"[:600]
        )


async def clients(soak: Soak, client: AsyncOpenAI, until_s: float) -> None:
    """A few clients that ask again and again, and a burst now and then."""

    async def one() -> None:
        while soak.now_s < until_s:
            await one_request(soak, client)
            await asyncio.sleep(soak.draw.uniform(0.0, 1.0))

    async def bursts() -> None:
        while soak.now_s < until_s - BURST_S:
            await asyncio.sleep(BURST_S)
            await asyncio.gather(*(one_request(soak, client) for _ in range(BURST)))
            soak.counts["bursts"] += 1

    await asyncio.gather(*(one() for _ in range(CLIENTS)), bursts())


async def switches(soak: Soak, until_s: float) -> None:
    """Another layout every `SWITCH_S`; one that cannot be right now is counted and left."""
    widths = [width for width in (1, 2, 4) if width <= RANKS]
    layouts = supported_layouts(RANKS, widths, (Mode.DP, Mode.TP, Mode.SP))
    names = [format_layout(layout) for layout in layouts]
    while soak.now_s < until_s:
        await asyncio.sleep(SWITCH_S)
        try:
            wanted = soak.draw.choice(names), soak.draw.choice(CARRIES)
            await asyncio.to_thread(ask, soak.admin, *wanted)
            soak.counts["switches"] += 1
        except AssertionError:
            soak.counts["switches refused"] += 1


async def kills(soak: Soak, until_s: float) -> None:
    """End a random rank by its own pid, now and then."""
    while KILL_S and soak.now_s < until_s - KILL_S:
        await asyncio.sleep(KILL_S)
        ranks = await asyncio.to_thread(get_json, soak.admin + "/admin/ranks")
        here = [rank["pid"] for rank in ranks["ranks"] if not rank["exited"]]
        with suppress(ProcessLookupError):
            os.kill(soak.draw.choice(here), signal.SIGKILL)
            soak.counts["ranks killed"] += 1


def apart(admin: str) -> bool:
    """Say whether all ranks are there, but some were started without the others."""
    ranks = get_json(admin + "/admin/ranks")["ranks"]
    is_there = all(rank.get("available") for rank in ranks)
    return is_there and any(rank.get("degraded") for rank in ranks)


async def renewals(soak: Soak, until_s: float) -> None:
    """Start ranks again together that cannot form groups: on CUDA nothing else brings them back."""
    since_s = None
    while soak.now_s < until_s:
        await asyncio.sleep(1.0)
        if not await asyncio.to_thread(apart, soak.admin):
            since_s = None
            continue
        since_s = soak.now_s if since_s is None else since_s
        if soak.now_s - since_s >= APART_S:
            await asyncio.to_thread(post, soak.admin + "/admin/renew", {})
            soak.counts["renewals"] += 1
            since_s = None


def look(soak: Soak, root: psutil.Process) -> None:
    """Sample every process of the cell."""
    with suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                words = process.cmdline()
                name = words[words.index("-m") + 1] if "-m" in words else process.name()
                if (found := sample(process, soak.now_s)) is not None:
                    soak.samples.setdefault((name, process.pid), []).append(found)


async def looks(soak: Soak, root: psutil.Process, until_s: float) -> None:
    """Sample on a clock unless a burst is being answered, and say how far the run is."""
    while soak.now_s < until_s:
        if soak.is_quiet:
            await asyncio.to_thread(look, soak, root)
        done = ", ".join(f"{count} {name}" for name, count in sorted(soak.counts.items()))
        print(f"soak {soak.now_s / 60:6.1f} of {until_s / 60:.0f} min: {done}", flush=True)
        await asyncio.sleep(SAMPLE_S)


def pages_of(admin: str) -> dict[int, dict[str, int]]:
    """Where the pages of each rank are."""
    return {rank["rank"]: rank["pages"] for rank in get_json(admin + "/admin/ranks")["ranks"]}


def at_rest(admin: str) -> dict[int, dict[str, int]]:
    """Back to dp with no task left and every rank there; returns the pages."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        status = get_json(admin + "/admin/status")
        is_idle = not any(status["queue"]["tasks"].values())
        if is_idle and apart(admin):
            post(admin + "/admin/renew", {})
            time.sleep(APART_S)
        elif is_idle and not any(rank["exited"] for rank in status["ranks"]):
            with suppress(AssertionError):
                # Groups get pages when they are formed: what paused tasks kept may be free by now.
                for layout in (f"{WIDE_MODE}{RANKS}", f"dp{RANKS}"):
                    switch(admin, layout, "recompute")
                pages = pages_of(admin)
                if all(each["owned"] == each["total"] - 1 for each in pages.values()):
                    return pages
        if time.monotonic() > deadline:
            return pages_of(admin)
        time.sleep(1.0)


async def run(soak: Soak, root: psutil.Process) -> None:
    """The load and everything that happens to it."""
    async with AsyncOpenAI(base_url=soak.url + "/v1", api_key="none", max_retries=0) as client:
        for question in QUESTIONS:
            answer = await answer_to(soak, client, question)
            soak.expected[question] = answer.text
            assert is_right(question, answer, soak.expected), answer
        soak.began_s = time.monotonic()
        until_s = MINUTES * 60
        await asyncio.gather(
            clients(soak, client, until_s),
            switches(soak, until_s),
            kills(soak, until_s),
            renewals(soak, until_s),
            looks(soak, root, until_s),
        )


def devices_mib() -> list[int]:
    """MiB in use of each GPU; a cell on CPU has none, whatever else uses the machine's."""
    return gpu_memory_mib() if DEVICE == "cuda" else []


def hardware() -> str:
    """What the cell ran on."""
    cores = cores_and_processor()
    return cores if DEVICE == "cpu" else f"{gpu.hardware(RANKS)}, {cores}"


def report(soak: Soak, found: dict[tuple[str, int], Slopes | None], faults: list[str]) -> list[str]:
    """The dated table."""
    rows = [
        f"# Soak of {MINUTES:g} minutes, {today()}",
        "",
        f"Command: `SOAK_MINUTES={MINUTES:g} SOAK_RANKS={RANKS} SOAK_KILL_S={KILL_S:g} "
        f"make soak DEVICE={DEVICE}`, commit {commit()}, {hardware()}. "
        f"A switch every {SWITCH_S:g} s, {CLIENTS} clients, a burst of {BURST} requests every "
        f"{BURST_S:g} s; one in ten leaves.",
        "",
        "| what | count |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(soak.counts.items())),
        "",
        "| process | pid | judged min | own MiB/min | files/min | threads/min |",
        "|---|---|---|---|---|---|",
    ]
    for (name, pid), each in sorted(found.items()):
        if each is not None:
            values = f"{each.minutes:.1f} | {each.own_mib:+.2f} | {each.files:+.2f}"
            rows.append(f"| {name} | {pid} | {values} | {each.threads:+.2f} |")
    words = "Nothing grew, every stream was exact."
    if not any(found.values()):
        words = "Every stream was exact; no process lived long enough for its growth to be judged."
    judged = [f"- {fault}" for fault in faults] or [words]
    return [*rows, "", *judged]


def main() -> int:
    """Run, judge, write; 1 if anything is wrong."""
    port, admin_port = free_port(), free_port()
    before = segments()
    command = [
        *(sys.executable, "-m", "coordinator.cli", "up", "--model", str(MODEL)),
        *("--ranks", str(RANKS), "--device", DEVICE, "--port", str(port)),
        *("--ranks-per-device", str(ranks_per_device(RANKS) if DEVICE == "cuda" else 1)),
        *("--admin-port", str(admin_port), "--", *OPTIONS),
    ]
    # Servers on CPU need settings that are none of a GPU box's.
    surroundings = environment() if DEVICE == "cpu" else dict(os.environ)
    with ExitStack() as stack:
        url = stack.enter_context(running(command, port, "/ready", surroundings=surroundings))
        model = get_json(url + "/v1/models")["data"][0]["id"]
        soak = Soak(url, f"http://127.0.0.1:{admin_port}", model, random.Random(1))
        root = psutil.Process(get_json(soak.admin + "/admin/status")["pid"]).parent()
        assert root is not None
        pages, devices = at_rest(soak.admin), devices_mib()
        asyncio.run(run(soak, root))
        faults = [f"pages: {each}" for each in pages_lost(pages, at_rest(soak.admin))]
        faults += memory_kept(devices, devices_mib())
    found = {process: slopes(samples) for process, samples in soak.samples.items()}
    faults += [
        f"{name} {pid}: {leak} grow"
        for (name, pid), each in found.items()
        if each
        for leak in each.leaks
    ]
    faults += [f"shared memory is left: {name}" for name in sorted(segments() - before)]
    faults += soak.wrong[:20]
    text = "\n".join(report(soak, found, faults)) + "\n"
    folder = Path(os.environ.get("SOAK_OUT", ROOT / "docs" / "benchmarks"))
    out = folder / f"{today()}-{DEVICE}-soak.md"
    out.write_text(text)
    print(
        text,
        f"\nwritten to {out.relative_to(Path.cwd())}" if out.is_relative_to(Path.cwd()) else "",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
