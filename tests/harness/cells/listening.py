"""Which TCP sockets the processes of a product listen on."""

import ipaddress

import psutil


def listening(pid: int) -> list[tuple[str, int, str]]:
    """(address, port, command) of every listening socket of a process and all below it."""
    found = []
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            command = " ".join(process.cmdline()[:4])
            sockets = process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            continue
        found += [
            (each.laddr.ip, each.laddr.port, command)
            for each in sockets
            if each.status == psutil.CONN_LISTEN
        ]
    return found


def is_loopback(address: str) -> bool:
    """Say whether only this machine reaches the address; `::ffff:127.0.0.1` is one."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
