"""Several runs in one table, one document and one picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.client.overhead import Overhead, overhead_as_json
from loadgen.report.records import Answer, RequestRecord
from loadgen.report.report import SCHEMA, SCHEMA_VERSION, Finished, build_report
from loadgen.report.sidebyside import COLUMNS, Section, best_of, peak_tokens_per_s, side_by_side
from loadgen.report.slo import parse_slos
from loadgen.report.tables import side_by_side_markdown
from loadgen.workload.arrivals import Phase
from loadgen.workload.plan import PlannedRequest

PHASES = (Phase("low", 5, 2.0), Phase("high", 10, 2.0))
SWITCH = {"at_s": 1.5, "epoch": 2, "from": "dp2", "to": "tp2", "cause": "policy"}


def report(
    *,
    slower: float = 1.0,
    phases: tuple[Phase, ...] = PHASES,
    switches: list[dict[str, object]] | None = None,
    digest: str = "same",
    behind: float = 0.1,
) -> dict[str, Any]:
    """Thirty requests of two tiers in two phases, `slower` times the base latencies."""
    records = []
    for index in range(30):
        at_s = 0.2 * index if index < 10 else 2.0 + 0.1 * (index - 10)
        planned = PlannedRequest(
            index,
            f"r{index}",
            at_s,
            0 if index < 10 else 1,
            ("interactive", "batch")[index % 2],
            5,
            3,
            None,
            0,
        )
        times_s = tuple(at_s + slower * step for step in (0.3, 0.325, 0.35))
        answer = Answer(times_s, times_s[-1], "stop", saw_done=True)
        records.append(RequestRecord(planned, at_s, times_s[-1], None, answer, None))
    run = Finished(tuple(records), phases, 30, 6.0, interrupted=False)
    watched = {"poll_s": 0.25, "layout_at_start": "dp2", "missed_polls": 0, "events": switches}
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "server": {"model": "m$x", "url": "http://here"},
        "plan": {"digest": digest},
        "generator": overhead_as_json(records, Overhead(behind, [])),
        "switches": None if switches is None else watched,
        **build_report(run, parse_slos(""), keep_records=False),
    }


def value(section: Section, run: int, key: str) -> float | None:
    return section.lines[run].values[[column.key for column in COLUMNS].index(key)]


def test_slices_of_all_runs_stand_side_by_side() -> None:
    sections = side_by_side([report(), report(slower=2), report()], ("a", "b", "c"))
    assert [section.name for section in sections] == [
        "total",
        "tier batch",
        "tier interactive",
        "phase low",
        "phase low, tier batch",
        "phase low, tier interactive",
        "phase high",
        "phase high, tier batch",
        "phase high, tier interactive",
    ]
    total = sections[0]
    assert [line.run for line in total.lines] == ["a", "b", "c"]
    assert value(total, 0, "ttft_p90_ms") == pytest.approx(300)
    assert value(total, 1, "ttft_p90_ms") == pytest.approx(600)
    assert value(total, 1, "tpot_p99_ms") == pytest.approx(50)
    # Twice as slow breaks interactive's 500 ms, and nothing can break batch.
    assert value(sections[2], 0, "good_share") == 1
    assert value(sections[2], 1, "good_share") == 0
    assert value(sections[1], 1, "good_share") == 1
    best = best_of(total)
    headings = [column.key for column in COLUMNS]
    assert best[headings.index("ttft_p90_ms")] == pytest.approx(300)
    assert best[headings.index("scheduled")] is None  # more requests are not better
    assert best[headings.index("failed")] is None  # all alike


def test_a_run_without_a_phase_has_dashes_there() -> None:
    other = report(phases=(Phase("low", 5, 2.0), Phase("peak", 10, 2.0)))
    sections = {each.name: each for each in side_by_side([report(), other], ("a", "b"))}
    assert value(sections["phase high"], 1, "ttft_p50_ms") is None
    assert value(sections["phase peak"], 0, "ttft_p50_ms") is None
    assert "| b | - |" in side_by_side_markdown([sections["phase high"]], [])


def test_peak_throughput_is_the_best_five_seconds() -> None:
    tokens = [1, 1, 10, 10, 10, 10, 10, 1]
    found: dict[str, Any] = {"series": {"interval_s": 1.0, "t_s": list(range(8)), "tokens": tokens}}
    assert peak_tokens_per_s(found, 0.0, 8.0) == 10
    assert peak_tokens_per_s(found, 0.0, 3.0) == 4  # a shorter slice has a shorter window
    assert peak_tokens_per_s(found, 0.5, 0.9) is None


def files(tmp_path: Path, **reports: dict[str, Any]) -> list[str]:
    paths = []
    for name, content in reports.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        paths.append(str(path))
    return paths


def test_three_runs_give_tables_and_a_picture_with_switches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    paths = files(
        tmp_path,
        dp2=report(),
        tp2=report(slower=2, digest="other", behind=0.99),
        adaptive=report(switches=[SWITCH]),
    )
    table, text, picture = (tmp_path / name for name in ("t.json", "t.md", "t.svg"))
    outputs = ["--json", str(table), "--markdown", str(text), "--plot", str(picture)]
    limits = ["--fail-if", "ttft_p90_ms>1.05", "--fail-if", "b.failed>0"]
    assert main(["compare", *paths, *outputs, *limits]) == 1
    said = capsys.readouterr().out
    assert "broken by tp2: ttft_p90_ms>1.05: it is 2" in said
    assert "broken by adaptive" not in said
    assert "adaptive: dp2 at the start, tp2 at 1.5 s." in said
    assert "tp2 was not sent the same requests as dp2." in said
    assert "tp2: The client used 99% of its one core" in said
    found = json.loads(table.read_text())
    assert [each["names"] for each in found["comparisons"]] == [["dp2", "tp2"], ["dp2", "adaptive"]]
    row = next(r for r in found["side_by_side"] if r["slice"] == "phase high" and r["run"] == "tp2")
    assert row["ttft_p50_ms"] == pytest.approx(600)
    assert "| **300** |" in text.read_text()
    assert "- adaptive: dp2" in text.read_text()
    drawn = picture.read_text()
    assert drawn.count("stroke-dasharray: 4") >= 5  # the switch, once in each panel
    files(tmp_path, adaptive=report(switches=[]))
    assert main(["compare", *paths, *outputs]) == 0
    assert "stroke-dasharray: 4" not in picture.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "at least two reports"),
        (["b", "--names", "x"], "--names needs 2 names for 2 reports"),
        (["b"] * 8, "9 reports are more than the limit of 8"),
        (["b", "--plot", "x.txt"], "must end in one of"),
        (["b", "--markdown", "/no/such/folder/x.md"], "there is no folder"),
    ],
)
def test_bad_comparisons_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "a", *options]) == 2
    assert said in capsys.readouterr().err
