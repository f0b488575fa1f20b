"""The load generator against a small OpenAI server whose latencies and faults are known.

What the report says is compared with what the server was told to do, and with what it saw.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from tests.harness.loadgen.loadgen_server import FIRST_TOKEN_S, GAP_S, PAUSE_S, FakeServer

# Timers never fire early by more than this, and on two shared cores they may fire late by that.
EARLY_MS, LATE_MS = 2.0, 60.0
ROUNDS = 12
"""A busy machine is late in some rounds; a client that measures wrongly is wrong in each."""


Load = Callable[..., dict[str, Any]]


def closed(requests: int, concurrency: int = 4) -> list[str]:
    return ["--concurrency", str(concurrency), "--requests", str(requests)]


def within(value: float, expected_s: float) -> bool:
    return expected_s * 1000 - EARLY_MS <= value <= expected_s * 1000 + LATE_MS


def once_in_time(measure: Callable[[], list[tuple[float, float]]]) -> None:
    """Each measured time (ms) is the expected one (s) in at least one of several rounds."""
    rounds: list[list[tuple[float, float]]] = []
    for _ in range(ROUNDS):
        rounds.append(measure())
        if all(any(within(*pair) for pair in column) for column in zip(*rounds, strict=True)):
            return
    pytest.fail(f"some time was right in none of {ROUNDS} rounds: {rounds}")


def best(report: dict[str, Any], key: str) -> float:
    """The smallest of a latency over all requests: the one that the machine held up least."""
    return float(min(record[key] for record in report["records"]))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_measured_latencies_are_the_servers(load: Load, server: FakeServer, endpoint: str) -> None:
    options = [*closed(8), "--endpoint", endpoint, "--output-tokens", "fixed:10", "--records"]

    def measure() -> list[tuple[float, float]]:
        report = load(*options)
        return [
            (best(report, "ttft_ms"), FIRST_TOKEN_S),
            (best(report, "tpot_ms"), GAP_S),
            (report["total"]["chunk_gap_ms"]["p50"], GAP_S),
            (best(report, "e2e_ms"), FIRST_TOKEN_S + 9 * GAP_S),
        ]

    once_in_time(measure)
    report = load(*options)
    total = report["total"]
    assert (total["requests"]["ok"], total["requests"]["failed"]) == (8, 0)
    assert total["chunk_gap_ms"]["count"] == 8 * 9
    assert total["tokens"] == {"prompt": 88, "output": 80, "output_asked": 80}
    tokens_per_s = total["throughput"]["output_tokens_per_s"]
    assert tokens_per_s == pytest.approx(80 / report["duration_s"], rel=0.01)
    assert report["server"]["model"] == "steady"
    assert len({record["request_id"] for record in report["records"]}) == 8
    assert all(r["server_request_id"] == r["request_id"] for r in report["records"])
    assert server.most_in_flight == 4


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_first_token_is_the_first_text(load: Load, endpoint: str) -> None:
    options = [*closed(4), "--model", "opens-early", "--endpoint", endpoint, "--records"]

    def measure() -> list[tuple[float, float]]:
        return [(best(load(*options, "--output-tokens", "fixed:4"), "ttft_ms"), PAUSE_S)]

    once_in_time(measure)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_gaps_between_chunks_are_not_those_between_tokens(load: Load, endpoint: str) -> None:
    options = [*closed(4), "--model", "pairs", "--endpoint", endpoint, "--records"]

    def measure() -> list[tuple[float, float]]:
        total = load(*options, "--output-tokens", "fixed:12")["total"]
        assert total["tokens"]["output"] == 4 * 12
        assert total["chunk_gap_ms"]["count"] == total["token_gap_ms"]["count"] == 4 * 5
        ratio = total["chunk_gap_ms"]["mean"] / total["token_gap_ms"]["mean"]
        assert ratio == pytest.approx(2, rel=1e-3)
        return [
            (total["chunk_gap_ms"]["p50"], GAP_S),
            (total["token_gap_ms"]["p50"], GAP_S / 2),
            (total["tpot_ms"]["p50"], 5 * GAP_S / 11),
        ]

    once_in_time(measure)


def test_a_pause_in_the_stream_is_the_longest_gap(load: Load) -> None:
    def measure() -> list[tuple[float, float]]:
        options = [*closed(4), "--model", "paused", "--output-tokens", "fixed:6", "--records"]
        report = load(*options)
        return [
            (best(report, "max_chunk_gap_ms"), PAUSE_S),
            (report["total"]["chunk_gap_ms"]["p50"], GAP_S),
        ]

    once_in_time(measure)


@pytest.mark.parametrize(
    ("model", "kind", "code"),
    [
        ("truncated", "silent_truncation", "silent_truncation:no_finish_reason"),
        ("in-band", "in_band_error", "in_band_error:switching_timeout"),
        ("busy", "refused", "refused:429 queue_full"),
        ("draining", "refused", "refused:503 draining"),
        ("vllm-busy", "refused", "refused:503"),
        ("missing", "http_error", "http_error:404 model_not_found"),
        ("stuck", "timeout", "timeout:timeout"),
        ("cut", "connection_error", "connection_error:ClientPayloadError"),
        ("not-a-stream", "bad_stream", "bad_stream:content_type"),
    ],
)
def test_every_fault_is_named(load: Load, model: str, kind: str, code: str) -> None:
    allowed = "500ms" if kind == "timeout" else "100s"
    report = load(*closed(2), "--model", model, "--timeout", allowed, status=1)
    total = report["total"]
    assert total["errors"][kind] == 2
    assert total["error_codes"] == {code: 2}
    assert (total["requests"]["ok"], total["requests"]["failed"]) == (0, 2)
    assert total["ttft_ms"]["p50"] is None
    assert sum(report["series"]["errors"]) == 2


def test_faults_among_good_answers(load: Load) -> None:
    report = load(*closed(15, concurrency=1), "--model", "mixed", "--output-tokens", "fixed:4")
    total = report["total"]
    assert total["requests"]["ok"] == 3
    seen = {kind: count for kind, count in total["errors"].items() if count}
    assert seen == dict.fromkeys(
        ("silent_truncation", "in_band_error", "refused", "connection_error"), 3
    )


def test_a_timeout_takes_as_long_as_it_was_allowed(load: Load) -> None:
    def measure() -> list[tuple[float, float]]:
        report = load(*closed(1), "--model", "stuck", "--timeout", "0.5", "--records", status=1)
        (record,) = report["records"]
        assert record["error"] == "timeout"
        return [((record["ended_s"] - record["sent_s"]) * 1000, 0.5)]

    once_in_time(measure)


def test_open_loop_sends_are_on_time_while_no_answer_has_come(
    load: Load, server: FakeServer
) -> None:
    def measure() -> list[tuple[float, float]]:
        server.came_at_s.clear()
        report = load(
            "--rate", "20", "--duration", "1", "--arrivals", "uniform",
            "--model", "long-wait", "--records",
        )  # fmt: skip
        assert report["scheduling"]["lag_ms"]["count"] == 20
        first_s = server.came_at_s[0]
        late_ms = sorted(
            abs((came_s - first_s) - record["planned_s"]) * 1000
            for record, came_s in zip(report["records"], server.came_at_s, strict=True)
        )
        return [(report["scheduling"]["lag_ms"]["p50"], 0.0), (late_ms[10], 0.0)]

    once_in_time(measure)
    assert server.most_in_flight == 20  # each answer takes longer than all the sends


def test_phases_tiers_and_prefixes_reach_the_server(load: Load, server: FakeServer) -> None:
    report = load(
        "--phases", "low:4/s:1s,high:20/s:1s,low:4/s:1s",
        "--tiers", "interactive:1,batch:1",
        "--shared-prefix-tokens", "30", "--prefix-groups", "2",
        "--prompt-tokens", "uniform:5-9", "--output-tokens", "fixed:3",
        "--seed", "3", "--slo-ttft-ms", "60000", "--ignore-eos", "--tokens-per-word", "3.4",
    )  # fmt: skip
    names = [phase["name"] for phase in report["phases"]]
    assert names == ["low", "high", "low#2"]
    sent = [phase["requests"]["sent"] for phase in report["phases"]]
    assert sent[1] > 2 * max(sent[0], sent[2])
    assert sum(sent) == len(server.bodies) == report["planned_requests"]
    tiers = [headers["X-Priority-Tier"] for headers in server.headers]
    assert set(report["tiers"]) == set(tiers) == {"interactive", "batch"}
    assert report["tiers"]["batch"]["requests"]["sent"] == tiers.count("batch")
    assert report["total"]["goodput"]["good_share"] == 1
    assert report["total"]["requests"]["served_at_other_tier"] == len(tiers)
    assert len({" ".join(body["prompt"].split()[:9]) for body in server.bodies}) == 2
    assert all(body["ignore_eos"] is True for body in server.bodies)


def test_the_same_seed_sends_the_same_prompts(load: Load, server: FakeServer) -> None:
    options = [
        *closed(5, concurrency=1),
        "--output-tokens",
        "fixed:1",
        "--prompt-tokens",
        "uniform:1-9",
    ]
    load(*options, "--prompt-kind", "tokens", "--vocab-size", "50", "--warmup-requests", "1")
    first = [body["prompt"] for body in server.bodies]
    assert len(first) == 6  # the warm-up is sent, and not counted
    server.bodies.clear()
    report = load(*options, "--prompt-kind", "tokens", "--vocab-size", "50")
    assert [body["prompt"] for body in server.bodies] == first[1:]
    assert report["planned_requests"] == 5
    assert all(isinstance(token, int) for token in first[0])


def test_too_many_in_flight_are_dropped_by_the_client_and_said(load: Load) -> None:
    report = load(
        "--rate", "20", "--duration", "1", "--arrivals", "burst", "--burst-size", "20",
        "--max-in-flight", "5", "--model", "long-wait",
    )  # fmt: skip
    requests = report["total"]["requests"]
    assert (requests["sent"], requests["dropped_by_client"], requests["ok"]) == (5, 15, 5)
    assert any("--max-in-flight" in sentence for sentence in report["warnings"])


def test_without_usage_tokens_are_counted_and_the_report_says_so(load: Load) -> None:
    report = load(*closed(2), "--model", "no-usage", "--output-tokens", "fixed:4")
    assert report["total"]["tokens"]["output"] == 8
    assert report["total"]["requests"]["without_usage"] == 2
    assert any("no usage" in sentence for sentence in report["warnings"])


def test_the_report_says_what_was_done_and_never_the_key(
    load: Load, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADGEN_TEST_KEY", "very-secret")
    report = load(*closed(1), "--api-key-env", "LOADGEN_TEST_KEY")
    assert server.headers[0]["Authorization"] == "Bearer very-secret"
    assert "very-secret" not in json.dumps(report)
    assert report["command"][:4] == ["python", "-m", "loadgen", "run"]
    assert report["config"]["concurrency"] == 4
    assert report["environment"]["python"]
    assert report["schema_version"] == 3


def test_a_picture_is_drawn_with_errors_and_phases(load: Load, tmp_path: Path) -> None:
    during, later = tmp_path / "during.png", tmp_path / "later.png"
    load(
        "--phases", "low:3/s:1s,high:15/s:1s", "--model", "mixed", "--output-tokens", "fixed:5",
        "--plot", str(during),
    )  # fmt: skip
    assert main(["plot", str(tmp_path / "report.json"), "--out", str(later)]) == 0
    for picture in (during, later):
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 30_000
    assert not list(tmp_path.glob(".*"))  # nothing half-written is left


def test_two_runs_are_compared_and_thresholds_decide(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("steady", "paused"):
        load(*closed(4), "--model", name, "--output-tokens", "fixed:6")
        (tmp_path / "report.json").rename(tmp_path / f"{name}.json")
    files = [str(tmp_path / "steady.json"), str(tmp_path / "paused.json")]
    table = tmp_path / "table.json"
    names = ["--names", "static", "aileron", "--json", str(table)]
    assert main(["compare", *files, *names, "--fail-if", "b.failed>0"]) == 0
    assert "aileron / static" in capsys.readouterr().out
    assert main(["compare", *files, "--fail-if", "b.ok<5"]) == 1
    assert "broken: b.ok<5: it is 4" in capsys.readouterr().out
    assert main(["compare", *files, "--fail-if", "latency>2"]) == 2
    metrics = {
        row["metric"]: row for row in json.loads(table.read_text())["comparisons"][0]["metrics"]
    }
    gap = metrics["max_chunk_gap_p50_ms"]
    assert gap["a"] > 0
    assert gap["ratio"] == pytest.approx(gap["b"] / gap["a"], rel=1e-4)


def start_process(*options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "loadgen", "run", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )


def test_the_command_shows_progress_and_a_table(server: FakeServer) -> None:
    process = start_process("--url", server.url, *closed(3), "--output-tokens", "fixed:2")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "sent 3/3" in stderr
    assert "TTFT" in stdout
    assert "total" in stdout


def test_ctrl_c_stops_at_once_and_still_reports(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    process = start_process(
        "--url", server.url, "--model", "stuck", "--rate", "20", "--duration", "120",
        "--out", str(out),
    )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while len(server.bodies) < 5 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    report = json.loads(out.read_text())
    assert report["interrupted"] is True
    assert report["total"]["requests"]["cancelled"] >= 5
    assert report["unsent_requests"] > 500
    assert report["duration_s"] < 90
