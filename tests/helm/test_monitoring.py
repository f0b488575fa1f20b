"""Alerts and dashboards of a release: of its own series alone, so that two releases do not meet."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.harness.cells.dashboards import DASHBOARDS, filled, rules, selectors_in
from tests.harness.cells.prometheus import needs_prometheus
from tests.helm.charts import ROOT, Object, Release, ask_helm, example, merged, releases

UID_CHARS_MAX = 40
"""Grafana takes no longer ones."""
SELECTOR = re.compile(r'\{namespace="llm",release="chat",')


@pytest.fixture
def rendered_rules() -> list[Object]:
    """The rules of a release."""
    return rules_of(releases()["8xgpu"].objects)


def rules_of(objects: Any) -> list[Object]:
    """The rules among some objects."""
    (rule,) = [each for each in objects if each["kind"] == "PrometheusRule"]
    return [each for group in rule["spec"]["groups"] for each in group["rules"]]


def installed(values: Object, name: str) -> list[Object]:
    """The objects of a release of that name."""
    (answer,) = ask_helm(values, name=name)
    assert "error" not in answer, answer
    texts = [text for path, text in answer["rendered"].items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def test_every_rule_is_of_the_release_and_otherwise_the_repositorys(
    rendered_rules: list[Object],
) -> None:
    own = {rule.get("alert") or rule["record"]: rule for rule in rules()}
    assert len(own) == len(rendered_rules)
    for rule in rendered_rules:
        name = rule.get("alert") or rule["record"]
        selectors = selectors_in(promql_parser.parse(rule["expr"]))
        assert selectors
        for selector in selectors:
            chosen = {each.name: each.value for each in selector.matchers.matchers}
            assert (chosen["namespace"], chosen["release"]) == ("llm", "chat"), name
        plain = SELECTOR.sub("{", rule["expr"]).replace("{}", "")
        assert plain.split() == own[name]["expr"].split()
        assert rule.get("for") == own[name].get("for")


def test_every_alert_has_an_entry_in_the_runbook(rendered_rules: list[Object]) -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    headings = re.findall(r"^## (\w+)\n\n\*(\w+)\.\*", text, re.MULTILINE)
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert dict(headings) == {name: rule["labels"]["severity"] for name, rule in alerts.items()}
    assert len(headings) == len(alerts)
    values = {"metrics": {"prometheusRule": {"runbookUrl": "https://example.com/aileron/"}}}
    linked = rules_of(installed(merged(example("8xgpu"), values), "chat"))
    for rule in (*rendered_rules, *linked):
        if "alert" in rule:
            url = rule["annotations"]["runbook_url"]
            base = "https://example.com/aileron/" if rule in linked else ""
            assert url == f"{base}docs/runbook.md#{rule['alert'].lower()}"
            assert "threshold" not in rule["annotations"]


def test_a_threshold_stands_once_in_its_expression() -> None:
    for rule in rules():
        if threshold := rule.get("annotations", {}).get("threshold"):
            assert len(re.findall(rf"> {re.escape(threshold)}\b", rule["expr"])) == 1, rule["alert"]


def test_thresholds_goals_and_fields_are_values() -> None:
    values = {
        "cell": {"startupSeconds": 3600},
        "metrics": {
            "prometheusRule": {
                "objective": 0.995,
                "thresholds": {"AileronServerErrors": 0.02, "AileronSwitchesTooOften": 50},
                "alerts": {
                    "AileronKvFull": {"for": "1h", "labels": {"team": "llm"}},
                    "AileronBatchWaits": {"enabled": False},
                },
            }
        },
    }
    found = {
        rule["alert"]: rule
        for rule in rules_of(installed(merged(example("8xgpu"), values), "chat"))
        if "alert" in rule
    }
    assert found["AileronServerErrors"]["expr"].endswith("> 0.02")
    assert found["AileronSwitchesTooOften"]["expr"].endswith("> 50")
    assert found["AileronNotStarted"]["expr"].strip().endswith("> 4200")
    assert found["AileronObjectiveBurnsFast"]["expr"].count("14.4 * 0.005") == 2
    assert found["AileronKvFull"]["for"] == "1h"
    assert found["AileronKvFull"]["labels"] == {"severity": "ticket", "team": "llm"}
    assert "AileronBatchWaits" not in found
    assert found["AileronRankSilent"]["expr"] == next(
        rule["expr"]
        for rule in rules_of(releases()["8xgpu"].objects)
        if rule.get("alert") == "AileronRankSilent"
    )


def test_an_alert_that_there_is_not_is_refused() -> None:
    values = {"metrics": {"prometheusRule": {"thresholds": {"AileronServerError": 0.02}}}}
    (answer,) = ask_helm(merged(example("8xgpu"), values))
    assert "AileronServerError" in answer["error"]


@needs_prometheus
def test_two_releases_in_one_prometheus_fire_apart(tmp_path: Path) -> None:
    """One of them is broken; both have recording rules of the same names."""
    for name in ("chat", "other"):
        found = rules_of(installed(example("8xgpu"), name))
        for rule in found:
            rule["annotations"] = {k: v for k, v in rule.get("annotations", {}).items() if v}
        groups = {"groups": [{"name": name, "rules": found}]}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(groups))
    series = []
    for name, errors in (("chat", 0), ("other", 20)):
        # Cells may even have the same pods' names, in namespaces or clusters of the same names.
        labels = f'job="cells",instance="cell-0",namespace="llm",release="{name}"'
        series += [
            {"series": f'aileron_requests_total{{{labels},code="200"}}', "values": "0+60x60"},
            {
                "series": f'aileron_requests_total{{{labels},code="500"}}',
                "values": f"0+{errors}x60",
            },
        ]
    samples = [
        {"value": 0, "labels": ratio("chat")},
        {"value": 0.25, "labels": ratio("other")},
    ]
    case = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": 'count by (release) (ALERTS{alertstate="firing"})',
                "eval_time": "30m",
                "exp_samples": [{"value": 1, "labels": '{release="other"}'}],
            },
            {"expr": "aileron:errors:ratio_5m", "eval_time": "30m", "exp_samples": samples},
        ],
    }
    file = tmp_path / "test.yaml"
    names = ["chat.yaml", "other.yaml"]
    file.write_text(
        yaml.safe_dump({"rule_files": names, "evaluation_interval": "1m", "tests": [case]})
    )
    for command in (
        ["check", "rules", *(str(tmp_path / n) for n in names)],
        ["test", "rules", str(file)],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def ratio(release: str) -> str:
    """The labels of the share of errors of a release."""
    return f'aileron:errors:ratio_5m{{job="cells",namespace="llm",release="{release}"}}'


def dashboards_of(objects: Any) -> Iterator[tuple[str, str, Object]]:
    """The object, file and content of each dashboard."""
    for each in objects:
        if each["kind"] == "ConfigMap" and "-dashboard-" in each["metadata"]["name"]:
            for file, text in each["data"].items():
                yield each["metadata"]["name"], file, json.loads(text)


def test_two_releases_in_one_grafana_have_dashboards_of_their_own() -> None:
    chat = list(dashboards_of(releases()["8xgpu"].objects))
    other = list(dashboards_of(installed(example("8xgpu"), "other")))
    assert len(chat) == len(other) == len(DASHBOARDS)
    for first, second in zip(chat, other, strict=True):
        assert first[1] != second[1]
        assert first[2]["title"] != second[2]["title"]
    uids = [board["uid"] for _, _, board in (*chat, *other)]
    assert len(set(uids)) == len(uids)
    assert max(map(len, uids)) <= UID_CHARS_MAX
    for _, _, board in chat:
        queries = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
        queries += [each["expr"] for each in board["annotations"]["list"]]
        for query in queries:
            text = filled(query, {"namespace": "N", "cell": "C", "tier": "T", "gateway": "G"})
            for selector in selectors_in(promql_parser.parse(text)):
                chosen = {each.name: each.value for each in selector.matchers.matchers}
                assert chosen["release"] == "chat", query
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                assert 'release="chat"' in variable["query"]["query"]


def test_what_is_scraped_has_names_that_stay_and_the_release(release: Release) -> None:
    for monitor in release.of_kind("ServiceMonitor", "PodMonitor"):
        key = "endpoints" if monitor["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
        instances = []
        for endpoint in monitor["spec"][key]:
            of = {each["targetLabel"]: each for each in endpoint["relabelings"]}
            assert of["release"]["replacement"] == "chat"
            assert of["instance"]["sourceLabels"] == ["__meta_kubernetes_pod_name"]
            instances.append(of["instance"]["replacement"])
        assert len(set(instances)) == len(instances)


def test_prometheus_scrapes_every_process_of_a_gateway(release: Release) -> None:
    processes = release.values["config"].get("gateway", {}).get("processes", 1)
    workload = "-cell" if release.together else "-gateway"
    for monitor in release.of_kind("PodMonitor"):
        wanted = [f"metrics-{number}" for number in range(processes)]
        assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == wanted
        (pod,) = [
            pod
            for name, pod in release.pods()
            if monitor["spec"]["selector"]["matchLabels"].items()
            <= pod["metadata"]["labels"].items()
        ]
        (gateway,) = [each for each in pod["spec"]["containers"] if each["name"] == "gateway"]
        ports = {each["name"]: each["containerPort"] for each in gateway["ports"]}
        assert [ports[name] for name in wanted] == list(range(8004, 8004 + processes))
        policy = release.one("NetworkPolicy", workload)["spec"]
        (rule,) = [r for r in policy["ingress"] if r.get("ports", [{}])[0].get("port") == 8004]
        assert rule["from"] == release.values["networkPolicy"]["monitoring"]
        assert rule["ports"][0].get("endPort", 8004) == 8003 + processes
