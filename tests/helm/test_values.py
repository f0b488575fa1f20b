"""What values.schema.json takes and refuses, and combinations that the chart itself refuses."""

import json
from typing import Any

import jsonschema
import pytest

from coordinator.protocol.config import Config
from tests.helm.chart_values import ChartValues
from tests.helm.charts import VARIATIONS, ask_helm, default_values, example, merged, variation
from tests.helm.values_reference import README, readme_text
from tests.helm.values_schema import CHART_DECIDES, SCHEMA, schema_text, values_schema

MISTAKES: dict[str, Any] = {
    "replica": 2,
    "cells": 0,
    "image.tag": "latest",
    "image.pullPolicy": "Sometimes",
    "gateway.placement": "pod",
    "gateway.replicas": "two",
    "gateway.resources.limits.cpu": "many",
    "gateway.autoscaling.cpuPercent": 0,
    "cell.shmSize": "1 GB",
    "cell.autoscaling.type": "vpa",
    "cell.autoscaling.queueDepth.urgent": 3,
    "auth.apiKeys.keys": [{"hash": "sk-aileron-the-key-itself", "tenant": "acme"}],
    "redis.image": "redis",
    "batches.accessModes": ["ReadWriteSometimes"],
    "service.port": 70_000,
    "metrics.serviceMonitor.interval": "often",
    "gateway.probes.liveness": {"failureTreshold": 3},
    "gateway.image.tag": "latest",
    "cell.gpuResource": "gpu",
    "cell.claimRetention.whenScaled": "Keep",
    "models.download.storage": "pod",
    "models.mountPath": "/models/",
    "serviceAccountName": "reader",
    "auth.tokenKey": "",
    "config.model.engine_args": ["--tensor-parallel-size=2"],
    "config.model.other_names": "one",
    "networkPolicy.clients": {},
    "config.model.name": "qwen",
    "config.cell.rank": 8,
    "config.cell.ranks": 65,
    "config.cell.device": "tpu",
    "config.coordinator.tiers.interactive": {"queue_tasks_max": 0},
    "config.policy.name": "clever",
    "config.slo.standard.ttft_ms": 0,
    "config.gateway.body_bytes_max": "8Mi",
    # What the chart decides:
    "config.gateway.port": 80,
    "config.gateway.keys_file": "/keys.yaml",
    "config.gateway.tls_cert_file": "/tls.crt",
    "config.cell_tls.cert_file": "/tls.crt",
    "config.coordinator.listen": "0.0.0.0:1",
    "config.batches.data_dir": "/data",
    "config.admin": {"port": 1},
    "config.run_dir": "/run",
    "config.fleet": {"cells": ["here:8002"]},
}


def at_path(path: str, value: Any) -> dict[str, Any]:
    """Nest a value under dots."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def test_schema_is_that_of_the_models() -> None:
    assert SCHEMA.read_text() == schema_text(), "run: python -m tests.helm.values_schema"


def test_readme_lists_the_values() -> None:
    text = README.read_text()
    assert text == readme_text(), "run: python -m tests.helm.values_reference"
    for name in ("cell.ranks.resources.limits", "models.download.storage", "ingress.hosts"):
        assert f"| `{name}` |" in text


def test_schema_is_a_schema_that_refuses_what_it_does_not_know() -> None:
    schema = values_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    for name, definition in schema["$defs"].items():
        assert definition["additionalProperties"] is False, name


def test_config_has_every_field_of_the_product_but_those_that_the_chart_decides() -> None:
    definitions = json.loads(SCHEMA.read_text())["$defs"]
    product = Config.model_json_schema()
    models = {**product["$defs"], "Config": product}
    assert models.pop("AdminConfig")
    for name, model in models.items():
        hidden = CHART_DECIDES.get(name, ())
        assert set(definitions[name]["properties"]) == set(model["properties"]).difference(hidden)


def test_default_values_are_all_there_is() -> None:
    """values.yaml is the list of what can be set; the models have no defaults of their own."""
    values = default_values()
    assert set(values.pop("config")) == {"model"}
    known = ChartValues.model_validate(values).model_dump(by_alias=True, exclude_unset=True)
    assert known == values


@pytest.mark.parametrize("name", VARIATIONS)
def test_schema_takes_examples(name: str) -> None:
    values = merged(default_values(), variation(name))
    jsonschema.validate(values, values_schema())


@pytest.mark.parametrize("path", MISTAKES)
def test_schema_refuses_mistakes(path: str) -> None:
    values = merged(merged(default_values(), example("kind")), at_path(path, MISTAKES[path]))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, values_schema())


def test_helm_refuses_the_same_mistakes() -> None:
    """Helm has its own reader of schemas."""
    values = [merged(example("kind"), at_path(path, value)) for path, value in MISTAKES.items()]
    answers = dict(zip(MISTAKES, ask_helm(*values), strict=True))
    taken = [path for path, answer in answers.items() if "error" not in answer]
    assert not taken
    for path, answer in answers.items():
        assert any(part in answer["error"] for part in path.split(".")), answer["error"]
