"""Opens gRPC channels to coordinators, with TLS where the configuration has it."""

import grpc

from coordinator.protocol.cell_tls import CellTls
from coordinator.protocol.wire import CHANNEL_OPTIONS


def open_channel(target: str, tls: CellTls | None) -> grpc.aio.Channel:
    """Return a channel; it presents the certificate that the files contain now."""
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    pems = tls.pems()
    credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
    options = (*CHANNEL_OPTIONS, *tls.client_options)
    return grpc.aio.secure_channel(target, credentials, options=options)
