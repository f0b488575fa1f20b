"""A real gateway process with two cells that die, drain, fill up and fall idle."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import httpx
import msgspec
import openai
import pytest
from tokenizers import Tokenizer

from coordinator.protocol.messages.gateway import (
    ATTEMPTS_PER_CELL,
    Cancel,
    CellLoad,
    PrefixesHeld,
    Submit,
    TaskFailed,
    Withdraw,
    Withdrawn,
)
from coordinator.protocol.metrics_wire import (
    CELL_MOVES,
    ITL,
    REGISTRY_AWAY,
    REQUESTS,
    SLO_TOTAL,
    TOKENS,
    TTFT,
)
from coordinator.protocol.prefixes import BLOCK_TOKENS, prefix_hashes
from coordinator.protocol.registry import RedisRegistry, RegistryAwayError
from coordinator.protocol.terms import TaskId
from tests.harness.cells import hasty_gateway
from tests.harness.cells.gateway_cell import SERVING, FakeCell, GatewayProcess, Ran, text_of
from tests.harness.cells.hasty_gateway import OFTEN_S, patience
from tests.harness.cells.told import Told
from tests.harness.faults.tcp_proxy import TcpProxy
from tests.harness.redis.redis_server import Redis
from worker.demo import MODEL_DIR

pytestmark = pytest.mark.timeout(240)

WORDS = "one small step for a man is one giant leap for all of us"
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "say it"}]}
IDLE = CellLoad((0, 0, 0), 0, 8, 90, 100)
BUSY = CellLoad((0, 3, 0), 8, 8, 10, 100)
SEEN_S = 30
HEARD_S = 1.0
"""A gateway has long heard what a cell has said."""
REQUESTS_TIMED = 30
SILENT_S = 2.0
"""Four of the leases that the registry has here."""
WAIT_MAX_MS = 50.0


def has_session(cell: FakeCell) -> bool:
    return cell.sessions > 0


def serving(load: CellLoad = IDLE, **fields: Any) -> Any:
    return msgspec.structs.replace(SERVING, load=load, **fields)


@pytest.fixture(scope="module")
def cells() -> Iterator[tuple[FakeCell, FakeCell]]:
    made = tuple(FakeCell(state=serving(), coordinator=name) for name in ("first", "second"))
    yield made[0], made[1]
    for cell in made:
        cell.close()


@pytest.fixture(scope="module")
def link(redis: Redis) -> Iterator[TcpProxy]:
    """Between the gateway and its Redis."""
    with TcpProxy(redis.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def gateway(
    cells: tuple[FakeCell, FakeCell], link: TcpProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Finds its cells in Redis, where the tests announce them."""
    url = f"redis://127.0.0.1:{link.port}"
    fleet = {"redis": url, "lease_ms": 500, "dead_after_ms": 60_000}
    folder = tmp_path_factory.mktemp("gateway")
    process = GatewayProcess(
        folder,
        MODEL_DIR,
        cells[0],
        module=hasty_gateway.__name__,
        env=patience(OFTEN_S),
        fleet=fleet,
    )
    yield process
    process.close()


@pytest.fixture
async def found(
    cells: tuple[FakeCell, FakeCell], redis: Redis, gateway: GatewayProcess
) -> AsyncIterator["Found"]:
    """Both cells are announced for as long as the test does not say otherwise."""
    found = Found(RedisRegistry(redis.url, "demo", 500), list(cells))
    work = asyncio.create_task(found.announce())
    for cell in cells:
        cell.behave = None
        cell.seen.clear()
        cell.set_state(serving())
    for cell in cells:
        try:
            await cell.until(partial(has_session, cell), SEEN_S)
        except AssertionError:
            pytest.fail(f"no session; the gateway: {gateway.log.read_text()[-4_000:]}")
    await cells[0].until(lambda: httpx.get(f"{gateway.url}/ready").status_code == 200, SEEN_S)
    yield found
    found.is_over = True
    await asyncio.wait({work}, timeout=SEEN_S)
    await found.registry.close()


class Found:
    """Announces cells in the registry."""

    def __init__(self, registry: RedisRegistry, cells: list[FakeCell]) -> None:
        self.registry = registry
        self.cells = cells
        self.is_over = False

    async def announce(self) -> None:
        while not self.is_over:
            for cell in self.cells:
                with contextlib.suppress(RegistryAwayError):
                    await self.registry.announce(str(cell.port), f"127.0.0.1:{cell.port}")
            await asyncio.sleep(0.1)


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    return list(tokenizer.encode(WORDS, add_special_tokens=False).ids)


def only(cell: FakeCell, other: FakeCell) -> None:
    """New tasks go to the first cell."""
    cell.set_state(serving())
    other.set_state(serving(BUSY))


