"""Rules and dashboards as files; tests/integration/test_metrics.py asks a real cell for them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.harness.cells.dashboards import (
    DASHBOARDS,
    ROOT,
    RULES,
    filled,
    names_in,
    parts_of,
    rules,
    selectors_in,
    variables,
)
from tests.harness.cells.prometheus import TARGET_LABELS, needs_prometheus

CHOSEN = 'namespace=~"$namespace",instance=~"$cell"'
OF_GATEWAYS = (
    *("aileron_requests_", "aileron_rejections_", "aileron_request_duration_"),
    *("aileron_client_disconnects_", "aileron_tier_clamped_", "aileron_cell_moves_"),
    *("aileron_shared_storage_", "aileron_registry_"),
    *("vllm:generation_", "vllm:prompt_", "vllm:request_"),
)
"""What gateways tell one cell of their fleet: it says nothing of that cell."""
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


def test_panels_show_the_chosen_cells_and_keep_them_apart() -> None:
    for file in DASHBOARDS:
        chosen_instance = "G" if file.stem == "gateways" else "C"
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                values = {"namespace": "N", "cell": "C", "tier": "T", "gateway": "G"}
                text = filled(target["expr"], values)
                expression = promql_parser.parse(text)
                for selector in selectors_in(expression):
                    chosen = {each.name: each.value for each in selector.matchers.matchers}
                    assert (chosen["namespace"], chosen["instance"]) == ("N", chosen_instance), text
                if panel["type"] == "heatmap" or file.stem == "fleet":
                    continue
                names = names_in(expression)
                folds = [
                    each
                    for each in parts_of(expression)
                    if isinstance(each, promql_parser.AggregateExpr)
                    and "instance" not in (each.modifier.labels if each.modifier else ())
                ]
                are_of_gateways = any(name.startswith(OF_GATEWAYS) for name in names)
                assert bool(folds) == are_of_gateways, f"{panel['title']}: {text}"
                assert ("choose all cells" in panel["description"]) == are_of_gateways


def test_dashboards_have_the_same_variables() -> None:
    asked = {(name, selector, label) for _, name, selector, label in variables()}
    assert asked == {
        ("namespace", "aileron_serving", "namespace"),
        ("cell", 'aileron_serving{namespace=~"$namespace"}', "instance"),
        ("tier", f"aileron_queue_depth{{{CHOSEN}}}", "tier"),
        ("gateway", 'aileron_gateway_ready{namespace=~"$namespace"}', "instance"),
    }
    for file in DASHBOARDS:
        names = [name for board, name, *_ in variables() if board == file.stem]
        assert names[:2] == ["namespace", "gateway" if file.stem == "gateways" else "cell"]


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(CASES.read_text())["tests"]
    return found


def test_dashboards_show_what_is_too_much_and_the_goals() -> None:
    boards = {file.stem: json.loads(file.read_text()) for file in DASHBOARDS}
    for name, board in boards.items():
        bounded = [
            each for each in board["panels"] if "thresholds" in each["fieldConfig"]["defaults"]
        ]
        assert bounded or name == "switching"
    for panel in boards["tiers-and-slo"]["panels"]:
        if panel["title"].startswith(("Time to first token, p", "Time per output token of a")):
            goals = [each["expr"] for each in panel["targets"] if "slo_target" in each["expr"]]
            assert len(goals) == 1, panel["title"]


def test_dashboards_are_complete() -> None:
    boards = [json.loads(file.read_text()) for file in DASHBOARDS]
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert len({board["uid"] for board in boards}) == len(boards) == 6
    for board in boards:
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            assert panel["description"], f"{panel['title']} does not say what it shows"
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
