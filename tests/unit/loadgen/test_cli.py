"""Bad input: one sentence on stderr, status 2, and nothing sent or written."""

import json
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from loadgen.cli import main
from loadgen.config import RunConfig, parse_run, parse_url
from loadgen.errors import UsageError
from loadgen.options import build_parser
from loadgen.report.files import WHOLE_REPORT
from loadgen.report.slo import Slo
from loadgen.runner import allow_open_files
from loadgen.workload.lengths import LogNormal, Uniform
from loadgen.workload.load import ClosedLoad, OpenLoad, TraceLoad
from loadgen.workload.plan import Sessions

STEADY = ["--rate", "4", "--duration", "30"]


def config(*options: str) -> RunConfig:
    return parse_run(build_parser().parse_args(["run", *options]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "exactly one of --phases"),
        ([*STEADY, "--phases", "a:1/s:1s"], "exactly one of"),
        ([*STEADY, "--concurrency", "2", "--requests", "2"], "exactly one of"),
        (["--rate", "4"], "need one another"),
        (["--concurrency", "4"], "need one another"),
        (["--rate", "-1", "--duration", "3"], "above 0"),
        (["--rate", "nan", "--duration", "3"], "above 0"),
        (["--rate", "x", "--duration", "3"], "invalid float"),
        (["--rate", "1", "--duration", "3 parsecs"], "not a duration"),
        (["--rate", "1e9", "--duration", "30"], "limit of 200000"),
        ([*STEADY, "--cycles", "3"], "--cycles repeats --phases"),
        (["--phases", "low"], "NAME:RATE/s:DURATION"),
        (["--concurrency", "0", "--requests", "2"], "--concurrency must be from 1"),
        (["--concurrency", "2000", "--requests", "2"], "--concurrency must be from 1 to 1000"),
        ([*STEADY, "--max-in-flight", "0"], "--max-in-flight"),
        ([*STEADY, "--max-in-flight", "10001"], "--max-in-flight"),
        ([*STEADY, "--burst-size", "0"], "--burst-size"),
        ([*STEADY, "--arrivals", "weird"], "invalid choice"),
        ([*STEADY, "--endpoint", "weird"], "invalid choice"),
        ([*STEADY, "--prompt-tokens", "many"], "cannot be read"),
        ([*STEADY, "--tiers", "a:b:c"], "NAME:WEIGHT"),
        ([*STEADY, "--prefix-groups", "2"], "--shared-prefix-tokens"),
        ([*STEADY, "--prompt-kind", "tokens"], "--vocab-size"),
        (
            [*STEADY, "--prompt-kind", "tokens", "--vocab-size", "9", "--endpoint", "chat"],
            "Chat takes text only",
        ),
        ([*STEADY, "--tokens-per-word", "0"], "--tokens-per-word"),
        ([*STEADY, "--temperature", "-1"], "--temperature"),
        ([*STEADY, "--timeout", "0"], "not a duration"),
        ([*STEADY, "--timeout", "48h"], "--timeout must be at most"),
        ([*STEADY, "--slo-ttft-ms", "0"], "--slo-ttft-ms"),
        ([*STEADY, "--warmup-requests", "-1"], "--warmup-requests"),
        ([*STEADY, "--url", "localhost:8000"], "not a server address"),
        ([*STEADY, "--url", "http://u:p@host"], "no user name"),
        ([*STEADY, "--out", "/no/such/folder/r.json"], "there is no folder"),
        ([*STEADY, "--out", "/"], "is a folder"),
        ([*STEADY, "--plot", "run.txt"], "must end in one of"),
        ([*STEADY, "--api-key-env", "NO_SUCH_VARIABLE_HERE"], "is not set"),
        ([*STEADY, "--unknown"], "unrecognized"),
        ([*STEADY, "--slo", "interactive"], "TIER:TTFT/TPOT"),
        ([*STEADY, "--slo", "interactive:500/50"], "TIER:TTFT/TPOT"),
        ([*STEADY, "--slo", "interactive:0ms/50ms"], "TIER:TTFT/TPOT"),
        ([*STEADY, "--slo", "a:none,a:none"], "twice"),
        ([*STEADY, "--slo", "a:none", "--slo-ttft-ms", "5"], "use one way"),
        ([*STEADY, "--preset", "bursty"], "exactly one of"),
        (["--preset", "none-such"], "invalid choice"),
        (["--preset", "bursty", "--prompt-tokens", "fixed:3"], "have their own lengths"),
        (["--preset", "bursty", "--tiers", "a:1"], "own tiers and prefixes"),
        (["--preset", "bursty", "--duration", "0"], "not a duration"),
        (["--preset", "bursty", "--rate-scale", "0"], "--rate-scale"),
        (["--preset", "bursty", "--rate-scale", "1e6"], "over the limit of 200000"),
        (["--preset", "bursty", "--length-scale", "nan"], "--length-scale"),
        (["--preset", "bursty", "--length-scale", "1e6"], "longer than the limit"),
        (["--preset", "bursty", "--trace", "x.csv"], "exactly one of"),
        (["--trace", "x.csv", "--arrivals", "uniform"], "its own send times"),
        (["--phases", "a:1/s:1s", "--duration", "3"], "--duration goes with"),
        ([*STEADY, "--trace-start", "3"], "--trace-start goes with"),
        ([*STEADY, "--think-time", "3"], "--think-time goes with"),
        (["--preset", "bursty", "--think-time", "3"], "--think-time goes with"),
        (["--concurrency", "1", "--requests", "1", "--rate-scale", "2"], "a closed loop has none"),
        ([*STEADY, "--admin-url", "here"], "not a server address"),
        ([*STEADY, "--admin-url", "http://h?x=1"], "use --admin-key-env"),
        ([*STEADY, "--admin-key-env", "X"], "goes with --admin-url"),
    ],
)
def test_a_bad_run_is_refused_in_one_sentence(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: int | str | None = main(["run", *options])
    except SystemExit as stop:
        status = stop.code
    stderr = capsys.readouterr().err
    assert status == 2
    assert said in stderr
    assert stderr.count("\n") == 1


def test_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["run", "--url", url, *STEADY]) == 2
    stderr = capsys.readouterr().err
    assert f"No server answers at {url}/v1/models" in stderr
    assert stderr.count("\n") == 1


