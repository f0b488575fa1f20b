"""API keys, rates and deadlines in a real gateway, with real clients and counters in Redis."""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from coordinator.protocol.cache_salt import CacheSalts
from coordinator.protocol.keys import ApiKey, TierName, dump_key, hash_of
from coordinator.protocol.messages.gateway import Submit, TaskFailed
from coordinator.protocol.metrics_wire import STORAGE_AWAY, TIER_CLAMPED
from coordinator.protocol.terms import Tier
from tests.harness.cells import hasty_gateway
from tests.harness.cells.gateway_cell import TOKEN, FakeCell, GatewayProcess, Ran
from tests.harness.cells.hasty_gateway import OFTEN_S, patience
from tests.harness.cells.told import Told
from tests.harness.redis.redis_server import SHARED_WAIT_S, Redis
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240)]

Clients = Callable[[str], openai.OpenAI]
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
RELOAD_MAX_S = 5.0
SHARED_AGAIN_S = 20.0
"""A Redis that is back is asked again two seconds after it was last found away."""
ASKED = itertools.count()


def write_keys(path: Path, *keys: ApiKey) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text("keys:\n" + "".join(map(dump_key, keys)))
    fresh.replace(path)


def key(
    name: str,
    *,
    max_tier: TierName = "interactive",
    requests: int = 0,
    tokens: int = 0,
    day: int = 0,
    parallel: int = 0,
    expires: datetime | None = None,
    revoked: datetime | None = None,
) -> ApiKey:
    limits: dict[str, Any] = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "tokens_per_day": day,
        "max_parallel": parallel,
    }
    return ApiKey(
        hash=hash_of("sk-" + name),
        tenant=name,
        max_tier=max_tier,
        expires=expires,
        revoked=revoked,
        **{name: limit for name, limit in limits.items() if limit},
    )


KEYS = (
    key("acme"),
    key("slow", max_tier="batch"),
    key("busy", requests=10_000, tokens=1_000_000),
    key("few", requests=3),
    key("rare", requests=3),
    key("short", tokens=150),
    key("daily", day=150),
    key("narrow", parallel=2),
    key("gone", revoked=datetime(2026, 1, 1, tzinfo=UTC)),
)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, *KEYS)
    return path


@pytest.fixture(scope="module")
def gateway(
    own_cell: FakeCell, redis: Redis, keys_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    process = GatewayProcess(
        tmp_path_factory.mktemp("gateway"),
        MODEL_DIR,
        own_cell,
        module=hasty_gateway.__name__,
        env=patience(OFTEN_S),
        keys_file=str(keys_file),
        rate_limit_storage=f"redis://127.0.0.1:{redis.port}",
        objectives={"chat": "interactive"},
    )
    yield process
    process.close()


@pytest.fixture
def cell(own_cell: FakeCell, gateway: GatewayProcess, keys_file: Path) -> FakeCell:
    own_cell.reset()
    own_cell.behave = answer_shortly
    write_keys(keys_file, *KEYS)
    return own_cell


async def answer_shortly(ran: Ran) -> None:
    ran.tokens(0, [300] * 20, "length")


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Clients]:
    """Makes clients by the name of their key."""
    with ExitStack() as stack:

        def make(name: str) -> openai.OpenAI:
            url = f"{gateway.url}/v1"
            return stack.enter_context(
                openai.OpenAI(base_url=url, api_key="sk-" + name, max_retries=0, timeout=20)
            )

        yield make


def test_probes_need_no_key_and_all_else_does(
    gateway: GatewayProcess, cell: FakeCell, client: Clients
) -> None:
    for path in ("/health", "/ping", "/ready"):
        assert httpx.get(gateway.url + path).status_code == 200
    for path in ("/v1/models", "/v1/models/demo", "/version"):
        assert httpx.get(gateway.url + path).status_code == 401
    refused = httpx.post(gateway.url + PATH, json=CHAT)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError) as caught:
        client("unknown").chat.completions.create(**CHAT)
    assert caught.value.code == "invalid_api_key"
    assert cell.of(Submit) == []


def test_tenant_and_tier_come_from_the_key(
    gateway: GatewayProcess, cell: FakeCell, client: Clients
) -> None:
    told = asyncio.run(Told.begin([cell]))
    for name, headers, tier in (
        ("acme", {}, Tier.STANDARD),
        ("acme", {"X-Gateway-Inference-Objective": "chat"}, Tier.INTERACTIVE),
        ("slow", {"X-Priority-Tier": "interactive"}, Tier.BATCH),
        ("slow", {"X-Gateway-Inference-Fairness-Id": "acme"}, Tier.BATCH),
    ):
        cell.seen.clear()
        answer = client(name).chat.completions.with_raw_response.create(
            **CHAT, extra_headers=headers, service_tier="auto"
        )
        [submit] = cell.of(Submit)
        assert (submit.header.tenant, submit.header.tier) == (name, tier)
        assert answer.headers["x-priority-tier"] == tier.name.lower()
        words = {Tier.INTERACTIVE: "priority", Tier.STANDARD: "default", Tier.BATCH: "flex"}
        assert answer.parse().service_tier == words[tier]
    asyncio.run(cell.until(lambda: told.grown(TIER_CLAMPED, "batch") == [1]))
    assert told.grown(TIER_CLAMPED) == [1]


