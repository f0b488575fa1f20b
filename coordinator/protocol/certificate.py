"""A server's certificate for HTTPS: checked at start, and taken anew when its files change.

Connections that begin after a renewal get the new certificate; open ones keep theirs. Calls read
the disk. The gateway's and the admin port's processes call this module.
"""

import ssl
from pathlib import Path

import structlog

from coordinator.protocol.file_stamp import Stamp, stamp_of

CHECK_EVERY_S = 1.0
"""Interval of checks for changed certificate files."""

HANDSHAKE_LIMIT_S = 10.0
"""Longest time from a connection to the end of its TLS handshake."""

log = structlog.get_logger(__name__)


class CertificateError(ValueError):
    """Unusable certificate files; the message is one sentence that says what to change."""


class ServerCertificate:
    """The certificate of one port, and the context with which a server uses it."""

    def __init__(self, section: str, cert_file: str, key_file: str) -> None:
        """Read both PEM files; raises `CertificateError`. `section` is that of the settings."""
        self._section = section
        self._paths = Path(cert_file), Path(key_file)
        self._stamp: Stamp | None = stamp_of(*self._paths)
        self.context = new_context(section, *self._paths)
        self.context.set_alpn_protocols(["http/1.1"])
        """TLS 1.2 or newer; the same object before and after a renewal."""

    def has_changed(self) -> bool:
        """Return whether a file has changed since the last reading; False while one is away."""
        stamp = stamp_of(*self._paths)
        return stamp is not None and stamp != self._stamp

    def renew(self) -> None:
        """Use the files as they are now for new connections.

        Raises `CertificateError`; the old certificate then stays until the files change again.
        Call it where no handshake is in progress at the same moment, so in the event loop.
        """
        self._stamp = stamp_of(*self._paths)
        # OpenSSL drops the old key of a context when it loads a certificate of another key.
        new_context(self._section, *self._paths)
        try:
            self.context.load_cert_chain(*self._paths)
        except (OSError, ValueError) as error:
            # The files changed once more since: they are read again at the next check.
            self._stamp = None
            raise CertificateError(f"{self._section}: {error}.") from error

    def follow(self) -> None:
        """Renew where `has_changed`, and log the outcome; call it where `renew` may be called."""
        try:
            self.renew()
        except CertificateError as error:
            log.warning("certificate_not_read", reason=str(error))
        else:
            log.info("certificate_read")


def new_context(section: str, cert: Path, key: Path) -> ssl.SSLContext:
    """Return a context with a certificate for servers; raises `CertificateError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (cert, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise CertificateError(f"{section}: cannot read {path}: {error.strerror}.") from error
    try:
        # Without a password function OpenSSL would ask the terminal for one.
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise CertificateError(
            f"{section}: {key} is no private key of the certificate in {cert} ({_words(error)}): "
            "name PEM files of one pair, the key without a password."
        ) from error
    return context


def certificate_of(section: str, cert_file: str, key_file: str) -> ServerCertificate | None:
    """Read the files of a section; None without them. Raises `CertificateError`."""
    return ServerCertificate(section, cert_file, key_file) if cert_file else None


def _no_password() -> str:
    raise ValueError("the key has a password")


def _words(error: Exception) -> str:
    """Return OpenSSL's reason, such as KEY_VALUES_MISMATCH, or the text."""
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    return str(reason or error).lower().replace("_", " ")
