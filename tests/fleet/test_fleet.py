"""What the chart installs for many cells, under traffic: a cell is killed, a gateway is rolled.

Two gateways, two cells of two CPU ranks, a real Redis and the real OpenAI client. No request may
fail, and every greedy stream must be what it is without any of this.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import openai
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from tests.fleet.installed import Installed, Process, wait_until
from tests.harness.redis.redis_server import IS_REAL, Redis

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(2_400)]

KEY = "sk-a-client-of-the-fleet"
PROMPTS = [f"Story {number}: once upon a time there was" for number in range(6)]
TOKENS = 160
CLIENTS = 6
ROUNDS_MIN = 3
"""Requests of each client, at least; they go on until everything has happened."""
LIMIT_S = 900.0


@dataclass
class Service:
    """Kubernetes' Service: sends each connection to one of the gateways that are ready."""

    gateways: list[Process] = field(default_factory=list)
    turns: Iterator[int] = field(default_factory=itertools.count)
    beginning: Counter[str] = field(default_factory=Counter)
    """Requests on their way to each gateway, which it has not answered yet."""

    def next(self) -> str:
        url = self.gateways[next(self.turns) % len(self.gateways)].url
        self.beginning[url] += 1
        return url

    async def pre_stop(self, gateway: Process) -> None:
        """Wait as long as requests come that were sent before the Service forgot the gateway.

        The manifests' preStop sleeps for the time in which a cluster does that.
        """
        while self.beginning[gateway.url]:
            await asyncio.sleep(0.05)


@dataclass
class Traffic:
    """What clients saw."""

    service: Service
    texts: dict[str, str] = field(default_factory=dict)
    """The only right answer to each prompt."""
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    is_over: bool = False

    async def ask(self, prompt: str) -> str:
        url = self.service.next()
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S
        ) as client:
            parts, last_s = [], 0.0
            stream = await client.completions.create(
                model="aileron-demo",
                prompt=prompt,
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            self.service.beginning[url] -= 1
            async for chunk in stream:
                now_s = time.monotonic()
                if last_s:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s
                parts.append(chunk.choices[0].text)
            assert chunk.choices[0].finish_reason == "length"
            return "".join(parts)

    async def client(self, number: int) -> None:
        for turn in itertools.count():
            if self.is_over and turn >= ROUNDS_MIN:
                return
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            if await self.ask(prompt) != self.texts[prompt]:
                self.wrong.append(prompt)
            self.answered += 1


@pytest.fixture(scope="module")
def installed(redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    assert IS_REAL, "the fleet needs a real Redis (Debian: apt-get install redis-server)"
    folder: Path = tmp_path_factory.mktemp("fleet")
    made = Installed(folder, redis.url)
    made.keys.write_text("keys:\n" + dump_key(ApiKey(hash=hash_of(KEY), tenant="acme")))
    try:
        for pod in made.cells:
            made.start_cell(pod)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def service(installed: Installed) -> Service:
    service = Service([installed.start_gateway(f"gateway-{number}") for number in range(2)])
    for pod in installed.cells:
        wait_until(partial(installed.is_serving, pod), pod)
    for gateway in service.gateways:
        wait_until(gateway.is_ready, "the gateway")
    return service


def placed(installed: Installed, pod: str) -> int:
    """The number of tasks that a cell's leaders have."""
    return int(installed.admin(pod, "/admin/status")["queue"]["tasks"]["placed"])


async def test_no_request_fails_while_a_cell_is_killed_and_a_gateway_is_rolled(
    installed: Installed, service: Service
) -> None:
    traffic = Traffic(service)
    for prompt in PROMPTS:
        traffic.texts[prompt] = await traffic.ask(prompt)
    assert len(set(traffic.texts.values())) > 1
    began_s = time.monotonic()
    clients = [asyncio.create_task(traffic.client(number)) for number in range(CLIENTS)]
    lost, kept = installed.cells

    async def until_busy() -> None:
        while not all([await asyncio.to_thread(placed, installed, pod) for pod in (lost, kept)]):
            assert not any(client.done() for client in clients), "traffic has ended"
            await asyncio.sleep(0.05)

    async with asyncio.timeout(LIMIT_S):
        # Both cells have tasks: load spreads them.
        await until_busy()
        began = await asyncio.to_thread(placed, installed, lost)
        installed.kill(lost)
        killed_s = time.monotonic()
        answered = traffic.answered
        while traffic.answered < answered + CLIENTS:
            await asyncio.sleep(0.05)
            assert not any(client.done() for client in clients), "traffic has ended"
        # A rollout: the new pod is ready before the old one is told, and leaves the Service first.
        old = service.gateways[0]
        fresh = installed.start_gateway("gateway-2")
        await asyncio.to_thread(wait_until, fresh.is_ready, "the new gateway")
        service.gateways = [service.gateways[1], fresh]
        await service.pre_stop(old)
        assert await asyncio.to_thread(old.terminate) == 0
        traffic.is_over = True
        await asyncio.gather(*clients)
    assert not traffic.wrong
    print(
        f"{traffic.answered} streams of {TOKENS} tokens, none failed, all exact; {began} were in "
        f"the killed cell; longest pause {max(traffic.gaps_s):.1f} s; the rest took "
        f"{time.monotonic() - killed_s:.0f} of {time.monotonic() - began_s:.0f} s"
    )


async def test_a_cell_that_is_told_to_end_loses_nothing(
    installed: Installed, service: Service
) -> None:
    """Its streams move while its coordinator waits for them to be gone, and it is found again."""
    lost, kept = installed.cells
    if lost not in installed.processes:
        installed.start_cell(lost)
        await asyncio.to_thread(wait_until, lambda: installed.is_serving(lost), lost)
    traffic = Traffic(service)
    for prompt in PROMPTS:
        traffic.texts[prompt] = await traffic.ask(prompt)
    clients = [asyncio.create_task(traffic.client(number)) for number in range(CLIENTS)]
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(placed, installed, kept):
            await asyncio.sleep(0.05)
        coordinator = next(
            each for each in installed.processes[kept] if "coordinator" in each.log.name
        )
        assert await asyncio.to_thread(coordinator.terminate) == 0
        installed.kill(kept)
        traffic.is_over = True
        await asyncio.gather(*clients)
    assert not traffic.wrong
