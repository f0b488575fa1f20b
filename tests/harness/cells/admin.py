"""The calls that tests make on a cell's admin port."""

import urllib.error
import urllib.request
from typing import Any

import msgspec

CALL_LIMIT_S = 60


def get_json(url: str) -> Any:
    """GET and decode."""
    with urllib.request.urlopen(url, timeout=CALL_LIMIT_S) as answer:
        return msgspec.json.decode(answer.read())


def ask(admin: str, layout: str, carry: str) -> Any:
    """Ask for a layout and do not wait until it serves."""
    return _post(admin + "/admin/layout", layout, carry)


def switch(admin: str, layout: str, carry: str) -> Any:
    """Switch the cell and wait until the layout serves."""
    return _post(admin + "/admin/layout?wait=1", layout, carry)


def post(url: str, body: object) -> tuple[int, Any]:
    """POST and decode; returns the status too."""
    request = urllib.request.Request(
        url, data=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as answer:
            return answer.status, msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, msgspec.json.decode(error.read())


def _post(url: str, layout: str, carry: str) -> Any:
    status, answer = post(url, {"layout": layout, "carry": carry})
    assert status == 200, f"{layout}, {carry}: {answer}"
    return answer
