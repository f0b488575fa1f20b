"""What Grafana and Prometheus ask a cell: the queries of dashboards and rules, and their names."""

import json
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "helm" / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "helm" / "rules").glob("*.yaml"))


def queries() -> list[tuple[str, str]]:
    """All (panel, expression) pairs of the dashboards, with their variables filled in."""
    found = []
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                found.append((f"{file.stem}: {panel['title']}", target["expr"]))
        for each in board["annotations"]["list"]:
            found.append((f"{file.stem}: {each['name']}", each["expr"]))
    return [
        (panel, text.replace("$__rate_interval", "20s").replace("$tier", ".*"))
        for panel, text in found
    ]


def rules() -> list[dict[str, Any]]:
    """All recording rules and alerts."""
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def names_in(node: Any) -> set[str]:
    """Names of all metrics in a parsed expression."""
    match node:
        case promql_parser.VectorSelector():
            return {str(node.name)}
        case promql_parser.MatrixSelector():
            return names_in(node.vector_selector)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            return names_in(node.expr)
        case promql_parser.BinaryExpr():
            return names_in(node.lhs) | names_in(node.rhs)
        case promql_parser.Call():
            return {name for each in node.args for name in names_in(each)}
        case promql_parser.NumberLiteral():
            return set()
    raise AssertionError(f"{type(node).__name__} is not looked into.")
