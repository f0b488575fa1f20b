"""A gateway that writes down its work on prompts: `tests.harness.cells.counting_gateway`.

It adds a line of JSON to the file in `WORK_FILE` whenever it checks a body, tokenizes a text, or
begins the text of an answer: the kind of work, the thread, and the size, in bytes, characters or
tokens. Everything else is the product's.
"""

import json
import os
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORK_FILE = "AILERON_TEST_WORK_FILE"


def _note(what: str, size: int) -> None:
    line = {"what": what, "thread": threading.current_thread().name, "size": size}
    with Path(os.environ[WORK_FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _counted(what: str, work: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        _note(what, size(*args, **kwargs))
        return work(*args, **kwargs)

    return counted


def main() -> None:
    """Run the gateway, watched."""
    import tokenizers.decoders
    from transformers import TokenizersBackend

    from gateway.http import edge

    encode: Any = TokenizersBackend._encode_plus
    watched: Any = TokenizersBackend
    watched._encode_plus = _counted("tokenize", encode, lambda _self, text, **_: len(text))
    decoders: Any = tokenizers.decoders
    decoders.DecodeStream = _counted(
        "begin", decoders.DecodeStream, lambda ids=(), **_: len(ids or ())
    )
    http: Any = edge
    http.check_body = _counted("check", http.check_body, lambda body, *_: len(body))
    runpy.run_module("gateway", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
