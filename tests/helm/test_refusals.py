"""What the chart refuses to render, because the processes or the cluster would refuse it later."""

import itertools
from typing import Any

import pytest
import yaml

from coordinator.protocol.config import ConfigError, check_config
from coordinator.protocol.engine_options import NOT_OFFERED
from tests.helm.charts import Object, ask_helm, documents, example, merged
from tests.helm.values_schema import refused_options

EGRESS = [{"to": [{"namespaceSelector": {}}], "ports": [{"port": 4318}]}]

REFUSED: dict[str, tuple[str, Object, str]] = {
    "no model": ("kind", {"config": {"model": {"path": ""}}}, "config.model.path"),
    "no keys": ("kind", {"config": {"gateway": {"insecure_no_auth": False}}}, "auth.apiKeys"),
    "keys counted apart": (
        "8xgpu",
        {"redis": {"enabled": False}, "batches": {"enabled": False}},
        "redis.enabled: true, redis.external.existingSecret, or config.gateway.rate_limit_storage",
    ),
    "batches apart": (
        "kind",
        {"redis": {"enabled": False}},
        "config.batches.storage",
    ),
    "cells that nobody finds": (
        "kind",
        {
            "cell": {"autoscaling": {"type": "hpa"}},
            "redis": {"enabled": False},
            "batches": {"enabled": False},
        },
        "config.fleet.redis",
    ),
    "a fleet of gateways that know one cell": (
        "many-cells",
        {"gateway": {"placement": "cell"}, "config": {"fleet": {"redis": "redis://here:6380"}}},
        "config.fleet",
    ),
    "gateways scaled twice": (
        "many-cells",
        {"gateway": {"placement": "cell", "autoscaling": {"enabled": True}}},
        "cell.autoscaling",
    ),
    "cells scaled by series that nobody collects": (
        "many-cells",
        {"metrics": {"serviceMonitor": {"enabled": False}}},
        "metrics.serviceMonitor.enabled",
    ),
    "a memory limit that Redis cannot read": (
        "kind",
        {"redis": {"enabled": True, "resources": {"limits": {"memory": "1000m"}}}},
        "resources.limits.memory",
    ),
    "more gateways than a cell takes": ("kind", {"gateway": {"replicas": 257}}, "256 gateways"),
    "secrets that nobody makes": (
        "kind",
        {"secrets": {"generate": False}},
        "auth.existingSecret",
    ),
    "a password that nobody makes": (
        "kind",
        {"secrets": {"generate": False}, "auth": {"existingSecret": "auth"}},
        "redis.existingSecret",
    ),
    "two Redis": (
        "kind",
        {"redis": {"external": {"existingSecret": "redis"}}},
        "exclude each other",
    ),
    "a layout of other ranks": (
        "8xgpu",
        {"config": {"cell": {"layout": "dp2"}}},
        "config.cell.layout dp2 has 2 ranks, but config.cell.ranks is 8",
    ),
    "stages of several ranks on GPUs": (
        "8xgpu",
        {"config": {"cell": {"layout": "pp2tp2+dp4"}}},
        "config.cell.layout pp2tp2+dp4 has stages of several ranks, which only CPU ranks run yet",
    ),
    "a layout of widths that there are not": (
        "8xgpu",
        {"config": {"cell": {"widths": [1, 2], "layout": "tp4+dp4"}}},
        "add 4 to config.cell.widths",
    ),
    "widths above the ranks": (
        "kind",
        {"config": {"cell": {"widths": [1, 2, 4]}}},
        "config.cell.widths has 4, but config.cell.ranks is 2",
    ),
    "an id without the network": (
        "8xgpu",
        {"config": {"model": {"path": "acme/model"}}},
        "models.download.enabled: true, huggingFace.offline: false",
    ),
    "a folder that is not mounted": (
        "8xgpu",
        {"models": {"volume": {"persistentVolumeClaim": None}}},
        "set models.volume",
    ),
    "a download of a folder": (
        "8xgpu",
        {"models": {"download": {"enabled": True}}},
        "models.download needs a Hugging Face id",
    ),
    "a download and a volume": (
        "8xgpu",
        {"config": {"model": {"path": "a/b"}}, "models": {"download": {"enabled": True}}},
        "exclude each other",
    ),
    "GPU ranks in the memory of CPU ranks": (
        "8xgpu",
        {"cell": {"ranks": {"resources": {"limits": {"memory": "8Gi"}}}}},
        "at least 8Gi of host memory, so 64Gi",
    ),
    "GPU ranks in little shared memory": (
        "8xgpu",
        {"cell": {"shmSize": "1Gi"}},
        "at least 1Gi for each rank, so 8Gi",
    ),
    "more shared memory than memory": (
        "kind",
        {"cell": {"shmSize": "16Gi"}},
        "cell.ranks.resources.limits.memory",
    ),
    "gateways on nodes that share no volume": (
        "kind",
        {"batches": {"sameNode": False}},
        "batches.sameNode: true",
    ),
    "gateways and a volume of one pod": (
        "kind",
        {"batches": {"accessModes": ["ReadWriteOncePod"]}},
        "ReadWriteOncePod is for one pod",
    ),
    "traces that the policies cut off": (
        "kind",
        {"config": {"tracing": {"endpoint": "http://otel.monitoring.svc:4318"}}},
        "port 4318 to networkPolicy.extraEgress",
    ),
    "traces beside the port that is open": (
        "kind",
        {
            "config": {"tracing": {"endpoint": "https://otel.example.com"}},
            "networkPolicy": {"extraEgress": EGRESS},
        },
        "port 443 to networkPolicy.extraEgress",
    ),
    "a Redis that the policies cut off": (
        "many-cells",
        {"networkPolicy": {"extraEgress": []}},
        "redis.external",
    ),
    "a Redis in the configuration that the policies cut off": (
        "kind",
        {"config": {"gateway": {"rate_limit_storage": "redis://here"}}},
        "config.gateway.rate_limit_storage: add a rule with port 6379",
    ),
    "a route of no Gateway": (
        "kind",
        {"httpRoute": {"enabled": True}},
        "httpRoute.parentRefs is empty",
    ),
    "fewer gateways at most than at least": (
        "8xgpu",
        {"gateway": {"autoscaling": {"minReplicas": 13}}},
        "minReplicas is above maxReplicas",
    ),
    "fewer cells at most than at least": (
        "many-cells",
        {"cell": {"autoscaling": {"minCells": 33}}},
        "minCells is above maxCells",
    ),
}
"""What is wrong -> the example that it starts from, what is laid over it, part of the advice."""

