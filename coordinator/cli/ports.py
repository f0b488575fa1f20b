"""Ports: checks that one is free, and finds free ones."""

import errno
import socket

from comm_pool import ports
from coordinator.cli.errors import USAGE_STATUS, CliError


def require_free(host: str, port: int, option: str) -> None:
    """Raise one sentence that names `port` and `option` if nothing can listen there."""
    problem = ports.bind_error(host, port)
    if problem is None:
        return
    if isinstance(problem, socket.gaierror):
        raise CliError(f"'{host}' is no address of this machine; choose another.", USAGE_STATUS)
    if isinstance(problem, PermissionError):
        raise CliError(f"port {port} needs root; choose one above 1023 with {option}.")
    if problem.errno == errno.EADDRINUSE:
        raise CliError(
            f"port {port} on {host} is in use; stop what listens there, or choose another with "
            f"{option}."
        )
    raise CliError(f"cannot listen on {host}:{port}: {problem.strerror}; see {option}.")


def free_ports(count: int) -> tuple[int, ...]:
    """Return distinct loopback ports on which nothing listens now."""
    try:
        return ports.free_ports(count)
    except ports.NoFreePortError as error:
        raise CliError(str(error)) from None
