"""Changed copies of the demo model, and a Hugging Face that refuses."""

import json
import urllib.error
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import Any

from coordinator.protocol.config import check_config
from coordinator.protocol.model_check import Memory, check_model
from coordinator.protocol.model_files import ask_nobody


def change(model: Path, **fields: Any) -> None:
    """Replace fields of a model's config.json."""
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def hub_says(status: int, code: str) -> Any:
    """Return a way to fetch that gets this status and error code for every URL."""

    def fetch(url: str, _: Mapping[str, str]) -> bytes:
        headers = Message()
        headers["X-Error-Code"] = code
        raise urllib.error.HTTPError(url, status, "no", headers, None)

    return fetch


def check(
    model: Path | str,
    *engine_args: str,
    memory: Memory | None = None,
    weights: bool = True,
    **cell: Any,
) -> None:
    """Check the model of a cell as the command line does; nobody is asked for an id."""
    data = {"model": {"path": str(model), "engine_args": engine_args}, "cell": cell}
    check_model(
        check_config(data), {"HF_HOME": "/nowhere"}, memory=memory, weights=weights,
        fetch=ask_nobody,
    )  # fmt: skip