def salts_of(url: str, cell: FakeCell, *names: str) -> list[str | None]:
    """The salts with which requests of these keys reach ranks."""
    salts: list[str | None] = []

    async def note(ran: Ran) -> None:
        salts.append(ran.request.cache_salt)
        ran.tokens(0, [300], "length")

    cell.behave = note
    for name in names:
        headers = {"authorization": f"Bearer sk-{name}"}
        assert httpx.post(url + PATH, json=CHAT, headers=headers, timeout=20).status_code == 200
    return salts


def test_each_tenant_has_its_salt(gateway: GatewayProcess, cell: FakeCell) -> None:
    wanted = [CacheSalts(TOKEN).of(name, None) for name in ("acme", "slow", "acme")]
    assert salts_of(gateway.url, cell, "acme", "slow", "acme") == wanted


def test_tenants_that_trust_each_other_share_their_cache(
    cell: FakeCell, keys_file: Path, tmp_path: Path
) -> None:
    process = GatewayProcess(
        tmp_path, MODEL_DIR, cell, keys_file=str(keys_file), share_prefix_cache=True
    )
    try:
        assert salts_of(process.url, cell, "acme", "slow") == [None, None]
    finally:
        process.close()


def test_requests_per_minute(gateway: GatewayProcess, cell: FakeCell, client: Clients) -> None:
    few = client("few")
    seen = [few.chat.completions.with_raw_response.create(**CHAT) for _ in range(3)]
    left = [int(each.headers["x-ratelimit-remaining-requests"]) for each in seen]
    assert left == [2, 1, 0]
    with pytest.raises(openai.RateLimitError) as caught:
        few.chat.completions.create(**CHAT)
    assert caught.value.code == "rate_limit_exceeded"
    headers = caught.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-reset-requests"].endswith(("s", "ms"))
    assert len(cell.of(Submit)) == 3


def test_tokens_per_minute_count_what_was_generated(
    gateway: GatewayProcess, cell: FakeCell, client: Clients
) -> None:
    short = client("short")
    used = 0
    with pytest.raises(openai.RateLimitError) as caught:
        for _ in range(10):
            short.chat.completions.create(**CHAT)
            used += 20
    assert "tokens per minute" in caught.value.message
    assert 40 <= used <= 120


def test_tokens_per_day_count_until_midnight(cell: FakeCell, client: Clients) -> None:
    create = client("daily").chat.completions.with_raw_response.create
    used = 0
    with pytest.raises(openai.RateLimitError) as caught:
        for _ in range(10):
            headers = create(**CHAT).headers
            assert headers["x-ratelimit-limit-tokens-day"] == "150"
            used += 20
    assert 40 <= used <= 120
    assert caught.value.code == "token_budget_exceeded"
    headers = caught.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-should-retry"] == "false"
    assert int(headers["x-ratelimit-remaining-tokens-day"]) < 60


