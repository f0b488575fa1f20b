"""Bad input: one sentence on stderr, status 2, and nothing sent or written."""

import json
import socket
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.config import ClosedLoad, OpenLoad, RunConfig, parse_run, parse_url
from loadgen.errors import UsageError
from loadgen.options import build_parser
from loadgen.runner import allow_open_files

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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is not a report"),
        ('{"schema": "other"}', "is not a report"),
        ('{"schema": "aileron.loadgen.report", "schema_version": 99}', "has report version 99"),
        ('{"schema": "aileron.loadgen.report", "schema_version": 1}', "is missing"),
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
    head = {"schema": "aileron.loadgen.report", "schema_version": 1, "duration_s": 1}
    hollow: dict[str, object] = {
        key: [] for key in ("server", "total", "tiers", "phases", "series")
    }
    report.write_text(json.dumps({**head, **hollow}))
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
    prefixed = config(*STEADY, "--shared-prefix-tokens", "64", "--prefix-groups", "4").mixture
    assert (prefixed.shared_prefix_tokens, prefixed.prefix_groups) == (64, 4)
    assert config(*STEADY).mixture.prefix_groups == 0


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
