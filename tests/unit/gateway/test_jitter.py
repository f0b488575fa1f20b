"""Whoever refuses, clients that are refused together are told different waits."""

import httpx
import pytest

from gateway.errors import RETRY_AFTER_MAX_S, api_error
from gateway.http.edge import Edge
from gateway.http.jitter import MOST, with_jitter
from tests.harness.gateway.edge_app import CHAT, application, error_of

REFUSALS = 50
DISTINCT_MIN = 10
FULL = {"answer": {"error": {"message": "Full.", "code": "queue_full"}}, "status": 429}


@pytest.mark.parametrize(
    ("path", "body", "draining"),
    [
        pytest.param(CHAT, {}, True, id="the edge"),
        pytest.param("/v1/completions", {"events": ["fail"]}, False, id="a task's failure"),
        pytest.param("/tokenize", FULL, False, id="the application"),
    ],
)
async def test_equal_refusals_tell_different_waits(
    path: str, body: dict[str, object], draining: bool
) -> None:
    gate = Edge(application())
    gate.draining = draining
    waits_ms = []
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for number in range(REFUSALS):
            # Each of a tenant of its own: what one was refused is not remembered for the next.
            headers = {"X-Gateway-Inference-Fairness-Id": f"t{number}"}
            response = await client.post(path, json=body, headers=headers)
            assert error_of(response)[0] in (429, 503)
            waits_ms.append(int(response.headers["retry-after-ms"]))
    assert len(set(waits_ms)) > DISTINCT_MIN
    assert 1_000 <= min(waits_ms) <= max(waits_ms) <= 1_500


@pytest.mark.parametrize(("told_s", "least_s"), [(1, 1), (7, 7), (59, 40), (60, 40)])
def test_waits_are_spread_within_what_clients_obey(told_s: int, least_s: int) -> None:
    error = api_error("queue_full", "Full.", retry_after_s=told_s)
    waits_ms = [with_jitter(error).retry_after_ms for _ in range(REFUSALS)]
    assert len(set(waits_ms)) > DISTINCT_MIN
    most_s = min(least_s * MOST, RETRY_AFTER_MAX_S)
    assert least_s * 1_000 <= min(waits_ms) <= max(waits_ms) <= most_s * 1_000


def test_what_is_not_to_be_tried_again_stays_as_it_is() -> None:
    error = api_error("invalid_value", "No.")
    assert with_jitter(error) is error
