"""The live page at `/` of the admin port: one HTML file that loads nothing else.

The page holds no data, so it needs no key; it gets its data from the admin API with the key that
the user types in. Its content security policy allows only its own script and forbids frames.
"""

import hashlib
import re
from base64 import b64encode
from functools import cache
from pathlib import Path

from starlette.responses import Response

FILE = Path(__file__).with_name("page.html")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    text = FILE.read_text()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"script-src {_hashes(_SCRIPT, text)}; style-src {_hashes(_STYLE, text)}"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    return text.encode(), headers


def page() -> Response:
    """Return the page."""
    body, headers = _page()
    return Response(body, media_type="text/html; charset=utf-8", headers=headers)


def _hashes(block: re.Pattern[str], text: str) -> str:
    digests = (hashlib.sha256(each.encode()).digest() for each in block.findall(text))
    return " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)
