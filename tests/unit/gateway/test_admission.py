"""Permits by tier, and refusals that hold for a moment."""

import httpx
import pytest

from coordinator.protocol.messages import Tier
from gateway import admission
from gateway.admission import REFUSAL_HOLDS_S, Admission, Refusals
from gateway.edge import Edge
from gateway.errors import api_error
from tests.unit.gateway.edge_app import CHAT, application, error_of

FULL = api_error("queue_full", "Full.", retry_after_s=7)


def test_lower_tiers_leave_permits_to_higher_ones() -> None:
    permits = Admission(20)
    while (refused := permits.take(Tier.BATCH)) is None:
        pass
    assert len(permits) == 15
    assert refused.code == "tier_capacity"
    assert permits.take(Tier.STANDARD) is None
    permits.give_back(Tier.BATCH)
    permits.give_back(Tier.BATCH)
    assert permits.take(Tier.BATCH) is None
    while (refused := permits.take(Tier.INTERACTIVE)) is None:
        pass
    assert (len(permits), refused.code) == (20, "queue_full")


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
