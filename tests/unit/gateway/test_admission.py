"""Permits by tier, and refusals that hold for a moment."""

from collections import Counter

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocol.keys import ApiKey, hash_of
from coordinator.protocol.terms import Tier
from gateway.admission import permits as admission
from gateway.admission.permits import (
    REFUSAL_HOLDS_S,
    SHARE_OF_TIER,
    TENANT_FACTOR,
    Admission,
    Refusals,
)
from gateway.errors import ApiError, api_error
from gateway.http.edge import Edge
from tests.harness.gateway.edge_app import CHAT, application, error_of

FULL = api_error("queue_full", "Full.", retry_after_s=7)


def flood(permits: Admission, tier: Tier, *tenants: str) -> ApiError:
    """Let tenants take permits in turns until all are refused."""
    while True:
        said = [permits.take(tier, tenant) for tenant in tenants]
        refused = [each for each in said if each is not None]
        if len(refused) == len(said):
            return refused[-1]


def test_lower_tiers_leave_permits_to_higher_ones() -> None:
    permits = Admission(20)
    assert flood(permits, Tier.BATCH, *"abc").code == "tier_capacity"
    assert len(permits) == 15
    assert permits.take(Tier.STANDARD, "a") is None
    permits.give_back("a")
    permits.give_back("a")
    assert permits.take(Tier.BATCH, "b") is None
    assert flood(permits, Tier.INTERACTIVE, *"abc").code == "queue_full"
    assert len(permits) == 20


def test_a_key_holds_as_many_permits_as_its_limit() -> None:
    permits = Admission(20)
    mine, other = (
        ApiKey(hash=hash_of(name), tenant="t", max_parallel=2) for name in ("mine", "other")
    )
    for _ in range(2):
        assert permits.take(Tier.STANDARD, "t", mine) is None
    refused = permits.take(Tier.STANDARD, "t", mine)
    assert refused is not None
    assert (refused.status, refused.code) == (429, "parallel_limit_exceeded")
    assert (b"retry-after", b"1") in refused.headers()
    assert permits.take(Tier.STANDARD, "t", other) is None, "of the same tenant"
    permits.give_back("t", mine)
    assert permits.take(Tier.STANDARD, "t", mine) is None
    for key in (mine, mine, other):
        permits.give_back("t", key)
    assert (len(permits), len(permits._of_key)) == (0, 0)


def test_a_limit_that_is_added_counts_what_runs() -> None:
    permits = Admission(20)
    free = ApiKey(hash=hash_of("mine"), tenant="t")
    bound = free.model_copy(update={"max_parallel": 2})
    for _ in range(3):
        assert permits.take(Tier.STANDARD, "t", free) is None
    assert permits.take(Tier.STANDARD, "t", bound) is not None
    for _ in range(2):
        permits.give_back("t", free)
    assert permits.take(Tier.STANDARD, "t", bound) is None


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("flooding", [1, 2, 5])
def test_a_flood_leaves_permits_to_others(tier: Tier, flooding: int) -> None:
    permits = Admission(1_000)
    tenants = [f"flood-{number}" for number in range(flooding)]
    assert flood(permits, tier, *tenants).code == "tier_capacity"
    share = 1_000 * SHARE_OF_TIER[tier]
    left = share - len(permits)
    assert left == pytest.approx(share / (1 + flooding * TENANT_FACTOR), abs=2)
    for _ in range(int(left) // 2):
        assert permits.take(tier, "quiet") is None
    for tenant in tenants:
        permits.give_back(tenant)
        assert permits.take(tier, tenant) is not None, "what is given back is kept for others"


def test_few_permits_are_all_for_whoever_comes() -> None:
    permits = Admission(TENANT_FACTOR)
    assert flood(permits, Tier.INTERACTIVE, "a").code == "queue_full"
    assert len(permits) == TENANT_FACTOR


@given(
    most=st.integers(1, 40),
    moves=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([*Tier, None]))),
)
def test_only_who_has_many_is_refused_while_permits_are_free(
    most: int, moves: list[tuple[str, Tier | None]]
) -> None:
    permits, held = Admission(most), Counter[str]()
    for tenant, tier in moves:
        if tier is None:
            if held[tenant]:
                permits.give_back(tenant)
                held[tenant] -= 1
            continue
        free = max(int(most * SHARE_OF_TIER[tier]), 1) - held.total()
        refused = permits.take(tier, tenant)
        if refused is None:
            assert free > 0
            held[tenant] += 1
        elif free > 0:
            assert held[tenant] >= TENANT_FACTOR * free
        assert len(permits) == held.total() <= most


def test_a_refusal_holds_for_its_tenant_and_tier_and_moment() -> None:
    refusals = Refusals()
    refusals.note(Tier.STANDARD, "a", FULL, 10.0)
    assert refusals.find(Tier.STANDARD, "a", 10.0) == FULL
    assert refusals.find(Tier.INTERACTIVE, "a", 10.0) is None
    assert refusals.find(Tier.STANDARD, "b", 10.0) is None
    assert refusals.find(Tier.STANDARD, "a", 10.0 + REFUSAL_HOLDS_S) is None


@pytest.mark.parametrize("code", ["tier_capacity", "no_healthy_workers", "internal_error"])
def test_other_failures_say_nothing_of_the_next_request(code: str) -> None:
    refusals = Refusals()
    refusals.note(Tier.STANDARD, "a", api_error(code, "x"), 0.0)
    refusals.note(Tier.STANDARD, "a", None, 0.0)
    assert refusals.find(Tier.STANDARD, "a", 0.0) is None


def test_not_more_is_remembered_than_bearable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REFUSALS_MAX", 2)
    refusals = Refusals()
    for name in "abc":
        refusals.note(Tier.STANDARD, name, FULL, 0.0)
    assert refusals.find(Tier.STANDARD, "c", 0.0) is None
    refusals.note(Tier.STANDARD, "c", FULL, 1.0)
    assert refusals.find(Tier.STANDARD, "c", 1.0) == FULL


async def test_a_refused_tenant_is_refused_again_without_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "REFUSAL_HOLDS_S", 60.0)
    edge = Edge(application())
    transport = httpx.ASGITransport(app=edge)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        body = {"events": ["fail", "[DONE]"]}
        assert error_of(await client.post("/v1/completions", json=body)) == (429, "queue_full")
        again = await client.post(CHAT, json={})
        assert error_of(again) == (429, "queue_full")
        assert again.json()["error"]["message"] == "Full."
        batch = await client.post(CHAT, json={}, headers={"x-priority-tier": "batch"})
        assert batch.status_code == 200
        other = {"x-gateway-inference-fairness-id": "other"}
        assert (await client.post(CHAT, json={}, headers=other)).status_code == 200
        urgent = await client.post(CHAT, json={"service_tier": "priority"})
        assert urgent.status_code == 200, "only the body says that it is of another tier"
        named = {"x-priority-tier": "standard", "content-type": "application/json"}
        unread = await client.post(CHAT, content=b"{", headers=named)
        assert error_of(unread) == (429, "queue_full")
