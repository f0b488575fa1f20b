"""Access control of the admin port: checked before a request reaches the API.

A port without a key, which only loopback allows, refuses requests that a foreign web page could
send. Any other port requires the environment's key. Bodies are small and need a Content-Length.
"""

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.admin.key import ADMIN_KEY_ENV
from coordinator.protocol.addresses import is_loopback

BODY_BYTES_MAX = 64 * 1024
OPEN_PATHS = frozenset({"/health", "/"})
"""Served without a key: for liveness probes, and the live page, which holds no data."""


def error_answer(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_denied", 503: "service_unavailable"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
    return JSONResponse(body, status, headers.get(status))


class AdminGuard:
    """ASGI middleware in front of the admin API."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with the reason for refusing it."""
        if scope["type"] != "http":
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = None if scope["path"] in OPEN_PATHS else self._refusal(headers)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> JSONResponse | None:
        if self._key:
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self._key):
                return error_answer(
                    401,
                    "invalid_api_key",
                    f"The admin key is wrong or missing: send {ADMIN_KEY_ENV} as a bearer token.",
                )
        elif not _is_own(headers):
            return error_answer(
                403,
                "cross_origin",
                "Without an admin key the port answers only this machine's programs and the live "
                f"page: use a loopback address, or set {ADMIN_KEY_ENV}.",
            )
        if b"transfer-encoding" in headers:
            return error_answer(411, "length_required", "Send the body with a Content-Length.")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > BODY_BYTES_MAX:
            return error_answer(
                413, "request_too_large", f"Send a body of at most {BODY_BYTES_MAX} bytes."
            )
        return None


def _is_own(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request without a key comes from this machine's programs or our page.

    Our page sends the origin that it asks. A foreign page whose name was made to resolve to this
    address, to bypass the browser's same-origin rule, shows that name in `Host`.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if host and not is_loopback(_host_name(host)):
        return False
    origin = headers.get(b"origin")
    is_cross_site = headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none")
    return not is_cross_site and (origin is None or origin.decode("latin-1") == f"http://{host}")


def _host_name(host: str) -> str:
    """Return a `Host` without its port; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
