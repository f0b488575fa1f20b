"""A small client of the admin API for the command line; errors become `CliError`s."""

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any

from coordinator.admin.key import ADMIN_KEY_ENV, VIEWER_KEY_ENV
from coordinator.cli.errors import CliError

ADMIN_CA_ENV = "AILERON_ADMIN_CA"
"""Variable with the PEM file of the authority of an https admin port."""

ANSWER_LIMIT_S = 10.0
HEALTH_LIMIT_S = 2.0
ADMIN_HEALTH = {"status": "alive"}
SERVING_HEALTH = {"status": "ok"}
"""What the two ports answer to GET /health."""
SWITCH_LIMIT_S = 180.0
"""Longer than the coordinator waits for a switch, so that its reason arrives."""


class AdminClient:
    """Talks to one coordinator; the key comes from the environment: an operator's or a viewer's."""

    def __init__(self, url: str, ca: str | None = None) -> None:
        """`ca` is a PEM file of the authority that signed the port's certificate.

        Without it the file in `AILERON_ADMIN_CA` counts, else the machine's authorities.
        """
        self.url = url
        """The address that answers."""
        # Of several keys, which are valid together while they rotate, the first.
        words = f"{os.environ.get(ADMIN_KEY_ENV, '')} {os.environ.get(VIEWER_KEY_ENV, '')}".split()
        self._key = words[0] if words else ""
        # No proxy: the admin port is local or inside the cluster.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), *_https(url, ca or os.environ.get(ADMIN_CA_ENV, ""))
        )

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer of GET `path`."""
        return self._ask(urllib.request.Request(self.url + path), ANSWER_LIMIT_S)  # noqa: S310

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of POST `path`, which may take as long as a switch."""
        request = urllib.request.Request(  # noqa: S310
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        return self._ask(request, SWITCH_LIMIT_S)

    def _ask(self, request: urllib.request.Request, limit_s: float) -> dict[str, Any]:
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=limit_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise CliError(self._refusal(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CliError(self._silence(error, limit_s)) from error
        if not isinstance(answer, dict):
            raise CliError(_not_admin(self.url))
        return answer

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        """Return why a server that answers refuses the request."""
        health = self._health()
        if health == SERVING_HEALTH:
            return (
                f"{self.url} is the serving port: name the admin port with --admin-url; it is 8001 "
                "unless --admin-port says otherwise."
            )
        return _reason(error) if health == ADMIN_HEALTH else _not_admin(self.url)

    def _silence(self, error: Exception, limit_s: float) -> str:
        """Return why there is no answer that can be read."""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.url} is not trusted ({cause.verify_message}): name its "
                "authority with --admin-ca, or a name that it contains in --admin-url."
            )
        if isinstance(error, TimeoutError):
            return f"{self.url} did not answer within {limit_s:.0f} s: see the coordinator's log."
        # A TLS port ends a connection that begins with plain HTTP.
        ends = (ssl.SSLError, ConnectionResetError, http.client.HTTPException)
        if isinstance(cause, ends):
            return _other_scheme(self.url)
        return _nobody(self.url) if isinstance(error, OSError) else _not_admin(self.url)

    def _health(self) -> object:
        """Return the answer to GET /health, which tells the admin port from the serving port."""
        try:
            with self._opener.open(f"{self.url}/health", timeout=HEALTH_LIMIT_S) as response:
                answer: object = json.load(response)
        except (OSError, ValueError, http.client.HTTPException):
            return None
        return answer


def _https(url: str, ca: str) -> list[urllib.request.HTTPSHandler]:
    """Return the handler that an https URL needs, none for http."""
    if not url.startswith("https:"):
        return []
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise CliError(
            f"--admin-ca {ca}: {error.strerror or error}: name a PEM file of the authority of "
            f"{url}."
        ) from error
    return [urllib.request.HTTPSHandler(context=context)]


def _nobody(url: str) -> str:
    return (
        f"no admin API answers at {url}: start `aileron up`, or name the right one with "
        "--admin-url."
    )


def _not_admin(url: str) -> str:
    return f"{url} is no aileron admin API: name the right one with --admin-url."


def _other_scheme(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if scheme == "https":
        return f"{rest} answers, but without TLS: use --admin-url http://{rest}."
    return (
        f"{rest} ends the connection without an answer in HTTP: use --admin-url https://{rest} if "
        "the admin port has a certificate, or see the coordinator's log."
    )


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the sentence in OpenAI's error shape, or else the status."""
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the admin API answered {error.code} {error.reason}: check --admin-url."
    return str(message)
