"""What is promised of kept answers, in memory and over Redis, and what it costs if that is away."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from gateway.admission import shared_idempotency, shared_storage
from gateway.admission.idempotency import (
    ANSWER_BYTES_MAX,
    IN_PROGRESS,
    RETENTION_S,
    StoredAnswer,
)
from gateway.admission.shared_idempotency import CLAIM_S, SharedIdempotencyCache
from gateway.admission.shared_storage import STORAGE_RETRY_S, SharedStorage, WaitBudget
from gateway.errors import ApiError
from tests.harness.faults.tcp_proxy import TcpProxy
from tests.harness.redis.redis_server import IS_REAL, Redis

ANSWER = StoredAnswer(200, [(b"content-type", b"application/json")], b'{"a":1}')

Make = Callable[[], SharedIdempotencyCache]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def address(fresh_redis: Redis) -> Iterator[TcpProxy]:
    """Where gateways find Redis, or not."""
    with TcpProxy(fresh_redis.port) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine even a Redis beside it may take longer than a request waits for it."""
    monkeypatch.setattr(shared_storage, "STORAGE_WAIT_S", 60.0)


@pytest.fixture
async def gateway(clock: Clock, address: TcpProxy) -> AsyncIterator[Make]:
    """Makes gateways that share one Redis."""
    all_made: list[SharedIdempotencyCache] = []

    def make() -> SharedIdempotencyCache:
        made = SharedIdempotencyCache(SharedStorage(f"redis://127.0.0.1:{address.port}", clock))
        all_made.append(made)
        return made

    yield make
    for made in all_made:
        await made.close()


@pytest.fixture(params=["memory", "redis"])
def kept(request: pytest.FixtureRequest, gateway: Make) -> SharedIdempotencyCache:
    if request.param == "memory":
        return SharedIdempotencyCache(SharedStorage("memory://"))
    return gateway()


def code_of(answer: object) -> str:
    assert isinstance(answer, ApiError), answer
    return answer.code


async def test_an_answer_comes_back(kept: SharedIdempotencyCache) -> None:
    assert await kept.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    assert code_of(await kept.begin("t", "a", b"r", 0.0, WaitBudget())) == IN_PROGRESS
    await kept.end("t", "a", ANSWER, 0.0, WaitBudget())
    assert await kept.begin("t", "a", b"r", 1.0, WaitBudget()) == ANSWER
    assert code_of(await kept.begin("t", "a", b"other", 1.0, WaitBudget())) == "invalid_value"
    assert await kept.begin("other", "a", b"r", 1.0, WaitBudget()) is None, (
        "tenants do not see each other's"
    )


@pytest.mark.parametrize("answer", [None, StoredAnswer(200, [], b"x" * (ANSWER_BYTES_MAX + 1))])
async def test_what_cannot_be_kept_is_asked_anew(
    kept: SharedIdempotencyCache, answer: StoredAnswer | None
) -> None:
    assert await kept.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    await kept.end("t", "a", answer, 0.0, WaitBudget())
    assert await kept.begin("t", "a", b"other", 0.0, WaitBudget()) is None


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb"])
async def test_keys_that_are_none(kept: SharedIdempotencyCache, key: str) -> None:
    assert code_of(await kept.begin("t", key, b"r", 0.0, WaitBudget())) == "invalid_value"


async def test_gateways_share_answers_and_claims(gateway: Make) -> None:
    one, two = gateway(), gateway()
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    assert code_of(await two.begin("t", "a", b"r", 0.0, WaitBudget())) == IN_PROGRESS
    await one.end("t", "a", ANSWER, 0.0, WaitBudget())
    assert await two.begin("t", "a", b"r", 0.0, WaitBudget()) == ANSWER
    assert code_of(await two.begin("t", "a", b"other", 0.0, WaitBudget())) == "invalid_value"
    assert 0 < await two._redis.ttl(shared_idempotency._name(("t", "a"))) <= RETENTION_S


async def test_of_two_gateways_at_once_one_answers(gateway: Make) -> None:
    gateways = [gateway() for _ in range(8)]
    said = await asyncio.gather(
        *(each.begin("t", "a", b"r", 0.0, WaitBudget()) for each in gateways)
    )
    assert said.count(None) == 1
    assert sum(isinstance(each, ApiError) for each in said) == 7


