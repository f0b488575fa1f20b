"""Credentials of the cell's gRPC server: its certificate, and the authority of its clients."""

import grpc

from coordinator.protocol.cell_tls import CellTls


def server_credentials(tls: CellTls) -> grpc.ServerCredentials:
    """Require certificates of clients; handshakes use the files as they are then."""
    current = tls.pems()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        """Return what has changed since the last call; gRPC asks at each handshake."""
        nonlocal current
        if (pems := tls.pems()) is current:
            return None
        current = pems
        return _configuration(tls)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls),
        # gRPC takes None for no change, which its types do not say.
        newest,  # type: ignore[arg-type]
        require_client_authentication=True,
    )


def _configuration(tls: CellTls) -> grpc.ServerCertificateConfiguration:
    pems = tls.pems()
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)
