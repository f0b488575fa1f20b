"""Directories of host pages over one memory, as several ranks have them."""

from kvadaptor.host.directory import HostDirectory
from kvadaptor.host.layout import HostLayout


def opened(layout: HostLayout, count: int = 1) -> list[HostDirectory]:
    memory = memoryview(bytearray(layout.data_at))
    return [HostDirectory(memory, layout, rank, 0.0) for rank in range(count)]


def store(own: HostDirectory, key: bytes, *, shares: int = 1, now_s: float = 0.0) -> int:
    (page,) = pages = own.allocate([key], shares, now_s)
    for share in range(shares):
        own.entries.complete(pages, share, own.entries.tags(pages))
    return page


def reopened(own: HostDirectory, now_s: float = 0.0) -> HostDirectory:
    return HostDirectory(own._bytes, own.layout, own.rank, now_s)