class Begun:
    """A cell that gives each task its first tokens, and the rest of one that has some already."""

    def __init__(self, ids: list[int], until: int) -> None:
        self.ids = ids
        self.until = until
        self.first: list[Ran] = []
        self.later: list[Ran] = []

    async def __call__(self, ran: Ran) -> None:
        done = len(ran.submit.delivered_tokens)
        if not ran.submit.attempt:
            self.first.append(ran)
            ran.tokens(0, self.ids[: self.until])
        else:
            self.later.append(ran)
            attempt = ran.submit.attempt + 1
            ran.tokens(done, self.ids[done:], "length", attempt=attempt)


@pytest.mark.parametrize(
    ("how", "reason"), [("dies", "dead"), ("drains", "draining"), ("has no ranks", "dead")]
)
async def test_streams_go_on_in_another_cell_from_the_tokens_already_delivered(
    client: openai.AsyncOpenAI,
    cells: tuple[FakeCell, FakeCell],
    found: Found,
    ids: list[int],
    how: str,
    reason: str,
) -> None:
    first, second = cells
    told = await Told.begin(cells)
    begun = Begun(ids, 5)
    first.behave = second.behave = begun
    only(first, second)
    answer = await client.chat.completions.create(**CHAT, stream=True)
    await first.until(lambda: begun.first, SEEN_S)
    was, other = cells if first.of(Submit) else cells[::-1]
    ran = begun.first[0]
    if how == "dies":
        found.cells = [other]
        was.go_away()
    else:
        changes = {"draining": True} if how == "drains" else {"ranks_alive": 0}
        was.set_state(serving(**changes))
    await other.until(lambda: begun.later, SEEN_S)
    (submit,) = other.of(Submit)
    assert submit.attempt >= ATTEMPTS_PER_CELL
    assert list(submit.delivered_tokens) == ids[: len(submit.delivered_tokens)]
    # The former cell lives on and computes other tokens: nobody gets them.
    was.on_leader(lambda: ran.tokens(5, [1, 2, 3], attempt=7))
    assert await text_of(answer) == WORDS
    if how == "dies":
        was.come_back()
        found.cells = [was, other]
        await was.until(lambda: was.sessions > 1, SEEN_S)
    # It is told to forget the task, at once or as soon as it is back.
    await was.until(lambda: Cancel(ran.id) in was.of(Cancel), SEEN_S)
    await other.until(lambda: sum(told.grown(CELL_MOVES, reason)) == 1, SEEN_S)
    assert sum(told.grown(CELL_MOVES)) == 1
    was.set_state(serving())


async def test_each_cell_is_told_its_own_streams_and_one_of_them_the_requests(
    client: openai.AsyncOpenAI, cells: tuple[FakeCell, FakeCell], found: Found, ids: list[int]
) -> None:
    async def behave(ran: Ran) -> None:
        ran.tokens(0, ids[:3])
        ran.tokens(3, ids[3:], "length")

    cells[0].behave = cells[1].behave = behave
    assert await text_of(await client.chat.completions.create(**CHAT, stream=True)) == WORDS
    told = await Told.begin(cells)
    for cell, other, count in ((*cells, 3), (*cells[::-1], 2)):
        only(cell, other)
        await asyncio.sleep(0.2)
        for _ in range(count):
            assert await text_of(await client.chat.completions.create(**CHAT, stream=True)) == WORDS
    tokens = [3.0 * len(ids), 2.0 * len(ids)]
    await cells[0].until(lambda: told.grown(TOKENS) == tokens, SEEN_S)
    await cells[0].until(lambda: sum(told.grown(REQUESTS)) == 5, SEEN_S)
    for measure in (TTFT, ITL, SLO_TOTAL):
        assert told.grown(measure) == [3, 2], measure.name
    assert sorted(told.grown(REQUESTS)) == [0, 5], "one of them is home"


async def test_a_full_cell_refuses_and_another_one_takes_the_task(
    client: openai.AsyncOpenAI, cells: tuple[FakeCell, FakeCell], found: Found, ids: list[int]
) -> None:
    refused: list[TaskId] = []

    async def behave(ran: Ran) -> None:
        if not refused:
            refused.append(ran.id)
            where = next(cell for cell in cells if cell.of(Submit))
            where.say(TaskFailed(ran.id, "queue_full", "Full."))
        else:
            attempt = ran.submit.attempt + 1
            ran.tokens(0, ids, "length", attempt=attempt)

    cells[0].behave = cells[1].behave = behave
    told = await Told.begin(cells)
    answer = await client.chat.completions.create(**CHAT, stream=True)
    assert await text_of(answer) == WORDS
    assert [len(cell.of(Submit)) for cell in cells] == [1, 1]
    await cells[0].until(lambda: sum(told.grown(CELL_MOVES, "full")) == 1, SEEN_S)


