"""Access control of the admin port: checked before a request reaches the API.

A port without a key, which only loopback allows, refuses requests that a foreign web page could
send. Any other port requires a key whose role may do what is asked. Bodies are small and need a
Content-Length.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

import structlog
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.admin.key import ADMIN_KEY_ENV, AdminKeys, Role
from coordinator.protocol.addresses import is_loopback

log = structlog.get_logger()

BODY_BYTES_MAX = 64 * 1024
CALLER_KEY = "aileron.caller"
"""Key of the ASGI scope under which the guard names who asks."""
KEY_CALLER = "admin key"
LOOPBACK_CALLER = "loopback"
"""Asks from this machine, at a port without a key."""
OPEN_PATHS = frozenset({"/health", "/"})
"""Served without a key: for liveness probes, and the live page, which holds no data."""
METRICS_PATH = "/metrics"
READS = frozenset({"GET", "HEAD", "OPTIONS"})


def error_answer(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_denied", 503: "service_unavailable"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
    return JSONResponse(body, status, headers.get(status))


class AdminGuard:
    """ASGI middleware in front of the admin API."""

    def __init__(self, app: ASGIApp, keys: AdminKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with the reason for refusing it."""
        if scope["type"] != "http":
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        is_open = scope["path"] in OPEN_PATHS
        scheme = scope.get("scheme", "http")
        refusal = None if is_open else self._refusal(headers, _role_for(scope), scheme)
        scope = {**scope, CALLER_KEY: LOOPBACK_CALLER if self._keys.is_open else KEY_CALLER}
        if refusal is not None and scope["method"] == "POST":
            log.warning("admin_refused", address=_address(scope), status=refusal.status_code)
        if scope["method"] == "HEAD":
            # The server drops the body of the answer.
            scope = {**scope, "method": "GET"}
        await (refusal or self._app)(scope, receive, send)

    def _refusal(
        self, headers: Mapping[bytes, bytes], needed: Role, scheme: str
    ) -> JSONResponse | None:
        if not self._keys.is_open:
            sent = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            role = self._keys.role_of(sent)
            names = " or ".join(self._keys.variables_for(needed))
            if role is None:
                fault = "wrong" if sent else "missing"
                return error_answer(
                    401,
                    "invalid_api_key",
                    f"The admin key is {fault}: set {names} to this server's, or send it as a "
                    "bearer token.",
                )
            if role < needed:
                return error_answer(
                    403,
                    "role_needed",
                    f"This needs the role {needed.name.lower()}, and the key has the role "
                    f"{role.name.lower()}: set {names} to one that suffices, or send it as a "
                    "bearer token.",
                )
        elif not _is_own(headers, scheme):
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


def _role_for(scope: Scope) -> Role:
    """Return the lowest role that may do what a request asks."""
    if scope["method"] not in READS:
        return Role.OPERATOR
    return Role.METRICS if scope["path"] == METRICS_PATH else Role.VIEWER


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def _is_own(headers: Mapping[bytes, bytes], scheme: str) -> bool:
    """Return whether a request without a key comes from this machine's programs or our page.

    Our page sends the origin that it asks. A foreign page whose name was made to resolve to this
    address, to bypass the browser's same-origin rule, shows that name in `Host`.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    if host and not is_loopback(_host_name(host)):
        return False
    origin = headers.get(b"origin")
    is_cross_site = headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none")
    return not is_cross_site and (
        origin is None or origin.decode("latin-1") == f"{scheme}://{host}"
    )


def _host_name(host: str) -> str:
    """Return a `Host` without its port; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
