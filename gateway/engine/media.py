"""vLLM's fetcher of media URLs, kept to addresses that everyone may reach (vLLM 0.32.0).

The body check knows names only, and whoever owns a name decides what it resolves to, a different
address each time if they like. So the addresses are checked where they are used: by the resolver
of the connection itself, which connects to no address that was not checked. Redirects are off.
"""

from aiohttp import ClientSession, TCPConnector, ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult
from requests import Session
from vllm.connections import HTTPConnection

from gateway.http.media import is_public


class PublicResolver(AbstractResolver):
    """Refuses a name if any of its addresses is not public."""

    def __init__(self, inner: AbstractResolver) -> None:
        """Check what `inner` finds."""
        self._inner = inner

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        """Return the addresses of a host; raises ValueError for one that may not be fetched from.

        An OSError would be tried again by vLLM.
        """
        found = await self._inner.resolve(host, port, family)  # type: ignore[arg-type]
        if not all(is_public(each["host"]) for each in found):
            raise ValueError("Media must come from a public address.")
        return found

    async def close(self) -> None:
        """Close what looks names up."""
        await self._inner.close()


def keep_public(connection: HTTPConnection, resolver: AbstractResolver | None = None) -> None:
    """Make a connection of vLLM's fetch from public addresses only, and not through a proxy.

    Behind a proxy nobody here would know what a name resolves to.
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
