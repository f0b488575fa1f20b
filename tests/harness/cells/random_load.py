"""Many random requests on a cell at once, and what must have become of them."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from coordinator.switching.page_grants import REGRANT_SHARE
from tests.harness.cells.bare_cell import BareCell, Stream, TaskClient
from tests.harness.vllm.reshard_cases import Case, vllm_settings

AT_ONCE = 60
"""Requests under way; more would wait in line."""
SILENT_MAX_S = 60.0
"""A stream that has neither a token nor an end for so long hangs."""
PAGES_WITHIN_S = 10.0
"""Paused tasks give their pages up, and groups are formed anew for them."""
TOLERANCE = 1e-4
STEP_TOKENS_MAX = 96
RANDOM_ARGS = (
    *("--dtype", "float32", "--max-model-len", "1024"),
    *("--max-num-batched-tokens", str(STEP_TOKENS_MAX)),
    *("--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}'),
)
"""Of engines that serve random requests: prompts take several steps."""


async def run_case(client: TaskClient, tag: str, case: Case, places: asyncio.Semaphore) -> Stream:
    """Serve one request, or as much of it as its client waits for."""
    async with places:
        name = f"{tag}-{case.seed}"
        stream = client.submit(name, case.prompt, **vllm_settings(case.params))
        leaves_after = case.leaves_after if tag != "alone" else None
        had, since = 0, time.monotonic()
        while not stream.finished:
            if leaves_after is not None and len(stream.tokens) >= leaves_after:
                client.cancel(name)
                break
            if len(stream.tokens) != had:
                had, since = len(stream.tokens), time.monotonic()
            silent_s = time.monotonic() - since
            assert silent_s < SILENT_MAX_S, f"seed {case.seed} hangs: {stream.tokens}"
            await asyncio.sleep(0.003)
        assert stream.failure is None, f"seed {case.seed}: {stream.failure}"
        return stream


async def run_cases(
    client: TaskClient, tag: str, cases: list[Case], at_once: int = AT_ONCE
) -> dict[int, Stream]:
    """Serve many, by seed."""
    places = asyncio.Semaphore(at_once)
    jobs = [run_case(client, tag, case, places) for case in cases]
    streams = await asyncio.gather(*jobs)
    return {case.seed: stream for case, stream in zip(cases, streams, strict=True)}


async def alone(cell: BareCell, cases: list[Case]) -> dict[int, Stream]:
    """What the cell makes of requests without switches, each alone on a rank."""
    cell.switch(cell.config.cell.layout, "recompute")
    client = TaskClient()
    async with client.connected(cell):
        return await run_cases(client, "alone", cases, at_once=4)


def compare(
    cases: list[Case],
    streams: dict[int, Stream],
    static: dict[int, Any],
    reference: dict[int, Stream],
) -> float:
    """Every stream is exact, up to where its client left; returns the largest logprob error."""
    worst = 0.0
    for case in cases:
        stream, about = streams[case.seed], f"seed {case.seed}: {case.params}"
        if case.is_greedy:
            tokens, logprobs = static[case.seed]["tokens"], static[case.seed]["scores"]
        else:
            tokens, logprobs = reference[case.seed].tokens, reference[case.seed].logprobs
        got, expected = stream.tokens, tokens
        if case.leaves_after is not None:
            expected = tokens[: len(got)]
        pairs = enumerate(zip(got, expected, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(got))
        assert got == expected, f"{about} differs at {same}: {got[same:]}, not {expected[same:]}"
        assert len(stream.logprobs) == len(got), about
        errors = [abs(one - other) for one, other in zip(stream.logprobs, logprobs, strict=False)]
        assert max(errors, default=0.0) < TOLERANCE, f"{about}: {errors}"
        worst = max(worst, *errors, 0.0)
    return worst


def records_after(cell: BareCell, epoch: int) -> list[dict[str, Any]]:
    """The switches of later epochs."""
    records: list[dict[str, Any]] = cell.get("/admin/switches?last=1000")["switches"]
    return [record for record in records if record["epoch"] > epoch]


def settle(cell: BareCell) -> list[dict[str, int]]:
    """Back to dp with no task left; returns the page accounting."""
    deadline = time.monotonic() + 20
    while any(cell.get("/admin/status")["queue"]["tasks"].values()):
        assert time.monotonic() < deadline, cell.get("/admin/status")["queue"]
        time.sleep(0.05)
    cell.switch(cell.config.cell.layout, "recompute")
    # A group that got too few pages is formed anew when those of paused tasks come free.
    wait_for_pages(cell, lambda pages: not pages["leased"] and not are_many_free(pages))
    if any(pages["free"] for pages in cell.pages()):
        # A few pages are not worth a formation to the cell, so they wait for the next switch.
        cell.switch("+".join(["tp2"] * (len(cell.pages()) // 2)), "recompute")
        cell.switch(cell.config.cell.layout, "recompute")
    wait_for_pages(cell, lambda pages: pages["owned"] == pages["total"] - 1)
    return cell.pages()


def wait_for_pages(cell: BareCell, condition: Callable[[dict[str, int]], bool]) -> None:
    """Wait until it holds for the page accounting of every rank."""
    deadline = time.monotonic() + PAGES_WITHIN_S
    while not all(map(condition, cell.pages())):
        assert time.monotonic() < deadline, (cell.pages(), cell.get("/admin/layout"))
        time.sleep(0.05)


def are_many_free(pages: dict[str, int]) -> bool:
    """Return whether the cell will form the rank's group anew, to give it the free pages."""
    return pages["free"] * REGRANT_SHARE > pages["owned"]
