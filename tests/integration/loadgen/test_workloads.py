"""Presets, traces, the server's switches and a slow client, from command line to report."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.views import switch_view
from coordinator.model.records import SwitchRecord
from coordinator.protocol.terms import Carry
from loadgen import runner
from loadgen.cli import main
from tests.harness.loadgen.loadgen_server import PAUSE_S, FakeServer

Load = Callable[..., dict[str, Any]]


def closed(requests: int, concurrency: int = 4) -> list[str]:
    return ["--concurrency", str(concurrency), "--requests", str(requests)]


PRESET = ["--preset", "mixed", "--duration", "1.2", "--length-scale", "0.01", "--seed", "4"]


def test_a_preset_is_the_same_load_every_time(load: Load, server: FakeServer) -> None:
    first = load(*PRESET)
    sent = [(body["prompt"], body["max_tokens"]) for body in server.bodies]
    names = [phase["name"] for phase in first["phases"]]
    assert names == ["low-2", "burst-10", "low-3", "burst-20", "low-4", "burst-30", "low-5"]
    assert {headers["X-Priority-Tier"] for headers in server.headers} <= {
        "interactive", "standard", "batch",
    }  # fmt: skip
    assert all(body["ignore_eos"] is True for body in server.bodies)
    assert first["slos"]["interactive"] == {"ttft_ms": 500, "tpot_ms": 30}
    assert first["plan"]["preset"] == "mixed"
    server.bodies.clear()
    again = load(*PRESET)
    assert again["plan"] == first["plan"]
    assert sorted((body["prompt"], body["max_tokens"]) for body in server.bodies) == sorted(sent)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_agents_send_the_whole_conversation_with_the_servers_answers(
    load: Load, server: FakeServer, endpoint: str
) -> None:
    report = load(
        "--preset", "agentic", "--duration", "0.5", "--rate-scale", "20", "--arrivals", "uniform",
        "--length-scale", "0.02", "--think-time", "5ms", "--endpoint", endpoint, "--records",
    )  # fmt: skip
    sessions = report["sessions"]
    assert (sessions["planned"], sessions["finished"], sessions["cut_short"]) == (4, 4, 0)
    assert sessions["turns"] == sessions["turns_planned"] == len(server.bodies)
    assert sum(each["requests"] for each in sessions["by_turn"]) == sessions["turns"]
    assert min(each["ttft_ms"]["p50"] for each in sessions["by_turn"]) >= 75
    bodies = {
        {name.lower(): value for name, value in headers.items()}["x-request-id"]: body
        for headers, body in zip(server.headers, server.bodies, strict=True)
    }
    conversations: dict[str, list[dict[str, Any]]] = {}
    for record in report["records"]:
        conversations.setdefault(record["session"], []).append(record)
    for turns in conversations.values():
        for earlier, later in pairwise(turns):
            assert later["planned_s"] > earlier["ended_s"]
            before, after = (bodies[record["request_id"]] for record in (earlier, later))
            answer = "word " * before["max_tokens"]
            if endpoint == "completions":
                assert after["prompt"].startswith(f"{before['prompt']}{answer} ")
            else:
                said = {"role": "assistant", "content": answer}
                assert after["messages"][:-1] == [*before["messages"], said]
                assert after["messages"][-1]["role"] == "user"


def test_a_trace_is_replayed_and_says_what_it_left_out(
    load: Load, server: FakeServer, tmp_path: Path
) -> None:
    trace = tmp_path / "burst.csv"
    rows = ["0,GPT-4,30,3,33,API log", "1,GPT-4,30,0,30,API log", "4,ChatGPT,60,5,65,API log"]
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    trace.write_text("\n".join([head, *rows]) + "\n")
    report = load("--trace", str(trace), "--rate-scale", "10", "--records")
    assert [record["planned_s"] for record in report["records"]] == [0, 0.4]
    assert [body["max_tokens"] for body in server.bodies] == [3, 5]
    assert [len(body["prompt"].split()) for body in server.bodies] == [30, 60]
    assert report["plan"]["trace"] == {
        "file": "burst.csv", "columns": "BurstGPT", "requests": 2, "rows_left_out": 1,
    }  # fmt: skip
    assert any("1 rows of the trace" in sentence for sentence in report["warnings"])


def switch_of(epoch: int) -> dict[str, Any]:
    """A switch as the coordinator's admin API tells it."""
    record = SwitchRecord(epoch, "dp2", "tp2", "policy", Carry.RESHARD, 1_000, 0)
    told: dict[str, Any] = json.loads(json.dumps(switch_view(record)))
    return told


def test_switches_of_the_server_are_noted_on_the_runs_clock(
    load: Load, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADGEN_TEST_KEY", "api-secret")
    monkeypatch.setenv("LOADGEN_ADMIN_KEY", "admin-secret")
    server.switches = [switch_of(1)]  # before the run: not this run's

    def switch_at_the_third_request() -> None:
        if len(server.bodies) == 2:
            server.switches.append(switch_of(2))

    server.on_request = switch_at_the_third_request
    report = load(
        *closed(4, concurrency=1), "--model", "paused", "--output-tokens", "fixed:4",
        "--admin-url", server.url, "--api-key-env", "LOADGEN_TEST_KEY",
        "--admin-key-env", "LOADGEN_ADMIN_KEY",
    )  # fmt: skip
    watched = report["switches"]
    assert (watched["layout_at_start"], watched["missed_polls"]) == ("dp2", 0)
    (event,) = watched["events"]
    assert (event["epoch"], event["from"], event["to"]) == (2, "dp2", "tp2")
    # It comes when two of four answers are over, and is seen by the next poll or the last one.
    assert PAUSE_S <= event["at_s"] <= report["duration_s"] + 10
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer api-secret"}
    assert {head["Authorization"] for head in server.admin_headers} == {"Bearer admin-secret"}
    assert "secret" not in json.dumps(report)


def test_an_admin_api_that_fails_is_said(
    load: Load, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        server.admin_status = 500

    server.on_request = fail
    report = load(*closed(1), "--admin-url", server.url, "--output-tokens", "fixed:2")
    assert report["switches"]["missed_polls"] >= 1
    assert any("switches may be missing" in sentence for sentence in report["warnings"])
    options = ["--url", server.url, *closed(1), "--quiet"]
    assert main(["run", *options, "--admin-url", f"{server.url}/elsewhere"]) == 2
    assert "does not answer as an admin API: status 404" in capsys.readouterr().err


def test_a_client_that_is_held_up_says_so_and_counts_it(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "AHEAD_BYTES_MAX", 0)
    # The body of every request is slow to make: sends come late, one after another.
    report = load(
        "--rate", "40", "--duration", "0.5", "--arrivals", "burst", "--burst-size", "20",
        "--prompt-tokens", "fixed:60000", "--output-tokens", "fixed:2",
    )  # fmt: skip
    total, lag = report["total"], report["scheduling"]["lag_ms"]
    assert lag["p99"] > 20
    assert any("did not keep its schedule" in each for each in report["generator"]["fell_behind"])
    assert set(report["generator"]["fell_behind"]) <= set(report["warnings"])
    assert total["ttft_ms"]["mean"] == pytest.approx(
        total["ttft_from_send_ms"]["mean"] + total["lag_ms"]["mean"], abs=0.01
    )
