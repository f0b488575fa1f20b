"""Small bodies for each generating route, and how to read an error."""

from typing import Any

import httpx

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "say it"}],
    "max_tokens": 2,
}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "say it", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "say it", "max_output_tokens": 2}
BODIES = {PATH: CHAT, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE}


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Return the status, the code and the parameter of an error."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]