TAKEN: dict[str, tuple[str, Object]] = {
    "traces with a rule": (
        "kind",
        {
            "config": {"tracing": {"endpoint": "http://otel.monitoring.svc:4318"}},
            "networkPolicy": {"extraEgress": EGRESS},
        },
    ),
    "traces through a range of ports": (
        "kind",
        {
            "config": {"tracing": {"endpoint": "http://otel.monitoring.svc:4318"}},
            "networkPolicy": {"extraEgress": [{"ports": [{"port": 4000, "endPort": 5000}]}]},
        },
    ),
    "traces without policies": (
        "kind",
        {
            "config": {"tracing": {"endpoint": "http://otel.monitoring.svc:4318"}},
            "networkPolicy": {"enabled": False},
        },
    ),
    "a URL from the environment": (
        "kind",
        {"config": {"gateway": {"rate_limit_storage": "${OTHER_URL}/3"}}},
    ),
    "several gateways with a URL from the environment": (
        "8xgpu",
        {
            "redis": {"enabled": False},
            "config": {
                "gateway": {"rate_limit_storage": "${OTHER_URL}/3"},
                "batches": {"storage": "${OTHER_URL}/4"},
            },
        },
    ),
    "a folder on a volume of the user's own": (
        "8xgpu",
        {
            "models": {"volume": {"persistentVolumeClaim": None}},
            "cell": {"ranks": {"extraVolumeMounts": [{"name": "own", "mountPath": "/models"}]}},
            "gateway": {"extraVolumeMounts": [{"name": "own", "mountPath": "/models"}]},
        },
    ),
    "one gateway and a volume of one node": (
        "kind",
        {"batches": {"sameNode": False}, "gateway": {"replicas": 1}},
    ),
    "a volume that the user has made": (
        "kind",
        {"batches": {"sameNode": False, "existingClaim": "files"}},
    ),
    "GPUs by their number alone": (
        "8xgpu",
        {
            "config": {"cell": {"ranks": 4, "widths": None, "layout": None}},
            "cell": {"ranks": {"resources": None}},
        },
    ),
}
"""Near to what is refused, and right."""


