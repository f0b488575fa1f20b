"""`python -m tests.harness.redis.fake_redis PORT`: a server that speaks Redis' protocol.

fakeredis' own closes a connection behind each error, and the client's next question may come before
it has seen that. A real Redis leaves the connection open.
"""

import sys
from typing import Any

from fakeredis import TcpFakeServer
from fakeredis._clients._tcp_server import TCPFakeRequestHandler, Writer


class _Watched(Writer):
    """Notes whether what was written last is an error."""

    is_error = False

    def dump(self, value: Any) -> None:
        """Send a reply."""
        self.is_error = isinstance(value, Exception)
        super().dump(value)


class Handler(TCPFakeRequestHandler):
    """Goes on behind an error, on the same connection."""

    def setup(self) -> None:
        """Of one connection."""
        super().setup()
        self.watched = _Watched(self.client_address, self.wfile, self)
        self.writer = self.watched

    def handle(self) -> None:
        """Until the client leaves."""
        self.watched.is_error = True
        while self.watched.is_error:
            self.watched.is_error = False
            super().handle()


def main() -> None:
    """Serve until the process is ended."""
    server = TcpFakeServer(("127.0.0.1", int(sys.argv[1])), server_type="redis")
    server.RequestHandlerClass = Handler
    server.serve_forever()


if __name__ == "__main__":
    main()
