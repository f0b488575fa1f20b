"""Traces of the whole product, with two gateways, as a real collector's protobuf has them."""

import json
import secrets
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.cells.busy_client import CHAT, TEXT, post
from tests.harness.cells.collector import Collector, Seen, collector
from tests.harness.cells.product import MODEL_NAME, Product, product
from tests.harness.cells.servers import ROOT

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SERVER = 2
"""OTLP's number of a server's span."""
SECRET_KEY = "sk-of-a-client-that-nobody-else-may-see"
SECRET_PROMPT = "The treasure lies under the third oak behind the mill."
SWITCH_LIMIT_S = 120
LONG_TOKENS = 300
"""Of a stream that a switch is to meet."""
AWAY_LIMIT_S = 30
SENT: Counter[str] = Counter()
"""Requests to each cell so far."""
OWN_MODULES = (
    *(
        "coordinator.process",
        "coordinator.server.spans",
        "gateway.http.spans",
        "gateway.http.edge",
    ),
    *("gateway.open_requests", "worker.rank.traced_tasks"),
)


@pytest.fixture(scope="module")
def told() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def cell(told: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    settings = {"tracing": {"endpoint": told.url}, "gateway": {"processes": 2}}
    with product(tmp_path_factory.mktemp("up"), ranks=2, settings=settings) as running:
        yield running


def new_trace() -> str:
    return secrets.token_hex(16)


def header(trace: str, *, sampled: bool = True) -> str:
    return f"00-{trace}-{'ab' * 8}-{int(sampled):02x}"


def send(cell: Product, body: dict[str, Any], path: str = CHAT, **headers: str) -> int:
    """POST; returns the status. Every request of this module is counted."""
    SENT[cell.url] += 1
    return post(cell.url + path, body, lines_max=None, **headers)[0]


def body(count: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": SECRET_PROMPT}]
    fields = {"max_tokens": count, "ignore_eos": True, "stream": True}
    return {"model": MODEL_NAME, "messages": messages, **fields, **more}


def ask(cell: Product, trace: str, count: int = 8, **more: Any) -> None:
    status = send(
        cell,
        body(count, **more),
        traceparent=header(trace),
        Authorization=f"Bearer {SECRET_KEY}",
        tracestate="vendor=secret-state",
    )
    assert status == 200


def ended(told: Collector, trace: str) -> dict[str, list[Seen]]:
    """Spans of a trace by name, once its request has ended everywhere."""

    def complete() -> bool:
        found = told.of(trace)
        finished = {each.attributes.get("aileron.left") for each in found}
        return "finished" in finished and any(each.kind == SERVER for each in found)

    told.until(complete)
    names: dict[str, list[Seen]] = {}
    for each in told.of(trace):
        names.setdefault(each.name, []).append(each)
    return names


def switched_stream(cell: Product, told: Collector) -> str:
    """Stream through switches until one has met a stream; returns that stream's trace."""
    deadline = time.monotonic() + SWITCH_LIMIT_S
    for layout in ("tp2", "dp2") * 100:
        assert time.monotonic() < deadline, "no switch met a stream"
        trace = new_trace()
        request = urllib.request.Request(
            cell.url + CHAT,
            json.dumps(body(LONG_TOKENS)).encode(),
            {"Content-Type": "application/json", "traceparent": header(trace)},
        )
        SENT[cell.url] += 1
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            cell.switch(layout, "reshard")
            answer.read()
        task = ended(told, trace)[f"chat {MODEL_NAME}"][0]
        if task.attributes["aileron.switches"]:
            return trace
    raise AssertionError("no switch met a stream")


def test_one_trace_goes_through_gateway_pool_and_group(cell: Product, told: Collector) -> None:
    trace = new_trace()
    ask(cell, trace, 8, n=2)
    told.until(lambda: len(told.of(trace)) >= 7)
    spans = ended(told, trace)
    assert {name: len(each) for name, each in spans.items()} == {
        f"POST {CHAT}": 1,
        f"chat {MODEL_NAME}": 2,
        "queue": 2,
        "generate": 2,
    }
    (request,), tasks = spans[f"POST {CHAT}"], spans[f"chat {MODEL_NAME}"]
    assert (request.parent, request.kind, request.service) == ("ab" * 8, SERVER, "aileron-gateway")
    assert request.attributes["http.route"] == CHAT
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert {each.parent for each in tasks} == {request.id}
    ids = {each.id for each in tasks}
    for name, service in (("queue", "aileron-coordinator"), ("generate", "aileron-rank")):
        assert {each.parent for each in spans[name]} == ids
        assert {each.service for each in spans[name]} == {service}
    for task in tasks:
        said = task.attributes
        assert said["gen_ai.provider.name"] == "aileron"
        assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == MODEL_NAME
        assert said["gen_ai.usage.output_tokens"] == said["gen_ai.request.max_tokens"] == 8
        assert said["gen_ai.usage.input_tokens"] > 8
        lasted_s = (task.ended_ns - task.began_ns) * 1e-9
        assert 0 < said["gen_ai.response.time_to_first_chunk"] <= lasted_s
        (group,) = [each for each in spans["generate"] if each.parent == task.id]
        assert group.attributes["gen_ai.usage.output_tokens"] == 8
        assert group.attributes["aileron.steps"] == 8
        assert group.attributes["aileron.left"] == "finished"
        assert group.attributes["aileron.prefill_seconds"] > 0
        assert group.attributes["aileron.decode_seconds"] > 0
        assert [name for name, _, _ in group.events] == ["aileron.first_token"]
        assert request.began_ns <= task.began_ns <= group.began_ns
        assert group.ended_ns <= request.ended_ns
    assert not any(each.is_error for each in told.of(trace))
    assert len({each.id for each in told.spans}) == len(told.spans), "ids are drawn apart"


def test_a_switch_is_an_event_of_what_it_met_and_a_span(cell: Product, told: Collector) -> None:
    trace = switched_stream(cell, told)
    told.until(lambda: any(each.name == "switch" and trace in each.links for each in told.spans))
    switch = next(each for each in told.spans if each.name == "switch" and trace in each.links)
    assert (switch.service, switch.parent) == ("aileron-coordinator", "")
    said = switch.attributes
    assert {said["aileron.switch.from"], said["aileron.switch.to"]} == {"dp2", "tp2"}
    assert said["aileron.switch.outcome"] == "served"
    assert said["aileron.switch.cause"] == "operator"
    assert said["aileron.switch.tasks.reshard"] >= 1
    assert said["aileron.switch.park_seconds"] > 0
    spans = told.of(trace)
    (task,) = [each for each in spans if each.name.startswith("chat ")]
    events = {about["aileron.epoch"]: about for name, _, about in task.events}
    assert events[said["aileron.epoch"]]["aileron.pause_seconds"] > 0
    stays = sorted((s for s in spans if s.name == "generate"), key=lambda each: each.began_ns)
    assert [each.attributes["aileron.left"] for each in stays] == ["moved", "finished"]
    assert sum(each.attributes["gen_ai.usage.output_tokens"] for each in stays) == LONG_TOKENS
    before, after = (each.attributes["aileron.group"] for each in stays)
    assert before != after


def test_errors_are_codes_and_nothing_of_clients_is_told(cell: Product, told: Collector) -> None:
    """Looks at all that was ever sent, by the tests before it as well."""
    trace, wrong = new_trace(), new_trace()
    ask(cell, trace, user=SECRET_PROMPT)
    refused = body(8) | {"model": SECRET_PROMPT}
    assert send(cell, refused, TEXT, traceparent=header(wrong)) in (400, 404)
    (span,) = told.until(lambda: told.of(wrong))
    assert span.attributes["http.response.status_code"] in (400, 404)
    assert span.attributes["error.type"] and not span.is_error
    ended(told, trace)
    sent = b"".join(told.bodies)
    assert trace.encode() not in sent and bytes.fromhex(trace) in sent, "that is how it is told"
    for secret in (SECRET_KEY, SECRET_PROMPT, "treasure", "secret-state", "Bearer"):
        assert secret.encode() not in sent


def test_callers_decide_whether_they_are_traced(cell: Product, told: Collector) -> None:
    without, malformed = new_trace(), new_trace()
    assert send(cell, body(4), traceparent=header(without, sampled=False)) == 200
    # No traceparent that can be used: a trace of its own.
    before = {each.trace for each in told.spans}
    bad = header(malformed)[:-1]
    assert send(cell, body(5), traceparent=bad) == 200
    now_ns = time.time_ns()

    def both_told() -> bool:
        """Both gateways have sent what came later, and with it what they had before."""
        ask(cell, new_trace(), 2)
        later = [each for each in list(told.spans) if each.began_ns > now_ns]
        return len({each.instance for each in later if each.service == "aileron-gateway"}) == 2

    told.until(both_told)

    def own() -> list[Seen]:
        new = [each for each in list(told.spans) if each.trace not in before]
        return [each for each in new if each.attributes.get("gen_ai.usage.output_tokens") == 5]

    told.until(lambda: any(each.kind == SERVER and not each.parent for each in own()))
    assert not told.of(without) and not told.of(malformed)


def counted(cell: Product, name: str) -> float:
    with urllib.request.urlopen(cell.admin + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def test_totals_are_those_of_both_gateways(cell: Product, told: Collector) -> None:
    """No matter of traces, but of a cell with two gateways, which this one is."""

    def asked() -> bool:
        ask(cell, new_trace(), 2)
        spans = [each for each in list(told.spans) if each.kind == SERVER]
        return len({each.instance for each in spans}) == 2

    told.until(asked)
    told.until(lambda: counted(cell, "aileron_requests_total") == SENT[cell.url])


def test_a_dead_collector_costs_no_request_anything(cell: Product, told: Collector) -> None:
    told.answers.clear()
    try:
        rounds = 0
        told.waiting = 0
        while told.waiting < 2 or rounds < 20:
            assert rounds < 2_000, "nobody exports"
            started = time.monotonic()
            ask(cell, new_trace(), 2)
            assert time.monotonic() - started < AWAY_LIMIT_S
            rounds += 1
        assert cell.switch("dp2", "reshard")
    finally:
        told.answers.set()
    trace = new_trace()
    ask(cell, trace)
    assert ended(told, trace)


def test_without_an_endpoint_nothing_is_imported() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {OWN_MODULES!r}: importlib.import_module(name)\n"
        "from coordinator.protocol.tracing_config import TracingConfig\n"
        "from coordinator.protocol.tracing import start_tracing\n"
        "assert start_tracing(TracingConfig(), 'coordinator') is None\n"
        "found = [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert not found, found\n"
        "import threading\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
