"""Restricts vLLM's fetcher of media URLs to public addresses (vLLM 0.32.0).

The body check sees only names, and a name's owner can make it resolve to a different address each
time. So the connection's own resolver checks addresses, and the connection uses only checked ones.
Redirects are off.
"""

from aiohttp import ClientSession, TCPConnector, ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult
from requests import Session
from vllm.connections import HTTPConnection

from gateway.http.media import is_public


class PublicResolver(AbstractResolver):
    """Refuses a name if any of its addresses is not public."""

    def __init__(self, inner: AbstractResolver) -> None:
        """Check the addresses that `inner` finds."""
        self._inner = inner

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        """Return a host's addresses; raises ValueError if one is not public.

        vLLM would retry after an OSError.
        """
        found = await self._inner.resolve(host, port, family)  # type: ignore[arg-type]
        if not all(is_public(each["host"]) for each in found):
            raise ValueError("Media must come from a public address.")
        return found

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._inner.close()


def keep_public(connection: HTTPConnection, resolver: AbstractResolver | None = None) -> None:
    """Make vLLM's connection fetch only from public addresses, and not through a proxy.

    With a proxy, this process would not know what a name resolves to.
    """
    session: list[ClientSession] = []

    async def get_async_client() -> ClientSession:
        if not session:
            checked = PublicResolver(resolver or ThreadedResolver())
            session.append(ClientSession(connector=TCPConnector(resolver=checked)))
        return session[0]

    def get_sync_client() -> Session:
        raise RuntimeError("media are fetched in the event loop.")

    connection.get_async_client = get_async_client
    connection.get_sync_client = get_sync_client