async def test_a_claim_of_a_dead_gateway_runs_out(gateway: Make) -> None:
    one, two = gateway(), gateway()
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    name = shared_idempotency._name(("t", "a"))
    assert 0 < await two._redis.ttl(name) <= CLAIM_S
    await two._redis.delete(name)  # What Redis does then.
    assert await two.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    await one.end("t", "a", ANSWER, 0.0, WaitBudget())
    other = gateway()
    assert code_of(await other.begin("t", "a", b"r", 0.0, WaitBudget())) == IN_PROGRESS, (
        "two's claim stands"
    )
    await two.end("t", "a", StoredAnswer(200, [], b"two"), 0.0, WaitBudget())
    assert await other.begin("t", "a", b"r", 0.0, WaitBudget()) == StoredAnswer(200, [], b"two")


async def test_an_answer_outlives_a_redis_that_goes_away(
    gateway: Make, address: TcpProxy, fresh_redis: Redis, clock: Clock
) -> None:
    one, two = gateway(), gateway()
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    address.refuse()
    assert code_of(await one.begin("t", "a", b"r", 0.0, WaitBudget())) == IN_PROGRESS
    await one.end("t", "a", ANSWER, 0.0, WaitBudget())
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) == ANSWER
    assert await one.begin("t", "b", b"r", 0.0, WaitBudget()) is None
    await one.end("t", "b", None, 0.0, WaitBudget())
    address.target = fresh_redis.port
    assert await one.begin("t", "c", b"r", 0.0, WaitBudget()) is None, (
        "it is left alone for a while"
    )
    await one.end("t", "c", ANSWER, 0.0, WaitBudget())
    assert await two.begin("t", "c", b"r", 0.0, WaitBudget()) is None
    clock.now_s += STORAGE_RETRY_S + 1
    assert await one.begin("t", "d", b"r", 0.0, WaitBudget()) is None
    await one.end("t", "d", ANSWER, 0.0, WaitBudget())
    assert await two.begin("t", "d", b"r", 0.0, WaitBudget()) == ANSWER


async def test_a_claim_that_could_not_be_ended_is_taken_up_again(
    gateway: Make, address: TcpProxy, fresh_redis: Redis, clock: Clock
) -> None:
    one = gateway()
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    address.refuse()
    await one.end("t", "a", None, 0.0, WaitBudget())
    address.target = fresh_redis.port
    clock.now_s += STORAGE_RETRY_S + 1
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    await one.end("t", "a", ANSWER, 0.0, WaitBudget())
    assert await gateway().begin("t", "a", b"r", 0.0, WaitBudget()) == ANSWER


@pytest.mark.skipif(not IS_REAL, reason="only a real Redis can be full")
async def test_a_redis_that_is_full_is_done_without(
    gateway: Make, fresh_redis: Redis, clock: Clock
) -> None:
    one, two = gateway(), gateway()
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) is None
    fresh_redis.limit_memory("1")
    await one.end("t", "a", ANSWER, 0.0, WaitBudget())
    assert await one.begin("t", "a", b"r", 0.0, WaitBudget()) == ANSWER
    assert await two.begin("t", "b", b"r", 0.0, WaitBudget()) is None
    await two.end("t", "b", ANSWER, 0.0, WaitBudget())
    fresh_redis.limit_memory("0")
    clock.now_s += STORAGE_RETRY_S + 1
    assert await one.begin("t", "c", b"r", 0.0, WaitBudget()) is None
    await one.end("t", "c", ANSWER, 0.0, WaitBudget())
    assert await two.begin("t", "c", b"r", 0.0, WaitBudget()) == ANSWER


class Hanging:
    """A Redis that does not answer."""

    def __init__(self) -> None:
        self.asked = 0

    async def set(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        await asyncio.sleep(3_600)

    async def aclose(self) -> None:
        pass


async def test_nobody_waits_for_a_redis_that_hangs(
    gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_storage, "STORAGE_WAIT_S", 0.05)
    one = gateway()
    await one.close()
    one._redis = hanging = Hanging()
    took_s = []
    for key in "abc":
        began = time.perf_counter()
        assert await one.begin("t", key, b"r", 0.0, WaitBudget()) is None
        await one.end("t", key, ANSWER, 0.0, WaitBudget())
        took_s.append(time.perf_counter() - began)
        assert await one.begin("t", key, b"r", 0.0, WaitBudget()) == ANSWER
    assert hanging.asked == 1, "only the first one waits"
    assert min(took_s) < 0.05, took_s
    print(f"with a Redis that hangs: {', '.join(f'{each * 1e3:.1f} ms' for each in took_s)}")
