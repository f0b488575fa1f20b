"""docs/configuration.md and docs/aileron.yaml, from the models of the configuration file.

Keys, types, bounds and defaults come from the models, texts from their docstrings.
"""

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from coordinator.protocol.config import Config, ModelConfig
from coordinator.protocol.config_schema import attribute_texts
from tests.harness.docs.tables import table

EXAMPLE_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
EXAMPLE_COLUMNS = 100
HEAD = """# Configuration

One YAML file configures all processes of a cell: `aileron up --config FILE`, and `aileron gateway`, `coordinator` and
`rank` with the same option. The options of `aileron up` override it. Every process checks the whole file at its start:
it refuses an unknown key, names the nearest one, and refuses values that contradict each other.

Secrets stay in the environment: `AILERON_TOKEN` is the secret that a cell's processes share, at least 16 characters;
`AILERON_ADMIN_KEY` is the key of the admin port; `HF_TOKEN` opens gated models of Hugging Face. `aileron up` makes
`AILERON_TOKEN` itself.

A small file:

```yaml
model:
  path: meta-llama/Llama-3.1-8B-Instruct
  engine_args: [--max-model-len, "32768"]
cell:
  device: cuda
  ranks: 4
  widths: [1, 2, 4]
  layout: dp4
policy:
  name: adaptive
gateway:
  host: 0.0.0.0
  keys_file: /etc/aileron/keys.yaml
```

[aileron.yaml](aileron.yaml) has every key with its default and its text. `python -m tests.harness.docs` writes it and
this page.
"""


@dataclass(frozen=True)
class Section:
    """One model of the file: its path, such as `coordinator.tiers`, and its class."""

    path: tuple[str, ...]
    model: type[BaseModel]

    @property
    def texts(self) -> dict[str, str]:
        """Field -> its text."""
        return attribute_texts(sys.modules[self.model.__module__]).get(self.model.__name__, {})

    @property
    def parts(self) -> "dict[str, Section]":
        """The fields that are models themselves."""
        return {
            name: Section((*self.path, name), field.annotation)
            for name, field in self.model.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        }


def sections(top: Section) -> Iterator[Section]:
    """A section and those in it, in the order of the file."""
    yield top
    for part in top.parts.values():
        yield from sections(part)


def type_in_words(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a value may be, from its JSON schema."""
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        return type_in_words({**named, "description": ""}, definitions)
    if "anyOf" in schema:
        return " or ".join(type_in_words(each, definitions) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items") or {}
        return f"list of {type_in_words(items, definitions)}" if items else "list"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"map to {type_in_words(values, definitions)}" if isinstance(values, dict) else "map"
    words = {"integer": "whole number", "boolean": "true or false", "string": "text"}
    bounds = [
        f"{sign} {schema[key]:,}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if key in schema
    ]
    return " ".join(
        [words.get(kind, "none" if kind == "null" else kind), ", ".join(bounds)]
    ).strip()


def rows(section: Section) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and text of each field that is no section."""
    schema = section.model.model_json_schema()
    definitions = schema.get("$defs", {})
    for name, field in section.model.model_fields.items():
        if name in section.parts:
            continue
        default = "needed" if field.is_required() else f"`{in_yaml(default_of(section, name))}`"
        kind = type_in_words(schema["properties"][name], definitions)
        yield f"`{name}`", kind, default, section.texts.get(name, "")


def default_of(section: Section, name: str) -> Any:
    """A field's default as YAML's types; a section in a section may have defaults of its own."""
    value: Any = whole().model_dump(mode="json")
    for key in (*section.path, name):
        value = value[key]
    return value


def whole() -> Config:
    """The configuration with every default."""
    return Config(model=ModelConfig(path=EXAMPLE_MODEL))


def in_yaml(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def page() -> str:
    """The whole page."""
    out = [HEAD]
    for section in sections(Section((), Config)):
        title = ".".join(section.path)
        heading = f"\n{'#' * min(len(section.path) + 1, 4)} `{title}`\n\n" if title else "\n"
        text = " ".join((section.model.__doc__ or "").split())
        own = list(rows(section))
        if not title:
            continue
        out += [heading, f"{text}\n"]
        out += ["\n", table(("key", "value", "default", "meaning"), own)] if own else []
    top = [row for row in rows(Section((), Config)) if row[0] != "`model`"]
    out += ["\n## Other keys\n\n", table(("key", "value", "default", "meaning"), top)]
    return "".join(out)


def example() -> str:
    """The file with every key, its default and its text."""
    out = [
        "# Every key of aileron's configuration file, with its default: aileron up --config FILE\n"
        "# All but model.path may be left out.\n"
    ]
    out += _example(Section((), Config))
    return "".join(out)


def _example(section: Section) -> Iterator[str]:
    indent = "  " * len(section.path)
    width = EXAMPLE_COLUMNS - len(indent)
    for name, field in section.model.model_fields.items():
        part = section.parts.get(name)
        text = (part.model.__doc__ or "") if part else section.texts.get(name, "")
        lines = textwrap.wrap(" ".join(text.split()), width - 2, break_on_hyphens=False)
        if part and not section.path:
            yield "\n"
        yield from (f"{indent}# {line}\n" for line in lines)
        if part:
            yield f"{indent}{name}:\n"
            yield from _example(part)
        else:
            needed = " # needed" if field.is_required() else ""
            yield f"{indent}{name}: {in_yaml(default_of(section, name))}{needed}\n"
