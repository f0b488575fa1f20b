"""vLLM's own fetcher of media, with a server of ours and names that resolve to what we say."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from vllm.connections import HTTPConnection

from gateway.engine import media
from gateway.engine.media import keep_public
from gateway.http.media import is_public

NAME = "media.example"


@dataclass
class Names(AbstractResolver):
    """Gives one list of addresses after the other, and the last one again and again."""

    answers: list[list[str]]
    asked: int = 0

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in answer
        ]

    async def close(self) -> None:
        pass


@dataclass
class Site:
    """A web server that counts who comes."""

    port: int = 0
    visits: int = 0
    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi"
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


async def fetch(site: Site, names: Names) -> bytes:
    connection = HTTPConnection()
    keep_public(connection, names)
    client = await connection.get_async_client()
    try:
        body: bytes = await connection.async_get_bytes(f"http://{NAME}:{site.port}/x", timeout=20)
        return body
    finally:
        await client.close()


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["93.184.215.14", "127.0.0.1"],
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:127.0.0.1"],
    ],
)
async def test_a_name_of_this_network_is_not_fetched_from(site: Site, addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="public address"):
        await fetch(site, Names([addresses]))
    assert site.visits == 0


async def test_the_address_that_is_checked_is_the_one_that_is_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lookup per fetch: no second answer for a name can slip in between."""
    seen: list[str] = []

    def is_fine(address: str) -> bool:
        seen.append(address)
        return True

    monkeypatch.setattr(media, "is_public", is_fine)
    names = Names([["127.0.0.1"], ["10.0.0.1"]])
    assert await fetch(site, names) == b"hi"
    assert (site.visits, names.asked, seen) == (1, 1, ["127.0.0.1"])


async def test_no_proxy_of_the_environment_looks_names_up_for_us(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{site.port}")
    with pytest.raises(ValueError, match="public address"):
        await fetch(site, Names([["192.168.1.1"]]))
    assert site.visits == 0


def test_nothing_is_fetched_in_a_way_that_is_not_checked() -> None:
    connection = HTTPConnection()
    keep_public(connection)
    with pytest.raises(RuntimeError):
        connection.get_bytes("http://media.example/x")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:4700::1111", True),
        ("64:ff9b::5db8:d70e", True),
        *((address, False) for address in (
            "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0",
            "100.64.0.1", "224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1%eth0", "fc00::1",
            "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1",
        )),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
