"""`python -m tests.helm.values_schema`: writes helm/values.schema.json from the models.

`config` is the schema of the product's `Config`, with the texts of its attributes as descriptions
and without what the chart decides itself: addresses, ports and folders.
"""

import json
import re
from pathlib import Path
from typing import Any

from coordinator.cli.launch import OWN_OPTIONS
from coordinator.protocol import config
from coordinator.protocol.config_schema import model_texts, without_titles
from coordinator.protocol.engine_options import NOT_OFFERED
from tests.helm.chart_values import ChartValues

SCHEMA = Path(__file__).resolve().parents[2] / "helm" / "values.schema.json"
DIALECT = "http://json-schema.org/draft-07/schema#"
"""What Helm 3 and 4 both check; the models need nothing newer."""

CHART_DECIDES = {
    "Config": ("admin", "run_dir"),
    "CellConfig": ("dist_port",),
    "CoordinatorConfig": ("listen",),
    "GatewayConfig": (
        "host",
        "port",
        "token_listen",
        "keys_file",
        "metrics_listen",
        "tls_cert_file",
        "tls_key_file",
    ),
    "CellTlsConfig": ("cert_file", "key_file", "ca_file"),
    "BatchesConfig": ("data_dir",),
    "FleetConfig": ("cells", "cell_name", "advertise"),
}
"""Model -> fields that `config` may not have."""

Schema = dict[str, Any]


def values_schema() -> Schema:
    """The schema of all values, as it stands in the file."""
    values = ChartValues.model_json_schema()
    product = config.Config.model_json_schema()
    definitions: Schema = {**values.pop("$defs"), **product.pop("$defs"), "Config": product}
    assert len(definitions) == len(values_definitions()) + len(product_definitions()) + 1
    engine_args = definitions["ModelConfig"]["properties"]["engine_args"]["items"]
    engine_args["not"] = {"pattern": f"^({'|'.join(map(re.escape, refused_options()))})(=|$)"}
    texts = model_texts()
    for name, definition in definitions.items():
        properties = definition.get("properties", {})
        for field in CHART_DECIDES.get(name, ()):
            del properties[field]
        for field, text in texts.get(name, {}).items():
            if field in properties:
                properties[field]["description"] = text
    definitions.pop("AdminConfig")
    values["properties"]["config"] = {"$ref": "#/$defs/Config"}
    values["properties"]["global"] = {"type": "object", "description": "Helm's; not used."}
    values["required"].append("config")
    values.pop("description")
    plain: Schema = {"$schema": DIALECT, "title": "aileron", **without_titles(values)}
    plain["$defs"] = without_titles(dict(sorted(definitions.items())))
    return plain


def refused_options() -> list[str]:
    """vLLM's options that every process of a cell refuses, by one of their names."""
    names = {*NOT_OFFERED, *OWN_OPTIONS, "--enable-lora", "--speculative-config"}
    return sorted({*names, "--kv-transfer-config"})


def values_definitions() -> Schema:
    """The models that the chart's own values are made of."""
    definitions: Schema = ChartValues.model_json_schema()["$defs"]
    return definitions


def product_definitions() -> Schema:
    """The models that the product's configuration is made of."""
    definitions: Schema = config.Config.model_json_schema()["$defs"]
    return definitions


def schema_text() -> str:
    """What the file holds."""
    return json.dumps(values_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text())
