"""The load that every server gets, and what its client notes: TTFT, TPOT and throughput.

Clients speak below HTTP, to vLLM's engine core and to aileron's coordinator and leaders, because
an HTTP front end of one process would be slower than four GPUs. Both get raw steps of the engine.
"""

import asyncio
import gc
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.gpu_numbers import Batch, merge_saturated, merge_steady, steady_steps

SETTLE_S = 0.05
"""Before a request that is measured alone, so that it finds an idle engine."""
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "ignore_eos": True,
    "seed": 1,
    "detokenize": False,
}


@dataclass(slots=True)
class StreamLog:
    """One request as its client saw it: a time and an epoch for each token or batch of tokens."""

    done: asyncio.Future[None]
    sent_s: float = 0.0
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)


class LoadClient(ABC):
    """Sends prepared requests and notes when their tokens come."""

    def __init__(self) -> None:
        self.logs: dict[str, StreamLog] = {}
        self.batches: list[Batch] = []

    @abstractmethod
    def prepare(self, name: str, prompt: list[int], tokens: int) -> Any:
        """Make a request ready to send, which costs time that must not be measured."""

    @abstractmethod
    async def _send(self, prepared: Any) -> None:
        """Put a prepared request on its way."""

    @abstractmethod
    async def cancel(self, names: list[str]) -> None:
        """Tell the server that nobody waits for these any more."""

    async def start(self, name: str, prepared: Any) -> StreamLog:
        """Send one request."""
        log = StreamLog(asyncio.get_running_loop().create_future(), time.perf_counter())
        self.logs[name] = log
        await self._send(prepared)
        return log

    async def finish(self, requests: dict[str, Any]) -> list[StreamLog]:
        """Send all at once and wait until the last has ended."""
        logs = [await self.start(name, prepared) for name, prepared in requests.items()]
        await asyncio.gather(*(log.done for log in logs))
        return logs

    def take(self, source: int, epoch: int, spans: Iterable[tuple[str, int, bool]]) -> None:
        """Note one step's tokens: (request, new tokens, whether it has ended)."""
        now = time.perf_counter()
        streams = 0
        for name, count, finished in spans:
            log = self.logs.get(name)
            if log is None:
                continue
            if count:
                streams += 1
                log.tokens += count
                log.times.append(now)
                log.epochs.append(epoch)
            if finished and not log.done.done():
                log.done.set_result(None)
        if streams:
            self.batches.append(Batch(now, source, epoch, streams))

    def fail(self, error: Exception, name: str | None = None) -> None:
        """End one stream, or all that are open, with an error."""
        for log in self.logs.values() if name is None else [self.logs[name]]:
            if not log.done.done():
                log.done.set_exception(error)
                log.done.exception()  # Streams nobody waits for would be reported at exit.

    async def clear(self) -> None:
        """Cancel what still runs and forget everything."""
        await self.cancel([name for name, log in self.logs.items() if not log.done.done()])
        self.logs.clear()
        self.batches.clear()


def prompt(tokens: int, seed: int, vocab: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(10, vocab), k=tokens)


async def measure_ttft(
    client: LoadClient, *, tag: str, tokens: int, repeats: int, vocab: int
) -> dict[str, Any]:
    """Milliseconds from sending a prompt to its first token, one request at a time."""
    values = []
    # A first one warms kernels of this size; where prompts are read in chunks they are warm.
    turns = repeats + (1 if tokens <= 8192 else 0)
    for turn in range(turns):
        name = f"{tag}-ttft{tokens}-{turn}"
        request = client.prepare(name, prompt(tokens, tokens + turn, vocab), 1)
        await asyncio.sleep(SETTLE_S)
        (log,) = await client.finish({name: request})
        values.append((log.times[0] - log.sent_s) * 1e3)
    values = values[-repeats:]
    await client.clear()
    return {
        "median_ms": round(statistics.median(values), 3),
        "values_ms": [round(value, 3) for value in values],
    }


async def measure_tpot(
    client: LoadClient, *, tag: str, streams: int, prompt_tokens: int, tokens: int, vocab: int
) -> dict[str, Any]:
    """What a decode step takes while all of so many streams decode, for each engine or leader."""
    requests = {}
    for number in range(streams):
        name = f"{tag}-tpot{streams}-{number}"
        requests[name] = client.prepare(name, prompt(prompt_tokens, number, vocab), tokens)
    await client.finish(requests)
    steady = steady_steps(client.batches)
    await client.clear()
    return {"sources": list(steady.values())}


async def measure_saturated(
    client: LoadClient,
    *,
    tag: str,
    requests: int,
    prompt_tokens: int,
    tokens: int,
    vocab: int,
    at_s: float = 0.0,
) -> dict[str, float]:
    """All requests at once, sent at `at_s` of the monotonic clock or as soon as they are ready."""
    prepared = {}
    for number in range(requests):
        name = f"{tag}-saturated-{number}"
        prepared[name] = client.prepare(name, prompt(prompt_tokens, number, vocab), tokens)
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    started = time.perf_counter()
    logs = await client.finish(prepared)
    result = {
        "requests": requests,
        "tokens": sum(log.tokens for log in logs),
        "started_s": started,
        "ended_s": max(log.times[-1] for log in logs),
    }
    await client.clear()
    return result


def merged(kind: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of what was measured by several clients at the same time."""
    if kind == "tpot":
        return merge_steady([source for part in parts for source in part["sources"]])
    return merge_saturated(parts) if kind == "saturated" else parts[0]


MEASURES: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "ttft": measure_ttft,
    "tpot": measure_tpot,
    "saturated": measure_saturated,
}


def calm_collector() -> None:
    """Keep what was imported out of garbage collections: one would stall a client for 0.1 s."""
    gc.collect()
    gc.freeze()
