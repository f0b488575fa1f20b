"""TLS between the processes of cells: the settings, and the PEM files that they name.

Every process has a certificate of one authority and accepts only peers with another one of it. The
name in certificates is fixed, because peers reach pods by address. The files are read again when
they change, for connections that begin after that. Calls read the disk; coordinator, gateways and
ranks make gRPC's credentials of what this module returns.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.protocol.certificate import CertificateError, new_context
from coordinator.protocol.file_stamp import stamp_of
from coordinator.protocol.tls_config import CellTlsConfig

SERVER_NAME_OPTION = "grpc.ssl_target_name_override"
"""gRPC's channel option with the name to look for in a server's certificate."""

FLIGHTS = 4
"""Turns of client and server within which a TLS handshake ends."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pems:
    """What a process presents, and whom it trusts."""

    cert: bytes
    key: bytes
    ca: bytes


class CellTls:
    """The files of one process."""

    def __init__(self, settings: CellTlsConfig) -> None:
        """Read and check the files; raises `CertificateError` with a sentence."""
        self._settings = settings
        self._paths = tuple(map(Path, (settings.cert_file, settings.key_file, settings.ca_file)))
        self._stamp = stamp_of(*self._paths)
        self._pems = self._read()

    @property
    def client_options(self) -> tuple[tuple[str, str], ...]:
        """The channel options of gRPC that clients need."""
        return ((SERVER_NAME_OPTION, self._settings.server_name),)

    def pems(self) -> Pems:
        """Return the newest usable files: the same object until they change."""
        stamp = stamp_of(*self._paths)
        if stamp is None or stamp == self._stamp:
            return self._pems
        self._stamp = stamp
        try:
            self._pems = self._read()
        except CertificateError as error:
            log.warning("cell_certificate_not_read", reason=str(error))
        else:
            log.info("cell_certificate_read")
        return self._pems

    def _read(self) -> Pems:
        parts = []
        for name, path in zip(("cert_file", "key_file", "ca_file"), self._paths, strict=True):
            try:
                parts.append(path.read_bytes())
            except OSError as error:
                raise CertificateError(
                    f"cell_tls.{name}: cannot read {path}: {error.strerror}."
                ) from error
        self._shake_hands()
        return Pems(*parts)

    def _shake_hands(self) -> None:
        """Connect a server and a client with these files in memory: gRPC would hide the reason."""
        cert, key, ca = self._paths
        server = new_context("cell_tls", cert, key)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_cert_chain(cert, key)
        server.verify_mode = ssl.CERT_REQUIRED
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            for context in (server, client):
                context.load_verify_locations(ca)
            name = self._settings.server_name
            ends = (
                client.wrap_bio(to_client, to_server, server_hostname=name),
                server.wrap_bio(to_server, to_client, server_side=True),
            )
            for end in ends * FLIGHTS:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise CertificateError(
                f"cell_tls: {cert} is not accepted by processes with these settings ({reason}): "
                f"let the authority in {ca} sign a certificate for servers and clients with the "
                f"DNS name {self._settings.server_name}."
            ) from error


def cell_tls_of(settings: CellTlsConfig) -> CellTls | None:
    """Read the files; None if there are none. Raises `CertificateError`."""
    return CellTls(settings) if settings.cert_file else None