async def test_queued_tasks_of_a_busy_cell_go_to_an_idle_one(
    client: openai.AsyncOpenAI, cells: tuple[FakeCell, FakeCell], found: Found, ids: list[int]
) -> None:
    submits: list[Ran] = []

    async def behave(ran: Ran) -> None:
        submits.append(ran)
        if len(submits) > 1:
            ran.tokens(0, ids, "length", attempt=ran.submit.attempt + 1)

    cells[0].behave = cells[1].behave = behave
    told = await Told.begin(cells)
    work = asyncio.create_task(client.chat.completions.create(**CHAT, stream=True))
    await cells[0].until(lambda: submits, SEEN_S)
    was, other = cells if cells[0].of(Submit) else cells[::-1]
    was.set_state(serving(BUSY))
    await was.until(lambda: Withdraw(submits[0].id) in was.of(Withdraw), SEEN_S)
    was.say(Withdrawn(submits[0].id))
    assert await text_of(await work) == WORDS
    assert len(other.of(Submit)) == 1
    await was.until(lambda: sum(told.grown(CELL_MOVES, "spill")) == 1, SEEN_S)
    was.set_state(serving())


async def test_prompts_go_to_the_cell_that_says_it_has_seen_them(
    client: openai.AsyncOpenAI, cells: tuple[FakeCell, FakeCell], found: Found, ids: list[int]
) -> None:
    """Both cells are equally idle, so that prompts which nobody has seen spread over them."""

    async def behave(ran: Ran) -> None:
        ran.tokens(0, ids, "length")

    async def ask(prompt: list[int]) -> int:
        """The cell that got it, by its place."""
        for cell in cells:
            cell.seen.clear()
        await client.completions.create(model="demo", prompt=prompt, max_tokens=len(ids))
        (place,) = [number for number, cell in enumerate(cells) if cell.of(Submit)]
        return place

    def prompt(number: int) -> list[int]:
        return [300 + number, *range(300, 300 + BLOCK_TOKENS)]

    assert found.cells, "they are announced all the time"
    for cell in cells:
        cell.behave = behave
        cell.set_state(serving(msgspec.structs.replace(IDLE, tasks_max=1_000)))
    seen = {number: number % 2 for number in range(10)}
    for number, place in seen.items():
        cells[place].say(PrefixesHeld(prefix_hashes(prompt(number))))
    await asyncio.sleep(HEARD_S)
    for _ in range(2):
        assert {number: await ask(prompt(number)) for number in seen} == seen
    spread = {number: await ask(prompt(number)) for number in range(100, 120)}
    assert set(spread.values()) == {0, 1}
    # What a gateway has sent to a cell itself that cell has seen as well.
    assert {number: await ask(prompt(number)) for number in spread} == spread
    short = [await ask([300, 301, 302]) for _ in range(20)]
    assert set(short) == {0, 1}, "less than a block is nobody's"


async def test_nothing_waits_for_a_redis_that_does_not_answer(
    client: openai.AsyncOpenAI,
    cells: tuple[FakeCell, FakeCell],
    found: Found,
    link: TcpProxy,
    ids: list[int],
) -> None:
    """It takes connections and says nothing, for longer than leases last."""

    async def behave(ran: Ran) -> None:
        ran.tokens(0, ids, "length")

    async def median_ms() -> float:
        took = []
        for _ in range(REQUESTS_TIMED):
            began_s = time.perf_counter()
            assert await text_of(await client.chat.completions.create(**CHAT, stream=True)) == WORDS
            took.append(1e3 * (time.perf_counter() - began_s))
        return statistics.median(took)

    assert found.cells, "they are announced all the time"
    cells[0].behave = cells[1].behave = behave
    before_ms = await median_ms()
    sessions = [cell.sessions for cell in cells]
    link.is_silent = True
    try:
        await asyncio.sleep(SILENT_S)
        silent_ms = await median_ms()
    finally:
        link.is_silent = False
        link.cut()
    print(f"\na request: {before_ms:.1f} ms, {silent_ms:.1f} ms while Redis does not answer")
    assert silent_ms < max(before_ms + WAIT_MAX_MS, 2 * before_ms)
    assert [cell.sessions for cell in cells] == sessions


async def test_nothing_waits_for_a_redis_that_is_away(
    client: openai.AsyncOpenAI,
    cells: tuple[FakeCell, FakeCell],
    found: Found,
    redis: Redis,
    ids: list[int],
) -> None:
    async def behave(ran: Ran) -> None:
        ran.tokens(0, ids, "length")

    cells[0].behave = cells[1].behave = behave
    found.cells = []
    sessions = [cell.sessions for cell in cells]
    told = await Told.begin(cells)
    redis.stop()
    try:
        for _ in range(20):
            assert await text_of(await client.chat.completions.create(**CHAT, stream=True)) == WORDS
        await cells[0].until(lambda: sum(told.grown(REGISTRY_AWAY)) > 0, SEEN_S)
    finally:
        redis.start()
    # It comes back empty, and the cells are there as before.
    for _ in range(20):
        assert await text_of(await client.chat.completions.create(**CHAT, stream=True)) == WORDS
    assert [cell.sessions for cell in cells] == sessions
    assert all(cell.of(Submit) for cell in cells)