def test_what_cannot_work_is_refused_with_what_to_change() -> None:
    cases = [merged(example(base), over) for base, over, _ in REFUSED.values()]
    for (name, (_, _, advice)), answer in zip(REFUSED.items(), ask_helm(*cases), strict=True):
        assert advice in answer.get("error", "rendered"), name


def test_what_is_near_to_it_is_taken() -> None:
    cases = [merged(example(base), over) for base, over in TAKEN.values()]
    for name, answer in zip(TAKEN, ask_helm(*cases), strict=True):
        assert "error" not in answer, f"{name}: {answer['error']}"


GROUPS: list[Object] = [
    {"ranks": ranks}
    | ({"layout": layout} if layout else {})
    | ({"widths": widths} if widths else {})
    for ranks, layout, widths in itertools.product(
        (1, 2, 4, 6),
        (
            *("", "dp2", "tp2", "dp4", "tp2+dp2", "sp4", "shift2tp2", "tp2+off1+dp1"),
            *("tp2+tp2+tp2", "pp2tp2", "dp2+pp2"),
        ),
        ((), (1, 2), (1, 2, 4)),
    )
] + [
    {"ranks": 8, "weight_parts": 8},
    {"ranks": 8, "weight_parts": 2, "mixed": ["sp4tp2"]},
    {"ranks": 4, "weight_parts": 2, "widths": [1, 2]},
    {"ranks": 4, "weight_parts": 2, "layout": "pp4"},
]


def test_chart_and_product_agree_on_ranks_layout_and_widths() -> None:
    """What renders is taken by every process, and what they refuse does not render."""
    values = [merged(example("kind"), {"config": {"cell": without_example(c)}}) for c in GROUPS]
    disagree = []
    for cell, answer in zip(GROUPS, ask_helm(*values), strict=True):
        if "error" in answer:
            assert "config.cell" in answer["error"], answer["error"]
            if is_taken(cell) and not is_width_above_ranks(cell):
                disagree.append(cell)
        else:
            assert {"widths", "layout"} <= set(answer_cell(answer))
            if not is_taken(answer_cell(answer)):
                disagree.append(cell)
    assert not disagree


def without_example(cell: Object) -> Object:
    """These groups in place of the example's."""
    return {"widths": None, "layout": None, **cell}


def answer_cell(answer: Object) -> Object:
    """The section `cell` of the rendered configuration."""
    text = next(text for path, text in answer["rendered"].items() if path.endswith("/config.yaml"))
    (secret,) = [
        each
        for each in documents(text)
        if each["kind"] == "Secret" and each["metadata"]["name"].endswith("-config")
    ]
    cell: Object = yaml.safe_load(secret["stringData"]["ranks.yaml"])["cell"]
    return cell


def is_taken(cell: Object) -> bool:
    """Whether the product takes these groups, completed as `aileron up` does."""
    config: dict[str, Any] = {"model": {"path": "x"}, "cell": cell}
    if "widths" not in cell:
        cell = {**cell, "widths": [each for each in (1, 2, 4, 8) if cell["ranks"] % each == 0]}
    if "layout" not in cell:
        cell = {**cell, "layout": f"dp{cell['ranks']}"}
    config["cell"] = cell
    try:
        check_config(config)
    except ConfigError:
        return False
    return True


def is_width_above_ranks(cell: Object) -> bool:
    """The product prepares nothing for such a width; the chart calls it a mistake."""
    return bool(max(cell.get("widths", (1,))) > cell["ranks"])


@pytest.mark.parametrize("option", ["--enable-lora", *NOT_OFFERED])
def test_schema_names_the_options_that_processes_refuse(option: str) -> None:
    assert option in refused_options()
