"""`python -m tests.helm.values_reference`: writes the table of values in helm/README.md.

Names, defaults and texts are those of values.yaml, kinds those of values.schema.json.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.helm.charts import CHART, Object, default_values
from tests.helm.values_schema import values_schema

README = CHART / "README.md"
HEADING = "## Values\n"
_LINE = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z]\w*):(?P<value>[^#]*)(#\s*(?P<text>.*))?$")


def texts() -> dict[str, str]:
    """Dotted name -> the comment beside it, or the lines of comment above it."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    above: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.lstrip("# "))
            continue
        match = _LINE.match(line)
        if match is not None:
            depth = len(match["indent"])
            path = [each for each in path if each[0] < depth] + [(depth, match["name"])]
            text = (match["text"] or " ".join(above)).strip()
            found[".".join(name for _, name in path)] = text
        above = []
    return found


def leaves(
    value: Object, schema: Object, definitions: Object, path: str = ""
) -> Iterator[tuple[str, Any, Object]]:
    """The dotted name, default and schema of each value that is no section."""
    for name, each in value.items():
        of = resolved(schema.get("properties", {}).get(name, {}), definitions)
        place = f"{path}.{name}" if path else name
        if isinstance(each, dict) and each and "properties" in of and place != "config":
            yield from leaves(each, of, definitions, place)
        else:
            yield place, each, of


def resolved(schema: Object, definitions: Object) -> Object:
    """A schema in place of a reference to it."""
    if "$ref" in schema:
        found: Object = definitions[schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def kind(schema: Object) -> str:
    """The kind of a value in a word or its choices."""
    if "enum" in schema:
        return " or ".join(f"`{each}`" if each else "empty" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    words = {"boolean": "true or false", "array": "list", "object": "mapping", "string": "text"}
    name = schema.get("type", "mapping")
    return str(words.get(name, name))


def reference() -> str:
    """The table."""
    schema = values_schema()
    found = texts()
    rows = ["| value | kind | default | what |", "|---|---|---|---|"]
    for name, default, of in leaves(default_values(), schema, schema["$defs"]):
        if name == "config":
            text = "aileron's own configuration; values.schema.json has its fields."
            rows.append(f"| `config` | mapping | | {text} |")
            continue
        parts = name.split(".")
        # A line may hold a whole section: then its text is that of the section.
        text = next(
            (
                found[place]
                for place in (".".join(parts[:end]) for end in range(len(parts), 0, -1))
                if place in found and (place == name or place.count(".") >= len(parts) - 2)
            ),
            "",
        )
        shown = yaml.safe_dump(default, default_flow_style=True, width=1_000).strip()
        shown = shown.removesuffix("\n...").strip() if not isinstance(default, str) else default
        shown = f"`{shown}`" if shown not in ("", "''") else ""
        rows.append(f"| `{name}` | {kind(of)} | {shown} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def readme_text() -> str:
    """The whole file, with the present table."""
    before, heading, _ = README.read_text().partition(HEADING)
    assert heading, f"{README} has no heading for the values"
    return f"{before}{heading}\n{reference()}"


if __name__ == "__main__":
    README.write_text(readme_text())
