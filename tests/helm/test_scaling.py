"""What autoscalers ask for must be told by somebody."""

import promql_parser

from tests.helm.charts import NAMESPACE, ROOT, Release

NAMES = {
    "aileron_requests_total": "rate",
    "aileron_requests_per_second": "rate",
    "aileron_best_layout_use_ratio": "use",
}


def test_scaling_asks_for_metrics_that_there_are(release: Release) -> None:
    exposition = (ROOT / "docs" / "metrics.md").read_text()
    assert "| `aileron_queue_depth` | tier |" in exposition
    assert "| `aileron_requests_total` |" in exposition
    assert "| `aileron_best_layout_use_ratio` |" in exposition
    scaling = release.values["cell"]["autoscaling"]
    rate = float(scaling["requestsPerSecond"])
    use = float(scaling["bestLayoutUse"])
    wanted = {**scaling["queueDepth"], **({"rate": rate} if rate else {})}
    wanted |= {"use": use} if use else {}
    for scaled in release.of_kind("ScaledObject"):
        asked = {}
        for trigger in scaled["spec"]["triggers"]:
            series = series_of(promql_parser.parse(trigger["metadata"]["query"]))
            labels = {each.name: each.value for each in series.matchers.matchers}
            assert labels["service"] == release.one("Service", "-cells")["metadata"]["name"]
            assert labels["namespace"] == NAMESPACE
            assert ("tier" in labels) == (series.name == "aileron_queue_depth")
            what = labels.get("tier") or NAMES[str(series.name)]
            asked[what] = float(trigger["metadata"]["threshold"])
        assert asked == wanted
    for scaler in release.of_kind("HorizontalPodAutoscaler"):
        if scaler["spec"]["scaleTargetRef"]["kind"] == "StatefulSet":
            pods = [each["pods"] for each in scaler["spec"]["metrics"]]
            names = {"aileron_queue_depth"} | ({"aileron_requests_per_second"} if rate else set())
            names |= {"aileron_best_layout_use_ratio"} if use else set()
            assert {each["metric"]["name"] for each in pods} == names
            rules = (ROOT / "docs" / "kubernetes.md").read_text()
            assert "as: aileron_requests_per_second" in rules
            assert {
                each["metric"].get("selector", {}).get("matchLabels", {}).get("tier")
                or NAMES[each["metric"]["name"]]: float(each["target"]["averageValue"])
                for each in pods
            } == wanted


def series_of(found: promql_parser.Expr) -> promql_parser.VectorSelector:
    """The series that a sum, perhaps of rates, is over."""
    assert isinstance(found, promql_parser.AggregateExpr)
    inner = found.expr
    if isinstance(inner, promql_parser.Call):
        (matrix,) = inner.args
        assert isinstance(matrix, promql_parser.MatrixSelector)
        inner = matrix.vector_selector
    assert isinstance(inner, promql_parser.VectorSelector)
    return inner
