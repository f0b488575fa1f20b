"""The JSON schema of the configuration, with the texts under its attributes as descriptions."""

import ast
import inspect
from types import ModuleType
from typing import Any

from coordinator.protocol import (
    config,
    gateway_config,
    log_config,
    policy_config,
    tls_config,
    tracing_config,
)

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def config_schema() -> Schema:
    """Return the schema that editors and `aileron config schema` use."""
    schema: Schema = {"$schema": DIALECT, **without_titles(config.Config.model_json_schema())}
    texts = model_texts()
    for name, definition in {"Config": schema, **schema["$defs"]}.items():
        for field, text in texts.get(name, {}).items():
            if field in definition.get("properties", {}):
                definition["properties"][field]["description"] = text
    return {**schema, "title": "aileron"}


def model_texts() -> dict[str, dict[str, str]]:
    """Class -> field -> text, of all models of the configuration."""
    modules = (config, gateway_config, log_config, policy_config, tls_config, tracing_config)
    return {name: each for module in modules for name, each in attribute_texts(module).items()}


def attribute_texts(module: ModuleType) -> dict[str, dict[str, str]]:
    """Class -> field -> the text under it; pydantic would have to read the source at each start."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    texts.setdefault(node.name, {})[name] = inspect.cleandoc(words)
    return texts


def without_titles(value: Any) -> Any:
    """Drop the titles that pydantic makes of names; a field named `title` would be an object."""
    if isinstance(value, list):
        return [without_titles(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_titles(each)
        for key, each in value.items()
        if not (key == "title" and isinstance(each, str))
    }
