"""What Grafana and Prometheus ask a cell: the queries of dashboards, rules and docs/metrics.md."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).resolve().parents[3]
DASHBOARDS = sorted((ROOT / "helm" / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "helm" / "rules").glob("*.yaml"))

ANY: Mapping[str, str] = {"namespace": ".*", "cell": ".*", "tier": ".*", "gateway": ".*"}
"""Values of the dashboards' variables that select everything."""


def queries(values: Mapping[str, str] = ANY) -> list[tuple[str, str]]:
    """All (panel, expression) pairs of the dashboards, with their variables filled in."""
    found = []
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                found.append((f"{file.stem}: {panel['title']}", target["expr"]))
        for each in board["annotations"]["list"]:
            found.append((f"{file.stem}: {each['name']}", each["expr"]))
    return [(panel, filled(text, values)) for panel, text in found]


def filled(text: str, values: Mapping[str, str]) -> str:
    """An expression with the values of variables, as Grafana writes them."""
    for name, value in {"__rate_interval": "20s", **values}.items():
        text = re.sub(rf"\${name}\b", value.replace("\\", r"\\"), text)
    assert "$" not in text, f"a variable is not known: {text}"
    return text


def variables() -> Iterator[tuple[str, str, str, str]]:
    """(dashboard, variable, selector, label) of each variable that is asked for in Prometheus."""
    for file in DASHBOARDS:
        for each in json.loads(file.read_text())["templating"]["list"]:
            if each["type"] == "query":
                asked = re.fullmatch(r"label_values\((.+), (\w+)\)", each["query"]["query"])
                assert asked is not None, each["query"]
                yield file.stem, each["name"], asked[1], asked[2]


def common_queries() -> list[tuple[str, str]]:
    """(question, expression) pairs of the common questions in docs/metrics.md."""
    rows = (ROOT / "docs" / "metrics.md").read_text().partition("| question | query |")[2]
    return re.findall(r"^\| (.+?) \| `(.+)` \|$", rows.partition("\n\n")[0], re.MULTILINE)


def rules() -> list[dict[str, Any]]:
    """All recording rules and alerts."""
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def parts_of(node: Any) -> Iterator[Any]:
    """A parsed expression and all that it is made of."""
    yield node
    inner: list[Any]
    match node:
        case promql_parser.MatrixSelector():
            inner = [node.vector_selector]
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            inner = [node.expr]
        case promql_parser.BinaryExpr():
            inner = [node.lhs, node.rhs]
        case promql_parser.Call():
            inner = list(node.args)
        case promql_parser.VectorSelector() | promql_parser.NumberLiteral():
            inner = []
        case _:
            raise AssertionError(f"{type(node).__name__} is not looked into.")
    for each in inner:
        yield from parts_of(each)


def selectors_in(node: Any) -> list[Any]:
    """What a parsed expression selects."""
    return [each for each in parts_of(node) if isinstance(each, promql_parser.VectorSelector)]


def names_in(node: Any) -> set[str]:
    """Names of all metrics in a parsed expression."""
    return {str(each.name) for each in selectors_in(node)}
