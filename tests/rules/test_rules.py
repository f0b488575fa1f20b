"""Rules and dashboards as files; tests/integration/test_metrics.py asks a real cell for them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.dashboards import DASHBOARDS, ROOT, RULES, rules
from tests.harness.prometheus import TARGET_LABELS, needs_prometheus

CASES = Path(__file__).parent / "alerts_test.yaml"


@needs_prometheus
@pytest.mark.parametrize(
    "command",
    [["check", "rules", *map(str, RULES)], ["test", "rules", str(CASES)]],
    ids=["check", "test"],
)
def test_rules_hold(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire_and_to_stay_quiet() -> None:
    fires: set[str] = set()
    quiet: set[str] = set()
    for case in cases():
        for each in case.get("alert_rule_test", ()):
            (fires if each.get("exp_alerts") else quiet).add(each["alertname"])
        for each in case.get("promql_expr_test", ()):
            if each["exp_samples"]:
                fires |= set(re.findall(r'alertname="(\w+)",alertstate="firing"', each["expr"]))
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert len(alerts) >= 13
    assert alerts == fires
    assert alerts == quiet


def test_cases_have_the_labels_of_what_is_scraped() -> None:
    wanted = {"job", "instance", *TARGET_LABELS}
    for case in cases():
        for each in case["input_series"]:
            labels = set(re.findall(r"(\w+)=", each["series"]))
            assert wanted <= labels, f"{case['name']}: {each['series']}"


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(CASES.read_text())["tests"]
    return found


def test_dashboards_are_complete() -> None:
    boards = [json.loads(file.read_text()) for file in DASHBOARDS]
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert len({board["uid"] for board in boards}) == len(boards) == 4
    for board in boards:
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            taken = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not taken & cells, f"{panel['title']} lies upon another panel"
            assert at["x"] + at["w"] <= 24
            cells |= taken
            for target in panel["targets"]:
                row = f"| {panel['title']} | `{target['expr']}` |"
                assert row in documented, "docs/metrics.md lists every query"