def test_a_server_without_models_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"error": {"message": "Go to the serving port."}}).encode()
            self.send_response(404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no line of each request."""

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["run", "--url", url, *STEADY]) == 2
        server.shutdown()
    stderr = capsys.readouterr().err
    assert "lists no model (status 404: Go to the serving port.)" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is not a report"),
        ('{"schema": "other"}', "is not a report"),
        ('{"schema": "aileron.loadgen.report", "schema_version": 99}', "has report version 99"),
        ('{"schema": "aileron.loadgen.report", "schema_version": 3}', "is missing"),
    ],
)
@pytest.mark.parametrize("command", ["plot", "compare"])
def test_unreadable_reports_are_refused(
    tmp_path: Path,
    command: str,
    content: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, picture = tmp_path / "r.json", tmp_path / "p.png"
    if content is not None:
        report.write_text(content)
    more = ["--out", str(picture)] if command == "plot" else [str(report)]
    assert main([command, str(report), *more]) == 2
    stderr = capsys.readouterr().err
    assert said in stderr
    assert stderr.count("\n") == 1
    assert not picture.exists()


def test_a_hollow_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    head = {"schema": "aileron.loadgen.report", "schema_version": 3}
    hollow: dict[str, object] = {key: [] for key in WHOLE_REPORT}
    report.write_text(json.dumps({**hollow, **head, "duration_s": 1}))
    assert main(["plot", str(report), "--out", str(tmp_path / "p.png")]) == 2
    assert "is not a whole report" in capsys.readouterr().err
    assert main(["compare", str(report), str(report)]) == 2
    assert "is not a whole report" in capsys.readouterr().err


def test_good_options_become_a_config() -> None:
    open_loop = config(*STEADY, "--arrivals", "burst", "--burst-size", "3").load
    assert isinstance(open_loop, OpenLoad)
    assert open_loop.phases[0].rate_per_s == 4
    assert open_loop.burst_requests == 3
    assert config("--concurrency", "8", "--requests", "50").load == ClosedLoad(8, 50)
    prefixed = config(*STEADY, "--shared-prefix-tokens", "64", "--prefix-groups", "4").workload
    assert prefixed[0].mixture.shared_prefix_tokens == 64
    assert prefixed[0].mixture.prefix_groups == 4
    assert config(*STEADY).workload[0].mixture.prefix_groups == 0


def test_presets_and_traces_become_a_config(tmp_path: Path) -> None:
    shrunk = config(
        "--preset", "agentic", "--duration", "60", "--rate-scale", "0.5", "--length-scale", "0.25"
    )
    load = shrunk.load
    assert isinstance(load, OpenLoad)
    assert (load.phases[0].rate_per_s, load.phases[0].duration_s) == (0.2, 60)
    assert shrunk.workload[0].mixture.shared_prefix_tokens == 1024
    assert shrunk.workload[0].mixture.sessions == Sessions(
        turns=Uniform(4, 16), tool=LogNormal(200, 1.2, 4, 1024), think_s=2.0
    )
    assert shrunk.ignore_eos  # answers as long as planned, so that runs are alike
    assert not config("--preset", "agentic", "--no-ignore-eos").ignore_eos
    paused = config("--preset", "agentic", "--think-time", "500ms").workload[0].mixture.sessions
    assert paused is not None
    assert paused.think_s == 0.5
    assert not config(*STEADY).ignore_eos
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{second:02}.0,10,20\n" for second in range(40))
    )
    traced = config(
        "--trace", str(path), "--trace-start", "10", "--duration", "5", "--rate-scale", "4",
        "--tiers", "batch",
    )  # fmt: skip
    assert isinstance(traced.load, TraceLoad)
    assert len(traced.load.trace.rows) == 20  # 5 s at four times the speed
    assert traced.load.phases[0].rate_per_s == 4
    assert traced.workload[0].mixture.tiers == (("batch", 1.0),)


def test_limits_by_tier_keep_the_defaults_of_tiers_not_named() -> None:
    slos = config(*STEADY, "--slo", "interactive:1s/none,vip:100ms/10ms").slos
    assert slos.of("interactive") == Slo(1000, None)
    assert slos.of("vip") == Slo(100, 10)
    assert slos.of("standard") == slos.of(None) == slos.of("unheard-of") == Slo(2000, 100)
    assert slos.of("batch") == Slo(None, None)
    for_all = config(*STEADY, "--slo-ttft-ms", "70").slos
    assert for_all.of("batch") == for_all.of(None) == Slo(70, None)
    assert config(*STEADY, "--slo", "*:1s/1s").slos.of("batch") == Slo(1000, 1000)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://host/base/v1/", "https://host/base"),
    ],
)
def test_a_base_url_is_accepted_with_or_without_v1(text: str, url: str) -> None:
    assert parse_url(text) == url


@pytest.mark.parametrize("text", ["", "http://", "ftp://host", "http://host:99999", "http://h?x=1"])
def test_other_urls_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_url(text)


def test_an_impossible_number_of_open_files_is_refused() -> None:
    with pytest.raises(UsageError, match="lower --max-in-flight"):
        allow_open_files(10**9)