async def test_a_key_has_as_many_requests_at_once_as_its_limit(
    gateway: GatewayProcess, cell: FakeCell
) -> None:
    held: list[Ran] = []

    async def hold(ran: Ran) -> None:
        held.append(ran)

    cell.behave = hold
    made = openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="sk-narrow", max_retries=0, timeout=20
    )
    async with made:
        running = [asyncio.create_task(made.chat.completions.create(**CHAT)) for _ in range(2)]
        await cell.until(lambda: len(held) == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await made.chat.completions.create(**CHAT)
        assert caught.value.code == "parallel_limit_exceeded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        held[0].tokens(0, [300], "length")
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        running.append(asyncio.create_task(made.chat.completions.create(**CHAT)))
        await cell.until(lambda: len(held) == 3)
        for ran in held[1:]:
            ran.tokens(0, [300], "length")
        await asyncio.gather(*running)


def test_a_key_expires_without_a_change_of_the_file(
    gateway: GatewayProcess, cell: FakeCell, keys_file: Path, client: Clients
) -> None:
    end = datetime.now(UTC) + timedelta(seconds=RELOAD_MAX_S)
    write_keys(keys_file, *KEYS, key("brief", expires=end))
    brief = client("brief").chat.completions
    while (
        httpx.get(
            f"{gateway.url}/v1/models", headers={"authorization": "Bearer sk-brief"}
        ).status_code
        != 200
    ):
        assert datetime.now(UTC) < end
        time.sleep(0.05)
    while datetime.now(UTC) < end:
        time.sleep(0.05)
    with pytest.raises(openai.AuthenticationError) as caught:
        brief.create(**CHAT)
    assert caught.value.code == "api_key_expired"
    with pytest.raises(openai.AuthenticationError) as caught:
        client("gone").chat.completions.create(**CHAT)
    assert caught.value.code == "api_key_revoked"
    assert cell.of(Submit) == []


async def test_keys_are_read_again_without_a_restart(
    gateway: GatewayProcess, cell: FakeCell, keys_file: Path
) -> None:
    write_keys(keys_file, *KEYS, key("fresh"))
    began = time.monotonic()
    headers = {"authorization": "Bearer sk-fresh"}
    while httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code != 200:
        assert time.monotonic() - began < RELOAD_MAX_S
        await asyncio.sleep(0.05)
    print(f"a new key works after {time.monotonic() - began:.2f} s")
    write_keys(keys_file, *KEYS)
    began = time.monotonic()
    while httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code != 401:
        assert time.monotonic() - began < RELOAD_MAX_S
        await asyncio.sleep(0.05)
    print(f"a revoked key is refused after {time.monotonic() - began:.2f} s")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_deadline_reaches_the_coordinator_and_holds_without_it(
    gateway: GatewayProcess, cell: FakeCell, stream: bool, begun: bool
) -> None:
    async def never(ran: Ran) -> None:
        if begun:
            ran.tokens(0, [300, 301])

    cell.behave = never
    headers = {"authorization": "Bearer sk-acme", "x-request-deadline-ms": "500"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as made:
        response = await made.post(PATH, json={**CHAT, "stream": stream})
    assert cell.of(Submit)[0].header.deadline_ms == 500
    error = json.loads(response.text.rpartition("data: ")[2])["error"]
    assert error["code"] == "deadline_exceeded"
    assert response.status_code == (200 if stream and begun else 504)
    if response.status_code == 504:
        assert response.headers["x-should-retry"] == "false"


def test_a_request_that_is_repeated_gets_its_answer_again(
    cell: FakeCell, redis: Redis, client: Clients
) -> None:
    create = client("acme").chat.completions.with_raw_response.create
    headers = {"Idempotency-Key": "order-66"}
    first, again = (create(**CHAT, extra_headers=headers) for _ in range(2))
    assert again.headers["idempotent-replayed"] == "true"
    assert again.parse() == first.parse()
    assert len(cell.of(Submit)) == 1
    with pytest.raises(openai.BadRequestError):
        create(**{**CHAT, "max_tokens": 3}, extra_headers=headers)


def test_shared_counters_that_go_away_stop_nobody(
    gateway: GatewayProcess, cell: FakeCell, redis: Redis, client: Clients
) -> None:
    told = asyncio.run(Told.begin([cell]))
    create = client("busy").chat.completions.with_raw_response.create

    def twenty() -> list[float]:
        times = []
        for _ in range(20):
            headers = {"Idempotency-Key": f"shared-{next(ASKED)}"}
            began = time.perf_counter()
            assert create(**CHAT, extra_headers=headers).headers["x-request-id"]
            times.append(time.perf_counter() - began)
        return times

    calm = twenty()
    redis.stop()
    times = twenty()
    rare = client("rare")
    for _ in range(3):
        rare.chat.completions.create(**CHAT)
    with pytest.raises(openai.RateLimitError):
        rare.chat.completions.create(**CHAT)
    print(f"slowest of 20 requests {max(calm) * 1e3:.0f} ms, {max(times) * 1e3:.0f} without Redis")
    assert statistics.median(times) <= statistics.median(calm) + SHARED_WAIT_S
    assert max(times) < 1.0
    asyncio.run(cell.until(lambda: told.grown(STORAGE_AWAY)[0] > 0))
    redis.start()
    deadline = time.monotonic() + SHARED_AGAIN_S
    while not redis.keys():
        assert time.monotonic() < deadline, "nothing is counted in Redis again"
        create(**CHAT)
    with pytest.raises(openai.RateLimitError):
        for _ in range(8):
            rare.chat.completions.create(**CHAT)
    assert "shared_storage_away" in gateway.log.read_text()


def test_wrong_keys_are_slowed_down_and_right_ones_are_not(
    gateway: GatewayProcess, cell: FakeCell, client: Clients
) -> None:
    """Runs late: from here on this address may not guess for a minute."""
    codes = []
    with httpx.Client(base_url=gateway.url) as made:
        began = time.perf_counter()
        for number in range(500):
            headers = {"authorization": f"Bearer sk-wrong-{number}"}
            codes.append(made.get("/v1/models", headers=headers).status_code)
        rate = 500 / (time.perf_counter() - began)
    print(f"{rate:.0f} wrong keys per second refused over one connection")
    assert set(codes) == {401, 429}
    assert codes[-1] == 429
    assert client("acme").models.retrieve("demo").id == "demo"


def test_no_key_is_in_the_log(gateway: GatewayProcess, cell: FakeCell, client: Clients) -> None:
    """Of a right one whose request fails, of a wrong one, and of all that was sent above."""

    async def fail(ran: Ran) -> None:
        cell.say(TaskFailed(ran.id, "internal_error", "The engine could not run this request."))

    cell.behave = fail
    with pytest.raises(openai.InternalServerError):
        client("acme").chat.completions.create(**CHAT)
    with pytest.raises((openai.AuthenticationError, openai.RateLimitError)):
        client("wrong").chat.completions.create(**CHAT)
    log = gateway.log.read_text()
    assert '"task_failed"' in log, "what happens is logged"
    assert "sk-" not in log
    assert all(each.hash not in log for each in KEYS)
